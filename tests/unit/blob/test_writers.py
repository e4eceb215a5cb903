# SPDX-License-Identifier: Apache-2.0
"""Several processes that want one file at once, with locks that hold and with locks that do not."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub import FakeHub
from tests.hub.jobs import COMMIT, Bench, noise

ROOT = Path(__file__).parents[3]
SIZE = 3_000_000


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with FakeHub(rate=1_000_000.0) as hub:
        yield Bench(hub, tmp_path, noise(SIZE))


def start(bench: Bench, count: int) -> list[subprocess.Popen[str]]:
    wanted = {"repo": bench.repo, "revision": COMMIT, "file": bench.file, "sha256": bench.sha, "size": SIZE}
    limits = {"connections": 4, "piece_min": 64 << 10, "piece_max": 256 << 10, "sync_every": 0.2, "tick": 0.02}
    given = {"root": str(bench.root), "wanted": wanted, "endpoint": bench.hub.url, "limits": limits, "lock_wait": 300.0}
    command = [sys.executable, "-m", "tests.hub.fetch", json.dumps(given)]
    return [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(count)]


def ends(processes: list[subprocess.Popen[str]]) -> list[str]:
    """How each ended: `right`, or the reason that it gave."""
    found = []
    for process in processes:
        said = json.loads(process.communicate(timeout=300)[0])
        found.append("right" if process.returncode == 0 else said["reason"])
    return found


def test_one_downloads_and_the_others_wait(bench: Bench) -> None:
    assert ends(start(bench, 4)) == ["right"] * 4
    assert bench.right()
    assert bench.hub.bytes_sent("cdn") == SIZE, "each byte was fetched once"


def test_a_file_that_came_since_it_was_looked_for_is_not_fetched_again(bench: Bench) -> None:
    late = bench.job()
    seen = late.observe()
    bench.run()
    late.apply(seen, late.plan(seen))
    assert bench.right()
    assert bench.hub.bytes_sent("cdn") == SIZE
    assert late.notes == ["downloaded meanwhile by another process"]


def test_without_locks_that_hold_no_wrong_byte_gets_through(bench: Bench) -> None:
    """As on a file system that gives a lock to everybody: it is taken away again and again while three write."""
    lock = Path(f"{bench.partial}.lock")
    processes = start(bench, 3)
    while any(process.poll() is None for process in processes):
        with contextlib.suppress(FileNotFoundError):
            lock.unlink()
        if bench.blob.exists():
            assert bench.blob.read_bytes() == bench.data
        time.sleep(0.15)
    assert set(ends(processes)) <= {"right", "lock_lost"}
    bench.run()
    assert bench.right()
