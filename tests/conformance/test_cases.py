# SPDX-License-Identifier: Apache-2.0
"""The handed cases as tests, and proof that the runner can fail."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import yaml

from tests.conformance import __main__ as runner
from tests.conformance.frame import ROOT, Env, FakeClock, compare

CASES = ROOT.parent / "shared/conformance/cases"
FILES = sorted(CASES.glob("*.yml"))


@pytest.mark.skipif(not FILES, reason=f"the handed cases are not at {CASES}")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_handed_cases(path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    passed, failed = runner.run_files([path])
    out = capsys.readouterr().out
    assert failed == 0, out
    assert passed == len(yaml.safe_load(path.read_text(encoding="utf-8")))


def write(tmp_path: pathlib.Path, case: dict[str, Any]) -> str:
    file = tmp_path / "cases.yml"
    file.write_text(yaml.safe_dump([case]), encoding="utf-8")
    return str(file)


CASE = {
    "id": "X-1",
    "area": "untuned",
    "given": {"recipe": "pn3", "command": "run", "context": 1024},
    "expect": {"untuned": True, "failed": False, "reasons": ["--context 1024 instead of 65536"]},
}


def test_a_passing_case(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main([write(tmp_path, CASE)]) == 0
    assert capsys.readouterr().out == "1 passed, 0 failed\n"


@pytest.mark.parametrize(
    ("expect", "words"),
    [
        ({"untuned": False}, "untuned: expected False, got True"),
        ({"reasons": ["other"]}, "reasons: expected ['other'], got ['--context 1024 instead of 65536']"),
        ({"outcome": "refused"}, "expected a refusal"),
        ({"nonsense": 1}, "the driver reports no nonsense"),
        ({"outcome": "unheard of"}, "does not know"),
        ({"any_of": [{"untuned": False}, {"failed": True}]}, "none of any_of holds"),
        ({"label_contains": "never"}, "lacks ['never']"),
    ],
)
def test_a_failing_case(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], expect: dict[str, Any], words: str
) -> None:
    assert runner.main([write(tmp_path, {**CASE, "expect": expect})]) == 1
    out = capsys.readouterr().out
    assert out.startswith("FAIL X-1 (untuned): ")
    assert words in out
    assert out.endswith("0 passed, 1 failed\n")


def test_an_area_without_driver_fails(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main([write(tmp_path, {**CASE, "area": "astrology"})]) == 1
    assert "there is no driver for area astrology" in capsys.readouterr().out


def test_a_driver_that_breaks_off_fails(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main([write(tmp_path, {**CASE, "given": {"recipe": "unheard-of", "command": "run"}})]) == 1
    assert "the driver broke off" in capsys.readouterr().out


def test_without_files_it_says_how() -> None:
    assert runner.main([]) == 2


@pytest.mark.parametrize(
    ("expect", "got", "holds"),
    [
        ({"value": 1.0, "tolerance": 0.1}, {"value": 1.05}, True),
        ({"value": 1.0, "tolerance": 0.01}, {"value": 1.05}, False),
        ({"value": [1, 2]}, {"value": [1, 2, 3]}, False),
        ({"value": True}, {"value": 1}, False),
        ({"message_exact": "a"}, {"message": "ab"}, False),
        ({"message_contains": ["a", "b"]}, {"message": "a"}, False),
        ({"message_contains_any": ["a", "b"]}, {"message": "a"}, True),
        ({"message_mentions": ["A"]}, {"message": "xax"}, True),
        ({"message_lacks": ["x"]}, {"message": "xax"}, False),
        ({"output_contains": ["deep"]}, {"output": {"a": ["deep"]}}, True),
        ({"notes_mention": ["N"]}, {"notes": ["n"]}, True),
        ({"note_exact": "n"}, {"notes": ["n"]}, True),
        ({"note_exact": "n"}, {"notes": ["nn"]}, False),
        ({"exit_code": 2}, {"exit_code": 1}, False),
        ({"outcome": "refused_or_flagged"}, {"warnings": ["w"]}, True),
        ({"outcome": "refused_or_flagged"}, {}, False),
    ],
)
def test_comparison(expect: dict[str, Any], got: dict[str, Any], holds: bool) -> None:
    got = {"failed": False, "message": "", **got}
    assert (compare({"expect": expect}, got, {}) == []) is holds


def test_fake_clock_runs_what_is_due() -> None:
    clock, seen = FakeClock(), []
    clock.at(5, lambda: seen.append(clock.monotonic()))
    clock.at(2, lambda: seen.append(clock.monotonic()))
    clock.sleep(1)
    assert seen == []
    clock.sleep(10)
    assert seen == [2, 5]
    assert clock.monotonic() == 11


def test_fixtures_fall_back_to_the_recipes_of_the_product(tmp_path: pathlib.Path) -> None:
    env = Env(tmp_path, None)
    assert env.recipe({"recipe": "pn3"})["model"]["file"] == "Qwen3.8-27B-PN3-P0k19.gguf"
    assert len(env.load({"recipes": "released"})) == 2
