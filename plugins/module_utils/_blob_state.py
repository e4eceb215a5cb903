# SPDX-License-Identifier: Apache-2.0
"""What of a partial file is on disk: ranges, the sidecar that names them, and the lock on both.

Private to the collection; may change at any time.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError, write_file

VERSION = 1


class Ranges:
    """A set of bytes as sorted, disjoint half-open spans."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in spans:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        if end <= start:
            return
        low = bisect.bisect_left(self._ends, start)
        high = bisect.bisect_right(self._starts, end)
        if low < high:
            start = min(start, self._starts[low])
            end = max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]

    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends))

    def total(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def prefix(self) -> int:
        """How far the bytes reach from the start of the file without a gap."""
        return self._ends[0] if self._starts and self._starts[0] == 0 else 0

    def gaps(self, size: int) -> list[tuple[int, int]]:
        found = []
        position = 0
        for start, end in zip(self._starts, self._ends):
            if start > position:
                found.append((position, min(start, size)))
            position = end
            if position >= size:
                break
        if position < size:
            found.append((position, size))
        return found

    def without(self, start: int, end: int) -> Ranges:
        """The same set less one span."""
        kept: list[tuple[int, int]] = []
        for a, b in self.spans():
            kept += [(a, min(b, start)), (max(a, end), b)]
        return Ranges((a, b) for a, b in kept if a < b)


class Resume(NamedTuple):
    """What an interrupted download left: ranges to keep, and why others were thrown away."""

    done: Ranges
    from_sidecar: bool
    notes: list[str]


def write_sidecar(path: str, sha256: str, size: int, done: Ranges) -> None:
    """Names the bytes that have reached the disk. The caller has synced them before."""
    value = {"version": VERSION, "sha256": sha256, "size": size, "done": done.spans()}
    # One writer only, so one temporary name: what a kill leaves there, the next run overwrites and removes.
    write_file(path, json.dumps(value, separators=(",", ":")).encode(), 0o600, path + ".tmp")


def load_partial(partial: str, sidecar: str, sha256: str, size: int) -> Resume:
    """Decides what of PARTIAL can be built upon. Every kept byte is still hashed before the file is trusted.

    Without a sidecar the file is what other tools leave: a prefix. With one, only what it names counts, less the
    holes that the file system shows in it.
    """
    try:
        length = os.stat(partial).st_size
    except FileNotFoundError:
        return Resume(Ranges(), False, [])
    try:
        with open(sidecar, encoding="utf-8") as stream:
            text = stream.read(1 << 20)
    except FileNotFoundError:
        return Resume(Ranges([(0, min(length, size))]), False, [])
    done = _parse(text, sha256, size)
    if done is None:
        return Resume(Ranges(), False, ["the notes beside the partial file belong to another file; starting over"])
    notes = []
    real = Ranges((a, min(b, length)) for a, b in done.spans())
    for start, end in _holes(partial, length):
        real = real.without(start, end)
    lost = done.total() - real.total()
    if lost:
        notes.append(f"{lost} bytes that the partial file should hold are not there; they are fetched again")
    return Resume(real, True, notes)


def _parse(text: str, sha256: str, size: int) -> Optional[Ranges]:
    try:
        value = json.loads(text)
        if (value["version"], value["sha256"], value["size"]) != (VERSION, sha256, size):
            return None
        spans = [(int(a), int(b)) for a, b in value["done"]]
    except (ValueError, TypeError, KeyError):
        return None
    if any(a < 0 or b > size or a >= b for a, b in spans):
        return None
    return Ranges(spans)


def _holes(path: str, length: int) -> list[tuple[int, int]]:
    """Spans of the file without data on disk, where the file system can tell."""
    holes = []
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        position = 0
        while position < length:
            hole = os.lseek(descriptor, position, os.SEEK_HOLE)
            if hole >= length:
                break
            try:
                position = os.lseek(descriptor, hole, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                position = length
            holes.append((hole, position))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)
    return holes


def discard(partial: str, sidecar: str) -> None:
    """Payload and sidecar go together; the payload first, so that no sidecar is ever lost before it."""
    for path in (partial, sidecar, sidecar + ".tmp"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


# ----- one writer at a time -----


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            return stream.read(200).strip()
    except OSError:
        return ""


def this_host() -> str:
    """Names this boot of this machine and this process namespace: where a pid means something."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{_read('/proc/sys/kernel/random/boot_id')}/{namespace}"


def started(pid: int) -> str:
    """When a process began, in the kernel's ticks: tells a reused pid from the owner. Empty when it is gone."""
    line = ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
        line = stream.read()
    fields = line.rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


class Lock:
    """One writer per partial file, by a file made with O_EXCL: works where flock lies or is missing.

    The owner is named in the file. A dead owner on this host and boot is replaced; one on another host never is.
    `check` finds out when the lock went to somebody else all the same.
    """

    def __init__(
        self,
        path: str,
        limit: float,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.path = path
        self._limit = limit
        self._clock = clock
        self._sleep = sleep
        self.token = secrets.token_hex(16)
        self.waited_for: Optional[str] = None

    def acquire(self, waiting: Callable[[str], None] = lambda _text: None) -> None:
        began = self._clock()
        while not self._try():
            owner = self._owner()
            if owner is None:
                continue
            if self._dead(owner):
                self._take_away(owner)
                continue
            text = self._describe(owner)
            self.waited_for = text
            if self._clock() - began >= self._limit:
                raise BlobError(
                    f"another download of this file is at work: {text}. Waited {self._limit:.0f} s. Let it finish and "
                    f"run again; if it is certain that it is gone, remove {self.path}.",
                    "locked",
                    owner=text,
                )
            waiting(text)
            self._sleep(min(2.0, max(0.05, self._limit / 10)))

    def check(self) -> None:
        """Raises unless the lock is still ours."""
        owner = self._owner()
        if owner is None or owner.get("token") != self.token:
            raise BlobError(
                "another download of this file has taken over (its lock was removed or replaced). This one stops; "
                "nothing of it is lost.",
                "lock_lost",
            )

    def release(self) -> Optional[str]:
        """Gives the lock back; returns a note where that failed."""
        try:
            self.check()
            os.unlink(self.path)
        except BlobError:
            return None
        except OSError as error:
            return f"could not remove {self.path}: {error.strerror}"
        return None

    def _try(self) -> bool:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.path, flags, 0o644)
        except FileExistsError:
            return False
        value = {
            "token": self.token,
            "pid": os.getpid(),
            "started": started(os.getpid()),
            "boot": this_host(),
            "host": socket.gethostname(),
            "machine": _machine(),
            "since": int(self._clock()),
        }
        try:
            os.fchmod(descriptor, 0o644)
            os.write(descriptor, json.dumps(value).encode())
        except OSError:  # no space: an empty lock would hold up everybody
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            raise
        finally:
            os.close(descriptor)
        return True

    def _owner(self) -> Optional[dict[str, Any]]:
        """Who holds the lock; None when nobody does. A file just made may still be empty."""
        for _attempt in range(20):
            try:
                with open(self.path, encoding="utf-8") as stream:
                    value = json.loads(stream.read(4096))
                if isinstance(value, dict):
                    return value
            except FileNotFoundError:
                return None
            except ValueError:
                pass
            self._sleep(0.05)
        try:
            age = self._clock() - os.stat(self.path).st_mtime
        except FileNotFoundError:
            return None
        # Its maker died between making and writing it, an instant; after a minute nobody can still be there.
        return {"token": None, "unreadable": True, "age": age}

    @staticmethod
    def _dead(owner: dict[str, Any]) -> bool:
        if owner.get("unreadable"):
            return bool(owner["age"] > 60)
        same = str(owner.get("boot", "")).partition("/")[0] == this_host().partition("/")[0]
        if not same:
            # This machine under an earlier boot: its processes are gone. Another machine: nobody here can know.
            return bool(_machine()) and owner.get("machine") == _machine() and owner.get("host") == socket.gethostname()
        if owner.get("boot") != this_host():
            return False
        pid = owner.get("pid")
        return not isinstance(pid, int) or started(pid) != owner.get("started")

    def _take_away(self, owner: dict[str, Any]) -> None:
        """Removes a dead owner's lock. Renaming first makes sure that it is that one and not a new one."""
        aside = f"{self.path}.{self.token}"
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        try:
            with open(aside, encoding="utf-8") as stream:
                text = stream.read(4096)
            token = json.loads(text).get("token") if text else None
        except (OSError, ValueError, AttributeError):
            token = None
        if token != owner.get("token"):
            with contextlib.suppress(OSError):
                os.link(aside, self.path)
        os.unlink(aside)

    def _describe(self, owner: dict[str, Any]) -> str:
        if owner.get("unreadable"):
            return f"owner unknown, lock file {owner['age']:.0f} s old"
        age = max(0, int(self._clock()) - int(owner.get("since", 0)))
        return f"process {owner.get('pid')} on {owner.get('host')}, for {age // 60} min {age % 60} s"


def _machine() -> str:
    return _read("/etc/machine-id")
