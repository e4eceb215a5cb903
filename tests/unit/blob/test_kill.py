# SPDX-License-Identifier: Apache-2.0
"""Downloads killed at any moment and resumed on a server that behaves badly: the bytes are right in the end."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hub import FakeHub, Request, fetched_twice
from tests.hub.jobs import COMMIT, REPO, noise

ROOT = Path(__file__).parents[3]
FAULTS: list[dict[str, Any]] = [
    {},
    {"ignore_range": True, "times": 1},
    {"cut_after": 300_000, "times": 6},
    {"headers": {"ETag": '"' + "d" * 64 + '"'}},
    {"status": 503, "times": 4},
    {"stall_after": 200_000, "times": 2},
    {"reset": True, "cut_after": 500_000, "times": 3},
]


def one(folder: Path, size: int, rate: float, seed: int) -> tuple[int, int, bool]:
    """A download that is killed once and run again. Returns (bytes fetched twice, size, server forced a restart)."""
    chance = random.Random(seed)
    data = noise(size, seed)
    sha = hashlib.sha256(data).hexdigest()
    final = folder / "hub" / f"models--{REPO.replace('/', '--')}" / "blobs" / sha
    wrong: list[str] = []
    over = threading.Event()

    def watch() -> None:
        """Whatever is at the final path is the whole file."""
        while not over.wait(0.02):
            if final.exists() and final.stat().st_size != size:
                wrong.append(f"{final.stat().st_size} bytes at the final path")

    with FakeHub(rate=rate / 8) as hub:
        hub.add(REPO, COMMIT, "f.gguf", data, sha256=sha)
        wanted = {"repo": REPO, "revision": COMMIT, "file": "f.gguf", "sha256": sha, "size": size}
        limits = {"backoff": 0.05, "backoff_max": 0.2, "part_silence": 1.5, "silence": 20.0, "piece_min": 1 << 20}
        given = {"root": str(folder), "wanted": wanted, "endpoint": hub.url, "limits": limits}
        command = [sys.executable, "-m", "tests.hub.fetch", json.dumps(given)]
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            hub.faults[:] = []
            hub.fault(**chance.choice(FAULTS))
            first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
            while hub.bytes_sent("cdn") == 0 and first.poll() is None:
                time.sleep(0.005)
            time.sleep(chance.uniform(0.0, 1.1 * size / rate))
            first.kill()
            first.wait()
            assert not final.exists() or final.read_bytes() == data
            hub.faults[:] = []
            hub.fault(**chance.choice(FAULTS))
            second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        finally:
            over.set()
            watcher.join()
        assert second.returncode == 0, second.stdout + second.stderr
        assert wrong == []
        assert final.read_bytes() == data
        assert sorted(p.name for p in final.parent.iterdir()) == [sha]
        log = hub.requests("cdn", "GET")
    # A server that ignores ranges forces a restart; what came before it is not our waste.
    restart = max((n for n, r in enumerate(log) if r.status == 200 and r.sent > size // 2), default=-1)
    return fetched_twice(log[max(restart, 0) :], size), size, restart >= 0


def many(tmp_path: Path, count: int, size: int, rate: float, workers: int) -> None:
    def work(seed: int) -> tuple[int, int, bool]:
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            return one(folder, size, rate, seed)
        finally:
            subprocess.run(["rm", "-rf", str(folder)], check=True)

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(work, range(count)))
    twice = sum(result[0] for result in results)
    total = sum(result[1] for result in results)
    restarts = sum(result[2] for result in results)
    print(f"{count} downloads of {size} bytes, killed once each: {100 * twice / total:.2f} % of the bytes came twice, "
          f"{restarts} restarts forced by the server")  # fmt: skip
    assert twice <= 0.05 * total


@pytest.mark.serial
def test_killed_downloads_resume_right(tmp_path: Path) -> None:
    many(tmp_path, count=20, size=200_000_000, rate=20_000_000.0, workers=4)


@pytest.mark.soak
def test_soak_killed_downloads_resume_right(tmp_path: Path) -> None:
    if os.environ.get("TENSORLESS_SOAK") != "1":
        pytest.skip("300 downloads of 200 MB: run by `make soak` (TENSORLESS_SOAK=1)")
    many(tmp_path, count=300, size=200_000_000, rate=40_000_000.0, workers=2)


def test_waste_is_counted_from_the_log() -> None:
    def sent(start: int, count: int) -> Request:
        return Request(0, "cdn", "GET", "", "", [], 0.0, 0, status=206, start=start, sent=count)

    assert fetched_twice([sent(0, 10), sent(10, 10)], 20) == 0
    assert fetched_twice([sent(0, 10), sent(5, 15), sent(5, 5)], 20) == 10
