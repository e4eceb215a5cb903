# SPDX-License-Identifier: Apache-2.0
"""Between AnsibleModule and the logic of nvidia_driver: options in, result out.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils._driver_apt import Apt
from ansible_collections.tensorless.fleet.plugins.module_utils._driver_dnf import Dnf
from ansible_collections.tensorless.fleet.plugins.module_utils._driver_plan import Driver, Manager, Wish
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu import read_gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._host import Files, bounded
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

LIMIT = 3600  # an installation builds a kernel module for each kernel


def _branch(text: str) -> Any:
    if text == "auto":
        return None
    if not (text.isascii() and text.isdigit() and 525 <= int(text) <= 580):
        raise Refusal(f"branch is {text!r}: it needs to be auto, or a number from 525 to 580", rc=2)
    return int(text)


def run_module(module: Any) -> None:
    params = module.params
    module.run_command_environ_update = {"LC_ALL": "C", "LANG": "C"}
    run = bounded(lambda argv: module.run_command(list(argv)), LIMIT)

    def write(path: str, text: str) -> None:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=module.tmpdir)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        module.atomic_move(temporary, path)
        os.chmod(path, 0o644)

    def facts() -> dict[str, Any]:
        return read_gpus(bounded(lambda argv: module.run_command(list(argv)), 30), module.get_bin_path("nvidia-smi"))

    manager: Manager
    if module.get_bin_path("apt-get"):
        manager = Apt(run)
    elif module.get_bin_path("dnf"):
        manager = Dnf(run)
    else:
        module.fail_json(msg="neither apt nor dnf is here: install the driver by hand, R525 to R580, proprietary")
    try:
        wish = Wish(
            branch=_branch(params["branch"]),
            packages=params["packages"],
            allow_downgrade=params["allow_downgrade"],
            allow_branch_drift=params["allow_branch_drift"],
            upgrade=params["upgrade"],
            headers=params["headers"],
            secure_boot_ready=params["secure_boot_ready"],
        )
        work = Driver(run, Files(), manager, facts(), wish, write)
        changes = work.plan()
        if not module.check_mode:
            for change in changes:
                change.apply()
            if work.steps or not work.facts["driver_ok"]:
                work.check_installed()
    except Refusal as exc:
        module.fail_json(msg=exc.message)
    after = work.facts if module.check_mode or not work.steps else facts()
    texts = [change.text for change in changes]
    module.exit_json(
        changed=bool(changes),
        changes=texts,
        notes=work.notes,
        branch=work.branch,
        transaction=[{"name": step.name, "old": step.old, "new": step.new} for step in work.steps],
        nvidia_gpu=after,
        diff={"before": "", "after": "".join(f"{text}\n" for text in texts)},
    )
