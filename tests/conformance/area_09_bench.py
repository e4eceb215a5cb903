# SPDX-License-Identifier: Apache-2.0
"""Area 9 of the conformance corpus: the benchmark."""

from __future__ import annotations

import json
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils import _bench, _bench_plan, _bench_prompt, _bench_run
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.conformance.frame import Env
from tests.unit.bench.fakellama import Answer, FakeLlama, frames

AREA = "bench"


def _no_programs(_argv: Any) -> tuple[int, str, str]:
    return 127, "", ""


def _request(env: Env, given: dict[str, Any], **more: Any) -> _bench_run.Request:
    recipe = env.recipe(given)
    options = {
        "model": recipe["model"]["hf_repo"],
        "card": recipe["card"]["id"],
        "alias": recipe["run"].get("alias"),
        "receipt_decode_tps": _bench.short_receipt(recipe.get("receipt")),
        "on_busy": "label",
        **more,
    }
    return _bench_plan.make_request(options)


def _prompt(_env: Env, given: dict[str, Any]) -> dict[str, Any]:
    spec = given["license_text"]
    text = spec["repeat"] * spec["times"] if isinstance(spec, dict) else _bench_prompt.LICENSE_HEAD
    prompt = _bench_prompt.build_prompt(text)
    return {
        "prompt_length": len(prompt),
        "prompt_starts": prompt,
        "prompt_ends": prompt,
        "characters_of_license": len(prompt) - len(_bench_prompt.REQUEST),
    }


def _requests(env: Env, given: dict[str, Any]) -> dict[str, Any]:
    """What really goes over the wire, as a server saw it."""
    answers = [Answer(frames(n, gap=0.001)) for n in (8, *[given["tokens"]] * given["runs"])]
    with FakeLlama(answers) as server:
        request = _bench_run.Request("m", port=server.port, runs=given["runs"], tokens=given["tokens"], on_busy="label")
        _bench_run.Bench(request, _no_programs).measure()
    sent = [json.loads(r.body) for r in server.requests if r.path == "/completion"]
    warm, measured = sent[0], sent[1:]
    body = measured[0]
    assert all(other == body for other in measured)
    return {
        "warmup": {"count": 1, "tokens": warm["n_predict"], "timed": False},
        "measured": {
            "count": len(measured),
            "method": "POST",
            "path": "/completion",
            "stream": body["stream"],
            "tokens": body["n_predict"],
            "temperature": body["temperature"],
            "top_k": body["top_k"],
            "seed": body["seed"],
            "ignore_eos": body["ignore_eos"],
            "prompt_cache": body["cache_prompt"],
        },
        "new_connection_each": len({r.connection for r in server.requests if r.path == "/completion"}) == len(sent),
    }


def _defaults(_env: Env, _given: dict[str, Any]) -> dict[str, Any]:
    request = _bench_run.Request("m")
    return {"runs": request.runs, "tokens": request.tokens, "host": request.host, "port": request.port}


def _timing(_env: Env, given: dict[str, Any]) -> dict[str, Any]:
    run = given["run"]
    if "token_times" in run:
        stamps = [(at, count) for count, at in enumerate(run["token_times"], 1)]
    else:
        stamps = [(run["first"], 1), (run["last"], run["tokens"])]
    decode, ttft, tokens = _bench.rates(run["start"], stamps)
    return {"decode_tps": decode, "ttft_ms": ttft, "tokens": tokens}


def _median(_env: Env, given: dict[str, Any]) -> dict[str, Any]:
    return {
        "median_decode_tps": _bench.median(given["decode_tps"]),
        "median_ttft_ms": _bench.median(given["ttft_ms"]),
    }


def _compare(env: Env, given: dict[str, Any]) -> dict[str, Any]:
    receipt = given.get("receipt_short", _bench.short_receipt(env.recipe(given).get("receipt")))
    got = _bench.compare({"median_decode_tps": given["median_decode_tps"]}, receipt)
    if "vs_receipt_percent" in got:
        got["shown_percent"] = _bench.shown_percent(got["vs_receipt_percent"])
    return got


def _result(env: Env, given: dict[str, Any]) -> dict[str, Any]:
    request = _request(env, given)
    runs = [
        {"decode_tps": decode, "ttft_ms": ttft, "prompt_tokens": given["prompt_tokens"], "tokens": given["tokens"]}
        for decode, ttft in given["runs"]
    ]
    address = f"http://{request.host}:{request.port}"
    return _bench.summarise(request.model, request.card, address, runs, request.receipt_decode_tps)


def _json(env: Env, given: dict[str, Any]) -> dict[str, Any]:
    got = _bench.documented(_result(env, given))
    return {
        "json": got,
        "json_keys": got,
        "json_keys_absent": got,
        "run_keys": got["runs"],
        "run_count": len(got["runs"]),
    }


def _text(env: Env, given: dict[str, Any]) -> dict[str, Any]:
    return {"output": _bench.text_lines(_result(env, given), given["tokens"])}


def _bench_case(env: Env, given: dict[str, Any]) -> dict[str, Any]:
    if given.get("healthy") is False:
        # Nothing listens on port 1; the sentence still names the port that was asked for.
        request = _request(env, given)
        bench = _bench_run.Bench(request, _no_programs)
        request.port = 1
        bench.measure()
    answers = [Answer(frames(8)), Answer(frames(256, gap=0.001))]
    with FakeLlama(answers, models=given.get("served_models") or []) as server:
        bench = _bench_run.Bench(_request(env, given, port=server.port), _no_programs)
        result = bench.measure()
    return {
        # The documented warning. A busy machine can add one of ours: that its clock and the server's disagree.
        "warned": any(" serves " in text for text in bench.warnings),
        "warnings": bench.warnings,
        "output": _bench.text_lines(result) + bench.warnings,
        "json_keys_absent": _bench.documented(result),
    }


OPERATIONS = {
    "prompt": _prompt,
    "requests": _requests,
    "defaults": _defaults,
    "timing": _timing,
    "median": _median,
    "compare": _compare,
    "json": _json,
    "text": _text,
    "bench": _bench_case,
}


def run_case(case: dict[str, Any], env: Env) -> dict[str, Any]:
    given = case["given"]
    try:
        got = OPERATIONS[given["operation"]](env, given)
    except Refusal as refusal:
        return {"failed": True, "exit_code": refusal.rc, "message": refusal.message, "output": refusal.message}
    return {"failed": False, "exit_code": 0, "message": "", **got}


def _same(value: Any, wanted: Any, tolerance: float) -> bool:
    if isinstance(wanted, (int, float)) and not isinstance(wanted, bool):
        return isinstance(value, (int, float)) and abs(value - wanted) <= tolerance
    return bool(value == wanted)


def _check_json(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    tolerance = case["expect"].get("tolerance", 1e-9)
    wrong = {k: got["json"].get(k) for k, v in expected.items() if not _same(got["json"].get(k), v, tolerance)}
    return f"differs: {wrong}" if wrong else None


# The count needs the release's own model (selftest.yml asks it on a P100); what can be held here is the very text.
PROMPT_SHA256 = "5c961e5f3eef7ce951d14e643aa5696892ec32b9012c6fe40afb243a08424045"


def _prompt_tokens(_expected: int, _got: dict[str, Any], _case: dict[str, Any]) -> str | None:
    found = _bench_prompt.prompt_hash(_bench_prompt.build_prompt())
    return None if found == PROMPT_SHA256 else f"the built-in prompt is another one: sha256 {found}"


CHECKS = {
    "prompt_starts": lambda e, got, _c: None if got["prompt_starts"].startswith(e) else "starts otherwise",
    "prompt_ends": lambda e, got, _c: None if got["prompt_ends"].endswith(e) else "ends otherwise",
    "expected_prompt_tokens": _prompt_tokens,
    "json": _check_json,
    "json_keys": lambda e, got, _c: None if set(got["json_keys"]) == set(e) else f"has {sorted(got['json_keys'])}",
    "json_keys_absent": lambda e, got, _c: f"has {k}" if (k := set(e) & set(got["json_keys_absent"])) else None,
    "run_keys": lambda e, got, _c: None if all(set(r) == set(e) for r in got["run_keys"]) else f"has {got['run_keys']}",
}
