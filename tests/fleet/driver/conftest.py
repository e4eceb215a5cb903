# SPDX-License-Identifier: Apache-2.0
"""Hosts for the tests of drivers, CDI and doctor: a network, repositories and packages of their own."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import pathlib
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet import images
from tests.fleet.hosts import Host, ssh_options
from tests.fleet.machine import ROOT, FleetError, podman
from tests.simulators.__main__ import build, driver_set

GATEWAY = "10.213.25.1"
PACKAGES = ROOT / ".build" / "simulators"
UUID = "GPU-dddddddd-0000-4000-8000-000000000001"
CARD = {
    "uuid": UUID,
    "name": "Tesla P100-PCIE-16GB",
    "compute_cap": "6.0",
    "memory_mib": 16384,
    "pci_bus_id": "00000000:3B:00.0",
}

ENVIRON = {
    **os.environ,
    "ANSIBLE_INJECT_FACT_VARS": "false",
    "ANSIBLE_NOCOLOR": "1",
    "ANSIBLE_FORCE_COLOR": "0",
    "ANSIBLE_PIPELINING": "1",
}


def port(host: Host) -> int:
    """Each host has a web server of its own, so that tests of two hosts may run side by side."""
    return 8000 + int(host.ip.rpartition(".")[2])


class Rig:
    """One host: its simulated card, its packages, and plays on it."""

    def __init__(self, host: Host, tmp: pathlib.Path) -> None:
        self.host = host
        self.tmp = tmp
        self.url = f"http://{GATEWAY}:{port(host)}"

    def sh(self, script: str, check: bool = True) -> str:
        return self.host.sh(script, check=check)

    def rc(self, script: str) -> tuple[int, str]:
        done = self.host.exec("sh", "-c", script + " 2>&1", check=False)
        return done.returncode, done.stdout

    def state(self, cards: list[dict[str, Any]] | None = None, **more: Any) -> None:
        """What the simulated hardware is from now on."""
        data = {"cards": [dict(CARD)] if cards is None else cards, **more}
        self.host.write("/etc/nvidia-sim/state.json", json.dumps(data))
        self.sh("rm -rf /sys/bus/pci/devices/* /sys/firmware/efi; /usr/lib/nvidia-sim/nvidia-sim boot")

    def repositories(self, *names: str) -> None:
        lines = "".join(f"deb [signed-by=/etc/apt/test.asc] {self.url}/{name} ./\\n" for name in names)
        self.sh(f"printf '{lines}' >/etc/apt/sources.list.d/tests.list; apt-get update -q")

    def install(self, version: str) -> None:
        """The whole driver set, as an owner had it before Ansible came."""
        files = " ".join(f"/opt/sim/cuda/{path.name}" for path in driver_set(PACKAGES, version))
        self.sh(f"dpkg --force-downgrade -i {files}")

    def purge(self) -> None:
        """No driver, no toolkit, no trace of the role, nothing loaded."""
        self.sh(
            """
            systemctl disable --now nvidia-persistenced 2>/dev/null
            held=$(apt-mark showhold); [ -z "$held" ] || apt-mark unhold $held >/dev/null
            names=$(dpkg-query -W -f '${db:Status-Status} ${Package}\\n' '*nvidia*' 'libcuda*' 'cuda-drivers*' \\
                2>/dev/null | sed -n 's/^[a-z]*-*[a-z]* //p')
            [ -z "$names" ] || dpkg --purge --force-depends $names >/dev/null 2>&1
            rm -rf /etc/apt/preferences.d/* /etc/apt/apt.conf.d/51tensorless* /etc/modprobe.d/tensorless* \\
                /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/tests.list \\
                /etc/cdi /run/cdi /etc/systemd/system/tensorless-* \\
                /etc/systemd/system/multi-user.target.wants/tensorless-* /run/tensorless
            /usr/lib/nvidia-sim/nvidia-sim unload; systemctl daemon-reload
            """,
            check=False,
        )

    def versions(self) -> dict[str, str]:
        """The driver's packages that are installed."""
        shape = "${db:Status-Status} ${Package} ${Version}\\n"
        rows = [line.split() for line in self.sh(f"dpkg-query -W -f '{shape}'").splitlines()]
        names = ("nvidia-", "libnvidia-", "libcuda", "cuda-drivers", "firmware-nvidia", "xserver-xorg-video-nvidia")
        return {
            row[1]: row[2]
            for row in rows
            if row[0] == "installed" and row[1].startswith(names) and "container" not in row[1]
        }

    def play(
        self, roles: list[str], *argv: str, check: bool = True, **variables: Any
    ) -> tuple[int, str, dict[str, int]]:
        """Runs roles on the host over ssh. Returns the status, the output and the host's line of the recap."""
        names = [f"tensorless.fleet.{role}" for role in roles]
        play = {"hosts": "gpu", "become": True, "gather_facts": True, "roles": names}
        return self.run(play, *argv, check=check, **variables)

    def run(
        self,
        play: dict[str, Any],
        *argv: str,
        check: bool = True,
        environ: dict[str, str] | None = None,
        **variables: Any,
    ) -> tuple[int, str, dict[str, int]]:
        """The same with any play."""
        address = {
            "ansible_host": self.host.ip,
            "ansible_user": "ops",
            "ansible_python_interpreter": "/usr/bin/python3",
            "ansible_ssh_common_args": " ".join(ssh_options()),
        }
        common = {
            "nvidia_cdi_repository_url": f"{self.url}/toolkit",
            "nvidia_cdi_repository_suite": "./",
            "nvidia_cdi_repository_key": f"{self.url}/key.asc",
            "nvidia_driver_headers": False,
        }
        inventory = {"gpu": {"hosts": {self.host.name: address}, "vars": {**common, **variables}}}
        for name, content in (("play.yml", [play]), ("inventory.yml", inventory)):
            (self.tmp / name).write_text(json.dumps(content), encoding="utf-8")
        program = ROOT / ".venv" / "bin" / "ansible-playbook"
        command = [str(program), "-i", str(self.tmp / "inventory.yml"), str(self.tmp / "play.yml"), *argv]
        done = subprocess.run(
            command, env={**ENVIRON, **(environ or {})}, capture_output=True, text=True, check=False, cwd=self.tmp
        )
        output = done.stdout + done.stderr
        (self.tmp / "output.txt").write_text(output, encoding="utf-8")
        assert not check or done.returncode == 0, output[-5000:]
        recap = next(
            (line for line in done.stdout.splitlines() if line.startswith(f"{self.host.name} ") and "ok=" in line), ""
        )
        counts = dict(word.split("=") for word in recap.partition(":")[2].split())
        return done.returncode, output, {key: int(value) for key, value in counts.items()}


@pytest.fixture(scope="session")
def repository() -> Iterator[None]:
    """The packages, and a web server for them on the hosts' gateway."""
    build(PACKAGES)
    if podman("network", "exists", "tensorless-driver", check=False).returncode != 0:
        podman("network", "create", "--subnet", "10.213.25.0/24", "--gateway", GATEWAY, "tensorless-driver")
    yield


@contextlib.contextmanager
def _served(host: Host) -> Iterator[None]:
    """The packages on the host's gateway."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the tests' output is not for this."""

    handler = functools.partial(Quiet, directory=str(PACKAGES))
    server = http.server.ThreadingHTTPServer((GATEWAY, port(host)), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield
    server.shutdown()


def start(name: str, ip: str, suite: str = "bookworm") -> Host:
    try:
        images.ensure((suite,))
        host = Host(name, suite, ip, network="tensorless-driver")
        host.start()
    except (FleetError, FileNotFoundError) as exc:
        pytest.fail(f"a test host cannot be had on this machine: {exc}")
    host.sh("rm -rf /opt/sim; mkdir -p /opt/sim")
    podman("cp", f"{PACKAGES}/.", f"{name}:/opt/sim")
    host.sh(
        "cp /opt/sim/key.asc /etc/apt/test.asc; dpkg -i /opt/sim/hardware/*.deb >/dev/null; systemctl daemon-reload"
    )
    return host


@pytest.fixture(scope="session")
def podman_host(repository: None) -> Iterator[Host]:
    host = start("drv-a", "10.213.25.11")
    with _served(host):
        yield host
    if not os.environ.get("TENSORLESS_TEST_KEEP"):
        host.remove()


@pytest.fixture(scope="session")
def docker_host(repository: None) -> Iterator[Host]:
    host = start("drv-c", "10.213.25.13")
    with _served(host):
        yield host
    if not os.environ.get("TENSORLESS_TEST_KEEP"):
        host.remove()


@pytest.fixture
def rig(podman_host: Host, tmp_path: pathlib.Path) -> Rig:
    """The host for podman, without a driver."""
    found = Rig(podman_host, tmp_path)
    found.purge()
    found.state()
    return found


@pytest.fixture
def docker_rig(docker_host: Host, tmp_path: pathlib.Path) -> Rig:
    """The host for docker, without a driver."""
    found = Rig(docker_host, tmp_path)
    found.purge()
    found.state()
    return found
