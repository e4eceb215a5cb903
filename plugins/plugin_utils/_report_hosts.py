# SPDX-License-Identifier: GPL-3.0-or-later
"""What a play knows of one host, as the report wants it. Private to the collection: it may change at any time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Optional

from ansible.inventory.manager import InventoryManager

UNHEARD = "nothing was learnt from it in this run: check that it is up and that ssh reaches it"
LEFT_OUT = "--limit left it out"


def left_out(limit: Optional[str], groups: Mapping[str, Any], loader: Any) -> frozenset[str]:
    """The hosts of the inventory that a run's --limit leaves out, by Ansible's own reading of the pattern."""
    if not limit:
        return frozenset()
    inventory = InventoryManager(loader=loader, sources=None, parse=False)
    for group, members in groups.items():
        inventory.add_group(str(group))
        for member in members:
            inventory.add_host(str(member), group=str(group))
    everybody = {host.name for host in inventory.get_hosts("all")}
    inventory.subset(str(limit))
    return frozenset(everybody - {host.name for host in inventory.get_hosts("all")})


def plain(value: Any) -> Any:
    """Ordinary data, whatever wrappers and tags a play has put around it."""
    return json.loads(json.dumps(value, default=str))


def _fact(known: Mapping[str, Any], name: str) -> Any:
    try:
        return plain(known.get(name))
    except Exception as fault:  # a variable of the inventory that cannot be rendered must not cost the report
        return {"unreadable": str(fault)} if name == "ansible_facts" else None


def describe(name: str, known: Any, outside: bool = False) -> dict[str, Any]:
    """One host. `known` is its hostvars; a host that was never reached has almost nothing there.

    `outside`: the run left this host out; what a fact cache or the inventory knows of it is not of this run.
    """
    if outside:
        return {"name": name, "status": "not_in_this_run", "reason": LEFT_OUT}
    if not isinstance(known, Mapping):
        return {"name": name, "status": "unreachable", "reason": f"the inventory has no host {name}"}
    facts = _fact(known, "ansible_facts") or {}
    gpus = facts.get("nvidia_gpu") or {}
    results = _fact(known, "bench_results")
    failure = _fact(known, "fleet_failure")
    status, reason = "ok", None
    if failure:
        status, reason = "failed", str(failure)
    elif results is None and not facts:
        status, reason = "unreachable", UNHEARD
    elif results is None:
        step = "its plan was made" if _fact(known, "plan_results") is not None else "its facts were read"
        status, reason = (
            "failed",
            f"the run stopped on this host after {step}; its own error is in the output of the run",
        )
    elif gpus.get("state") in ("absent", "failed"):
        status, reason = "no_card", "; ".join(gpus.get("reasons") or []) or "no card answers on this host"
    return {
        "name": name,
        "status": status,
        "reason": reason,
        "facts": {
            "machine_id": facts.get("machine_id"),
            "boot_id": _fact(known, "bench_boot_id"),
            "restart_cause": _fact(known, "tensorless_restart_cause"),
            "system": " ".join(str(facts.get(key) or "") for key in ("distribution", "distribution_version")).strip()
            or None,
            "kernel": facts.get("kernel"),
            "runtime": _fact(known, "container_runtime_selected"),
        },
        "gpus": gpus,
        "plans": _fact(known, "plan_results") or [],
        "skipped": _fact(known, "plan_skipped") or [],
        "results": results or [],
        "failures": _fact(known, "bench_failures") or [],
    }
