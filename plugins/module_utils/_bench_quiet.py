# SPDX-License-Identifier: Apache-2.0
"""Whether a card and its host are quiet, and what the machine says of itself around a measurement.

Private to the collection: it may change at any time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _bench, _witness

IO_PRESSURE = 20.0  # percent of ten seconds in which something waited for a drive: a model load, a download
LOAD_PER_CORE = 1.0
FAULT = re.compile(r"NVRM: Xid|GSP|AER:.*(?:[Cc]orrected|[Uu]ncorrected|Fatal)|fallen off the bus")


def machine_id(path: str = "/etc/machine-id") -> Optional[str]:
    """What a result belongs to beside the card; host names are only labels."""
    try:
        with open(path, encoding="ascii") as handle:
            return handle.read().strip() or None
    except OSError:
        return None


def card_identity(run: _witness.Run, uuid: Optional[str]) -> dict[str, Any]:
    """Index, name, PCI address and driver of a card that is asked for by UUID; {} where it cannot be told."""
    if not uuid:
        return {}
    query = "--query-gpu=index,name,pci.bus_id,driver_version,uuid"
    rc, out, _err = run(["nvidia-smi", query, "--format=csv,noheader", "-i", uuid])
    for line in reversed(out.strip().splitlines() if rc == 0 else []):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[4] == uuid:
            return {"index": int(cells[0]), "name": cells[1], "pci_id": cells[2], "driver_version": cells[3]}
    return {}


def served_models(answer: Any) -> list[str]:
    """Every name under which the server offers its models."""
    names: list[Any] = []
    if isinstance(answer, dict):
        for entry in answer.get("data") or []:
            if isinstance(entry, dict):
                names += [entry.get("id"), *(entry.get("aliases") or [])]
        for entry in answer.get("models") or []:
            if isinstance(entry, dict):
                names += [entry.get("name"), entry.get("model")]
    return list(dict.fromkeys(str(name) for name in names if name))


def busy_slots(slots: Any) -> int:
    """How many slots are at work; 0 also where the server does not say."""
    if not isinstance(slots, list):
        return 0
    return sum(1 for slot in slots if isinstance(slot, dict) and (slot.get("is_processing") or slot.get("state") == 1))


def tokens_total(metrics: Any) -> Optional[int]:
    """The server's count of generated tokens from /metrics, where that is on."""
    found = (
        re.search(r"^llamacpp:tokens_predicted_total\s+([0-9.e+]+)", metrics, re.M)
        if isinstance(metrics, str)
        else None
    )
    return int(float(found.group(1))) if found else None


def server_pids(processes: Optional[Sequence[dict[str, Any]]], alias: Optional[str], proc: str = "/proc") -> list[int]:
    """Which of the card's processes are the server under test: llama-server, with this alias where one is known."""
    found = []
    for process in processes or []:
        try:
            with open(f"{proc}/{process['pid']}/cmdline", "rb") as handle:
                words = handle.read().decode("utf-8", "replace").split("\0")
        except OSError:
            words = [str(process.get("name"))]
        is_server = os.path.basename(words[0]).startswith("llama-server")
        named = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--alias", "-a")]
        if is_server and (not alias or not named or alias in named):
            found.append(int(process["pid"]))
    return found


def look(run: _witness.Run, uuid: Optional[str], alias: Optional[str], slots: Any) -> dict[str, Any]:
    """Everything that could disturb a measurement, and the list of what does."""
    host = _witness.read_host()
    processes = _witness.CardReader(run, uuid).processes()
    own = server_pids(processes, alias)
    others = None if processes is None else [p for p in processes if p["pid"] not in own]
    busy = [f"process {p['pid']} ({p['name']}) is on the card" for p in others or []]
    if busy_slots(slots):
        busy.append("a request is in the server's slot")
    cores = os.cpu_count() or 1
    if host["io_pressure"] is not None and host["io_pressure"] >= IO_PRESSURE:
        busy.append(f"IO pressure is {host['io_pressure']:.0f} %")
    if host["load1"] is not None and host["load1"] > cores * LOAD_PER_CORE:
        busy.append(f"the load is {host['load1']:.1f} on {cores} cores")
    return {
        **host,
        "cores": cores,
        "other_processes": others,
        "server_pids": own,
        "server_pid": own[0] if own else None,
        "slots": "busy" if busy_slots(slots) else ("idle" if isinstance(slots, list) else "unknown"),
        "busy": busy,
    }


def echo_notes(settings: Any) -> list[str]:
    """What the server says it understood, where that is not what was asked."""
    if not isinstance(settings, dict):
        return []
    notes = _bench.contradictions(settings)
    if settings.get("ignore_eos") is True and settings.get("logit_bias") == []:
        notes.append("the server lists no end token as banned: ignore_eos may be without effect")
    return notes


def kernel_log(run: _witness.Run) -> Optional[list[str]]:
    """The kernel's lines about cards and PCIe faults; None where the log may not be read."""
    rc, out, _err = run(["dmesg"])
    return [line for line in out.splitlines() if FAULT.search(line)] if rc == 0 else None


def new_faults(before: Optional[list[str]], after: Optional[list[str]]) -> Optional[list[str]]:
    """Lines that came during a measurement."""
    if before is None or after is None:
        return None
    seen = set(before)
    return [line for line in after if line not in seen]


def bmc(run: _witness.Run) -> Optional[dict[str, Any]]:
    """Fans and temperatures of the chassis from its own controller; None where there is none."""
    found: dict[str, Any] = {"fans": {}, "temperatures": {}, "notes": []}
    for kind, key in (("fan", "fans"), ("temperature", "temperatures")):
        rc, out, _err = run(["ipmitool", "sdr", "type", kind])
        if rc != 0:
            return None
        for line in out.splitlines():
            cells = [cell.strip() for cell in line.split("|")]
            if len(cells) == 5:
                number = re.match(r"([0-9.]+)\s", cells[4])
                found[key][cells[0]] = float(number.group(1)) if number else None
    if found["fans"] and all(value is None for value in found["fans"].values()):
        found["notes"].append("no fan of the chassis can be read: a failed one would not be seen")
    return found
