# SPDX-License-Identifier: Apache-2.0
"""A bounded reader of GGUF headers: reads no tensor data, believes no count, and never reads past what it is given.

Verdicts follow ggml's loader (versions 2 and 3, little endian). Types 124 and 125 are PN weights (34-byte blocks).
Private to the collection; may change at any time.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, Optional, Protocol, Union

PN_TYPES = (124, 125)
HEADER_LIMIT = 256 << 20  # the largest known headers (tokenizers) are about 20 MB
NAME_LIMIT = 64
KEPT_ARRAY = 4096
KEPT_STRING = 64 << 10

# ggml type: name, weights in a block, bytes of a block
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
    124: ("PN3T", 80, 34), 125: ("PN4T", 64, 34),
}  # fmt: skip

# metadata type: struct code
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

Value = Union[int, float, bool, str, tuple[Union[int, float, bool], ...], "Skipped"]


class GgufError(ValueError):
    """The bytes are no GGUF header that a loader would take; says where and why."""


class Skipped(NamedTuple):
    """Stands for an array or string that was walked over and not kept."""

    length: int


class Tensor(NamedTuple):
    """One entry of the tensor table. `offset` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]  # as stored: the first one is the row's length
    type: int
    offset: int
    size: int

    @property
    def type_name(self) -> str:
        return TYPES[self.type][0]


class Header(NamedTuple):
    """What stands before the data."""

    version: int
    metadata: dict[str, Value]
    tensors: list[Tensor]
    alignment: int
    data_start: int

    @property
    def pn(self) -> bool:
        return any(t.type in PN_TYPES for t in self.tensors)

    def number(self, key: str) -> Optional[int]:
        """An integer of the metadata below the architecture's own prefix, like `block_count`."""
        value = self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def needed(self) -> int:
        """The least size of a file in which every tensor has its whole region."""
        return self.data_start + max((t.offset + t.size for t in self.tensors), default=0)


class Readable(Protocol):
    """What the reader needs of a file."""

    def read(self, size: int, /) -> bytes: ...


class _Cursor:
    """Takes bytes in order and refuses what cannot be there."""

    def __init__(self, stream: Readable, total: Optional[int]) -> None:
        self._stream = stream
        self._end = min(HEADER_LIMIT, total if total is not None else HEADER_LIMIT)
        self.position = 0

    @property
    def left(self) -> int:
        return self._end - self.position

    def expect(self, count: int, what: str) -> None:
        if count > self.left:
            raise GgufError(f"at byte {self.position}: {what} needs {count} bytes, but only {self.left} can follow")

    def take(self, count: int, what: str) -> bytes:
        self.expect(count, what)
        parts = []
        missing = count
        while missing:
            part = self._stream.read(missing)
            if not part:
                raise GgufError(f"the file ends at byte {self.position + count - missing}, inside {what}")
            parts.append(part)
            missing -= len(part)
        self.position += count
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def skip(self, count: int, what: str) -> None:
        self.expect(count, what)
        while count:
            count -= len(self.take(min(count, 1 << 20), what))

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def text(self, what: str) -> bytes:
        length = self.number("Q", f"the length of {what}")
        self.expect(length, what)
        return self.take(length, what)


def read_header(source: Union[bytes, Readable], total: Optional[int] = None) -> Header:
    """Reads a header from bytes or a stream at its start. TOTAL is the file's size where it is known."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        total = len(source) if total is None else total
        source = io.BytesIO(bytes(source))
    cursor = _Cursor(source, total)
    magic = cursor.take(4, "the magic")
    if magic != b"GGUF":
        raise GgufError(f"no GGUF file: it begins with {magic!r}")
    version = cursor.number("I", "the version")
    if version & 0xFFFF == 0:
        raise GgufError(f"version {version:#x}: the file is big-endian, which is not supported")
    if version not in (2, 3):
        raise GgufError(f"version {version} is not supported (2 and 3 are)")
    tensor_count = cursor.number("q", "the tensor count")
    pair_count = cursor.number("q", "the metadata count")
    # The least that one entry takes: 8 + 1 + 4 + 1 bytes of metadata, 8 + 4 + 4 + 8 of a tensor.
    if not 0 <= pair_count <= cursor.left // 14:
        raise GgufError(f"{pair_count} metadata entries cannot fit in the {cursor.left} bytes that can follow")
    if not 0 <= tensor_count <= cursor.left // 24:
        raise GgufError(f"{tensor_count} tensors cannot fit in the {cursor.left} bytes that can follow")
    metadata = _read_metadata(cursor, pair_count)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment <= 0 or alignment & (alignment - 1):
        raise GgufError(f"general.alignment is {alignment!r}, which is no power of two")
    tensors = _read_tensors(cursor, tensor_count, alignment)
    start = -(-cursor.position // alignment) * alignment
    return Header(version, metadata, tensors, alignment, start)


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    seen = set()
    for _entry in range(count):
        raw = cursor.text("a metadata key")
        key = raw.decode("utf-8", "replace")
        if not raw:
            raise GgufError(f"at byte {cursor.position}: an empty metadata key")
        if raw in seen:
            raise GgufError(f"metadata key {key!r} is there twice")
        seen.add(raw)
        kind = cursor.number("I", f"the type of {key!r}")
        if key == "general.alignment" and kind != 4:
            raise GgufError("general.alignment is not of type uint32")
        metadata[key] = _read_value(cursor, kind, key)
    return metadata


def _read_value(cursor: _Cursor, kind: int, key: str) -> Value:
    what = f"the value of {key!r}"
    if kind in _SCALARS:
        value: Value = cursor.number(_SCALARS[kind], what)
        return value
    if kind == _STRING:
        text = cursor.text(what)
        return text.decode("utf-8", "replace") if len(text) <= KEPT_STRING else Skipped(len(text))
    if kind != _ARRAY:
        raise GgufError(f"{key!r} has the unknown type {kind}")
    inner = cursor.number("I", what)
    count = cursor.number("Q", what)
    if inner == _STRING:
        cursor.expect(8 * count, what)
        for _item in range(count):
            cursor.skip(cursor.number("Q", what), what)
        return Skipped(count)
    if inner not in _SCALARS:
        raise GgufError(f"{key!r} is an array of the type {inner}, which arrays cannot hold")
    code = _SCALARS[inner]
    width = struct.calcsize("<" + code)
    cursor.expect(width * count, what)
    if count > KEPT_ARRAY:
        cursor.skip(width * count, what)
        return Skipped(count)
    return struct.unpack(f"<{count}{code}", cursor.take(width * count, what))


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> list[Tensor]:
    tensors: list[Tensor] = []
    seen = set()
    expected = 0
    for _entry in range(count):
        raw = cursor.text("a tensor's name")
        name = raw.decode("utf-8", "replace")
        if len(raw) >= NAME_LIMIT:
            raise GgufError(f"tensor name {name!r} is longer than {NAME_LIMIT - 1} bytes")
        if raw in seen:
            raise GgufError(f"tensor {name!r} is there twice")
        seen.add(raw)
        dimensions = cursor.number("I", f"the shape of {name!r}")
        if dimensions > 4:
            raise GgufError(f"tensor {name!r} has {dimensions} dimensions; 4 is the most")
        shape = tuple(cursor.number("q", f"the shape of {name!r}") for _axis in range(dimensions))
        kind = cursor.number("I", f"the type of {name!r}")
        offset = cursor.number("Q", f"the offset of {name!r}")
        tensor = Tensor(name, shape, kind, offset, _tensor_size(name, shape, kind))
        if offset != expected:
            raise GgufError(f"tensor {name!r} is at offset {offset}; {expected} follows from those before it")
        expected = -(-(offset + tensor.size) // alignment) * alignment
        tensors.append(tensor)
    return tensors


def _tensor_size(name: str, shape: tuple[int, ...], kind: int) -> int:
    if kind not in TYPES:
        raise GgufError(f"tensor {name!r} has the unknown type {kind}")
    type_name, block, width = TYPES[kind]
    elements = 1
    for axis in shape:
        if axis < 0:
            raise GgufError(f"tensor {name!r} has a negative dimension {axis}")
        elements *= axis
    if elements >= 1 << 63:
        raise GgufError(f"tensor {name!r} has more elements than any file can hold")
    row = shape[0] if shape else 1
    if row % block:
        raise GgufError(f"tensor {name!r} of type {type_name} has rows of {row}, not a multiple of {block}")
    return elements // block * width


def read_file(path: str) -> tuple[Header, int]:
    """The header of a file and the file's size."""
    with open(path, "rb") as stream:
        total = os.fstat(stream.fileno()).st_size
        return read_header(stream, total), total


def describe(path: str) -> dict[str, Any]:
    """What the planner asks of a model file: whether it holds PN weights, and its number of layers."""
    header, _total = read_file(path)
    return {"pn": header.pn, "block_count": header.number("block_count")}


def check(header: Header, total: int) -> list[str]:
    """The structural faults of a file of TOTAL bytes: tensors whose region is not all there."""
    faults = []
    for tensor in header.tensors:
        end = header.data_start + tensor.offset + tensor.size
        if end > total:
            start = header.data_start + tensor.offset
            faults.append(
                f"tensor {tensor.name!r} ({tensor.type_name}) needs bytes {start} to {end}, but the file has {total}"
            )
    return faults


class RangeStream:
    """A file read through ranges: FETCH(start, length) gives bytes. Asks for more at a time the further it gets."""

    def __init__(self, fetch: Callable[[int, int], bytes], total: int) -> None:
        self._fetch = fetch
        self._total = total
        self._position = 0
        self._buffer = b""
        self._step = 64 << 10
        self.fetched = 0

    def seed(self, first: bytes) -> None:
        """Uses bytes of the start that were fetched already."""
        self._buffer = first
        self._position = self.fetched = len(first)

    def read(self, size: int, /) -> bytes:
        if not self._buffer and self._position < self._total:
            length = min(max(self._step, size), self._total - self._position)
            self._buffer = self._fetch(self._position, length)
            self._position += len(self._buffer)
            self.fetched += len(self._buffer)
            self._step = min(self._step * 4, 4 << 20)
        part, self._buffer = self._buffer[:size], self._buffer[size:]
        return part
