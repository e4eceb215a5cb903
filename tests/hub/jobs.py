# SPDX-License-Identifier: Apache-2.0
"""Jobs of the product against a FakeHub, with limits that make tests quick."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils._blob_fetch import Limits
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_job import Job, Options, Step, Tools, free_space
from ansible_collections.tensorless.fleet.plugins.module_utils._hub import Wanted

QUICK = Limits(backoff=0.01, backoff_max=0.05, silence=3.0, part_silence=1.0, sync_every=0.2, tick=0.02)


@dataclasses.dataclass
class Ran:
    """A job that was run, and what it did."""

    job: Job
    state: str
    steps: list[Step]
    changed: bool


def make_job(
    root: Path,
    wanted: Wanted,
    endpoint: str,
    limits: Limits = QUICK,
    environ: dict[str, str] | None = None,
    free: Callable[[str], int] = free_space,
    report: Callable[[dict[str, Any]], None] = lambda _report: None,
    **options: Any,
) -> Job:
    options.setdefault("cache", str(root / "hub"))
    options.setdefault("state", str(root / "state"))
    options.setdefault("lock_wait", 5.0)
    return Job(wanted, Options(endpoint=endpoint, limits=limits, **options), Tools(environ or {}, free, report))


def run_job(job: Job) -> Ran:
    seen = job.observe()
    steps = job.plan(seen)
    done = job.apply(seen, steps)
    return Ran(job, seen.state, done, bool(done))
