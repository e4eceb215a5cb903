# SPDX-License-Identifier: Apache-2.0
"""What tensorless_recipe does on the host: options to plan. Private to the collection: may change at any time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_paths as paths
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_text as text
from ansible_collections.tensorless.fleet.plugins.module_utils._gguf import describe
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu import read_gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._host import bounded
from ansible_collections.tensorless.fleet.plugins.module_utils._plan import plan_model
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_observe import Find, Run, observe
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_rules import check_choice
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Catalog, build_catalog, resolve
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

_OPTIONS = {"--allow-draft": "allow_draft: true", "--card": "card: ID", "--context": "context: N"}
NVIDIA_SMI_LIMIT_S = 30.0  # a hung card must not hang the plan

ARGUMENT_SPEC: dict[str, Any] = {
    "model": {"type": "str"},
    "recipes_dir": {"type": "str", "default": ""},
    "recipes": {
        "type": "list",
        "elements": "dict",
        "options": {"path": {"type": "str", "required": True}, "data": {"type": "dict", "required": True}},
    },
    "card": {"type": "str"},
    "gpu": {"type": "str"},
    "runtime": {"type": "str", "choices": ["auto", "podman", "docker"], "default": "auto"},
    "cache": {"type": "path"},
    "host": {"type": "str", "default": "127.0.0.1"},
    "port": {"type": "int", "default": 8080},
    "context": {"type": "int"},
    "extra_args": {"type": "list", "elements": "str", "default": []},
    "api_key_file": {"type": "path", "no_log": False},
    "hardening": {
        "type": "dict",
        "default": {},
        "options": {
            "no_new_privileges": {"type": "bool"},
            "read_only": {"type": "bool"},
            "drop_capabilities": {"type": "bool"},
            "memory": {"type": "str"},
            "pids_limit": {"type": "int"},
        },
    },
    "allow_draft": {"type": "bool", "default": False},
    "endpoint": {"type": "str", "default": paths.DEFAULT_ENDPOINT},
    "gpu_facts": {"type": "dict"},
    "host_models": {"type": "list", "elements": "str", "default": []},
    "show": {"type": "bool", "default": False},
}


def plan_on_host(params: Mapping[str, Any], check_mode: bool, run: Run, find: Find) -> dict[str, Any]:
    """Observe the host and plan; everything that the module returns."""
    if params["recipes"] is None or params["model"] is None:
        raise Refusal("no recipes reached the host: run this module by its name in a playbook, not by another action")
    shown = params["recipes_dir"].rstrip("/") + "/" if params["recipes_dir"] else "recipes/"
    catalog = build_catalog(((entry["path"], entry["data"], []) for entry in params["recipes"]), shown_prefix=shown)
    recipes, revision = resolve(catalog, params["model"])
    choice = Choice(
        command="info" if params["show"] else "run",
        revision=revision,
        card=params["card"] or None,
        gpu=params["gpu"] or None,
        runtime=params["runtime"],
        cache=paths.hub_cache(params["cache"], os.environ, os.path.expanduser("~"), os.getcwd()),
        host=params["host"],
        port=params["port"],
        context=params["context"],
        extra_args=tuple(params["extra_args"]),
        api_key_file=params["api_key_file"] or None,
        hardening={key: value for key, value in params["hardening"].items() if value is not None},
        allow_draft=params["allow_draft"],
        endpoint=params["endpoint"],
        assume_installed=check_mode,
        service=True,
        suffix=sum(_means(catalog, model, recipes[0].repo) for model in params["host_models"]) > 1,
    )
    check_choice(choice)
    facts = params["gpu_facts"]
    if not facts and choice.card is None:
        facts = read_gpus(bounded(run, NVIDIA_SMI_LIMIT_S), find("nvidia-smi"), processes="no")
    planned = plan_model(recipes, observe(recipes, choice, facts, run, find, describe), choice)
    return {
        "plan": planned.plans[0],
        "plans": planned.plans,
        "skipped_cards": planned.skipped,
        "info_text": "\n".join(text.info_text(plan) for plan in planned.plans),
    }


def in_a_play(message: str) -> str:
    """A refusal in the launcher's words, with the options that a play has for its flags."""
    options = [f"{flag} is {option}" for flag, option in _OPTIONS.items() if flag in message]
    return message + (f" (in a play, {' and '.join(options)})" if options else "")


def _means(catalog: Catalog, model: str, repo: str) -> bool:
    """Whether an entry of the host's list means this model; only this model's recipes are known here."""
    try:
        return resolve(catalog, model)[0][0].repo == repo
    except Refusal:
        return False
