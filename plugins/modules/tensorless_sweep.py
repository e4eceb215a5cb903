#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module; the logic is in module_utils/_bench_sweep.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tensorless_sweep
short_description: Measure a running server over prompt lengths or numbers of streams
version_added: 0.1.0
author:
  - tensorless.fleet authors (@tensorless)
description:
  - Takes the arms of a sweep in turn, as often as asked, and the first arm once more at the end as the control. A sweep
    whose control has drifted does not stand, and says so.
  - The sweep is kept beside the card's last result of M(tensorless.fleet.tensorless_bench) and comes with the report.
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
  api_key:
    description: The server's API key, where it was started with one.
    type: str
  api_key_file:
    description: File on the host that holds the server's API key. A plan names its own.
    type: path
  card_uuid:
    description: UUID of the card that the server uses.
    type: str
  kind:
    description:
      - V(prompt) varies the number of prompt tokens, V(streams) the number of requests at once.
    type: str
    choices: [prompt, streams]
    default: prompt
  values:
    description:
      - The arms. Prompt tokens, where 0 is the built-in prompt, by default 0, 4096, 32768 and 65536; or streams, by
        default 1, 2, 4 and 8. A prompt as long as the context is cut to leave room for the answer; a longer one is
        skipped with its reason.
    type: list
    elements: int
  repeats:
    description: How often each arm is taken.
    type: int
    default: 2
  tokens:
    description: Tokens to generate in each run.
    type: int
    default: 256
  first_token_s:
    description: Longest wait in seconds for a first token; a long prompt takes minutes to read.
    type: float
    default: 1800
  on_busy:
    description: Whether to wait for a busy card, refuse it, or measure it anyway.
    type: str
    choices: [wait, refuse, label]
    default: refuse
  wait_s:
    description: Longest wait in seconds for a quiet card, or for its lease.
    type: float
    default: 120
  results_dir:
    description: Where the last result of each card is kept.
    type: path
    default: /var/lib/tensorless/bench
  progress_file:
    description: A file on the host that holds the latest progress. The action plugin of this module chooses one itself.
    type: path
attributes:
  check_mode:
    support: full
    description: Says the order of the arms and sends nothing.
  diff_mode:
    support: none
    description: A measurement changes nothing but its own record.
  platform:
    support: full
    platforms: linux
    description: Reads C(/proc) of the host.
seealso:
  - module: tensorless.fleet.tensorless_bench
"""

EXAMPLES = r"""
- name: Measure the prompt lengths that no receipt has yet
  tensorless.fleet.tensorless_sweep:
    plan: "{{ plan_results[0] }}"

- name: Measure one, two and four requests at once
  tensorless.fleet.tensorless_sweep:
    plan: "{{ plan_results[0] }}"
    kind: streams
    values: [1, 2, 4]
"""

RETURN = r"""
order:
  description: The arms as they were, or would be, taken.
  returned: success
  type: list
  elements: int
sweep:
  description: The sweep. Null in check mode.
  returned: success
  type: dict
  contains:
    kind:
      description: What was varied.
      type: str
    arms:
      description:
        - One row an arm, with C(value), C(runs), C(slots), C(prompt_tokens), C(decode_tps) of one stream,
          C(aggregate_tps) of all together, C(prefill_tps), C(ttft_ms), C(spread) and, where there is no number,
          C(reasons).
      type: list
      elements: dict
    control_drift:
      description: The last run's decode rate against the first arm's median, 0.01 is one percent.
      type: float
    valid:
      description: Whether the control came back to where it was.
      type: bool
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_plan import said
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_sweep import act
from ansible_collections.tensorless.fleet.plugins.module_utils._progress import progress_writer
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.module_utils._witness import tolerant

OPTIONS = {
    "plan": {"type": "dict"},
    "model": {"type": "str"},
    "host": {"type": "str"},
    "port": {"type": "int"},
    "api_key": {"type": "str", "no_log": True},
    "api_key_file": {"type": "path"},
    "card_uuid": {"type": "str"},
    "kind": {"type": "str", "choices": ["prompt", "streams"], "default": "prompt"},
    "values": {"type": "list", "elements": "int"},
    "repeats": {"type": "int", "default": 2},
    "tokens": {"type": "int", "default": 256, "no_log": False},
    "first_token_s": {"type": "float", "default": 1800, "no_log": False},
    "on_busy": {"type": "str", "choices": ["wait", "refuse", "label"], "default": "refuse"},
    "wait_s": {"type": "float", "default": 120},
    "results_dir": {"type": "path", "default": "/var/lib/tensorless/bench"},
    "progress_file": {"type": "path"},
}


def main() -> None:
    module = AnsibleModule(argument_spec=OPTIONS, supports_check_mode=True)
    report, close = progress_writer(module.params["progress_file"])
    try:
        answer = act(module.params, tolerant(module.run_command), module.check_mode, said(report))
    except (Refusal, OSError) as fault:
        module.fail_json(msg=str(fault), rc=getattr(fault, "rc", 1))
    finally:
        close()
    for note in (answer["sweep"] or {}).get("notes", []):
        module.warn(note)
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
