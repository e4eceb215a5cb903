# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: renders the fleet's report on the controller, from what the play knows of each host."""

from __future__ import annotations

from typing import Any, Optional

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.plugin_utils import _report_files, _report_hosts


class ActionModule(ActionBase):  # type: ignore[misc]
    """Never connects to a host: hosts that are down must not keep the others' report from being written."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        _validation, options = self.validate_argument_spec(
            argument_spec={
                "hosts": {"type": "list", "elements": "str"},
                "dest": {"type": "path", "required": True},
                "formats": {
                    "type": "list",
                    "elements": "str",
                    "choices": list(_report_files.FORMATS),
                    "default": list(_report_files.USUAL),
                },
                "title": {"type": "str", "default": "Fleet report"},
                "query": {"type": "str"},
                "share": {"type": "bool", "default": False},
                "record": {"type": "list", "elements": "dict", "default": []},
            }
        )
        hostvars = task_vars.get("hostvars") or {}
        names = options["hosts"]
        if names is None:
            names = (task_vars.get("groups") or {}).get("gpu") or []
        try:
            known = {name: hostvars[name] for name in names if name in hostvars}
            outside = _report_hosts.left_out(
                task_vars.get("ansible_limit"), task_vars.get("groups") or {}, self._loader
            )
            hosts = [_report_hosts.describe(name, known.get(name), name in outside) for name in names]
            answer = _report_files.write(
                hosts,
                options["dest"],
                options["formats"],
                title=options["title"],
                query=options["query"],
                share=options["share"],
                record=options["record"],
                check_mode=self._task.check_mode,
            )
        except Refusal as fault:
            raise AnsibleActionFail(str(fault)) from None
        except OSError as fault:
            raise AnsibleActionFail(
                f"the report cannot be written to {options['dest']} on this machine: {fault.strerror or fault}; set "
                "tensorless_report_dir to a folder that you can write"
            ) from None
        result.update(answer)
        return result
