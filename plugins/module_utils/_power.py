# SPDX-License-Identifier: Apache-2.0
"""Decode rate at several power limits, with the former limit back on every way out.

Private to the collection: it may change at any time. A unit of the host's service manager waits for the end of the
sweeping process, whatever that end is, and sets the limit back; the process does the same itself on its way out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _bench_plan, _bench_run, _lease, _witness
from ansible_collections.tensorless.fleet.plugins.module_utils._bench import BenchError
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_run import Bench


class PowerLimit:
    """One card's limit, set and read back by UUID."""

    def __init__(self, run: _witness.Run, uuid: str) -> None:
        self.run = run
        self.uuid = uuid

    def read(self) -> dict[str, float]:
        """Limits in watts: the one that holds, the default, and what may be set."""
        names = ("limit", "default", "min", "max")
        query = "uuid,power.limit,power.default_limit,power.min_limit,power.max_limit"
        rc, out, err = self.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", self.uuid]
        )
        for line in reversed(out.strip().splitlines()) if rc == 0 else ():
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) == 5 and cells[0] == self.uuid:
                values = [_witness.cell_value(cell) for cell in cells[1:]]
                if all(isinstance(value, (int, float)) for value in values):
                    return dict(zip(names, map(float, values)))
        raise BenchError(f"the power limits of {self.uuid} cannot be read: {(err or out).strip() or 'no answer'}")

    def set(self, watts: float) -> None:
        """Set by UUID and read back; a limit that did not arrive at this very card is an error."""
        rc, out, err = self.run(["nvidia-smi", "-i", self.uuid, "-pl", f"{watts:g}"])
        if rc != 0:
            raise BenchError(f"nvidia-smi does not set {watts:g} W on {self.uuid}: {(out + err).strip()}")
        now = self.read()["limit"]
        if abs(now - watts) > 0.5:
            raise BenchError(f"{self.uuid} was set to {watts:g} W and reads {now:g} W: the limit went to another card")


def keeper(uuid: str, pid: int, watts: float) -> list[str]:
    """The command that makes the unit which sets the limit back when process `pid` has ended."""
    unit = f"tensorless-power-{uuid[4:12].lower()}-{pid}"
    wait = f"tail --pid={pid} -f /dev/null; exec nvidia-smi -i {uuid} -pl {watts:g}"
    return ["systemd-run", "--collect", f"--unit={unit}", "/bin/sh", "-c", wait]


def limits_of(asked: Sequence[float], known: Mapping[str, float]) -> list[float]:
    """The limits to measure, the present one last again as the control."""
    chosen = list(asked) or [known["default"], known["default"] * 0.8, known["default"] * 0.6]
    chosen = [round(max(watts, known["min"])) if not asked else watts for watts in chosen]
    wrong = [watts for watts in chosen if not known["min"] <= watts <= known["max"]]
    if wrong:
        raise BenchError(f"{wrong} W cannot be set: this card takes {known['min']:g} to {known['max']:g} W")
    return [*dict.fromkeys(chosen), chosen[0]]


def sweep(
    options: Mapping[str, Any],
    run: _witness.Run,
    check_mode: bool = False,
    say: Callable[[str], None] = lambda _line: None,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Measure at each limit; the row of a limit holds rate, mean clock, mean draw and throttle shares."""
    request = _bench_plan.make_request(options)
    if not request.card_uuid:
        raise BenchError("a power sweep needs a card: give `card_uuid`, or a plan with one")
    limit = PowerLimit(run, request.card_uuid)
    known = limit.read()
    limits = limits_of(options["limits_w"] or [], known)
    if check_mode:
        return {"changed": True, "limits": known, "order": limits, "rows": []}
    _bench_plan.check_running(options)
    rows: list[dict[str, Any]] = []
    purpose = f"power sweep of {request.model}"
    try:
        with _lease.held(request.card_uuid, "tensorless_power_sweep", purpose, 0.0, request.lease_dir):
            request.lease = False  # this process holds the card already
            rc, out, err = run(keeper(request.card_uuid, os.getpid(), known["limit"]))
            if rc != 0:
                raise BenchError(f"no unit could be made that sets the limit back: {(out + err).strip()}")
            try:
                for watts in limits:
                    say(f"power sweep at {watts:g} W")
                    limit.set(watts)
                    sleep(options["settle_s"])
                    rows.append(row_of(watts, Bench(request, run, say, sleep=sleep).measure()))
            finally:
                limit.set(known["limit"])
    except _lease.LeaseHeld as held:
        raise BenchError(str(held)) from None
    stored = _bench_run.load_result(options["results_dir"], request.card_uuid)
    result = {"kind": "power limit in W", "arms": rows, "tokens": request.tokens, "valid": True}
    if stored is not None:
        kept = [other for other in stored.get("sweeps") or [] if other.get("kind") != result["kind"]]
        _bench_run.store_result(options["results_dir"], {**stored, "sweeps": [*kept, result]})
    return {"changed": True, "limits": known, "order": limits, "rows": rows}


def row_of(watts: float, result: Mapping[str, Any]) -> dict[str, Any]:
    runs = result["runs"]
    shares: dict[str, float] = {}
    for run in runs:
        for name, share in (run["witness"]["throttle"] or {}).items():
            shares[name] = max(shares.get(name, 0.0), share)
    return {
        "arm": f"{watts:g} W",
        "value": watts,
        "decode_tps": result["median_decode_tps"],
        "ttft_ms": result["median_ttft_ms"],
        "prefill_tps": result["prefill_tps"],
        "sm_mhz": _mean(runs, "sm_mhz"),
        "power_w": _mean(runs, "power_w"),
        "throttle": shares,
    }


def _mean(runs: Sequence[Mapping[str, Any]], name: str) -> Optional[float]:
    gauges = [run["witness"]["fields"][name] for run in runs if run["witness"]["fields"][name]]
    return sum(gauge["mean"] for gauge in gauges) / len(gauges) if gauges else None
