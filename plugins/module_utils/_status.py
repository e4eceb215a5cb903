# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

One look at a host for the fleet table: each card, the server that has it, its health and its last measurement.
Changes nothing and needs no plan: it tells what is there, not what should be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._bench_run import load_result
from ansible_collections.tensorless.fleet.plugins.module_utils._server_files import (
    Places,
    instance_names,
    read_document,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._server_health import Health, probe
from ansible_collections.tensorless.fleet.plugins.module_utils._server_state import Unit, read_units

Run = Callable[[Sequence[str]], "tuple[int, str, str]"]
HEALTH = {"ready": "ok", "loading": "loading"}


def servers(run: Run, where: Places, look: Callable[[str], Health] = probe) -> list[dict[str, Any]]:
    """Every instance that has a data file, with its unit's state and what /health answers."""
    names = instance_names(where)
    units: Mapping[str, Unit] = read_units(run, where, names) if names else {}
    found = []
    for name in names:
        kind, document = read_document(where.document(name))
        data = document or {}
        unit = units.get(name, Unit())
        health = "none"
        if unit.up and data.get("health_url"):
            health = HEALTH.get(look(str(data["health_url"])).kind, "down")
        found.append(
            {
                "instance": name,
                "file": kind,
                "state": unit.active,
                "restarts": unit.restarts,
                "health": health,
                "model": data.get("model"),
                "endpoint": data.get("endpoint"),
                "plan_hash": data.get("plan_hash"),
                "image": data.get("image"),
                "runtime": data.get("runtime"),
                "untuned_label": data.get("untuned_label"),
                "cards": [card.get("uuid") for card in data.get("cards") or [] if card.get("uuid")],
            }
        )
    return found


def card_rows(gpu: Mapping[str, Any], running: Sequence[Mapping[str, Any]], results_dir: str) -> list[dict[str, Any]]:
    """One row for each card of the host, and one for each server whose card is not there any more."""
    rows = []
    seen = set()
    for card in gpu.get("cards") or []:
        uuid = card.get("uuid")
        server = next((each for each in running if uuid in each["cards"]), None)
        if server is not None:
            seen.add(server["instance"])
        rows.append(_row(card, server, load_result(results_dir, uuid) if uuid else None))
    for server in running:
        if server["instance"] not in seen:
            missing = ", ".join(server["cards"])
            gone = {"name": "card not found", "uuid": (server["cards"] or [None])[0]}
            note = f"its card {missing} is not listed by the driver" if missing else "it names no card"
            rows.append({**_row(gone, server, None), "note": note})
    return rows


def _row(
    card: Mapping[str, Any], server: Optional[Mapping[str, Any]], result: Optional[Mapping[str, Any]]
) -> dict[str, Any]:
    row: dict[str, Any] = {key: card.get(key) for key in ("index", "uuid", "name", "memory_mib", "memory_used_mib")}
    row.update(instance=None, model=None, endpoint=None, state="absent", health="none", tuned=None, note="")
    if server is not None:
        row.update({key: server[key] for key in ("instance", "model", "endpoint", "state", "health")})
        row["tuned"] = not server["untuned_label"]
        row["note"] = server["untuned_label"] or ""
        if server["file"] != "ok":
            row.update(tuned=None, note="its data file is broken; the next run writes it again")
        elif server["restarts"]:
            row["note"] = f"restarted {server['restarts']} times"
    if result:
        row.update(
            bench_tps=result.get("median_decode_tps"),
            bench_vs_receipt_percent=result.get("vs_receipt_percent") if result.get("receipt_applies") else None,
            bench_time=result.get("measured_at"),
            bench_model=result.get("model"),
            # A measurement of another plan says nothing about what runs now.
            bench_current=bool(server and result.get("plan_hash") == server["plan_hash"]),
        )
    return row


def facts(run: Run, where: Places, gpu: Mapping[str, Any], results_dir: str) -> dict[str, Any]:
    """What the module returns."""
    running = servers(run, where)
    return {
        "servers": running,
        "cards": card_rows(gpu, running, results_dir),
        "driver_version": gpu.get("driver_version"),
        "gpu_state": gpu.get("state"),
        "reasons": list(gpu.get("reasons") or []),
    }
