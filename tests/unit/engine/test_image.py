# SPDX-License-Identifier: Apache-2.0
"""Containerfiles, the pin step and the build script, as far as they go without a registry."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[3]
CONTAINERS = ROOT / "containers"
SWITCHES = re.findall(r'"(GGML_CUDA_PN_\w+)"', (ROOT / "engine/patches/src/ggml-cuda/pn.cu").read_text())


def label(kind: str, name: str) -> str:
    text = (CONTAINERS / f"engine.{kind}.Containerfile").read_text()
    found = re.search(rf'{re.escape(name)}="([^"]*)"', text)
    assert found
    return found[1]


def test_labels_list_the_switches_that_the_source_reads() -> None:
    assert sorted(label("sm60", "org.tensorless.switches").split()) == sorted(SWITCHES)
    assert label("cpu", "org.tensorless.switches") == ""
    assert {label(kind, "org.tensorless.pn.cpu") for kind in ("sm60", "cpu")} == {"exact"}


def test_switches_page_lists_them() -> None:
    page = (ROOT / "docs/reference/engine-switches.md").read_text()
    assert [name for name in SWITCHES if f"`{name}`" not in page] == []


def test_build_script_has_the_documented_configuration() -> None:
    script = (ROOT / "engine/build.sh").read_text()
    for option in (
        "CMAKE_CUDA_ARCHITECTURES=60-real", "GGML_CUDA_FA=ON", "GGML_CUDA_FA_ALL_QUANTS=OFF", "GGML_CUDA_GRAPHS=OFF",
        "GGML_CUDA_NO_VMM=ON", "GGML_CUDA_COMPRESSION_MODE=size", "GGML_NATIVE=OFF", "GGML_AVX2=ON", "GGML_F16C=ON",
        "LLAMA_OPENSSL=OFF", "CMAKE_BUILD_RPATH_USE_ORIGIN=ON", "CMAKE_PLATFORM_NO_VERSIONED_SONAME=ON",
        "q4_0-q4_0;q8_0-q8_0;f16-f16;bf16-bf16;f16-q8_0;q8_0-f16;bf16-q8_0;q8_0-bf16",
    ):  # fmt: skip
        assert option in script
    assert 'test-pn-format" "$source/tests/pn-golden.txt' in script


def test_build_script_needs_patched_source(tmp_path: Path) -> None:
    command = ["sh", str(ROOT / "engine/build.sh"), "cpu", str(tmp_path), str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "engine.patches.apply" in done.stderr


def test_seal_lists_every_file(tmp_path: Path) -> None:
    source, target = tmp_path / "src", tmp_path / "out"
    (target / "bin").mkdir(parents=True)
    source.mkdir()
    (source / "PROVENANCE.md").write_text("p\n")
    (target / "bin/llama-server").write_text("x")
    subprocess.run(["sh", str(ROOT / "engine/build.sh"), "seal", "9.9.9-test", str(source), str(target)], check=True)
    assert (target / "VERSION").read_text() == "9.9.9-test\n"
    listed = [line.split("  ")[1] for line in (target / "SHA256SUMS").read_text().splitlines()]
    assert listed == ["PROVENANCE.md", "VERSION", "bin/llama-server"]
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=target, check=True)


def test_no_digest_is_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("pin", CONTAINERS / "pin.py")
    assert spec
    assert spec.loader
    pin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pin)
    pins = tmp_path / "pins.toml"
    pins.write_text((CONTAINERS / "pins.toml").read_text())
    monkeypatch.setattr(pin, "PINS", pins)
    monkeypatch.setattr(sys, "argv", ["pin.py", "--tool", "skopeo"])

    def answer(tool: str, tag: str) -> str:
        if "devel" in tag:
            raise RuntimeError("the registry does not answer")
        return tag.rsplit(":", 1)[0] + "@sha256:" + "a" * 64

    before = tomllib.loads(pins.read_text())
    monkeypatch.setattr(pin, "digest", answer)
    assert pin.main() == 1
    after = tomllib.loads(pins.read_text())
    assert after["cuda"]["devel"] == before["cuda"]["devel"]
    assert after["cuda"]["runtime"] == "docker.io/nvidia/cuda@sha256:" + "a" * 64
    assert after["cpu"]["base"].startswith("docker.io/library/debian@sha256:")


def test_containerfiles_have_no_tag_to_fall_back_on() -> None:
    for kind in ("sm60", "cpu"):
        text = (CONTAINERS / f"engine.{kind}.Containerfile").read_text()
        assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) in (["${BASE}", "${BASE}"], ["${DEVEL}", "${RUNTIME}"])
        assert not re.search(r"^ARG (BASE|DEVEL|RUNTIME)=(?!unpinned$).+", text, re.MULTILINE)


def build(tmp_path: Path, *values: str) -> str:
    inventory = tmp_path / "inventory.yml"
    inventory.write_text("engine_builder: {hosts: {builder: {ansible_connection: local}}}\n")
    given = "engine_version=0.2.0 engine_candidate=1 engine_repository=localhost/engine"
    play = str(Path(sys.executable).with_name("ansible-playbook"))
    done = subprocess.run(
        [play, "-i", str(inventory), "playbooks/engine_build.yml", "-e", " ".join([given, *values]),
         "-e", f"ansible_python_interpreter={sys.executable}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    return " ".join((done.stdout + done.stderr).split())


def test_playbook_refuses_bases_that_are_not_pinned(tmp_path: Path) -> None:
    told = build(
        tmp_path, f"engine_tree={tmp_path}", "engine_base_devel=docker.io/nvidia/cuda:12.6.3-devel-ubuntu24.04"
    )
    assert "Base image(s) not pinned by digest: found devel 'docker.io/nvidia/cuda:12.6.3-devel-ubuntu24.04'" in told
    assert "containers/pin.py" in told


def test_playbook_takes_the_bases_from_the_pins(tmp_path: Path) -> None:
    (tmp_path / "containers").mkdir()
    digest = "@sha256:" + "a" * 64
    pins = (CONTAINERS / "pins.toml").read_text()
    (tmp_path / "containers/pins.toml").write_text(
        pins.replace('base = ""', f'base = "docker.io/library/debian{digest}"')
    )
    told = build(tmp_path, f"engine_tree={tmp_path}", "engine_arch=cpu")
    assert "holds no patched source" in told  # the next check
    assert "not pinned" in build(tmp_path, f"engine_tree={tmp_path}", "engine_arch=sm60")
