# SPDX-License-Identifier: Apache-2.0
"""Ranges, sidecar, lock, space and permissions."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _blob_fetch
from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_parts import Limits
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_state import Lock, Ranges, load_partial
from hypothesis import given
from hypothesis import strategies as st

from tests.hub import FakeHub
from tests.hub.jobs import COMMIT, PARTS, QUICK, REPO, Bench, noise, run_job

ROOT = Path(__file__).parents[3]
SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda p: (min(p), max(p))), max_size=12)


@given(SPANS, st.tuples(st.integers(0, 60), st.integers(0, 60)))
def test_ranges_are_a_set_of_bytes(spans: list[tuple[int, int]], cut: tuple[int, int]) -> None:
    ranges = Ranges(spans)
    plain = {n for a, b in spans for n in range(a, b)}
    assert {n for a, b in ranges.spans() for n in range(a, b)} == plain
    assert ranges.total() == len(plain)
    assert {n for a, b in ranges.gaps(60) for n in range(a, b)} == set(range(60)) - plain
    assert ranges.prefix() == next(n for n in range(62) if n not in plain)
    edges = [edge for span in ranges.spans() for edge in span]
    assert edges == sorted(set(edges))
    left = ranges.without(min(cut), max(cut))
    assert {n for a, b in left.spans() for n in range(a, b)} == plain - set(range(min(cut), max(cut)))


def test_sidecar_that_claims_a_hole_is_caught(tmp_path: Path) -> None:
    partial, sidecar = tmp_path / "p", tmp_path / "p.json"
    size = 1 << 20
    with partial.open("wb") as stream:
        stream.write(b"x" * (256 << 10))
        stream.truncate(size - (128 << 10))
    sidecar.write_text(json.dumps({"version": 1, "sha256": "a" * 64, "size": size, "done": [[0, size]]}))
    resume = load_partial(str(partial), str(sidecar), "a" * 64, size)
    if os.stat(partial).st_blocks * 512 > (512 << 10):
        pytest.skip("this file system has no holes")
    assert resume.done.spans() == [(0, 256 << 10)]
    assert "not there" in resume.notes[0]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version":1,"sha256":"x","size":9,"done":[[0,99]]}', "\x00"])
def test_broken_sidecar_counts_for_nothing(tmp_path: Path, text: str) -> None:
    partial, sidecar = tmp_path / "p", tmp_path / "p.json"
    partial.write_bytes(b"x" * 9)
    sidecar.write_text(text)
    assert load_partial(str(partial), str(sidecar), "x", 9).done.total() == 0


def test_data_is_synced_before_the_sidecar_names_it(tmp_path: Path) -> None:
    """By the order of the system calls: every write of a named range is followed by a sync before the rename."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed (apt-get install strace)")
    data = noise(6_000_000)
    trace = tmp_path / "trace"
    with FakeHub(rate=1_500_000.0) as hub:
        entry = hub.add(REPO, COMMIT, "f.gguf", data)
        wanted = {"repo": REPO, "revision": COMMIT, "file": "f.gguf", "sha256": entry.sha256, "size": entry.size}
        limits = {"connections": 4, "piece_min": 256 << 10, "sync_every": 0.2}
        work = json.dumps({"root": str(tmp_path), "wanted": wanted, "endpoint": hub.url, "limits": limits})
        command = ["strace", "-f", "-y", "-s", "4000", "-o", str(trace), "-e",
                   "trace=pwrite64,fdatasync,fsync,write,rename,renameat,renameat2,openat",
                   sys.executable, "-m", "tests.hub.fetch", work]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if "PTRACE" in done.stderr or "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stderr
    claims = check_order(trace.read_text(errors="replace"), ".incomplete")
    assert claims >= 3


def check_order(text: str, name: str) -> int:
    """Walks a trace; returns how many sidecars were put in place, each naming synced bytes only."""
    started: dict[str, str] = {}
    written: dict[int, tuple[int, int]] = {}
    synced = Ranges()
    pending: dict[str, set[int]] = {}
    claim: list[tuple[int, int]] = []
    count = number = 0
    for line in text.splitlines():
        pid, _space, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            started[pid] = call[: -len("<unfinished ...>")].rstrip()
            if call.startswith("fdatasync") and f"{name}>" in call:
                pending[pid] = set(written)  # what was written before the sync began
            continue
        if call.startswith("<..."):
            call = started.pop(pid, "") + call.partition("resumed>")[2]
        if match := re.match(r"pwrite64\(\d+<[^>]*" + re.escape(name) + r">.*, (\d+), (\d+)\) *= (\d+)", call):
            start, length = int(match[2]), int(match[3])
            number += 1
            written[number] = (start, start + length)
        elif re.match(r"f(data)?sync\(\d+<[^>]*" + re.escape(name) + r">\)? *.*= 0", call):
            for key in pending.pop(pid, set(written)):
                synced.add(*written[key])
        elif match := re.search(r'write\(\d+<[^>]*\.json\.tmp>, "(.*)", \d+\)', call):
            claim = [tuple(span) for span in json.loads(match[1].replace('\\"', '"'))["done"]]
        elif call.startswith("rename") and ".json.tmp" in call:
            count += 1
            missing = Ranges(claim)
            for start, end in synced.spans():
                missing = missing.without(start, end)
            assert missing.total() == 0, f"sidecar {count} names bytes that were not synced: {missing.spans()}"
            claim = []
        elif call.startswith("rename") and f'{name}"' in call:
            assert synced.prefix() == synced.total()
    return count


def test_order_check_catches_a_claim_that_comes_too_early() -> None:
    write = '1 pwrite64(3</x/a.incomplete>, "...", 10, 0) = 10\n'
    named = '1 write(4</x/a.incomplete.json.tmp>, "{\\"done\\":[[0,10]]}", 20) = 20\n'
    named += '1 rename("/x/a.incomplete.json.tmp", "b") = 0\n'
    sync = "1 fdatasync(3</x/a.incomplete>) = 0\n"
    assert check_order(write + sync + named, ".incomplete") == 1
    with pytest.raises(AssertionError):
        check_order(write + named + sync, ".incomplete")


def test_full_disk_stops_and_keeps_what_came(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    room = [300_000]

    def limited(descriptor: int, data: memoryview, offset: int) -> int:
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    bench.hub.rate = 400_000.0
    monkeypatch.setattr(_blob_fetch.os, "pwrite", limited)
    with pytest.raises(BlobError) as error:
        bench.run(PARTS)
    assert error.value.reason == "no_space"
    assert not bench.blob.exists()
    monkeypatch.undo()
    ran = bench.run(PARTS)
    assert bench.right()
    assert ran.job.resumed_from > 0


def test_space_is_checked_for_what_is_missing(bench: Bench) -> None:
    size = len(bench.data)
    bench.leave_partial(bench.data[: size - 1000])
    with pytest.raises(BlobError) as error:
        bench.run(free=lambda _path: 999)
    assert error.value.reason == "no_space"
    assert bench.hub.requests() == []
    bench.run(free=lambda _path: 1000)
    assert bench.right()


def test_two_writers_of_one_file_make_one_download(bench: Bench) -> None:
    bench.hub.rate = 300_000.0
    errors: list[BaseException] = []

    def work() -> None:
        try:
            bench.run(PARTS, lock_wait=30.0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert bench.right()
    assert bench.hub.bytes_sent("cdn") <= 1.2 * len(bench.data)


def test_writer_that_lost_its_lock_stops(bench: Bench) -> None:
    """Where locks do not work, the owner named in the lock decides, at every note and before the final name."""
    bench.hub.rate = 100_000.0
    lock = Path(str(bench.partial) + ".lock")
    reasons: list[str] = []

    def work() -> None:
        try:
            bench.run(PARTS)
        except BlobError as error:
            reasons.append(error.reason)

    thread = threading.Thread(target=work)
    thread.start()
    while not bench.sidecar.exists():
        thread.join(0.01)
    lock.write_text(json.dumps({"token": "another", "pid": 1}))
    thread.join(20)
    assert reasons == ["lock_lost"]
    assert not bench.blob.exists()
    assert json.loads(lock.read_text())["token"] == "another"


def test_lock_excludes_and_comes_back(tmp_path: Path) -> None:
    path = str(tmp_path / "l")
    first, second = Lock(path, 5.0), Lock(path, 0.1)
    first.acquire()
    with pytest.raises(BlobError) as error:
        second.acquire()
    assert error.value.reason == "locked"
    assert first.release() is None
    second.acquire()
    second.check()
    with pytest.raises(BlobError):
        first.check()
    assert first.release() is None  # not its own any more: left alone
    second.check()


def test_blob_that_links_into_a_shared_store(bench: Bench) -> None:
    store = bench.root / "store" / "x"
    store.parent.mkdir()
    store.write_bytes(bench.data)
    bench.blob.parent.mkdir(parents=True)
    bench.blob.symlink_to(store)
    ran = bench.run()
    assert {step.do for step in ran.steps} == {"link", "mark"}
    assert bench.snapshot.read_bytes() == bench.data
    assert bench.blob.is_symlink()
    assert not bench.run().changed
    store.unlink()
    with pytest.raises(BlobError, match="does not exist"):
        bench.run()


def test_file_with_other_bytes_is_kept_unless_repair(bench: Bench) -> None:
    bench.blob.parent.mkdir(parents=True)
    bench.blob.write_bytes(bench.data[:-1] + b"?")
    with pytest.raises(BlobError) as error:
        bench.run()
    assert "sha256 mismatch" in str(error.value)
    assert "repair: true" in str(error.value)
    assert bench.blob.exists()
    bench.run(repair=True)
    assert bench.right()


@pytest.mark.parametrize("repair", [False, True])
def test_file_of_another_size(bench: Bench, repair: bool) -> None:
    bench.blob.parent.mkdir(parents=True)
    bench.blob.write_bytes(b"short")
    if repair:
        bench.run(repair=True)
        assert bench.right()
    else:
        with pytest.raises(BlobError, match="5 bytes instead"):
            bench.run()
        assert bench.blob.read_bytes() == b"short"


def test_no_op_reads_no_byte(tmp_path: Path, hub: FakeHub) -> None:
    """A verified file of 13 GB (sparse) costs nothing: its data is not opened."""
    bench = Bench(hub, tmp_path, noise(1000))
    bench.run()
    os.truncate(bench.blob, 13_000_000_000)
    info = os.stat(bench.blob)
    marker = next((tmp_path / "state" / "verified").iterdir())
    marker.write_text(json.dumps({"sha256": bench.sha, "size": info.st_size, "mtime_ns": info.st_mtime_ns,
                                  "path": str(bench.blob)}))  # fmt: skip
    job = bench.job(size=13_000_000_000)
    opened: list[str] = []
    active = [True]
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if active[0] and event == "open" else None)
    try:
        ran = run_job(job)
    finally:
        active[0] = False
    assert not ran.changed
    assert not [path for path in opened if bench.sha in path and not path.endswith(".json")]


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_modes_do_not_depend_on_umask(bench: Bench, umask: int) -> None:
    old = os.umask(umask)
    try:
        bench.run()
    finally:
        os.umask(old)
    assert bench.blob.stat().st_mode & 0o777 == 0o644
    folders = [p for p in (bench.root / "hub").rglob("*") if p.is_dir() and not p.is_symlink()]
    assert {p.stat().st_mode & 0o777 for p in [bench.root / "hub", *folders]} == {0o755}
    marker = next((bench.root / "state" / "verified").iterdir())
    assert marker.stat().st_mode & 0o777 == 0o644


def test_marker_that_cannot_be_written_is_said(bench: Bench) -> None:
    (bench.root / "state").write_text("a file")
    ran = bench.run()
    assert bench.right()
    assert any("verified again next time" in note for note in ran.job.notes)
    again = bench.run()
    assert not again.changed
    assert again.job.hashed_bytes == len(bench.data)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    size = 150_000_000
    # VmHWM, because ru_maxrss begins with the parent's.
    script = (
        "import re, sys; from tests.hub.fetch import main; status = main(); "
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]); sys.exit(status)"
    )
    source = tmp_path / "f"
    with source.open("wb") as stream:
        stream.write(b"GGUF")
        stream.truncate(size)
    with FakeHub() as hub:
        entry = hub.add(REPO, COMMIT, "f.gguf", source)
        wanted = {"repo": REPO, "revision": COMMIT, "file": "f.gguf", "sha256": entry.sha256, "size": size}
        work = json.dumps({"root": str(tmp_path), "wanted": wanted, "endpoint": hub.url, "limits": {"connections": 16}})
        done = subprocess.run(
            [sys.executable, "-c", script, work], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) <= 100_000


def test_quick_limits_are_only_for_tests() -> None:
    """The defaults are those of the documentation."""
    limits = Limits()
    assert (limits.silence, limits.part_silence, limits.floor, limits.window) == (120.0, 30.0, 64 << 10, 120.0)
    assert limits != QUICK
