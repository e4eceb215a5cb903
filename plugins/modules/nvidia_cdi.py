#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module; the logic is in module_utils/_cdi*.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_cdi
short_description: Give podman or docker the NVIDIA cards, and prove it in a container
version_added: 0.1.0
author:
  - tensorless.fleet authors (@tensorless)
description:
  - podman. Sees to it that exactly one CDI spec serves, that it names every live card by index and by UUID, that every
    path in it exists, and that it was made for the loaded driver. Removes stale and second specs.
  - One owner writes the spec. That is the toolkit's own refresh service where it works, else a unit of this collection.
  - docker. Merges the NVIDIA settings into C(daemon.json), makes C(/dev/char) links, and restarts dockerd only where a
    container does not get its card otherwise.
  - The last step is a container of the host's own shell that has to see each card by its UUID. It is repeated only
    after something changed or the host was booted.
options:
  runtime:
    description: The runtime that shall hand out the cards.
    type: str
    choices: [podman, docker]
    required: true
  owner:
    description: Who writes the CDI spec (podman).
    type: str
    choices: [auto, toolkit, tensorless]
    default: auto
  docker_feature:
    description: What is merged into C(daemon.json). V(cdi) needs docker 25 or newer.
    type: str
    choices: [runtime, cdi, none]
    default: runtime
  allow_docker_restart:
    description: Whether dockerd may be restarted while containers of others run.
    type: bool
    default: false
attributes:
  check_mode:
    description: Lists what would be done, and starts no container.
    support: full
  diff_mode:
    description: Prints the list of changes.
    support: full
  platform:
    description: Linux with systemd.
    support: full
    platforms: linux
seealso:
  - module: tensorless.fleet.nvidia_gpu_facts
"""

EXAMPLES = r"""
- name: Give podman the cards
  tensorless.fleet.nvidia_cdi:
    runtime: podman
"""

RETURN = r"""
changes:
  description: What was (or would be) done, one line each.
  returned: always
  type: list
  elements: str
  sample: ["generate /etc/cdi/nvidia.yaml: there is no CDI spec for NVIDIA cards in /etc/cdi or /var/run/cdi"]
owner:
  description: Who writes the CDI spec, V(toolkit) or V(tensorless); null for docker.
  returned: always
  type: str
owner_reason:
  description: Why that one does; null for docker.
  returned: always
  type: str
proof:
  description: What the container said, or that the last proof still holds.
  returned: always
  type: str
lost_access:
  description: Servers under docker that cannot reach their card any more and have to be made anew.
  returned: after a change on a host with docker
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.tensorless.fleet.plugins.module_utils._cdi_entry import run_module


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "runtime": {"type": "str", "choices": ["podman", "docker"], "required": True},
            "owner": {"type": "str", "choices": ["auto", "toolkit", "tensorless"], "default": "auto"},
            "docker_feature": {"type": "str", "choices": ["runtime", "cdi", "none"], "default": "runtime"},
            "allow_docker_restart": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    run_module(module)


if __name__ == "__main__":
    main()
