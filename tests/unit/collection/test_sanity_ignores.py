# SPDX-License-Identifier: Apache-2.0
"""The only sanity rule that is not kept is the one on the licence: modules are Apache-2.0. One line for each module."""

from __future__ import annotations

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_ignore_files_hold_the_licence_rule_and_nothing_else() -> None:
    modules = sorted(f"plugins/modules/{path.name}" for path in (ROOT / "plugins" / "modules").glob("*.py"))
    wanted = "".join(f"{module} validate-modules:missing-gplv3-license\n" for module in modules)
    files = sorted((ROOT / "tests" / "sanity").glob("ignore-*.txt"))
    assert files
    for file in files:
        assert file.read_text(encoding="utf-8") == wanted, file.name
