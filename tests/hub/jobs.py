# SPDX-License-Identifier: Apache-2.0
"""Jobs of the product against a FakeHub, with limits that make tests quick."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils._blob_job import Job, Options, Step, Tools, free_space
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_parts import Limits
from ansible_collections.tensorless.fleet.plugins.module_utils._hub import Wanted

from tests.hub.server import FakeHub

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


COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "acme/tiny-gguf"

PARTS = QUICK._replace(connections=4, piece_min=64 << 10, piece_max=128 << 10)  # several parts for a small file


def noise(size: int, seed: int = 1) -> bytes:
    return b"GGUF" + random.Random(seed).randbytes(size - 4)


@dataclasses.dataclass
class Bench:
    """One file on a Hub and one cache."""

    hub: FakeHub
    root: Path
    data: bytes
    file: str = "f.gguf"
    repo: str = REPO

    def __post_init__(self) -> None:
        self.sha = hashlib.sha256(self.data).hexdigest()
        self.hub.add(self.repo, COMMIT, self.file, self.data)

    def job(self, limits: Limits = QUICK, size: int | None = -1, sha: str | None = None, **options: Any) -> Job:
        known = len(self.data) if size == -1 else size
        wanted = Wanted(self.repo, COMMIT, self.file, sha or self.sha, known)
        endpoint = options.pop("endpoint", self.hub.url)
        return make_job(self.root, wanted, endpoint, limits, **options)

    def run(self, limits: Limits = QUICK, **options: Any) -> Ran:
        return run_job(self.job(limits, **options))

    @property
    def blob(self) -> Path:
        return self.root / "hub" / f"models--{self.repo.replace('/', '--')}" / "blobs" / self.sha

    @property
    def partial(self) -> Path:
        return self.blob.with_name(self.sha + ".incomplete")

    @property
    def sidecar(self) -> Path:
        return self.blob.with_name(self.sha + ".incomplete.json")

    @property
    def snapshot(self) -> Path:
        return self.blob.parents[1] / "snapshots" / COMMIT / self.file

    def leave_partial(self, data: bytes) -> None:
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        self.partial.write_bytes(data)

    def right(self) -> bool:
        """The file is at its final path with its bytes, linked, and nothing is left beside it."""
        left = sorted(p.name for p in self.blob.parent.iterdir() if p.name.startswith(self.sha))
        return self.blob.read_bytes() == self.data and left == [self.sha] and self.snapshot.read_bytes() == self.data

    def goes_on_from(self, kept: int) -> bool:
        """Without faults the next run ends right, and fetches no byte of those that are kept."""
        self.hub.faults.clear()
        before = self.hub.bytes_sent("cdn")
        self.run()
        return self.right() and self.hub.bytes_sent("cdn") - before == len(self.data) - kept

    def nothing_kept(self) -> bool:
        return not any(os.path.lexists(p) for p in (self.blob, self.partial, self.sidecar, self.snapshot))
