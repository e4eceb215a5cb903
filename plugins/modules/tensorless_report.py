# SPDX-License-Identifier: Apache-2.0
"""Documentation only: the work is done on the controller by the action plugin of the same name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tensorless_report
short_description: Write the report of the fleet on the controller
version_added: 0.1.0
author:
  - tensorless.fleet authors (@tensorless)
description:
  - Puts together what the play knows of each host, its cards, their last results, what was skipped and why, and which
    hosts were not reached, and writes it as JSON, Markdown, one self-contained HTML page, CSV and Prometheus text.
  - Runs on the controller and connects to no host, so that the report comes also when hosts are down.
  - Files are rewritten only when something else than the time is new.
options:
  hosts:
    description: Names of the hosts to report on. Without it, the members of the group C(gpu).
    type: list
    elements: str
  dest:
    description: Folder on the controller for the report's files. An earlier report there gives the cards their history.
    type: path
    required: true
  formats:
    description:
      - What to write. V(log) keeps one dated Markdown file for each state of the fleet, and an index of them.
      - V(receipt) writes a receipt for each model, card and engine image, as TOML for the recipe and as Markdown.
      - V(share) writes what a post about the results needs; use it together with O(share).
    type: list
    elements: str
    choices: [json, markdown, html, csv, prometheus, log, receipt, share]
    default: [json, markdown, html, csv, prometheus, log]
  title:
    description: Heading of the report.
    type: str
    default: Fleet report
  query:
    description:
      - A JMESPath expression over the JSON document; its result is returned. Needs C(jmespath) on the controller.
    type: str
  share:
    description: Replace host names, card UUIDs, addresses and user names, and leave out machine ids and PCI addresses.
    type: bool
    default: false
  record:
    description:
      - Entries for the report's ledger, each with C(id), C(claim), and where wanted C(state) (V(stands), V(declined),
        V(not filed) or V(superseded)), C(reason) and C(corrects), the id of the entry that it strikes. Entries are
        never edited or removed.
    type: list
    elements: dict
    default: []
attributes:
  check_mode:
    support: full
    description: Writes nothing.
  diff_mode:
    support: full
    description: Shows the summary before and after.
  platform:
    support: full
    platforms: posix
    description: Runs on the controller.
seealso:
  - module: tensorless.fleet.tensorless_bench
"""

EXAMPLES = r"""
- name: Report on the group gpu
  hosts: localhost
  gather_facts: false
  tasks:
    - name: Write the report
      tensorless.fleet.tensorless_report:
        dest: ./fleet-report

    - name: Name the slow cards
      tensorless.fleet.tensorless_report:
        dest: ./fleet-report
        query: "cards[?slow].[host, uuid, slow_reason]"
      register: slow_cards
"""

RETURN = r"""
dest:
  description: The folder of the report.
  returned: always
  type: str
files:
  description: Paths of the report's files.
  returned: always
  type: list
  elements: str
summary:
  description: The fleet in a few lines.
  returned: always
  type: list
  elements: str
query_result:
  description: What O(query) found.
  returned: when O(query) is given
  type: raw
"""
