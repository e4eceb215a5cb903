#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module; the logic is in module_utils/_doctor*.py, the controller's half in plugins/action."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tensorless_doctor
short_description: Check whether a host can serve, and say what is missing
version_added: 0.1.0
author:
  - tensorless.fleet authors (@tensorless)
description:
  - Runs the six documented checks in their order, then further ones on what breaks hosts with P100 cards in the field.
  - Each check is PASS, WARN or FAIL, with a fix for people and, where one exists, a command that mends it.
  - Reads and changes nothing. A failed check is a result and no failed task; C(playbooks/doctor.yml) makes it one.
options:
  recipes_dir:
    description: Directory with recipes on the controller. By default the collection's own.
    type: str
  recipes:
    description: The recipes as data. Set by the controller's half; not for playbooks.
    type: list
    elements: dict
  runtime:
    description: The container runtime to check. V(auto) takes podman where both are installed.
    type: str
    choices: [auto, podman, docker]
    default: auto
  cache:
    description: Directory of the Hugging Face cache. By default the one that the environment of the host names.
    type: path
  ports:
    description: Addresses that servers will use, as V(host:port).
    type: list
    elements: str
    default: ['127.0.0.1:8080']
  servers:
    description:
      - Servers that are planned, as entries of C(tensorless_servers). Their addresses are checked beside O(ports).
      - With C(gpu=each) that is one for each card that the model fits, with its port counted up.
    type: list
    elements: dict
    default: []
  endpoint:
    description: Address of the Hub, for the check of the token.
    type: str
    default: https://huggingface.co
  token:
    description: Token for the Hub. It is tried where one is given.
    type: str
  controller_time:
    description: The controller's clock. Set by the controller's half; not for playbooks.
    type: float
attributes:
  check_mode:
    description: Changes nothing, so check mode is no different.
    support: full
  diff_mode:
    description: There is nothing to compare.
    support: none
  platform:
    description: Linux.
    support: full
    platforms: linux
seealso:
  - module: tensorless.fleet.nvidia_gpu_facts
"""

EXAMPLES = r"""
- name: Check the host
  tensorless.fleet.tensorless_doctor:
  register: doctor

- name: Show the report
  ansible.builtin.debug:
    msg: "{{ doctor['text'].splitlines() }}"
"""

RETURN = r"""
schema:
  description: Version of this report's form.
  returned: always
  type: int
  sample: 1
checks:
  description: All checks in order.
  returned: always
  type: list
  elements: dict
  contains:
    id:
      description: Name of the check; some occur several times, once a card or a port.
      type: str
      returned: always
    block:
      description: V(documented) for the six documented checks, V(host) for the further ones.
      type: str
      returned: always
    level:
      description: V(PASS), V(WARN) or V(FAIL).
      type: str
      returned: always
    text:
      description: What was found.
      type: str
      returned: always
    fix:
      description: What to do, for people, or null.
      type: str
      returned: always
    fix_command:
      description: A shell command for the host's root that mends it, or null.
      type: str
      returned: always
failed_checks:
  description: How many of the documented checks failed.
  returned: always
  type: int
summary:
  description: The documented last line.
  returned: always
  type: str
  sample: all checks passed.
host_failed_checks:
  description: How many of the further checks failed.
  returned: always
  type: int
host_summary:
  description: The last line of the further checks.
  returned: always
  type: str
exit_code:
  description: 1 where any check failed, else 0.
  returned: always
  type: int
text:
  description: The report for people.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.tensorless.fleet.plugins.module_utils._doctor_entry import run_module


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "recipes_dir": {"type": "str"},
            "recipes": {"type": "list", "elements": "dict"},
            "runtime": {"type": "str", "choices": ["auto", "podman", "docker"], "default": "auto"},
            "cache": {"type": "path"},
            "ports": {"type": "list", "elements": "str", "default": ["127.0.0.1:8080"]},
            "servers": {"type": "list", "elements": "dict", "default": []},
            "endpoint": {"type": "str", "default": "https://huggingface.co"},
            "token": {"type": "str", "no_log": True},
            "controller_time": {"type": "float"},
        },
        supports_check_mode=True,
    )
    run_module(module)


if __name__ == "__main__":
    main()
