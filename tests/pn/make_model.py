# SPDX-License-Identifier: Apache-2.0
"""Makes a llama model of random weights whose rows suit pn3t: `python -m tests.pn.make_model --like FILE OUT ...`.

Tokenizer and other metadata come from the header of another model. Weights are slices of one pool of normal numbers, so
that gigabytes take seconds; they mean nothing, but every product runs.
"""

from __future__ import annotations

import argparse
import math
import struct
from pathlib import Path
from typing import IO

import numpy as np

from engine.pn import gguf


def make(
    like: Path, out: Path, embd: int, ff: int, layers: int, head: int, kv_heads: int, experts: int = 0, seed: int = 1
) -> None:
    file = gguf.read(like)
    vocab = next(t.shape[1] for t in file.tensors if t.name == "token_embd.weight")
    pairs = dict(file.pairs)
    for key, value in {
        "llama.embedding_length": embd, "llama.feed_forward_length": ff, "llama.block_count": layers,
        "llama.attention.head_count": embd // head, "llama.attention.head_count_kv": kv_heads,
        "llama.rope.dimension_count": head, "general.file_type": 1,
    }.items():  # fmt: skip
        pairs[key] = struct.pack("<II", 4, value)
    if experts:
        pairs["llama.expert_count"] = struct.pack("<II", 4, experts)
        pairs["llama.expert_used_count"] = struct.pack("<II", 4, 2)
    pairs = {k: v for k, v in pairs.items() if not k.startswith("tensorless.")}
    f16, f32 = gguf.IDS["f16"], gguf.IDS["f32"]
    each, last = ("_exps", (experts,)) if experts else ("", ())
    shapes: list[tuple[str, tuple[int, ...], int]] = [("token_embd.weight", (embd, vocab), f16)]
    for i in range(layers):
        matrices: dict[str, tuple[int, ...]] = {
            "attn_q": (embd, embd), "attn_k": (embd, kv_heads * head), "attn_v": (embd, kv_heads * head),
            "attn_output": (embd, embd), f"ffn_gate{each}": (embd, ff, *last), f"ffn_up{each}": (embd, ff, *last),
            f"ffn_down{each}": (ff, embd, *last),
        }  # fmt: skip
        if experts:
            matrices["ffn_gate_inp"] = (embd, experts)
        shapes += [(f"blk.{i}.{name}.weight", shape, f16) for name, shape in matrices.items()]
        shapes += [(f"blk.{i}.{name}.weight", (embd,), f32) for name in ("attn_norm", "ffn_norm")]
    shapes.append(("output_norm.weight", (embd,), f32))
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal(1 << 24, np.float32)
    pools: dict[int, np.ndarray] = {}

    def fill(i: int, stream: IO[bytes]) -> None:
        _, shape, kind = shapes[i]
        if kind == f32:
            stream.write(np.ones(shape[0], "<f4").tobytes())
            return
        row = shape[0]
        if row not in pools:
            pools[row] = (pool / np.float32(np.sqrt(row))).astype("<f2")
        left = math.prod(shape)
        while left:
            start = int(rng.integers(0, len(pool) // 2))
            part = pools[row][start : start + left]
            stream.write(part.tobytes())
            left -= len(part)

    gguf.write(out, pairs, shapes, fill)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pn.make_model", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--like", type=Path, required=True, help="a llama model; its header is enough")
    for name, value in (("embd", 640), ("ff", 1280), ("layers", 4), ("head", 64), ("kv-heads", 5), ("experts", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    o = parser.parse_args()
    make(o.like, o.output, o.embd, o.ff, o.layers, o.head, o.kv_heads, o.experts)


if __name__ == "__main__":
    main()
