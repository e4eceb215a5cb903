# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a module on the host and shows its progress on the controller meanwhile.

The module keeps its latest figures in a small file on the host (its option progress_file; `_progress.progress_writer`).
A second thread reads that file over the same connection, and one of the processes that serve the hosts prints for all
of them, so that a hundred hosts make no more lines than five. A task that ends at once costs nothing extra.
Private to the collection; may change at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shlex
import signal
import threading
import time
from typing import Any, TextIO

from ansible import constants
from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.tensorless.fleet.plugins.module_utils._progress import line, summary

EVERY = 8.0
AGAIN = 45.0  # the same line is said again only to show that it is still at work
STALE = 40.0
LINES = 5

display = Display()


class ProgressAction(ActionBase):
    """The action plugin of every module that has the option progress_file: its run, with its progress shown."""

    _supports_check_mode = True
    _supports_async = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        del tmp
        result.update(run_with_progress(self, task_vars or {}))
        return result


def run_with_progress(action: ActionBase, variables: dict[str, Any]) -> dict[str, Any]:
    """The task's module on the host. Its reports are printed, and appended to the file that
    `tensorless_progress_file` names on the controller, one JSON object a line."""
    task, connection = action._task, action._connection
    arguments = dict(task.args)
    background = bool(task.async_val) and not connection.has_native_async
    if arguments.get("token"):
        # Through the module's standard input instead of a file on the host: an interrupted run leaves no token there.
        with contextlib.suppress(AnsibleError, KeyError):
            connection.set_option("pipelining", True)
    watch = None
    if not (background or task.check_mode or arguments.get("progress_file")):
        arguments["progress_file"] = f"/tmp/.tensorless-{secrets.token_hex(16)}.progress"
        watch = _Watch(action, arguments["progress_file"], variables)
        watch.start()
    lost = False
    try:
        result: dict[str, Any] = action._execute_module(
            module_args=arguments, task_vars=variables, wrap_async=background
        )
    except AnsibleConnectionFailure:
        # Nothing can be cleaned up over a connection that is gone, and trying would hide for a minute that it is.
        lost = True
        connection._shell.tmpdir = None
        raise
    finally:
        if watch is not None:
            watch.stop(0 if lost else 30)
        if not background and not lost:
            action._remove_tmp_path(connection._shell.tmpdir)
    return result


class _Watch(threading.Thread):
    """Looks at one host's progress file every few seconds until told to stop."""

    def __init__(self, action: ActionBase, path: str, variables: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._action = action
        self._path = path
        self._host = str(variables.get("inventory_hostname", "host"))
        self._events = variables.get("tensorless_progress_file")
        self._over = threading.Event()
        self._parent = os.getppid()
        self._board = _Board(str(variables.get("inventory_hostname", "host")))

    def stop(self, patience: float) -> None:
        self._over.set()
        # A thread inside the connection is waited for, so that the connection is ours again.
        self.join(timeout=patience)
        self._board.leave()

    def run(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(1.0):
            self._end_with_the_controller()
            if time.monotonic() - looked < EVERY:
                continue
            looked = time.monotonic()
            report = self._read()
            if report is None or self._over.is_set():
                continue
            report["host"] = self._host
            if self._events:
                with contextlib.suppress(OSError):
                    _append(str(self._events), report)
            for text in self._board.post(report):
                display.display(text)

    def _end_with_the_controller(self) -> None:
        """A worker of Ansible is a session of its own, so it outlives a controller that was killed or lost its
        terminal. Then its connections end with it, and the module on the host notices that nobody waits for it."""
        if os.getppid() != self._parent and os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)

    def _read(self) -> dict[str, Any] | None:
        """The report on the host; None while there is none. Runs as the login user: no second use of become."""
        try:
            answer = self._action._low_level_execute_command(f"cat {shlex.quote(self._path)}", sudoable=False)
        except (AnsibleError, OSError):
            return None
        if answer.get("rc") != 0:
            return None
        try:
            value = json.loads(answer.get("stdout") or "")
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


class _Board:
    """What all hosts of this run last said, kept in this run's own temporary folder on the controller."""

    def __init__(self, host: str) -> None:
        self._folder = os.path.join(constants.DEFAULT_LOCAL_TMP, "tensorless-progress")
        self._own = os.path.join(self._folder, secrets.token_hex(8) + ".json")

    def post(self, report: dict[str, Any]) -> list[str]:
        """Notes the report; returns what to print, which is nothing when another process has just printed."""
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        temporary = self._own + ".tmp"
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump(report, stream)
        os.replace(temporary, self._own)
        with open(os.path.join(self._folder, "printed"), "a+", encoding="utf-8") as memory:
            fcntl.flock(memory, fcntl.LOCK_EX)
            return self._news(memory)

    def _news(self, memory: TextIO) -> list[str]:
        """What has not been printed within the last while; nothing when another process has just printed."""
        memory.seek(0)
        before: dict[str, float] = json.loads(memory.read() or "{}")
        now = time.time()
        if before and now - max(before.values()) < EVERY - 1.0:
            return []
        reports = self._fresh()
        lines = [summary(reports)] if len(reports) > LINES else [line(one) for one in reports]
        news = [text for text in lines if now - before.get(text, 0.0) > AGAIN]
        memory.seek(0)
        memory.truncate()
        json.dump({text: now if text in news else before[text] for text in lines}, memory)
        return news

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._own)

    def _fresh(self) -> list[dict[str, Any]]:
        reports = []
        for name in sorted(os.listdir(self._folder)):
            path = os.path.join(self._folder, name)
            with contextlib.suppress(OSError, ValueError):
                if name.endswith(".json") and time.time() - os.stat(path).st_mtime < STALE:
                    with open(path, encoding="utf-8") as stream:
                        reports.append(json.load(stream))
        return sorted(reports, key=lambda one: str(one.get("host")))


def _append(path: str, report: dict[str, Any]) -> None:
    """One JSON object a line; a single write, so that processes do not cut into each other's lines."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, (json.dumps(report) + "\n").encode())
    finally:
        os.close(descriptor)
