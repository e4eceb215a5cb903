# SPDX-License-Identifier: Apache-2.0
"""Rules of the rig log that are kept elsewhere than in the benchmark itself, each by its id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import (
    _bench,
    _bench_run,
    _plan,
    _report,
    _report_ledger,
    _report_text,
    _server_cards,
    _server_files,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.bench import fleetdata
from tests.unit.recipe import recipe_made as made

ROOT = Path(__file__).resolve().parents[3]
NOW = "2026-11-29T22:30:00Z"


def plans(gpus: Any, **choice: Any) -> list[dict[str, Any]]:
    host = HostFacts(gpus=gpus, cpu_count=8, runtimes=("podman",))
    return list(_plan.plan_model([made.recipe()], host, Choice(cache="/var/lib/hub", **choice)).plans)


@pytest.mark.parametrize("swapped", [False, True])
def test_RL_001_and_RL_003_an_index_is_resolved_to_a_uuid_and_shown(swapped: bool) -> None:
    first, second = ("GPU-aaaa", "GPU-bbbb") if not swapped else ("GPU-bbbb", "GPU-aaaa")
    gpus = made.gpus(made.gpu(0, uuid=first), made.gpu(1, uuid=second))
    (by_index,) = plans(gpus, gpu="1")
    (by_uuid,) = plans(gpus, gpu="GPU-aaaa")
    assert f"nvidia.com/gpu={second}" in by_index["exec"] and by_index["cards"][0]["uuid"] == second
    assert "nvidia.com/gpu=GPU-aaaa" in by_uuid["exec"]
    assert not any(word.endswith(("gpu=0", "gpu=1")) for word in (*by_index["exec"], *by_uuid["exec"]))


def test_RL_002_a_server_on_the_wrong_card_is_seen() -> None:
    def card(uuid: str, used: int) -> dict[str, Any]:
        return {"uuid": uuid, "memory_used_mib": used}

    before = {"GPU-a": 0, "GPU-b": 0}
    wrong = {"cards": [card("GPU-a", 0), card("GPU-b", 14000)], "processes": [{"pid": 7, "uuid": "GPU-b"}]}
    right = {"cards": [card("GPU-a", 14000), card("GPU-b", 0)], "processes": [{"pid": 7, "uuid": "GPU-a"}]}
    assert "uses GPU-b, but was given GPU-a" in str(_server_cards.misplaced(["GPU-a"], before, wrong, frozenset({7})))
    assert _server_cards.misplaced(["GPU-a"], before, right, frozenset({7})) is None


def test_RL_005_each_card_has_its_own_service() -> None:
    gpus = made.gpus(made.gpu(0, uuid="GPU-aaaaaaaa-1"), made.gpu(1, uuid="GPU-bbbbbbbb-1"))
    both = plans(gpus, gpu="each")
    assert len({plan["instance"] for plan in both}) == 2 and len({plan["port"] for plan in both}) == 2
    for plan in both:
        devices = [word for word in plan["exec"] if "nvidia.com/gpu=" in word]
        assert devices == [f"nvidia.com/gpu={plan['cards'][0]['uuid']}"]


def test_RL_062_and_RL_078_a_full_card_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server_cards, "need", lambda _plan: _server_cards.Need(14000, "measured"))
    card = {"index": 0, "uuid": "GPU-a", "memory_mib": 16269, "memory_used_mib": 9000}
    process = {"pid": 99, "uuid": "GPU-a", "name": "python3", "memory_mib": 9000}
    plan = {"model": "org/m", "cards": [{"uuid": "GPU-a"}]}
    text = str(_server_cards.too_full(plan, {"cards": [card], "processes": [process]}, frozenset(), {}))
    assert "14000 MiB" in text and "7269 of 16269 MiB free" in text and "pid 99 python3" in text


def test_RL_071_the_unit_comes_back_after_a_reboot_and_says_what_its_numbers_are_for() -> None:
    lines = _server_files.TEMPLATE.splitlines()
    assert any(line.startswith("WantedBy=") for line in lines) and "Restart=on-failure" in lines
    for number in (
        "StartLimitIntervalSec",
        "RestartSec",
        "RestartPreventExitStatus",
        "SuccessExitStatus",
        "TimeoutStopSec",
    ):
        place = next(i for i, line in enumerate(lines) if line.startswith(f"{number}="))
        assert lines[place - 1].startswith("#"), number


def test_RL_072_a_model_that_is_asked_for_needs_its_card_where_several_fit() -> None:
    gpus = made.gpus(made.gpu(0, uuid="GPU-aaaa"), made.gpu(1, uuid="GPU-bbbb"))
    (plan,) = plans(gpus)
    # The documented choice is the first card that fits; it is named by UUID, so it stays that card.
    assert plan["cards"][0]["uuid"] == "GPU-aaaa"


def test_RL_033_an_answer_that_contradicts_its_request_fails() -> None:
    settings = {"seed": 424242, "temperature": 0.8, "top_k": 1, "ignore_eos": True}
    record = _bench.run_record(fleetdata.stream(30.0, generation_settings=settings), 256)
    assert record["valid"] is False and "temperature as 0.8 instead of 0" in record["reasons"][0]


def test_RL_048_a_card_that_starts_cold_and_ends_hot_is_marked() -> None:
    def run(low: float, high: float) -> dict[str, Any]:
        return {"witness": {"fields": {"temperature_c": {"min": low, "mean": low, "max": high, "n": 2}}}}

    assert _bench.heat([run(35, 50), run(50, 71)]) == {"start_c": 35, "end_c": 71, "settled": False}
    assert _bench.heat([run(70, 71), run(70, 72)])["settled"] is True
    assert _bench.heat([{"witness": {"fields": {}}}])["settled"] is None


def test_RL_056_a_restart_without_a_recorded_cause_is_said() -> None:
    def report(boot: str, previous: Any = None, cause: Any = None) -> dict[str, Any]:
        host = fleetdata.host(1)
        host["facts"].update(boot_id=boot, restart_cause=cause)
        return _report.build([host], NOW, previous)

    first = report("a")
    second = report("b", first)
    third = report("b", second)
    assert [d["hosts"][0]["restarted"] for d in (first, second, third)] == [False, True, True]
    assert "was restarted" in "\n".join(_report_text.summary(second))
    assert report("b", third, "kernel update")["hosts"][0]["restarted"] is False
    assert {"field": "boot_id", "was": "a", "now": "b"}.items() <= second["changes"][-1].items()


def test_RL_074_a_result_without_its_end_mark_is_no_result(tmp_path: Path) -> None:
    whole = fleetdata.result(1)
    path = Path(_bench_run.store_result(str(tmp_path), whole))
    assert _bench_run.load_result(str(tmp_path), whole["card_uuid"]) is not None
    for text in (json.dumps({**whole, "complete": None}), path.read_text()[:-40], ""):
        path.write_text(text)
        assert _bench_run.load_result(str(tmp_path), whole["card_uuid"]) is None
    assert _bench_run.load_results(str(tmp_path)) == []


def test_RL_087_a_wrong_claim_stays_struck_and_deleting_is_not_possible() -> None:
    kept = _report_ledger.merge([], [{"id": "L1", "claim": "the riser costs 5 %"}], "2026-11-01")
    new = [{"id": "L2", "claim": "the riser costs nothing", "corrects": "L1", "reason": "the control drifted"}]
    out = _report_ledger.merge(kept, new, "2026-11-02")
    assert [(e["id"], e["state"]) for e in out] == [("L1", "struck"), ("L2", "stands")]
    assert (out[0]["claim"], out[0]["struck_at"], out[0]["replaced_by"]) == ("the riser costs 5 %", "2026-11-02", "L2")
    assert _report_ledger.merge(out, [], "2026-11-03") == out
    with pytest.raises(Refusal, match="entries are not edited"):
        _report_ledger.merge(kept, [{"id": "L1", "claim": "other"}], "2026-11-02")
    document = _report.build([fleetdata.host(1)], NOW, {"ledger": out})
    assert "~~the riser costs 5 %~~ struck 2026-11-02, see L2" in _report_text.to_markdown(document)


def test_RL_088_what_led_nowhere_is_kept() -> None:
    new = [{"id": str(n), "claim": "c", "state": state} for n, state in enumerate(_report_ledger.STATES)]
    assert [entry["state"] for entry in _report_ledger.merge([], new, NOW)] == list(_report_ledger.STATES)
    with pytest.raises(Refusal, match="it is one of stands, declined, not filed, superseded"):
        _report_ledger.merge([], [{"id": "x", "claim": "c", "state": "deleted"}], NOW)
