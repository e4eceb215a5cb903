# SPDX-License-Identifier: Apache-2.0
"""Sweeps: the same measurement over prompt lengths or numbers of streams. Private to the collection.

Arms are taken in turn, round after round, and the first arm once more at the end: what the server or the card does by
itself meanwhile (warming, heat) shows as a drift of that control, and then the sweep does not stand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _bench, _bench_plan, _bench_run, _witness
from ansible_collections.tensorless.fleet.plugins.module_utils._bench import BenchError
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_http import HttpFault, completion
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_prompt import LICENSE_HEAD, REQUEST, build_prompt
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_run import Bench
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_stream import StreamFault

# The lengths that the documentation says are not measured yet, beside the benchmark's own.
PROMPTS = (0, 4096, 32768, 65536)  # 0: the built-in prompt
STREAMS = (1, 2, 4, 8)
DRIFT = 0.03
ROOM = 64  # tokens of the context that a prompt of estimated length leaves free


def order(arms: Sequence[int], repeats: int) -> list[int]:
    """A B C A B C ... and A once more."""
    if len(set(arms)) != len(arms):
        raise BenchError(f"a sweep needs different values, not {list(arms)}")
    return [*list(arms) * repeats, arms[0]]


def prompt_of(tokens: int, characters_per_token: float) -> str:
    """Text of about so many tokens, no two parts of it alike, so that nothing in it can be reused."""
    if tokens == 0:
        return build_prompt()
    wanted = int(tokens * characters_per_token)
    parts: list[str] = []
    length, part = 0, 0
    while length < wanted:
        part += 1
        parts.append(f"Part {part}.\n{LICENSE_HEAD}\n")
        length += len(parts[-1])
    return "".join(parts)[: max(0, wanted - len(REQUEST))] + REQUEST


def stream_prompt(number: int) -> str:
    """One prompt a stream: equal lengths, different from their first token on."""
    return f"{number:03d} " + build_prompt()


class Sweep(Bench):
    """Uses the benchmark's preparations and takes its own runs."""

    def sweep(self, kind: str, values: Sequence[int], repeats: int) -> dict[str, Any]:
        arms: dict[int, list[dict[str, Any]]] = {value: [] for value in values}
        skipped: list[dict[str, Any]] = []
        with self._leased() as lease:
            server = self._server()
            before = self._quiet()
            ratio = self._warm_ratio()
            context = server.get("n_ctx")
            witness = _witness.Witness(
                self.run, self.request.card_uuid, before["server_pid"], self.request.witness_interval_s, self.clock
            )
            taken = order(values, repeats)
            control: Optional[dict[str, Any]] = None
            with witness:
                for place, value in enumerate(taken):
                    self.say(f"sweep by {kind}: {value or 'short'} ({place + 1} of {len(taken)})")
                    row = self._arm(kind, value, ratio, context)
                    if row.get("skipped"):
                        skipped.append({"value": value, "reason": row["skipped"]})
                    elif place == len(taken) - 1:
                        control = row
                    else:
                        arms[value].append(row)
        return _conclude(kind, values, arms, control, skipped, server, lease, self.request)

    def _warm_ratio(self) -> float:
        """Characters a token, by the server's own count of the built-in prompt; this warms it up as well."""
        stream = self._send(_bench.WARMUP_TOKENS)
        count = _bench.prompt_tokens(stream)
        if not count:
            raise BenchError("the server does not say how many tokens the prompt has; a sweep of lengths needs that")
        return len(self.request.prompt) / count

    def _arm(self, kind: str, value: int, ratio: float, context: Optional[int]) -> dict[str, Any]:
        if kind == "streams":
            return self._together(value)
        room = (context or 0) - self.request.tokens - ROOM
        if value and context and value > context:
            return {"skipped": f"the server's context is {context} tokens"}
        # A prompt that fills the context is what a long-context receipt means; it must leave room for the answer.
        length = min(value, room) if context else value
        self.request.prompt = prompt_of(length, ratio)
        record, _text = self._one()
        for key in ("begin", "end"):
            record.pop(key, None)
        return record

    def _together(self, count: int) -> dict[str, Any]:
        """So many requests at once, each with its own prompt."""
        records: list[dict[str, Any]] = []
        stamps: list[tuple[float, float, int]] = []
        lock = threading.Lock()

        def one(number: int) -> None:
            body = _bench.request_body(stream_prompt(number), self.request.tokens)
            try:
                stream = completion(
                    self.request.host,
                    self.request.port,
                    body,
                    self.request.api_key,
                    first_token_s=self.request.first_token_s * count,
                    clock=self.clock,
                )
                record = _bench.run_record(stream, self.request.tokens)
                edge = (stream.stamps[0][0], stream.stamps[-1][0], stream.tokens) if stream.stamps else None
            except (StreamFault, HttpFault) as fault:
                record, edge = _bench.failed_run(str(fault)), None
            with lock:
                records.append(record)
                if edge is not None:
                    stamps.append(edge)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        bad = [reason for record in records for reason in record["reasons"]]
        if bad:
            return _bench.failed_run("; ".join(sorted(set(bad))))
        spent = max(last for _first, last, _n in stamps) - min(first for first, _last, _n in stamps)
        total = sum(tokens for _first, _last, tokens in stamps)
        prefill = [r["server"]["prefill_tps"] for r in records if r["server"].get("prefill_tps")]
        return {
            "valid": True,
            "reasons": [],
            "decode_tps": _bench.median(r["decode_tps"] for r in records),
            "ttft_ms": _bench.median(r["ttft_ms"] for r in records),
            "ttft_max_ms": max(r["ttft_ms"] for r in records),
            # The first token of the first stream starts the clock, so it is not counted, as in a single stream.
            "aggregate_tps": (total - 1) / spent,
            "prompt_tokens": records[0]["prompt_tokens"],
            "server": {"prefill_tps": _bench.median(prefill) if prefill else None},
        }


def _conclude(
    kind: str,
    values: Sequence[int],
    arms: Mapping[int, Sequence[Mapping[str, Any]]],
    control: Optional[Mapping[str, Any]],
    skipped: list[dict[str, Any]],
    server: Mapping[str, Any],
    lease: Any,
    request: Any,
) -> dict[str, Any]:
    rows = []
    for value in values:
        good = [row for row in arms[value] if row["valid"]]
        reasons = sorted({reason for row in arms[value] for reason in row["reasons"]})
        reasons += [skip["reason"] for skip in skipped if skip["value"] == value]
        row: dict[str, Any] = {
            "arm": _name(kind, value),
            "value": value,
            "runs": len(good),
            "slots": server.get("total_slots"),
            "reasons": reasons,
        }
        for key in ("decode_tps", "ttft_ms", "ttft_max_ms", "aggregate_tps", "prompt_tokens"):
            numbers = [r[key] for r in good if r.get(key) is not None]
            row[key] = _bench.median(numbers) if numbers else None
        row["prompt_tokens"] = None if row["prompt_tokens"] is None else round(row["prompt_tokens"])
        prefill = [r["server"]["prefill_tps"] for r in good if (r.get("server") or {}).get("prefill_tps")]
        row["prefill_tps"] = _bench.median(prefill) if prefill else None
        row["spread"] = _bench.spread([r["decode_tps"] for r in good]) if good else None
        if kind == "prompt" and value == 0 and row["prompt_tokens"]:
            row["value"] = row["prompt_tokens"]
        rows.append(row)
    first = rows[0]
    drift = None
    if control is not None and control.get("decode_tps") and first["decode_tps"]:
        drift = control["decode_tps"] / first["decode_tps"] - 1
    band = max(DRIFT, first["spread"] or 0.0)
    stands = drift is not None and abs(drift) <= band
    notes = [] if stands else ["the control at the end differs from the first arm: the sweep does not stand"]
    return {
        "kind": kind,
        "tokens": request.tokens,
        "arms": rows,
        "control_drift": drift,
        "valid": stands,
        "notes": notes,
        "lease": lease,
        "state": "warm",
    }


def _name(kind: str, value: int) -> str:
    if kind == "streams":
        return str(value)
    return "short" if value == 0 else f"{value // 1024}K" if value % 1024 == 0 else str(value)


def act(
    options: Mapping[str, Any],
    run: _witness.Run,
    check_mode: bool = False,
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Take the sweep and keep it beside the card's last result."""
    values = list(options["values"] or (STREAMS if options["kind"] == "streams" else PROMPTS))
    if not values or any(value < (1 if options["kind"] == "streams" else 0) for value in values):
        raise BenchError(f"values are {values}; a sweep by {options['kind']} takes positive whole numbers")
    taken = order(values, options["repeats"])
    request = _bench_plan.make_request(options)
    stored = _bench_run.load_result(options["results_dir"], request.card_uuid)
    if stored is None:
        raise BenchError("this card has no result yet that a sweep could stand beside: run the playbook bench first")
    if check_mode:
        return {"changed": True, "order": taken, "sweep": None}
    _bench_plan.check_running(options)
    request.first_token_s = options["first_token_s"]
    sweep = Sweep(request, run, say).sweep(options["kind"], values, options["repeats"])
    kept = [other for other in stored.get("sweeps") or [] if other.get("kind") != options["kind"]]
    stored["sweeps"] = [*kept, sweep]
    _bench_run.store_result(options["results_dir"], stored)
    return {"changed": True, "order": taken, "sweep": sweep}
