# SPDX-License-Identifier: Apache-2.0
"""Three bare hosts without cards, and one file on a Hub outside. The role gets its plans directly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.hosts import PRIVATE_KEY, SSH_USER, Host, ssh_options
from tests.fleet.machine import FleetError, podman
from tests.hub import FakeHub
from tests.hub.jobs import COMMIT, REPO, noise

GATEWAY = "10.213.22.1"
HOSTS = [Host(f"spread-{n}", "bookworm", f"10.213.22.{10 + n}", "tensorless-spread") for n in (1, 2, 3)]
CACHE = "/var/lib/tensorless/hub"


class Playing:
    """A play that goes on while the test does something to it. It has a process group of its own, as in a terminal."""

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        # Under nohup, hanging up would be ignored here and in everything that is started here.
        usual = ["env", "--default-signal=HUP", *command]
        self.process = subprocess.Popen(
            usual, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, start_new_session=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line)

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def end(self, seconds: float = 60) -> str:
        self.process.wait(seconds)
        self._reader.join(10)
        return "".join(self.lines)


def until(what: str, condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)


class Spread:
    """The three hosts with one file on a Hub outside."""

    program = str(Path(sys.executable).with_name("ansible-playbook"))

    def __init__(self, hub: FakeHub, folder: Path) -> None:
        self.hub = hub
        self.folder = folder
        self.file = hub.add(REPO, COMMIT, "f.gguf", noise(40_000_000))
        self.blob = f"{CACHE}/models--{REPO.replace('/', '--')}/blobs/{self.file.sha256}"
        options = " ".join(ssh_options())
        hosts = {host.name: {"ansible_host": host.ip} for host in HOSTS}
        shared = {
            "ansible_user": SSH_USER,
            "ansible_ssh_private_key_file": str(PRIVATE_KEY),
            "ansible_ssh_common_args": options,
            "ansible_python_interpreter": "/usr/bin/python3",
        }
        (folder / "inventory.json").write_text(json.dumps({"gpu": {"hosts": hosts, "vars": shared}}))

    def _command(self, hosts: str, roles: list[str], variables: dict[str, Any]) -> list[str]:
        download = {"repo": REPO, "revision": COMMIT, "file": "f.gguf", "sha256": self.file.sha256,
                    "size_bytes": self.file.size, "cache": CACHE, "endpoint": self.hub.url}  # fmt: skip
        tasks = [{"ansible.builtin.import_role": {"name": f"tensorless.fleet.{role}"}} for role in roles]
        play = [{"hosts": hosts, "become": True, "vars": {"plan_results": [{"download": download}], **variables},
                 "tasks": tasks}]  # fmt: skip
        book = self.folder / "play.json"
        book.write_text(json.dumps(play))
        return [self.program, "-i", str(self.folder / "inventory.json"), str(book)]

    def play(self, hosts: str, roles: list[str], *argv: str, **variables: Any) -> tuple[int, str]:
        command = [*self._command(hosts, roles, variables), *argv]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environ())
        return done.returncode, done.stdout + done.stderr

    def start(self, hosts: str, roles: list[str], **variables: Any) -> Playing:
        return Playing(self._command(hosts, roles, variables), self.environ())

    @staticmethod
    def environ() -> dict[str, str]:
        return {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_INJECT_FACT_VARS": "false"}

    def sha256(self, host: Host) -> str:
        return host.sh(f"sha256sum {self.blob} 2>/dev/null | cut -d' ' -f1").strip()


@pytest.fixture(scope="package")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    try:
        for host in HOSTS:
            host.start()
    except (FleetError, FileNotFoundError) as error:
        pytest.fail(f"hosts cannot be had on this machine: {error}")
    try:
        with FakeHub(bind=GATEWAY) as hub:
            yield Spread(hub, tmp_path_factory.mktemp("spread"))
    finally:
        for host in HOSTS:
            host.remove()
        podman("network", "rm", "-f", HOSTS[0].network, check=False)
