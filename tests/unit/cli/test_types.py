# SPDX-License-Identifier: Apache-2.0
"""The package carries its types: a strict program of a user type-checks, and a wrong one does not."""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
GOOD = """
from tensorless_fleet import AsyncFleet, Card, Event, Fleet, HostsFailed, Result, Run


def work(fleet: Fleet) -> list[Card]:
    result: Result = fleet.run("pn3", hosts="gpu", wait=True, port=9000, extra_args=["--temp", "0.7"])
    run: Run = fleet.run("pn3", wait=False)
    event: Event
    for event in run.events():
        print(event.host, event.kind == "failed")
    try:
        fleet.bench("pn3", runs=5)
    except HostsFailed as error:
        print(error.reasons["a"], error.result.ok)
    return [card for host in result.hosts.values() for card in host.cards]


async def later() -> Result:
    return await AsyncFleet("inventory.yml").run("pn3")
"""
BAD = """
from tensorless_fleet import Fleet

Fleet("x").run("pn3", prot=9000)
speed: str = Fleet("x").stop("pn3").seconds
"""


def mypy(tmp_path: pathlib.Path, text: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "user.py"
    path.write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--cache-dir", str(tmp_path / "c"), str(path)],
        cwd=tmp_path, env={"MYPYPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_strict_program_of_a_user_type_checks(tmp_path):
    done = mypy(tmp_path, GOOD)
    assert [line for line in done.stdout.splitlines() if line.startswith("user.py")] == []
    done = mypy(tmp_path, BAD)
    faults = [line for line in done.stdout.splitlines() if line.startswith("user.py")]
    assert any("prot" in line for line in faults) and any("Incompatible types" in line for line in faults), done.stdout
