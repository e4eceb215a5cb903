# SPDX-License-Identifier: Apache-2.0
"""Random groups through the Python and the C code: `python -m tests.pn.differential [--blocks 1000000]`.

Groups come from several distributions (gaussian at scales from subnormal to overflowing, heavy tails, few distinct
values, ties, one large weight, bf16-rounded); blocks, decoded weights and verdicts on random bytes must be equal.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Iterator

import numpy as np

from engine.pn import format as pn
from engine.pn import native


def groups(kind: pn.PnType, count: int, rng: np.random.Generator) -> Iterator[pn.F32]:
    """`count` groups in batches."""
    made, shape = 0, (2048, kind.weights)
    while made < count:
        for number in range(7):
            x = rng.standard_normal(shape)
            if number == 0:
                x *= 0.02
            elif number == 1:
                x *= 10.0 ** rng.uniform(-12, 38, (shape[0], 1))
            elif number == 2:
                x = rng.standard_t(2, shape)
            elif number == 3:
                x = rng.integers(-4, 5, shape) * 2.0 ** rng.integers(-20, 10, (shape[0], 1))
            elif number == 4:
                x[:, 0] *= 1000
            elif number == 5:
                bits = (x * 0.05).astype(np.float32).view(np.uint32)
                x = (bits + 0x8000 & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)
            else:
                x *= 10.0 ** rng.uniform(-9, -5, (shape[0], 1))
            batch = np.clip(x, -3e38, 3e38).astype(np.float32)[: count - made]
            made += len(batch)
            if len(batch):
                yield batch


def differences(kind: pn.PnType, count: int, seed: int = 0) -> dict[str, int]:
    """How many blocks differ in each comparison. RuntimeError without a C compiler."""
    lib = native.library()
    if lib is None:
        raise RuntimeError("no C compiler: nothing to compare with")
    lib.pn_validate.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    rng = np.random.default_rng(seed)
    found = {"blocks": 0, "quantized": 0, "decoded": 0, "verdicts": 0}
    for batch in groups(kind, count, rng):
        made = pn.quantize(kind, batch)
        found["blocks"] += len(batch)
        found["quantized"] += int((made != native.quantize(kind, batch, 1)).any(axis=1).sum())
        junk = rng.integers(0, 256, made.shape, np.uint8)
        for blocks in (made, junk):
            a, b = pn.decode(kind, blocks), native.decode(kind, blocks)
            both_nan = np.isnan(a) & np.isnan(b)
            found["decoded"] += int(((a.view(np.uint32) != b.view(np.uint32)) & ~both_nan).any(axis=1).sum())
        for block in junk[:64]:
            verdict = lib.pn_validate(kind.bits, block.ctypes.data, 34, None) == 0
            found["verdicts"] += int(verdict != (pn.validate(kind, block) is None))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pn.differential", description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="per type (default: a million)")
    count = parser.parse_args().blocks
    bad = 0
    for kind in pn.TYPES.values():
        found = differences(kind, count)
        print(f"{kind.name}: {found.pop('blocks')} blocks, " + ", ".join(f"{k}: {n} differ" for k, n in found.items()))
        bad += sum(found.values())
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
