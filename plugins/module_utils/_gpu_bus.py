# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of NVIDIA cards without nvidia-smi: the PCI bus, the loaded module, its flavour, the libraries.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import glob
import os
import re
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._host import Files

PCI = "/sys/bus/pci/devices"
PROC_VERSION = "/proc/driver/nvidia/version"
MODULE_VERSION = "/sys/module/nvidia/version"
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/lib/x86_64-linux-gnu",
)
WIDTHS = (1, 2, 4, 8, 16, 32)
# Identity of the cards that this collection is for, where nvidia-smi is too old to know compute_cap.
KNOWN_DEVICES = {"15f7": "6.0", "15f8": "6.0", "15f9": "6.0", "1b38": "6.1", "1bb3": "6.1"}
_VERSION = re.compile(r"(?<![\w.])(\d{2,4}\.\d{1,3}(?:\.\d{1,3})?)(?![\w.])", re.ASCII)


def pci_cards(files: Files) -> list[dict[str, Any]]:
    """Every NVIDIA display or 3D controller on the bus (a P100 is class 0302), with the driver that holds it."""
    cards: list[dict[str, Any]] = []
    for address in files.names(PCI):
        base = f"{PCI}/{address}"
        if (files.read(f"{base}/vendor") or "").strip().lower() != "0x10de":
            continue
        kind = (files.read(f"{base}/class") or "").strip().lower()
        if not kind.startswith(("0x0300", "0x0302")):
            continue
        device = (files.read(f"{base}/device") or "").strip().lower().replace("0x", "")
        width = (files.read(f"{base}/current_link_width") or "").strip()
        speed = (files.read(f"{base}/current_link_speed") or "").strip()
        driver = files.target(f"{base}/driver")
        lanes = int(width) if width.isdigit() and width.isascii() else None
        lost = (lanes is not None and lanes not in (0, *WIDTHS)) or (lanes == 63)
        cards.append(
            {
                "pci_id": address.lower(),
                "device_id": f"10de:{device}",
                "class": kind.replace("0x", "")[:4],
                "driver": os.path.basename(driver) if driver else None,
                "link_width": None if lost else lanes,
                "link_speed": speed or None,
                "lost": lost,
                "compute_capability": KNOWN_DEVICES.get(device),
            }
        )
    return cards


def unserved(card: dict[str, Any]) -> Optional[str]:
    """Why a card of the bus that nvidia-smi does not list is missing there; None where that is as it should be."""
    if card["driver"] == "nvidia":
        return "nvidia-smi does not list it"
    # A card for virtual machines is reserved, and what an unknown old card is for is not known.
    if card["driver"] == "vfio-pci" or card["compute_capability"] is None:
        return None
    return f"{card['driver'] or 'no driver'} holds it"


def loaded_version(files: Files) -> Optional[str]:
    """The version of the loaded nvidia module, or None."""
    for path in (PROC_VERSION, MODULE_VERSION):
        text = files.read(path)
        found = _VERSION.search(text.splitlines()[0]) if text else None
        if found:
            return found.group(1)
    return None


def kernel_module(files: Files) -> str:
    """proprietary, open, nouveau or none: the module that is loaded."""
    text = files.read(PROC_VERSION)
    if text:
        return "open" if "Open Kernel Module" in text else "proprietary"
    if files.exists("/sys/module/nvidia"):
        # The kernel marks a module whose licence is not free.
        return "proprietary" if "P" in (files.read("/sys/module/nvidia/taint") or "P") else "open"
    if files.exists("/sys/module/nouveau"):
        return "nouveau"
    return "none"


def installed_version(files: Files) -> Optional[str]:
    """The version of the installed driver library, which nvidia-smi and containers use."""
    for folder in LIBRARY_FOLDERS:
        target = files.target(f"{folder}/libnvidia-ml.so.1")
        found = re.search(r"\.so\.(\d+(?:\.\d+)+)$", target or "", re.ASCII)
        if found:
            return found.group(1)
    return None


def branch(version: Optional[str]) -> Optional[int]:
    """The driver branch of a version or a package version: 580 for 580.95.05-1, epoch stripped; None if unreadable."""
    found = re.match(r"^(?:\d+:)?(\d{2,4})\.\d", version or "", re.ASCII)
    return int(found.group(1)) if found else None


def secure_boot(files: Files) -> Optional[bool]:
    """Whether the firmware enforces Secure Boot; None where there is no such variable (or no EFI)."""
    folder = "/sys/firmware/efi/efivars"
    for name in files.names(folder):
        if name.startswith("SecureBoot-"):
            data = files.read_bytes(f"{folder}/{name}")
            return data[4] == 1 if data and len(data) > 4 else None
    return None


def device_nodes() -> list[str]:
    """/dev/nvidia0 and its like."""
    return sorted(path for path in glob.glob("/dev/nvidia[0-9]*") if path[len("/dev/nvidia") :].isdigit())
