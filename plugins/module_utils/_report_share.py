# SPDX-License-Identifier: Apache-2.0
"""Replaces what a person may not want to publish. No I/O. Private to the collection: it may change at any time."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

ADDRESS = re.compile(
    r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"  # IPv4
    r"|(?<![\w:])(?:[0-9a-fA-F]{1,4}:){2,7}[0-9a-fA-F]{1,4}(?![\w:])"  # IPv6
    r"|(?<![\w:])(?:[0-9a-fA-F]{1,4}:){1,6}:(?:[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4})*)?(?![\w:])"
)
MAC = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![\w:])")
UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
HOME = re.compile(r"/(?:home|Users)/[^/\s'\"]+")
PUBLIC = ("127.0.0.1", "0.0.0.0")
# A version is no address, though it may look like one.
KEPT = frozenset(
    {"driver_version", "build_info", "kernel", "system", "at", "measured_at", "generated_at", "image_digest"}
)
DROPPED = frozenset({"machine_id", "boot_id", "pci_id", "serial"})


def redact(document: Mapping[str, Any]) -> dict[str, Any]:
    """The same report with hosts, cards and addresses under other names. Equal names stay equal."""
    hosts = {str(host["name"]): f"host-{i}" for i, host in enumerate(document.get("hosts") or [], 1)}
    cards = {
        str(card["uuid"]): f"card-{i}" for i, card in enumerate(document.get("cards") or [], 1) if card.get("uuid")
    }
    names = {**hosts, **cards}
    # Longest first, so that gpu-1 does not spoil gpu-10.
    words = sorted((re.escape(name) for name in names), key=len, reverse=True)
    known = re.compile(r"(?<![\w-])(?:" + "|".join(words) + r")(?![\w-])") if words else None
    short = {name[:12]: new for name, new in cards.items()}

    def text(value: str) -> str:
        if known is not None:
            value = known.sub(lambda found: names[found.group(0)], value)
        for part, new in short.items():
            value = value.replace(part, new)
        value = UUID.sub("card-x", value)
        value = MAC.sub("address", value)
        value = ADDRESS.sub(lambda found: found.group(0) if found.group(0) in PUBLIC else "address", value)
        return HOME.sub("/home/user", value)

    def walk(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: walk(item, name) for name, item in value.items() if name not in DROPPED}
        if isinstance(value, list):
            return [walk(item, key) for item in value]
        return text(value) if isinstance(value, str) and key not in KEPT else value

    out: dict[str, Any] = walk(copy.deepcopy(dict(document)))
    # What a watched machine id or slot was, stands in the list of changes.
    out["changes"] = [change for change in out.get("changes") or [] if change.get("field") not in DROPPED]
    return out
