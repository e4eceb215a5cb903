# SPDX-License-Identifier: Apache-2.0
"""The command of this checkout on the test fleet, and what it says in JSON."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from tests.fleet import fleet
from tests.fleet.cli.screen import tensorless
from tests.fleet.machine import ROOT


def command(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    return subprocess.run(
        tensorless("-i", str(fleet.INVENTORY), *words), cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=280, env={**os.environ, **(env or {})},
    )  # fmt: skip


def answer(*words: str, status: int = 0) -> dict[str, Any]:
    """The result of one command, as ``--json`` has it."""
    done = command(*words, "--json")
    assert done.returncode == status, (done.returncode, done.stdout[-3000:], done.stderr)
    result = json.loads(done.stdout.strip().split("\n")[-1])["result"]
    assert isinstance(result, dict)
    return result


def rows() -> list[tuple[str, str, str, str, bool | None]]:
    """(host, card, state, health, tuned) as `fleet --json` has them."""
    return [
        (name, card["name"], card["state"], card["health"], card["tuned"])
        for name, host in answer("fleet")["hosts"].items()
        for card in host["cards"]
    ]
