# SPDX-License-Identifier: Apache-2.0
"""Each role's argument spec says what its defaults are: the same names, the same values, templates included."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())


def load(role: str, path: str) -> Any:
    file = ROOT / "roles" / role / path
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else None


def spec_of(role: str) -> dict[str, Any]:
    spec = load(role, "meta/argument_specs.yml")
    assert spec, f"roles/{role} has no meta/argument_specs.yml"
    return spec["argument_specs"]["main"]


@pytest.mark.parametrize("role", ROLES)
def test_spec_and_defaults_agree(role: str) -> None:
    options = spec_of(role).get("options") or {}
    defaults = load(role, "defaults/main.yml") or {}
    with_default = {name: option["default"] for name, option in options.items() if "default" in option}
    assert with_default == defaults
    # An option without a default must be given; one that may be left out has its default in both places.
    assert [name for name, option in options.items() if "default" not in option and not option.get("required")] == []


@pytest.mark.parametrize("role", ROLES)
def test_public_names_begin_with_the_role(role: str) -> None:
    assert [name for name in load(role, "defaults/main.yml") or {} if not name.startswith(f"{role}_")] == []
    assert [name for name in load(role, "vars/main.yml") or {} if not name.startswith(f"_{role}_")] == []


@pytest.mark.parametrize("role", ROLES)
def test_registered_names_are_internal(role: str) -> None:
    for file in sorted((ROOT / "roles" / role).glob("*/*.yml")):
        for name in re.findall(r"^\s*register: (\S+)$", file.read_text(encoding="utf-8"), re.MULTILINE):
            assert name.startswith(f"__{role}_"), f"{file.relative_to(ROOT)} registers {name}"


@pytest.mark.parametrize("role", ROLES)
def test_options_are_described(role: str) -> None:
    spec = spec_of(role)
    assert spec["short_description"] and spec["description"]
    for name, option in (spec.get("options") or {}).items():
        assert option.get("description") and option.get("type"), f"{role}: {name}"
