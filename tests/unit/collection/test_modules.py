# SPDX-License-Identifier: Apache-2.0
"""What every module of the collection has: documentation that says what it can do, and a thin main()."""

from __future__ import annotations

import ast
import pathlib
import sys
from typing import Any

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
MODULES = sorted(path.stem for path in (ROOT / "plugins" / "modules").glob("[!_]*.py"))
ON_HOSTS = sorted([*(ROOT / "plugins" / "modules").glob("*.py"), *(ROOT / "plugins" / "module_utils").glob("*.py")])


def tree_of(module: str) -> ast.Module:
    return ast.parse((ROOT / "plugins" / "modules" / f"{module}.py").read_text(encoding="utf-8"))


def block(module: str, name: str) -> Any:
    for node in tree_of(module).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return yaml.safe_load(ast.literal_eval(node.value))
    raise AssertionError(f"{module} has no {name}")


@pytest.mark.parametrize("module", MODULES)
def test_documentation_says_what_check_mode_does(module: str) -> None:
    attributes = block(module, "DOCUMENTATION").get("attributes") or {}
    for name in ("check_mode", "diff_mode", "platform"):
        assert {"support", "description"} <= set(attributes.get(name, {})), f"{module}: attribute {name}"


@pytest.mark.parametrize("module", MODULES)
def test_examples_use_the_full_name(module: str) -> None:
    tasks = block(module, "EXAMPLES")
    assert tasks
    flat = [task for entry in tasks for task in entry.get("tasks", [entry])]
    assert any(f"tensorless.fleet.{module}" in task for task in flat)


@pytest.mark.parametrize("module", MODULES)
def test_each_return_value_has_a_type_and_a_description(module: str) -> None:
    values = block(module, "RETURN")
    assert values
    for name, value in values.items():
        assert value.get("type") and value.get("description") and value.get("returned"), f"{module}: {name}"


@pytest.mark.parametrize("module", MODULES)
def test_main_is_short(module: str) -> None:
    main = next((n for n in tree_of(module).body if isinstance(n, ast.FunctionDef) and n.name == "main"), None)
    if main is None:  # runs on the controller: the action plugin of the same name is the module
        assert (ROOT / "plugins" / "action" / f"{module}.py").exists()
        return
    assert (main.end_lineno or 0) - main.lineno < 40


@pytest.mark.parametrize("path", ON_HOSTS, ids=lambda path: path.stem)
def test_only_the_standard_library_and_ansible_are_imported(path: pathlib.Path) -> None:
    """Python 3.9's standard library: what a managed host has. (Recipes are read on the controller.)"""
    allowed = set(sys.stdlib_module_names) | {"ansible", "ansible_collections"}
    if path.name != "_recipe.py":
        allowed -= {"tomllib"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names = [node.module or ""]
        assert [name for name in names if name.split(".")[0] not in allowed] == [], path.name
