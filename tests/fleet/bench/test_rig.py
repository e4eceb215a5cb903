# SPDX-License-Identifier: Apache-2.0
"""What measures, guards and changes cards, on real hosts: leases, thermal guard, power limits, each playbook."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet import demo, engine, fleet
from tests.fleet.bench.test_report import A1, change, set_card, state
from tests.fleet.conftest import Fleet, until
from tests.fleet.hosts import REGISTRY, Host

pytestmark = pytest.mark.fleet

LEASE = f"/run/tensorless/lease/{A1}"
QUICK = ("-e", "bench_runs=1", "-e", "bench_tokens=24")
ONLY_A = ("--limit", "p100-a,localhost")
MODEL = fleet.MODEL


def module(name: str, **options: Any) -> subprocess.Popen[str]:
    """A module of the collection on p100-a, as a play would run it."""
    given = {"model": MODEL, "card_uuid": A1, **options}
    argv = ["ansible", "-i", str(fleet.INVENTORY), "p100-a", "--become", "-m", f"tensorless.fleet.{name}"]
    return subprocess.Popen(
        [*argv, "-a", json.dumps(given)],
        env=demo.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def bench(folder: str, **options: Any) -> subprocess.Popen[str]:
    return module("tensorless_bench", mode="always", runs=1, results_dir=f"/var/tmp/{folder}", **options)


def said(process: subprocess.Popen[str]) -> str:
    out, _none = process.communicate(timeout=240)
    return out


def holder(host: Host) -> int:
    """The process that holds the card, or 0."""
    text = host.exec("cat", LEASE, check=False).stdout
    return int(json.loads(text)["pid"]) if text else 0


@pytest.fixture
def card(hosts: Fleet) -> Iterator[Host]:
    """p100-a, with its card as it was afterwards."""
    before = state(hosts.a)
    yield hosts.a
    change(hosts.a, lambda data: (data.clear(), data.update(before)))  # type: ignore[func-returns-value]
    hosts.a.sh("rm -rf /var/tmp/bench-*")


def test_RL_006_two_benches_of_one_card_never_overlap_and_a_killed_one_holds_nothing(card: Host) -> None:
    long = bench("bench-1", tokens=2000, on_busy="label")
    until(lambda: holder(card) > 0, 60, "a lease")
    first = holder(card)
    refused = said(bench("bench-2", tokens=16, on_busy="refuse"))
    assert f"card {A1} is leased by" in refused and f"pid {first}" in refused
    assert holder(card) == first
    card.sh(f"kill -9 {first}")
    said(long)
    assert holder(card) == first, "a killed bench cannot take its lease away"
    after = said(bench("bench-2", tokens=16, on_busy="label"))
    assert "took over a lease whose process" in after and '"measured": true' in after
    assert holder(card) == 0


@pytest.mark.soak
def test_RL_041_a_guard_comes_and_goes_without_a_trace(card: Host, hosts: Fleet) -> None:
    # A guard whose server is gone goes with the next run.
    card.sh("install -d /etc/tensorless/guards && echo '{}' > /etc/tensorless/guards/former.json")
    hosts.play("--limit", "p100-a", name="thermal_guard")
    instance = hosts.units(card)[0]
    unit = f"tensorless-thermal-guard@{instance}.service"
    assert card.exec("systemctl", "is-active", unit).stdout.strip() == "active"
    assert card.sh("ls /etc/tensorless/guards").split() == [f"{instance}.json"]
    hosts.play("--limit", "p100-a", "-e", "thermal_guard_state=absent", name="thermal_guard")
    assert card.exec("systemctl", "show", "-P", "LoadState", unit).stdout.strip() == "not-found"
    units = card.sh("systemctl list-units --all --plain --no-legend --type=service; systemctl list-unit-files")
    assert "thermal-guard" not in units
    assert not card.sh("find /etc/systemd /etc/tensorless /usr/local/lib/tensorless -name '*guard*'").strip()


@pytest.mark.soak
def test_RL_041_a_guard_stops_a_server_that_is_too_hot_and_nothing_else(card: Host, hosts: Fleet) -> None:
    short = ("-e", "thermal_guard_sustained_seconds=3", "-e", "thermal_guard_every_seconds=1")
    hosts.play("--limit", "p100-a", *short, name="thermal_guard")
    server = hosts.units(card)[0]
    try:
        assert hosts.active(card, server) == "active"
        change(card, set_card(A1, temperature=95))
        until(lambda: hosts.active(card, server) == "inactive", 40, "the hot server is stopped")
        change(card, set_card(A1, temperature=40))
        said_by_guard = card.sh(f"journalctl -u 'tensorless-thermal-guard@{server}' --no-pager")
        assert "card_temperature_c 95 over 83" in said_by_guard
        assert card.exec("systemctl", "is-enabled", f"tensorless@{server}.service").stdout.strip() == "enabled"
    finally:
        hosts.play("--limit", "p100-a", "-e", "thermal_guard_state=absent", name="thermal_guard")
        hosts.play("--limit", "p100-a", name="serve")


def watts(host: Host) -> float:
    query = "--query-gpu=power.limit"
    return float(host.exec("nvidia-smi", query, "--format=csv,noheader,nounits", "-i", A1).stdout.strip())


@pytest.mark.soak
@pytest.mark.parametrize("end", ["9", "15"])
def test_RL_045_a_killed_power_sweep_leaves_the_former_limit(card: Host, end: str) -> None:
    former = watts(card)
    folder = "/var/tmp/bench-power"
    sweep = module(
        "tensorless_power_sweep", limits_w=[200], settle_s=60, runs=1, tokens=16, on_busy="label", results_dir=folder
    )
    until(lambda: watts(card) == 200, 60, "the lower limit")
    card.sh(f"kill -{end} {holder(card)}")
    said(sweep)
    until(lambda: watts(card) == former, 20, "the former limit")
    until(lambda: "tensorless-power" not in card.sh("systemctl list-units --all --plain"), 20, "no unit is left")


@pytest.mark.soak
def test_a_power_sweep_measures_at_each_limit_and_ends_at_the_former_one(card: Host, hosts: Fleet) -> None:
    former = watts(card)
    limits = json.dumps({"tensorless_power_limits_w": [250, 180], "tensorless_power_settle_s": 1})
    hosts.play(*ONLY_A, *QUICK, "-e", limits, name="power_sweep")
    assert watts(card) == former
    row = next(row for row in hosts.report()["cards"] if row["uuid"] == A1)
    sweep = next(each for each in row["sweeps"] if each["kind"] == "power limit in W")
    assert [arm["value"] for arm in sweep["arms"]] == [250, 180, 250]
    assert all(arm["decode_tps"] > 0 for arm in sweep["arms"])


@pytest.mark.soak
def test_a_receipt_is_written_for_people_and_for_the_recipe(hosts: Fleet) -> None:
    shutil.rmtree(fleet.STATE / "report" / "receipts", ignore_errors=True)
    # A test machine is never as quiet as a receipt wants it.
    run = hosts.play("-e", "bench_runs=2", "-e", "bench_tokens=24", "-e", "bench_on_busy=label", name="receipt")
    found = sorted((fleet.STATE / "report" / "receipts").iterdir())
    assert {path.suffix for path in found} == {".toml", ".md"}, run.output
    text = next(path for path in found if path.suffix == ".toml").read_text()
    assert "decode_tps" in text and "sha256" in text


@pytest.mark.soak
def test_a_sweep_stands_in_the_report(hosts: Fleet) -> None:
    short = {
        "tensorless_sweep_prompts": [0, 700],
        "tensorless_sweep_streams": [1, 2],
        "tensorless_sweep_repeats": 1,
        "tensorless_sweep_tokens": 16,
    }
    hosts.play(*ONLY_A, *QUICK, "-e", json.dumps(short), name="sweep")
    row = next(row for row in hosts.report()["cards"] if row["uuid"] == A1)
    kinds = {each["kind"]: each for each in row["sweeps"]}
    assert {"prompt", "streams"} <= set(kinds)
    assert [arm["value"] for arm in kinds["streams"]["arms"]] == [1, 2]
    assert all(arm["decode_tps"] for arm in (*kinds["prompt"]["arms"], *kinds["streams"]["arms"]))
    others = [row for row in hosts.report()["cards"] if row["host"] != "p100-a"]
    assert others and not any(row["current"] for row in others)


@pytest.mark.soak
def test_a_bundle_names_no_host_and_no_card(hosts: Fleet, tmp_path: pathlib.Path) -> None:
    hosts.play("-e", f"tensorless_share_dir={tmp_path}", name="share")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "bench-1.json" for path in files)
    for path in files:
        text = path.read_text()
        assert not re.search(r"p100-[abc]|GPU-[0-9a-f]{8}|10\.213\.7|/home/ops", text), path


@pytest.mark.soak
def test_a_pcie_snapshot_says_what_the_counters_did(hosts: Fleet) -> None:
    run = hosts.play(*ONLY_A, *QUICK, name="pcie_snapshot")
    assert "link_width_under_load" in run.output and A1 in run.output


@pytest.mark.soak
def test_a_gate_judges_a_candidate_for_speed_and_the_present_engine_serves_again(
    hosts: Fleet, tmp_path: pathlib.Path
) -> None:
    candidate = tmp_path / "candidate"
    shutil.copytree(fleet.RECIPES, candidate)
    fleet.write_recipe(engine.push(REGISTRY, "0.0.1-gate"), candidate)
    unit = hosts.units(hosts.a)[0]
    plan = f"/etc/tensorless/instances/{unit}.json"
    before = json.loads(hosts.a.exec("cat", plan).stdout)["plan_hash"]
    argv = (*ONLY_A, "-e", f"gate_recipes_dir={candidate}", "-e", "gate_tolerance_percent=400")
    run = hosts.play(*argv, "-e", "bench_runs=2", "-e", "bench_tokens=24", "-e", "bench_on_busy=label", name="gate")
    assert re.search(r"pass: the candidate decodes [0-9.]+ tok/s", run.output), run.output
    assert "Numerics and quality were not judged" in run.output
    assert json.loads(hosts.a.exec("cat", plan).stdout)["plan_hash"] == before and hosts.healthy(hosts.a)
