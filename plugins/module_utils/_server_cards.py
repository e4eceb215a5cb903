# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

The cards of a server: whether its model fits before it starts, and whether it really sits there afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _gguf, _gpu
from ansible_collections.tensorless.fleet.plugins.module_utils._host import bounded
from ansible_collections.tensorless.fleet.plugins.module_utils._runtime import Run

MIB = 1 << 20

# Known pairs of model file (sha256) and engine image (digest): the context, and what it takes of a P100 in MiB.
KNOWN: Mapping[tuple[str, str], tuple[int, int]] = {
    (
        "15ce2d4469673f1f1753c55de3780cfe04311dd6f05cb41633d73df128e91476",
        "sha256:35409ff97c2f518e468790c28bd19206ae777a945fcffe5775585e28fd9939a7",
    ): (65536, 14000),
}

# Bytes of one cache element, by the engine's name of the type.
_CACHE_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32, "iq4_nl": 18 / 32,
    "q5_0": 22 / 32, "q5_1": 24 / 32,
}  # fmt: skip


@dataclass(frozen=True)
class Need:
    mib: int
    source: str  # measured | estimated


def read(run: Run) -> dict[str, Any]:
    """The cards now, with who uses them; a hung nvidia-smi costs 30 seconds, not more."""
    return _gpu.read_gpus(bounded(run, 30), processes="yes", limit=30)


def need(plan: Mapping[str, Any]) -> Optional[Need]:
    """What the model takes on the card; None when its file cannot be read."""
    download = plan["download"]
    known = KNOWN.get((str(download["sha256"]), str(plan["image"]).rpartition("@")[2]))
    if known is not None and known[0] == int(plan["context"]):
        return Need(known[1], "measured")
    try:
        header, size = _gguf.read_file(str(download["blob"]))
    except (OSError, ValueError):
        return None
    return Need(round((size + cache_bytes(header, int(plan["context"]), plan["exec"])) / MIB), "estimated")


def cache_bytes(header: _gguf.Header, context: int, argv: Sequence[str]) -> float:
    """Keys and values of every layer that has attention, for the whole context."""
    keys, values = _cache_type(argv, ("-ctk", "--cache-type-k")), _cache_type(argv, ("-ctv", "--cache-type-v"))
    layers = {t.name.split(".")[1] for t in header.tensors if t.name.endswith((".attn_k.weight", ".attn_qkv.weight"))}
    heads = header.number("attention.head_count") or 0
    width = header.number("embedding_length") or 0
    each = width // heads if heads else 0
    key_width = header.number("attention.key_length") or each
    value_width = header.number("attention.value_length") or each
    kv_heads = _kv_heads(header) or heads
    element = key_width * _CACHE_BYTES.get(keys, 2.0) + value_width * _CACHE_BYTES.get(values, 2.0)
    return len(layers) * kv_heads * element * context


def _kv_heads(header: _gguf.Header) -> int:
    value = header.metadata.get(f"{header.metadata.get('general.architecture')}.attention.head_count_kv")
    if isinstance(value, tuple) and not isinstance(value, _gguf.Skipped):
        return max((int(v) for v in value), default=0)  # one number for each layer: the largest
    return value if isinstance(value, int) else 0


def _cache_type(argv: Sequence[str], flags: Sequence[str]) -> str:
    found = "f16"
    for word, following in zip(argv, argv[1:]):
        if word in flags:
            found = following
    return found


def too_full(
    plan: Mapping[str, Any], facts: Mapping[str, Any], freed_pids: frozenset[int], promised: dict[str, int]
) -> Optional[str]:
    """Why the plan's card has no room for it; None when it has, or when nothing can be told.

    `freed_pids` are servers that end before this one starts; `promised` is what servers started in the same run take,
    by card, and is added to.
    """
    wanted = need(plan)
    if wanted is None:
        return None
    for card in facts.get("cards") or []:
        if card["uuid"] not in {c["uuid"] for c in plan.get("cards") or []}:
            continue
        total, used = card.get("memory_mib"), card.get("memory_used_mib")
        if total is None or used is None:
            continue
        holders = [p for p in facts.get("processes") or [] if p.get("uuid") == card["uuid"]]
        freed = sum(int(p.get("memory_mib") or 0) for p in holders if p.get("pid") in freed_pids)
        free = int(total) - int(used) + freed - promised.get(card["uuid"], 0)
        promised[card["uuid"]] = promised.get(card["uuid"], 0) + wanted.mib
        if free < wanted.mib:
            others = ", ".join(
                f"pid {p.get('pid')} {p.get('name') or '?'} ({p.get('memory_mib')} MiB)"
                for p in holders
                if p.get("pid") not in freed_pids
            )
            return (
                f"{plan['model']} needs about {wanted.mib} MiB ({wanted.source}) on GPU {card['index']} "
                f"({card['uuid']}), which has {free} of {total} MiB free; "
                + (f"it is used by {others}: stop that first" if others else "choose a card with more memory")
                + ", choose another card, or lower the context"
            )
    return None


def used_by_card(facts: Mapping[str, Any]) -> dict[str, int]:
    return {
        str(card["uuid"]): int(card["memory_used_mib"])
        for card in facts.get("cards") or []
        if card.get("memory_used_mib") is not None
    }


def misplaced(
    wanted: Sequence[str], before: Mapping[str, int], facts: Mapping[str, Any], pids: frozenset[int]
) -> Optional[str]:
    """Says when a server is not on the card that it was given, or also on another; None when it is, or cannot be seen.

    `before` is the memory in use just before the start; `pids` are the processes of the server.
    """
    after = used_by_card(facts)
    if not wanted or not all(uuid in before and uuid in after for uuid in wanted):
        return None
    seen = {str(p.get("uuid")) for p in facts.get("processes") or [] if p.get("pid") in pids}
    strays = sorted(seen - set(wanted))
    if strays:
        return f"the server uses {', '.join(strays)}, but was given {', '.join(wanted)}"
    if not seen and not any(after[uuid] > before[uuid] for uuid in wanted):
        return (
            f"the server uses no memory of the card that it was given ({', '.join(wanted)}): it would run on the "
            "processor; run: tensorless doctor"
        )
    return None


def descendants(pid: int, parents: Mapping[int, int]) -> frozenset[int]:
    """A process and all that came from it; `parents` maps each process to its parent."""
    family = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in family} - family
        if not more:
            return frozenset(family)
        family |= more


def parents(proc: str = "/proc") -> dict[int, int]:
    """Every process with its parent."""
    found = {}
    for name in filter(str.isdigit, os.listdir(proc)):
        parent = _parent(f"{proc}/{name}/stat")
        if parent is not None:
            found[int(name)] = parent
    return found


def _parent(path: str) -> Optional[int]:
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            return int(stream.read().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError, ValueError):
        return None
