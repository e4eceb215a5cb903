# SPDX-License-Identifier: Apache-2.0
"""Playbooks begin alike, and the sample inventory speaks of variables that exist."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
PLAYBOOKS = sorted((ROOT / "playbooks").glob("*.yml"))
SAMPLE = ROOT / "inventory-sample.yml"


@pytest.mark.parametrize("path", PLAYBOOKS, ids=lambda path: path.stem)
def test_the_first_play_refuses_to_mix_versions(path: pathlib.Path) -> None:
    first = yaml.safe_load(path.read_text(encoding="utf-8"))[0]
    tasks = [*first.get("pre_tasks", []), *first.get("tasks", [])]
    assert "tensorless.fleet.tensorless_origin" in tasks[0]


def test_the_sample_inventory_parses() -> None:
    inventory = pathlib.Path(sys.executable).with_name("ansible-inventory")
    done = subprocess.run([str(inventory), "-i", str(SAMPLE), "--list"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gpu"]["hosts"]


def test_each_variable_of_the_sample_is_read_by_something() -> None:
    text = SAMPLE.read_text(encoding="utf-8")
    named = set(
        re.findall(
            r"^\s*#?\s*((?:tensorless|plan|model|server|bench|report|nvidia|container)_\w+):", text, re.MULTILINE
        )
    )
    assert named, "the sample names no variable"
    sources = [*(ROOT / "roles").rglob("*.yml"), *(ROOT / "playbooks").rglob("*.yml")]
    everything = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    assert sorted(name for name in named if not re.search(rf"\b{name}\b", everything)) == []


def test_the_sample_inventory_names_pages_that_exist() -> None:
    pages = re.findall(r"docs/[\w/-]+\.md", SAMPLE.read_text(encoding="utf-8"))
    assert pages
    assert [page for page in pages if not (ROOT / page).is_file()] == []
