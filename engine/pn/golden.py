# SPDX-License-Identifier: Apache-2.0
"""Writes golden.txt, the vectors that `test-pn-format` runs while the engine is built: ``python -m engine.pn.golden``.

One vector a line: ``D bits block weights``, ``Q bits weights block m error``, ``V bits bytes valid``,
``T bits row activations dot``; numbers are bit patterns in hex, ``-`` is a refusal. They come from the numpy library;
tests/unit/engine compares the file with the library and runs the C code on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.pn import format as pn

TARGET = Path(__file__).with_name("golden.txt")
# Ordinary, negative, largest, least normal, subnormal, zeros.
_SCALES = (0x3C00, 0xBC00, 0x2E66, 0x7BFF, 0x0400, 0x0001, 0x83FF, 0x0000, 0x8000)


def _hex(values: pn.F32) -> str:
    return "".join(f"{v:08x}" for v in np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32))


def _decode(kind: pn.PnType, rng: np.random.Generator) -> Iterator[str]:
    top = 2 * kind.zero
    code = [np.arange(kind.weights) % top, np.arange(kind.weights)[::-1] % top]
    # One weight apart from zero, at each position of a word and in each word.
    for t in range(kind.weights // 8):
        one = np.full(kind.weights, kind.zero)
        one[(t % 8) * (kind.weights // 8) + t] = 0 if t % 2 else top - 1
        code.append(one)
    code += [rng.integers(0, top, kind.weights) for _ in range(len(_SCALES) + 4)]
    for i, codes in enumerate(code):
        d = np.array([_SCALES[i % len(_SCALES)]], np.uint16).view(np.float16)
        block = pn.pack(kind, d, codes.reshape(1, -1))
        yield f"D {kind.bits} {block.tobytes().hex()} {_hex(pn.decode(kind, block))}"


def _groups(kind: pn.PnType, rng: np.random.Generator) -> Iterator[np.ndarray]:
    n = kind.weights
    for scale in (0.02, 1.0, 300.0, 1e-6, 3e-8, 1e30):
        yield rng.normal(0, scale, n)
    yield rng.standard_t(2, n) * 0.05
    yield np.zeros(n)
    yield np.full(n, -0.0)
    yield np.full(n, 0.25)
    yield np.where(np.arange(n) % 2, 1.0, -1.0)
    yield np.full(n, 1e-40)
    yield np.full(n, -3.4e38)
    one = np.zeros(n)
    one[n // 2] = -0.75
    yield one
    for bad in (np.nan, np.inf, -np.inf):
        spoilt = rng.normal(0, 1, n)
        spoilt[-1] = bad
        yield spoilt


def _quantize(kind: pn.PnType, rng: np.random.Generator) -> Iterator[str]:
    for group in _groups(kind, rng):
        x = group.astype(np.float32)
        try:
            block = pn.quantize(kind, x).tobytes().hex()
        except pn.BadInput:
            yield f"Q {kind.bits} {_hex(x)} - -1 -"
            continue
        _, best, error = pn.search(kind, x.reshape(1, -1))
        yield f"Q {kind.bits} {_hex(x)} {block} {best[0]} {float(error[0]).hex()}"


def _validate(kind: pn.PnType, rng: np.random.Generator) -> Iterator[str]:
    good = pn.quantize(kind, rng.normal(0, 1, kind.weights).astype(np.float32)).reshape(-1)
    cases = [good, np.concatenate([good, good]), good[:33], np.concatenate([good, good[:7]])]
    for pattern in (0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0x7BFF, 0x8000, 0x0001):
        block = good.copy()
        block[:2] = pattern & 255, pattern >> 8
        cases += [block, np.concatenate([good, block])]
    for byte in (3, 5, 31, 33):
        block = good.copy()
        block[byte] |= 0x80
        cases.append(block)
    for case in cases:
        yield f"V {kind.bits} {case.tobytes().hex()} {int(pn.validate(kind, case) is None)}"


def _dot(kind: pn.PnType, rng: np.random.Generator) -> Iterator[str]:
    for blocks in (1, 2, 3, 5, 64):
        row = pn.quantize(kind, rng.normal(0, 0.02, (blocks, kind.weights)).astype(np.float32))
        x = rng.normal(0, 1, blocks * kind.weights).astype(np.float32)
        yield f"T {kind.bits} {row.tobytes().hex()} {_hex(x)} {pn.dot(kind, row, x).hex()}"


def lines() -> list[str]:
    """The file's lines."""
    out = ["# PNX-FORMAT-v0 golden vectors, written by engine/pn/golden.py"]
    for kind in (pn.PN3T, pn.PN4T):
        rng = np.random.default_rng(kind.type_id)
        for part in (_decode, _quantize, _validate, _dot):
            out += part(kind, rng)
    return out


if __name__ == "__main__":
    TARGET.write_text("\n".join(lines()) + "\n")
