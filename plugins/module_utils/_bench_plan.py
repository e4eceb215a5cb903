# SPDX-License-Identifier: Apache-2.0
"""From a plan, or from single options, to a benchmark request; and the module's course of action.

Private to the collection: it may change at any time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _bench, _bench_gate, _bench_run, _witness
from ansible_collections.tensorless.fleet.plugins.module_utils._bench import BenchError
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_run import Bench, Request
from ansible_collections.tensorless.fleet.plugins.module_utils._lease import boot_id
from ansible_collections.tensorless.fleet.plugins.module_utils._server_files import Places, places, read_document

MOVES = ("context", "host", "port", "image", "alias")  # what may tell two plans of a server apart, in words
SCOPE = ("command", "exec", "image", "runtime", "context", "threads", "container_name", "instance")


def from_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a plan answers."""
    cards = plan.get("cards") or []
    image = str(plan.get("image") or "")
    download = plan.get("download") or {}
    scope = {key: plan[key] for key in SCOPE if key in plan}
    scope["model_sha256"] = download.get("sha256")
    scope["model_revision"] = download.get("revision")
    scope["model_size_bytes"] = download.get("size_bytes")
    return {
        "model": plan.get("model"),
        "card": plan.get("card"),
        "host": plan.get("host"),
        "port": plan.get("port"),
        "alias": plan.get("alias"),
        "receipt_decode_tps": plan.get("receipt_decode_tps"),
        "receipt_applies": plan.get("receipt_applies"),
        "untuned_label": plan.get("untuned_label"),
        "untuned_reasons": plan.get("untuned_reasons"),
        "card_uuid": cards[0].get("uuid") if cards else None,
        "image_digest": image.partition("@")[2] or None,
        "plan_hash": plan.get("plan_hash"),
        "api_key_file": plan.get("api_key_file"),
        "scope": scope,
    }


def card_of(options: Mapping[str, Any]) -> Optional[str]:
    """The UUID that the options name, for a failure's own record."""
    uuid = options.get("card_uuid") or from_plan(options.get("plan") or {})["card_uuid"]
    return str(uuid) if uuid else None


def make_request(options: Mapping[str, Any]) -> Request:
    """Single options win over the plan's; both over the documented defaults."""
    known = Request.__dataclass_fields__
    values = from_plan(options.get("plan") or {})
    values.update({key: value for key, value in options.items() if key in known and value is not None})
    key_file = options.get("api_key_file") or values.get("api_key_file")
    values = {key: value for key, value in values.items() if value is not None and key != "api_key_file"}
    if key_file and "api_key" not in values:
        values["api_key"] = read_key(str(key_file))
    if not values.get("model"):
        raise BenchError("no model is named: give `plan`, or `model` with `host` and `port`")
    return Request(**values)


def read_key(path: str) -> str:
    """The first key of a server's key file."""
    try:
        with open(path, encoding="utf-8") as handle:
            keys = [line.strip() for line in handle if line.strip()]
    except OSError as fault:
        raise BenchError(f"cannot read the API key file {path}: {fault.strerror}") from None
    if not keys:
        raise BenchError(f"the API key file {path} holds no key")
    return keys[0]


def check_running(options: Mapping[str, Any], where: Sequence[Places] = ()) -> None:
    """Refuses where the host's own record says that this server runs another plan: its rate would bear a wrong name."""
    plan = options.get("plan") or {}
    instance = str(plan.get("instance") or "")
    if not instance:
        return
    for place in where or (places("system"), places("user", os.path.expanduser("~"))):
        _state, record = read_document(place.document(instance))
        if record is None or record.get("plan_hash") == plan.get("plan_hash"):
            continue
        differ = [f"{key} {record.get(key)}, not {plan.get(key)}" for key in MOVES if record.get(key) != plan.get(key)]
        raise BenchError(
            f"{instance} runs another plan than the one to measure: {'; '.join(differ) or 'other arguments'}. Give the "
            "options that it was started with, or run site.yml (tensorless run) with these first"
        )


def said(report: Callable[[dict[str, Any]], None]) -> Callable[[str], None]:
    """Progress lines as the progress file takes them."""

    def say(line: str) -> None:
        report({"stage": "measure", "file": "the measurement", "bytes": 0, "size": 0, "note": line})

    return say


def act(
    options: Mapping[str, Any],
    run: _witness.Run,
    check_mode: bool = False,
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Observe, plan, apply: read the card's last result, see whether it still stands, measure where it does not."""
    directory = options["results_dir"]
    if options["mode"] == "read":
        return {
            "changed": False,
            "measured": False,
            "results": _bench_run.load_results(directory),
            "boot_id": boot_id(),
        }
    bench = Bench(make_request(options), run, say)
    stored = _bench_run.load_result(directory, bench.request.card_uuid)
    identity = bench.identity()
    why = reason_to_measure(options["mode"], stored, identity)
    if why is None and stored is not None:
        return {**outcome(stored), "changed": False, "measured": False, "reason": "the last result still stands"}
    if check_mode:
        return {"changed": True, "measured": False, "reason": f"would measure: {why}", "result": stored}
    check_running(options)
    result = bench.measure()
    if stored is not None and stored.get("model") == result["model"]:
        result["previous"] = _bench_gate.again(stored, result)
    _bench_run.store_result(directory, result)
    return {**outcome(result), "changed": True, "measured": True, "reason": why}


def reason_to_measure(mode: str, stored: Optional[Mapping[str, Any]], identity: Mapping[str, Any]) -> Optional[str]:
    """Why a measurement is due, or None."""
    if mode == "always":
        return "asked for"
    if stored is None:
        return "this card has no result yet"
    moved = [key for key, value in identity.items() if stored.get(key) != value]
    return f"the last result has another {', '.join(key.replace('_', ' ') for key in moved)}" if moved else None


def outcome(result: dict[str, Any]) -> dict[str, Any]:
    """The documented fields beside the whole result."""
    return {
        **_bench.documented(result),
        "result": result,
        "lines": _bench.text_lines(result, result.get("requested_tokens", _bench.TOKENS)),
    }
