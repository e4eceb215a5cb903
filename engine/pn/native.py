# SPDX-License-Identifier: Apache-2.0
"""Runs `c/pn.c` from Python on all cores, when a C compiler is there; numpy does the same work otherwise.

The library is compiled once into the user's cache, under a name that covers the source, the flags and the processor's
abilities.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from engine.pn import format as pn

_SOURCE = Path(__file__).with_name("c")


def _flags() -> list[str]:
    try:
        wide = " avx2 " in f" {Path('/proc/cpuinfo').read_text()} ".replace("\n", " ")
    except OSError:
        wide = False
    return [
        "-std=c99",
        "-O3",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-shared",
        "-fPIC",
        *(["-mavx2"] if wide else []),
    ]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None without a compiler."""
    flags = _flags()
    key = hashlib.sha256(
        b"".join((_SOURCE / n).read_bytes() for n in ("pn.c", "pn.h")) + " ".join(flags).encode()
    ).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tensorless"
    target = folder / f"libpn-{key[:16]}.so"
    try:
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / "libpn.so"
                command = [os.environ.get("CC", "cc"), *flags, "-o", str(made), str(_SOURCE / "pn.c"), "-lm"]
                subprocess.run(command, check=True, capture_output=True)
                made.replace(target)
        lib = ctypes.CDLL(str(target))
    except (OSError, subprocess.CalledProcessError):
        return None
    lib.pn_quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    lib.pn_decode.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    lib.pn_decode.restype = None
    return lib


def _parts(blocks: int, threads: int) -> list[tuple[int, int]]:
    step = max(1, -(-blocks // threads))
    return [(b, min(b + step, blocks)) for b in range(0, blocks, step)]


def quantize(kind: pn.PnType, values: pn.F32, threads: int | None = None) -> pn.U8:
    """`format.quantize`, on `threads` cores (default: all that this process may use)."""
    lib, count = library(), threads or len(os.sched_getaffinity(0))
    groups = np.ascontiguousarray(values, np.float32).reshape(-1, kind.weights)
    out = np.empty((len(groups), pn.BLOCK_BYTES), np.uint8)

    def work(part: tuple[int, int]) -> int | None:
        first, last = part
        if lib is None:
            try:
                out[first:last] = pn.quantize(kind, groups[first:last])
            except pn.BadInput as error:
                return first + error.block
            return None
        bad = ctypes.c_int64(-1)
        source, target = groups[first:last].ctypes.data, out[first:last].ctypes.data
        status = lib.pn_quantize(kind.bits, source, target, last - first, ctypes.byref(bad))
        return first + bad.value if status else None

    with ThreadPoolExecutor(count) as pool:
        bad = [b for b in pool.map(work, _parts(len(groups), count)) if b is not None]
    if bad:
        raise pn.BadInput(min(bad))
    return out


def decode(kind: pn.PnType, blocks: pn.U8) -> pn.F32:
    """`format.decode`."""
    lib, data = library(), np.ascontiguousarray(pn.as_blocks(blocks))
    if lib is None:
        return pn.decode(kind, data)
    out = np.empty((len(data), kind.weights), np.float32)
    lib.pn_decode(kind.bits, data.ctypes.data, out.ctypes.data, len(data))
    return out
