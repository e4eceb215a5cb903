# SPDX-License-Identifier: Apache-2.0
"""Leases: one holder a card, and none that outlives its process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _lease
from ansible_collections.tensorless.fleet.plugins.module_utils._bench import BenchError
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_run import Bench, Request

from tests.unit.bench.fakellama import Answer, FakeLlama, frames

CARD = "GPU-00000001-1111-2222-3333-000000000001"

HOLDER = """
import sys, time
from ansible_collections.tensorless.fleet.plugins.module_utils import _lease
with _lease.held(sys.argv[1], "somebody", "a sweep", float(sys.argv[3]), sys.argv[2]):
    print("held", flush=True)
    time.sleep(float(sys.argv[4]))
"""


def holder(directory: Path, wait: float = 0.0, hold: float = 60.0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, CARD, str(directory), str(wait), str(hold)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_RL_006_a_second_holder_is_told_who_and_since_when(tmp_path: Path) -> None:
    first = holder(tmp_path)
    try:
        assert line(first) == "held"
        with pytest.raises(_lease.LeaseHeld, match=rf"leased by somebody \(pid {first.pid}\) since 20.* for: a sweep"):
            _lease.acquire(CARD, "me", "bench", str(tmp_path))
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_RL_008_a_signal_gives_the_card_back(tmp_path: Path, number: int) -> None:
    first = holder(tmp_path)
    assert line(first) == "held"
    first.send_signal(number)
    first.wait(10)
    assert not (tmp_path / CARD).exists()


def test_RL_007_after_kill_9_nobody_obeys_the_lease_and_it_is_said(tmp_path: Path) -> None:
    first = holder(tmp_path)
    assert line(first) == "held"
    first.kill()
    first.wait()
    assert (tmp_path / CARD).exists()
    assert _lease.read(CARD, str(tmp_path)) is None
    lease = _lease.acquire(CARD, "me", "bench", str(tmp_path))
    assert lease["took_over"]["pid"] == first.pid
    _lease.release(lease, str(tmp_path))
    assert not (tmp_path / CARD).exists()


@pytest.mark.parametrize(
    "change",
    [{"start_time": "1"}, {"boot_id": "before"}, {"pid": 2**22 + 1}, {"pid": "x"}],
    ids=lambda c: next(iter(c)),
)
def test_RL_007_pid_start_time_and_boot_must_all_agree(tmp_path: Path, change: dict[str, Any]) -> None:
    lease = _lease.acquire(CARD, "me", "bench", str(tmp_path))
    (tmp_path / CARD).write_text(json.dumps({**lease, **change}))
    assert _lease.read(CARD, str(tmp_path)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_a_broken_lease_file_binds_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / CARD).write_text(text)
    assert _lease.acquire(CARD, "me", "bench", str(tmp_path))["pid"] == os.getpid()


def test_of_many_at_once_one_holds(tmp_path: Path) -> None:
    (tmp_path / CARD).write_text(json.dumps({"pid": 2**22 + 1}))  # a dead one to be taken over, for the race in it
    many = [holder(tmp_path, hold=2.0) for _ in range(6)]
    for process in many:
        process.wait(30)
    assert sorted(process.returncode for process in many) == [0, 1, 1, 1, 1, 1]


def test_who_waits_gets_the_card_after_it_is_given_back(tmp_path: Path) -> None:
    first = holder(tmp_path, hold=1.0)
    assert line(first) == "held"
    second = holder(tmp_path, wait=30.0, hold=0.0)
    assert line(second) == "held"
    assert first.wait(10) == 0 and second.wait(10) == 0


@pytest.mark.parametrize("uuid", ["", "../etc/passwd", "GPU-1/2", "GPU 1"])
def test_what_is_no_uuid_is_no_file_name(tmp_path: Path, uuid: str) -> None:
    with pytest.raises(ValueError, match="no card UUID"):
        _lease.acquire(uuid, "me", "bench", str(tmp_path))


def test_a_name_with_parentheses_does_not_hide_the_start_time(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = " ".join(["S", *[str(n) for n in range(4, 25)]])
    (tmp_path / "7" / "stat").write_text(f"7 (a) b (c) {fields}")
    assert _lease.start_time(7, str(tmp_path)) == "22"


def bench(port: int, directory: Path, **options: Any) -> Bench:
    request = Request("m", port=port, card_uuid=CARD, lease_dir=str(directory), runs=1, tokens=16, **options)
    return Bench(request, lambda _argv: (127, "", ""))


def test_two_benches_of_one_card_never_overlap(tmp_path: Path) -> None:
    first = holder(tmp_path, hold=1.5)
    assert line(first) == "held"
    with FakeLlama([Answer(frames(8)), Answer(frames(16))]) as server:
        for mode in ("refuse", "label"):
            with pytest.raises(BenchError, match=rf"pid {first.pid}"):
                bench(server.port, tmp_path, on_busy=mode, wait_s=0.0).measure()
        assert server.requests == []
        before = time.monotonic()
        result = bench(server.port, tmp_path, on_busy="label", wait_s=30.0).measure()
    assert time.monotonic() - before > 0.2
    assert result["lease"]["pid"] == os.getpid()
    assert not (tmp_path / CARD).exists()


def test_without_a_card_there_is_no_lease_and_the_result_says_so(tmp_path: Path) -> None:
    with FakeLlama([Answer(frames(8)), Answer(frames(16))]) as server:
        request = Request("m", port=server.port, runs=1, tokens=16, on_busy="label", lease_dir=str(tmp_path))
        assert Bench(request, lambda _argv: (127, "", "")).measure()["lease"] == "none"
    assert list(tmp_path.iterdir()) == []
