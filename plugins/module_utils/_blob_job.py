# SPDX-License-Identifier: Apache-2.0
"""Brings one verified file into the cache: observe, plan, apply.

Private to the collection; may change at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._blob import (
    BlobError,
    BlobPaths,
    blob_paths,
    cached_state,
    check_link,
    check_names,
    giga,
    link_state,
    make_dirs,
    make_link,
    marker_for,
    marker_holds,
    marker_path,
    same_but_case,
    sync_dir,
    write_marker,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_fetch import Download
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_parts import BLOCK, Limits, Outcome, Status
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_state import (
    Lock,
    Ranges,
    discard,
    load_partial,
    write_sidecar,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._hub import Busy, Resolver, Source, Wanted
from ansible_collections.tensorless.fleet.plugins.module_utils._hub_http import Session, TransportError

AGENT = "tensorless-fleet/0.1"


class Options(NamedTuple):
    """What the caller decides. Paths are absolute."""

    cache: str
    state: str
    endpoint: Optional[str] = None
    token: Optional[str] = None
    verify: str = "marker"
    repair: bool = False
    download: bool = True
    mode: int = 0o644
    dir_mode: int = 0o755
    owner: tuple[int, int] = (-1, -1)
    lock_wait: float = 600.0
    limits: Limits = Limits()


class Tools(NamedTuple):
    """The outside world, so that tests can stand in for it."""

    environ: Mapping[str, str]
    free_space: Callable[[str], int]
    report: Callable[[dict[str, Any]], None]
    now: Callable[[], float] = time.time


class Seen(NamedTuple):
    """How things stand before anything is done."""

    state: str  # cached: yes, partial, no
    wrong_size: Optional[int]
    marked: bool
    link: str
    partial_bytes: int
    mode: Optional[int]
    owner: tuple[int, int]


class Step(NamedTuple):
    """One thing to do. Steps that change nothing on disk (hashing) do not make a run `changed`."""

    do: str  # remove, download, hash, own, link, mark
    text: str
    changes: bool = True


class Job:
    """One file of one revision on this host."""

    def __init__(self, wanted: Wanted, options: Options, tools: Tools) -> None:
        check_names(wanted.repo, wanted.revision, wanted.file, wanted.sha256)
        if wanted.size is not None and wanted.size <= 0:
            raise BlobError(
                f"size_bytes {wanted.size} is not a size: a recipe without one is unpublished.", "bad_option"
            )
        self.wanted = wanted
        # Absolute, whatever the caller gave: a link or marker made from a relative path would lead nowhere.
        self.options = options._replace(cache=os.path.abspath(options.cache), state=os.path.abspath(options.state))
        self.tools = tools
        self.paths: BlobPaths = blob_paths(
            self.options.cache, wanted.repo, wanted.revision, wanted.file, wanted.sha256
        )  # fmt: skip
        self.marker = marker_path(self.options.state, wanted.sha256)
        self.notes: list[str] = []
        self.hashed_bytes = 0
        self.outcome: Optional[Outcome] = None
        self.resumed_from = 0
        self.verified = False
        self._shown = 0.0
        self._seconds: list[tuple[float, int]] = []

    # ----- observe -----

    def observe(self) -> Seen:
        """Looks at names, sizes and times only; reads no byte of the file."""
        paths, size = self.paths, self.wanted.size
        wrong = None
        mode, owner = None, (-1, -1)
        try:
            info = os.stat(paths.blob)
        except FileNotFoundError:
            if os.path.islink(paths.blob):
                raise BlobError(
                    f"{paths.blob} is a link to {os.readlink(paths.blob)}, which does not exist. Restore what it "
                    "points to, or remove the link.",
                    "dangling_blob",
                ) from None
        except NotADirectoryError as error:
            raise BlobError(f"{paths.folder} cannot be a folder: part of it is a file.", "not_a_file") from error
        else:
            if not stat.S_ISREG(info.st_mode):
                raise BlobError(f"{paths.blob} is not a regular file; move it away.", "not_a_file")
            size = info.st_size if size is None else size
            wrong = info.st_size if info.st_size != size else None
            if not os.path.islink(paths.blob):
                mode, owner = stat.S_IMODE(info.st_mode), (info.st_uid, info.st_gid)
        present = "yes" if mode is not None or os.path.exists(paths.blob) else "no"
        state = present if wrong is None and present == "yes" else cached_state(paths, -1)
        partial = 0
        with contextlib.suppress(OSError):
            partial = os.stat(paths.partial).st_size
        return Seen(
            state=state,
            wrong_size=wrong,
            marked=state == "yes" and marker_holds(self.marker, self.wanted.sha256, paths.blob),
            link=link_state(paths),
            partial_bytes=partial,
            mode=mode,
            owner=owner,
        )

    # ----- plan -----

    def plan(self, seen: Seen) -> list[Step]:
        steps = []
        if seen.link == "file":
            raise BlobError(
                f"{self.paths.snapshot} is a file of its own, not a link into the cache's blobs. It is left alone; "
                "move it away and run again.",
                "snapshot_is_file",
            )
        if seen.wrong_size is not None:
            self._refuse_bad(f"has {seen.wrong_size} bytes instead of {self.wanted.size}", seen.marked)
            steps.append(
                Step("remove", f"remove {self.paths.blob}: {seen.wrong_size} bytes instead of {self.wanted.size}")
            )
        if seen.state != "yes" and not self.options.download:
            raise BlobError(
                f"the model is not downloaded: {self.wanted.repo}/{self.wanted.file} is "
                f"{'only partly' if seen.state == 'partial' else 'not'} in {self.options.cache}. Run the pull playbook "
                "or allow the download.",
                "not_cached",
            )
        if seen.state != "yes":
            have = f", continuing {giga(seen.partial_bytes)}" if seen.partial_bytes else ""
            size = giga(self.wanted.size) if self.wanted.size is not None else "size unknown"
            steps.append(
                Step("download", f"download {self.wanted.repo}/{self.wanted.file} ({size}{have}) to {self.paths.blob}")
            )
        elif not seen.marked:
            steps.append(Step("hash", f"hash {self.paths.blob} once", changes=False))
        elif self.options.verify == "always":
            steps.append(Step("hash", f"hash {self.paths.blob} again, as asked", changes=False))
        if seen.state == "yes" and seen.mode is not None and self._differs(seen):
            steps.append(Step("own", f"set mode {self.options.mode:04o} and owner of {self.paths.blob}"))
        if seen.link != "right":
            verb = "replace" if seen.link == "wrong" else "make"
            steps.append(Step("link", f"{verb} the link {self.paths.snapshot} -> {self.paths.link_text}"))
        if not seen.marked:
            steps.append(Step("mark", f"write the marker {self.marker}"))
        return steps

    def _differs(self, seen: Seen) -> bool:
        # More permissions than asked for are another tool's choice; fewer would keep the server from reading.
        return (self.options.mode & 0o444 & ~(seen.mode or 0)) != 0 or any(
            want not in (-1, have) for want, have in zip(self.options.owner, seen.owner)
        )

    def _refuse_bad(self, what: str, ours: bool) -> None:
        if not self.options.repair:
            raise BlobError(
                f"the cached file {self.paths.blob} {what}. It is not used, and not removed, because this run did not "
                "write it. Remove it, or set repair: true to download it anew.",
                "cached_differs",
                ours=ours,
            )

    # ----- apply -----

    def apply(self, seen: Seen, steps: list[Step]) -> list[Step]:
        """Does the steps; returns those that really changed something."""
        done = []
        for step in steps:
            if step.do == "remove":
                os.unlink(self.paths.blob)
            elif step.do == "download":
                self._download()
            elif step.do == "hash":
                done += self._hash_cached()
            elif step.do == "own":
                self._own(self.paths.blob)
            elif step.do == "link":
                make_link(self.paths, self.options.dir_mode, self.options.owner)
            elif step.do == "mark" and not self._mark():
                continue
            if step.changes:
                done.append(step)
        check_link(self.paths)
        self.verified = True
        return done

    def _own(self, path: str) -> None:
        os.chmod(path, self.options.mode)
        if self.options.owner != (-1, -1):
            os.chown(path, *self.options.owner)

    def _mark(self) -> bool:
        try:
            write_marker(self.marker, marker_for(self.wanted.sha256, self.paths.blob))
        except OSError as error:
            self.notes.append(
                f"could not write the marker {self.marker}: {error.strerror}; the file is verified again next time"
            )
            return False
        return True

    def _hash_cached(self) -> list[Step]:
        got = self._hash_file(self.paths.blob)
        if got == self.wanted.sha256:
            return []
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.marker)
        self._refuse_bad(f"has another sha256: want {self.wanted.sha256}, got {got} (sha256 mismatch)", False)
        os.unlink(self.paths.blob)
        self._download()
        return [Step("download", f"replaced {self.paths.blob}, which had sha256 {got}")]

    def _hash_file(self, path: str) -> str:
        digest = hashlib.sha256()
        view = memoryview(bytearray(BLOCK))
        size = os.stat(path).st_size
        position = 0
        with open(path, "rb", buffering=0) as stream:
            while got := stream.readinto(view):
                digest.update(view[:got])
                position += got
                self.hashed_bytes += got
                self._tell("verify", position, size, position)
        return digest.hexdigest()

    # ----- download -----

    def _download(self) -> None:
        """Locks, checks the space, fetches and promotes. Someone else may have finished the file meanwhile."""
        self._hint()
        folder = os.path.dirname(self.paths.blob)
        if self.wanted.size is not None:
            self._check_space(self.wanted.size)
        try:
            make_dirs(folder, self.options.dir_mode, self.options.owner)
        except OSError as error:
            raise BlobError(f"could not make {folder}: {error.strerror}.", "write_failed") from error
        lock = Lock(self.paths.lock, self.options.lock_wait, self.tools.now)
        try:
            lock.acquire(lambda text: self._tell("wait", 0, self.wanted.size or 0, 0, text))
        except OSError as error:
            raise BlobError(f"could not write in {folder}: {error.strerror}.", "write_failed") from error
        try:
            # Nobody may have been waited for: the other one can have finished since the file was looked for.
            if os.path.exists(self.paths.blob):
                self.notes.append(f"downloaded meanwhile by {lock.waited_for or 'another process'}")
                if not marker_holds(self.marker, self.wanted.sha256, self.paths.blob):
                    got = self._hash_file(self.paths.blob)
                    if got != self.wanted.sha256:
                        self._refuse_bad(f"has another sha256: want {self.wanted.sha256}, got {got}", False)
                        os.unlink(self.paths.blob)
                        self._locked(lock)
                return
            self._locked(lock)
        finally:
            note = lock.release()
            if note:
                self.notes.append(note)

    def _locked(self, lock: Lock) -> None:
        resolver = Resolver(self.wanted, self.options.endpoint, self.options.token, self._session, self.tools.now)
        try:
            for attempt in (1, 2):
                if self._once(lock, resolver, last=attempt == 2):
                    return
        except TransportError as error:
            raise BlobError(f"download interrupted: {error}. Run again to resume.", "interrupted") from error
        finally:
            self.notes += [n for n in resolver.notes if n not in self.notes]

    def _session(self) -> Session:
        return Session(AGENT, self.options.limits.part_silence, self.tools.environ)

    def _once(self, lock: Lock, resolver: Resolver, last: bool) -> bool:
        """One go at the whole file. False when it should be tried once more from nothing, over one connection."""
        paths, limits = self.paths, self.options.limits
        size = self.wanted.size
        source = None
        if size is None:
            source = self._source(resolver)
            size = source.size
            self._check_space(size)
        resume = load_partial(paths.partial, paths.sidecar, self.wanted.sha256, size)
        self.notes += resume.notes
        done = resume.done
        if not resume.from_sidecar and os.path.exists(paths.partial) and os.stat(paths.partial).st_size > size:
            self.notes.append("the partial file was longer than the file; starting over")
            done = Ranges()
        self.resumed_from = done.total()
        full = done.total() == size
        if source is None:
            # A complete partial file needs no address: no request is made for it.
            source = Source("", size, None, None, -1) if full else self._source(resolver)
        if last:
            limits = limits._replace(connections=1)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(paths.partial, flags, self.options.mode)
        try:
            if done.total() == 0:
                os.ftruncate(descriptor, 0)
            elif os.fstat(descriptor).st_size > size:
                os.ftruncate(descriptor, size)
            download = Download(
                descriptor,
                paths.sidecar,
                done,
                source,
                resolver,
                self._session,
                limits,
                lock.check,
                self._watch,
            )
            try:
                outcome = download.run()
            except BlobError as error:
                if error.details.pop("discard", False) and self.resumed_from == 0:
                    discard(paths.partial, paths.sidecar)
                raise
            self.outcome = (
                outcome if self.outcome is None else outcome._replace(fetched=self.outcome.fetched + outcome.fetched)
            )
            if outcome.sha256 != self.wanted.sha256:
                return self._mismatch(outcome, full, resume.from_sidecar, last)
            self._promote(descriptor, size, lock)
        finally:
            os.close(descriptor)
        return True

    def _source(self, resolver: Resolver) -> Source:
        """The first answer of the Hub, asked for again while the trouble may pass."""
        limits = self.options.limits
        failures = 0
        while True:
            try:
                return resolver.source()
            except TransportError as error:
                failures += 1
                wait = limits.pause(failures)
                if isinstance(error, Busy) and error.wait is not None:
                    wait = max(wait, error.wait)
                if failures > limits.retries or wait > limits.wait_max:
                    raise
                self._tell("wait", 0, self.wanted.size or 0, 0, f"{error}; again in {wait:.0f} s")
                time.sleep(wait)

    def _mismatch(self, outcome: Outcome, full: bool, from_sidecar: bool, last: bool) -> bool:
        """Right size, wrong bytes: nothing of it is kept. Says whether one more go is worth it."""
        discard(self.paths.partial, self.paths.sidecar)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.marker)
        # A complete partial file of unknown making was never ours; parts and resumption are our doing.
        again = full or from_sidecar or (outcome.parts > 1 and self.options.limits.connections > 1)
        if again and not last:
            self.notes.append(
                f"the partial file had sha256 {outcome.sha256}, not {self.wanted.sha256}; it was removed and the file "
                "is downloaded from the start over one connection"
            )
            return False
        raise BlobError(
            f"sha256 mismatch for {self.wanted.file}: want {self.wanted.sha256}, got {outcome.sha256}"
            + (f" from {outcome.host}" if outcome.host else "")
            + ". The download was deleted. Run again; if it happens again, the upload or the recipe is wrong.",
            "sha256_mismatch",
            want=self.wanted.sha256,
            got=outcome.sha256,
            bytes=outcome.fetched,
            resumed=self.resumed_from > 0,
            parts=outcome.parts,
            host=outcome.host,
        )

    def _promote(self, descriptor: int, size: int, lock: Lock) -> None:
        """The final name appears in one step, for a file that is complete, hashed and synced."""
        lock.check()
        try:
            os.fchmod(descriptor, self.options.mode)
            if self.options.owner != (-1, -1):
                os.fchown(descriptor, *self.options.owner)
        except OSError as error:
            write_sidecar(self.paths.sidecar, self.wanted.sha256, size, Ranges([(0, size)]))  # synced by the download
            raise BlobError(
                f"the file is complete and right, but its mode or owner could not be set: {error.strerror}. "
                f"{self.paths.partial} is kept; give a mode and owner that this file system allows.",
                "write_failed",
            ) from error
        os.fsync(descriptor)
        lock.check()  # that may have taken seconds; where locks do not hold, somebody may have started over meanwhile
        os.replace(self.paths.partial, self.paths.blob)
        discard(self.paths.partial, self.paths.sidecar)
        sync_dir(os.path.dirname(self.paths.blob))

    def _check_space(self, size: int) -> None:
        """Refuses before the first byte when what is still missing does not fit."""
        have = load_partial(self.paths.partial, self.paths.sidecar, self.wanted.sha256, size).done.total()
        place = os.path.dirname(self.paths.blob)  # which may be a link to another disk
        while not os.path.isdir(place):
            place = os.path.dirname(place)
        free = self.tools.free_space(place)
        missing = size - have
        if missing > free:
            raise BlobError(
                f"not enough disk space in {self.options.cache}: {giga(missing)} needed, {giga(free)} free. Free some "
                "space, or choose a cache on a larger disk.",
                "no_space",
                needed=missing,
                free=free,
            )

    def _hint(self) -> None:
        """Files nearby that explain disk space or spare the download. Nothing of another tool is touched."""
        sidecar = self.paths.sidecar
        own = {os.path.basename(p) for p in (self.paths.partial, sidecar, sidecar + ".tmp", self.paths.lock)}
        with contextlib.suppress(OSError):
            for entry in os.scandir(os.path.dirname(self.paths.blob)):
                if entry.name.startswith(self.wanted.sha256 + ".") and entry.name not in own:
                    self.notes.append(f"left there by another tool: {entry.path} ({giga(entry.stat().st_size)})")
        for folder in same_but_case(self.paths):
            other = os.path.join(folder, "blobs", self.wanted.sha256)
            if os.path.exists(other):
                self.notes.append(
                    f"the same file is already in {folder}, whose name differs in upper and lower case only; the Hub "
                    "takes both for one repository"
                )

    # ----- telling -----

    def _watch(self, status: Status) -> None:
        stage = "download" if status.have < status.size else "verify"
        self._tell(stage, status.have, status.size, status.hashed)

    def _tell(self, stage: str, have: int, size: int, hashed: int, note: str = "") -> None:
        """At most two reports a second; rate over the last ten seconds of this run."""
        now = time.monotonic()
        if now - self._shown < 0.5 and have < size:
            return
        self._shown = now
        counted = hashed if stage == "verify" else have
        if self._seconds and counted < self._seconds[-1][1]:
            self._seconds = []
        self._seconds = [s for s in self._seconds if s[0] > now - 10.0] + [(now, counted)]
        span = now - self._seconds[0][0]
        rate = (counted - self._seconds[0][1]) / span if span > 0.2 else 0.0
        left = (size - counted) / rate if rate > 0 else None
        self.tools.report(
            {
                "stage": stage,
                "file": self.wanted.file,
                "sha256": self.wanted.sha256,
                "bytes": counted,
                "size": size,
                "rate": round(rate),
                "seconds_left": None if left is None else round(left),
                "note": note,
                "time": round(self.tools.now(), 1),
            }
        )


def free_space(path: str) -> int:
    """Bytes that this process may still write on the file system of PATH."""
    info = os.statvfs(path)
    # Some network and user-space file systems say 0 of 0: they do not know.
    return info.f_bavail * info.f_frsize if info.f_blocks else sys.maxsize
