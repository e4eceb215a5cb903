# SPDX-License-Identifier: Apache-2.0
"""What stands for the cards of a test host: their description, and the driver that its owner installed."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.fleet.hosts import REGISTRY, Host
from tests.fleet.machine import CACHE
from tests.simulators import __main__ as simulators

DRIVER = "580.105.08"
REPOSITORIES = CACHE / "simulators"
URL = f"http://{REGISTRY.split(':', maxsplit=1)[0]}:8092"


def p100(number: int, bus: str) -> dict[str, Any]:
    return {
        "uuid": f"GPU-{number:08x}-7e57-4a11-8c0d-0123456789ab",
        "name": "Tesla P100-PCIE-16GB",
        "compute_cap": "6.0",
        "memory_mib": 16384,
        "pci_bus_id": f"00000000:{bus}:00.0",
        "pci_device_id": "0x15F810DE",
    }


def p4(number: int, bus: str) -> dict[str, Any]:
    """A Pascal card of compute capability 6.1: no recipe fits it."""
    return {
        **p100(number, bus),
        "name": "Tesla P4",
        "compute_cap": "6.1",
        "memory_mib": 7680,
        "pci_device_id": "0x1BB310DE",
    }


def build() -> None:
    """The package repositories of the stand-ins; kept in the cache."""
    simulators.build(REPOSITORIES)


def install(host: Host, cards: list[dict[str, Any]], driver: str = DRIVER) -> None:
    """Gives a host cards, a driver, as its owner did before the host came into the fleet."""
    if host.exec("test", "-e", "/etc/nvidia-sim/state.json", check=False).returncode == 0:
        return
    debs = [*sorted((REPOSITORIES / "hardware").glob("*.deb")), *simulators.driver_set(REPOSITORIES, driver)]
    folder = "/run/driver"
    host.sh(f"mkdir -p {folder}")
    # One archive through the door, not a copy for each file.
    pack = subprocess.run(["tar", "-cf", "-", *map(str, debs)], check=True, capture_output=True).stdout
    host.put(pack, f"{folder}/all.tar")
    host.sh(f"cd {folder} && tar -xf all.tar --transform='s,.*/,,' && dpkg -i *.deb && cd / && rm -r {folder}")
    host.sh("systemctl daemon-reload")
    host.write("/etc/nvidia-sim/state.json", json.dumps({"cards": cards}, indent=1))
    host.sh("systemctl start nvidia-sim-hardware.service && nvidia-smi -L")
