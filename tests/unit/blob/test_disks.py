# SPDX-License-Identifier: Apache-2.0
"""Disks that are full, broken, read-only or odd, and folders of the cache that are links."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _blob_fetch
from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_job import free_space

from tests.hub.jobs import COMMIT, PARTS, REPO, Bench, noise


def test_failed_sync_vouches_for_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that lost a write says so once. Syncing again would succeed, and the bytes would not be there."""
    real = os.fdatasync
    calls: list[int] = []

    def once(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    claims: list[int] = []
    write = _blob_fetch.write_sidecar

    def note(path: str, sha256: str, size: int, done: Any) -> None:
        claims.append(len(calls))
        write(path, sha256, size, done)

    monkeypatch.setattr(_blob_fetch.os, "fdatasync", once)
    monkeypatch.setattr(_blob_fetch, "write_sidecar", note)
    bench.hub.rate = 150_000.0
    with pytest.raises(BlobError, match="could not write the partial file: Input/output error"):
        bench.run(PARTS._replace(sync_every=0.05))
    assert max(claims) == 2
    assert len(calls) == 3
    monkeypatch.undo()
    bench.hub.rate = None
    bench.run(PARTS)
    assert bench.right()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_for_the_sidecar_is_no_space(bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(_blob_fetch, "write_sidecar", refuse)
    with pytest.raises(BlobError) as error:
        bench.run()
    assert error.value.reason == "no_space"


def test_lock_without_room_leaves_no_empty_lock(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(BlobError, match="No space left"):
        bench.run()
    assert not Path(str(bench.partial) + ".lock").exists()


def test_file_system_that_does_not_know_its_space(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.statvfs("/")
    blank = os.statvfs_result((plain.f_bsize, plain.f_frsize, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: blank)
    assert free_space("/anywhere") > 10**15


def test_space_is_asked_of_the_disk_of_the_blobs(bench: Bench) -> None:
    elsewhere = bench.root / "disk2"
    elsewhere.mkdir()
    bench.blob.parent.parent.mkdir(parents=True)
    bench.blob.parent.symlink_to(elsewhere)
    asked: list[str] = []

    def free(path: str) -> int:
        asked.append(os.path.realpath(path))
        return 10**12

    bench.run(free=free)
    assert set(asked) == {str(elsewhere)}
    assert (elsewhere / bench.sha).read_bytes() == bench.data


@pytest.mark.parametrize("link", ["hub", "hub/models--acme--tiny-gguf"])
def test_cache_behind_links(bench: Bench, link: str) -> None:
    real = bench.root / "real" / link
    real.mkdir(parents=True)
    (bench.root / link).parent.mkdir(parents=True, exist_ok=True)
    (bench.root / link).symlink_to(real)
    bench.run()
    assert bench.right()
    assert not bench.run().changed


def test_snapshots_that_are_a_link_elsewhere_are_said(bench: Bench) -> None:
    elsewhere = bench.root / "deep" / "er" / "snapshots"
    elsewhere.mkdir(parents=True)
    bench.snapshot.parents[1].parent.mkdir(parents=True)
    bench.snapshot.parents[1].symlink_to(elsewhere)
    for _run in range(2):
        with pytest.raises(BlobError, match="does not lead to") as error:
            bench.run()
        assert error.value.reason == "bad_link"


def test_link_left_by_a_killed_run_is_no_obstacle(bench: Bench) -> None:
    bench.snapshot.parent.mkdir(parents=True)
    (bench.snapshot.parent / f".f.gguf.{os.getpid()}.tmp").symlink_to("x")
    bench.run()
    assert bench.right()
    assert [p.name for p in bench.snapshot.parent.iterdir()] == ["f.gguf"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENAMETOOLONG])
def test_other_troubles_of_links_are_not_blamed_on_the_file_system(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(_target: str, _name: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "symlink", refuse)
    with pytest.raises(BlobError, match=os.strerror(number)) as error:
        bench.run()
    assert error.value.reason == "write_failed"
    assert str(bench.snapshot) in str(error.value)


def test_mode_that_the_file_system_refuses(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fchmod

    def refuse(descriptor: int, mode: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".incomplete"):
            raise OSError(errno.EPERM, "Operation not permitted")
        real(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", refuse)
    with pytest.raises(BlobError, match="complete and right, but its mode or owner could not be set"):
        bench.run()
    monkeypatch.undo()
    before = len(bench.hub.requests())
    bench.run()
    assert bench.right()
    assert len(bench.hub.requests()) == before


@pytest.mark.parametrize("part", ["hub", "hub/models--acme--tiny-gguf", "hub/models--acme--tiny-gguf/blobs"])
def test_file_where_a_folder_should_be(bench: Bench, part: str) -> None:
    place = bench.root / part
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("mine")
    with pytest.raises((BlobError, NotADirectoryError)):
        bench.run()
    assert place.read_text() == "mine"
    assert bench.hub.bytes_sent("cdn") == 0


def test_read_only_cache_with_the_file_is_enough(bench: Bench) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount")
    bench.run()
    (bench.root / "state").rename(bench.root / "state.old")
    hub = str(bench.root / "hub")
    if os.system(f"mount --bind {hub} {hub} 2>/dev/null && mount -o remount,bind,ro {hub} 2>/dev/null"):
        pytest.skip("this machine does not let root mount")
    try:
        ran = bench.run()
        assert [step.do for step in ran.steps] == ["mark"]
        bench.file = "other.gguf"
        bench.hub.add(REPO, COMMIT, "other.gguf", noise(5000, 2))
        bench.data = noise(5000, 2)
        bench.__post_init__()
        with pytest.raises(BlobError, match="Read-only file system") as error:
            bench.run()
        assert error.value.reason == "write_failed"
    finally:
        os.system(f"umount {hub}")


def test_verified_file_that_only_others_may_change_is_enough(bench: Bench) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be somebody else")
    bench.run()
    bench.blob.chmod(0o444)
    for path in [bench.root, *bench.root.parents[:3]]:
        path.chmod(path.stat().st_mode | 0o555)
    os.seteuid(65534)
    try:
        assert not bench.run().changed
        with pytest.raises(BlobError, match="Permission denied") as error:
            bench.run(cache=str(bench.root / "new"))
        assert error.value.reason == "write_failed"
    finally:
        os.seteuid(0)
