# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's half of tensorless_recipe: recipes are read and validated here and travel to the host as data."""

from __future__ import annotations

import os
from typing import Any, Optional

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Catalog, load_directory, resolve
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

BUILT_IN = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "recipes"))


class ActionModule(ActionBase):
    """Read recipes_dir, find the model's recipes, and run the module on the host with them."""

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        args = dict(self._task.args)
        try:
            if args.get("recipes") is None:
                catalog = self._catalog(args.get("recipes_dir"))
                recipes, _revision = resolve(catalog, args.get("model"))
                # A valid recipe sits where its own values say, so its path below the directory follows from them.
                args["recipes"] = [
                    {"path": f"{recipe.repo}/{recipe.card_id}.toml", "data": recipe.data} for recipe in recipes
                ]
        except Refusal as refusal:
            return {**result, "failed": True, "msg": refusal.message, "rc": refusal.rc}
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
        catalog = load_directory(self._loader.path_dwim(str(recipes_dir)))
        for warning in catalog.warnings:
            Display().warning(warning)
        return catalog
