#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module; the logic is in module_utils/_power.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tensorless_power_sweep
short_description: Measure a running server at several power limits of its card
version_added: 0.1.0
author:
  - tensorless.fleet authors (@tensorless)
description:
  - Sets a limit by UUID, reads it back, measures, and goes on to the next; the first limit is measured once more last.
  - The former limit comes back on every way out. A transient unit of the host's service manager waits for the end of
    the module's process and sets it back also after a kill.
options:
  plan:
    description: A plan as M(tensorless.fleet.tensorless_recipe) returns it.
    type: dict
  model:
    description: The model's repo id. Needed without O(plan).
    type: str
  host:
    description: Address of the server.
    type: str
  port:
    description: Port of the server.
    type: int
  api_key_file:
    description: File on the host that holds the server's API key. A plan names its own.
    type: path
  card_uuid:
    description: UUID of the card. Needed without O(plan).
    type: str
  limits_w:
    description: Limits in watts. By default the card's own, and 80 and 60 percent of it.
    type: list
    elements: float
  settle_s:
    description: Seconds between setting a limit and measuring.
    type: float
    default: 20
  runs:
    description: Runs at each limit.
    type: int
    default: 3
  tokens:
    description: Tokens of each run.
    type: int
    default: 256
  on_busy:
    description: Whether to wait for a busy card, refuse it, or measure it anyway.
    type: str
    choices: [wait, refuse, label]
    default: refuse
  results_dir:
    description: Where the last result of each card is kept; the sweep is put beside it.
    type: path
    default: /var/lib/tensorless/bench
  progress_file:
    description: A file on the host that holds the latest progress. The action plugin of this module chooses one itself.
    type: path
attributes:
  check_mode:
    support: full
    description: Says the limits and their order, and sets nothing.
  diff_mode:
    support: none
    description: The limit is the former one at the end.
  platform:
    support: full
    platforms: linux
    description: Needs C(systemd-run) and C(nvidia-smi).
seealso:
  - module: tensorless.fleet.tensorless_bench
"""

EXAMPLES = r"""
- name: What does a lower limit cost?
  tensorless.fleet.tensorless_power_sweep:
    plan: "{{ plan_results[0] }}"
    limits_w: [250, 200, 150]
"""

RETURN = r"""
limits:
  description: The card's C(limit), C(default), C(min) and C(max) in watts before the sweep.
  returned: success
  type: dict
order:
  description: The limits as they were, or would be, measured.
  returned: success
  type: list
  elements: float
rows:
  description: One row a limit with C(value), C(decode_tps), C(sm_mhz), C(power_w) and C(throttle) shares.
  returned: success
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_plan import said
from ansible_collections.tensorless.fleet.plugins.module_utils._power import sweep
from ansible_collections.tensorless.fleet.plugins.module_utils._progress import progress_writer
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.module_utils._witness import tolerant

OPTIONS = {
    "plan": {"type": "dict"},
    "model": {"type": "str"},
    "host": {"type": "str"},
    "port": {"type": "int"},
    "api_key_file": {"type": "path"},
    "card_uuid": {"type": "str"},
    "limits_w": {"type": "list", "elements": "float"},
    "settle_s": {"type": "float", "default": 20},
    "runs": {"type": "int", "default": 3},
    "tokens": {"type": "int", "default": 256, "no_log": False},
    "on_busy": {"type": "str", "choices": ["wait", "refuse", "label"], "default": "refuse"},
    "results_dir": {"type": "path", "default": "/var/lib/tensorless/bench"},
    "progress_file": {"type": "path"},
}


def main() -> None:
    module = AnsibleModule(argument_spec=OPTIONS, supports_check_mode=True)
    report, close = progress_writer(module.params["progress_file"])
    try:
        answer = sweep(module.params, tolerant(module.run_command), module.check_mode, said(report))
    except (Refusal, OSError) as fault:
        module.fail_json(msg=str(fault), rc=getattr(fault, "rc", 1))
    finally:
        close()
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
