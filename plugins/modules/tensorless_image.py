#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: tensorless_image
short_description: Have an engine image by its digest
version_added: 0.1.0
author: "tensorless.fleet authors (@tensorless)"
description:
  - Pulls an engine image by digest with podman or docker, unless it is there.
  - Gives it a local tag, so that a clean-up of untagged images does not take it.
options:
  image:
    description: The image as C(name@sha256:DIGEST). A tag is refused.
    type: str
    required: true
  runtime:
    description: The container runtime. V(auto) prefers podman.
    type: str
    choices: [auto, podman, docker]
    default: auto
  retries:
    description: How often a failed pull is tried again, with growing pauses. What cannot get better is not repeated.
    type: int
    default: 3
  state:
    description: V(absent) removes the image and its local tag; it fails while a container uses it.
    type: str
    choices: [present, absent]
    default: present
  progress_file:
    description:
      - Where the module keeps its progress on the host while it runs.
      - Set by the action plugin of the same name, which shows it on the controller.
    type: path
attributes:
  check_mode:
    support: full
    description: Says whether it would pull, without asking the registry.
  diff_mode:
    support: full
    description: The commands.
  platform:
    support: full
    description: Linux with podman 4.3 or later or docker 20.10 or later.
    platforms: linux
"""

EXAMPLES = r"""
- name: Have the engine image
  tensorless.fleet.tensorless_image:
    image: ghcr.io/iammrduncan/tensorless-engine@sha256:35409ff97c2f518e468790c28bd19206ae777a945fcffe5775585e28fd9939a7
"""

RETURN = r"""
image:
  description: The image as given.
  returned: always
  type: str
digest:
  description: Its digest, with C(sha256:) in front.
  returned: always
  type: str
tag:
  description: The local tag that keeps it.
  returned: always
  type: str
runtime:
  description: The runtime that was used.
  returned: always
  type: str
pulled:
  description: Whether it was pulled in this run.
  returned: always
  type: bool
id:
  description: Id of the image in the runtime's storage; null when it is not there.
  returned: success
  type: str
labels:
  description: Labels of the image, such as what the engine can do.
  returned: success
  type: dict
actions:
  description: The commands that changed something, or would.
  returned: success
  type: list
  elements: str
notes:
  description: What could not be known yet.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.tensorless.fleet.plugins.module_utils._image_entry import run_module


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "image": {"type": "str", "required": True},
            "runtime": {"type": "str", "choices": ["auto", "podman", "docker"], "default": "auto"},
            "retries": {"type": "int", "default": 3},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "progress_file": {"type": "path"},
        },
        supports_check_mode=True,
    )
    run_module(module)


if __name__ == "__main__":
    main()
