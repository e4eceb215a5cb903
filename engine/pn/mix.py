# SPDX-License-Identifier: Apache-2.0
"""Mix files: which tensors become which PN type, as data (TOML; see mixes/)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import tomllib

from engine.pn import format as pn
from engine.pn.gguf import Tensor

FOLDER = Path(__file__).with_name("mixes")


class MixError(ValueError):
    """A mix file that cannot be used, or a tensor that it cannot be applied to."""


@dataclass(frozen=True)
class Rule:
    pattern: re.Pattern[str]
    row: int | None
    types: tuple[str, ...]


@dataclass(frozen=True)
class Mix:
    name: str
    rules: tuple[Rule, ...]

    def choose(self, tensor: Tensor) -> pn.PnType | None:
        """The PN type for a tensor, None to keep it. Vectors are always kept."""
        if len(tensor.shape) < 2 or tensor.count == tensor.row:
            return None
        for rule in self.rules:
            if not rule.pattern.fullmatch(tensor.name) or rule.row not in (None, tensor.row):
                continue
            for name in rule.types:
                if name == "keep":
                    return None
                if tensor.row % pn.TYPES[name].weights == 0:
                    return pn.TYPES[name]
            wanted = " or ".join(f"{n} ({pn.TYPES[n].weights})" for n in rule.types)
            raise MixError(
                f"tensor {tensor.name}: mix {self.name} wants {wanted}, but its rows have {tensor.row} weights, "
                "no whole number of such blocks. Add a rule that keeps it or names another type."
            )
        return None


def load(source: str) -> Mix:
    """A mix by the name of a file in mixes/, or by path."""
    path = FOLDER / f"{source}.toml" if re.fullmatch(r"[\w+-]+", source) else Path(source)
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.toml")))
        raise MixError(f"mix {source}: {error}. Give a TOML file or one of: {known}") from error
    rules = data.get("rule")
    if set(data) != {"rule"} or not isinstance(rules, list) or not rules:
        raise MixError(f"mix {source}: needed: [[rule]] tables and nothing else")
    made = []
    for number, rule in enumerate(rules, 1):
        wanted = rule.get("type") if isinstance(rule, dict) else None
        types = tuple(wanted) if isinstance(wanted, list) else (wanted,)
        row = rule.get("k") if isinstance(rule, dict) else None
        known = {*pn.TYPES, "keep"}
        if not isinstance(rule, dict) or set(rule) - {"tensors", "k", "type"} or not types or set(types) - known:
            raise MixError(
                f"mix {source}, rule {number}: needed: tensors, type ({', '.join(sorted(known))}), perhaps k"
            )
        if row is not None and (not isinstance(row, int) or row < 1):
            raise MixError(f"mix {source}, rule {number}: k is {row!r}; needed: a row length")
        try:
            made.append(Rule(re.compile(str(rule["tensors"])), row, types))
        except (KeyError, re.error) as error:
            raise MixError(f"mix {source}, rule {number}: tensors: {error}") from error
    return Mix(path.stem, tuple(made))
