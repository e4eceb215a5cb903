# SPDX-License-Identifier: Apache-2.0
"""One holder per card at a time. Private to the collection: it may change at any time.

A lease is a small file named after the card's UUID. It counts only while its process lives: pid, the start time of
that pid and the boot it was written in must all agree, so a lease after kill -9 or a reboot binds nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, Callable, Optional

LEASE_DIR = "/run/tensorless/lease"


class LeaseHeld(Exception):
    """Somebody living holds the card."""

    def __init__(self, uuid: str, holder: dict[str, Any]) -> None:
        self.holder = holder
        super().__init__(
            f"card {uuid} is leased by {holder.get('owner')} (pid {holder.get('pid')}) "
            f"since {holder.get('since')} for: {holder.get('purpose')}"
        )


def start_time(pid: int, proc: str = "/proc") -> Optional[str]:
    """Field 22 of /proc/PID/stat, or None where the process is gone or only waits to be buried."""
    try:
        with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as handle:
            # The name stands in parentheses and may hold spaces and parentheses itself.
            fields = handle.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def boot_id(proc: str = "/proc") -> str:
    try:
        with open(f"{proc}/sys/kernel/random/boot_id", encoding="ascii") as handle:
            return handle.read().strip()
    except OSError:
        return ""


def read(uuid: str, directory: str = LEASE_DIR) -> Optional[dict[str, Any]]:
    """The lease of a card whose holder lives; None where there is none that counts."""
    holder = _load(os.path.join(directory, _name(uuid)))
    return holder if holder is not None and alive(holder) else None


def alive(holder: dict[str, Any]) -> bool:
    """Whether the process that wrote this lease is still that process."""
    try:
        pid = int(holder["pid"])
    except (KeyError, TypeError, ValueError):
        return False
    return holder.get("boot_id") == boot_id() and start_time(pid) == holder.get("start_time")


def _name(uuid: str) -> str:
    if not uuid or any(c not in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-" for c in uuid):
        raise ValueError(f"{uuid!r} is no card UUID: expected GPU- and hexadecimal digits")
    return uuid


def _load(path: str) -> Optional[dict[str, Any]]:
    try:
        with open(path, encoding="utf-8") as handle:
            found = json.load(handle)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Only for the moment of looking and writing; the kernel drops it with the process."""
    os.makedirs(directory, mode=0o755, exist_ok=True)
    handle = os.open(os.path.join(directory, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def acquire(uuid: str, owner: str, purpose: str, directory: str = LEASE_DIR) -> dict[str, Any]:
    """Take the card or raise LeaseHeld. The result says whose dead lease was taken over, if one was."""
    path = os.path.join(directory, _name(uuid))
    mine = {
        "uuid": uuid,
        "pid": os.getpid(),
        "start_time": start_time(os.getpid()),
        "boot_id": boot_id(),
        "owner": owner,
        "purpose": purpose,
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    with _locked(directory):
        found = _load(path)
        if found is not None and alive(found) and found.get("pid") != mine["pid"]:
            raise LeaseHeld(uuid, found)
        draft = f"{path}.{os.getpid()}"
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(mine, out)
        os.replace(draft, path)
    return {**mine, "took_over": found}


def release(lease: dict[str, Any], directory: str = LEASE_DIR) -> None:
    """Give the card back, unless somebody else has taken it meanwhile."""
    path = os.path.join(directory, _name(str(lease["uuid"])))
    with _locked(directory):
        found = _load(path)
        if found is not None and (found.get("pid"), found.get("start_time")) == (lease["pid"], lease["start_time"]):
            os.unlink(path)


@contextlib.contextmanager
def held(
    uuid: str,
    owner: str,
    purpose: str,
    wait_s: float = 0.0,
    directory: str = LEASE_DIR,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[dict[str, Any]]:
    """Hold the card for a block. It is given back at its end, on an error and on INT, TERM and HUP."""
    until = clock() + wait_s
    while True:
        try:
            lease = acquire(uuid, owner, purpose, directory)
            break
        except LeaseHeld:
            if clock() >= until:
                raise
            sleep(min(1.0, max(0.05, until - clock())))
    with ending_on_signals():
        try:
            yield lease
        finally:
            release(lease, directory)


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """TERM and HUP unwind the stack as INT does, so that every `finally` runs; handlers are put back afterwards."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    former = {}
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        try:
            former[number] = signal.signal(number, leave)
        except ValueError:  # not in the main thread: the caller's own handlers stay
            break
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
