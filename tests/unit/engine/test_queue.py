# SPDX-License-Identifier: Apache-2.0
"""The patch queue: each anchor once, the pinned base, provenance; and rules for the kernels' source."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from engine.kernels import slots
from engine.patches import apply

ROOT = apply.ROOT
ARCHIVE = ROOT / ".build/engine/download" / apply.load()["base"]["file"]
NVCC = ROOT / ".build/engine/cuda124/bin/nvcc"
CUDA = ROOT / "engine/patches/src/ggml-cuda"


def archive() -> Path:
    """The pinned sdist: already there, or downloaded within 90 seconds."""
    if not ARCHIVE.exists():
        code = "from engine.patches import apply as a; a.fetch(a.ROOT / '.build/engine/download', a.load()['base'])"
        try:
            done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=90, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip("the pinned llama.cpp could not be downloaded within 90 seconds")
        if done.returncode:
            pytest.skip("the pinned llama.cpp could not be downloaded")
    return ARCHIVE


def test_every_anchor_matches_once_in_the_pinned_base() -> None:
    queue = apply.load()
    apply.check_archive(archive(), queue["base"])
    wanted = {f"{queue['base']['folder']}/{e['file']}" for e in queue["edit"]}
    new = {f"{queue['base']['folder']}/{f['to']}" for f in queue["file"]}
    texts: dict[str, str] = {}
    with tarfile.open(ARCHIVE) as tar:
        for member in tar:
            assert member.name not in new
            if member.name in wanted:
                stream = tar.extractfile(member)
                assert stream
                texts[member.name] = stream.read().decode()
    assert wanted == set(texts)
    for change in queue["edit"]:
        name = f"{queue['base']['folder']}/{change['file']}"
        texts[name] = apply.edit(texts[name], change)
    header = texts[f"{queue['base']['folder']}/ggml/include/ggml.h"]
    assert "GGML_TYPE_PN4T    = 125" in header


@pytest.mark.parametrize("text", ["nothing here", "one anchor, another anchor"])
def test_anchor_that_is_absent_or_twice_there_stops(text: str) -> None:
    change = {"file": "a.c", "anchor": "anchor", "text": "x", "place": "after", "why": ""}
    with pytest.raises(apply.QueueError, match=r"a\.c: the anchor .* occurs [02] times"):
        apply.edit(text, change)


def test_places() -> None:
    change = {"file": "a.c", "anchor": "B", "text": "x", "why": ""}
    assert [apply.edit("aBc", {**change, "place": p}) for p in ("before", "after", "replace")] == [
        "axBc",
        "aBxc",
        "axc",
    ]


def test_another_archive_is_refused(tmp_path: Path) -> None:
    fake = tmp_path / "llama.tar.gz"
    with tarfile.open(fake, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("x"), io.BytesIO())
    command = [sys.executable, "-m", "engine.patches.apply", "--archive", str(fake), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "sha256 is" in done.stderr
    assert not (tmp_path / "out").exists()


def test_provenance_names_everything() -> None:
    queue = apply.load()
    text = apply.provenance(queue, "1" * 64, "2" * 64)
    for part in (queue["base"]["sha256"], "1" * 64, "2" * 64):
        assert part in text
    for change in queue["edit"]:
        assert f"| `{change['file']}` |" in text
        assert change["why"]
    for issue in queue["issue"]:
        assert issue["text"] in text


def test_subnormal_path_uses_only_the_fma_that_keeps_subnormals() -> None:
    source = (CUDA / "pn-gemv.cuh").read_text()
    kernel = source[source.index("pn_rows(const pn_product") : source.index("// The reference: shift, mask")]
    code = re.sub(r"//.*", "", kernel)
    assert code.count("__fmaf_ieee_rn(") == 2
    assert not re.findall(r"\bfmaf\(|__fmaf_rn\(|\bfma\(|__fmul_rn\(", code)
    # No plain product of decoded bits either: they appear in the one FMA only.
    assert code.count("__uint_as_float(") == 1


def test_flushing_fma_in_sass_is_refused() -> None:
    code = [slots.Instruction(8, "FFMA.FTZ", "R0, R1, R2, R3")]
    with pytest.raises(SystemExit, match="flushes"):
        slots.count("_Z7pn_gemvILi3ELi1ELi4ELi1ELi64ELb1EEv8pn_groupPKfil", code)


def test_slots_count_rates() -> None:
    text = (
        "\t\tFunction : _Z7pn_gemvILi3ELi1ELi4ELi1ELi64ELb1EEvx\n"
        "        /*0008*/                   MOV R1, c[0x0][0x20] ;     /* 0x00 */\n"
        "        /*0010*/                   SHR.U32 R3, R3, 0x10 ;     /* 0x00 */\n"
        "        /*0018*/                   FFMA R4, R4, R5, R6 ;      /* 0x00 */\n"
        "        /*0028*/                   F2F.F32.F16 R4, R4 ;       /* 0x00 */\n"
        "        /*0030*/               @P0 BRA 0x8 ;                  /* 0x00 */\n"
        "        /*0038*/                   EXIT ;                     /* 0x00 */\n"
    )
    ((name, code),) = slots.functions(text).items()
    assert [i.slots for i in code] == [1, 2, 1, 4, 1, 1]
    found = slots.count(name, code)
    assert found
    assert found.loop == pytest.approx(9 / 160)


@pytest.mark.skipif(
    not NVCC.exists(), reason="no CUDA 12 compiler: engine/kernels/toolchain.sh .build/engine/cuda124 fetches one"
)
def test_sm60_kernels_do_not_spill_and_stay_within_their_slots(tmp_path: Path) -> None:
    cubin = tmp_path / "count.cubin"
    command = [str(NVCC), "-std=c++17", "-arch=sm_60", "-use_fast_math", "-cubin", "-Xptxas", "-v", f"-I{CUDA}"]
    done = subprocess.run(
        [*command, "-o", str(cubin), str(ROOT / "engine/kernels/count.cu")], capture_output=True, text=True, check=True
    )
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr + done.stdout)
    assert spills
    assert set(spills) == {("0", "0")}
    sass = subprocess.run(
        [str(NVCC.with_name("cuobjdump")), "-sass", str(cubin)], capture_output=True, text=True, check=True
    )
    counts = [c for n, code in slots.functions(sass.stdout).items() if (c := slots.count(n, code))]
    fixed = [c for c in counts if c.columns == 1 and c.blocks and c.warps == 1]
    assert {(c.bits, c.blocks) for c in fixed} == {(3, 64), (4, 80), (4, 96), (4, 272)}
    assert all(c.loop <= slots.LIMITS[c.bits] for c in fixed)


def test_cpu_products_against_the_format(tmp_path: Path) -> None:
    """The CPU backend's products, plain and AVX2, by one row and by many: one-hot activations return each weight."""
    cc = shutil.which("cc")
    if not cc:
        pytest.skip("no C compiler")
    cpu = ROOT / "engine/patches/src/ggml-cpu"
    sources = [Path(__file__).with_name("dot_check.c"), cpu / "pn-dot.c", cpu / "pn-rows.c", ROOT / "engine/pn/c/pn.c"]
    wide = "avx2" in Path("/proc/cpuinfo").read_text()
    for flags in ([], ["-mavx2", "-mfma", "-mf16c"]) if wide else ([],):
        out = tmp_path / "dot"
        subprocess.run(
            [cc, "-O2", "-Wall", "-Wextra", "-Werror", *flags, f"-I{ROOT / 'engine/pn/c'}", f"-I{cpu}", "-o", str(out),
             *map(str, sources), "-lm"], check=True,
        )  # fmt: skip
        done = subprocess.run([str(out)], capture_output=True, text=True, check=False)
        many = "0, 0" if flags else "-1, -1"  # the plain build has no code for many rows
        assert (done.returncode, done.stdout) == (0, f"0 failed, many rows: {many}\n"), flags


def test_tree_is_brought_up_to_date_without_touching_what_is_right(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    for folder, files in ((new, {"a": "1", "b": "2", "d/e": "3"}), (old, {"a": "1", "b": "x", "gone": "4"})):
        for name, text in {**files, "PROVENANCE.md": "p"}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    os.utime(old / "a", (1, 1))
    os.utime(new / "b", (1, 1))
    assert apply.update(new, old) == 3
    assert {p.relative_to(old).as_posix(): p.read_text() for p in old.rglob("*") if p.is_file()} == {
        "a": "1",
        "b": "2",
        "d/e": "3",
        "PROVENANCE.md": "p",
    }
    assert (old / "a").stat().st_mtime == 1
    assert (old / "b").stat().st_mtime > 1
    (old / "PROVENANCE.md").unlink()
    with pytest.raises(apply.QueueError, match="not made by this script"):
        apply.update(new, old)
