# SPDX-License-Identifier: Apache-2.0
"""What stands for the cards of a test host: their description, and the driver that its owner installed."""

from __future__ import annotations

import json
from typing import Any

from tests.fleet.hosts import REGISTRY, Host
from tests.fleet.machine import CACHE, podman
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


def p40(number: int, bus: str) -> dict[str, Any]:
    """A Pascal card of compute capability 6.1: no recipe fits it."""
    return {
        **p100(number, bus),
        "name": "Tesla P40",
        "compute_cap": "6.1",
        "memory_mib": 24576,
        "pci_device_id": "0x1B3810DE",
    }


def build() -> None:
    """The package repositories of the stand-ins; kept in the cache."""
    simulators.build(REPOSITORIES)


def install(host: Host, cards: list[dict[str, Any]], driver: str = DRIVER) -> None:
    """Gives a host cards, a driver, as its owner did before the host came into the fleet."""
    if host.exec("test", "-e", "/etc/nvidia-sim/state.json", check=False).returncode == 0:
        return
    debs = [*sorted((REPOSITORIES / "hardware").glob("*.deb")), *simulators.driver_set(REPOSITORIES, driver)]
    host.sh("mkdir -p /root/driver")
    for deb in debs:
        podman("cp", str(deb), f"{host.name}:/root/driver/{deb.name}")
    host.sh("dpkg -i /root/driver/*.deb && rm -r /root/driver && systemctl daemon-reload")
    host.write("/etc/nvidia-sim/state.json", json.dumps({"cards": cards}, indent=1))
    host.sh("systemctl start nvidia-sim-hardware.service && nvidia-smi -L")
