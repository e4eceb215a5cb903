# SPDX-License-Identifier: GPL-3.0-or-later
"""The report as one HTML page. Private to the collection: it may change at any time.

Everything is written into the page as text by this file; the script only sorts and filters what is there. The page's
own policy lets nothing else run and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._bench import unpack_times
from ansible_collections.tensorless.fleet.plugins.module_utils._report_text import clean, percent, rate, short_uuid
from ansible_collections.tensorless.fleet.plugins.plugin_utils import _report_svg as svg

HERE = os.path.dirname(os.path.abspath(__file__))
TAGS = {
    "benched": "good",
    "outdated": "warn",
    "failed": "bad",
    "not_benched": "warn",
    "not_reached": "warn",
    "skipped": "",
}
CALM = ("ok", "not_in_this_run")  # states of a host that nobody has to look after


def h(value: Any) -> str:
    """Text as text, wherever it stands in the page."""
    return html.escape(clean(value), quote=True)


def asset(name: str) -> str:
    with open(os.path.join(HERE, name), encoding="utf-8") as handle:
        return handle.read()


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def render(document: Mapping[str, Any], title: str = "Fleet report") -> str:
    """The whole page."""
    css, js = asset("_report_page.css"), asset("_report_page.js")
    allowed = f"style-src '{_digest(css)}'; script-src '{_digest(js)}'"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
        f"<title>{h(title)}</title><style>{css}</style></head><body>",
        f'<header><h1>{h(title)}</h1><p class="soft">Generated {h(document["generated_at"])}</p></header><main>',
        _glance(document["fleet"]),
        _attention(document),
        _plots(document),
        _cards_table(document["cards"]),
        "<h2>Each card</h2>",
        *(_details(number, card) for number, card in enumerate(document["cards"])),
        _hosts(document["hosts"]),
        _engines(document["engines"]),
        _changes(document["changes"]),
        _ledger(document.get("ledger") or []),
        "</main><footer><p>Decode is the tokens after the first over the time from the first to the last, by the "
        "server's own token counter; TTFT is from the request to the first token. Rates are measured, differences are "
        "derived, receipts are read. Peaks of the witness are lower bounds: a spike between two samples is not seen. "
        "Receipts were measured with a different prompt, so expect a few percent of difference.</p></footer>",
        f"<script>{js}</script></body></html>\n",
    ]
    return "".join(parts)


def _tile(name: str, value: str, note: str = "") -> str:
    small = f"<small>{h(note)}</small>" if note else ""
    return f"<div><dt>{h(name)}</dt><dd>{h(value)}{small}</dd></div>"


def _glance(fleet: Mapping[str, Any]) -> str:
    status = fleet["cards_by_status"]
    decode, ttft = fleet["decode_tps"], fleet["ttft_ms"]
    by_status = fleet["hosts_by_status"]
    down = fleet["hosts"] - sum(by_status.get(status, 0) for status in CALM)
    outside = by_status.get("not_in_this_run", 0)
    notes = [f"{down} with trouble"] if down else [] if outside else ["all answered"]
    notes += [f"{outside} not in this run"] if outside else []
    tiles = [
        _tile("Hosts", str(fleet["hosts"]), ", ".join(notes)),
        _tile("Cards", str(fleet["cards"]), f"{status.get('skipped', 0)} skipped"),
        _tile("Measured", str(status.get("benched", 0)), f"{fleet['untuned']} untuned"),
        _tile("Slow", str(fleet["slow"]), "below receipt or equals"),
    ]
    if decode:
        tiles += [
            _tile("Decode, median", f"{decode['median']:.2f}", f"tok/s; {decode['min']:.2f} to {decode['max']:.2f}"),
            _tile("Decode, all cards", f"{fleet['decode_tps_total']:.0f}", "tok/s together, derived"),
        ]
    if ttft:
        tiles.append(_tile("TTFT, median", f"{ttft['median']:.0f}", f"ms; {ttft['min']:.0f} to {ttft['max']:.0f}"))
    return '<h2>The fleet at a glance</h2><dl class="tiles">' + "".join(tiles) + "</dl>"


def _attention(document: Mapping[str, Any]) -> str:
    items = []
    for host in document["hosts"]:
        if host["status"] not in CALM:
            word = h(host["status"].replace("_", " "))
            items.append(f'<li class="bad"><strong>{h(host["name"])}</strong> is {word}: {h(host["reason"])}</li>')
        if host.get("restarted"):
            text = "was restarted since an earlier report, and no cause is recorded"
            items.append(f"<li><strong>{h(host['name'])}</strong> {text}.</li>")
    for number, card in enumerate(document["cards"]):
        where = f'<strong><a href="#card-{number}">{h(card["host"])} {h(short_uuid(card["uuid"]))}</a></strong>'
        if card["status"] == "failed":
            items.append(f'<li class="bad">{where}: could not be measured: {h(card["reason"])}</li>')
        elif card["slow"]:
            items.append(f'<li class="bad">{where} is slow: {h(card["slow_reason"])}</li>')
        elif card["findings"]:
            items.append(f"<li>{where}: {h('; '.join(f['text'] for f in card['findings']))}</li>")
    if not items:
        return '<h2>What needs attention</h2><p class="calm">Nothing stands out.</p>'
    return '<h2>What needs attention</h2><ul class="attention">' + "".join(items) + "</ul>"


def _plots(document: Mapping[str, Any]) -> str:
    measured = [card for card in document["cards"] if card.get("decode_tps") is not None]
    if not measured:
        return ""
    figures = []
    versus = [(c["vs_receipt_percent"], c["slow"]) for c in measured if c.get("vs_receipt_percent") is not None]
    if versus:
        label = f"{len(versus)} cards from {min(versus)[0]:+.1f} % to {max(versus)[0]:+.1f} % of their receipt"
        figures.append(
            _figure("Each card against its receipt, in percent (dashed: the receipt)", svg.ranked(versus, label))
        )
    models: dict[str, list[Mapping[str, Any]]] = {}
    for card in measured:
        models.setdefault(str(card["model"]), []).append(card)
    for model, cards in sorted(models.items())[:6]:
        rates = [card["decode_tps"] for card in cards]
        label = f"Decode of {len(rates)} cards between {min(rates):.2f} and {max(rates):.2f} tokens per second"
        figures.append(_figure(f"Decode, {clean(model)}: cards by tok/s", svg.histogram(rates, "tok/s", label)))
        times = [card["ttft_ms"] for card in cards if card.get("ttft_ms") is not None]
        if times:
            label = f"TTFT of {len(times)} cards between {min(times):.0f} and {max(times):.0f} milliseconds"
            figures.append(_figure(f"TTFT, {clean(model)}: cards by ms", svg.histogram(times, "ms", label)))
    return '<h2>Distribution</h2><div class="plots">' + "".join(figures) + "</div>"


def _figure(caption: str, picture: str) -> str:
    return f"<figure><figcaption>{h(caption)}</figcaption>{picture}</figure>"


def _state(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(word, colour) for a card, the most telling first."""
    words = []
    if card["slow"]:
        words.append(("slow", "bad"))
    if card.get("untuned_label"):
        words.append(("untuned", "warn"))
    words.append((card["status"].replace("_", " "), TAGS.get(card["status"], "")))
    if not card.get("current", True) and card["status"] != "not_reached":
        words.append(("not of this run", ""))
    return words


def _cell(value: Optional[float], text: str) -> str:
    return f'<td class="n" data-value="{"" if value is None else repr(float(value))}">{h(text)}</td>'


HEADS = (
    *(("Host and card", ""), ("State", ""), ("Model", ""), ("Decode tok/s", "n"), ("vs receipt", "n")),
    *(("TTFT ms", "n"), ("What stands out", "")),
)


def _cards_table(cards: Sequence[Mapping[str, Any]]) -> str:
    states = sorted({word for card in cards for word, _colour in _state(card)})
    options = "".join(f'<option value="{h(s.replace(" ", "_"))}">{h(s)}</option>' for s in states)
    rows = []
    for number, card in enumerate(cards):
        words = _state(card)
        tags = " ".join(f'<span class="tag {colour}">{h(word)}</span>' for word, colour in words)
        keys = " ".join(word.replace(" ", "_") for word, _colour in words)
        versus, ttft = card.get("vs_receipt_percent"), card.get("ttft_ms")
        note = card["slow_reason"] or card["reason"] or "; ".join(f["text"] for f in card["findings"])
        rows.append(
            f'<tr data-state="{h(keys)}"><td>{h(card["host"])} <span class="soft">{h(card["name"])}</span><br>'
            f'<a class="uuid" href="#card-{number}">{h(card["uuid"] or "no card")}</a></td>'
            f'<td>{tags}</td><td class="wide">{h(card["model"])}</td>'
            + _cell(card.get("decode_tps"), rate(card.get("decode_tps")))
            + _cell(versus, percent(versus))
            + _cell(ttft, "" if ttft is None else f"{ttft:.0f}")
            + f'<td class="wide">{h(note)}</td></tr>'
        )
    heads = "".join(
        f'<th scope="col" class="{kind}"><button type="button">{h(name)}</button></th>' for name, kind in HEADS
    )
    return (
        '<h2 id="cards">Cards</h2><div class="controls" hidden>'
        '<label for="filter-text">Filter by text<input id="filter-text" type="search" autocomplete="off"></label>'
        '<label for="filter-state">State<select id="filter-state"><option value="">all</option>'
        + options
        + '</select></label><span id="filter-count" class="soft" role="status"></span></div>'
        '<div class="scroll" role="region" aria-labelledby="cards" tabindex="0"><table id="cards-table">'
        "<caption>Every card of the fleet. A column's button sorts by it.</caption>"
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Sequence[int] = (), where: str = ""
) -> str:
    """A plain table; every cell is text. `where` tells tables of one caption apart to who does not see the page."""
    label = f"{caption}, {where}" if where else caption
    head = "".join(f'<th scope="col"{_class(i, numbers)}>{h(name)}</th>' for i, name in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(f"<td{_class(i, numbers, c)}>{h(c)}</td>" for i, c in enumerate(r)) + "</tr>" for r in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{h(label)}" tabindex="0">'
        f"<table><caption>{h(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _class(place: int, numbers: Sequence[int], text: Any = "") -> str:
    """Long texts and digests may break anywhere, words and names only between words."""
    if place in numbers:
        return ' class="n"'
    return ' class="wide"' if len(str(text)) > 40 else ""


def _details(number: int, card: Mapping[str, Any]) -> str:
    where = f"{card['host']} {card['uuid'] or 'no card'}"
    if card.get("decode_tps") is None:
        return _fold(number, f"{where}: {card['status'].replace('_', ' ')}", f"<p>{h(card['reason'])}</p>")
    parts = [
        f"<p>{h(label)}</p>" for label in [*card["labels"], *card["notes"], *(f["text"] for f in card["findings"])]
    ]
    parts = list(dict.fromkeys(parts))
    runs = []
    for place, run in enumerate(card["runs"], 1):
        itl = run.get("itl_ms") or {}
        row = [place, rate(run["decode_tps"]), f"{run['ttft_ms']:.0f}"]
        runs.append([*row, *(rate(itl.get(key)) for key in ("p50", "p90", "p99", "max")), itl.get("stalls")])
    heads = ("run", "decode tok/s", "TTFT ms", "ITL p50 ms", "p90", "p99", "max", "stalls")
    parts.append(table("Runs", heads, runs, range(1, 8), where))
    if any(card["discarded"]):
        parts.append("<p>Thrown out: " + h("; ".join(reason for run in card["discarded"] for reason in run)) + "</p>")
    if card.get("times"):
        parts.append(_timeline(str(card["times"]), where))
    parts += [_sweep(sweep, where) for sweep in card.get("sweeps") or []]
    if len(card["history"]) > 1:
        past = [(float(i), float(p["decode_tps"])) for i, p in enumerate(card["history"])]
        label = f"{len(past)} results of this card, the last {past[-1][1]:.2f} tokens per second"
        ends = [(x, clean(card["history"][int(x)]["measured_at"])[:10]) for x in (past[0][0], past[-1][0])]
        parts.append(_figure("History: decode of the last results, tok/s", svg.trace(past, "", label, ends)))
    parts.append(_witness(card.get("witness") or {}, where))
    parts.append(_scope(card))
    tags = "".join(f'<span class="tag {colour}">{h(word)}</span>' for word, colour in _state(card) if colour != "good")
    return _fold(number, f"{where}: {rate(card['decode_tps'])} tok/s", "".join(parts), tags)


def _fold(number: int, summary: str, body: str, tags: str = "") -> str:
    return f'<details id="card-{number}"><summary>{h(summary)}{tags}</summary><div>{body}</div></details>'


def _timeline(packed: str, where: str) -> str:
    stamps = unpack_times(packed)
    points = [(float(n1), (t1 - t0) * 1000 / (n1 - n0)) for (t0, n0), (t1, n1) in zip(stamps, stamps[1:])]
    if len(points) < 2:
        return ""
    if len(points) > 400:  # keep the slowest of each few, so that no stall is drawn away
        width = -(-len(points) // 400)
        points = [max(points[i : i + width], key=lambda p: p[1]) for i in range(0, len(points), width)]
    worst = max(points, key=lambda p: p[1])
    label = f"Inter-token latency of {where}: at most {worst[1]:.1f} ms, at token {worst[0]:.0f}"
    return _figure("Inter-token latency of the median run, ms", svg.trace(points, "token", label))


def _sweep(sweep: Mapping[str, Any], where: str) -> str:
    arms = [arm for arm in sweep.get("arms") or [] if arm.get("decode_tps") is not None]
    if not arms:
        return ""
    kind = clean(sweep.get("kind"))
    # Only what this kind of sweep has: a sweep of prompts has no rate of all streams together.
    columns = [
        (head, key, digits)
        for head, key, digits in SWEEP_COLUMNS
        if any(isinstance(arm.get(key), (int, float)) for arm in arms)
    ]
    rows = [[arm.get("arm"), *(_digits(arm.get(key), digits) for _head, key, digits in columns)] for arm in arms]
    heads = (kind or "arm", *(head for head, _key, _digits in columns))
    stands = "" if sweep.get("valid", True) else ": does not stand, the control at its end had drifted"
    out = table(f"Sweep by {kind}{stands}", heads, rows, range(1, len(heads)), where)
    names = [(float(place), clean(arm.get("arm"))[:12]) for place, arm in enumerate(arms)]
    for key, what in (("decode_tps", "of one stream"), ("aggregate_tps", "of all streams together")):
        points = [(float(i), float(arm[key])) for i, arm in enumerate(arms) if isinstance(arm.get(key), (int, float))]
        if len(points) > 1:
            label = f"Decode of {where} by {kind}, {what}"
            out += _figure(f"Decode {what} by {kind}, tok/s", svg.trace(points, kind, label, names))
    return out


SWEEP_COLUMNS = (
    *(
        ("decode tok/s", "decode_tps", 2),
        ("all streams tok/s", "aggregate_tps", 2),
        ("prefill tok/s", "prefill_tps", 1),
    ),
    *(("TTFT ms", "ttft_ms", 0), ("SM clock MHz", "sm_mhz", 0), ("power W", "power_w", 1)),
)


def _digits(value: Any, digits: int) -> str:
    return f"{value:,.{digits}f}".replace(",", " ") if isinstance(value, (int, float)) else ""


FIELDS = {
    "sm_mhz": "SM clock, MHz",
    "mem_mhz": "memory clock, MHz",
    "power_w": "power, W",
    "power_limit_w": "power limit, W",
    "temperature_c": "temperature, °C",
    "memory_temperature_c": "memory temperature, °C",
    "fan_percent": "fan, %",
    "memory_used_mib": "memory used, MiB",
    "utilization_percent": "utilization, %",
    "pcie_gen": "PCIe generation",
    "pcie_gen_max": "PCIe generation, highest",
    "pcie_width": "PCIe lanes",
    "pcie_width_max": "PCIe lanes, most",
    "load1": "host: load",
    "io_pressure": "host: IO pressure, %",
    "cpu_pressure": "host: processor pressure, %",
    "memory_pressure": "host: memory pressure, %",
    "cpu_mhz": "host: processor clock, MHz",
    "memory_available_mib": "host: memory free, MiB",
    "rss_mib": "server: memory in use, MiB",
}


def _witness(witness: Mapping[str, Any], where: str) -> str:
    fields = witness.get("fields") or {}
    if not fields:
        return "<p>The witness has no sample of this run.</p>"
    rows = [
        [FIELDS.get(name, name), *(f"{round(gauge[key], 2):.10g}" for key in ("min", "mean", "max"))]
        for name, gauge in fields.items()
    ]
    out = table("Witness of the median run", ("field", "min", "mean", "max (at least)"), rows, (1, 2, 3), where)
    shares = witness.get("throttle")
    if shares:
        out += (
            "<p>Throttled: " + h(", ".join(f"{k} {v * 100:.0f} %" for k, v in shares.items())) + " of the samples.</p>"
        )
    gaps = witness.get("gaps_s") or []
    lost = f" Gaps without a sample: {', '.join(f'{a:g} to {b:g} s' for a, b in gaps)}." if gaps else ""
    return out + f'<p class="soft">{witness.get("samples")} samples, every {witness.get("interval_s")} s.{h(lost)}</p>'


def _scope(card: Mapping[str, Any]) -> str:
    names = (
        *("model", "model_sha256", "image_digest", "build_info", "driver_version", "name", "memory_mib", "pci_id"),
        *("context", "runtime", "plan_hash", "prompt_tokens", "prompt_sha256", "state", "measured_at", "method"),
    )
    rows = [[name.replace("_", " "), card.get(name)] for name in names if card.get(name) is not None]
    if card.get("read_bandwidth_gbs"):
        share = card.get("read_bandwidth_percent")
        text = f"{card['read_bandwidth_gbs']:.0f} GB/s" + (f", {share:.0f} % of the data sheet's peak" if share else "")
        rows.append(["read bandwidth (derived)", text + ": decode rate times the model file's size"])
    out = table("Scope", ("what", "value"), rows, where=f"{card['host']} {card['uuid'] or 'no card'}")
    command = card.get("exec")
    if isinstance(command, list):
        out += f"<h3>Command</h3><pre>{h(' '.join(shlex.quote(str(word)) for word in command))}</pre>"
    return out


def _hosts(hosts: Sequence[Mapping[str, Any]]) -> str:
    keys = ("name", "status", "cards", "driver_version", "kernel_module", "system", "kernel", "runtime", "reason")
    rows = [
        [
            str(host.get(key) if host.get(key) is not None else "").replace("_", " ")
            if key == "status"
            else host.get(key)
            for key in keys
        ]
        for host in hosts
    ]
    return "<h2>Hosts</h2>" + table("Hosts of the fleet", [key.replace("_", " ") for key in keys], rows, (2,))


def _engines(engines: Sequence[Mapping[str, Any]]) -> str:
    if not engines:
        return ""
    rows = [
        [
            e["model"],
            e["build_info"],
            e["image_digest"],
            e["card_name"],
            "yes" if e["loads"] else "no",
            e["cards"],
            rate((e["decode_tps"] or {}).get("median")),
        ]
        for e in engines
    ]
    heads = ("model", "engine", "image", "card", "loads", "cards", "decode tok/s (median)")
    return "<h2>Engine rates</h2>" + table("Which model on which engine at what rate", heads, rows, (5, 6))


def _changes(changes: Sequence[Mapping[str, Any]]) -> str:
    if not changes:
        return ""
    rows = [[c.get(key) for key in ("at", "what", "field", "was", "now")] for c in reversed(changes)]
    return "<h2>What changed</h2>" + table(
        "Changes since earlier reports", ("when", "what", "field", "was", "now"), rows
    )


def _ledger(entries: Sequence[Mapping[str, Any]]) -> str:
    """Claims and what became of them; a struck one stays readable."""
    if not entries:
        return ""
    rows = [[e["id"], e["state"], e["claim"], e.get("reason"), e.get("replaced_by")] for e in entries]
    heads = ("id", "state", "claim", "why", "replaced by")
    return "<h2>Ledger</h2>" + table("What was claimed, and what became of it", heads, rows)
