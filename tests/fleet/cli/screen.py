# SPDX-License-Identifier: Apache-2.0
"""A terminal for tests: tmux runs the command, and the test reads the screen."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping

DONE = "exit status is"


class Screen:
    """One command in a terminal of 160 by 50. Use as a context manager."""

    def __init__(self, argv: list[str], cwd: str, env: Mapping[str, str]) -> None:
        self.name = f"tensorless-test-{os.getpid()}-{time.monotonic_ns()}"
        self.shots: list[str] = []
        line = f"{shlex.join(argv)}; echo {DONE} $?; exec sleep 600"
        setting = [word for key, value in env.items() for word in ("-e", f"{key}={value}")]
        self._tmux(
            "new-session", "-d", "-s", self.name, "-x", "160", "-y", "50", "-c", cwd, *setting, "bash", "-c", line
        )

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_error: object) -> None:
        subprocess.run(["tmux", "kill-session", "-t", self.name], capture_output=True, check=False)

    def _tmux(self, *words: str) -> str:
        return subprocess.run(["tmux", *words], capture_output=True, text=True, check=True).stdout

    def keys(self, *keys: str) -> None:
        self._tmux("send-keys", "-t", self.name, *keys)

    def text(self) -> str:
        return self._tmux("capture-pane", "-p", "-J", "-t", self.name, "-S", "-300")

    def wait(self, *parts: str, seconds: float) -> str:
        """Waits until all the parts are on the screen; keeps every screen that was seen on the way."""
        until = time.monotonic() + seconds
        while True:
            shot = self.text()
            if not self.shots or shot != self.shots[-1]:
                self.shots.append(shot)
            if all(part in shot for part in parts):
                return shot
            assert time.monotonic() < until, f"not within {seconds:.0f} s: {parts}\n{shot}"
            time.sleep(0.3)

    def ended(self, seconds: float) -> int:
        """Waits for the command's end; its exit status."""
        shot = self.wait(DONE, seconds=seconds)
        return int(shot.split(DONE)[1].split()[0])


def tensorless(*words: str) -> list[str]:
    """The command of this checkout."""
    return [sys.executable, "-m", "tensorless_fleet", *words]
