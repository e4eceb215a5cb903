# SPDX-License-Identifier: Apache-2.0
"""Counts issue slots per weight in sm_60 SASS.

``python -m engine.kernels.slots FILE.sass [...]`` (output of ``cuobjdump -sass``) prints one row for each ``pn_gemv``
kernel; "group" marks those for several products of a launch. A slot is one issue of a full-rate instruction of compute
capability 6.0; CUDA's table of instruction throughput gives shifts, bit fields, compares and shuffles half that rate,
conversions a quarter.
``loop`` is the innermost loop that holds the decode, ``whole`` is everything a warp issues for its weights, with
prologue, reduction and store, for the row length compiled in (for any-length kernels: at 64 or 80 blocks).
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?P\d\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
_NAME = re.compile(r"_Z\d+pn_gemvILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELb(\d)EE")
_HALF_RATE = ("SHL", "SHR", "SHF", "BFE", "BFI", "PRMT", "ISETP", "IMNMX", "SHFL", "LEA", "ISCADD", "XMAD")
_QUARTER_RATE = ("F2F", "F2I", "I2F", "I2I", "MUFU")
# What the file that is compiled alone for counting instantiates: (bits, columns, rows, warps, blocks or 0).
KERNELS = ((3, 1, 64), (4, 1, 80), (4, 1, 96), (4, 1, 272), (3, 1, 0), (4, 1, 0), (3, 2, 0), (3, 4, 0), (4, 8, 0))
LIMITS = {3: 2.6, 4: 2.9}


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    operands: str

    @property
    def slots(self) -> int:
        base = self.name.split(".")[0]
        return 4 if base in _QUARTER_RATE else 2 if base in _HALF_RATE else 1

    @property
    def target(self) -> int | None:
        found = re.search(r"0x([0-9a-f]+)", self.operands)
        return int(found[1], 16) if self.name.split(".")[0] == "BRA" and found else None


@dataclass(frozen=True)
class Count:
    """One kernel; figures are per weight and column."""

    bits: int
    columns: int
    rows: int
    warps: int
    blocks: int
    one: bool  # False: the kernel of a group of products
    loop: float
    whole: float
    instructions: float

    @property
    def label(self) -> str:
        length = self.blocks * (80 if self.bits == 3 else 64) or "any"
        return f"pn{self.bits}t K={length} x{self.columns}" + ("" if self.one else " group")


def functions(text: str) -> dict[str, list[Instruction]]:
    """Instructions of each kernel, by mangled name."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        head = re.match(r"\s*Function : (\S+)", line)
        if head:
            current = found.setdefault(head[1], [])
        elif match := _LINE.match(line):
            current.append(Instruction(int(match[1], 16), match[2], match[3]))
    return found


def _loop(code: list[Instruction]) -> tuple[int, int] | None:
    """The backward branch that encloses the most FFMA, as indices."""
    # Every fourth 8-byte word is scheduling control: a branch to such a word means the instruction after it.
    index = {i.address - k: n for n, i in enumerate(code) for k in ((0, 8) if i.address % 32 == 8 else (0,))}
    loops = [(index[i.target], n) for n, i in enumerate(code) if i.target is not None and i.target < i.address]
    loops = [(a, b) for a, b in loops if any(i.name.startswith("FFMA") for i in code[a : b + 1])]
    return max(loops, key=lambda ab: sum(i.name.startswith("FFMA") for i in code[ab[0] : ab[1] + 1]), default=None)


def count(name: str, code: list[Instruction]) -> Count | None:
    """The figures of one kernel, None for another kernel than pn_gemv."""
    match = _NAME.match(name)
    if not match:
        return None
    bits, columns, rows, warps, blocks, one = (int(g) for g in match.groups())
    if any(i.name == "FFMA.FTZ" for i in code):
        raise SystemExit(f"{name}: holds FFMA.FTZ, which flushes the subnormals that the decode rests on")
    end = next((n for n, i in enumerate(code) if i.name == "EXIT" and n > len(code) // 2), len(code) - 1)
    code = code[: end + 1]
    words = 4 if columns == 1 else 1
    per_step = rows * words * (10 if bits == 3 else 8) * columns
    length = blocks or (64 if bits == 3 else 80)
    steps = -(-(length * 8 // words) // 32)
    steps_a_warp = -(-steps // warps)
    total = sum(i.slots for i in code)
    loop = _loop(code)
    body = code[loop[0] : loop[1] + 1] if loop else code
    slots = sum(i.slots for i in body)
    whole = total + slots * (steps_a_warp - 1) if loop else total
    return Count(
        bits, columns, rows, warps, blocks, bool(one),
        slots / per_step,
        whole / (per_step * steps_a_warp),
        len(body) / per_step,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.slots", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.sass")
    parser.add_argument(
        "--gate",
        action="store_true",
        help="fail when a kernel of the documented shapes (row length compiled in, one warp a row) misses its limit",
    )
    options = parser.parse_args()
    counts = [c for f in options.files for name, code in functions(f.read_text()).items() if (c := count(name, code))]
    if not counts:
        print("slots: no pn_gemv kernel in these files", file=sys.stderr)
        return 2
    print(f"{'kernel':<24}{'rows':>5}{'warps':>6}{'instr/w':>9}{'loop/w':>8}{'whole/w':>9}")
    failed = False
    for c in sorted(counts, key=lambda c: (c.columns, c.bits, c.blocks == 0, c.blocks, c.warps, not c.one)):
        over = c.columns == 1 and c.blocks and c.warps == 1 and c.loop > LIMITS[c.bits]
        failed = failed or bool(over)
        note = f"  over {LIMITS[c.bits]}" if over else ""
        print(f"{c.label:<24}{c.rows:>5}{c.warps:>6}{c.instructions:>9.2f}{c.loop:>8.2f}{c.whole:>9.2f}{note}")
    return int(failed and options.gate)


if __name__ == "__main__":
    sys.exit(main())
