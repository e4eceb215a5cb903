# SPDX-License-Identifier: Apache-2.0
"""The report for a terminal, for Markdown, for a spreadsheet and for Prometheus. No I/O.

Private to the collection: it may change at any time. Every text in a report may come from a server or an inventory, so
it is data here: never markup, never a control sequence, never a formula.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

# Control characters, line separators and the marks that turn the direction of text.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


def clean(value: Any) -> str:
    """Text without anything that a terminal, a browser or an editor would act on."""
    text = "" if value is None else str(value)
    text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates
    return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text).replace("\n", " ").replace("\t", " ")


def markdown(value: Any) -> str:
    """Text that Markdown shows as it is, also inside a table."""
    text = clean(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#!])", r"\\\1", text)


def rate(value: Optional[float]) -> str:
    return "" if value is None else f"{value:.2f}"


def percent(value: Optional[float]) -> str:
    return "" if value is None else f"{round(value, 1) + 0.0:+.1f} %"


def short_uuid(uuid: Any) -> str:
    """Enough of a UUID to find the card again, without the eight-fold dash pattern filling a line."""
    text = clean(uuid)
    return text[:12] if text.startswith("GPU-") else (text or "none")


def summary(document: Mapping[str, Any]) -> list[str]:
    """The fleet in a few lines, for a terminal."""
    fleet = document["fleet"]
    lines = [
        f"{_count(fleet['cards'], 'card')} on {_count(fleet['hosts'], 'host')}: "
        + (
            ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in fleet["cards_by_status"].items())
            or "none"
        )
    ]
    if fleet["decode_tps"]:
        spread = fleet["decode_tps"]
        lines.append(f"decode {spread['median']:.2f} tok/s (median; {spread['min']:.2f} to {spread['max']:.2f})")
    for host in document["hosts"]:
        if host["status"] != "ok":
            lines.append(f"{clean(host['name'])}: {host['status'].replace('_', ' ')}: {clean(host['reason'])}")
        if host.get("restarted"):
            lines.append(f"{clean(host['name'])}: was restarted since an earlier report, and no cause is recorded")
    for card in document["cards"]:
        where = f"{clean(card['host'])} {short_uuid(card['uuid'])}"
        if card.get("decode_tps") is not None:
            versus = (
                f", {percent(card['vs_receipt_percent'])} against the receipt" if "vs_receipt_percent" in card else ""
            )
            slow = f", SLOW: {clean(card['slow_reason'])}" if card["slow"] else ""
            label = " UNTUNED" if card.get("untuned_label") else ""
            lines.append(
                f"{where}: {clean(card['model'])}: {rate(card['decode_tps'])} tok/s, "
                f"TTFT {float(card['ttft_ms'] or 0):.0f} ms{versus}{label}{slow}{_age(card)}"
            )
        else:
            lines.append(f"{where}: {card['status'].replace('_', ' ')}: {clean(card['reason'])}")
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _age(card: Mapping[str, Any]) -> str:
    return "" if card.get("current", True) else f" (not of this run: measured {clean(card.get('measured_at'))})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    out = ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |"]
    return [*out, *("| " + " | ".join(row) + " |" for row in rows), ""]


def to_markdown(document: Mapping[str, Any], title: str = "Fleet report") -> str:
    """The report for people who read text."""
    fleet = document["fleet"]
    lines = [f"# {markdown(title)}", "", f"Generated {markdown(document['generated_at'])}.", ""]
    lines += [f"* {markdown(line)}" for line in summary(document)[: 2 if fleet["decode_tps"] else 1]]
    lines += ["", "## Cards", ""]
    rows = []
    for card in document["cards"]:
        state = (
            "untuned" if card.get("untuned_label") else ("slow" if card["slow"] else card["status"].replace("_", " "))
        )
        if not card.get("current", True):
            state = "not reached" if card["status"] == "not_reached" else f"{state}, not of this run"
        ttft = card.get("ttft_ms")
        rows.append(
            [
                *(markdown(card["host"]), markdown(card["uuid"] or "none"), markdown(card["name"]), state),
                *(markdown(card["model"]), rate(card.get("decode_tps")), "" if ttft is None else f"{ttft:.0f}"),
                percent(card.get("vs_receipt_percent")),
                markdown(card["slow_reason"] or card["reason"] or "; ".join(f["text"] for f in card["findings"])),
            ]
        )
    lines += _table(
        ["host", "card", "name", "state", "model", "decode tok/s", "TTFT ms", "vs receipt", "what stands out"], rows
    )
    lines += ["## Hosts", ""]
    lines += _table(
        ["host", "status", "driver", "system", "reason"],
        [
            [
                markdown(h["name"]),
                h["status"],
                markdown(h["driver_version"]),
                markdown(h["system"]),
                markdown(h["reason"]),
            ]
            for h in document["hosts"]
        ],
    )
    if document["engines"]:
        lines += ["## Engine rates", ""]
        lines += _table(
            ["model", "engine", "card", "cards", "decode tok/s (median)", "source"],
            [
                [
                    *(markdown(e["model"]), markdown(e["build_info"] or e["image_digest"]), markdown(e["card_name"])),
                    *(str(e["cards"]), rate(e["decode_tps"]["median"])),
                    markdown(e["source"][0]) + (f" and {len(e['source']) - 1} more" if len(e["source"]) > 1 else ""),
                ]
                for e in document["engines"]
            ],
        )
    if document.get("ledger"):
        lines += ["## Ledger", ""]
        lines += _table(["id", "state", "claim", "why"], [_ledger_row(entry) for entry in document["ledger"]])
    if document["changes"]:
        lines += ["## What changed", ""]
        lines += _table(
            ["when", "what", "field", "was", "now"],
            [[markdown(c[key]) for key in ("at", "what", "field", "was", "now")] for c in document["changes"]],
        )
    lines += ["Rates are measured, differences derived, receipts read. See docs/reference/measuring-rules.md.", ""]
    return "\n".join(lines)


def _ledger_row(entry: Mapping[str, Any]) -> list[str]:
    claim = markdown(entry["claim"])
    if entry["state"] == "struck":
        claim = f"~~{claim}~~ struck {markdown(entry['struck_at'])}, see {markdown(entry['replaced_by'])}"
    return [markdown(entry["id"]), markdown(entry["state"]), claim, markdown(entry.get("reason"))]


CSV_COLUMNS = (
    *("host", "uuid", "index", "name", "status", "reason", "model", "decode_tps", "ttft_ms", "prefill_tps"),
    *("server_decode_tps", "receipt_decode_tps", "vs_receipt_percent", "receipt_applies", "untuned_label", "slow"),
    *("slow_reason", "driver_version", "image_digest", "plan_hash", "measured_at"),
)


def to_csv(document: Mapping[str, Any]) -> str:
    """One row a card."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for card in document["cards"]:
        writer.writerow([_cell(card.get(column)) for column in CSV_COLUMNS])
    return out.getvalue()


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, (int, float)):
        return value
    text = clean(value)
    # A spreadsheet takes these for the start of a formula.
    return "'" + text if text[:1] in ("=", "+", "-", "@") else text


METRICS = (
    ("tensorless_decode_tokens_per_second", "decode_tps", 1.0, "Median decode rate of the card's last benchmark."),
    ("tensorless_ttft_seconds", "ttft_ms", 0.001, "Median time to the first token of the last benchmark."),
    ("tensorless_prefill_tokens_per_second", "prefill_tps", 1.0, "Prefill rate by the server's own timings."),
    ("tensorless_receipt_decode_tokens_per_second", "receipt_decode_tps", 1.0, "The receipt's decode rate."),
    ("tensorless_vs_receipt_ratio", "vs_receipt_percent", 0.01, "Difference from the receipt, 0.01 is one percent."),
)


def to_prometheus(document: Mapping[str, Any]) -> str:
    """For node_exporter's textfile collector on the controller."""
    lines: list[str] = []

    def family(name: str, text: str, samples: Sequence[tuple[Mapping[str, Any], float]]) -> None:
        lines.extend([f"# HELP {name} {text}", f"# TYPE {name} gauge"])
        for labels, value in samples:
            shown = ",".join(f'{key}="{_label(item)}"' for key, item in labels.items())
            lines.append(f"{name}{{{shown}}} {value:.10g}")

    cards = [(card, {key: card.get(key) for key in ("host", "uuid", "model")}) for card in document["cards"]]
    for name, key, factor, text in METRICS:
        family(name, text, [(who, card[key] * factor) for card, who in cards if card.get(key) is not None])
    family(
        "tensorless_card_slow",
        "1 where the card is below its receipt or its equals.",
        [(w, float(c["slow"])) for c, w in cards],
    )
    family(
        "tensorless_card_info", "State of each card, always 1.", [({**w, "status": c["status"]}, 1.0) for c, w in cards]
    )
    hosts = [({"host": h["name"], "status": h["status"]}, 1.0) for h in document["hosts"]]
    family("tensorless_host_info", "State of each host, always 1.", hosts)
    return "\n".join(lines) + "\n"


def _label(value: Any) -> str:
    return clean(value).replace("\\", "\\\\").replace('"', '\\"')
