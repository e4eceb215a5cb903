#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: tensorless_server
short_description: Keep the model servers of a host running as their plans say
version_added: 0.1.0
author: "tensorless.fleet authors (@tensorless)"
description:
  - Brings the servers of a host to the plans that M(tensorless.fleet.tensorless_recipe) returned. Each server is one
    instance of the systemd unit C(tensorless@.service), which runs the plan's container with podman or docker.
  - Decides from the observed state alone. A server whose container already carries the plan's hash is never restarted;
    a changed plan only restarts the server that it belongs to, and the earlier one comes back when the new one fails.
  - A running container of the same name that this module did not start is refused, never touched.
options:
  plans:
    description:
      - Plans as M(tensorless.fleet.tensorless_recipe) returns them, one for each server.
      - With the other states every server of their models is meant, on whichever card.
    type: list
    elements: dict
    default: []
  name:
    description:
      - The instance (and container) that is meant, instead of plans. Not for O(state=started).
      - Also stops the instances of the same model on other cards, whose names end in a dash and eight characters of
        the card's UUID.
    type: str
  all:
    description: Every server that this collection set up on the host is meant. Not for O(state=started).
    type: bool
    default: false
  state:
    description:
      - V(started) runs and enables the servers and waits until they are ready.
      - V(stopped) stops them and no longer starts them at boot.
      - V(absent) also removes their files, and the unit and launcher after the last of them. The model, the image and
        other containers stay.
      - V(previous) returns servers to the plan that they ran before their last change; where none is kept, it does
        nothing and says so in C(notes).
    type: str
    choices: [started, stopped, absent, previous]
    default: started
  runtime:
    description:
      - Where to look for containers to stop. V(auto) looks in podman and docker, whichever are installed.
      - For O(state=started) the runtime is the plan's.
    type: str
    choices: [auto, podman, docker]
    default: auto
  on_change:
    description: Whether a server that runs with another plan is brought to the new one or refused.
    type: str
    choices: [converge, refuse]
    default: converge
  exclusive:
    description:
      - With O(state=started), stops and removes the servers of this collection on the host that no plan names. The
        plans have to be all of the host's.
      - Models, images and containers of others stay.
    type: bool
    default: false
  health_timeout:
    description: Seconds that a server gets to load its model and become ready.
    type: int
    default: 1200
  drain_timeout:
    description: Seconds to wait for answers in progress before a server is stopped.
    type: int
    default: 60
  scope:
    description:
      - V(system) uses the system's service manager and needs root.
      - V(user) uses the service manager of the user that runs the module, and makes it linger.
    type: str
    choices: [system, user]
    default: system
  progress_file:
    description:
      - Where the module keeps its progress on the host while it runs.
      - Set by the action plugin of the same name, which shows it on the controller.
    type: path
attributes:
  check_mode:
    support: full
    description: Lists what would be done; what depends on programs that are not installed yet is named in C(notes).
  diff_mode:
    support: full
    description: The list of actions.
  platform:
    support: full
    description: Linux with systemd, Python 3.9 or later, and podman 4.3 or later or docker 20.10 or later.
    platforms: linux
"""

EXAMPLES = r"""
- name: Derive the plan of this host
  tensorless.fleet.tensorless_recipe:
    model: pn3
  register: recipe

- name: Keep the server running
  tensorless.fleet.tensorless_server:
    plans: "{{ recipe.plans }}"

- name: Keep these servers running and no other of this collection
  tensorless.fleet.tensorless_server:
    plans: "{{ recipe.plans }}"
    exclusive: true

- name: Stop the server of one model
  tensorless.fleet.tensorless_server:
    name: tensorless-iammrduncan-qwen3.8-27b-pn3-gguf
    state: stopped

- name: Return the servers to what they ran before
  tensorless.fleet.tensorless_server:
    all: true
    state: previous

- name: Remove every server of this collection from the host
  tensorless.fleet.tensorless_server:
    all: true
    state: absent
"""

RETURN = r"""
servers:
  description: One entry for each server, in the order of the plans.
  returned: always
  type: list
  elements: dict
  contains:
    instance:
      description: Name of the systemd instance and of the container.
      type: str
    state:
      description: V(started), V(failed), V(stopped), V(absent), or V(would be started) in check mode.
      type: str
    model:
      description: Repository id of the model.
      type: str
    runtime:
      description: V(podman) or V(docker).
      type: str
    container_name:
      description: Name of the container.
      type: str
    plan_hash:
      description: Hash over the effective inputs of the plan, 64 hexadecimal digits.
      type: str
    image:
      description: The engine image, by digest; null for a server without a data file.
      type: str
    model_path:
      description: The model file on the host; null for a server without a data file.
      type: str
    endpoint:
      description: Address of the server on this host.
      type: str
      sample: http://127.0.0.1:8080
    cards:
      description: The cards that the container gets (index, uuid, name).
      type: list
      elements: dict
    actions:
      description: What was done for it, or would be.
      type: list
      elements: str
    container_id:
      description: Id of the running container.
      returned: when started and not in check mode
      type: str
    pid:
      description: Process id of the server on the host.
      returned: when started and not in check mode
      type: int
    started_at:
      description: When the container started, as the runtime writes it.
      returned: when started and not in check mode
      type: str
    enabled:
      description: Whether it starts at boot.
      returned: when started and not in check mode
      type: bool
    answers_cut:
      description: How many answers a stop cut short; null when the server did not tell.
      returned: when not in check mode
      type: int
    seconds_down:
      description: Seconds from the stop of the earlier server until one was ready again; null when none was stopped.
      returned: when started and not in check mode
      type: float
    previous:
      description: What O(state=previous) would return to (plan_hash, image, runtime); null where none is kept.
      returned: when started and not in check mode
      type: dict
    message:
      description: The documented line, such as C(stopped NAME) or C(NAME is not running).
      returned: when stopped or absent
      type: str
actions:
  description: Every action in order, as text; empty when nothing had to change.
  returned: always
  type: list
  elements: str
notes:
  description: What could not be known yet.
  returned: always
  type: list
  elements: str
unlisted:
  description:
    - Servers of this collection that no plan names and that run or start at boot; with O(exclusive), those removed.
  returned: on success
  type: list
  elements: str
looked_in:
  description: Runtimes that were asked for containers.
  returned: always
  type: list
  elements: str
rc:
  description: The launcher's documented exit status, 0, 1 or 2.
  returned: always
  type: int
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.tensorless.fleet.plugins.module_utils._server_entry import run_module


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "plans": {"type": "list", "elements": "dict", "default": []},
            "name": {"type": "str"},
            "all": {"type": "bool", "default": False},
            "state": {"type": "str", "choices": ["started", "stopped", "absent", "previous"], "default": "started"},
            "runtime": {"type": "str", "choices": ["auto", "podman", "docker"], "default": "auto"},
            "on_change": {"type": "str", "choices": ["converge", "refuse"], "default": "converge"},
            "exclusive": {"type": "bool", "default": False},
            "health_timeout": {"type": "int", "default": 1200},
            "drain_timeout": {"type": "int", "default": 60},
            "scope": {"type": "str", "choices": ["system", "user"], "default": "system"},
            "progress_file": {"type": "path"},
        },
        mutually_exclusive=[("plans", "name", "all")],
        supports_check_mode=True,
    )
    run_module(module)


if __name__ == "__main__":
    main()
