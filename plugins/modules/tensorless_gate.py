#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module; the logic is in module_utils/_bench_gate.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tensorless_gate
short_description: Say whether a candidate engine is as fast as the present one
version_added: 0.1.0
author:
  - tensorless.fleet authors (@tensorless)
description:
  - Compares results of M(tensorless.fleet.tensorless_bench) of one card. The noise is taken from the present engine
    measured against itself in the same hour, not assumed.
  - Answers for speed only, and says so each time. Numerics and quality are not judged.
options:
  present:
    description:
      - At least two results of the present engine, in the order in which they were taken, the last of them after the
        candidate.
    type: list
    elements: dict
    required: true
  candidate:
    description: Results of the candidate.
    type: list
    elements: dict
    required: true
  tolerance_percent:
    description: Loss of decode rate that is allowed, in percent.
    type: float
    default: 1.0
  receipt_decode_tps:
    description: The receipt's short-context decode rate. Both sides are then shown against it.
    type: float
attributes:
  check_mode:
    support: full
    description: Changes nothing in any mode.
  diff_mode:
    support: none
    description: Changes nothing.
  platform:
    support: full
    platforms: posix
    description: Only computes.
seealso:
  - module: tensorless.fleet.tensorless_bench
"""

EXAMPLES = r"""
- name: Judge the candidate
  tensorless.fleet.tensorless_gate:
    present: "{{ gate_before + gate_after }}"
    candidate: "{{ gate_candidate }}"
    tolerance_percent: 1.0
"""

RETURN = r"""
verdict:
  description: V(pass), V(fail) or V(cannot tell).
  returned: success
  type: str
text:
  description: The verdict in a sentence, with what was not judged.
  returned: success
  type: str
difference_percent:
  description: The candidate against the present engine in percent.
  returned: success
  type: float
band_percent:
  description: The present engine's noise against itself in percent.
  returned: success
  type: float
candidate_decode_tps:
  description: Median decode rate of the candidate.
  returned: success
  type: float
present_decode_tps:
  description: Median decode rate of the present engine.
  returned: success
  type: float
tolerance_percent:
  description: The loss that was allowed.
  returned: success
  type: float
rounds:
  description: Rounds of the present engine.
  returned: success
  type: int
candidate_vs_receipt_percent:
  description: The candidate against the receipt.
  returned: with O(receipt_decode_tps)
  type: float
present_vs_receipt_percent:
  description: The present engine against the receipt.
  returned: with O(receipt_decode_tps)
  type: float
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_gate import judge
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "present": {"type": "list", "elements": "dict", "required": True},
            "candidate": {"type": "list", "elements": "dict", "required": True},
            "tolerance_percent": {"type": "float", "default": 1.0},
            "receipt_decode_tps": {"type": "float"},
        },
        supports_check_mode=True,
    )
    options = module.params
    try:
        answer = judge(
            options["present"], options["candidate"], options["tolerance_percent"], options["receipt_decode_tps"]
        )
    except Refusal as refusal:
        module.fail_json(msg=refusal.message, rc=refusal.rc)
    module.exit_json(changed=False, **answer)


if __name__ == "__main__":
    main()
