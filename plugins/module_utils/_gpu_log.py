# SPDX-License-Identifier: Apache-2.0
"""What the kernel log says about NVIDIA cards: why a driver does not drive them, and faults of the hardware.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import re
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._host import Run

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?:\.\d)?\): (\d+)", re.ASCII)
_OFF_BUS = re.compile(
    r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)"
    r"(?:: GPU| \(PCI ID: [0-9a-f:]+\) installed in this system) has fallen off the bus"
)
_LEGACY = re.compile(r"supported through the NVIDIA (\d+)\.xx Legacy drivers")
_AER = re.compile(
    r"(?:pcieport|nvidia) ([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d): (?:AER: )?PCIe Bus Error: severity=(\w[\w -]*)"
)

# What the numbers that P100 owners meet mean. Others are reported by number.
XID_MEANING = {
    13: "a program on the card did something illegal",
    31: "a program touched memory it does not own",
    32: "the bus delivered broken data",
    43: "a program on the card was stopped",
    45: "a program ended while it used the card",
    48: "double bit error in the card's memory",
    61: "the card's microcontroller stopped",
    62: "the card's microcontroller halted",
    63: "a memory page was retired",
    64: "a memory page could not be retired",
    74: "NVLink error",
    79: "the card has fallen off the bus",
}
HARDWARE_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79})


def driver_problem(text: str) -> Optional[dict[str, str]]:
    """Why the driver does not drive a card: cause, what was found, and the remedy. The newest reason wins."""
    flat = re.sub(r"\s*\n\s*(?:NVRM:)?\s*", " ", text)
    flat = re.sub(r"\bNVRM: +", "", re.sub(r"\s+", " ", flat))
    found: list[tuple[int, dict[str, str]]] = []
    for match in _LEGACY.finditer(flat):
        last = match.group(1)
        found.append(
            (
                match.start(),
                {
                    "cause": "branch_too_new",
                    "message": f"the loaded driver is newer than the R{last} branch and ignores this card",
                    "fix": f"install a driver of the R{last} branch and reboot",
                },
            )
        )
    for needle, cause, message, fix in (
        (
            "not supported by open nvidia.ko",
            "open_module",
            "the open kernel module is loaded, and it does not drive Pascal cards",
            "install the proprietary kernel module of the same branch and reboot",
        ),
        (
            "Key was rejected by service",
            "secure_boot",
            "Secure Boot refused the driver's kernel module",
            "enrol the key that signs the module (mokutil --import), use signed modules, or turn Secure Boot off",
        ),
        (
            "module with unavailable key is rejected",
            "secure_boot",
            "Secure Boot refused the driver's kernel module",
            "enrol the key that signs the module (mokutil --import), use signed modules, or turn Secure Boot off",
        ),
        (
            "probe routine was not called for",
            "other_driver",
            "another driver, such as nouveau, holds the card",
            "blacklist nouveau, rebuild the initramfs and reboot",
        ),
        (
            "API mismatch",
            "mismatch",
            "the driver's libraries and its loaded module are of different versions",
            "reboot",
        ),
    ):
        place = flat.rfind(needle)
        if place >= 0:
            found.append((place, {"cause": cause, "message": message, "fix": fix}))
    return max(found, key=lambda item: item[0])[1] if found else None


def faults(text: str) -> list[dict[str, Any]]:
    """Hardware trouble in the log: {pci_id, kind: xid|bus_loss|aer, xid, text}, each once, with its count."""
    flat = re.sub(r"\s*\n\s*(?:NVRM:)?\s*", " ", text)
    flat = re.sub(r"\s+", " ", flat.replace("NVRM: ", ""))
    seen: dict[tuple[str, str, int], dict[str, Any]] = {}

    def add(pci: str, kind: str, number: int, words: str) -> None:
        domain, rest = pci.lower().split(":", 1)
        pci = f"{int(domain, 16):04x}:{rest}" + ("" if "." in rest else ".0")
        item = seen.setdefault((pci, kind, number), {"pci_id": pci, "kind": kind, "xid": number or None, "text": words})
        item["count"] = int(item.get("count", 0)) + 1

    for match in _XID.finditer(text):
        number = int(match.group(2))
        add(match.group(1), "xid", number, f"Xid {number}: {XID_MEANING.get(number, 'see the list of Xid errors')}")
    for match in _OFF_BUS.finditer(flat):
        add(match.group(1), "bus_loss", 0, "the card has fallen off the bus")
    for match in _AER.finditer(text):
        if "orrect" in match.group(2) and not match.group(2).lower().startswith("uncorrect"):
            continue
        add(match.group(1), "aer", 0, f"PCIe bus error, {match.group(2).strip()}")
    return list(seen.values())


def read(run: Run) -> Optional[str]:
    """The kernel log of this boot, from the journal or the ring buffer; None where neither may be read."""
    for argv in (["journalctl", "-k", "-b", "-o", "cat", "--no-pager", "-n", "5000"], ["dmesg"]):
        rc, out, _err = run(argv)
        if rc == 0 and out.strip():
            return out
    return None
