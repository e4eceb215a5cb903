# SPDX-License-Identifier: Apache-2.0
"""Compiles `check.c` with `pn.c` and runs vector lines through it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [Path(__file__).with_name("check.c"), ROOT / "engine/pn/c/pn.c"]
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Werror"]


def build(target: Path, compiler: str = "cc", flags: Sequence[str] = ("-O2",)) -> Path:
    """The checker, compiled; the compiler's own words when that fails."""
    command = [compiler, *STRICT, *flags, f"-I{ROOT / 'engine/pn/c'}", "-o", str(target), *map(str, SOURCES), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return target


def run(checker: Path, lines: Sequence[str], *options: str) -> tuple[int, dict[int, str]]:
    """How many lines passed, and the reason of each that did not (by index)."""
    done = subprocess.run([str(checker), *options], input="\n".join(lines) + "\n", capture_output=True, text=True)
    total = re.search(r"^(\d+) passed, (\d+) failed$", done.stdout, re.MULTILINE)
    if not total or done.returncode not in (0, 1):
        raise RuntimeError(f"{checker} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    failures = {int(n) - 1: why for n, why in re.findall(r"^line (\d+): (.*)$", done.stdout, re.MULTILINE)}
    return int(total[1]), failures
