# SPDX-License-Identifier: Apache-2.0
"""From a case to a plan, by the product's own way: command line, recipes, cards, plan."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock

from ansible_collections.tensorless.fleet.plugins.module_utils import _cards as cards
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_text as text
from ansible_collections.tensorless.fleet.plugins.module_utils._plan import plan_model
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import resolve
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tensorless_fleet._usage import Usage, parse
from tensorless_fleet.cli import main
from tests.conformance.frame import Env

CACHE = "/home/you/.cache/huggingface/hub"
P100 = {"index": 0, "name": "Tesla P100-PCIE-16GB", "compute_cap": "6.0", "memory_mib": 16269, "driver": "535.183.01"}
FLAGS = ("card", "gpu", "runtime", "cache", "host", "port", "context", "runs", "tokens")


def words_of(given: dict[str, Any], model: str | None) -> list[str]:
    """The command line that the case describes."""
    words = [given["command"], *([model] if model is not None else [])]
    for flag in FLAGS:
        if given.get(flag) is not None:
            words.append(f"--{flag}={given[flag]}")
    for switch in ("allow_draft", "dry_run"):
        if given.get(switch):
            words.append("--" + switch.replace("_", "-"))
    if given.get("extra_args") is not None:
        words += ["--", *given["extra_args"]]
    return words


def read(value: Any) -> Any:
    """A cell of nvidia-smi; [N/A] and its like are what could not be read."""
    return None if isinstance(value, str) and (not value or value.startswith("[")) else value


def gpu_facts(given: dict[str, Any]) -> dict[str, Any]:
    """The fact nvidia_gpu for the GPUs of a case; a case that says nothing of GPUs gets one that fits."""
    if given.get("nvidia_smi") == "absent":
        return {"nvidia_smi": {"found": False}, "cards": []}
    listed = given.get("gpus", [P100])
    return {
        "nvidia_smi": {"found": True, "rc": 0},
        "driver_version": read(listed[0].get("driver")) if listed else None,
        "cards": [
            {
                "index": gpu["index"],
                "uuid": f"GPU-{gpu['index']:08x}-0000-0000-0000-000000000000",
                "name": gpu["name"],
                "compute_capability": read(gpu.get("compute_cap")),
                "memory_mib": read(gpu.get("memory_mib")),
                "driver_version": read(gpu.get("driver")),
            }
            for gpu in listed
        ],
    }


def host_facts(given: dict[str, Any]) -> HostFacts:
    installed = given.get("installed")
    return HostFacts(
        gpus=cards.from_facts(gpu_facts(given)),
        cpu_count=given.get("cpu_count", 32),
        runtimes=None if installed is None else list(installed),
    )


def refused(error: Exception) -> dict[str, Any]:
    """What a driver reports of a refusal."""
    code = error.rc if isinstance(error, Refusal) else 2
    return {"failed": True, "message": str(error), "exit_code": code, "notes": [], "warnings": []}


def plan_case(given: dict[str, Any], env: Env, model: str | None) -> dict[str, Any]:
    """Run the case's command as far as its plan; everything a user would see of it."""
    seen: dict[str, Any] = {"failed": False, "message": "", "exit_code": 0, "notes": [], "warnings": []}
    try:
        options = parse(words_of(given, model))
        catalog = env.catalog(given)
        host = host_facts(given)
        if options.model is None:
            rows = text.model_rows(catalog, host.gpus, {})
            return {**seen, "rows": rows, "message": text.models_text(rows, host.gpus)}
        recipes, revision = resolve(catalog, options.model)
        choice = Choice(
            command=options.command,
            revision=revision,
            card=options.card,
            gpu=None if options.gpu is None else str(options.gpu),
            runtime=options.runtime,
            cache=options.cache or CACHE,
            host=options.host,
            port=options.port,
            context=options.context,
            extra_args=tuple(options.extra_args),
            allow_draft=options.allow_draft,
            dry_run=options.dry_run,
            runs=options.runs,
            tokens=options.tokens,
        )
        planned = plan_model(recipes, host, choice)
    except (Refusal, Usage) as error:
        return refused(error)
    plan = planned.plans[0]
    shown = text.info_text(plan) if options.command == "info" else ""
    if options.dry_run:
        shown = text.dry_run_text(plan, f"tensorless {options.command} {model}", ("pull", "serve"))
    return {**seen, "plan": plan, "notes": plan["notes"], "output": shown, "info_json": text.info_json(plan)}


NVIDIA_SMI = """#!{python}
import json, sys
asked = next((word.partition("=")[2].split(",") for word in sys.argv if word.startswith("--query-gpu=")), None)
if asked is None:
    sys.exit(1)
for row in json.loads({rows!r}):
    print(", ".join(row.get(field, "[N/A]") for field in asked))
"""
RUNTIME = """#!/bin/sh
echo "$(basename "$0") $*" >> {log}
case "$1 $2" in "image inspect") exit 1;; esac
"""


def drive_command(given: dict[str, Any], env: Env, words: list[str]) -> dict[str, Any]:
    """The real command on a machine whose podman and nvidia-smi only remember and answer; what it did and printed.

    For commands that must do nothing: the programs would not stop one that does.
    """
    programs, log, home = env.tmp / "programs", env.tmp / "asked", env.tmp / "home"
    programs.mkdir()
    home.mkdir()
    facts = gpu_facts(given)
    rows = [
        {
            "index": str(card["index"]),
            "uuid": card["uuid"],
            "name": card["name"],
            "pci.bus_id": f"00000000:0{card['index']}:00.0",
            "compute_cap": card["compute_capability"],
            "memory.total": str(card["memory_mib"]),
            "driver_version": card["driver_version"],
        }
        for card in facts["cards"]
    ]
    scripts = {"podman": RUNTIME.format(log=log)}
    if facts["nvidia_smi"]["found"]:
        scripts["nvidia-smi"] = NVIDIA_SMI.format(python=sys.executable, rows=json.dumps(rows))
    for name, script in scripts.items():
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    out, err = io.StringIO(), io.StringIO()
    recipes = env.tmp / "recipes"
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
    with mock.patch.dict(os.environ, variables), redirect_stdout(out), redirect_stderr(err):
        at = words.index("--") if "--" in words else len(words)
        code = main([*words[:at], f"--recipes={recipes}", *words[at:]])
    asked = log.read_text().splitlines() if log.exists() else []
    return {
        "code": code,
        "out": out.getvalue(),
        "err": err.getvalue(),
        "pulled": any(line.split()[1] == "pull" for line in asked),
        "started": any(line.split()[1] == "run" for line in asked),
        "downloaded": any(path.is_file() for path in home.rglob("models--*/**/*")),
    }
