# SPDX-License-Identifier: Apache-2.0
"""Made-up results in the product's own form: streams with chosen times go through the real arithmetic."""

from __future__ import annotations

import random
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _bench, _witness
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_stream import Stream

MODEL = "test/SmolLM2-135M-Instruct-GGUF"
DIGEST = "sha256:" + "ab" * 32
NAME = "Tesla P100-PCIE-16GB"


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-1111-2222-3333-{number:012x}"


def stream(
    tps: float, tokens: int = 256, ttft: float = 4.46, jitter: float = 0.0, seed: int = 1, **final: Any
) -> Stream:
    """A stream with one token a frame whose decode rate is `tps`."""
    noise = random.Random(seed)
    out = Stream(start=100.0, connect_s=0.0004)
    at = 100.0 + ttft
    for count in range(1, tokens + 1):
        out.stamps.append((at, count))
        at += (1 + noise.uniform(-jitter, jitter)) / tps
    out.frames, out.max_jump, out.text = tokens, 1, ["x"] * tokens
    spent = (out.stamps[-1][0] - out.stamps[0][0]) * 1000
    timings = {"cache_n": 0, "prompt_n": 429, "prompt_ms": ttft * 1000, "predicted_n": tokens, "predicted_ms": spent}
    out.final = {
        "stop": True,
        "stop_type": "limit",
        "model": "m",
        "tokens_predicted": tokens,
        "tokens_evaluated": 429,
        "timings": timings,
        **final,
    }
    return out


def samples(count: int = 18, **over: Any) -> list[dict[str, Any]]:
    """Witness samples, two a second, of a card at work; `over` replaces fields."""
    base = {
        "sm_mhz": 1328,
        "mem_mhz": 715,
        "power_w": 182.5,
        "power_limit_w": 250,
        "temperature_c": 61,
        "memory_temperature_c": None,
        "fan_percent": None,
        "throttle_mask": 0,
        "memory_used_mib": 14577,
        "utilization_percent": 98,
        "pcie_gen": 3,
        "pcie_gen_max": 3,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "load1": 1.1,
        "io_pressure": 0.0,
        "cpu_pressure": 1.0,
        "memory_pressure": 0.0,
        "cpu_mhz": 2600.0,
        "memory_available_mib": 90000,
        "rss_mib": 900,
        "majflt": 12,
        "read_bytes": 4096,
    }
    out = []
    for place in range(count):
        row = {"at": 100.0 + place * 0.5, **base, "cpu_s": place * 0.5, "took_s": 0.02, **over}
        row = {key: value(place) if callable(value) else value for key, value in row.items()}
        if place % 4 == 0:
            row.setdefault("processes", [{"pid": 4711, "name": "llama-server", "memory_mib": 14577}])
        out.append(row)
    return out


def result(
    number: int,
    tps: float = 30.0,
    receipt: Optional[float] = 30.06,
    jitter: float = 0.03,
    over: Any = None,
    **extra: Any,
) -> dict[str, Any]:
    """A stored result as tensorless_bench would have written it."""
    runs = []
    for run in range(3):
        record = _bench.run_record(stream(tps * (1 + 0.001 * run), jitter=jitter, seed=number * 3 + run), 256)
        record["exclusive"] = "unknown"
        record["witness"] = _witness.window(samples(**(over or {})), 100.0, 109.0, 0.5, [4711], 256)
        runs.append(record)
    out = _bench.summarise(MODEL, "p100", "http://127.0.0.1:8080", runs, receipt)
    steady = _bench.stability([r["decode_tps"] for r in runs], [r["ttft_ms"] for r in runs])
    out.update(
        schema=1,
        complete=True,
        method=_bench.METHOD,
        measured_at="2026-11-29T22:00:00Z",
        card_uuid=uuid(number),
        card_name=NAME,
        card_index=0,
        machine_id=f"{number:032x}",
        image_digest=DIGEST,
        plan_hash="cd" * 32,
        driver_version="580.95.05",
        build_info="b11434-abc",
        discarded=[],
        labels=[],
        notes=steady.pop("notes"),
        warnings=[],
        untuned_label=None,
        receipt_applies=True,
        other_model=False,
        served_models=["smol"],
        server_decode_tps=tps,
        prefill_tps=96.2,
        prompt_sha256="ef" * 32,
        state="warm",
        requested_tokens=256,
        quiet={"before": {"other_processes": []}, "after": {}},
        witness={"aer_growth": {}, "kernel": [], "sampler_lost": False},
        scope={"model_size_bytes": 12954114496, "model_sha256": "15" * 32, "exec": ["podman", "run", "--rm", "x"] * 12},
        **steady,
    )
    out.update(extra)
    return out


def plan(number: int, **extra: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "card": "p100",
        "cards": [{"index": 0, "uuid": uuid(number), "name": NAME}],
        "plan_hash": "cd" * 32,
        "untuned_label": None,
        **extra,
    }


def host(number: int, results: Any = None, **extra: Any) -> dict[str, Any]:
    """One host with one card, as the report's builder takes it."""
    card = {"index": 0, "uuid": uuid(number), "name": NAME, "compute_capability": "6.0", "memory_mib": 16269}
    card["pci_id"] = "00000000:3B:00.0"
    return {
        "name": f"gpu-host-{number}",
        "status": "ok",
        "reason": None,
        "facts": {
            "machine_id": f"{number:032x}",
            "system": "Debian 12.11",
            "kernel": "6.1.0-40-amd64",
            "runtime": "podman",
        },
        "gpus": {"state": "ok", "driver_version": "580.95.05", "kernel_module": "proprietary", "cards": [card]},
        "plans": [plan(number)],
        "skipped": [],
        "results": [result(number)] if results is None else results,
        "failures": [],
        **extra,
    }


def fleet(count: int) -> list[dict[str, Any]]:
    """A fleet with the usual troubles in it."""
    noise = random.Random(7)
    hosts = []
    for number in range(1, count + 1):
        tps = 30.06 * (1 + noise.gauss(0, 0.006))
        extra: dict[str, Any] = {}
        over: Any = None
        if number % 40 == 7:
            tps, over = (
                tps * 0.74,
                {"throttle_mask": lambda i: 0x20 if i % 3 else 0, "temperature_c": 88, "sm_mhz": 900},
            )
        elif number % 40 == 13:
            tps, over = tps * 0.81, {"processes": [{"pid": 99, "name": "python3", "memory_mib": 900}]}
        elif number % 40 == 19:
            over = {"pcie_width": 4}
        elif number % 40 == 23:
            extra["untuned_label"] = "UNTUNED: --context 32768 instead of 65536."
            extra["receipt_applies"] = False
        one = host(number, [result(number, tps, over=over, **extra)])
        if "untuned_label" in extra:
            one["plans"] = [plan(number, untuned_label=extra["untuned_label"])]
        if number % 40 == 31:
            one = {"name": f"gpu-host-{number}", "status": "unreachable", "reason": "nothing was learnt from it"}
        hosts.append(one)
    return hosts
