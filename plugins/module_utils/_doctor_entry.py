# SPDX-License-Identifier: Apache-2.0
"""Between AnsibleModule and the doctor: options in, report out.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import os
import re
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_paths as paths
from ansible_collections.tensorless.fleet.plugins.module_utils._doctor_observe import Question, examine
from ansible_collections.tensorless.fleet.plugins.module_utils._host import bounded
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Recipe
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

LIMIT = 30


def check_port(place: str) -> None:
    """Refuses what is no host:port."""
    found = re.fullmatch(r"(?:\[[0-9A-Fa-f:]+\]|[^\s:]+):(\d{1,5})", place, re.ASCII)
    if found is None or not 1 <= int(found.group(1)) <= 65535:
        raise Refusal(f"{place!r} is no address of the form host:port, for example 127.0.0.1:8080", rc=2)


def check_server(server: Any) -> None:
    """Refuses an entry that is no server."""
    port = str(server.get("port") or 8080) if isinstance(server, dict) else ""
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise Refusal(f"{server!r} is no entry of tensorless_servers: it takes model and, where wanted, a port", rc=2)


def run_module(module: Any) -> None:
    params = module.params
    module.run_command_environ_update = {"LC_ALL": "C", "LANG": "C"}
    try:
        for place in params["ports"]:
            check_port(place)
        for server in params["servers"]:
            check_server(server)
        if params["recipes"] is None:
            raise Refusal("tensorless_doctor got no recipes: it has to run as a task of the collection", rc=2)
        question = Question(
            run=bounded(lambda argv: module.run_command(list(argv)), LIMIT),
            find=module.get_bin_path,
            recipes=[Recipe(item["data"], item["path"]) for item in params["recipes"]],
            cache=paths.hub_cache(params["cache"], os.environ, os.path.expanduser("~"), os.getcwd()),
            runtime=params["runtime"],
            ports=params["ports"],
            servers=params["servers"],
            endpoint=params["endpoint"],
            token=params["token"],
            controller_time=params["controller_time"],
            environ=os.environ,
        )
        report = examine(question)
    except Refusal as exc:
        module.fail_json(msg=exc.message, rc=exc.rc)
    module.exit_json(changed=False, **report)
