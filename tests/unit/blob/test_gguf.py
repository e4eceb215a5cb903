# SPDX-License-Identifier: Apache-2.0
"""The bounded GGUF reader: verdicts, PN types, and the check by ranges."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _gguf
from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError
from ansible_collections.tensorless.fleet.plugins.module_utils._gguf_check import check_target

from tests.hub import FakeHub
from tests.hub.jobs import COMMIT, REPO, noise


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}qIQ", len(shape), *shape, kind, offset)


def file(pairs: list[bytes], tensors: list[bytes], version: int = 3, counts: tuple[int, int] | None = None) -> bytes:
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<Iqq", version, tensor_count, pair_count)
    data = head + b"".join(pairs) + b"".join(tensors)
    return data + bytes(-len(data) % 32)


ARCH = pair(b"general.architecture", 8, text(b"llama"))
LAYERS = pair(b"llama.block_count", 4, struct.pack("<I", 30))


def test_ordinary_file(tmp_path: Path) -> None:
    data = file([ARCH, LAYERS], [tensor(b"a", (256, 2), 12, 0), tensor(b"b", (3,), 0, 288)])
    header = _gguf.read_header(data)
    assert header.number("block_count") == 30
    assert [t.size for t in header.tensors] == [288, 12]
    assert header.needed == len(data) + 300
    assert not header.pn
    assert len(_gguf.check(header, len(data) + 288)) == 1
    assert _gguf.check(header, len(data) + 300) == []
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    assert _gguf.describe(str(path)) == {"pn": False, "block_count": 30}


@pytest.mark.parametrize(("kind", "block"), [(124, 80), (125, 64)])
def test_pn_types(kind: int, block: int) -> None:
    header = _gguf.read_header(file([ARCH], [tensor(b"w", (block * 3, 5), kind, 0)]))
    assert header.pn
    assert header.tensors[0].size == 34 * 3 * 5
    with pytest.raises(_gguf.GgufError, match="not a multiple"):
        _gguf.read_header(file([ARCH], [tensor(b"w", (block * 3 + 1,), kind, 0)]))


HUGE = 2**63 - 1
BAD = {
    "magic": b"GGML" + bytes(28),
    "version 1": file([], [], version=1),
    "version 4": file([], [], version=4),
    "big endian": b"GGUF" + struct.pack(">I", 3) + bytes(24),
    "tensor count": file([], [], counts=(HUGE, 0)),
    "negative count": file([], [], counts=(-1, 0)),
    "metadata count": file([], [], counts=(0, HUGE)),
    "empty key": file([pair(b"", 4, bytes(4))], []),
    "same key twice": file([ARCH, ARCH], []),
    "string length": file([pair(b"k", 8, struct.pack("<Q", 2**63))], []),
    "array length": file([pair(b"k", 9, struct.pack("<IQ", 4, 2**62))], []),
    "array of strings": file([pair(b"k", 9, struct.pack("<IQ", 8, 2**60))], []),
    "array of arrays": file([pair(b"k", 9, struct.pack("<IQ", 9, 1))], []),
    "unknown value type": file([pair(b"k", 13, bytes(8))], []),
    "alignment type": file([pair(b"general.alignment", 8, text(b"32"))], []),
    "alignment": file([pair(b"general.alignment", 4, struct.pack("<I", 33))], []),
    "five dimensions": file([], [tensor(b"a", (1, 1, 1, 1, 1), 0, 0)]),
    "negative dimension": file([], [tensor(b"a", (-1,), 0, 0)]),
    "too many elements": file([], [tensor(b"a", (2**40, 2**40), 0, 0)]),
    "unknown type": file([], [tensor(b"a", (32,), 99, 0)]),
    "same tensor twice": file([], [tensor(b"a", (8,), 0, 0), tensor(b"a", (8,), 0, 32)]),
    "overlap": file([], [tensor(b"a", (16,), 0, 0), tensor(b"b", (16,), 0, 32)]),
    "gap": file([], [tensor(b"a", (8,), 0, 0), tensor(b"b", (8,), 0, 96)]),
    "long name": file([], [tensor(b"a" * 64, (8,), 0, 0)]),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    with pytest.raises(_gguf.GgufError):
        _gguf.read_header(BAD[name])


def test_every_cut_is_refused_in_words() -> None:
    data = file([ARCH, LAYERS], [tensor(b"a", (256, 2), 12, 0)])
    used = _gguf.read_header(data)
    assert used.data_start == len(data)
    table_end = len((b"GGUF" + bytes(20)) + ARCH + LAYERS + tensor(b"a", (256, 2), 12, 0))
    for length in range(table_end):
        with pytest.raises(_gguf.GgufError):
            _gguf.read_header(data[:length])


def test_key_that_is_no_utf8_is_accepted() -> None:
    header = _gguf.read_header(file([pair(b"\xff\xfe", 4, bytes(4)), ARCH], []))
    assert len(header.metadata) == 2


def test_large_arrays_are_walked_over() -> None:
    words = struct.pack("<IQ", 8, 5000) + text(b"word") * 5000
    numbers = struct.pack("<IQ", 5, 6000) + bytes(4 * 6000)
    few = struct.pack("<IQ", 4, 3) + struct.pack("<3I", 1, 2, 3)
    header = _gguf.read_header(file([pair(b"w", 9, words), pair(b"n", 9, numbers), pair(b"f", 9, few)], []))
    assert header.metadata == {"w": _gguf.Skipped(5000), "n": _gguf.Skipped(6000), "f": (1, 2, 3)}


def test_check_by_ranges_reads_the_header_only(hub: FakeHub) -> None:
    data = file([ARCH], [tensor(b"w", (80 * 1000, 100), 124, 0)]) + bytes(34 * 1000 * 100)
    hub.add(REPO, COMMIT, "f.gguf", data)
    finding = check_target(f"{hub.url}/{REPO}/resolve/{COMMIT}/f.gguf", {})
    assert finding.faults == []
    assert "a PN file" in finding.lines()[0]
    assert hub.bytes_sent("cdn") <= 64 << 10
    hub.add(REPO, COMMIT, "cut.gguf", data[:-1])
    assert len(check_target(f"{hub.url}/{REPO}/resolve/{COMMIT}/cut.gguf", {}).faults) == 1


def test_check_says_what_else_is_there(hub: FakeHub, tmp_path: Path) -> None:
    hub.add(REPO, COMMIT, "p.gguf", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(BlobError, match="Git LFS pointer"):
        check_target(f"{hub.url}/{REPO}/resolve/{COMMIT}/p.gguf", {})
    other = tmp_path / "x.gguf"
    other.write_bytes(noise(100)[4:])
    with pytest.raises(BlobError, match="no GGUF file"):
        check_target(str(other), {})
    with pytest.raises(BlobError, match="could not read"):
        check_target(str(tmp_path / "absent"), {})
