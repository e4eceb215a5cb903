# SPDX-License-Identifier: Apache-2.0
"""Reads golden vector files (one PN type and one kind each) and checks the Python library against them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.pn import format as pn

KINDS = ("decode", "quantize", "validate", "dot")


class VectorFileError(ValueError):
    """A file that is no golden vector file, with what is wrong."""


@dataclass(frozen=True)
class VectorFile:
    """The vectors of one file."""

    path: Path
    kind: str
    type: pn.PnType
    vectors: list[dict[str, Any]]


def read(path: Path) -> VectorFile:
    """Read one file, or say why it is none."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise VectorFileError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != pn.FORMAT:
        raise VectorFileError(f"{path}: found no `format: {pn.FORMAT}`; give a golden vector file")
    if data.get("type") not in pn.TYPES or data.get("kind") not in KINDS:
        found = f"type {data.get('type')!r}, kind {data.get('kind')!r}"
        raise VectorFileError(f"{path}: {found}; needed: {', '.join(pn.TYPES)} and one of {', '.join(KINDS)}")
    if not isinstance(data.get("vectors"), list) or not data["vectors"]:
        raise VectorFileError(f"{path}: holds no vectors")
    return VectorFile(path, data["kind"], pn.TYPES[data["type"]], data["vectors"])


def floats(patterns: list[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 from bit patterns written as numbers."""
    return np.array([int(p, 16) for p in patterns], np.uint32).view(np.float32)


def bits(values: np.ndarray[Any, Any]) -> list[str]:
    """The reverse of `floats`."""
    return [f"{v:08x}" for v in np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)]


def index_of(m: float) -> int:
    """The place of a multiplier in the list, -2 when it is in no place."""
    near = np.flatnonzero(np.abs(np.asarray(pn.MULTIPLIERS) - m) < 1e-9)
    return int(near[0]) if near.size else -2


def refused(vector: dict[str, Any]) -> bool:
    """Whether the quantizer must refuse this group (R8)."""
    return vector.get("block") is None


def check_python(file: VectorFile, vector: dict[str, Any]) -> str | None:
    """None when the Python library agrees with the vector, else what it gave instead."""
    return {"decode": _decode, "quantize": _quantize, "validate": _validate, "dot": _dot}[file.kind](file.type, vector)


def _decode(kind: pn.PnType, vector: dict[str, Any]) -> str | None:
    block = pn.as_blocks(bytes.fromhex(vector["block"]))
    if "codes" in vector and pn.codes(kind, block).reshape(-1).tolist() != vector["codes"]:
        return "codes differ"
    got, want = pn.decode(kind, block).reshape(-1), floats(vector["w"])
    if got.size != want.size:
        return f"{got.size} weights, expected {want.size}"
    # Bit for bit; only which NaN it is may differ.
    wrong = np.flatnonzero((got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want)))
    return f"element {wrong[0]}: {bits(got)[wrong[0]]}, expected {vector['w'][wrong[0]]}" if wrong.size else None


def _quantize(kind: pn.PnType, vector: dict[str, Any]) -> str | None:
    group = floats(vector["x"])
    try:
        block = pn.quantize(kind, group)
    except pn.BadInput:
        return None if refused(vector) else "refused"
    if refused(vector):
        return "not refused"
    if block.tobytes().hex() != vector["block"]:
        return f"block {block.tobytes().hex()}, expected {vector['block']}"
    _, best, error = pn.search(kind, group.reshape(1, -1))
    if vector.get("m") is not None and best[0] != index_of(vector["m"]):
        return f"m {pn.MULTIPLIERS[best[0]] if best[0] >= 0 else 'none'}, expected {vector['m']}"
    if vector.get("err") is not None and error[0] != float.fromhex(vector["err"]):
        return f"error {float(error[0]).hex()}, expected {vector['err']}"
    return None


def _validate(kind: pn.PnType, vector: dict[str, Any]) -> str | None:
    bad = pn.validate(kind, bytes.fromhex(vector["block"]))
    return None if (bad is None) == vector["valid"] else f"{bad or 'valid'}"


def _dot(kind: pn.PnType, vector: dict[str, Any]) -> str | None:
    got = pn.dot(kind, bytes.fromhex(vector["row"]), floats(vector["x"]))
    want = float.fromhex(vector["dot_f64_hex"])
    same = got == want or (got != got and want != want)
    return None if same else f"{got.hex()}, expected {want.hex()}"


def as_line(file: VectorFile, vector: dict[str, Any]) -> str:
    """The vector as one line for `check.c`."""
    b = str(file.type.bits)
    if file.kind == "decode":
        return f"D {b} {vector['block']} {''.join(vector['w'])}"
    if file.kind == "validate":
        return f"V {b} {vector['block'] or '-'} {int(vector['valid'])}"
    if file.kind == "dot":
        return f"T {b} {vector['row']} {''.join(vector['x'])} {vector['dot_f64_hex']}"
    m = vector.get("m")
    index = -1 if m is None else index_of(m)
    return f"Q {b} {''.join(vector['x'])} {vector['block'] or '-'} {index} {vector.get('err') or '-'}"
