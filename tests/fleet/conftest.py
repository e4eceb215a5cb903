# SPDX-License-Identifier: Apache-2.0
"""The provisioned fleet for the tests that need it. `molecule` leaves it; alone, the first test makes it."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.fleet import demo, fleet
from tests.fleet.hosts import Host
from tests.fleet.machine import FleetError

HEALTH = "import urllib.request as u, sys; print(u.urlopen('http://127.0.0.1:%d/health', timeout=2).status)"


@dataclasses.dataclass
class Run:
    """One run of a playbook."""

    rc: int
    output: str
    recap: dict[str, dict[str, int]]

    def changed(self) -> dict[str, int]:
        return {host: row["changed"] for host, row in self.recap.items()}


@dataclasses.dataclass
class Fleet:
    """The three provisioned hosts, and how a controller works on them."""

    a: Host
    b: Host
    c: Host

    def play(self, *argv: str, name: str = "site", check: bool = True) -> Run:
        command = ["ansible-playbook", "-i", str(fleet.INVENTORY), f"tensorless.fleet.{name}", *argv]
        done = subprocess.run(command, env=demo.environment(), capture_output=True, text=True)
        run = Run(done.returncode, done.stdout + done.stderr, demo.recap(done.stdout))
        assert not check or run.rc == 0, run.output[-6000:]
        return run

    def units(self, host: Host) -> list[str]:
        """The instances of a host."""
        return host.sh("ls /etc/tensorless/instances | sed -n 's/\\.json$//p'").split()

    def active(self, host: Host, unit: str) -> str:
        return host.exec("systemctl", "is-active", f"tensorless@{unit}.service", check=False).stdout.strip()

    def healthy(self, host: Host, port: int = 8080) -> bool:
        return host.exec("python3", "-c", HEALTH % port, check=False).stdout.strip() == "200"

    def server_pids(self, host: Host) -> list[int]:
        return [int(pid) for pid in host.sh("pgrep -x llama-server || true").split()]

    def report(self) -> Any:
        return json.loads((fleet.STATE / "report" / "report.json").read_text())


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.5)


def one_line(text: str) -> str:
    """Terminal output as one line of plain text: Ansible wraps messages."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())


@pytest.fixture(scope="session")
def hosts() -> Fleet:
    """The fleet, provisioned."""
    try:
        fleet.up()
    except (FleetError, FileNotFoundError) as exc:
        pytest.fail(f"the fleet cannot be had on this machine: {exc}")
    found = Fleet(fleet.P100_A, fleet.P100_B, fleet.P100_C)
    if not all(found.healthy(host) for host in fleet.HOSTS):
        found.play()
    return found
