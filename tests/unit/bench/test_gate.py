# SPDX-License-Identifier: Apache-2.0
"""The gate, comparisons, sweeps, the power sweep and the thermal guard."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import (
    _bench_gate,
    _bench_plan,
    _bench_run,
    _bench_sweep,
    _lease,
    _power,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._bench import BenchError

from tests.unit.bench import fleetdata
from tests.unit.bench.fakellama import Answer, FakeLlama, frames

ROOT = Path(__file__).resolve().parents[3]
CARD = fleetdata.uuid(1)


def no_programs(_argv: Sequence[str]) -> tuple[int, str, str]:
    return 127, "", ""


# --- comparing -----------------------------------------------------------------------------------------------------


def judge(candidate: float, noise: float = 0.002, **new: Any) -> dict[str, Any]:
    present = [fleetdata.result(1, 30.0 * (1 + factor), jitter=0) for factor in (0.0, noise, -noise)]
    other = {"image_digest": "sha256:" + "cd" * 32, **new}
    return _bench_gate.judge(present, [fleetdata.result(1, candidate, jitter=0, **other)] * 2, 1.0, 30.06)


def test_gate_answers_pass_fail_and_cannot_tell_and_what_it_did_not_judge() -> None:
    assert judge(30.1)["verdict"] == "pass"
    assert judge(28.0)["verdict"] == "fail"
    assert judge(29.7)["verdict"] == "cannot tell"
    assert judge(29.0, noise=0.04)["verdict"] == "cannot tell"
    answer = judge(30.1)
    assert "Numerics and quality were not judged" in answer["text"]
    assert answer["candidate_vs_receipt_percent"] == pytest.approx(0.2, abs=0.3)


def test_gate_takes_its_noise_from_the_present_engine_against_itself() -> None:
    assert judge(30.0, noise=0.01)["band_percent"] == pytest.approx(2.2, abs=0.2)
    with pytest.raises(BenchError, match="at least two rounds"):
        _bench_gate.judge([fleetdata.result(1)], [fleetdata.result(1)], 1.0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"driver_version": "535.1"}, "the driver moved"),
        ({"prompt_sha256": "x"}, "their prompts differ"),
        ({"state": "cold"}, "one is cold, the other warm"),
        ({"measured_at": "2026-11-27T22:00:00Z"}, "not measured on the same day"),
        ({"method": "other"}, "different methods"),
        ({"other_model": True}, "another model"),
    ],
)
def test_RL_022_RL_031_RL_032_what_does_not_compare_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(BenchError, match=text):
        judge(30.0, **change)


def test_RL_031_another_image_is_refused_unless_the_comparison_is_about_it() -> None:
    a, b = fleetdata.result(1), fleetdata.result(1, image_digest="sha256:x")
    assert any("engine image moved" in reason for reason in _bench_gate.incomparable(a, b))
    assert _bench_gate.incomparable(a, b, across=("image_digest",)) == []


def test_RL_021_one_percent_inside_three_is_no_difference() -> None:
    a, b = fleetdata.result(1, 30.0), fleetdata.result(1, 30.3)
    a["spread"] = b["spread"] = 0.03
    assert _bench_gate.difference(a, b)["verdict"] == "no difference"
    b["median_decode_tps"] = 32.0
    assert _bench_gate.difference(a, b)["verdict"] == "different"


def test_RL_036_a_new_result_stands_beside_the_kept_one_with_a_verdict(tmp_path: Path) -> None:
    options = {"results_dir": str(tmp_path), "mode": "always", "model": fleetdata.MODEL, "runs": 1, "tokens": 16}
    _bench_run.store_result(str(tmp_path), {**fleetdata.result(1, 30.0), "card_uuid": None})
    with FakeLlama([Answer(frames(8)), Answer(frames(16, gap=0.01))]) as server:
        answer = _bench_plan.act({**options, "host": "127.0.0.1", "port": server.port, "on_busy": "label"}, no_programs)
    row = answer["result"]["previous"]
    assert row["old_decode_tps"] == pytest.approx(30.0, rel=0.01)
    assert row["new_decode_tps"] == answer["median_decode_tps"]
    assert row["verdict"] == "different" and "image_digest" in row["moved"]
    assert _bench_gate.again(fleetdata.result(1, 30.0), fleetdata.result(1, 30.0))["verdict"] == "no difference"


# --- sweeps --------------------------------------------------------------------------------------------------------


def test_RL_030_arms_are_taken_in_turn_and_the_first_one_last_again() -> None:
    assert _bench_sweep.order([1, 2], 3) == [1, 2, 1, 2, 1, 2, 1]
    with pytest.raises(BenchError, match="different values"):
        _bench_sweep.order([1, 1], 1)


def sweep(tmp_path: Path, answers: list[Answer], **options: Any) -> dict[str, Any]:
    _bench_run.store_result(str(tmp_path), {**fleetdata.result(1), "card_uuid": None})
    with FakeLlama([Answer(frames(8)), *answers], **options.pop("server", {})) as server:
        given = {"model": "m", "port": server.port, "tokens": 16, "on_busy": "label", "results_dir": str(tmp_path)}
        given.update({"repeats": 2, "first_token_s": 30.0, "values": None, **options})
        answer = _bench_sweep.act(given, no_programs)
    answer["requests"] = server.requests
    return answer


def test_RL_025_each_number_of_streams_has_its_rates_and_distinct_prompts(tmp_path: Path) -> None:
    answer = sweep(tmp_path, [Answer(frames(16, gap=0.004))], kind="streams", values=[1, 2, 4])
    rows = answer["sweep"]["arms"]
    assert [row["value"] for row in rows] == [1, 2, 4]
    assert all(row["decode_tps"] and row["aggregate_tps"] and row["ttft_ms"] and row["slots"] == 1 for row in rows)
    assert rows[2]["aggregate_tps"] > 1.5 * rows[0]["aggregate_tps"]
    prompts = [seen.body[:40] for seen in answer["requests"] if seen.path == "/completion"]
    assert len(set(prompts)) == 1 + 4  # the warm-up's and one a stream
    assert _bench_run.load_result(str(tmp_path), None)["sweeps"][0]["kind"] == "streams"


def test_RL_030_a_drift_of_the_control_voids_the_sweep(tmp_path: Path) -> None:
    fast, slow = Answer(frames(16, gap=0.004)), Answer(frames(16, gap=0.008))
    answer = sweep(tmp_path, [fast, fast, fast, fast, slow], kind="prompt", values=[0, 500])
    assert answer["sweep"]["valid"] is False
    assert "does not stand" in answer["sweep"]["notes"][0]


def test_a_prompt_that_does_not_fit_is_skipped_with_its_reason(tmp_path: Path) -> None:
    answer = sweep(tmp_path, [Answer(frames(16))], kind="prompt", values=[0, 8192], repeats=1)
    assert answer["sweep"]["arms"][1]["reasons"] == ["the server's context is 4096 tokens"]
    assert answer["sweep"]["arms"][1]["decode_tps"] is None


def test_prompts_have_the_length_that_is_asked_and_no_part_twice() -> None:
    text = _bench_sweep.prompt_of(4096, 4.7)
    assert len(text) == pytest.approx(4096 * 4.7, abs=2)
    assert text.count("Part 3.") == 1 and text.endswith("Continue the text above.")


def test_a_sweep_without_a_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="run the playbook bench first"):
        _bench_sweep.act(
            {"model": "m", "port": 1, "kind": "prompt", "values": [0], "repeats": 1, "results_dir": str(tmp_path)},
            no_programs,
        )


# --- power ---------------------------------------------------------------------------------------------------------


class Card:
    """An nvidia-smi with a power limit, and a systemd-run that really waits for the process."""

    def __init__(self, state: Path, wrong: bool = False) -> None:
        self.state = state
        self.wrong = wrong
        if not state.exists():
            state.write_text("250")

    def __call__(self, argv: Sequence[str]) -> tuple[int, str, str]:
        if argv[0] == "systemd-run":
            script = argv[-1].replace(f"nvidia-smi -i {CARD} -pl", f"sh -c 'echo $0 > {self.state}'")
            subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)
            return 0, "", ""
        if argv[0] != "nvidia-smi":
            return 127, "", ""
        if "-pl" in argv:
            assert argv[1:3] == ["-i", CARD]
            if not self.wrong:
                self.state.write_text(argv[-1])
            return 0, "", ""
        if "power.default_limit" in argv[1]:
            return 0, f"{CARD}, {float(self.state.read_text()):.2f}, 250.00, 125.00, 250.00\n", ""
        return 6, "", ""


def power_options(tmp_path: Path, port: int) -> dict[str, Any]:
    options = {"model": "m", "port": port, "card_uuid": CARD, "runs": 1, "tokens": 16, "on_busy": "label"}
    return {**options, "limits_w": [200.0, 150.0], "settle_s": 0.0, "results_dir": str(tmp_path / "results")}


def test_RL_043_and_RL_044_each_limit_has_its_row_and_the_former_one_is_back(tmp_path: Path) -> None:
    card = Card(tmp_path / "limit")
    with FakeLlama([Answer(frames(8)), *[Answer(frames(n)) for n in (16, 8, 16, 8, 16, 8)]]) as server:
        options = power_options(tmp_path, server.port)
        options["lease_dir"] = str(tmp_path)
        answer = _power.sweep(options, card)
    assert [row["value"] for row in answer["rows"]] == [200.0, 150.0, 200.0]
    assert all(set(row) >= {"decode_tps", "sm_mhz", "power_w", "throttle"} for row in answer["rows"])
    assert card.state.read_text() == "250"


def test_RL_045_a_limit_that_went_to_another_card_fails_before_the_first_take(tmp_path: Path) -> None:
    card = Card(tmp_path / "limit", wrong=True)
    with FakeLlama([Answer(frames(8))]) as server:
        options = {**power_options(tmp_path, server.port), "lease_dir": str(tmp_path)}
        with pytest.raises(BenchError, match="the limit went to another card"):
            _power.sweep(options, card)
        assert server.requests == []


def test_RL_044_after_kill_9_the_unit_sets_the_limit_back(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        card = Card(tmp_path / "limit")
        _power.sweep({**power_options(tmp_path, 1), "lease_dir": str(tmp_path), "settle_s": 60.0}, card)
        os._exit(1)
    for _ in range(200):
        if (tmp_path / "limit").exists() and (tmp_path / "limit").read_text() == "200":
            break
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for _ in range(200):
        if (tmp_path / "limit").read_text().strip() == "250":
            break
        time.sleep(0.05)
    assert (tmp_path / "limit").read_text().strip() == "250"
    assert _lease.read(CARD, str(tmp_path)) is None


@pytest.mark.parametrize("asked", [[100.0], [300.0]])
def test_a_limit_that_the_card_does_not_take_is_refused(asked: list[float]) -> None:
    known = {"limit": 250.0, "default": 250.0, "min": 125.0, "max": 250.0}
    with pytest.raises(BenchError, match="takes 125 to 250 W"):
        _power.limits_of(asked, known)
    assert _power.limits_of([], known) == [250.0, 200.0, 150.0, 250.0]


# --- thermal guard -------------------------------------------------------------------------------------------------


@pytest.fixture
def guard() -> ModuleType:
    path = ROOT / "roles" / "thermal_guard" / "files" / "thermal_guard.py"
    spec = importlib.util.spec_from_file_location("thermal_guard", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONFIG = {"unit": "u", "uuid": CARD, "card_limit_c": 83, "cpu_limit_c": 95, "sustained_s": 30, "every_s": 5}


def test_RL_041_29_seconds_do_nothing_and_31_stop_the_unit(guard: ModuleType) -> None:
    hot = {"card_temperature_c": 90.0, "cpu_temperature_c": None}
    one = guard.Guard(CONFIG)
    assert [one.look(hot, now) for now in (0, 5, 29)] == [None, None, None]
    assert "card_temperature_c 90 over 83" in one.look(hot, 31)


def test_RL_041_a_cool_reading_starts_anew_and_a_missing_one_does_not(guard: ModuleType) -> None:
    hot, cool, blind = {"card_temperature_c": 90.0}, {"card_temperature_c": 60.0}, {"card_temperature_c": None}
    one = guard.Guard(CONFIG)
    assert [one.look(r, t) for r, t in ((hot, 0), (cool, 20), (hot, 25), (hot, 54))] == [None] * 4
    assert one.look(hot, 56) is not None
    assert [one.look(r, t) for r, t in ((hot, 100), (blind, 120))] == [None, None]
    assert one.look(hot, 131) is not None


def test_RL_041_only_the_one_unit_is_stopped(
    guard: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.json").write_text(json.dumps({**CONFIG, "sustained_s": -1}))
    monkeypatch.setattr(guard, "read", lambda _config: {"card_temperature_c": 99.0})
    ran: list[list[str]] = []

    class Over(Exception):
        pass

    def once(_seconds: float) -> None:
        raise Over

    monkeypatch.setattr(guard.subprocess, "run", lambda argv, **_k: ran.append(argv))
    monkeypatch.setattr(guard.time, "sleep", once)
    with pytest.raises(Over):
        guard.main(str(tmp_path / "c.json"))
    assert ran == [["systemctl", "stop", "u"]]


def test_RL_042_the_guard_names_what_it_is_blind_to(guard: ModuleType, tmp_path: Path) -> None:
    def smi(*_args: Any, **_more: Any) -> Any:
        return subprocess.CompletedProcess([], 0, "61, [N/A]\n", "")

    seen = guard.status(guard.read(CONFIG, smi, str(tmp_path / "z*"), str(tmp_path / "h*")))
    assert seen["sensors"] == ["card_temperature_c"]
    assert seen["blind_to"] == ["the temperature of the card's memory", "the processor's temperature"]


# --- requests ------------------------------------------------------------------------------------------------------


def test_a_plan_answers_everything_and_single_options_win(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("\nsecret\n")
    plan = {
        "model": "org/m",
        "card": "p100",
        "port": 8081,
        "alias": "a",
        "cards": [{"uuid": CARD}],
        "image": "e@sha256:aa",
        "api_key_file": str(key),
    }
    request = _bench_plan.make_request({"plan": plan, "port": 9000, "runs": 5})
    assert (request.model, request.port, request.runs, request.card_uuid) == ("org/m", 9000, 5, CARD)
    assert (request.image_digest, request.api_key) == ("sha256:aa", "secret")
    with pytest.raises(BenchError, match="cannot read the API key file"):
        _bench_plan.make_request({"plan": {**plan, "api_key_file": str(tmp_path / "none")}})
