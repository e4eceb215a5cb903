# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs tensorless_power_sweep on the host and shows its progress."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.tensorless.fleet.plugins.plugin_utils._progress import run_with_progress


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_async = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        del tmp
        result.update(run_with_progress(self, task_vars or {}))
        return result
