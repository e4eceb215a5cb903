# SPDX-License-Identifier: Apache-2.0
"""Reads the launcher's documentation: its command examples and the output shown after them."""

from __future__ import annotations

import pathlib
import re
import shlex
from typing import NamedTuple

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[3] / ".." / "shared" / "spec" / "launcher-docs.txt"


class Example(NamedTuple):
    """One command line and the output block that follows it in the same section, if any."""

    section: str
    command: str
    output: str

    @property
    def words(self) -> list[str]:
        text = self.command.replace('"$(tailscale ip -4)"', "100.64.0.7").replace('"$KEY"', "secret")
        return shlex.split(text.split(" > ")[0], comments=True)[1:]


def text() -> str:
    if not PAGE.exists():
        pytest.skip("the launcher's documentation (../shared/spec) is not here")
    return PAGE.read_text(encoding="utf-8")


def examples() -> list[Example]:
    """Every ``tensorless ...`` line of a shell block, in the order of the page."""
    found: list[Example] = []
    section, kind, lines = "", "", []
    for line in [*text().split("\n"), "# end"]:
        if line.startswith("```"):
            if kind:
                block = "\n".join(lines)
                if kind == "sh":
                    for command in re.findall(r"^(?:sudo )?(tensorless .+)$", block, re.M):
                        found.append(Example(section, command, ""))
                elif found and found[-1].section == section and not found[-1].output:
                    found[-1] = found[-1]._replace(output=block)
                kind = ""
            else:
                kind, lines = line[3:].strip() or "other", []
        elif kind:
            lines.append(line)
        elif line.startswith("#"):
            section = line.lstrip("# ")
    return found


def inline() -> list[str]:
    """Commands inside sentences and tables that are complete: ``tensorless run pn3 ...``."""
    whole = set(re.findall(r"`(tensorless [a-z-][^`]*)`", text()))
    return sorted(each for each in whole if not re.search(r"MODEL|COMMAND|\[|v0\.1\.0|0\.1\.0", each))


def blocks(section: str, language: str = "text") -> list[str]:
    """The blocks of one language in the section with this heading."""
    part = re.search(rf"^#+ {re.escape(section)}\n(.*?)(?=^#+ |\Z)", text(), re.M | re.S)
    assert part, section
    # A shell comment begins with '#' too, so headings are looked for outside of blocks only.
    start = part.start()
    out, kind, lines = [], "", []
    for number, line in enumerate(text()[start:].split("\n")):
        if line.startswith("```"):
            if kind:
                if kind == language:
                    out.append("\n".join(lines))
                kind = ""
            else:
                kind, lines = line[3:].strip() or "other", []
        elif kind:
            lines.append(line)
        elif number and line.startswith("#"):
            break
    return out


def squeezed(output: str) -> list[str]:
    """Lines without the doubled blank lines that the documentation's typesetting makes."""
    return re.sub(r"\n{3,}", "\n\n", output.strip("\n")).split("\n")
