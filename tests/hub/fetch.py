# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.hub.fetch JSON`: one download in a process of its own, so that it can be killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_parts import Limits
from ansible_collections.tensorless.fleet.plugins.module_utils._hub import Wanted

from tests.hub.jobs import make_job, run_job


def main() -> int:
    given = json.loads(sys.argv[1])
    wanted, limits = Wanted(**given["wanted"]), Limits(**given["limits"])
    lock_wait = given.get("lock_wait", 5.0)
    job = make_job(Path(given["root"]), wanted, given["endpoint"], limits, lock_wait=lock_wait)
    try:
        ran = run_job(job)
    except BlobError as error:
        print(json.dumps({"reason": error.reason, "message": str(error)}))
        return 1
    outcome = ran.job.outcome
    print(json.dumps({"restarts": outcome.restarts if outcome else 0, "resumed": job.resumed_from, "notes": job.notes}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
