# SPDX-License-Identifier: Apache-2.0
"""Mutated outputs of nvidia-smi: no traceback, and no wrong number. A cell is right or null.

2,000 examples in CI; `make soak` sets TENSORLESS_FUZZ=100000.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

from ansible_collections.tensorless.fleet.plugins.module_utils import _cdi, _driver_apt, _gpu_log, _gpu_xml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.gpu.fakes import P100, Smi, facts
from tests.unit.gpu.test_cases_driver import D02, D03, D10
from tests.unit.gpu.test_cases_smi import H200, LOST, NO_DRIVER

EXAMPLES = int(os.environ.get("TENSORLESS_FUZZ", "2000"))
LIMITS = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
TOKENS = [
    "[N/A]",
    "N/A",
    "[Unknown Error]",
    "[GPU is lost]",
    "ERR!",
    "",
    "[GPU requires reset]",
    "250,00 W",
    "٣",
    "0x",
    "-1",
]
NUMBERS = {
    "memory_mib": "memory.total",
    "memory_used_mib": "memory.used",
    "temperature_c": "temperature.gpu",
    "clock_sm_mhz": "clocks.sm",
    "power_limit_w": "power.limit",
    "pcie_gen": "pcie.link.gen.current",
    "ecc_uncorrected": "ecc.errors.uncorrected.volatile.total",
}
LINES = [
    *(case[0] for case in LOST.values()),
    "WARNING: infoROM is corrupted at gpu 0000:3B:00.0",
    "No devices were found",
    "Failed to initialize NVML: Unknown Error",
    NO_DRIVER.strip(),
    "|ERR!   73C    P0   174W / 180W |",
    "",
]


def rows(seed: int, cards: int) -> list[dict[str, str]]:
    """Cards with random but true cells, some of them without a value."""
    rng = random.Random(seed)
    found = []
    for index in range(cards):
        row = dict(P100)
        row |= {
            "index": str(index),
            "uuid": f"GPU-{index:08d}-2222-3333-4444-555555555555",
            "pci.bus_id": f"00000000:{index + 16:02X}:00.0",
        }
        row |= {"memory.total": f"{rng.randint(1, 99999)} MiB", "memory.used": f"{rng.randint(0, 40)} MiB"}
        row |= {"temperature.gpu": str(rng.randint(0, 110)), "clocks.sm": f"{rng.randint(0, 3000)} MHz"}
        row |= {"power.limit": f"{rng.randint(0, 900)}.{rng.randint(0, 99):02d} W"}
        for name in rng.sample(sorted(set(P100) - {"index", "uuid", "pci.bus_id"}), rng.randint(0, 4)):
            row[name] = rng.choice(TOKENS)
        found.append(row)
    return found


def number(cell: str) -> float | None:
    head = cell.split(" ")[0]
    return float(head) if head.isascii() and head.replace(".", "", 1).isdigit() else None


@LIMITS
@given(
    st.integers(0, 2**32),
    st.integers(1, 8),
    st.lists(st.sampled_from(LINES), max_size=3),
    st.sampled_from([0, 2, 6, 9, 14, 18, 255]),
)
def test_true_tables_between_odd_lines(seed: int, cards: int, around: Sequence[str], rc: int) -> None:
    """Every number that comes out stands in the row of that card; each other one is null."""
    table = rows(seed, cards)
    before = "".join(f"{line}\n" for line in around[:2])
    found = facts(Smi(table, rc=rc, before=before, after="".join(f"{line}\n" for line in around[2:])))
    assert found["state"] in ("ok", "degraded", "failed")
    assert len(found["cards"]) == cards
    for card in found["cards"]:
        row = table[card["index"]]
        assert card["uuid"] == row["uuid"]
        for key, field in NUMBERS.items():
            wanted = number(row[field])
            assert card[key] == wanted or (card[key] is None and field in card["missing"]), (key, row[field], card[key])


@LIMITS
@given(st.integers(0, 2**32), st.integers(1, 4), st.data())
def test_broken_bytes(seed: int, cards: int, data: st.DataObject) -> None:
    """Cut, doubled, swapped and overwritten text: never a traceback, and never a row that is not one of the table's."""
    table = rows(seed, cards)
    whole = "".join(", ".join(row[name] for name in ("index", "name")) + "\n" for row in table)

    def raw(fields: Sequence[str]) -> str:
        text = "".join(", ".join(row.get(name, "[N/A]") for name in fields) + "\n" for row in table) or whole
        for _step in range(data.draw(st.integers(1, 4))):
            kind = data.draw(st.sampled_from(["cut", "drop", "double", "overwrite", "line"]))
            at = data.draw(st.integers(0, max(len(text) - 1, 0)))
            size = data.draw(st.integers(1, 40))
            if kind == "cut":
                text = text[:at]
            elif kind == "drop":
                text = text[:at] + text[at + size :]
            elif kind == "double":
                text = text[:at] + text[at : at + size] * 2 + text[at + size :]
            elif kind == "overwrite":
                text = text[:at] + data.draw(st.text(max_size=8)) + text[at + size :]
            else:
                text = text[:at] + "\n" + text[at:]
        return text

    found = facts(Smi(table, raw=raw))
    assert found["state"] in ("ok", "degraded", "failed")
    for card in found["cards"]:
        assert isinstance(card["index"], int)
        for key in NUMBERS:
            assert card[key] is None or card[key] >= 0


@LIMITS
@given(st.text(max_size=400), st.integers(-9, 255))
def test_any_text(text: str, rc: int) -> None:
    found = facts(Smi(text=text, rc=rc))
    assert found["state"] in ("ok", "degraded", "failed", "absent")
    assert found["driver_ok"] or found["driver_message"]


@LIMITS
@given(st.data())
def test_broken_reports(data: st.DataObject) -> None:
    """The second reader, the kernel log, specs and apt's words, each mutated."""
    text = data.draw(st.sampled_from([(H200 / "q_busy.xml").read_text(encoding="utf-8")[-3000:], D02, D03, D10]))
    at, size = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 60))
    broken = text[:at] + data.draw(st.text(max_size=10)) + text[at + size :]
    try:
        found = _gpu_xml.processes("<nvidia_smi_log>" + broken)
    except _gpu_xml.XmlError:
        found = []
    assert all(isinstance(item["pid"], int) for item in found)
    for fault in _gpu_log.faults(broken):
        assert fault["kind"] in ("xid", "bus_loss", "aer")
    assert _gpu_log.driver_problem(broken) is None or _gpu_log.driver_problem(broken)["fix"]  # type: ignore[index]
    assert isinstance(_cdi.parse("/etc/cdi/nvidia.yaml", broken), _cdi.Spec)
    assert _driver_apt.parse_simulation(broken).install == []
