# SPDX-License-Identifier: Apache-2.0
"""Looking at a host without changing it: small files of the kernel, and commands with a hard time limit.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Optional

Run = Callable[[Sequence[str]], tuple[int, str, str]]

TIMED_OUT = 124
_MAX_OUTPUT = 16 * 1024 * 1024
# Output goes to files and not to pipes: a child that survives its parent (or sits in the kernel for ever) would keep a
# pipe open, and a reader of the pipe would wait for it. `timeout` signals its whole process group, itself included.
_BOUNDED = 'out=$1 err=$2 limit=$3; shift 3; exec timeout -s KILL "$limit" "$@" >"$out" 2>"$err" </dev/null'


class Files:
    """Read access to files where they really are. Tests put another object in its place."""

    def read(self, path: str) -> Optional[str]:
        """The text of a small file, or None."""
        try:
            with open(path, encoding="utf-8", errors="replace") as handle:
                return handle.read(_MAX_OUTPUT)
        except OSError:
            return None

    def read_bytes(self, path: str) -> Optional[bytes]:
        try:
            with open(path, "rb") as handle:
                return handle.read(_MAX_OUTPUT)
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted; empty where there is none."""
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def target(self, path: str) -> Optional[str]:
        """Where a link ends, or None where nothing is."""
        return os.path.realpath(path) if os.path.exists(path) else None


def bounded(run: Run, seconds: float) -> Run:
    """A runner whose commands end after `seconds` at the latest, children too: status 124 then."""

    def call(argv: Sequence[str]) -> tuple[int, str, str]:
        with tempfile.TemporaryDirectory(prefix="tensorless-") as folder:
            out, err = os.path.join(folder, "out"), os.path.join(folder, "err")
            started = time.monotonic()
            rc, _ignored, shell_err = run(["/bin/sh", "-c", _BOUNDED, "sh", out, err, f"{seconds:g}", *argv])
            late = time.monotonic() - started >= seconds
            files = Files()
            text, errors = files.read(out) or "", files.read(err) or shell_err
            if rc in (-9, 137) and late:
                return TIMED_OUT, text, errors
            return rc, text, errors

    return call
