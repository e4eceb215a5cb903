# SPDX-License-Identifier: Apache-2.0
"""The cards of a host as facts: nvidia-smi's answer in all the forms that occur, beside what the kernel says.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _gpu_bus as bus
from ansible_collections.tensorless.fleet.plugins.module_utils import _gpu_cells as cells
from ansible_collections.tensorless.fleet.plugins.module_utils import _gpu_log, _gpu_xml
from ansible_collections.tensorless.fleet.plugins.module_utils._driver import verdict
from ansible_collections.tensorless.fleet.plugins.module_utils._host import TIMED_OUT, Files, Run

# A card without a process reports a few MiB at most; more means that somebody is on it, and then it is asked who.
IDLE_MIB = 50
_BAD_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')
_LOST = re.compile(
    r"^Unable to (?:determine|detect) the device handle for GPU\s*(?:(?P<index>\d{1,3}):\s*)?"
    r"(?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)?:?\s*(?P<why>.*)$",
    re.IGNORECASE,
)
_WARNING = re.compile(r"^WARNING: (?P<text>.*?)(?: at gpu (?P<bus>[0-9A-Fa-f:.]+))?\s*$", re.IGNORECASE)
_NONE = re.compile(r"^No (?:supported )?(?:devices|GPUs) (?:were )?found\b", re.IGNORECASE)
_NVML = re.compile(r"Failed to initialize NVML: (?P<why>.*)", re.IGNORECASE)
_LOADER = "error while loading shared libraries"
# What the loader and the shell say around any program; it is about the host's settings and not about a card.
_NOISE = re.compile(
    r"^(?:ERROR: ld\.so: .*ignored\.|.*: warning: setlocale: .*"
    r"|.*: no version information available \(required by .*\))$"
)
_SHOWN = 5  # unexpected lines that are repeated in the facts
HARD_THROTTLE = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


class Answer:
    """One nvidia-smi query, taken apart: rows, cards that could not be reached, warnings and what else was said."""

    def __init__(self, rc: int, text: str, fields: Sequence[str]) -> None:
        self.rc = rc
        self.rows: list[cells.Cells] = []
        self.lost: list[dict[str, Any]] = []
        self.warnings: list[dict[str, Optional[str]]] = []
        self.odd: list[str] = []
        self.none = False
        # By line feeds only: a name may hold what Python calls a line's end as well.
        for line in text.replace("\0", "").split("\n"):
            line = line.strip("\r\ufeff")
            if line.strip():
                self._take(line, fields)

    def _take(self, line: str, fields: Sequence[str]) -> None:
        lost, warning = _LOST.match(line.strip()), _WARNING.match(line.strip())
        if _NOISE.match(line.strip()):
            return
        if lost:
            index = lost.group("index")
            self.lost.append(
                {
                    "index": int(index) if index else None,
                    "pci_id": cells.pci_id(lost.group("bus") or ""),
                    "reason": lost.group("why").strip() or "unknown",
                }
            )
        elif warning:
            at = cells.pci_id(warning.group("bus") or "")
            self.warnings.append({"pci_id": at, "text": line.strip()})
        elif _NONE.match(line.strip()):
            self.none = True
        elif re.match(r"index ?,", line.strip()):
            return
        else:
            try:
                self.rows.append(cells.Cells(cells.split_row(line, fields)))
            except cells.RowError as exc:
                self.odd.append(str(exc))


def _card(row: cells.Cells) -> dict[str, Any]:
    index = row.integer("index")
    mask = row.matching("clocks_throttle_reasons.active", r"^0x[0-9A-Fa-f]{1,16}$")
    device = row.matching("pci.device_id", r"^0x[0-9A-Fa-f]{8}$")
    device_id = f"10de:{device[2:6].lower()}" if device else None
    capability = row.matching("compute_cap", r"^\d{1,2}\.\d$")
    source = "nvidia-smi" if capability else None
    name = row.text("name")
    if capability is None:
        known = bus.KNOWN_DEVICES.get((device_id or "")[5:]) or ("6.0" if "Tesla P100" in (name or "") else None)
        capability, source = known, "table" if known else None
    throttle = cells.throttle(mask)
    card: dict[str, Any] = {
        "index": index,
        "uuid": row.text("uuid"),
        "name": name,
        "pci_id": cells.pci_id(row.text("pci.bus_id") or ""),
        "device_id": device_id,
        "compute_capability": capability,
        "compute_capability_source": source,
        "driver_version": row.matching("driver_version", r"^\d+(\.\d+)+$"),
        "memory_mib": row.integer("memory.total"),
        "memory_used_mib": row.integer("memory.used"),
        "memory_free_mib": row.integer("memory.free"),
        "persistence_mode": row.switch("persistence_mode"),
        "pcie_gen": row.integer("pcie.link.gen.current"),
        "pcie_gen_max": row.integer("pcie.link.gen.max"),
        "pcie_width": row.integer("pcie.link.width.current"),
        "pcie_width_max": row.integer("pcie.link.width.max"),
        "temperature_c": row.integer("temperature.gpu"),
        "temperature_memory_c": row.integer("temperature.memory"),
        "clock_sm_mhz": row.integer("clocks.sm"),
        "clock_memory_mhz": row.integer("clocks.mem"),
        "clock_sm_max_mhz": row.integer("clocks.max.sm"),
        "clock_memory_max_mhz": row.integer("clocks.max.mem"),
        "power_w": row.decimal("power.draw"),
        "power_limit_w": row.decimal("power.limit"),
        "power_default_limit_w": row.decimal("power.default_limit"),
        "throttle_mask": mask,
        "throttle_reasons": None if mask is None else throttle,
        "ecc": row.switch("ecc.mode.current"),
        "ecc_corrected": row.integer("ecc.errors.corrected.volatile.total"),
        "ecc_uncorrected": row.integer("ecc.errors.uncorrected.volatile.total"),
        "retired_pages_single": row.integer("retired_pages.single_bit_ecc.count"),
        "retired_pages_double": row.integer("retired_pages.double_bit.count"),
        "retired_pages_pending": row.switch("retired_pages.pending"),
        "mig": row.switch("mig.mode.current"),
        "utilization_percent": row.integer("utilization.gpu"),
    }
    if card["uuid"] is None and card["memory_mib"] is None and not row.faults:
        row.faults.append(f"no UUID and no memory size, only {row.missing['memory.total']}")
    width = card["pcie_width"]
    if width is not None and width not in bus.WIDTHS:
        row.missing["pcie.link.width.current"] = f"no real width: {width}"
        card["pcie_width"] = None
        row.faults.append("link width is not a real one")
    total, used = card["memory_mib"], card["memory_used_mib"]
    if total is not None and used is not None and used > total:
        row.missing["memory.used"] = f"more than the card has: {used} MiB"
        card["memory_used_mib"] = None
    card["missing"] = row.missing
    card["reasons"] = _card_reasons(card, row.faults)
    card["healthy"] = not card["reasons"]
    return card


def _card_reasons(card: dict[str, Any], faults: Sequence[str]) -> list[str]:
    reasons = [f"nvidia-smi says: {fault}" for fault in faults]
    hard = [name for name in card["throttle_reasons"] or [] if name in HARD_THROTTLE]
    if hard:
        reasons.append(f"slowed down by the hardware: {', '.join(hard)}")
    if card["ecc_uncorrected"]:
        reasons.append(f"{card['ecc_uncorrected']} uncorrected memory errors since the driver was loaded")
    if card["retired_pages_pending"]:
        reasons.append("memory pages wait for retirement: reboot")
    if card["mig"]:
        reasons.append("MIG is on: the card is shared out in parts")
    return reasons


def _ask(run: Run, program: str) -> tuple[int, str, list[str]]:
    """The CSV query, repeated without the fields that this nvidia-smi does not know."""
    fields = cells.query(cells.OPTIONAL)
    looked = False
    newer: dict[str, str] = {}
    while True:
        asked = [newer.get(name, name) for name in fields]
        rc, out, err = run([program, f"--query-gpu={','.join(asked)}", "--format=csv,noheader,nounits"])
        text = f"{out}\n{err}" if err.strip() else out
        refused = [fields[asked.index(name)] for name in _BAD_FIELD.findall(text) if name in asked]
        if rc == TIMED_OUT or not refused or refused[0] in cells.REQUIRED:
            return rc, text, fields
        if refused[0] in cells.NEWER_NAMES and refused[0] not in newer:
            newer[refused[0]] = cells.NEWER_NAMES[refused[0]]
            continue
        gone = {refused[0]}
        if not looked:
            # One look at the list of fields spares a start for each further unknown one.
            looked = True
            _rc, listed, _err = run([program, "--help-query-gpu"])
            known = set(re.findall(r'"([A-Za-z0-9_.]+)"', listed))
            if set(cells.REQUIRED) <= known:
                gone |= {name for name in fields if newer.get(name, name) not in known and name not in cells.REQUIRED}
        fields = [name for name in fields if name not in gone]


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else ""


def _diagnose(facts: dict[str, Any], run: Run) -> Optional[str]:
    """Why no card is driven, from the kernel's own words."""
    log = _gpu_log.read(run)
    problem = _gpu_log.driver_problem(log) if log else None
    if problem is None and facts["kernel_module"] == "nouveau":
        problem = {
            "cause": "other_driver",
            "message": "nouveau holds the card",
            "fix": "blacklist nouveau, rebuild the initramfs and reboot",
        }
    if problem is None and facts["kernel_module"] == "open" and _pascal(facts):
        problem = {
            "cause": "open_module",
            "message": "the open kernel module is loaded, and it does not drive Pascal cards",
            "fix": "install the proprietary kernel module of the same branch and reboot",
        }
    loaded = bus.branch(facts["loaded_version"])
    if problem is None and loaded is not None and loaded > 580 and _pascal(facts):
        problem = {
            "cause": "branch_too_new",
            "message": f"the loaded driver {facts['loaded_version']} is newer than R580, the last branch for Pascal",
            "fix": "install a driver of the R580 branch and reboot",
        }
    facts["problem"] = problem
    return f"{problem['message']}: {problem['fix']}" if problem else None


def _pascal(facts: dict[str, Any]) -> bool:
    return any((card["compute_capability"] or "").startswith("6.") for card in facts["pci_cards"])


def _empty(files: Files) -> dict[str, Any]:
    loaded = bus.loaded_version(files)
    return {
        "state": "failed",
        "healthy": False,
        "reasons": [],
        "driver_version": loaded,
        "branch": bus.branch(loaded),
        "loaded_version": loaded,
        "installed_version": bus.installed_version(files),
        "kernel_module": bus.kernel_module(files),
        "reboot_required": False,
        "problem": None,
        "cards": [],
        "lost_cards": [],
        "pci_cards": bus.pci_cards(files),
        "processes": [],
        "nvidia_smi": {
            "found": False,
            "rc": None,
            "message": "nvidia-smi not found",
            "seconds": None,
            "timed_out": False,
        },
    }


def _failure(facts: dict[str, Any], answer: Answer, text: str, run: Run) -> None:
    """No row at all: says what that means."""
    smi, reasons = facts["nvidia_smi"], facts["reasons"]
    rc, nvml = answer.rc, _NVML.search(text)
    why = nvml.group("why").lower() if nvml else ""
    held = [card for card in facts["pci_cards"] if card["driver"] not in ("vfio-pci",)]
    if rc == TIMED_OUT:
        smi["timed_out"] = True
        reasons.append(
            f"nvidia-smi gave no answer within {smi['limit']:g} s and was ended; a card may hang: see the kernel log"
        )
    elif rc == 18 or "version mismatch" in why:
        facts["reboot_required"] = True
        reasons.append("the driver's libraries are newer than its loaded module: reboot")
    elif answer.none or rc == 6:
        if not held and facts["pci_cards"]:
            reasons.append("every NVIDIA card is reserved for virtual machines (vfio-pci)")
        elif held:
            reasons.append(_diagnose(facts, run) or "the driver is loaded, but drives none of the cards on the PCI bus")
        else:
            reasons.append("there is no NVIDIA card on the PCI bus")
    elif rc == 9 or "driver not loaded" in why or "couldn't communicate with the NVIDIA driver" in text:
        reasons.append(
            _diagnose(facts, run) or "the driver is not loaded: reboot, or install it for the running kernel"
        )
    elif "insufficient permissions" in text.lower():
        reasons.append("nvidia-smi may not open the card: check the access rights of /dev/nvidia*")
    elif rc == 12 or "shared librar" in text or "libnvidia-ml.so" in text:
        reasons.append("nvidia-smi does not find the driver's library: install the driver completely")
    else:
        outcome = f"nvidia-smi failed with status {rc}" if rc else "nvidia-smi ended with status 0 and listed no card"
        reasons.append(f"{outcome}: {smi['message'] or 'no message'}")
        reasons += [
            line for line in answer.odd[:_SHOWN] if not line.startswith("1 cells")
        ]  # words stand in the message


def _keep_rows(facts: dict[str, Any], answer: Answer) -> None:
    seen: set[Any] = set()
    for row in answer.rows:
        card = _card(row)
        if card["index"] in seen or (card["uuid"] is not None and card["uuid"] in seen):
            facts["reasons"].append(f"nvidia-smi listed card {card['index']} twice; the first is kept")
            continue
        seen.update({card["index"], card["uuid"]})
        facts["cards"].append(card)
    for warning in answer.warnings[:100]:
        if warning["text"] in facts["reasons"]:
            continue
        for card in facts["cards"]:
            if warning["pci_id"] is not None and card["pci_id"] == warning["pci_id"]:
                card["reasons"].append(str(warning["text"]))
                card["healthy"] = False
        facts["reasons"].append(str(warning["text"]))
    for lost in answer.lost:
        where = lost["pci_id"] or (f"GPU {lost['index']}" if lost["index"] is not None else "unknown place")
        facts["reasons"].append(f"a card is lost ({where}): {lost['reason']}; reboot or power-cycle the host")
    facts["lost_cards"] = answer.lost
    facts["reasons"] += [f"unexpected line from nvidia-smi: {line}" for line in answer.odd[:_SHOWN]]
    if len(answer.odd) > _SHOWN:
        facts["reasons"].append(f"{len(answer.odd) - _SHOWN} more unexpected lines from nvidia-smi")
    if answer.rc not in (0, 14):
        facts["reasons"].append(f"nvidia-smi ended with status {answer.rc}")
    facts["reasons"] += [f"card {card['index']}: {why}" for card in facts["cards"] for why in card["reasons"]]


def _read(
    run: Run,
    program: Optional[str] = "nvidia-smi",
    files: Optional[Files] = None,
    processes: str = "auto",
    limit: float = 30.0,
) -> dict[str, Any]:
    files = files or Files()
    facts = _empty(files)
    if program is None:
        facts["state"] = "absent" if facts["loaded_version"] is None else "failed"
        found = (
            f"{len(facts['pci_cards'])} NVIDIA card(s) on the PCI bus"
            if facts["pci_cards"]
            else "no NVIDIA card on the bus"
        )
        facts["reasons"].append(f"no NVIDIA driver is installed (nvidia-smi not found); {found}")
        return facts
    started = time.monotonic()
    rc, text, fields = _ask(run, program)
    seconds = round(time.monotonic() - started, 3)
    if rc == 127 and _LOADER not in text:
        return _read(run, None, files)
    answer = Answer(rc, text, fields)
    message = "" if answer.rows else _first_line(text)
    facts["nvidia_smi"] = {
        "found": True,
        "rc": rc,
        "message": message,
        "seconds": seconds,
        "timed_out": rc == TIMED_OUT,
        "limit": limit,
    }
    if rc == TIMED_OUT or not answer.rows:
        facts["lost_cards"] = answer.lost
        if answer.lost:
            facts["reasons"] += [
                f"a card is lost: {lost['reason']}; reboot or power-cycle the host" for lost in answer.lost
            ]
        _failure(facts, answer, text, run)
        return facts
    _keep_rows(facts, answer)
    # What the rows say is the loaded driver; a tool of another version may stand between.
    facts["driver_version"] = next(
        (c["driver_version"] for c in facts["cards"] if c["driver_version"]), facts["loaded_version"]
    )
    facts["branch"] = bus.branch(facts["driver_version"])
    facts["loaded_version"] = facts["loaded_version"] or facts["driver_version"]
    listed = {card["pci_id"] for card in facts["cards"]}
    for card in facts["pci_cards"]:
        why = bus.unserved(card)
        if why and card["pci_id"] not in listed:
            facts["reasons"].append(f"the card at {card['pci_id']} is on the bus, but {why}")
    busy = any((card["memory_used_mib"] or 0) > IDLE_MIB for card in facts["cards"])
    if processes == "yes" or (processes == "auto" and busy):
        _rc, report, _err = run([program, "-q", "-x"])
        try:
            facts["processes"] = _gpu_xml.processes(report)
        except _gpu_xml.XmlError as exc:
            facts["reasons"].append(str(exc))
    facts["state"] = "degraded" if facts["reasons"] else "ok"
    facts["healthy"] = not facts["reasons"]
    return facts


def read_gpus(
    run: Run,
    program: Optional[str] = "nvidia-smi",
    files: Optional[Files] = None,
    processes: str = "auto",
    limit: float = 30.0,
) -> dict[str, Any]:
    """The facts. `run` has a time limit of its own (status 124 when it was reached); `program` None: not installed.

    processes: auto asks for them only when a card has memory in use, which spares a second start; yes and no say it.
    """
    facts = _read(run, program, files, processes, limit)
    facts["driver_message"] = verdict(facts)
    facts["driver_ok"] = facts["driver_message"] is None
    return facts
