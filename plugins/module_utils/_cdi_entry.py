# SPDX-License-Identifier: Apache-2.0
"""Between AnsibleModule and the logic of nvidia_cdi: options in, result out.

Private to the collection: may change at any time.
"""

from __future__ import annotations

from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils._cdi_apply import HOOK, Access, converge
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu import read_gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._host import Files, bounded
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal


def _later(module: Any, what: str) -> None:
    """A rehearsal on a host where an earlier step of the play only pretended to install something."""
    text = f"give {module.params['runtime']} the cards; details are known after {what}"
    module.exit_json(
        changed=True,
        changes=[text],
        owner=None,
        owner_reason=None,
        proof="made after the changes",
        diff={"before": "", "after": text + "\n"},
    )


def run_module(module: Any) -> None:
    params = module.params
    module.run_command_environ_update = {"LC_ALL": "C", "LANG": "C"}
    run = bounded(lambda argv: module.run_command(list(argv)), 120)
    program = module.get_bin_path("nvidia-ctk")
    if program is None or module.get_bin_path(params["runtime"]) is None:
        missing = "nvidia-container-toolkit" if program is None else params["runtime"]
        if module.check_mode:
            _later(module, f"{missing} is installed")
        module.fail_json(
            msg=f"{missing} is not installed: install it, or run the roles container_runtime and nvidia_cdi"
        )
    facts = read_gpus(run, module.get_bin_path("nvidia-smi"), processes="no")
    if not facts["driver_ok"] or not facts["cards"]:
        if module.check_mode and facts["state"] == "absent":
            _later(module, "the driver is installed")
        module.fail_json(msg=f"containers cannot get a card: {facts['driver_message'] or 'nvidia-smi lists no card'}")
    access = Access(
        run=run,
        files=Files(),
        program=program,
        runtime=params["runtime"],
        cards=[card for card in facts["cards"] if card["uuid"]],
        driver=facts["loaded_version"],
        smi_rc=facts["nvidia_smi"]["rc"],
        owner=params["owner"],
        docker_feature=params["docker_feature"],
        allow_restart=params["allow_docker_restart"],
        hook=module.get_bin_path(HOOK),
    )
    try:
        result = converge(access, module.check_mode)
    except Refusal as exc:
        module.fail_json(msg=exc.message)
    for name in result.get("lost_access", []):
        module.warn(f"{name} cannot reach its card any more; it has to be made anew (a restart is not enough)")
    lines = "".join(f"{line}\n" for line in result["changes"])
    module.exit_json(changed=bool(result["changes"]), diff={"before": "", "after": lines}, **result)
