# SPDX-License-Identifier: Apache-2.0
"""The fleet's report as one document. No I/O.

Private to the collection: it may change at any time. The document itself is public: docs/reference/report.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _report_ledger
from ansible_collections.tensorless.fleet.plugins.module_utils._bench import DOCUMENTED_RUN, median, quantile
from ansible_collections.tensorless.fleet.plugins.module_utils._report_findings import findings, slowness

SCHEMA = "tensorless.fleet-report"
VERSION = 1
HISTORY = 60

# Each figure of a card is one of three kinds, and none may be without.
FIGURES = {
    "decode_tps": "measured",
    "ttft_ms": "measured",
    "prefill_tps": "read",
    "server_decode_tps": "derived",
    "vs_receipt_percent": "derived",
    "receipt_decode_tps": "read",
    "read_bandwidth_gbs": "derived",
    "read_bandwidth_percent": "derived",
    "memory_mib": "read",
    "index": "read",
    "prompt_tokens": "read",
    "context": "read",
    "spread_percent": "derived",
}

# Hosts that a run learnt nothing of.
UNSEEN = ("unreachable", "not_in_this_run")
NOT_REACHED = "its host was not reached; the figures are those of an earlier report"

# Peak memory bandwidth by the vendor's data sheet, in GB/s.
PEAK_GBS = {"Tesla P100-PCIE-16GB": 732.0, "Tesla P100-SXM2-16GB": 732.0, "Tesla P100-PCIE-12GB": 549.0}


def number(value: Any) -> Optional[float]:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def build(
    hosts: Sequence[Mapping[str, Any]],
    generated_at: str,
    previous: Optional[Mapping[str, Any]] = None,
    collection_version: str = "",
    record: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The document from what each host told: name, status, reason, facts, gpus, plans, skipped, results, failures."""
    rows: list[dict[str, Any]] = []
    people: list[dict[str, Any]] = []
    for host in hosts:
        if host["status"] in UNSEEN:
            person, cards = _unseen(host, previous)
        else:
            person, cards = _host(host), _cards(host)
        people.append(person)
        rows += cards
    _judge(rows)
    _history(rows, previous)
    _restarts(people, previous)
    for row in rows:
        row.pop("_result", None)
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "generated_at": generated_at,
        "collection_version": collection_version,
        "figures": FIGURES,
        "fleet": _fleet(people, rows),
        "hosts": people,
        "cards": rows,
        "engines": _engines(rows),
        "changes": _changes(rows, people, previous, generated_at),
        "ledger": _report_ledger.merge((previous or {}).get("ledger") or [], record, generated_at),
    }


def _host(host: Mapping[str, Any]) -> dict[str, Any]:
    gpus = host.get("gpus") or {}
    return {
        "name": host["name"],
        "status": host["status"],
        "reason": host.get("reason"),
        **{key: (host.get("facts") or {}).get(key) for key in ("machine_id", "system", "kernel", "runtime", "boot_id")},
        "restart_cause": (host.get("facts") or {}).get("restart_cause"),
        "restarted": False,
        "driver_version": gpus.get("driver_version"),
        "kernel_module": gpus.get("kernel_module"),
        "gpu_state": gpus.get("state"),
        "cards": len(gpus.get("cards") or []),
    }


def _unseen(
    host: Mapping[str, Any], previous: Optional[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A host that this run did not hear of, as the report before had it: its cards keep their past.

    One that was left out on purpose is as it was. Of one that does not answer nobody knows how it is now, so its cards
    are no longer counted as measured and accused of nothing.
    """
    before: Mapping[str, Any] = next(
        (old for old in (previous or {}).get("hosts") or [] if old.get("name") == host["name"]), {}
    )
    kept = [card for card in (previous or {}).get("cards") or [] if card.get("host") == host["name"]]
    cards = [{**card, "current": False} for card in kept]
    if host["status"] == "unreachable":
        for card in cards:
            card.update(status="not_reached", reason=NOT_REACHED, findings=[], slow=False, slow_reason=None)
    return {**_host(host), **before, "status": host["status"], "reason": host.get("reason")}, cards


def _cards(host: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every card that the host lists, and every result whose card it no longer lists."""
    results = {r.get("card_uuid"): r for r in host.get("results") or []}
    skipped = {s.get("uuid"): s.get("reason") for s in host.get("skipped") or []}
    failures = {f.get("card_uuid"): f.get("msg") for f in host.get("failures") or []}
    plans: dict[Any, Mapping[str, Any]] = {}
    for plan in host.get("plans") or []:
        for card in plan.get("cards") or [{"uuid": None}]:
            plans.setdefault(card.get("uuid"), plan)
    listed = {card.get("uuid"): card for card in (host.get("gpus") or {}).get("cards") or []}
    keys = list(dict.fromkeys([*listed, *plans, *skipped, *results]))
    # A server without a card that can be named still has its row; nothing is silently missing.
    return [
        _card(
            host["name"],
            key,
            listed.get(key) or {},
            plans.get(key),
            skipped.get(key),
            results.get(key),
            failures.get(key),
        )
        for key in keys
    ]


def _card(
    host: str,
    uuid: Any,
    card: Mapping[str, Any],
    plan: Optional[Mapping[str, Any]],
    skip: Optional[str],
    result: Optional[Mapping[str, Any]],
    failure: Optional[str],
) -> dict[str, Any]:
    status, reason = "not_benched", "no server of a recipe was planned for this card"
    if failure:
        status, reason = "failed", failure
    elif result is not None and (plan is None or result.get("plan_hash") in (None, plan.get("plan_hash"))):
        status, reason = "benched", ""
    elif result is not None:
        status, reason = "outdated", "the last result is of another plan"
    elif skip:
        status, reason = "skipped", skip
    elif plan is not None:
        reason = "its server has not been measured"
    row: dict[str, Any] = {
        "host": host,
        "uuid": uuid,
        "index": card.get("index", (result or {}).get("card_index")),
        "name": card.get("name") or (result or {}).get("card_name"),
        "compute_capability": card.get("compute_capability"),
        "memory_mib": card.get("memory_mib"),
        "pci_id": card.get("pci_id") or (result or {}).get("pci_id"),
        "status": status,
        "reason": reason or None,
        "current": True,
        "model": (plan or result or {}).get("model"),
        "recipe_card": (plan or result or {}).get("card"),
        "untuned_label": (plan or result or {}).get("untuned_label"),
        "findings": [],
        "slow": False,
        "slow_reason": None,
        "history": [],
    }
    if result is not None:
        row["_result"] = result
        row.update(_measured(result, row["name"]))
    return row


def _measured(result: Mapping[str, Any], name: Optional[str]) -> dict[str, Any]:
    runs = list(result.get("runs") or [])
    middle = sorted(runs, key=lambda r: float(r["decode_tps"]))[(len(runs) - 1) // 2] if runs else {}
    size = number((result.get("scope") or {}).get("model_size_bytes"))
    rate = float(result["median_decode_tps"])
    peak = PEAK_GBS.get(name or "")
    bandwidth = size * rate / 1e9 if size else None
    out: dict[str, Any] = {
        "decode_tps": rate,
        "ttft_ms": result.get("median_ttft_ms"),
        "prompt_tokens": result.get("prompt_tokens"),
        "prefill_tps": result.get("prefill_tps"),
        "server_decode_tps": result.get("server_decode_tps"),
        "receipt_applies": bool(result.get("receipt_applies")),
        "runs": [{key: r.get(key) for key in (*DOCUMENTED_RUN, "itl_ms")} for r in runs],
        "endpoint": result.get("endpoint"),
        "discarded": [list(r.get("reasons") or []) for r in result.get("discarded") or []],
        "times": middle.get("times"),
        "witness": _witness_digest(middle.get("witness") or {}),
        "labels": list(result.get("labels") or []),
        "notes": [*(result.get("notes") or []), *(result.get("warnings") or []), *_previous(result)],
        "spread_percent": float(result.get("spread") or 0.0) * 100.0,
        "measured_at": result.get("measured_at"),
        "read_bandwidth_gbs": bandwidth,
        "read_bandwidth_percent": bandwidth / peak * 100.0 if bandwidth and peak else None,
        "sweeps": list(result.get("sweeps") or []),
    }
    for key in ("receipt_decode_tps", "vs_receipt_percent"):
        if key in result:
            out[key] = result[key]
    for key in ("image_digest", "plan_hash", "driver_version", "build_info", "prompt_sha256", "method", "state"):
        out[key] = result.get(key)
    for key in ("model_sha256", "context", "runtime", "exec"):
        out[key] = (result.get("scope") or {}).get(key)
    return out


def _previous(result: Mapping[str, Any]) -> list[str]:
    """The result before this one, in a sentence."""
    old = result.get("previous")
    if not old:
        return []
    moved = f" ({', '.join(old['moved']).replace('_', ' ')} moved)" if old["moved"] else ""
    return [
        f"before, at {old['measured_at']}: {old['old_decode_tps']:.2f} tok/s; now {old['percent']:+.1f} %, "
        f"{old['verdict']}{moved}"
    ]


def _witness_digest(witness: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's witness that a reader compares: means and extremes, shares, gaps."""
    fields = {
        name: {"min": gauge["min"], "mean": round(gauge["mean"], 2), "max": gauge["max"]}
        for name, gauge in (witness.get("fields") or {}).items()
        if gauge
    }
    keys = ("interval_s", "samples", "throttle", "gaps_s", "other_processes", "server")
    return {"fields": fields, **{key: witness.get(key) for key in keys}}


def _group(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Cards that should be equally fast."""
    return (row.get("model"), row.get("name"), row.get("image_digest"), row.get("untuned_label"), row.get("context"))


def _judge(rows: Sequence[dict[str, Any]]) -> None:
    measured = [row for row in rows if "_result" in row]
    drivers = Counter(row["driver_version"] for row in measured if row.get("driver_version"))
    usual = drivers.most_common(1)[0] if drivers else None
    # Only a clear majority makes the others "another driver".
    usual_driver = usual[0] if usual and usual[1] * 2 > sum(drivers.values()) else None
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in measured:
        groups.setdefault(_group(row), []).append(row["decode_tps"])
    for row in measured:
        equals = groups[_group(row)]
        peers = median(equals) if len(equals) >= 3 else None
        row["findings"] = findings(row["_result"], usual_driver)
        row["slow"], row["slow_reason"] = slowness(row["_result"], peers, row["findings"])


def _fleet(hosts: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    benched = [row for row in rows if row["status"] == "benched"]
    rates = [row["decode_tps"] for row in benched]
    return {
        "hosts": len(hosts),
        "hosts_by_status": dict(sorted(Counter(host["status"] for host in hosts).items())),
        "cards": len(rows),
        "cards_by_status": dict(sorted(Counter(row["status"] for row in rows).items())),
        "slow": sum(1 for row in rows if row["slow"]),
        "untuned": sum(1 for row in rows if row.get("untuned_label")),
        "decode_tps": _spread(rates),
        "ttft_ms": _spread([row["ttft_ms"] for row in benched if row.get("ttft_ms") is not None]),
        "decode_tps_total": sum(rates),
    }


def _spread(values: Sequence[float]) -> Optional[dict[str, float]]:
    if not values:
        return None
    return {
        "min": min(values),
        "p10": quantile(values, 0.1),
        "median": median(values),
        "p90": quantile(values, 0.9),
        "max": max(values),
    }


def _engines(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Which model on which engine at what rate. Each row names the results that it stands on."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["status"] in ("benched", "outdated"):
            groups.setdefault((row["model"], row["image_digest"], row["build_info"], row["name"]), []).append(row)
    out = []
    for (model, digest, build_info, name), members in sorted(
        groups.items(), key=lambda item: [str(k) for k in item[0]]
    ):
        rates = [row["decode_tps"] for row in members]
        out.append(
            {
                "model": model,
                "image_digest": digest,
                "build_info": build_info,
                "card_name": name,
                "loads": True,
                "cards": len(members),
                "decode_tps": _spread(rates),
                "source": [f"{row['host']}/{row['uuid']}@{row['measured_at']}" for row in members],
            }
        )
    return out


def _history(rows: Iterable[dict[str, Any]], previous: Optional[Mapping[str, Any]]) -> None:
    """A card's past, by UUID, as earlier reports of the same folder kept it."""
    past = {card.get("uuid"): card for card in (previous or {}).get("cards") or []}
    for row in rows:
        kept = list((past.get(row["uuid"]) or {}).get("history") or [])
        now = {key: row.get(key) for key in ("measured_at", "decode_tps", "image_digest", "driver_version", "model")}
        if row.get("measured_at") and (not kept or kept[-1].get("measured_at") != row["measured_at"]):
            kept.append(now)
        row["history"] = kept[-HISTORY:]


def _restarts(hosts: Iterable[dict[str, Any]], previous: Optional[Mapping[str, Any]]) -> None:
    """A host whose boot is another one than in the report before, with no cause that anybody recorded."""
    past = {host.get("name"): host for host in (previous or {}).get("hosts") or []}
    for host in hosts:
        before = past.get(host["name"]) or {}
        was, now = before.get("boot_id"), host["boot_id"]
        moved = bool(was and now and was != now)
        # It stays said until a cause is given, not only in the one report that noticed.
        host["restarted"] = (moved or bool(before.get("restarted"))) and not host["restart_cause"]


WATCHED_CARD = ("driver_version", "image_digest", "plan_hash", "model_sha256", "host", "pci_id", "untuned_label")
WATCHED_HOST = ("boot_id", "kernel", "system", "driver_version", "kernel_module", "runtime", "machine_id")


def _changes(
    rows: Iterable[Mapping[str, Any]],
    hosts: Iterable[Mapping[str, Any]],
    previous: Optional[Mapping[str, Any]],
    at: str,
) -> list[dict[str, Any]]:
    """What is another value than in the report before, dated, with both values."""
    out = list((previous or {}).get("changes") or [])
    for now, before, key, watched in (
        (rows, (previous or {}).get("cards"), "uuid", WATCHED_CARD),
        (hosts, (previous or {}).get("hosts"), "name", WATCHED_HOST),
    ):
        past = {item.get(key): item for item in before or []}
        for item in now:
            old = past.get(item.get(key))
            for name in watched if old is not None else ():
                was, value = (old or {}).get(name), item.get(name)
                if was is not None and value is not None and was != value:
                    out.append({"at": at, "what": item.get(key), "field": name, "was": was, "now": value})
    return out[-200:]


def problems(document: Mapping[str, Any]) -> list[str]:
    """What keeps a document from being one of ours: its schema, a figure without its kind, a rate without a source."""
    found = []
    if document.get("schema") != SCHEMA or document.get("version") != VERSION:
        found.append(
            f"schema is {document.get('schema')!r} version {document.get('version')!r}, not {SCHEMA} {VERSION}"
        )
    kinds = document.get("figures") or {}
    for card in document.get("cards") or []:
        for key, value in card.items():
            if number(value) is not None and kinds.get(key) not in ("measured", "derived", "read"):
                found.append(
                    f"card {card.get('uuid')}: the figure {key} does not say whether it is measured, derived or read"
                )
        if card.get("status") == "benched" and not card.get("witness"):
            found.append(f"card {card.get('uuid')}: a rate without its witness")
    for row in document.get("engines") or []:
        if not row.get("source"):
            found.append(f"engine row {row.get('model')}: no source")
    return found
