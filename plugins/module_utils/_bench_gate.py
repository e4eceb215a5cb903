# SPDX-License-Identifier: Apache-2.0
"""Whether two measurements may be compared, and what their difference means. No I/O.

Private to the collection: it may change at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._bench import BenchError, median, vs_percent

NOT_JUDGED = "Numerics and quality were not judged: this gate answers for speed only."

MUST_AGREE = {
    "method": "they were measured by different methods",
    "prompt_sha256": "their prompts differ",
    "state": "one is cold, the other warm",
    "requested_tokens": "they generated different numbers of tokens",
    "card_uuid": "they are of different cards",
    "machine_id": "they are of different machines",
}
MOVED_BASE = {"image_digest": "engine image", "driver_version": "driver"}


def incomparable(
    a: Mapping[str, Any], b: Mapping[str, Any], across: Sequence[str] = (), any_card: bool = False
) -> list[str]:
    """Why two results must not be compared. `across` names what the comparison is about and may differ."""
    found = []
    for key, text in MUST_AGREE.items():
        if any_card and key in ("card_uuid", "machine_id"):
            continue
        if key not in across and a.get(key) != b.get(key):
            found.append(text)
    for key, text in MOVED_BASE.items():
        if key not in across and a.get(key) != b.get(key):
            found.append(f"the {text} moved in between ({a.get(key)} and {b.get(key)})")
    for result in (a, b):
        if result.get("other_model"):
            found.append("one of the servers served another model")
        day = str(result.get("measured_at") or "")[:10]
        if day != str(a.get("measured_at") or "")[:10]:
            found.append("they were not measured on the same day")
    return found


def band_percent(rounds: Sequence[Mapping[str, Any]]) -> float:
    """The noise of one arm, from itself: how far its rounds and their runs lie apart, in percent of their median."""
    values = [float(run["decode_tps"]) for result in rounds for run in result["runs"]]
    if len(rounds) < 2 or len(values) < 4:
        raise BenchError("noise is estimated from at least two rounds of the present engine; give more rounds")
    return (max(values) - min(values)) / median(values) * 100.0


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """b against a: the difference in percent, the band of their own spreads, and whether it is one at all."""
    delta = vs_percent(float(b["median_decode_tps"]), float(a["median_decode_tps"]))
    band = max(float(a.get("spread") or 0.0), float(b.get("spread") or 0.0)) * 100.0
    return {"percent": delta, "band_percent": band, "verdict": "no difference" if abs(delta) <= band else "different"}


def judge(
    present: Sequence[Mapping[str, Any]],
    candidate: Sequence[Mapping[str, Any]],
    tolerance_percent: float,
    receipt_decode_tps: Optional[float] = None,
) -> dict[str, Any]:
    """pass, fail or cannot tell, for one card.

    `present` are the rounds of the engine that serves now, the last of them after the candidate: that one shows
    whether the card itself drifted meanwhile.
    """
    if not candidate:
        raise BenchError("the candidate was not measured")
    for result in (*present[1:], *candidate):
        across = ("image_digest",) if result in candidate else ()
        wrong = incomparable(present[0], result, across)
        if wrong:
            raise BenchError("the gate cannot compare these measurements: " + "; ".join(sorted(set(wrong))))
    band = band_percent(present)
    base = median(r["median_decode_tps"] for r in present)
    new = median(r["median_decode_tps"] for r in candidate)
    delta = vs_percent(new, base)
    if delta - band >= -tolerance_percent:
        verdict = "pass"
    elif delta + band < -tolerance_percent:
        verdict = "fail"
    else:
        verdict = "cannot tell"
    text = (
        f"{verdict}: the candidate decodes {new:.2f} tok/s, the present engine {base:.2f} ({delta:+.1f} %); "
        f"noise of the present engine against itself {band:.1f} %, allowed loss {tolerance_percent:.1f} %"
    )
    out: dict[str, Any] = {
        "verdict": verdict,
        "text": f"{text}. {NOT_JUDGED}",
        "candidate_decode_tps": new,
        "present_decode_tps": base,
        "difference_percent": delta,
        "band_percent": band,
        "tolerance_percent": tolerance_percent,
        "rounds": len(present),
    }
    if receipt_decode_tps:
        out["candidate_vs_receipt_percent"] = vs_percent(new, receipt_decode_tps)
        out["present_vs_receipt_percent"] = vs_percent(base, receipt_decode_tps)
    return out


def again(kept: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A kept result beside the one that takes its place: old, new, what moved in between, and a verdict."""
    return {
        "measured_at": kept.get("measured_at"),
        "old_decode_tps": kept["median_decode_tps"],
        "new_decode_tps": new["median_decode_tps"],
        "moved": [key for key in (*MOVED_BASE, "plan_hash", "boot_id") if kept.get(key) != new.get(key)],
        **difference(kept, new),
    }
