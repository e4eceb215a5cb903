# SPDX-License-Identifier: Apache-2.0
"""Receipts from measurements: TOML for a recipe, Markdown for people. No I/O.

Private to the collection: it may change at any time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils._bench import median, vs_percent
from ansible_collections.tensorless.fleet.plugins.module_utils._report_text import clean, markdown

ALWAYS_OPEN = (
    "quality (perplexity, divergence, task screens)",
    "numerics against the reference",
    "speculative decoding",
)
CONTEXTS = {4096: "ctx_4k", 32768: "ctx_32k", 65536: "ctx_65k"}


def receipts(document: Mapping[str, Any]) -> dict[str, str]:
    """File name -> text. One receipt for each model, card kind and image, from the tuned cards of this run."""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for card in document["cards"]:
        measured = card["status"] == "benched" and card["current"]
        if measured and card["receipt_applies"] and card.get("image_digest"):
            key = (str(card["model"]), str(card["recipe_card"]), str(card["image_digest"]))
            groups.setdefault(key, []).append(card)
    out: dict[str, str] = {}
    for (model, card_id, digest), cards in sorted(groups.items()):
        name = f"{_file(model.split('/')[-1])}-{_file(card_id)}-{digest.partition(':')[2][:12]}"
        out[f"receipts/{name}.toml"] = to_toml(model, card_id, digest, cards)
        out[f"receipts/{name}.md"] = to_markdown(model, card_id, digest, cards)
    return out


def _file(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in text).lstrip(".") or "x"


def _text(value: str) -> str:
    """A TOML basic string; JSON's escapes are a subset of TOML's."""
    return json.dumps(clean(value), ensure_ascii=True)


def long_context(cards: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """(decode, prefill) by receipt key, from sweeps whose control held."""
    decode: dict[str, list[float]] = {}
    prefill: dict[str, list[float]] = {}
    for card in cards:
        for sweep in card.get("sweeps") or []:
            if sweep.get("kind") != "prompt" or not sweep.get("valid"):
                continue
            for arm in sweep.get("arms") or []:
                key = CONTEXTS.get(arm.get("value"))
                if key and arm.get("decode_tps"):
                    decode.setdefault(key, []).append(arm["decode_tps"])
                if key and arm.get("prefill_tps"):
                    prefill.setdefault(key, []).append(arm["prefill_tps"])
    return ({k: median(v) for k, v in decode.items()}, {k: median(v) for k, v in prefill.items()})


def scope(cards: Sequence[Mapping[str, Any]], digest: str) -> list[str]:
    """What the numbers are numbers of."""
    first = cards[0]
    names = sorted({str(card["name"]) for card in cards})
    drivers = sorted({str(card["driver_version"]) for card in cards})
    runs = [run for card in cards for run in card["runs"]]
    tokens = sorted({int(run["tokens"]) for run in runs})
    labels = sorted({str(label) for card in cards for label in card["labels"]})
    return [
        f"engine image {digest}",
        f"model file sha256 {first.get('model_sha256')}",
        f"{len(cards)} card{'s' if len(cards) != 1 else ''}: {', '.join(names)}",
        f"driver {', '.join(drivers)}",
        f"prompt of {first['prompt_tokens']} tokens, sha256 {str(first.get('prompt_sha256'))[:16]}",
        "greedy, seed 424242, no prompt cache",
        f"{len(runs)} measured runs of {' or '.join(map(str, tokens))} tokens after a warm-up each",
        "median of the cards' medians",
        f"method {first.get('method')}",
        # What was not as it should be while these numbers were taken belongs to them.
        *(f"CAUTION: {label}" for label in labels),
    ]


def not_measured(cards: Sequence[Mapping[str, Any]]) -> list[str]:
    have, _prefill = long_context(cards)
    missing = [f"decode at {key[4:].upper()} context" for key in CONTEXTS.values() if key not in have]
    return [*missing, *ALWAYS_OPEN]


def to_toml(model: str, card_id: str, digest: str, cards: Sequence[Mapping[str, Any]]) -> str:
    """The [receipt] table as a recipe takes it."""
    rates = [float(card["decode_tps"]) for card in cards]
    decode, prefill = long_context(cards)
    lines = [
        f"# Receipt of {clean(model)} on {clean(card_id)}, written from measurements.",
        "[receipt]",
        f"source = {_text('tensorless_bench on ' + digest)}",
        f"summary = {_text(summary(rates))}",
        "notes = [",
        *(f"  {_text(note)}," for note in [*scope(cards, digest), "not measured: " + ", ".join(not_measured(cards))]),
        "]",
        "",
        "[receipt.decode_tps]",
        f"short = {median(rates):.2f}",
        *(f"{key} = {decode[key]:.2f}" for key in CONTEXTS.values() if key in decode),
    ]
    if prefill:
        lines += ["", "[receipt.prefill_tps]", *(f"{k} = {prefill[k]:.1f}" for k in CONTEXTS.values() if k in prefill)]
    return "\n".join(lines) + "\n"


def summary(rates: Sequence[float]) -> str:
    spread = f", {min(rates):.2f} to {max(rates):.2f} over {len(rates)} cards" if len(rates) > 1 else ""
    return f"{median(rates):.2f} tok/s decode at short context{spread}."


def to_markdown(model: str, card_id: str, digest: str, cards: Sequence[Mapping[str, Any]]) -> str:
    rates = [float(card["decode_tps"]) for card in cards]
    lines = [f"# {markdown(model)} on {markdown(card_id)}", "", markdown(summary(rates)), "", "## Scope", ""]
    lines += [f"* {markdown(line)}" for line in scope(cards, digest)]
    lines += [
        "",
        "## Measured",
        "",
        "| card | decode tok/s (each run) | TTFT ms | server's own tok/s | against the receipt |",
    ]
    lines.append("| --- | --- | --- | --- | --- |")
    for card in cards:
        runs = " / ".join(f"{run['decode_tps']:.2f}" for run in card["runs"])
        base = card.get("receipt_decode_tps")
        versus = f"{vs_percent(card['decode_tps'], base):+.1f} %" if base else "none"
        own = card.get("server_decode_tps")
        shown = f"{own:.2f}" if own else "not given"
        rates_of = f"{card['decode_tps']:.2f} ({runs})"
        lines.append(f"| {markdown(card['uuid'])} | {rates_of} | {card['ttft_ms']:.0f} | {shown} | {versus} |")
    lines += ["", "## Not measured", "", *(f"* {line}" for line in not_measured(cards)), ""]
    return "\n".join(lines)
