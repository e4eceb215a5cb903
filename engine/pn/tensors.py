# SPDX-License-Identifier: Apache-2.0
"""Weights of a tensor as F32, piece by piece; the rotation; a scan of a tensor's bytes for what must not be there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine.pn import format as pn
from engine.pn import native
from engine.pn.gguf import Gguf, GgufError, Tensor

CHUNK = 8 << 20  # weights at a time
READABLE = ("f32", "f16", "bf16")  # what quantizing starts from
ROTATIONS = {"none": 0, "hadamard-64": 64, "hadamard-128": 128, "hadamard-256": 256, "hadamard-512": 512}
_KINDS = {t.type_id: t for t in pn.TYPES.values()}


def chunks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of rows with about CHUNK weights each."""
    rows = tensor.count // tensor.row
    step = max(1, CHUNK // tensor.row)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _affine(raw: NDArray[np.uint8], name: str) -> pn.F32:
    """Blocks of 32 weights of q4_0, q4_1 and q8_0."""
    d = np.ascontiguousarray(raw[:, :2]).view("<f2").astype(np.float32)
    if name == "q8_0":
        return d * np.ascontiguousarray(raw[:, 2:]).view(np.int8).astype(np.float32)
    codes = raw[:, -16:]
    steps = np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.float32)
    if name == "q4_0":
        return d * (steps - np.float32(8))
    return d * steps + np.ascontiguousarray(raw[:, 2:4]).view("<f2").astype(np.float32)


def to_f32(type_name: str, raw: NDArray[np.uint8]) -> pn.F32 | None:
    """Bytes of one of the types that can be decoded here, as F32; None for another type."""
    if type_name == "f32":
        return raw.view("<f4").astype(np.float32, copy=False)
    if type_name == "f16":
        return raw.view("<f2").astype(np.float32)
    if type_name == "bf16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if type_name in pn.TYPES:
        return native.decode(pn.TYPES[type_name], raw)
    if type_name in ("q4_0", "q4_1", "q8_0"):
        return _affine(raw.reshape(-1, {"q4_0": 18, "q4_1": 20, "q8_0": 34}[type_name]), type_name)
    return None


def weights(file: Gguf, tensor: Tensor, data: NDArray[np.uint8], first: int, last: int) -> pn.F32:
    """Rows `first` to `last` as `[rows, row]`."""
    kind = tensor.type
    if kind is None:
        raise GgufError(f"{file.path}: tensor {tensor.name} has type {tensor.type_id}, which is not known")
    size = tensor.row // kind.weights * kind.size
    values = to_f32(kind.name, np.asarray(data[first * size : last * size]))
    if values is None:
        raise GgufError(f"{file.path}: tensor {tensor.name} is {kind.name}, which cannot be decoded here")
    return values.reshape(last - first, tensor.row)


def rotate(values: pn.F32, block: int) -> pn.F32:
    """Each run of `block` weights times the orthonormal Hadamard matrix in Sylvester's order (its own inverse)."""
    if not block:
        return values
    out = values.astype(np.float64).reshape(-1, block)
    half = 1
    while half < block:
        pairs = out.reshape(-1, block // (2 * half), 2, half)
        out = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(-1, block)
        half *= 2
    return (out / np.sqrt(block)).astype(np.float32).reshape(values.shape)


def scan(file: Gguf, tensor: Tensor) -> str | None:
    """What is wrong with a tensor's data, or None: PN blocks, non-finite weights, non-finite scales."""
    problem = file.problem(tensor)
    if problem or tensor.type is None:
        return problem
    data, kind = file.data(tensor), tensor.type
    size = tensor.row // kind.weights * kind.size
    for first, last in chunks(tensor):
        part = np.asarray(data[first * size : last * size])
        where = first * tensor.row // kind.weights
        if tensor.type_id in _KINDS:
            bad = pn.validate(_KINDS[tensor.type_id], part)
            if bad:
                return f"block {where + bad.block}: {bad.reason}"
            continue
        if kind.name in (*READABLE, "f64"):
            values = part.view("<f8") if kind.name == "f64" else to_f32(kind.name, part)
            finite = np.isfinite(values)
            if not finite.all():
                at = int(np.argmin(finite))
                return f"weight {first * tensor.row + at} is {values[at]}"
        for offset in kind.scales:
            scale = np.ascontiguousarray(part.reshape(-1, kind.size)[:, offset : offset + 2]).view("<f2")
            finite = np.isfinite(scale[:, 0])
            if not finite.all():
                return f"block {where + int(np.argmin(finite))}: a scale is {scale[np.argmin(finite), 0]}"
    return None
