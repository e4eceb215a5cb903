# SPDX-License-Identifier: Apache-2.0
"""Turning GGUF files into PN files and back, tensor by tensor, never with a whole file in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np

from engine.pn import format as pn
from engine.pn import gguf, native, tensors
from engine.pn.mix import Mix

ROTATION_KEY = "tensorless.pn.rotation"
FORMAT_KEY = "tensorless.pn.format"
MIX_KEY = "tensorless.pn.mix"
Say = Callable[[str, int, int], None]  # tensor name, bytes of input done, bytes of input in all


class ConvertError(ValueError):
    """A file that cannot be converted; the message names the tensor."""


def rotation_of(file: gguf.Gguf) -> int:
    """Block size of the file's rotation. ConvertError when it is missing or unknown in a file with PN weights."""
    if not any(t.type_name in pn.TYPES for t in file.tensors):
        return 0
    name = file.value(ROTATION_KEY)
    if name not in tensors.ROTATIONS:
        raise ConvertError(
            f"{file.path}: has PN weights and {ROTATION_KEY} is {name!r}; "
            f"needed: one of {', '.join(tensors.ROTATIONS)}. "
            "What the weights mean is not known without it."
        )
    return tensors.ROTATIONS[str(name)]


def quantize(source: Path, target: Path, mix: Mix, rotation: str = "none", say: Say | None = None) -> dict[str, int]:
    """Write `target` with the tensors that the mix names in PN. Returns how many tensors have which type."""
    file = gguf.read(source)
    block = tensors.ROTATIONS[rotation]
    choice = [mix.choose(t) for t in file.tensors]
    for tensor, kind in zip(file.tensors, choice, strict=True):
        problem = file.problem(tensor)
        if kind and not problem and tensor.type_name not in tensors.READABLE:
            problem = (
                f"is {tensor.type_name}; quantizing starts from {', '.join(tensors.READABLE)} (dequantize it first)"
            )
        if kind and block and (tensor.row % block or len(tensor.shape) != 2 or tensor.name == "token_embd.weight"):
            problem = (
                f"cannot be rotated by {rotation}: needed: a matrix, no embedding, with rows of a multiple of {block}"
            )
        if problem:
            raise ConvertError(f"{source}: tensor {tensor.name} {problem}")
    if not any(choice):
        raise ConvertError(f"{source}: mix {mix.name} names none of its {len(file.tensors)} tensors")
    pairs = {k: v for k, v in file.pairs.items() if k not in (ROTATION_KEY, FORMAT_KEY, MIX_KEY)}
    pairs[FORMAT_KEY] = gguf.string_value(pn.FORMAT)
    pairs[ROTATION_KEY] = gguf.string_value(rotation)
    pairs[MIX_KEY] = gguf.string_value(mix.name)

    def encode(i: int, first: int, last: int, data: np.ndarray) -> bytes:
        tensor, kind = file.tensors[i], choice[i]
        values = tensors.weights(file, tensor, data, first, last)
        if kind is None:  # not reached: kept tensors are copied
            return b""
        if not np.isfinite(values).all():
            row, column = np.argwhere(~np.isfinite(values))[0]
            raise ConvertError(
                f"{source}: tensor {tensor.name}, row {first + row}, column {column} is {values[row, column]}; "
                "PN has no code for it, so nothing was written"
            )
        return native.quantize(kind, tensors.rotate(values, block)).tobytes()

    shapes = [(t.name, t.shape, k.type_id if k else t.type_id) for t, k in zip(file.tensors, choice, strict=True)]
    _write(file, target, pairs, shapes, encode, say)
    return _count(shapes)


def dequantize(source: Path, target: Path, say: Say | None = None) -> dict[str, int]:
    """Write `target` with every tensor that can be decoded here as F32, a rotation undone; others as they are."""
    file = gguf.read(source)
    block = rotation_of(file)
    for tensor in file.tensors:
        problem = file.problem(tensor)
        if problem:
            raise ConvertError(f"{source}: tensor {tensor.name} {problem}")
    known = {*pn.TYPES, "q4_0", "q4_1", "q8_0", "f16", "bf16"}
    pairs = {k: v for k, v in file.pairs.items() if k not in (ROTATION_KEY, FORMAT_KEY, MIX_KEY)}

    def decode(i: int, first: int, last: int, data: np.ndarray) -> bytes:
        tensor = file.tensors[i]
        values = tensors.weights(file, tensor, data, first, last)
        return tensors.rotate(values, block if tensor.type_name in pn.TYPES else 0).astype("<f4").tobytes()

    f32 = gguf.IDS["f32"]
    shapes = [(t.name, t.shape, f32 if t.type_name in known else t.type_id) for t in file.tensors]
    _write(file, target, pairs, shapes, decode, say)
    return _count(shapes)


def _write(
    file: gguf.Gguf,
    target: Path,
    pairs: dict[str, bytes],
    shapes: list[tuple[str, tuple[int, ...], int]],
    convert: Callable[[int, int, int, np.ndarray], bytes],
    say: Say | None,
) -> None:
    if target.exists() and target.samefile(file.path):
        raise ConvertError(f"{target}: is the input; name another file")
    total = sum(t.size() or 0 for t in file.tensors)
    done = 0

    def fill(i: int, stream: IO[bytes]) -> None:
        nonlocal done
        tensor, data = file.tensors[i], file.data(file.tensors[i])
        size = (tensor.size() or 0) // (tensor.count // tensor.row)
        for first, last in tensors.chunks(tensor):
            part = data[first * size : last * size]
            stream.write(part if shapes[i][2] == tensor.type_id else convert(i, first, last, data))
            done += part.nbytes
            if say:
                say(tensor.name, done, total)

    gguf.write(target, pairs, shapes, fill, file.alignment)


def _count(shapes: list[tuple[str, tuple[int, ...], int]]) -> dict[str, int]:
    names = [gguf.TYPES[i].name if i in gguf.TYPES else f"type {i}" for _, _, i in shapes]
    return {name: names.count(name) for name in dict.fromkeys(names)}
