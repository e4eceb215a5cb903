# SPDX-License-Identifier: Apache-2.0
"""`python -m engine.pn info|quantize|dequantize|validate FILE.gguf`: PN weights in GGUF files."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from engine.pn import convert, format, gguf, mix, tensors


class _Progress:
    """Percentage and rate: one line that is rewritten on a terminal, a line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.last = 0.0

    def __call__(self, name: str, done: int, total: int) -> None:
        now, tty = time.monotonic(), sys.stderr.isatty()
        if now - self.last < (0.2 if tty else 10.0) and done < total:
            return
        self.last = now
        rate = done / max(now - self.start, 1e-3)
        line = f"{100 * done // max(total, 1):3d} %  {rate / 1e6:8.1f} MB/s  {name}"
        print(f"\r{line:<78.78}" if tty else line, file=sys.stderr, end="" if tty and done < total else "\n")


def _info(path: Path) -> int:
    file = gguf.read(path)
    by_type: dict[str, list[int]] = {}
    for t in file.tensors:
        entry = by_type.setdefault(t.type_name, [0, 0, 0])
        entry[0], entry[1], entry[2] = entry[0] + 1, entry[1] + t.count, entry[2] + (t.size() or 0)
    print(f"{path}: GGUF {file.version}, {len(file.tensors)} tensors, {len(file.pairs)} metadata pairs")
    for key in ("general.architecture", "general.name", convert.FORMAT_KEY, convert.ROTATION_KEY, convert.MIX_KEY):
        if (value := file.value(key)) is not None:
            print(f"  {key}: {value}")
    print(f"  {'type':<8}{'tensors':>8}{'weights':>16}{'bytes':>16}{'bits/w':>8}")
    for name, (count, weights, size) in by_type.items():
        print(f"  {name:<8}{count:>8}{weights:>16}{size:>16}{8 * size / weights:>8.2f}")
    return 0


def _validate(path: Path) -> int:
    file = gguf.read(path)
    bad = 0
    convert_problem = None
    try:
        convert.rotation_of(file)
    except convert.ConvertError as error:
        convert_problem = str(error)
        print(convert_problem)
    for tensor in file.tensors:
        problem = tensors.scan(file, tensor)
        if problem:
            bad += 1
            print(f"{path}: tensor {tensor.name} ({tensor.type_name}) {problem}")
    if bad or convert_problem:
        print(f"{path}: invalid ({bad} of {len(file.tensors)} tensors)")
        return 1
    print(f"{path}: valid, {len(file.tensors)} tensors")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.pn", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("info", "what is in a file"), ("validate", "check every tensor of any GGUF file")):
        commands.add_parser(name, help=text).add_argument("file", type=Path)
    quant = commands.add_parser("quantize", help="F32, F16 and BF16 tensors to pn3t and pn4t, by a mix")
    quant.add_argument("file", type=Path)
    quant.add_argument("output", type=Path)
    quant.add_argument("--mix", default="smallest", help="a mix file, or the name of one in mixes/ (default: smallest)")
    quant.add_argument("--rotation", default="none", choices=list(tensors.ROTATIONS), help="rotate the PN weights")
    back = commands.add_parser("dequantize", help="PN (and F16, BF16, q4_0, q4_1, q8_0) tensors to F32")
    back.add_argument("file", type=Path)
    back.add_argument("output", type=Path)
    options = parser.parse_args(argv)
    try:
        if options.command == "info":
            return _info(options.file)
        if options.command == "validate":
            return _validate(options.file)
        if options.command == "quantize":
            types = convert.quantize(options.file, options.output, mix.load(options.mix), options.rotation, _Progress())
        else:
            types = convert.dequantize(options.file, options.output, _Progress())
    except (gguf.GgufError, convert.ConvertError, mix.MixError, format.BadInput, OSError) as error:
        print(f"engine.pn: {error}", file=sys.stderr)
        return 1
    print(f"{options.output}: " + ", ".join(f"{n} {t}" for t, n in types.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
