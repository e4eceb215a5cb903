# SPDX-License-Identifier: Apache-2.0
"""Where implementations of the format are apt to part: every code and scale, reserved bits, sizes, ties, the ends of
the number ranges, zeros with a sign, what is not finite. The Python code says what is expected, the C code must agree.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.pn import format as pn
from engine.pn import native as library
from tests.pn import native, vectors

SCALES = [
    0x0000, 0x8000, 0x0001, 0x8001, 0x0002, 0x03FF, 0x83FF, 0x0400, 0x8400, 0x3C00, 0xBC00, 0x3555, 0x7BFF, 0xFBFF,
    0x7C00, 0xFC00, 0x7C01, 0xFC01, 0x7DFF, 0x7E00, 0xFE00, 0x7FFF, 0xFFFF,
]  # fmt: skip
NUMBERS = [0.0, -0.0, 1e-45, -1e-45, 1.17e-38, 2.0**-149, 2.0**-25, 2.0**-24, 65504.0, 65520.0, -65536.0, 3.4028235e38]
MAX = np.finfo(np.float32).max


def hexed(data: np.ndarray) -> str:
    return data.tobytes().hex()


def word(values: np.ndarray) -> str:
    return "".join(vectors.bits(values))


def decode_lines(kind: pn.PnType) -> Iterator[str]:
    """Every code at every place under every kind of scale; then the same with the reserved bits set."""
    codes = np.arange(1 << kind.bits, dtype=np.uint8)
    for scale in SCALES:
        d = np.full(len(codes), scale, np.uint16).view(np.float16)
        turned = np.stack([np.roll(np.resize(codes, kind.weights), int(i)) for i in codes])
        blocks = pn.pack(kind, d, turned)
        assert (pn.codes(kind, blocks) == turned).all()
        for extra in (0x0000, 0x8000) if kind.bits == 3 else (0,):
            marked = blocks.copy()
            marked[:, 2:].view("<u2")[...] |= extra
            yield f"D {kind.bits} {hexed(marked)} {word(pn.decode(kind, marked))}"


def validate_lines(kind: pn.PnType) -> Iterator[str]:
    good = bytearray(34)
    cases = [bytes(good) * n + bytes(extra) for n in (0, 1, 2, 5) for extra in (0, 1, 2, 33)]
    for scale in SCALES:
        cases.append(scale.to_bytes(2, "little") + bytes(32) + bytes(good))
        cases.append(bytes(good) + scale.to_bytes(2, "little") + bytes(32))
    for bit in range(272):
        one = bytearray(good)
        one[bit // 8] |= 1 << bit % 8
        cases.append(bytes(one))
    cases += [b"\x00\x7c" + b"\xff" * 32, b"\xff" * 34, b"\x00\x3c" + b"\xff" * 32, b"\x00\x3c" + b"\xff\x7f" * 16]
    for case in cases:
        yield f"V {kind.bits} {case.hex() or '-'} {int(pn.validate(kind, case) is None)}"


def groups(kind: pn.PnType) -> Iterator[np.ndarray]:
    n, z = kind.weights, kind.zero
    for value in NUMBERS:
        yield np.full(n, value)
        one = np.zeros(n)
        for place in (0, 1, n // 2, n - 1):
            spot = one.copy()
            spot[place] = value
            yield spot
            spot[(place + 1) % n] = -value
            yield spot
    ramp = np.resize(np.arange(-z, z), n).astype(float)
    for unit in (1.0, 0.5, 2.0**-20, 2.0**-24, 2.0**-28, 3.0, 1 / 3, 8188.0, 16376.0, 1e30):
        for shift in (0.0, 0.5, 0.25, -0.5, 0.75):  # half steps are ties, rounded to even
            yield (ramp + shift) * unit
            yield -(ramp + shift) * unit
    yield np.where(np.arange(n) % 2, 1.0, -1.0)  # the least and the greatest alike
    yield np.where(np.arange(n) % 2, MAX, -MAX)
    yield np.resize([0.0, -0.0], n)
    yield np.resize([1.0, -0.0], n)
    yield np.resize([2.0**-26, -(2.0**-26)], n)  # under half of the least subnormal, or just at it
    yield np.resize([65504.0 * z, 1.0], n)
    yield np.resize([-65504.0 * z, 1.0], n)
    yield np.resize([65504.0 * z / 1.2, -3.0], n)  # some candidates overflow, some do not
    for bad in (np.nan, np.inf, -np.inf):
        for place in (0, n // 2, n - 1):
            spot = np.ones(n)
            spot[place] = bad
            yield spot


def quantize_lines(kind: pn.PnType) -> Iterator[str]:
    for group in groups(kind):
        with np.errstate(over="ignore"):
            x = group.astype(np.float32).reshape(1, -1)
        if not np.isfinite(x).all():
            with pytest.raises(pn.BadInput):
                pn.quantize(kind, x)
            with pytest.raises(pn.BadInput):
                library.quantize(kind, x, 1)
            yield f"Q {kind.bits} {word(x)} - -1 -"
            continue
        block, best, error = pn.search(kind, x)
        assert (library.quantize(kind, x, 1) == block).all(), group
        assert pn.validate(kind, block) is None
        yield f"Q {kind.bits} {word(x)} {hexed(block)} {best[0]} {float(error[0]).hex()}"


def dot_lines(kind: pn.PnType) -> Iterator[str]:
    rng = np.random.default_rng(5)
    for blocks in (1, 2, 3, 7):
        raw = rng.integers(0, 256, (blocks, 34), np.uint8)
        raw[:, 1] &= 0xBB  # finite scales of both signs
        if kind.bits == 3:
            raw[:, 2:].view("<u2")[...] &= 0x7FFF
        n = blocks * kind.weights
        for x in (
            rng.standard_normal(n), np.zeros(n), np.full(n, -0.0), np.full(n, MAX), np.full(n, 1e-45),
            np.where(np.arange(n) % 2, MAX, -MAX), 10.0 ** rng.uniform(-37, 37, n),
            np.where(np.arange(n) == 3, np.inf, 1), np.where(np.arange(n) == n - 1, np.nan, 1),
        ):  # fmt: skip
            values = x.astype(np.float32)
            yield f"T {kind.bits} {hexed(raw)} {word(values)} {pn.dot(kind, raw, values).hex()}"


@functools.cache
def all_lines(kind: pn.PnType) -> list[str]:
    return [*decode_lines(kind), *validate_lines(kind), *quantize_lines(kind), *dot_lines(kind)]


@pytest.mark.parametrize("kind", pn.TYPES.values(), ids=pn.TYPES)
@pytest.mark.parametrize("flags", ["-O0", "-O2", "-O3 -march=native -ffp-contract=fast"])
def test_python_and_c_agree_at_the_edges(tmp_path: Path, kind: pn.PnType, flags: str) -> None:
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    lines = all_lines(kind)
    assert len(lines) > 500
    passed, failures = native.run(native.build(tmp_path / "check", "cc", flags.split()), lines)
    assert {lines[i][:40]: why for i, why in failures.items()} == {}
    assert passed == len(lines)


def test_negative_zero_products_sum_to_positive_zero() -> None:
    """The accumulator starts at +0.0."""
    block = pn.pack(pn.PN4T, np.array([1.0], np.float16), np.full((1, 64), 9))
    assert str(pn.dot(pn.PN4T, block, np.full(64, -0.0, np.float32))) == "0.0"
