# SPDX-License-Identifier: Apache-2.0
"""Recipes and hosts for the tests of this area."""

from __future__ import annotations

import copy
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils._cards import Gpu, Gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Recipe

DIGEST = "ab" * 32
VALID: dict[str, Any] = {
    "schema": 1,
    "status": "released",
    "model": {
        "name": "tiny",
        "title": "Tiny",
        "hf_repo": "Org/Tiny-GGUF",
        "revision": "0123456789abcdef0123456789abcdef01234567",
        "file": "gguf/tiny.gguf",
        "sha256": "cd" * 32,
        "size_bytes": 1000,
        "license": "MIT",
    },
    "card": {
        "id": "x1",
        "title": "Card X1",
        "compute_capability": "6.0",
        "min_memory_mib": 16000,
        "min_driver": "525.60.13",
    },
    "engine": {"release": "engine-v1", "arch": "sm60", "image": f"reg.example:5000/a/b@sha256:{DIGEST}"},
    "run": {
        "alias": "Org/Tiny",
        "context": 4096,
        "threads_max": 8,
        "args": ["-ngl", "99", "-sm", "none"],
        "env": {"GGML_B": "2", "GGML_A": "1"},
    },
    "receipt": {"decode_tps": {"short": 30.5}},
}


def changed(**values: Any) -> dict[str, Any]:
    """The valid recipe with values replaced: model__file="x" sets [model] file; ... removes."""
    data = copy.deepcopy(VALID)
    for name, value in values.items():
        *tables, key = name.split("__")
        node = data
        for table in tables:
            node = node[table]
        if value is ...:
            del node[key]
        else:
            node[key] = value
    return data


def recipe(**values: Any) -> Recipe:
    data = changed(**values)
    return Recipe(data, f"recipes/{data['model']['hf_repo']}/{data['card']['id']}.toml")


def gpu(index: int = 0, **values: Any) -> Gpu:
    base: dict[str, Any] = {
        "uuid": f"GPU-{index:08x}-1111-2222-3333-444444444444",
        "name": "Tesla X1",
        "compute_capability": "6.0",
        "memory_mib": 16269,
        "driver": "535.183.01",
    }
    return Gpu(index=index, **{**base, **values})


def gpus(*cards: Gpu) -> Gpus:
    return Gpus(tuple(cards))
