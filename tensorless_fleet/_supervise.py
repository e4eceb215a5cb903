# SPDX-License-Identifier: Apache-2.0
"""Runs one command and leaves nothing of it behind: ``_supervise.py PRIVATE_DIR COMMAND...``

Ansible's workers leave their session, so ending its process group leaves them, and what they started, running. This
small process stands between ansible-runner and ansible-playbook. It adopts every orphan of the run (child subreaper),
passes an interrupt on, gives the play a moment, then ends all descendants. It does the same when its parent dies, by
whatever signal, and then also removes the private folder. Standard library only; it is started by its path.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 5.0  # from the interrupt to SIGTERM for all
KILL_S = 2.0  # from SIGTERM to SIGKILL
CLEAN_S = 8.0  # for the hosts' temporary folders
ENDINGS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def descendants(root: int) -> list[int]:
    """Every living process below ``root``, parents before children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/stat", "rb") as file:
                after_name = file.read().rpartition(b")")[2].split()
            if after_name[0] != b"Z":
                children.setdefault(int(after_name[1]), []).append(int(name))
    found: list[int] = []
    queue = [root]
    while queue:
        for child in children.get(queue.pop(0), []):
            found.append(child)
            queue.append(child)
    return found


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def clean_hosts(private: str, pids: set[int], watched: set[signal.Signals]) -> None:
    """Removes what an interrupted play has left in the hosts' temporary folders: module files with their arguments.

    Ansible names these folders by the worker's process, so only those of this run are removed. Ends after CLEAN_S or
    with the next signal.
    """
    try:
        with open(os.path.join(private, "cleanup.json"), encoding="utf-8") as file:
            words = [word.replace("@PIDS@", " ".join(map(str, sorted(pids)))) for word in json.load(file)]
    except (OSError, ValueError):
        return
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
            sink = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(sink, number)
            os.execv(words[0], words)
        os._exit(127)
    until = time.monotonic() + CLEAN_S
    while reap(child) is None and time.monotonic() < until:
        received = signal.sigtimedwait(watched, 0.5)
        if received is not None and received.si_signo in ENDINGS - {signal.SIGHUP}:
            break
    end_all(child)


def reap(main: int) -> int | None:
    """Collects ended children; the exit code of ``main`` when it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == main:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code


def end_all(main: int) -> int | None:
    """Ends whatever is left below this process."""
    code = None
    for number, limit in ((signal.SIGTERM, KILL_S), (signal.SIGKILL, KILL_S)):
        until = time.monotonic() + limit
        send(descendants(os.getpid()), number)
        while descendants(os.getpid()) and time.monotonic() < until:
            time.sleep(0.05)
            found = reap(main)
            code = found if found is not None else code
    return code


def main(arguments: list[str]) -> int:
    private, command = arguments[0], arguments[1:]
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    watched = ENDINGS | {signal.SIGCHLD}
    for number in watched:
        signal.signal(number, signal.SIG_DFL)  # a terminal library may have left SIGHUP ignored
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    child = os.fork()
    if child == 0:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"[ERROR]: cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(127)
    with open(os.path.join(private, "supervisor.pid"), "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    code: int | None = None
    deadline: float | None = None
    pids: set[int] = set()
    while code is None:
        received = signal.sigtimedwait(watched, 1.0)
        if received is not None and received.si_signo in ENDINGS:
            if deadline is None:
                deadline = time.monotonic() + GRACE_S
                pids |= {child, *descendants(child)}
                send([child], signal.SIGINT)
            else:
                deadline = 0.0  # asked twice: at once
        code = reap(child)
        if deadline is None and os.getppid() != parent:
            deadline = time.monotonic() + GRACE_S
            pids |= {child, *descendants(child)}
            send([child], signal.SIGINT)
        if deadline is not None and time.monotonic() >= deadline:
            break
    last = end_all(child)
    if deadline:
        clean_hosts(private, pids, watched)
    code = code if code is not None else last
    if os.getppid() != parent:
        shutil.rmtree(private, ignore_errors=True)
    return code if code is not None else 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
