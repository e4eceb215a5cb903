#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module; the logic is in module_utils/_driver*.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_driver
short_description: Install a driver that supports Pascal cards, and keep it there
version_added: 0.1.0
author:
  - tensorless.fleet authors (@tensorless)
description:
  - Installs the proprietary driver of a branch from 525 to 580 where the loaded one does not serve. A driver that
    serves is left alone, however it was installed.
  - The whole transaction is simulated first, and refused when any package of it would land above 580 or is of the open
    kernel module. A package's name is not trusted, its version is.
  - Keeps the driver with negative pins for newer branches, holds, and a blacklist for unattended upgrades.
  - Does not reboot. It returns the facts of the cards, which say whether a reboot is due.
options:
  branch:
    description: A branch from 525 to 580, or V(auto) for the newest of them that the repositories have.
    type: str
    default: auto
  packages:
    description: Packages to ask for instead of those that the module chooses.
    type: list
    elements: str
    default: []
  upgrade:
    description: Whether a driver that serves is brought to the newest version of its branch.
    type: bool
    default: false
  allow_downgrade:
    description: Whether a driver above 580 is taken back.
    type: bool
    default: false
  allow_branch_drift:
    description: Whether packages may land in another allowed branch than the chosen one (transitional packages do).
    type: bool
    default: false
  headers:
    description: Whether the running kernel's headers are needed. V(false) where modules are prebuilt.
    type: bool
    default: true
  secure_boot_ready:
    description: Whether a key for modules built here is enrolled. Without it, Secure Boot is a refusal.
    type: bool
    default: false
attributes:
  check_mode:
    description: Simulates the transaction and lists it.
    support: full
  diff_mode:
    description: Prints the list of changes.
    support: full
  platform:
    description: Debian, Ubuntu and the RHEL family.
    support: full
    platforms: linux
seealso:
  - module: tensorless.fleet.nvidia_gpu_facts
"""

EXAMPLES = r"""
- name: Have a driver for Pascal cards
  tensorless.fleet.nvidia_driver:
    branch: "580"
"""

RETURN = r"""
changes:
  description: What was (or would be) done, one line each.
  returned: always
  type: list
  elements: str
notes:
  description: What a person should know about the choice, for example that the repositories have no R580.
  returned: always
  type: list
  elements: str
branch:
  description: The branch that is kept.
  returned: always
  type: int
  sample: 580
transaction:
  description: The driver's packages that were (or would be) installed, with C(name), C(old) and C(new).
  returned: always
  type: list
  elements: dict
nvidia_gpu:
  description: The cards afterwards, as M(tensorless.fleet.nvidia_gpu_facts) returns them.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.tensorless.fleet.plugins.module_utils._driver_entry import run_module


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "branch": {"type": "str", "default": "auto"},
            "packages": {"type": "list", "elements": "str", "default": []},
            "upgrade": {"type": "bool", "default": False},
            "allow_downgrade": {"type": "bool", "default": False},
            "allow_branch_drift": {"type": "bool", "default": False},
            "headers": {"type": "bool", "default": True},
            "secure_boot_ready": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    run_module(module)


if __name__ == "__main__":
    main()
