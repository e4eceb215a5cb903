#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module; the logic is in module_utils/_bench*.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tensorless_bench
short_description: Measure a running server's decode speed and compare it with the receipt
version_added: 0.1.0
author:
  - tensorless.fleet authors (@tensorless)
description:
  - Sends one warm-up request and then the measured ones to a running C(llama-server), as the receipts were measured.
    Greedy, seed 424242, 256 tokens past any end token, no prompt cache, a new connection each.
  - Tokens are counted by the server's own counter and timed on the raw bytes. A run that stopped early, met the
    prompt cache or another request is thrown out with its reason, and repeated once.
  - A witness process samples the card and the host during each run. A lease on the card keeps two benchmarks of this
    host apart.
  - Where the host's own record says that the server runs another plan than O(plan), nothing is measured and the
    difference is named.
  - The result is stored on the host, one file a card, and stands until the image digest, the plan, the driver or the
    card is another one.
options:
  plan:
    description: A plan as M(tensorless.fleet.tensorless_recipe) returns it. It answers all options about the server.
    type: dict
  model:
    description: The model's repo id, as it shall stand in the result. Needed without O(plan).
    type: str
  card:
    description: The recipe's card id, for example V(p100).
    type: str
  host:
    description: Address of the server.
    type: str
  port:
    description: Port of the server.
    type: int
  alias:
    description: The name under which the server should offer the model. Another one is measured, but never compared.
    type: str
  api_key:
    description: The server's API key, where it was started with one.
    type: str
  api_key_file:
    description: File on the host that holds the server's API key. A plan names its own.
    type: path
  card_uuid:
    description: UUID of the card that the server uses. Without it there is no lease and no witness of the card.
    type: str
  receipt_decode_tps:
    description: The receipt's short-context decode rate in tokens per second.
    type: float
  receipt_applies:
    description: Whether the server is the configuration that the receipt measured.
    type: bool
  untuned_label:
    description: Why the server is not the measured configuration. It stays with the result.
    type: str
  image_digest:
    description: Digest of the engine image.
    type: str
  plan_hash:
    description: Hash of the plan that the server runs.
    type: str
  driver_version:
    description: Version of the loaded driver. Without it C(nvidia-smi) is asked.
    type: str
  runs:
    description: Number of measured runs.
    type: int
    default: 3
  tokens:
    description: Tokens to generate in each run, at least 2.
    type: int
    default: 256
  mode:
    description:
      - V(if_changed) measures where the last result is of another image digest, plan, driver or card.
      - V(always) measures.
      - V(read) returns the last results of all cards of the host and measures nothing.
    type: str
    choices: [if_changed, always, read]
    default: if_changed
  on_busy:
    description:
      - What to do when the card, its server or the host is not quiet. V(wait) waits O(wait_s) and then refuses,
        V(label) measures and says in the result what was going on.
      - A lease held by somebody else is never overrun.
    type: str
    choices: [wait, refuse, label]
    default: refuse
  wait_s:
    description: Longest wait in seconds for a quiet card, or for its lease.
    type: float
    default: 120
  pause_s:
    description: Pause in seconds between runs.
    type: float
    default: 0
  witness_interval_s:
    description: Time in seconds between two samples of the witness.
    type: float
    default: 0.5
  results_dir:
    description: Where the last result of each card is kept.
    type: path
    default: /var/lib/tensorless/bench
  progress_file:
    description:
      - A file on the host that holds the latest progress while the task runs. The action plugin of this module chooses
        one itself, and prints what it reads there.
    type: path
attributes:
  check_mode:
    support: full
    description: Says whether it would measure, and sends nothing.
  diff_mode:
    support: none
    description: A measurement changes nothing but its own record.
  platform:
    support: full
    platforms: linux
    description: Reads C(/proc) of the host.
seealso:
  - module: tensorless.fleet.tensorless_server
  - module: tensorless.fleet.tensorless_report
"""

EXAMPLES = r"""
- name: Measure the server on this host where its configuration has not been measured yet
  tensorless.fleet.tensorless_bench:
    plan: "{{ plan_results[0] }}"

- name: Measure any llama-server, five times
  tensorless.fleet.tensorless_bench:
    model: iamMrDuncan/Qwen3.8-27B-PN3-GGUF
    host: 127.0.0.1
    port: 8080
    runs: 5
    mode: always

- name: Read what was measured before
  tensorless.fleet.tensorless_bench:
    mode: read
"""

RETURN = r"""
card_uuid:
  description: The card that could not be measured.
  returned: on failure
  type: str
rc:
  description: The launcher's exit status for this failure, 2 for bad usage.
  returned: on failure
  type: int
measured:
  description: Whether this call measured.
  returned: always
  type: bool
reason:
  description: Why it measured, would measure, or did not.
  returned: when O(mode) is not V(read)
  type: str
model:
  description: The model's repo id.
  returned: when there is a result
  type: str
card:
  description: The recipe's card id.
  returned: when there is a result
  type: str
endpoint:
  description: Where the server answers.
  returned: when there is a result
  type: str
  sample: http://127.0.0.1:8080
runs:
  description: The runs that count.
  returned: when there is a result
  type: list
  elements: dict
  contains:
    decode_tps:
      description: Tokens after the first per second from the first to the last.
      type: float
    ttft_ms:
      description: Milliseconds from the request to the first token.
      type: float
    prompt_tokens:
      description: Prompt tokens as the server counted them.
      type: int
    tokens:
      description: Generated tokens as the server counted them.
      type: int
median_decode_tps:
  description: Median of the runs' decode rates, in tokens per second.
  returned: when there is a result
  type: float
median_ttft_ms:
  description: Median of the runs' times to the first token, in milliseconds.
  returned: when there is a result
  type: float
prompt_tokens:
  description: Prompt tokens of the first run.
  returned: when there is a result
  type: int
receipt_decode_tps:
  description: The receipt's short-context decode rate, in tokens per second.
  returned: when the recipe has one and the server serves its model
  type: float
vs_receipt_percent:
  description: Difference of the median from the receipt in percent of the receipt; faster is positive.
  returned: with RV(receipt_decode_tps)
  type: float
lines:
  description: The summary as the launcher prints it.
  returned: when there is a result
  type: list
  elements: str
result:
  description:
    - The whole result with server timings, per-token times, witness, labels and scope. Its fields are listed in
      C(docs/reference/bench-result.md).
  returned: when there is a result
  type: dict
boot_id:
  description: Which boot of the host this is.
  returned: when O(mode) is V(read)
  type: str
results:
  description: The last result of each card of the host.
  returned: when O(mode) is V(read)
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_plan import act, card_of, said
from ansible_collections.tensorless.fleet.plugins.module_utils._progress import progress_writer
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.module_utils._witness import tolerant

OPTIONS = {
    "plan": {"type": "dict"},
    "model": {"type": "str"},
    "card": {"type": "str"},
    "host": {"type": "str"},
    "port": {"type": "int"},
    "alias": {"type": "str"},
    "api_key": {"type": "str", "no_log": True},
    "api_key_file": {"type": "path"},
    "card_uuid": {"type": "str"},
    "receipt_decode_tps": {"type": "float"},
    "receipt_applies": {"type": "bool"},
    "untuned_label": {"type": "str"},
    "image_digest": {"type": "str"},
    "plan_hash": {"type": "str"},
    "driver_version": {"type": "str"},
    "runs": {"type": "int", "default": 3},
    "tokens": {"type": "int", "default": 256, "no_log": False},
    "mode": {"type": "str", "choices": ["if_changed", "always", "read"], "default": "if_changed"},
    "on_busy": {"type": "str", "choices": ["wait", "refuse", "label"], "default": "refuse"},
    "wait_s": {"type": "float", "default": 120},
    "pause_s": {"type": "float", "default": 0},
    "witness_interval_s": {"type": "float", "default": 0.5},
    "results_dir": {"type": "path", "default": "/var/lib/tensorless/bench"},
    "progress_file": {"type": "path"},
}


def main() -> None:
    module = AnsibleModule(argument_spec=OPTIONS, supports_check_mode=True)
    report, close = progress_writer(module.params["progress_file"])
    try:
        answer = act(module.params, tolerant(module.run_command), module.check_mode, said(report))
    except (Refusal, OSError) as fault:
        module.fail_json(msg=str(fault), card_uuid=card_of(module.params), rc=getattr(fault, "rc", 1))
    finally:
        close()
    for line in answer.get("result", {}).get("warnings", []) if answer["measured"] else []:
        module.warn(line)
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
