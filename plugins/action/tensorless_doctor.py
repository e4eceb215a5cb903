# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's half of tensorless_doctor: it reads the recipes, and lends its clock for the comparison."""

from __future__ import annotations

import os
import time
from typing import Any, Optional

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Catalog, load_directory, resolve
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

BUILT_IN = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "recipes"))


def _repo(catalog: Catalog, server: dict[str, Any]) -> dict[str, str]:
    """The repository that a server's model means; a model that is not known is the plan's to refuse."""
    try:
        return {"repo": resolve(catalog, server.get("model"))[0][0].repo}
    except Refusal:
        return {}


class ActionModule(ActionBase):
    """Read the recipes, and run the module on the host with them."""

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        args = dict(self._task.args)
        given = args.get("recipes_dir")
        try:
            if given:
                catalog = load_directory(os.path.abspath(os.path.expanduser(str(given))))
                for warning in catalog.warnings:
                    Display().warning(warning)
            else:
                catalog = load_directory(BUILT_IN, "recipes/")
        except Refusal as refusal:
            return {**result, "failed": True, "msg": refusal.message, "rc": refusal.rc}
        args["recipes"] = [{"path": recipe.path, "data": recipe.data} for recipe in catalog.recipes]
        args["controller_time"] = time.time()
        servers = args.get("servers") or []
        args["servers"] = [{**item, **_repo(catalog, item)} if isinstance(item, dict) else item for item in servers]
        module = self._execute_module(
            module_name="tensorless.fleet.tensorless_doctor", module_args=args, task_vars=task_vars
        )
        return {**result, **module}
