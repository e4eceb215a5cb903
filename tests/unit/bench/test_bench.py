# SPDX-License-Identifier: Apache-2.0
"""The benchmark as a whole against a scripted server (group BEN, and the rig log's rules on measuring)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _bench, _bench_plan, _bench_run
from ansible_collections.tensorless.fleet.plugins.module_utils._bench import BenchError
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_run import Bench, Request
from ansible_collections.tensorless.fleet.plugins.module_utils._server_files import places

from tests.unit.bench.fakellama import Answer, FakeLlama, frames, last, token


def no_programs(_argv: Sequence[str]) -> tuple[int, str, str]:
    return 127, "", "not found"


def measure(
    answers: list[Answer], runs: int = 3, tokens: int = 16, server: Any = None, **options: Any
) -> dict[str, Any]:
    """Warm-up first, then the answers in their order; the last one repeats."""
    with FakeLlama([Answer(frames(8)), *answers], **(server or {})) as fake:
        options = {"on_busy": "label", "witness_interval_s": 5.0, **options}
        bench = Bench(
            Request("m", port=fake.port, runs=runs, tokens=tokens, **options), no_programs, sleep=lambda _s: None
        )
        result = bench.measure()
    result["_requests"] = fake.requests
    return result


def good(tokens: int = 16) -> Answer:
    return Answer(frames(tokens))


def test_an_exact_server_is_measured_exactly() -> None:
    parts: list[Any] = [(0.05 + n * 0.02, token(n + 1)) for n in range(64)]
    with FakeLlama([Answer([*parts, last(64)])]) as server:
        stream = _bench_run.completion("127.0.0.1", server.port, _bench.request_body("x", 64))
    decode = _bench.rates(stream.start, stream.stamps)[0]
    sent = server.sent_at[:64]
    # By the server's own stamps of sending; the bound of 0.05 % over ten runs is measured in tests/bench.
    assert decode == pytest.approx(63 / (sent[-1] - sent[0]), rel=0.02)


def test_thrown_out_runs_are_repeated_once_and_never_enter_the_median() -> None:
    cached = Answer(frames(16, timings={"cache_n": 400, "prompt_n": 29}))
    early = Answer([token(1), (0.01, token(5)), last(5, stop_type="eos")])
    result = measure([good(), cached, early, good()])
    assert len(result["runs"]) == 3
    reasons = [reason for run in result["discarded"] for reason in run["reasons"]]
    assert any("prompt cache" in reason for reason in reasons)
    assert any("end token" in reason for reason in reasons)
    assert any("thrown out" in warning for warning in result["warnings"])


def test_BEN_04_a_server_that_always_answers_from_the_cache_gives_no_number() -> None:
    with pytest.raises(BenchError, match=r"no run of 6 is a measurement: 400 prompt tokens came from the prompt cache"):
        measure([Answer(frames(16, timings={"cache_n": 400, "prompt_n": 29}))])


def test_BEN_05_all_values_are_kept_and_a_spread_is_said() -> None:
    steady = _bench.stability([50.1, 50.3, 50.2], [900.0, 210.0, 208.0])
    assert steady["stable"] is False
    assert any("warm-up" in note for note in steady["notes"])
    assert _bench.stability([50.1, 50.3, 50.2], [210.0, 209.0, 208.0])["stable"] is True


def test_BEN_06_a_steady_fall_is_named() -> None:
    steady = _bench.stability([21.1, 19.6, 18.4], [1.0, 1.0, 1.0])
    assert steady["trend"] == "falling"
    assert any("slower than the one before" in note for note in steady["notes"])
    assert _bench.stability([21.1, 21.0, 20.9], [1.0, 1.0, 1.0])["trend"] == "level"


def test_BEN_07_the_method_is_part_of_a_result() -> None:
    result = measure([good()])
    assert result["method"] == _bench.METHOD
    identity = {"method": result["method"]}
    assert _bench_plan.reason_to_measure("if_changed", result, identity) is None
    assert "another method" in str(_bench_plan.reason_to_measure("if_changed", {**result, "method": "other"}, identity))


def test_BEN_08_a_guard_never_loops() -> None:
    requests = 0

    def count(_line: str) -> None:
        nonlocal requests
        requests += 1

    early = Answer([token(1), (0.01, token(5)), last(5, stop_type="eos")])
    with FakeLlama([Answer(frames(8)), early]) as fake:
        bench = Bench(
            Request("m", port=fake.port, runs=2, tokens=16, on_busy="label"), no_programs, count, sleep=lambda _s: None
        )
        with pytest.raises(BenchError, match="no run of 4"):
            bench.measure()
    assert len([seen for seen in fake.requests if seen.path == "/completion"]) == 5


def test_BEN_09_tokens_are_the_servers_count_and_the_text_is_only_hashed() -> None:
    result = measure([Answer([token(4, "abcd"), (0.01, token(16, "efgh")), last(16)])])
    assert [run["tokens"] for run in result["runs"]] == [16, 16, 16]
    assert len(result["output_sha256"]) == 1


def test_BEN_10_a_foreign_request_is_seen_in_the_servers_counter() -> None:
    # Before and after each run; the second run has 300 foreign tokens in it.
    totals = [0, 16, 16, 332, 332, 348, 348, 364]
    result = measure([good()], server={"metrics": totals})
    assert [run["exclusive"] for run in result["runs"]] == ["yes"] * 3
    assert "300 tokens for somebody else" in result["discarded"][0]["reasons"][0]


def test_BEN_10_a_busy_slot_throws_the_run_out() -> None:
    with pytest.raises(BenchError, match="another request was in the server's slot"):
        measure([good()], server={"slots": [{"id": 0, "is_processing": True}]})


def test_another_model_is_measured_labelled_and_never_compared() -> None:
    result = measure([good()], server={"models": ["other"]}, alias="smol", receipt_decode_tps=30.0)
    assert "vs_receipt_percent" not in result
    assert result["receipt_applies"] is False
    assert any(label.startswith("another model") for label in result["labels"])
    assert any("serves other, not smol" in warning for warning in result["warnings"])


def test_an_untuned_server_is_labelled() -> None:
    label = "UNTUNED: --context 32768 instead of 65536."
    result = measure([good()], untuned_label=label, receipt_decode_tps=30.0)
    assert (result["receipt_applies"], result["untuned"], label in result["labels"]) == (False, True, True)
    assert "only a rough guide" in "\n".join(_bench.text_lines(result))


@pytest.mark.parametrize("asked", [15, 17, 256])
def test_another_count_of_tokens_is_no_measurement(asked: int) -> None:
    parts = [token(1), (0.01, token(16)), last(16)]
    if 13 <= asked <= 16:
        assert measure([Answer(parts)], tokens=asked)["runs"][0]["tokens"] == 16
    else:
        with pytest.raises(BenchError, match=f"generated 16 tokens instead of {asked}"):
            measure([Answer(parts)], tokens=asked)


def test_a_wrong_key_is_named_and_a_right_one_is_never_shown() -> None:
    with pytest.raises(BenchError, match="refuses the API key"):
        measure([good()], server={"key": "k-secret"}, api_key="k-wrong")
    result = measure([good()], server={"key": "k-secret"}, api_key="k-secret")
    result.pop("_requests")
    assert "k-secret" not in json.dumps(result)


def test_a_loading_server_is_waited_for() -> None:
    assert measure([good()], server={"health": [503, 503, 200]})["median_decode_tps"] > 0


def test_no_server_names_the_command() -> None:
    with pytest.raises(BenchError) as caught:
        Bench(Request("org/m", port=1), no_programs).measure()
    assert str(caught.value) == (
        "no server answers http://127.0.0.1:1/health. Start one with: tensorless serve org/m --detach"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [("tokens", 1), ("runs", 0), ("port", 0), ("host", "a b"), ("host", "h/x"), ("host", "h\n"), ("on_busy", "force")],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_sent(option: str, value: Any) -> None:
    with pytest.raises(BenchError, match=f"{option} is"):
        Bench(Request("m", **{option: value}), no_programs)


def test_RL_023_both_clocks_stand_in_one_row() -> None:
    run = measure([good()])["runs"][0]
    assert run["decode_tps"] > 0 and run["server"]["decode_tps"] > 0
    assert run["server"]["disagreement_percent"] is not None


def test_RL_023_a_disagreement_is_said() -> None:
    off = Answer([token(1), (0.1, token(16)), last(16, spent_ms=50.0)])
    assert any("differ by" in warning for warning in measure([off])["warnings"])


def test_RL_027_prompt_length_prefill_and_decode_are_three_fields() -> None:
    result = measure([good()])
    assert (result["prompt_tokens"], result["prefill_tps"]) == (429, pytest.approx(42900.0))
    assert result["median_decode_tps"] > 0


def test_RL_035_a_drafted_run_without_acceptance_is_rejected() -> None:
    with pytest.raises(BenchError, match="how many of its tokens were accepted"):
        measure([Answer(frames(16, timings={"draft_n": 40}))])
    result = measure([Answer(frames(16, timings={"draft_n": 40, "draft_n_accepted": 30}))])
    assert "drafted: 30 of 40 draft tokens accepted" in result["labels"]
    assert result["receipt_applies"] is False, "no receipt was measured with a draft model"


def test_RL_039_a_recorded_stream_replays_with_its_own_stamps() -> None:
    stamps = [(1.0, 1), (1.0334, 2), (1.5, 4), (1.6, 5)]
    assert _bench.unpack_times(_bench.pack_times(0.5, stamps)) == [
        (pytest.approx(at - 0.5, abs=1e-6), count) for at, count in stamps
    ]


def test_RL_076_the_recorder_only_reads() -> None:
    result = measure([good()])
    asked = {seen.path for seen in result["_requests"]}
    assert asked == {"/health", "/v1/models", "/props", "/slots", "/metrics", "/completion"}
    assert (result["build_info"], result["total_slots"], result["n_ctx"]) == ("b1-test", 1, 4096)


def test_RL_020_and_RL_011_the_stored_row_has_its_scope_and_its_quiet_witness(tmp_path: Any) -> None:
    plan = {
        "model": "org/m",
        "card": "p100",
        "cards": [],
        "plan_hash": "h",
        "exec": ["podman", "run", "x"],
        "image": "e@sha256:aa",
        "download": {"sha256": "s"},
        "receipt_decode_tps": 30.0,
    }
    options = {"results_dir": str(tmp_path), "mode": "if_changed", "plan": plan, "runs": 1, "tokens": 16}
    with FakeLlama([Answer(frames(8)), good()]) as fake:
        options.update(host="127.0.0.1", port=fake.port, on_busy="label")
        first = _bench_plan.act(options, no_programs)
        second = _bench_plan.act(options, no_programs)
        moved = _bench_plan.act({**options, "plan": {**plan, "plan_hash": "h2"}}, no_programs, check_mode=True)
    assert (first["measured"], second["measured"], second["changed"]) == (True, False, False)
    assert "previous" not in first["result"]
    assert (moved["changed"], moved["measured"]) == (True, False)
    assert "another plan hash" in moved["reason"]
    row = _bench_run.load_results(str(tmp_path))[0]
    assert row["scope"]["exec"] == plan["exec"] and row["scope"]["model_sha256"] == "s"
    assert row["image_digest"] == "sha256:aa"
    assert {"load1", "io_pressure", "other_processes", "slots", "busy"} <= set(row["quiet"]["before"])


def test_check_mode_sends_nothing(tmp_path: Any) -> None:
    options = {"results_dir": str(tmp_path), "mode": "always", "model": "m", "port": 1}
    answer = _bench_plan.act(options, no_programs, check_mode=True)
    assert (answer["changed"], answer["measured"], list(tmp_path.iterdir())) == (True, False, [])


@pytest.mark.parametrize(
    ("moved", "words"),
    [({"context": 3072, "port": 8090}, "context 3072, not 4096; port 8090, not 8080"), ({}, "other arguments")],
)
def test_a_server_of_another_plan_is_not_measured_under_this_name(
    tmp_path: Any, moved: dict[str, Any], words: str
) -> None:
    plan = {"instance": "tensorless-m", "plan_hash": "h", "context": 4096, "port": 8080, "exec": []}
    where = places("user", str(tmp_path))
    _bench_plan.check_running({"plan": plan}, [where])  # nothing on record
    record = tmp_path / ".config/tensorless/instances/tensorless-m.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"schema": 1, "instance": "tensorless-m", **plan}))
    _bench_plan.check_running({"plan": plan}, [where])
    record.write_text(json.dumps({"schema": 1, **plan, "plan_hash": "h2", **moved}))
    with pytest.raises(BenchError, match=words):
        _bench_plan.check_running({"plan": plan}, [where])
