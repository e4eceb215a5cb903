# SPDX-License-Identifier: Apache-2.0
"""What the facts of a host with 8 cards cost beside one bare query that takes 0.5 s to start: `make bench-facts`.

Prints both times and their ratio, and exits 1 above 1.3.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from ansible_collections.tensorless.fleet.plugins.module_utils._gpu import read_gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu_cells import OPTIONAL, query
from ansible_collections.tensorless.fleet.plugins.module_utils._host import bounded

SMI = pathlib.Path(__file__).resolve().parents[1] / "simulators" / "files" / "nvidia-smi"
LIMIT = 1.3
ROUNDS = 5


def main() -> int:
    with tempfile.TemporaryDirectory() as root:
        cards = [
            {"uuid": f"GPU-{n:08d}-0-4-8-0", "name": "Tesla P100", "pci_bus_id": f"00000000:{n + 16:02X}:00.0"}
            for n in range(8)
        ]
        module = {"version": "580.105.08", "flavour": "proprietary"}
        state = {"smi": {"delay_s": 0.5}, "loaded": module, "cards": cards}
        path = pathlib.Path(root, "etc/nvidia-sim/state.json")
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(state), encoding="utf-8")
        environ = {**os.environ, "NVIDIA_SIM_ROOT": root}

        def run(argv: Sequence[str]) -> tuple[int, str, str]:
            done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environ)
            return done.returncode, done.stdout, done.stderr

        bare, whole = [], []
        fields = ",".join(query(OPTIONAL))
        for _round in range(ROUNDS):
            start = time.monotonic()
            rc, out, _err = run([str(SMI), f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
            bare.append(time.monotonic() - start)
            if rc != 0 or len(out.splitlines()) != 8:
                print(f"the stand-in failed with status {rc}: {out}", file=sys.stderr)
                return 2
            start = time.monotonic()
            found = read_gpus(bounded(run, 30), str(SMI))
            whole.append(time.monotonic() - start)
            if len(found["cards"]) != 8:
                print(f"the facts hold {len(found['cards'])} cards", file=sys.stderr)
                return 2
    ratio = statistics.median(whole) / statistics.median(bare)
    print(f"one bare query {statistics.median(bare):.3f} s, facts of 8 cards {statistics.median(whole):.3f} s")
    print(f"ratio {ratio:.3f} (limit {LIMIT})")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
