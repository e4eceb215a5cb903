# SPDX-License-Identifier: Apache-2.0
"""The CSV reader of nvidia-smi: which fields are asked for, and what a cell can mean.

A cell is right or None, never a guess and never 0 for "not known"; why it is None is kept beside it.
Private to the collection: may change at any time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Optional

# Asked in this order: fixed forms at both ends, so that a row that was cut or grew is noticed, and the name (which may
# hold commas; the output knows no quoting) just before the last, which has a form of its own.
REQUIRED = ("index", "uuid", "name", "pci.bus_id")
OPTIONAL = (
    "driver_version",
    "compute_cap",
    "memory.total",
    "memory.used",
    "memory.free",
    "persistence_mode",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "temperature.gpu",
    "temperature.memory",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
    "power.default_limit",
    # The old spelling: every driver from 525 to 580 knows it, the new one came with 535.
    "clocks_throttle_reasons.active",
    "ecc.mode.current",
    "ecc.errors.corrected.volatile.total",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.single_bit_ecc.count",
    "retired_pages.double_bit.count",
    "retired_pages.pending",
    "mig.mode.current",
    "utilization.gpu",
    "pci.device_id",
)
NEWER_NAMES = {"clocks_throttle_reasons.active": "clocks_event_reasons.active"}

THROTTLE_BITS = (
    (0x1, "gpu_idle"),
    (0x2, "applications_clocks_setting"),
    (0x4, "sw_power_cap"),
    (0x8, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal_slowdown"),
    (0x40, "hw_thermal_slowdown"),
    (0x80, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
)

# With brackets in today's CSV; without them in other versions and in the human table.
_NO_VALUE = re.compile(
    r"^(?:\[.*\]|n/?a|err!?|-|none|unknown(?: error)?|not (?:supported|available|found)|gpu is lost\b.*|timeout"
    r"|gpu (?:requires reset|reset required)\.?|reset required\.?|(?:insufficient|no) permissions?"
    r"|function not found|)$",
    re.ASCII | re.IGNORECASE,
)
_UNITS = r"(?: (?:MiB|MHz|W|C|%))?"
_INTEGER = re.compile(rf"^(\d{{1,12}}){_UNITS}$", re.ASCII)
_DECIMAL = re.compile(rf"^(\d{{1,9}}(?:\.\d{{1,6}})?){_UNITS}$", re.ASCII)
_BUS = re.compile(r"^([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})\.([0-7])$", re.ASCII)
_UUID = re.compile(r"^(?:GPU|MIG)-[0-9A-Za-z/-]+$", re.ASCII)
# Some drivers add what to do ("GPU is lost.  Reboot the system ..."), and some turn the words round.
_FAULTS = ("gpu is lost", "gpu requires reset", "gpu reset required", "reset required", "gpu has fallen off the bus")
# These say of one sensor nothing about the card; of the memory's size they do.
_UNREADABLE = ("unknown error", "err", "err!", "timeout", "driver not loaded")
# A driver that has lost the value counts down from zero in 32 or 64 bits; no card has such figures.
_RANGES: dict[str, tuple[int, int]] = {
    "memory.total": (1, 4 << 20),
    "memory.used": (0, 4 << 20),
    "memory.free": (0, 4 << 20),
    "pcie.link.gen.current": (1, 9),
    "pcie.link.gen.max": (1, 9),
    "temperature.gpu": (0, 200),
    "temperature.memory": (0, 200),
    "clocks.sm": (0, 20000),
    "clocks.mem": (0, 40000),
    "clocks.max.sm": (1, 20000),
    "clocks.max.mem": (1, 40000),
    "power.draw": (0, 5000),
    "power.limit": (1, 5000),
    "power.default_limit": (1, 5000),
    "utilization.gpu": (0, 100),
}
_LARGEST = 4_000_000_000  # of a count
_SWITCH = {"enabled": True, "disabled": False, "yes": True, "no": False, "active": True, "not active": False}


class RowError(ValueError):
    """A line that is no row of the query; its text is for the user."""


class Cells:
    """One row: typed access to its cells. `missing` collects the fields without a value and what stood there."""

    def __init__(self, values: dict[str, str]) -> None:
        self.values = values
        self.missing: dict[str, str] = {}
        self.faults: list[str] = []

    def _text(self, field: str) -> Optional[str]:
        if field not in self.values:
            self.missing[field] = "this nvidia-smi does not know the field"
            return None
        text = self.values[field].strip()
        if _NO_VALUE.match(text):
            why = text.strip("[]") or "empty"
            self.missing[field] = why
            # One unreadable sensor is no fault; a card that cannot say how much memory it has is at fault.
            word = why.lower().lstrip()
            fault = word.startswith(_FAULTS) or (field == "memory.total" and word in _UNREADABLE)
            if fault and why not in self.faults:
                self.faults.append(why)
            return None
        return text

    def _odd(self, field: str, text: str) -> None:
        self.missing[field] = f"unreadable: {text[:60]!r}"

    @staticmethod
    def _in_range(field: str, value: float) -> bool:
        low, high = _RANGES.get(field, (0, _LARGEST))
        return low <= value <= high

    def text(self, field: str) -> Optional[str]:
        return self._text(field)

    def integer(self, field: str) -> Optional[int]:
        text = self._text(field)
        if text is None:
            return None
        found = _INTEGER.match(text)
        if found is None or not self._in_range(field, int(found.group(1))):
            self._odd(field, text)
            return None
        return int(found.group(1))

    def decimal(self, field: str) -> Optional[float]:
        text = self._text(field)
        if text is None:
            return None
        found = _DECIMAL.match(text)
        if found is None or not self._in_range(field, float(found.group(1))):
            self._odd(field, text)
            return None
        return float(found.group(1))

    def switch(self, field: str) -> Optional[bool]:
        text = self._text(field)
        if text is None:
            return None
        value = _SWITCH.get(text.lower())
        if value is None:
            self._odd(field, text)
        return value

    def matching(self, field: str, pattern: str) -> Optional[str]:
        text = self._text(field)
        if text is not None and not re.match(pattern, text, re.ASCII):
            self._odd(field, text)
            return None
        return text


def pci_id(text: str) -> Optional[str]:
    """A bus id as the kernel writes it (0000:3b:00.0), from a domain of 4 to 8 digits, else None."""
    found = _BUS.match(text.strip())
    if found is None:
        return None
    domain, bus, device, function = found.groups()
    return f"{int(domain, 16):04x}:{bus.lower()}:{device.lower()}.{function}"


def query(fields: Sequence[str]) -> list[str]:
    """The fields in the order of the query, for --query-gpu."""
    middle = [field for field in fields if field not in REQUIRED]
    return ["index", "uuid", *middle, "name", "pci.bus_id"]


def split_row(line: str, fields: Sequence[str]) -> dict[str, str]:
    """The cells of one line, by the order that was asked for. Raises RowError for a line that is no row."""
    parts = line.split(", ", len(fields) - 2)
    tail = parts[-1].rsplit(", ", 1)
    if len(parts) != len(fields) - 1 or len(tail) != 2:
        count = line.count(", ") + 1
        raise RowError(f"{count} cells where {len(fields)} were asked for: {line[:200]!r}")
    cells = dict(zip(fields, [*parts[:-1], *tail]))
    bus = cells["pci.bus_id"].strip()
    if not re.match(r"^\d{1,4}$", cells["index"].strip(), re.ASCII):
        raise RowError(f"no index in: {line[:200]!r}")
    for name, fine in (("uuid", _UUID.match(cells["uuid"].strip())), ("pci.bus_id", pci_id(bus))):
        if not fine and not _NO_VALUE.match(cells[name].strip()):
            raise RowError(f"no {name} in: {line[:200]!r}")
    return cells


def throttle(mask: Optional[str]) -> list[str]:
    """The names of the reasons in a mask such as 0x0000000000000004."""
    if mask is None:
        return []
    bits = int(mask, 16)
    return [name for bit, name in THROTTLE_BITS if bits & bit]
