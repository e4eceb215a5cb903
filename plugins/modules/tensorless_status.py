#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: tensorless_status
short_description: See what cards and model servers a host has
version_added: 0.1.0
author: "tensorless.fleet authors (@tensorless)"
description:
  - Reads the cards, the model server that has each of them, its health and its last measurement. Changes nothing.
options:
  scope:
    description: Whose servers are looked at, the system's or the connecting user's.
    type: str
    choices: [system, user]
    default: system
  results_dir:
    description: Where the last measurement of each card lies.
    type: path
    default: /var/lib/tensorless/bench
attributes:
  check_mode:
    support: full
    description: Reads only.
  diff_mode:
    support: none
    description: There is nothing to differ.
  platform:
    support: full
    description: Linux with systemd.
    platforms: linux
"""

EXAMPLES = r"""
- name: See what the host has
  tensorless.fleet.tensorless_status:
  register: seen

- name: Name the cards without a server
  ansible.builtin.debug:
    msg: "{{ seen.cards | selectattr('instance', 'none') | map(attribute='name') | list }}"
"""

RETURN = r"""
cards:
  description: One entry for each card, and one for each server whose card is gone.
  returned: always
  type: list
  elements: dict
  contains:
    index:
      description: The card's number in nvidia-smi.
      type: int
    uuid:
      description: The card's UUID.
      type: str
    name:
      description: The card's name.
      type: str
    memory_mib:
      description: Its memory in MiB.
      type: int
    memory_used_mib:
      description: Memory in use in MiB.
      type: int
    instance:
      description: The server that has the card, or null.
      type: str
    model:
      description: The repository id that is served, or null.
      type: str
    endpoint:
      description: The server's base URL on the host, or null.
      type: str
    state:
      description: The unit's state as systemd says it, or V(absent).
      type: str
    health:
      description: V(ok), V(loading), V(down) or V(none).
      type: str
    tuned:
      description: Whether the server runs the measured configuration; null where nothing runs.
      type: bool
    bench_tps:
      description: The last measured decode speed in tokens per second.
      type: float
    bench_vs_receipt_percent:
      description: Its distance from the receipt in percent, where a comparison is honest.
      type: float
    bench_current:
      description: Whether it was measured with the plan that runs now.
      type: bool
    note:
      description: What a person should know about this card.
      type: str
servers:
  description: Every server that has a data file on the host.
  returned: always
  type: list
  elements: dict
driver_version:
  description: The NVIDIA driver's version, or null.
  returned: always
  type: str
gpu_state:
  description: V(ok), V(degraded), V(failed) or V(absent).
  returned: always
  type: str
reasons:
  description: Why the cards are not well, if they are not.
  returned: always
  type: list
  elements: str
"""

import os
import pwd

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu import read_gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.module_utils._server_entry import runner
from ansible_collections.tensorless.fleet.plugins.module_utils._server_files import places
from ansible_collections.tensorless.fleet.plugins.module_utils._status import facts


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "scope": {"type": "str", "choices": ["system", "user"], "default": "system"},
            "results_dir": {"type": "path", "default": "/var/lib/tensorless/bench"},
        },
        supports_check_mode=True,
    )
    user = pwd.getpwuid(os.getuid())
    where = places(module.params["scope"], user.pw_dir, user.pw_name)
    run = runner(module, module.params["scope"])
    try:
        seen = facts(run, where, read_gpus(run), module.params["results_dir"])
    except Refusal as refusal:
        module.fail_json(msg=refusal.message)
    module.exit_json(changed=False, **seen)


if __name__ == "__main__":
    main()
