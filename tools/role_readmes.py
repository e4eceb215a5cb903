# SPDX-License-Identifier: Apache-2.0
"""Writes each role's README.md from its argument spec (Galaxy asks for one); `--check` only compares."""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

import yaml

ROLES = pathlib.Path(__file__).resolve().parents[1] / "roles"


def plain(text: str) -> str:
    """Ansible's markup as Markdown."""
    text = re.sub(r"\b[OVCRE]\(((?:[^()\\]|\\.)*)\)", r"`\1`", text)
    text = re.sub(r"\b[IB]\(([^()]*)\)", r"*\1*", text)
    return re.sub(r"\b(?:M|P)\(([^()#]*)(?:#\w+)?\)", r"`\1`", text).replace("\\)", ")")


def sentences(value: Any) -> str:
    return plain(" ".join([value] if isinstance(value, str) else value or []))


def readme(role: str) -> str:
    spec = yaml.safe_load((ROLES / role / "meta" / "argument_specs.yml").read_text(encoding="utf-8"))
    main = spec["argument_specs"]["main"]
    lines = [
        f"# {role}",
        "",
        sentences(main["short_description"]) + ".",
        "",
        sentences(main.get("description")),
        "",
        "Made from `meta/argument_specs.yml`. The same, on your terminal: "
        f"`ansible-doc -t role tensorless.fleet.{role}`.",
    ]
    options = main.get("options") or {}
    if options:
        lines += ["", "| Variable | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
    for name, option in options.items():
        default = option.get("default", "required" if option.get("required") else "")
        shown = f"`{default!s}`".replace("|", "\\|") if default != "" else ""
        meaning = sentences(option.get("description")).replace("|", "\\|")
        lines.append(f"| `{name}` | {option.get('type', 'str')} | {shown} | {meaning} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    stale = []
    for path in sorted(ROLES.iterdir()):
        if not (path / "meta" / "argument_specs.yml").exists():
            continue
        text, target = readme(path.name), path / "README.md"
        if target.exists() and target.read_text(encoding="utf-8") == text:
            continue
        stale.append(str(target.relative_to(ROLES.parent)))
        if "--check" not in sys.argv:
            target.write_text(text, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"out of date: {', '.join(stale)}; run: make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
