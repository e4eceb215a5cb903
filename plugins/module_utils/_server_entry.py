# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

Between AnsibleModule and the logic of tensorless_server: options in, result out.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from collections.abc import Sequence
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils import _server_files as files
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_module as work
from ansible_collections.tensorless.fleet.plugins.module_utils._progress import progress_writer
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.module_utils._runtime import RUNTIMES, Run, RuntimeUnavailable
from ansible_collections.tensorless.fleet.plugins.module_utils._server_apply import Tools
from ansible_collections.tensorless.fleet.plugins.module_utils._server_cards import read as read_cards


def runner(module: Any, scope: str = "system") -> Run:
    """Commands in the C locale; a program that is not there is an exit status, not an exception."""
    extra = {"LC_ALL": "C", "LANGUAGE": "C"}
    if scope == "user":
        extra["XDG_RUNTIME_DIR"] = f"/run/user/{os.getuid()}"

    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        rc, out, err = module.run_command(list(argv), environ_update=extra, handle_exceptions=False)
        return int(rc), str(out), str(err)

    def guarded(argv: Sequence[str]) -> tuple[int, str, str]:
        try:
            return run(argv)
        except OSError as exc:
            return 127, "", f"[Errno {exc.errno}] {exc.strerror}: {argv[0]}"

    return guarded


def installed(module: Any, wanted: str = "auto") -> list[str]:
    names = RUNTIMES if wanted == "auto" else (wanted,)
    return [name for name in names if module.get_bin_path(name)]


def run_module(module: Any) -> None:
    params = module.params
    scope = params["scope"]
    report, close = progress_writer(params["progress_file"])
    account = pwd.getpwuid(os.getuid())
    tools = Tools(
        run=runner(module, scope),
        clock=time,
        where=files.places(scope, account.pw_dir, account.pw_name),
        user=account.pw_name,
        health_timeout=params["health_timeout"],
        drain_timeout=params["drain_timeout"],
        cards=(lambda: read_cards(runner(module))) if module.get_bin_path("nvidia-smi") else None,
        progress=lambda what, note: report({"stage": "load", "file": what, "bytes": 0, "size": 0, "note": note}),
    )
    try:
        if scope == "system" and os.getuid() != 0:
            raise Refusal("the system scope needs root: use become: true, or scope: user", rc=2)
        outcome = _work(module, params, tools)
    except (Refusal, RuntimeUnavailable) as exc:
        module.fail_json(msg=str(exc), rc=getattr(exc, "rc", 1), servers=[], actions=[], notes=[], looked_in=[])
        return
    except OSError as exc:
        module.fail_json(
            msg=f"cannot write {exc.filename or 'a file'}: {exc.strerror or exc}; free space or mend the permissions, "
            "then run again",
            rc=1, servers=[], actions=[], notes=[], looked_in=[],
        )  # fmt: skip
        return
    finally:
        close()
    for text in outcome.warnings:
        module.warn(text)
    result = {
        "changed": outcome.changed,
        "servers": outcome.servers,
        "actions": outcome.actions,
        "notes": outcome.notes,
        "looked_in": outcome.looked_in,
        "unlisted": outcome.unlisted,
        "rc": outcome.rc,
    }
    if module._diff:
        result["diff"] = {"before": "", "after": "".join(f"{line}\n" for line in outcome.actions)}
    if outcome.failure:
        module.fail_json(msg=outcome.failure, **result)
    module.exit_json(**result)


def _work(module: Any, params: dict[str, Any], tools: Tools) -> work.Outcome:
    if params["state"] == "started":
        if params["name"] or params["all"]:
            raise Refusal("state: started needs plans, as tensorless_recipe returns them", rc=2)
        return work.start(
            params["plans"], tools, installed(module), params["on_change"], module.check_mode,
            exclusive=params["exclusive"],
        )  # fmt: skip
    if params["state"] == "previous":
        return work.go_back(list(targets(params, tools)), tools, installed(module), module.check_mode)
    return work.stop(
        targets(params, tools),
        tools,
        installed(module, params["runtime"]),
        gone=params["state"] == "absent",
        check_mode=module.check_mode,
    )


def targets(params: dict[str, Any], tools: Tools) -> dict[str, str]:
    """The instances to stop, with the names of their containers."""
    found = {}
    models = {str(plan.get("model")) for plan in params["plans"]}
    suffixed = re.compile(rf"{re.escape(params['name'] or '')}-[0-9a-f]{{8}}")
    for instance in files.instance_names(tools.where):
        _state, document = files.read_document(tools.where.document(instance))
        chosen = params["all"] or (document is not None and document.get("model") in models)
        if params["name"]:
            chosen = instance == params["name"] or bool(suffixed.fullmatch(instance))
        if chosen:
            found[instance] = str(document["container_name"]) if document else instance
    for plan in params["plans"]:
        found.setdefault(str(plan["instance"]), str(plan["container_name"]))
    if params["name"] and not found:
        found[params["name"]] = params["name"]
    return found
