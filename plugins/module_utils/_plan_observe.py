# SPDX-License-Identifier: Apache-2.0
"""What the planner needs to know of a host, observed: runtimes, CPUs, what the cache and the engine image hold.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _cards as cards
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_paths as paths
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_rules as rules
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Recipe

Run = Callable[[Sequence[str]], tuple[int, str, str]]
Find = Callable[[str], Optional[str]]
Describe = Callable[[str], Mapping[str, Any]]


def observe(
    recipes: Sequence[Recipe],
    choice: Choice,
    gpu_facts: Optional[Mapping[str, Any]],
    run: Run,
    find: Find,
    describe: Describe,
) -> HostFacts:
    """The host for these recipes.

    run: a command to (rc, stdout, stderr). find: a program to its path or None. describe: a GGUF file to its header's
    {pn, block_count}, raising OSError or ValueError.
    """
    runtimes = [name for name in rules.RUNTIMES if find(name)]
    runtime = choice.runtime if choice.runtime != "auto" else next(iter(runtimes), "")
    cached, pn, blocks = {}, {}, {}
    for recipe in recipes:
        model = recipe.data["model"]
        blob = paths.blob_path(choice.cache, recipe.repo, model["sha256"])
        state = blob_state(blob, model["size_bytes"])
        cached[model["sha256"]] = state
        header = _header(blob, describe) if state == "yes" else None
        if header:
            pn[model["sha256"]] = "yes" if header["pn"] else "no"
            if header.get("block_count") is not None:
                blocks[model["sha256"]] = header["block_count"]
    images = {recipe.data["engine"]["image"] for recipe in recipes} if runtime in runtimes else set()
    labels = {
        image: found for image in sorted(images) for found in [image_labels(runtime, image, run)] if found is not None
    }
    return HostFacts(
        gpus=cards.from_facts(gpu_facts),
        cpu_count=os.cpu_count() or 1,
        runtimes=runtimes,
        cached=cached,
        pn=pn,
        block_count=blocks,
        labels=labels,
        file_digests=_digests(rules.key_file(choice)),
    )


def blob_state(blob: str, size_bytes: int) -> str:
    """yes, partial or no for a model file."""
    try:
        size: Optional[int] = os.stat(blob).st_size
    except OSError:
        size = None
    return paths.cached_state(size, os.path.exists(blob + ".incomplete"), size_bytes)


def _header(blob: str, describe: Describe) -> Optional[Mapping[str, Any]]:
    try:
        return describe(blob)
    except (OSError, ValueError):
        return None  # unreadable, or no GGUF file: what it holds stays unknown, and its sha256 decides elsewhere


def image_labels(runtime: str, image: str, run: Run) -> Optional[dict[str, str]]:
    """The labels of an image, or None while it is not there."""
    rc, out, _err = run([runtime, "image", "inspect", image])
    if rc != 0:
        return None
    try:
        config = json.loads(out)[0].get("Config") or {}
    except (ValueError, LookupError, AttributeError):
        return None
    return {str(name): str(value) for name, value in (config.get("Labels") or {}).items()}


def _digests(key_file: Optional[str]) -> dict[str, str]:
    """The content of the key file that exec would mount: a changed key is a changed server."""
    if key_file is None:
        return {}
    try:
        with open(key_file, "rb") as handle:
            return {key_file: hashlib.sha256(handle.read()).hexdigest()}
    except OSError:
        return {}
