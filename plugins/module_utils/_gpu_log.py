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
_ACTION = re.compile(r"GPU recovery action changed from .* to \w+ \(([\w ]+)\)")
_RELEASE = re.compile(r"is not supported by the NVIDIA (\d{3}[\d.]*) driver release")
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
    92: "many single bit errors in the card's memory",
    154: "the driver asks for a reset of the card or of the host",
}
HARDWARE_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 154})


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
    if not found and "ignoring the legacy GPU" in flat:
        problem = {
            "cause": "branch_too_new",
            "message": "the loaded driver is newer than the last branch for this card and ignores it",
            "fix": "install a driver of the last branch for it (R580 for Pascal cards) and reboot",
        }
        found.append((flat.rfind("ignoring the legacy GPU"), problem))
    for match in _RELEASE.finditer(flat):
        problem = {
            "cause": "branch_too_new" if int(match.group(1)[:3]) > 580 else "not_supported",
            "message": f"the loaded driver {match.group(1)} does not support this card",
            "fix": "install a driver of the R580 branch, proprietary kernel module, and reboot",
        }
        found.append((match.start(), problem))
    for needle, cause, message, fix in (
        (
            "This PCI I/O region assigned to your NVIDIA device is invalid",
            "no_address_space",
            "the firmware gave the card no address space for its memory",
            "turn on Above 4G Decoding (64-bit BARs) in the firmware's setup, or boot with pci=realloc",
        ),
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
    if not found and "RmInitAdapter failed" in flat:
        # It follows on other causes as well, which say more.
        return {
            "cause": "start_failed",
            "message": "the driver could not start the card",
            "fix": "power-cycle the host; if it stays so, check power cables and seating, or replace the card",
        }
    return max(found, key=lambda item: item[0])[1] if found else None


def faults(text: str) -> list[dict[str, Any]]:
    """Hardware trouble in the log: {pci_id, kind: xid|bus_loss|aer, xid, text}, each once, with its count."""
    flat = re.sub(r"\s*\n\s*(?:NVRM:)?\s*", " ", text)
    flat = re.sub(r"\s+", " ", flat.replace("NVRM: ", ""))
    seen: dict[tuple[str, str, int], dict[str, Any]] = {}

    def address(text: str) -> str:
        domain, rest = text.lower().split(":", 1)
        return f"{int(domain, 16):04x}:{rest}" + ("" if "." in rest else ".0")

    def add(place: str, kind: str, number: int, words: str) -> None:
        pci = address(place)
        item = seen.setdefault((pci, kind, number), {"pci_id": pci, "kind": kind, "xid": number or None, "text": words})
        item["count"] = int(item.get("count", 0)) + 1

    for match in _XID.finditer(text):
        number = int(match.group(2))
        action = _ACTION.search(text[match.end() :].partition("\n")[0]) if number == 154 else None
        if action and action.group(1) == "None":
            seen.pop((address(match.group(1)), "xid", number), None)  # what was asked for has been done
            continue
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
