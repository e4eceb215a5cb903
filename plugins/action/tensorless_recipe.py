# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's half of tensorless_recipe: recipes are read and validated here and travel to the host as data."""

from __future__ import annotations

import os
from typing import Any, Optional

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.tensorless.fleet.plugins.module_utils._cards import Gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_module import in_a_play
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_rules import refuse_secrets
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_text import model_rows
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Catalog, load_directory, resolve
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

BUILT_IN = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "recipes"))


def _listed(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what depends on a host."""
    return {key: value for key, value in row.items() if key not in ("fits", "cached")}


class ActionModule(ActionBase):
    """Read recipes_dir, find the model's recipes, and run the module on the host with them."""

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        args = dict(self._task.args)
        try:
            extra = args.get("extra_args") or []
            # Before it leaves this machine: a host's journal keeps every option that a module is called with.
            refuse_secrets(extra.split(",") if isinstance(extra, str) else [str(word) for word in extra])
            if args.get("recipes") is None:
                catalog = self._catalog(args.get("recipes_dir"))
                if args.get("model") is None:
                    rows = model_rows(catalog, Gpus(), {})
                    return {**result, "changed": False, "recipes": [_listed(row) for row in rows]}
                recipes, _revision = resolve(catalog, args["model"])
                # A valid recipe sits where its own values say, so its path below the directory follows from them.
                args["recipes"] = [
                    {"path": f"{recipe.repo}/{recipe.card_id}.toml", "data": recipe.data} for recipe in recipes
                ]
        except Refusal as refusal:
            return {**result, "failed": True, "msg": in_a_play(refusal.message), "rc": refusal.rc}
        facts = ((task_vars or {}).get("ansible_facts") or {}).get("nvidia_gpu")
        if args.get("gpu_facts") is None and facts:
            args["gpu_facts"] = facts
        module = self._execute_module(
            module_name="tensorless.fleet.tensorless_recipe", module_args=args, task_vars=task_vars
        )
        return {**result, **module}

    def _catalog(self, recipes_dir: Optional[str]) -> Catalog:
        if not recipes_dir:
            return load_directory(BUILT_IN, "recipes/")
        # Relative to where the play was started: the playbooks of a collection lie where nobody keeps recipes.
        catalog = load_directory(os.path.abspath(os.path.expanduser(str(recipes_dir))))
        for warning in catalog.warnings:
            Display().warning(warning)
        return catalog
