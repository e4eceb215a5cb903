# SPDX-License-Identifier: Apache-2.0
"""GGUF files: a bounded header reader, and a writer that streams tensor data.

Nothing in the header is trusted: counts, lengths and shapes have limits before memory is taken, and each limit that is
broken gives one message. Metadata that is not looked at travels as bytes, so a rewritten file keeps it exactly.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

MAX_COUNT = 1_000_000  # tensors, metadata pairs
MAX_NAME = 65_535
MAX_STRING = 64 << 20
MAX_ARRAY = 64 << 20
MAX_HEADER = 1 << 30
MAX_NESTING = 4

_SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """A file that is no GGUF file, or a broken one; the message names the file."""


@dataclass(frozen=True)
class GgmlType:
    """A tensor type: name, weights and bytes of a block, and where a block keeps its fp16 scales."""

    name: str
    weights: int
    size: int
    scales: tuple[int, ...] = ()


TYPES: dict[int, GgmlType] = {
    0: GgmlType("f32", 1, 4), 1: GgmlType("f16", 1, 2), 30: GgmlType("bf16", 1, 2), 28: GgmlType("f64", 1, 8),
    24: GgmlType("i8", 1, 1), 25: GgmlType("i16", 1, 2), 26: GgmlType("i32", 1, 4), 27: GgmlType("i64", 1, 8),
    2: GgmlType("q4_0", 32, 18, (0,)), 3: GgmlType("q4_1", 32, 20, (0, 2)), 6: GgmlType("q5_0", 32, 22, (0,)),
    7: GgmlType("q5_1", 32, 24, (0, 2)), 8: GgmlType("q8_0", 32, 34, (0,)), 9: GgmlType("q8_1", 32, 36, (0, 2)),
    10: GgmlType("q2_K", 256, 84, (80, 82)), 11: GgmlType("q3_K", 256, 110, (108,)),
    12: GgmlType("q4_K", 256, 144, (0, 2)), 13: GgmlType("q5_K", 256, 176, (0, 2)),
    14: GgmlType("q6_K", 256, 210, (208,)), 15: GgmlType("q8_K", 256, 292),
    16: GgmlType("iq2_xxs", 256, 66, (0,)), 17: GgmlType("iq2_xs", 256, 74, (0,)),
    18: GgmlType("iq3_xxs", 256, 98, (0,)), 19: GgmlType("iq1_s", 256, 50, (0,)),
    20: GgmlType("iq4_nl", 32, 18, (0,)), 21: GgmlType("iq3_s", 256, 110, (0,)),
    22: GgmlType("iq2_s", 256, 82, (0,)), 23: GgmlType("iq4_xs", 256, 136, (0,)), 29: GgmlType("iq1_m", 256, 56),
    34: GgmlType("tq1_0", 256, 54, (52,)), 35: GgmlType("tq2_0", 256, 66, (64,)), 39: GgmlType("mxfp4", 32, 17),
    40: GgmlType("nvfp4", 64, 36), 41: GgmlType("q1_0", 128, 18, (0,)), 42: GgmlType("q2_0", 64, 18, (0,)),
    124: GgmlType("pn3t", 80, 34, (0,)), 125: GgmlType("pn4t", 64, 34, (0,)),
}  # fmt: skip
IDS = {t.name: i for i, t in TYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """One tensor; `shape` is in ggml's order, the row length first."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def type(self) -> GgmlType | None:
        return TYPES.get(self.type_id)

    @property
    def type_name(self) -> str:
        return self.type.name if self.type else f"type {self.type_id}"

    @property
    def row(self) -> int:
        return self.shape[0]

    @property
    def count(self) -> int:
        total = 1
        for n in self.shape:
            total *= n
        return total

    def size(self) -> int | None:
        """Bytes by type and shape; None for an unknown type or rows that are no whole number of blocks."""
        if self.type is None or self.row % self.type.weights:
            return None
        return self.count // self.type.weights * self.type.size


@dataclass
class Gguf:
    """A file's header. `pairs` holds each metadata pair as the bytes after its key."""

    path: Path
    version: int
    pairs: dict[str, bytes]
    tensors: list[Tensor]
    data_start: int
    alignment: int
    file_size: int

    def value(self, key: str) -> Any:
        """A scalar or string of the metadata, None when absent or an array."""
        raw = self.pairs.get(key)
        if raw is None:
            return None
        kind = struct.unpack_from("<I", raw)[0]
        if kind == _STRING:
            return raw[12:].decode("utf-8", "replace")
        return struct.unpack_from(_SCALARS[kind], raw, 4)[0] if kind in _SCALARS else None

    def region(self, tensor: Tensor) -> int:
        """Bytes of the file from the tensor's start up to the next tensor or the end."""
        later = [t.offset for t in self.tensors if t.offset > tensor.offset]
        end = min([self.file_size, *(self.data_start + o for o in later)])
        return max(0, end - self.data_start - tensor.offset)

    def problem(self, tensor: Tensor) -> str | None:
        """Why the tensor's data cannot be read, or None."""
        size = tensor.size()
        if tensor.type is None:
            return f"has type {tensor.type_id}, which is not known"
        if size is None:
            return f"has rows of {tensor.row} weights, not a multiple of {tensor.type.weights} ({tensor.type_name})"
        if self.region(tensor) < size:
            return f"needs {size} bytes and has {self.region(tensor)}: the file is truncated or its offsets are wrong"
        return None

    def data(self, tensor: Tensor) -> NDArray[np.uint8]:
        """The tensor's bytes, mapped from the file."""
        problem = self.problem(tensor)
        if problem:
            raise GgufError(f"{self.path}: tensor {tensor.name} {problem}")
        size = tensor.size() or 0
        if size == 0:
            return np.empty(0, np.uint8)
        return np.memmap(self.path, np.uint8, "r", self.data_start + tensor.offset, (size,))


class _Reader:
    def __init__(self, stream: IO[bytes], path: Path, size: int) -> None:
        self.stream, self.path, self.left = stream, path, min(size, MAX_HEADER)

    def fail(self, why: str) -> GgufError:
        return GgufError(f"{self.path}: {why}")

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise self.fail(f"the header ends early: {count} more bytes needed, {self.left} left")
        self.left -= count
        data = self.stream.read(count)
        if len(data) != count:
            raise self.fail("the header ends early")
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def name(self) -> str:
        length = self.number("<Q")
        if length > MAX_NAME:
            raise self.fail(f"a name of {length} bytes; the limit is {MAX_NAME}")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail("a name is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> bytes:
        """The bytes of one value, its type not included."""
        if kind in _SCALARS:
            return self.take(struct.calcsize(_SCALARS[kind]))
        if kind == _STRING:
            head = self.take(8)
            length = struct.unpack("<Q", head)[0]
            if length > MAX_STRING:
                raise self.fail(f"a string of {length} bytes; the limit is {MAX_STRING}")
            return head + self.take(length)
        if kind != _ARRAY or depth >= MAX_NESTING:
            raise self.fail(f"metadata of type {kind}, which is not known or nested too deep")
        head = self.take(12)
        inner, count = struct.unpack("<IQ", head)
        if count > MAX_ARRAY:
            raise self.fail(f"an array of {count} values; the limit is {MAX_ARRAY}")
        if inner in _SCALARS:
            return head + self.take(count * struct.calcsize(_SCALARS[inner]))
        return head + b"".join(self.value(inner, depth + 1) for _ in range(count))


def read(path: Path) -> Gguf:
    """The header of a GGUF file (version 2 or 3, little-endian)."""
    try:
        with path.open("rb") as stream:
            return _read(_Reader(stream, path, os.fstat(stream.fileno()).st_size), stream, path)
    except OSError as error:
        raise GgufError(f"{path}: cannot be read: {error.strerror}") from error


def _read(reader: _Reader, stream: IO[bytes], path: Path) -> Gguf:
    size = os.fstat(stream.fileno()).st_size
    if size < 24 or reader.take(4) != b"GGUF":
        raise reader.fail("is no GGUF file (it does not begin with GGUF)")
    version = reader.number("<I")
    if version not in (2, 3):
        raise reader.fail(f"is GGUF version {version}; versions 2 and 3, little-endian, can be read")
    n_tensors, n_pairs = reader.number("<Q"), reader.number("<Q")
    if n_tensors > MAX_COUNT or n_pairs > MAX_COUNT:
        raise reader.fail(f"announces {n_tensors} tensors and {n_pairs} metadata pairs; the limit is {MAX_COUNT}")
    pairs: dict[str, bytes] = {}
    for _ in range(n_pairs):
        key, kind = reader.name(), reader.number("<I")
        if key in pairs:
            raise reader.fail(f"has the metadata key {key!r} twice")
        pairs[key] = struct.pack("<I", kind) + reader.value(kind)
    tensors: list[Tensor] = []
    names: set[str] = set()
    for _ in range(n_tensors):
        name, dims = reader.name(), reader.number("<I")
        if not 1 <= dims <= 4:
            raise reader.fail(f"tensor {name} has {dims} dimensions; 1 to 4 are possible")
        shape = tuple(reader.number("<Q") for _ in range(dims))
        tensor = Tensor(name, shape, reader.number("<I"), reader.number("<Q"))
        if name in names or min(shape) < 1 or tensor.count >= 1 << 62:
            raise reader.fail(f"tensor {name} is there twice, or its shape {shape} is impossible")
        names.add(name)
        tensors.append(tensor)
    file = Gguf(path, version, pairs, tensors, 0, 32, size)
    alignment = file.value("general.alignment")
    if alignment is not None:
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise reader.fail(f"general.alignment is {alignment}; needed: a power of two")
        file.alignment = alignment
    file.data_start = -(-stream.tell() // file.alignment) * file.alignment
    return file


def string_value(text: str) -> bytes:
    """A metadata string as it stands after its key."""
    return struct.pack("<IQ", _STRING, len(text.encode())) + text.encode()


def write(
    path: Path,
    pairs: dict[str, bytes],
    tensors: Iterable[tuple[str, tuple[int, ...], int]],
    fill: Callable[[int, IO[bytes]], None],
    alignment: int = 32,
) -> None:
    """Write a file: `fill(i, stream)` writes the data of tensor i. The name appears only once all of it is there."""
    placed: list[Tensor] = []
    offset = 0
    for name, shape, type_id in tensors:
        tensor = Tensor(name, shape, type_id, offset)
        placed.append(tensor)
        offset += -(-(tensor.size() or 0) // alignment) * alignment
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(placed), len(pairs)))
    for key, raw in pairs.items():
        head += struct.pack("<Q", len(key.encode())) + key.encode() + raw
    for t in placed:
        head += struct.pack("<Q", len(t.name.encode())) + t.name.encode() + struct.pack("<I", len(t.shape))
        head += struct.pack(f"<{len(t.shape)}QIQ", *t.shape, t.type_id, t.offset)
    start = -(-len(head) // alignment) * alignment
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as stream:
            stream.write(head)
            for i, t in enumerate(placed):
                stream.write(bytes(start + t.offset - stream.tell()))
                fill(i, stream)
                if stream.tell() != start + t.offset + (t.size() or 0):
                    raise GgufError(f"{path}: tensor {t.name} was written with a wrong size")
            stream.write(bytes(start + offset - stream.tell()))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
