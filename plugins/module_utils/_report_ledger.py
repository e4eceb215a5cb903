# SPDX-License-Identifier: Apache-2.0
"""Claims that were made from measurements, and what became of them. No I/O.

Nothing is edited and nothing is taken out: a wrong claim is struck, with its date, its reason and the claim that took
its place. What led nowhere is kept as well. Private to the collection: it may change at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

STATES = ("stands", "declined", "not filed", "superseded")


def merge(kept: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], at: str) -> list[dict[str, Any]]:
    """The ledger with new entries; an entry with `corrects` strikes the one that it names."""
    out = [dict(entry) for entry in kept]
    for entry in new:
        name, state = str(entry.get("id") or ""), entry.get("state", "stands")
        if not name or not entry.get("claim"):
            raise Refusal("an entry of the ledger needs an id and a claim; nothing was written")
        if state not in STATES:
            raise Refusal(f"the entry {name} has the state {state!r}; it is one of {', '.join(STATES)}")
        row = {"id": name, "at": at, "state": state, "claim": str(entry["claim"]), "reason": entry.get("reason")}
        same = next((old for old in out if old["id"] == name), None)
        if same is not None:
            if same["claim"] == row["claim"]:
                continue
            raise Refusal(
                f"the ledger has an entry {name} already, and entries are not edited: give the correction an id of its "
                f"own and `corrects: {name}`"
            )
        corrects = entry.get("corrects")
        if corrects:
            wrong = next((old for old in out if old["id"] == corrects), None)
            if wrong is None:
                raise Refusal(f"the entry {name} corrects {corrects!r}, which the ledger does not have")
            if not entry.get("reason"):
                raise Refusal(f"the entry {name} corrects {corrects}: say the reason")
            wrong.update(state="struck", struck_at=at, replaced_by=name, reason=entry["reason"])
        out.append(row)
    return out
