# SPDX-License-Identifier: Apache-2.0
"""Replaces what a person may not want to publish. No I/O. Private to the collection: it may change at any time."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils._bench import DOCUMENTED, documented
from ansible_collections.tensorless.fleet.plugins.module_utils._report_text import clean, markdown

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


def bundle(document: Mapping[str, Any]) -> dict[str, str]:
    """What a post about a result needs: the benchmark's JSON for each card, the system, and how it was run."""
    out: dict[str, str] = {}
    lines = [
        "# Results for sharing",
        "",
        f"tensorless.fleet {clean(document.get('collection_version')) or 'checkout'}",
        "",
    ]
    for number, card in enumerate(document["cards"], 1):
        if card.get("decode_tps") is None:
            continue
        name = f"bench-{number}.json"
        renamed = {"card": "recipe_card", "median_decode_tps": "decode_tps", "median_ttft_ms": "ttft_ms"}
        fields = {key: card[renamed.get(key, key)] for key in DOCUMENTED if card.get(renamed.get(key, key)) is not None}
        out[f"share/{name}"] = json.dumps(documented(fields), indent=1) + "\n"
        limit = ((card.get("witness") or {}).get("fields") or {}).get("power_limit_w") or {}
        watts = f"{limit['max']:g} W" if limit else "[N/A]"
        lines += [
            f"## {markdown(name)}",
            "",
            f"* name, memory.total, driver_version, power.limit: {markdown(card['name'])}, {card['memory_mib']} MiB, "
            f"{markdown(card['driver_version'])}, {watts}",
            f"* run with {markdown(card.get('runtime') or 'an unknown runtime')}",
            f"* {markdown(card.get('untuned_label') or 'tuned: no other context, no extra arguments')}",
        ]
        others = ((card.get("witness") or {}).get("other_processes")) or []
        lines.append(f"* {'another process used' if others else 'nothing else used'} the card meanwhile")
        lines += [f"* {markdown(item['text'])}" for item in card["findings"]]
        lines.append("")
    out["share/README.md"] = "\n".join(lines)
    return out
