# SPDX-License-Identifier: Apache-2.0
"""The same F32 model with its sums in another order: `python -m tests.pn.reorder IN.gguf OUT.gguf`.

The neurons of each feed-forward network are shuffled, which changes nothing but the order in which a row of `ffn_down`
is added up. What `test-pn-logits` then says of IN and OUT is what F32 rounding alone does to that model.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import IO

import numpy as np

from engine.pn import gguf


def reorder(source: Path, target: Path, seed: int = 0) -> int:
    """Writes the shuffled model; how many matrices were shuffled."""
    file = gguf.read(source)
    rng = np.random.default_rng(seed)
    order: dict[str, np.ndarray] = {}
    done = 0

    def fill(i: int, stream: IO[bytes]) -> None:
        nonlocal done
        tensor = file.tensors[i]
        data = np.asarray(file.data(tensor))
        found = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)(_exps)?\.weight", tensor.name)
        if found and tensor.type_name == "f32":
            matrices = data.view("<f4").reshape(-1, tensor.shape[1], tensor.row)  # one, or one for each expert
            down = found[2] == "down"
            neurons = order.setdefault(found[1], rng.permutation(matrices.shape[2 if down else 1]))
            data = np.ascontiguousarray(matrices[:, :, neurons] if down else matrices[:, neurons])
            done += 1
        stream.write(data.tobytes())

    gguf.write(target, file.pairs, [(t.name, t.shape, t.type_id) for t in file.tensors], fill)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pn.reorder", description=__doc__)
    parser.add_argument("source", type=Path, help="a model in F32 (python -m engine.pn dequantize)")
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    print(f"{options.target}: {reorder(options.source, options.target)} matrices shuffled")


if __name__ == "__main__":
    main()
