# SPDX-License-Identifier: Apache-2.0
"""The private folder of one run: made 0700, locked while its owner lives, removed at the end or by the next start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensorless_fleet.errors import TensorlessError

MOST = 64  # runs at once of one user; more is a program gone wild
LOG_FILES = 20
LOG_BYTES = 4_000_000


class Private:
    """A temporary folder that nobody else can read. Use as a context manager."""

    def __init__(self) -> None:
        base = _base()
        _sweep(base)
        self.path = tempfile.mkdtemp(prefix="run-", dir=base)
        # Locked before it has its name: another run that sweeps never finds it there and free.
        lock = os.path.join(self.path, "lock")
        self._lock = os.open(lock + ".new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(lock + ".new", lock)

    def __enter__(self) -> Private:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the folder. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def folder(self, name: str) -> str:
        path = os.path.join(self.path, name)
        os.makedirs(path, mode=0o700, exist_ok=True)
        return path

    def write(self, name: str, text: str) -> str:
        """Writes a file that only the user can read, and returns its path."""
        path = os.path.join(self.path, name)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        return path


def _base() -> str:
    """Where private folders lie: the user's runtime folder, else a folder of one's own below the temporary one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    for parent, name in ((runtime, "tensorless"), (tempfile.gettempdir(), f"tensorless-{os.getuid()}")):
        if not parent or not os.path.isabs(parent):
            continue
        path = os.path.join(parent, name)
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                return path
    return tempfile.mkdtemp(prefix="tensorless-")


def _sweep(base: str) -> None:
    """Removes what runs that were killed have left; refuses when too many are alive."""
    alive = 0
    for name in os.listdir(base):
        path = os.path.join(base, name)
        if not name.startswith("run-"):
            continue
        try:
            descriptor = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            # Without a lock file: just being made by another process, or half removed. Old ones are removed.
            with contextlib.suppress(OSError):
                if os.lstat(path).st_mtime < time.time() - 60:
                    shutil.rmtree(path, ignore_errors=True)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            alive += 1
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)
    if alive >= MOST:
        raise TensorlessError(
            f"{alive} runs are already at work for this user (folders in {base}); wait for some to end"
        )


def vars_text(values: Mapping[str, Any], templates: Mapping[str, str]) -> str:
    """A variables file: ``values`` as plain data that Ansible never treats as a template, ``templates`` as such."""
    lines = [f"{_scalar(key)}: {_node(value, '!unsafe ')}" for key, value in values.items()]
    lines += [f"{_scalar(key)}: {_scalar(value)}" for key, value in templates.items()]
    return "---\n" + ("\n".join(lines) if lines else "{}") + "\n"


def _node(value: Any, tag: str) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return tag + _scalar(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(str(key))}: {_node(item, tag)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_node(item, tag) for item in value) + "]"
    raise TypeError(f"a variable cannot hold a {type(value).__name__}")


def _scalar(text: str) -> str:
    """A YAML double-quoted scalar; everything but printable ASCII as an escape, so that no line break is folded."""
    out = []
    for char in text:
        code = ord(char)
        if char in '"\\':
            out.append("\\" + char)
        elif 32 <= code < 127:
            out.append(char)
        elif 0xD800 <= code <= 0xDFFF:
            raise ValueError("a variable contains bytes that are not UTF-8")
        elif code < 256:
            out.append(f"\\x{code:02x}")
        elif code < 65536:
            out.append(f"\\u{code:04x}")
        else:
            out.append(f"\\U{code:08x}")
    return '"' + "".join(out) + '"'


class Log:
    """The log of one run, kept below the state folder: bounded in number and size, readable by its owner only."""

    def __init__(self, command: str) -> None:
        self.path: str | None = None
        self._file = None
        self._left = LOG_BYTES
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        folder = os.path.join(state, "tensorless", "logs")

        name = f"{time.strftime('%Y%m%dT%H%M%S')}-{command}-{os.getpid()}.log"
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            old = sorted(entry for entry in os.listdir(folder) if entry.endswith(".log"))
            for entry in old[: max(0, len(old) - LOG_FILES + 1)]:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, entry))
            self.path = os.path.join(folder, name)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace")
        except OSError:
            self.path = None  # a read-only home is no reason to refuse work

    def write(self, text: str) -> None:
        if self._file is None or self._left <= 0 or not text:
            return
        self._left -= len(text) + 1
        with contextlib.suppress(OSError):
            self._file.write(text + "\n")
            if self._left <= 0:
                self._file.write("(the rest is left out)\n")

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
