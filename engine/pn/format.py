# SPDX-License-Identifier: Apache-2.0
"""The PN weight format in numpy: decode, quantize, validate, dot product.

Blocks travel as ``uint8`` arrays of shape ``[n, 34]`` and weights as ``float32`` of shape ``[n, weights]``.
Every function gives the bits that ``c/pn.c`` gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 34
FORMAT = "PNX-FORMAT-v0"
MULTIPLIERS = np.array([(50 + 2 * i) / 100 for i in range(36)])
# One batch of the quantizer: 36 candidates of so many blocks stay in a core's cache.
_BATCH = 256

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


class BadInput(ValueError):
    """A weight is a NaN or an infinity; ``block`` counts from 0."""

    def __init__(self, block: int) -> None:
        super().__init__(f"block {block} holds a NaN or an infinity; PN has no code for either")
        self.block = block


@dataclass(frozen=True)
class BadBlock:
    """The first invalid block of some bytes, and why."""

    block: int
    reason: str


@dataclass(frozen=True)
class PnType:
    """One PN type."""

    name: str
    type_id: int
    bits: int
    weights: int

    @property
    def zero(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def shifts(self) -> NDArray[np.uint32]:
        """The shift of each code inside its word."""
        per_word = self.weights // 8
        return np.array([self.bits * (t >> 1) + 16 * (t & 1) for t in range(per_word)], np.uint32)


PN3T = PnType("pn3t", 124, 3, 80)
PN4T = PnType("pn4t", 125, 4, 64)
TYPES = {t.name: t for t in (PN3T, PN4T)}


def as_blocks(data: bytes | bytearray | memoryview | U8) -> U8:
    """Bytes as ``[n, 34]``; ValueError when they are no whole number of blocks."""
    flat = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data.reshape(-1)
    if flat.size % BLOCK_BYTES:
        raise ValueError(f"{flat.size} bytes are not a whole number of {BLOCK_BYTES}-byte blocks")
    return flat.reshape(-1, BLOCK_BYTES)


def scales(blocks: U8) -> NDArray[np.float16]:
    """The scale of each block."""
    return np.ascontiguousarray(blocks[:, :2]).view("<f2").reshape(-1)


def words(blocks: U8) -> NDArray[np.uint32]:
    """The eight code words of each block, ``[n, 8]``."""
    return np.ascontiguousarray(blocks[:, 2:]).view("<u4")


def codes(kind: PnType, blocks: U8) -> U8:
    """The codes in element order, ``[n, weights]``."""
    each = words(blocks)[:, :, None] >> kind.shifts[None, None, :]
    return (each & np.uint32((1 << kind.bits) - 1)).astype(np.uint8).reshape(len(blocks), kind.weights)


def decode(kind: PnType, data: bytes | U8) -> F32:
    """The weights, ``[n, weights]``: one exact fp32 product each."""
    blocks = as_blocks(data)
    steps = codes(kind, blocks).astype(np.float32) - np.float32(kind.zero)
    with np.errstate(invalid="ignore"):
        return scales(blocks).astype(np.float32)[:, None] * steps


def pack(kind: PnType, d: NDArray[np.float16], code: NDArray[np.integer]) -> U8:
    """Blocks from scales and codes."""
    each = code.reshape(len(d), 8, -1).astype(np.uint32) << kind.shifts[None, None, :]
    out = np.empty((len(d), BLOCK_BYTES), np.uint8)
    out[:, :2] = d.astype("<f2").view(np.uint8).reshape(-1, 2)
    out[:, 2:] = np.bitwise_or.reduce(each, axis=2).astype("<u4").view(np.uint8).reshape(len(d), 32)
    return out


def quantize(kind: PnType, values: F32) -> U8:
    """The reference quantizer over ``[n, weights]`` (any shape with that many elements).

    Raises BadInput for a NaN or an infinity: no block is written from such a group.
    """
    groups = np.ascontiguousarray(values, np.float32).reshape(-1, kind.weights)
    finite = np.isfinite(groups).all(axis=1)
    if not finite.all():
        raise BadInput(int(np.argmin(finite)))
    out = np.empty((len(groups), BLOCK_BYTES), np.uint8)
    for start in range(0, len(groups), _BATCH):
        out[start : start + _BATCH] = search(kind, groups[start : start + _BATCH])[0]
    return out


def search(kind: PnType, groups: F32) -> tuple[U8, NDArray[np.intp], NDArray[np.float64]]:
    """One batch: blocks, the chosen index into MULTIPLIERS (-1: none) and the squared error."""
    x = groups.astype(np.float64)
    low, high = x.min(axis=1), x.max(axis=1)
    amax = np.maximum(np.abs(low), np.abs(high))
    sigma = np.where(np.abs(low) > high, 1.0, -1.0)
    lo, hi = -float(kind.zero), float(kind.zero - 1)

    with np.errstate(over="ignore"):
        scale = (sigma * MULTIPLIERS[:, None] * amax / kind.zero).astype(np.float16).astype(np.float64)
    usable = np.isfinite(scale) & (scale != 0)
    divisor = np.where(usable, scale, 1.0)
    error = np.zeros_like(divisor)
    step, diff = np.empty_like(divisor), np.empty_like(divisor)
    # Element by element: each candidate's sum runs in element order, and numpy's loop is over the batch.
    for e in range(kind.weights):
        np.divide(x[:, e], divisor, out=step)
        np.rint(step, out=step)
        np.clip(step, lo, hi, out=step)
        np.multiply(step, divisor, out=diff)
        np.subtract(x[:, e], diff, out=diff)
        np.multiply(diff, diff, out=diff)
        error += diff
    error[~usable] = np.inf
    # The last of the smallest: a tie goes to the larger m.
    best = len(MULTIPLIERS) - 1 - np.argmin(error[::-1], axis=0)

    rows = np.arange(len(x))
    found = usable[best, rows]
    saturated = ~found & np.isinf(scale).any(axis=0)
    d = np.where(found, scale[best, rows], np.where(saturated, sigma * 65504.0, 0.0))
    safe = np.where(d == 0, 1.0, d)
    steps = np.clip(np.rint(x / safe[:, None]), lo, hi)
    steps[d == 0] = 0.0
    rest = x - d[:, None] * steps
    total = np.zeros(len(x))
    for e in range(kind.weights):
        total += rest[:, e] * rest[:, e]
    blocks = pack(kind, d.astype(np.float16), steps.astype(np.int64) + kind.zero)
    return blocks, np.where(found, best, -1), total


def validate(kind: PnType, data: bytes | U8) -> BadBlock | None:
    """The first invalid block, or None."""
    flat = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data.reshape(-1)
    whole = flat.size // BLOCK_BYTES
    blocks = flat[: whole * BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
    bad_scale = ~np.isfinite(scales(blocks))
    bad = bad_scale
    if kind.bits == 3:
        bad = bad_scale | (np.bitwise_or.reduce(words(blocks), axis=1) & np.uint32(0x80008000) != 0)
    if bad.any():
        first = int(np.argmax(bad))
        if bad_scale[first]:
            return BadBlock(first, "the scale is a NaN or an infinity")
        return BadBlock(first, "a reserved bit (15 or 31 of a word) is set")
    if flat.size % BLOCK_BYTES:
        return BadBlock(whole, "the size is not a whole number of 34-byte blocks")
    return None


def dot(kind: PnType, row: bytes | U8, x: F32) -> float:
    """A row of blocks times activations: double products, summed in element order."""
    with np.errstate(invalid="ignore", over="ignore"):
        products = decode(kind, row).reshape(-1).astype(np.float64) * x.reshape(-1).astype(np.float64)
        # The accumulator starts at +0.0, which shows only where every product is -0.0.
        return 0.0 + float(np.add.accumulate(products)[-1]) if products.size else 0.0
