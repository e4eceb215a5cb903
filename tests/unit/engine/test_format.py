# SPDX-License-Identifier: Apache-2.0
"""The PN format in Python and C: golden vectors, differential test, defects that must be caught."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.pn import format as pn
from engine.pn import golden
from tests.pn import differential, native, vectors

SHARED = Path(__file__).resolve().parents[4] / "shared/pn"
GOLDEN = golden.TARGET.read_text().splitlines()
SANITIZE = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def shared_files() -> list[Path]:
    files = sorted(SHARED.glob("*.json"))
    if not files:
        pytest.skip(f"no golden vectors in {SHARED}; golden.txt of this repository is checked in their place")
    return files


def compiler(name: str) -> str:
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    return name


def test_shared_vectors_in_python() -> None:
    failures = []
    for path in shared_files():
        file = vectors.read(path)
        failures += [
            f"{path.name} {v.get('note')}: {why}" for v in file.vectors if (why := vectors.check_python(file, v))
        ]
    assert failures == []


def test_golden_file_is_what_the_library_says() -> None:
    assert golden.lines() == GOLDEN


@pytest.mark.parametrize("name", ["gcc", "clang"])
@pytest.mark.parametrize("level", ["-O0", "-O1", "-O2", "-O3", "-O3 -march=native"])
@pytest.mark.parametrize("contract", ["off", "fast"])
def test_vectors_in_c(tmp_path: Path, name: str, level: str, contract: str) -> None:
    checker = native.build(tmp_path / "check", compiler(name), [*level.split(), f"-ffp-contract={contract}"])
    lines = list(GOLDEN)
    for path in sorted(SHARED.glob("*.json")):
        file = vectors.read(path)
        lines += [vectors.as_line(file, v) for v in file.vectors]
    passed, failures = native.run(checker, lines)
    assert failures == {}
    assert passed == len(lines) - 1  # one comment


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_vectors_under_sanitizers(tmp_path: Path, name: str) -> None:
    try:
        checker = native.build(tmp_path / "check", compiler(name), SANITIZE)
    except RuntimeError as error:
        if "lasan" in str(error) or "libclang_rt" in str(error):
            pytest.skip(f"{name} has no sanitizer runtime here")
        raise
    passed, failures = native.run(checker, GOLDEN)
    assert (failures, passed) == ({}, len(GOLDEN) - 1)


def test_wrong_shift_is_caught(tmp_path: Path) -> None:
    """The defect of the original engine's CPU path: shifting by element index."""
    checker = native.build(tmp_path / "check", compiler("cc"))
    _, failures = native.run(checker, GOLDEN, "--wrong-shift")
    kinds = {GOLDEN[i][:3] for i in failures}
    assert {"D 3", "D 4", "T 3", "T 4"} <= kinds
    dots = [i for i, line in enumerate(GOLDEN) if line.startswith("T")]
    assert set(dots) <= set(failures)


def test_python_and_c_agree_on_random_blocks() -> None:
    for kind in pn.TYPES.values():
        assert differential.differences(kind, 6000, seed=3) == {
            "blocks": 6000, "quantized": 0, "decoded": 0, "verdicts": 0,
        }  # fmt: skip


@pytest.mark.soak
def test_python_and_c_agree_on_a_million_blocks() -> None:
    for kind in pn.TYPES.values():
        found = differential.differences(kind, 1_000_000)
        assert found.pop("blocks") == 1_000_000
        assert set(found.values()) == {0}


def test_every_half_is_converted_exactly() -> None:
    """All 65,536 fp16 patterns through the decoder: code z+1 gives d itself."""
    for kind in pn.TYPES.values():
        d = np.arange(65536, dtype=np.uint16).view(np.float16)
        blocks = pn.pack(kind, d, np.full((65536, kind.weights), kind.zero + 1))
        from engine.pn import native as library

        for decoded in (pn.decode(kind, blocks), library.decode(kind, blocks)):
            want = d.astype(np.float32)
            same = decoded[:, 0].view(np.uint32) == want.view(np.uint32)
            assert (same | (np.isnan(want) & np.isnan(decoded[:, 0]))).all()


def test_refused_input_names_the_block() -> None:
    x = np.ones((3, 80), np.float32)
    x[2, 5] = np.nan
    with pytest.raises(pn.BadInput, match="block 2"):
        pn.quantize(pn.PN3T, x)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.pn", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=native.ROOT, check=False)


def test_runner_counts_and_fails(tmp_path: Path) -> None:
    block = pn.quantize(pn.PN4T, np.linspace(-1, 1, 64, dtype=np.float32))
    good = {"note": "made here", "block": block.tobytes().hex(), "w": vectors.bits(pn.decode(pn.PN4T, block))}
    bad = {**good, "w": ["3f800000"] * 64}
    head = {"format": pn.FORMAT, "type": "pn4t", "kind": "decode"}
    file = tmp_path / "pn4t_decode.json"
    file.write_text(json.dumps({**head, "vectors": [good]}))
    done = run(str(file))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "2 passed, 0 failed")
    file.write_text(json.dumps({**head, "vectors": [good, bad]}))
    done = run(str(file))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "2 passed, 2 failed")
    file.write_text("{}")
    done = run(str(file))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert pn.FORMAT in done.stderr
