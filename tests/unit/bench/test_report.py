# SPDX-License-Identifier: Apache-2.0
"""The report's document and its text forms."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import tomllib
from ansible_collections.tensorless.fleet.plugins.module_utils import _report, _report_share, _report_text
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.plugin_utils import _report_files, _report_hosts

from tests.unit.bench import fleetdata

NOW = "2026-11-29T22:30:00Z"


def build(hosts: list[dict[str, Any]], previous: Any = None, at: str = NOW) -> dict[str, Any]:
    return _report.build(hosts, at, previous, "0.1.0")


def card(result: dict[str, Any], others: int = 0) -> dict[str, Any]:
    """The report's row of one card among equals that are all right."""
    hosts = [fleetdata.host(1, [result]), *[fleetdata.host(10 + n) for n in range(others)]]
    return build(hosts)["cards"][0]


def codes(row: dict[str, Any]) -> list[str]:
    return [finding["code"] for finding in row["findings"]]


def test_each_trouble_has_its_name_and_the_card_beside_it_is_not_accused() -> None:
    document = build(fleetdata.fleet(40))
    by_host = {row["host"]: row for row in document["cards"]}
    assert codes(by_host["gpu-host-7"]) == ["heat"] and by_host["gpu-host-7"]["slow"]
    assert "sw_thermal_slowdown in 67 %" in by_host["gpu-host-7"]["slow_reason"]
    assert (
        codes(by_host["gpu-host-13"]) == ["other_process"]
        and "python3 (pid 99)" in by_host["gpu-host-13"]["slow_reason"]
    )
    assert codes(by_host["gpu-host-19"]) == ["narrow_link"]
    assert codes(by_host["gpu-host-23"]) == ["untuned"]
    blamed = {7, 13, 19, 23}
    for number in set(range(1, 41)) - blamed - {31}:
        row = by_host[f"gpu-host-{number}"]
        assert (row["findings"], row["slow"], row["slow_reason"]) == ([], False, None), number
    assert document["fleet"]["hosts_by_status"] == {"ok": 39, "unreachable": 1}
    assert document["fleet"]["slow"] == 2


def test_RL_018_a_cap_that_was_brushed_once_is_no_reason() -> None:
    once = fleetdata.result(1, over={"throttle_mask": lambda i: 4 if i == 3 else 0})
    assert codes(card(once)) == []


def test_RL_053_an_idle_link_is_not_blamed_and_a_loaded_one_is() -> None:
    waking = fleetdata.result(1, over={"pcie_gen": lambda i: 1 if i < 3 else 3})
    assert codes(card(waking)) == []
    assert codes(card(fleetdata.result(1, over={"pcie_gen": 1}))) == ["narrow_link"]


def test_RL_019_work_on_the_processor_is_flagged() -> None:
    row = card(fleetdata.result(1, over={"cpu_s": lambda i: i * 4.0, "utilization_percent": 3}))
    assert codes(row) == ["cpu"] and "8.0 cores busy" in row["findings"][0]["text"]


def test_RL_012_a_busy_drive_marks_the_row() -> None:
    assert codes(card(fleetdata.result(1, over={"io_pressure": 55.0}))) == ["host_busy"]


def test_RL_050_and_RL_055_errors_of_the_bus_and_the_kernel_are_shown() -> None:
    witness = {"aer_growth": {"0000:3a:00.0/aer_dev_correctable": 27}, "kernel": ["NVRM: Xid 79"], "sampler_lost": True}
    row = card(fleetdata.result(1, witness=witness))
    assert codes(row) == ["pcie_errors", "kernel_fault", "sampler_lost"]
    assert "0000:3a:00.0" in row["findings"][0]["text"]


def test_another_driver_than_the_fleets_is_named() -> None:
    hosts = [
        fleetdata.host(1, [fleetdata.result(1, 24.0, driver_version="535.1")]),
        *[fleetdata.host(n) for n in range(2, 7)],
    ]
    row = build(hosts)["cards"][0]
    assert row["slow"] and "driver 535.1, the rest of the fleet has 580.95.05" in row["slow_reason"]


def test_RL_021_a_difference_inside_the_noise_is_none() -> None:
    noisy = fleetdata.result(1, 28.3)
    noisy["spread"] = 0.08
    assert card(noisy)["slow"] is False
    assert card(fleetdata.result(1, 28.3))["slow"] is True


def test_without_a_reason_none_is_made_up() -> None:
    assert card(fleetdata.result(1, 20.0))["slow_reason"] == "no reason was seen by the witness"


def test_an_untuned_card_is_not_measured_by_the_receipt() -> None:
    row = card(fleetdata.result(1, 20.0, untuned_label="UNTUNED: x", receipt_applies=False))
    assert row["slow"] is False


def test_RL_038_a_figure_without_its_kind_is_rejected() -> None:
    document = build([fleetdata.host(1)])
    assert _report.problems(document) == []
    document["cards"][0]["new_figure"] = 1.0
    assert "new_figure does not say whether it is measured" in _report.problems(document)[0]


def test_RL_011_a_rate_without_a_witness_is_rejected() -> None:
    document = build([fleetdata.host(1)])
    document["cards"][0]["witness"] = None
    assert "without its witness" in _report.problems(document)[0]


def test_RL_085_an_engine_row_names_its_source() -> None:
    document = build([fleetdata.host(1), fleetdata.host(2)])
    row = document["engines"][0]
    assert (row["loads"], row["cards"], len(row["source"])) == (True, 2, 2)
    row["source"] = []
    assert "no source" in _report.problems(document)[0]


def test_RL_037_read_bandwidth_is_derived_and_says_from_what(tmp_path: Path) -> None:
    row = card(fleetdata.result(1, 30.0))
    assert row["read_bandwidth_gbs"] == pytest.approx(12.954 * 30.03, rel=0.01)
    assert row["read_bandwidth_percent"] == pytest.approx(row["read_bandwidth_gbs"] / 7.32)
    assert _report.FIGURES["read_bandwidth_gbs"] == "derived"
    _report_files.write([fleetdata.host(1)], str(tmp_path), now=NOW)
    assert "read bandwidth (derived)" in (tmp_path / "report.html").read_text()


def test_RL_004_a_change_is_dated_and_has_both_values(tmp_path: Path) -> None:
    _report_files.write([fleetdata.host(1)], str(tmp_path), now="2026-11-28T00:00:00Z")
    moved = fleetdata.host(1, [fleetdata.result(1, driver_version="580.1", measured_at="2026-11-29T01:00:00Z")])
    moved["facts"]["kernel"] = "6.12.0"
    _report_files.write([moved], str(tmp_path), now="2026-11-29T02:00:00Z")
    document = json.loads((tmp_path / "report.json").read_text())
    changes = {(c["field"], c["was"], c["now"], c["at"][:10]) for c in document["changes"]}
    assert ("driver_version", "580.95.05", "580.1", "2026-11-29") in changes
    assert ("kernel", "6.1.0-40-amd64", "6.12.0", "2026-11-29") in changes
    assert [past["measured_at"] for past in document["cards"][0]["history"]] == [
        "2026-11-29T22:00:00Z",
        "2026-11-29T01:00:00Z",
    ]


def test_RL_086_each_state_has_one_dated_file_and_one_line(tmp_path: Path) -> None:
    for at in ("2026-11-28T00:00:00Z", "2026-11-28T00:01:00Z"):
        _report_files.write([fleetdata.host(1)], str(tmp_path), now=at)
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["2026-11-28T000000Z.md", "index.md"]
    _report_files.write([fleetdata.host(1), fleetdata.host(2)], str(tmp_path), now="2026-11-29T00:00:00Z")
    assert (tmp_path / "log" / "index.md").read_text().count("\n* [") == 2


def test_nothing_is_rewritten_when_only_the_time_is_new(tmp_path: Path) -> None:
    first = _report_files.write(fleetdata.fleet(4), str(tmp_path), now="2026-11-28T00:00:00Z")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second = _report_files.write(fleetdata.fleet(4), str(tmp_path), now="2026-11-29T00:00:00Z")
    assert (first["changed"], second["changed"]) == (True, False)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_check_mode_writes_nothing(tmp_path: Path) -> None:
    dest = tmp_path / "new"
    answer = _report_files.write(fleetdata.fleet(2), str(dest), check_mode=True)
    assert answer["changed"] and not dest.exists()
    assert "2 cards on 2 hosts" in answer["diff"]["after"]


def test_two_hundred_cards_are_quick_and_small(tmp_path: Path) -> None:
    hosts = fleetdata.fleet(200)
    command = ["podman", "run", *[f"--env=GGML_TENSORLESS_SWITCH_{n}=1" for n in range(60)]]
    for host in hosts:
        for result in host.get("results") or []:
            result["scope"]["exec"] = command
    before = time.process_time()
    _report_files.write(hosts, str(tmp_path), now=NOW)
    spent = time.process_time() - before
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
    assert spent < 2.0


def test_a_query_is_answered_and_a_bad_one_refused_before_anything_is_written(tmp_path: Path) -> None:
    answer = _report_files.write(fleetdata.fleet(8), str(tmp_path), query="cards[?slow].host")
    assert answer["query_result"] == ["gpu-host-7"]
    with pytest.raises(Refusal, match="no JMESPath expression"):
        _report_files.write(fleetdata.fleet(8), str(tmp_path / "x"), query="cards[?")
    assert not (tmp_path / "x").exists()


def test_csv_has_a_row_a_card_and_no_formula() -> None:
    hosts = [fleetdata.host(1), fleetdata.host(2, name="=cmd|' /C calc'!A0")]
    rows = list(csv.DictReader(io.StringIO(_report_text.to_csv(build(hosts)))))
    assert len(rows) == 2 and float(rows[0]["decode_tps"]) > 29
    assert rows[1]["host"].startswith("'=")


LINE = re.compile(r'^[a-z_]+\{(?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*\} -?[0-9.e+-]+$')


def test_prometheus_text_parses() -> None:
    text = _report_text.to_prometheus(build([*fleetdata.fleet(8), fleetdata.host(9, name='a"b\\c\nd')]))
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) > 40 and all(LINE.match(line) for line in samples)
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("bad", ["</script>", "a|b", "`x`", "\x1b]0;owned\x07", "\u2028\u202e", "[x](y)", "\ud800"])
def test_FC_22_no_text_acts_in_markdown_or_in_a_terminal(bad: str) -> None:
    document = build([fleetdata.host(1, name=f"x{bad}y")])
    shown = _report_text.to_markdown(document) + "\n".join(_report_text.summary(document))
    assert "<script" not in shown and "\x1b" not in shown and "\u202e" not in shown and "\u2028" not in shown
    row = next(line for line in _report_text.to_markdown(document).splitlines() if line.startswith("| x"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 10
    shown.encode("utf-8")


def test_the_documents_public_schema_holds() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    path = Path(__file__).resolve().parents[3] / "docs" / "reference" / "report.schema.json"
    schema = json.loads(path.read_text())
    document = json.loads(json.dumps(build(fleetdata.fleet(40))))
    jsonschema.Draft202012Validator(schema).validate(document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate({**document, "version": 2})


# --- hosts ---------------------------------------------------------------------------------------------------------


def test_a_host_of_which_nothing_is_known_was_not_reached() -> None:
    assert _report_hosts.describe("a", {})["status"] == "unreachable"
    assert "check that it is up" in _report_hosts.describe("a", {})["reason"]
    assert build([_report_hosts.describe("typo", None)])["hosts"][0]["reason"] == "the inventory has no host typo"


def test_a_host_that_a_limit_left_out_is_not_accused_and_keeps_what_was_known() -> None:
    before = build([fleetdata.host(1), fleetdata.host(2)])
    out = _report_hosts.describe("gpu-host-1", {"ansible_facts": {"kernel": "from a fact cache"}}, outside=True)
    document = json.loads(json.dumps(build([out, fleetdata.host(2)], before, "2026-11-30T00:00:00Z")))
    host, other = document["hosts"]
    assert (host["status"], host["kernel"], host["cards"]) == ("not_in_this_run", "6.1.0-40-amd64", 1)
    assert other["status"] == "ok" and _report.problems(document) == []
    mine, theirs = document["cards"]
    assert (mine["status"], mine["current"], theirs["current"]) == ("benched", False, True)
    assert mine["history"] == before["cards"][0]["history"] and document["fleet"]["cards_by_status"] == {"benched": 2}
    text = "\n".join(_report_text.summary(document))
    assert "gpu-host-1: not in this run: --limit left it out" in text and "unreachable" not in text
    assert text.count("not of this run: measured") == 1
    # The same again is the same document, and the host is itself again when it takes part.
    again = build([out, fleetdata.host(2)], document, "2026-11-30T00:00:00Z")
    assert json.loads(json.dumps(again)) == document
    assert build([fleetdata.host(1), fleetdata.host(2)], document)["cards"][0] == before["cards"][0]


def test_a_host_that_does_not_answer_keeps_its_cards_past_but_counts_as_measured_no_more() -> None:
    before = build([fleetdata.host(1, [fleetdata.result(1, tps=20.0)]), fleetdata.host(2)])
    assert before["cards"][0]["slow"]
    before["hosts"][0]["boot_id"] = "one"
    document = build([_report_hosts.describe("gpu-host-1", {}), fleetdata.host(2)], before)
    row = document["cards"][0]
    assert (row["status"], row["slow"], row["findings"]) == ("not_reached", False, [])
    assert row["decode_tps"] and document["fleet"]["decode_tps"]["min"] > 25
    host = fleetdata.host(1)
    host["facts"]["boot_id"] = "two"
    assert build([host], document)["hosts"][0]["restarted"], "a restart while it was away is seen when it is back"


@pytest.mark.parametrize(
    ("limit", "outside"),
    [
        (None, []),
        ("", []),
        ("all", []),
        ("b,localhost", ["a", "c"]),
        ("gpu:!a", ["a"]),
        ("~[ab]$", ["c"]),
        ("rack1", ["b", "c"]),
        ("*", []),
        ("nobody", ["a", "b", "c"]),
    ],
)
def test_who_a_limit_leaves_out_is_told_by_ansibles_own_patterns(limit: str | None, outside: list[str]) -> None:
    from ansible.parsing.dataloader import DataLoader

    groups = {"all": ["a", "b", "c"], "ungrouped": [], "gpu": ["a", "b", "c"], "rack1": ["a"]}
    assert sorted(_report_hosts.left_out(limit, groups, DataLoader())) == outside


def test_a_host_that_stopped_early_says_after_what() -> None:
    known = {"ansible_facts": {"distribution": "Debian"}, "plan_results": []}
    assert "after its plan was made" in _report_hosts.describe("a", known)["reason"]
    assert _report_hosts.describe("a", {**known, "fleet_failure": "no space"})["reason"] == "no space"


def test_a_skipped_card_has_its_reason_and_a_failed_one_its_error() -> None:
    host = fleetdata.host(1, [], failures=[{"card_uuid": fleetdata.uuid(1), "msg": "no server answers"}])
    host["gpus"]["cards"].append({"index": 1, "uuid": "GPU-61", "name": "Tesla P4"})
    host["skipped"] = [{"uuid": "GPU-61", "name": "Tesla P4", "reason": "compute capability 6.1"}]
    rows = build([host])["cards"]
    assert [(row["status"], row["reason"]) for row in rows] == [
        ("failed", "no server answers"),
        ("skipped", "compute capability 6.1"),
    ]


def test_a_result_of_another_plan_is_outdated() -> None:
    host = fleetdata.host(1, plans=[fleetdata.plan(1, plan_hash="another")])
    assert build([host])["cards"][0]["status"] == "outdated"


# --- sharing and receipts ------------------------------------------------------------------------------------------


def test_a_shared_report_names_no_host_no_card_and_no_address(tmp_path: Path) -> None:
    uuid = fleetdata.uuid(1)
    one = fleetdata.result(1, labels=[f"seen on gpu-host-1 ({uuid}) at 10.20.30.40 and fd00::12 by /home/alice/x"])
    hosts = [fleetdata.host(1, [one]), fleetdata.host(10)]
    answer = _report_files.write(
        hosts, str(tmp_path), ["json", "markdown", "html", "csv", "share"], share=True, now=NOW
    )
    for name in answer["files"]:
        text = Path(name).read_text()
        for secret in ("gpu-host", "GPU-0000", "10.20.30.40", "fd00::12", "alice", f"{1:032x}", "3B:00"):
            assert secret not in text, (name, secret)
    document = json.loads((tmp_path / "report.json").read_text())
    assert [row["host"] for row in document["cards"]] == ["host-1", "host-2"]
    assert document["cards"][0]["driver_version"] == "580.95.05"
    bench = json.loads((tmp_path / "share" / "bench-1.json").read_text())
    assert set(bench) == {
        *("model", "card", "endpoint", "runs", "median_decode_tps", "median_ttft_ms", "prompt_tokens"),
        *("receipt_decode_tps", "vs_receipt_percent"),
    }
    assert set(bench["runs"][0]) == {"decode_tps", "ttft_ms", "prompt_tokens", "tokens"}
    assert "Tesla P100-PCIE-16GB, 16269 MiB, 580.95.05, 250 W" in (tmp_path / "share" / "README.md").read_text()


def test_redacting_leaves_versions_and_times() -> None:
    document = build(fleetdata.fleet(2))
    shared = _report_share.redact(document)
    assert shared["generated_at"] == NOW and shared["cards"][0]["image_digest"] == fleetdata.DIGEST
    assert shared["cards"][0]["decode_tps"] == document["cards"][0]["decode_tps"]


def sweep(valid: bool = True) -> dict[str, Any]:
    arms = [{"value": 32768, "decode_tps": 24.52, "prefill_tps": 101.0, "arm": "32K"}]
    return {"kind": "prompt", "valid": valid, "arms": arms}


@pytest.mark.parametrize("valid", [True, False])
def test_a_receipt_is_toml_for_the_recipe_and_says_its_scope(tmp_path: Path, valid: bool) -> None:
    hosts = [
        fleetdata.host(1, [fleetdata.result(1, 30.0, sweeps=[sweep(valid)])]),
        fleetdata.host(2, [fleetdata.result(2, 30.2, labels=["not quiet: the load is 9.0 on 2 cores"])]),
        fleetdata.host(3, [fleetdata.result(3, 9.0, receipt_applies=False, untuned_label="UNTUNED: x")]),
    ]
    _report_files.write(hosts, str(tmp_path), ["json", "receipt"], now=NOW)
    (toml,) = (tmp_path / "receipts").glob("*.toml")
    receipt = tomllib.loads(toml.read_text())["receipt"]
    assert receipt["decode_tps"]["short"] == pytest.approx(30.13, abs=0.02)
    assert ("ctx_32k" in receipt["decode_tps"]) is valid
    notes = " ".join(receipt["notes"])
    for part in (
        fleetdata.DIGEST,
        "15" * 32,
        "Tesla P100",
        "580.95.05",
        "429 tokens",
        "6 measured runs of 256 tokens",
        "CAUTION: not quiet: the load is 9.0 on 2 cores",
        "not measured:",
    ):
        assert part in notes
    assert ("32K context" in notes) is not valid
    text = toml.with_suffix(".md").read_text()
    assert "## Not measured" in text and "65K context" in text
