# SPDX-License-Identifier: Apache-2.0
"""The pages made from the code are current, and the links between the pages lead somewhere."""

from __future__ import annotations

import pathlib
import re

from tensorless_fleet import _commands, _help

DOCS = pathlib.Path(_help.__file__).resolve().parents[1] / "docs"


def test_the_reference_page_is_what_the_command_says():
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    assert page == _help.reference(), "run: python -m tensorless_fleet._help > docs/reference/cli.md"


def test_differences_name_every_flag_and_command_that_was_added():
    page = (DOCS / "reference" / "differences.md").read_text(encoding="utf-8")
    for flag in _commands.FLAGS:
        if flag.fleet:
            assert f"`--{flag.name}`" in page, flag.name
    for name in ("fleet", "report", "upgrade", "rollback", "verify", "gguf-check", "completion"):
        assert f"`{name}`" in page


def test_links_between_the_pages_lead_somewhere():
    for name in ("reference/cli.md", "reference/differences.md", "how-to/python.md"):
        page = DOCS / name
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{name}: {target}"
