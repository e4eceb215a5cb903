# SPDX-License-Identifier: Apache-2.0
"""Every `tensorless` line that the pages show is one that the command takes."""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest

from tensorless_fleet import _usage

ROOT = pathlib.Path(__file__).resolve().parents[3]
LINE = re.compile(r"^ *(?:\$ )?(?:[\w./-]+/)?tensorless (.+)$", re.M)
SHOWN = [
    (page.relative_to(ROOT).as_posix(), words)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.name != "cli.md"
    for block in re.findall(r"^ *```(?:sh|console|bash)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.M | re.S)
    for words in LINE.findall(block)
]


@pytest.mark.parametrize(("page", "words"), SHOWN)
def test_a_shown_command_is_taken(page, words):
    options = _usage.parse(shlex.split(words, comments=True))
    assert options.command in words


def test_the_pages_show_commands():
    assert len(SHOWN) > 15 and {"README.md", "docs/how-to/command.md"} <= {page for page, _words in SHOWN}
