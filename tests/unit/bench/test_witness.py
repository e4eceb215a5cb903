# SPDX-License-Identifier: Apache-2.0
"""The witness: what it reads, what it says of itself, and that it never outlives its measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _bench_quiet, _witness
from ansible_collections.tensorless.fleet.plugins.module_utils._bench import BenchError
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_run import Bench, Request

from tests.unit.bench import fleetdata
from tests.unit.bench.fakellama import Answer, FakeLlama, frames

CARD = fleetdata.uuid(1)


class Smi:
    """Answers as nvidia-smi does, from a dict of fields."""

    def __init__(self, unknown: Sequence[str] = (), apps: str = "", **cells: str) -> None:
        self.unknown = unknown
        self.apps = apps
        self.cells = cells
        self.asked: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> tuple[int, str, str]:
        self.asked.append(list(argv))
        if argv[0] != "nvidia-smi":
            return 127, "", ""
        assert argv[-2] == "-i"
        query = argv[1]
        if query.startswith("--query-compute-apps"):
            return 0, self.apps, ""
        fields = query.split("=")[1].split(",")
        for field in fields:
            if field in self.unknown:
                return 2, f'Field "{field}" is not a valid field to query.\n\n', ""
        return 0, ", ".join(self.cells.get(field.replace(".", "_"), "[N/A]") for field in fields) + "\n", ""


def test_RL_001_the_card_is_asked_by_uuid() -> None:
    smi = Smi(clocks_sm="1328")
    _witness.CardReader(smi, CARD).card()
    _witness.CardReader(smi, CARD).processes()
    _bench_quiet.card_identity(smi, CARD)
    assert all(argv[-2:] == ["-i", CARD] for argv in smi.asked)


def test_a_field_that_the_driver_does_not_know_is_dropped_and_named() -> None:
    reader = _witness.CardReader(Smi(unknown=["temperature.memory", "pcie.link.gen.max"], clocks_sm="1328"), CARD)
    assert reader.card()["sm_mhz"] == 1328
    assert sorted(reader.refused) == ["memory_temperature_c", "pcie_gen_max"]


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("1328", 1328),
        ("182.54", 182.54),
        ("0x0000000000000004", 4),
        ("[N/A]", None),
        ("[Not Supported]", None),
        ("N/A", None),
    ],
)
def test_RL_016_what_cannot_be_read_is_null_and_never_0(cell: str, value: Any) -> None:
    assert _witness.cell_value(cell) == value


def test_a_process_name_may_hold_a_comma() -> None:
    found = _witness.CardReader(Smi(apps="12, /opt/a, b/python3, 900\n"), CARD).processes()
    assert found == [{"pid": 12, "name": "/opt/a, b/python3", "memory_mib": 900}]


def test_RL_014_and_RL_017_min_mean_max_interval_and_lower_bounds() -> None:
    rows = fleetdata.samples(10, temperature_c=lambda i: 50 + i)
    seen = _witness.window(rows, 100.0, 105.0, 0.5, [4711], 256)
    assert seen["fields"]["temperature_c"] == {"min": 50, "mean": 54.5, "max": 59, "n": 10}
    assert (seen["interval_s"], seen["peaks"], seen["fields"]["fan_percent"]) == (0.5, "at least", None)


def test_RL_018_each_reason_has_its_share_of_the_samples() -> None:
    rows = fleetdata.samples(394, throttle_mask=lambda i: 0x20 if i < 169 else 0x1)
    seen = _witness.window(rows, 100.0, 400.0, 0.5)
    assert round(seen["throttle"]["sw_thermal_slowdown"] * 100) == 43
    assert list(seen["throttle"]) == ["sw_thermal_slowdown"]


def test_RL_015_page_faults_and_reads_are_counted_per_run_and_per_token() -> None:
    rows = fleetdata.samples(9, majflt=lambda i: 100 + 64 * i, read_bytes=lambda i: 4096 * i)
    server = _witness.window(rows, 100.0, 104.0, 0.5, [4711], 256)["server"]
    assert (server["majflt"], server["read_bytes"], server["majflt_per_token"]) == (512, 32768, 2.0)


def test_RL_019_cores_busy_stand_beside_the_cards_use() -> None:
    rows = fleetdata.samples(9, cpu_s=lambda i: i * 4.0, utilization_percent=3)
    seen = _witness.window(rows, 100.0, 104.0, 0.5)
    assert seen["server"]["cores_busy"] == pytest.approx(8.0)
    assert seen["fields"]["utilization_percent"]["mean"] == 3


def test_gaps_are_recorded_and_not_filled() -> None:
    rows = [row for row in fleetdata.samples(20) if not 102.0 < row["at"] < 106.0]
    seen = _witness.window(rows, 100.0, 109.5, 0.5)
    assert seen["gaps_s"] == [[2.0, 6.0]]
    assert seen["samples"] == len(rows)


def test_RL_089_peaks_are_compared_as_numbers() -> None:
    rows = fleetdata.samples(2, memory_used_mib=lambda i: _witness.cell_value(["8022", "48016"][i]))
    assert _witness.window(rows, 100.0, 101.0, 0.5)["fields"]["memory_used_mib"]["max"] == 48016


def test_another_process_is_seen_and_the_server_is_not_accused() -> None:
    rows = fleetdata.samples(5, processes=[{"pid": 4711, "name": "llama-server"}, {"pid": 9, "name": "python3"}])
    seen = _witness.window(rows, 100.0, 103.0, 0.5, [4711])
    assert [process["pid"] for process in seen["other_processes"]] == [9]


def test_the_sampler_is_another_process_and_ends_with_the_measurement() -> None:
    witness = _witness.Witness(Smi(clocks_sm="1328"), CARD, os.getpid(), 0.05)
    with witness:
        pid = witness._pid
        assert pid not in (0, os.getpid())
        time.sleep(0.5)
    assert len(witness.samples) >= 3 and not witness.lost
    assert witness.samples[0]["sm_mhz"] == 1328 and witness.samples[0]["rss_mib"] > 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_sampler_ends_when_the_measuring_process_is_killed() -> None:
    child = os.fork()
    if child == 0:
        witness = _witness.Witness(Smi(), None, None, 0.05).start()
        os.write(1, b"")
        Path(f"/tmp/witness-{os.getpid()}").write_text(str(witness._pid))
        time.sleep(60)
        os._exit(0)
    note = Path(f"/tmp/witness-{child}")
    while not note.exists() or not note.read_text():
        time.sleep(0.02)
    sampler = int(note.read_text())
    note.unlink()
    os.kill(child, 9)
    os.waitpid(child, 0)
    for _ in range(100):
        if not Path(f"/proc/{sampler}").exists() or "Z" in Path(f"/proc/{sampler}/stat").read_text().split(")")[1][:3]:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the sampler lives on")


def test_RL_055_a_hanging_driver_does_not_hang_the_measurement() -> None:
    calls = 0

    def hangs(_argv: Sequence[str]) -> tuple[int, str, str]:
        nonlocal calls
        calls += 1
        if calls > 3:
            time.sleep(60)
        return 127, "", ""

    witness = _witness.Witness(hangs, CARD, None, 0.05).start()
    time.sleep(0.3)
    witness.stop(patience_s=0.3)
    assert witness.lost


def test_RL_055_new_kernel_lines_fail_loud() -> None:
    before = ["[1.0] NVRM: Xid (PCI:0000:3b:00): 31"]
    new = "[3.0] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen"
    log = f"{before[0]}\n[2.0] eth0: link up\n{new}"
    after = _bench_quiet.kernel_log(lambda _argv: (0, log, ""))
    assert _bench_quiet.new_faults(before, after) == [new]
    assert _bench_quiet.kernel_log(lambda _argv: (1, "", "not permitted")) is None


def test_RL_050_error_counters_are_read_of_the_card_and_of_its_port(tmp_path: Path) -> None:
    card = tmp_path / "devices" / "0000:3a:00.0" / "0000:3b:00.0"
    card.mkdir(parents=True)
    text = "RxErr 3\nTOTAL_ERR_COR {}\n"
    (card / "aer_dev_correctable").write_text(text.format(3))
    (card.parent / "aer_dev_correctable").write_text(text.format(27))
    (tmp_path / "bus" / "pci" / "devices").mkdir(parents=True)
    (tmp_path / "bus" / "pci" / "devices" / "0000:3b:00.0").symlink_to(card)
    found = _witness.read_aer("00000000:3B:00.0", str(tmp_path))
    assert found == {"0000:3b:00.0/aer_dev_correctable": 3, "0000:3a:00.0/aer_dev_correctable": 27}


FANS = "FAN1 | 41h | ok | 29.1 | 1200 RPM\nCHA_FAN1 | 42h | ns | 29.2 | Disabled\n"
SLOTS = "PCIE01 Temp | 30h | ok | 11.1 | 86 degrees C\n"


def test_RL_081_the_chassis_is_read_where_there_is_a_controller() -> None:
    found = _bench_quiet.bmc(lambda argv: (0, FANS if argv[-1] == "fan" else SLOTS, ""))
    assert found == {"fans": {"FAN1": 1200.0, "CHA_FAN1": None}, "temperatures": {"PCIE01 Temp": 86.0}, "notes": []}
    assert _bench_quiet.bmc(lambda _argv: (127, "", "")) is None


def test_RL_082_fans_that_cannot_be_read_are_said() -> None:
    found = _bench_quiet.bmc(lambda argv: (0, FANS.splitlines()[1] if argv[-1] == "fan" else SLOTS, ""))
    assert found is not None and "no fan of the chassis can be read" in found["notes"][0]


def look(
    monkeypatch: pytest.MonkeyPatch, io: float = 0.0, load: float = 0.1, apps: str = "", slots: Any = None
) -> dict[str, Any]:
    host = {**_witness.read_host(), "io_pressure": io, "load1": load}
    monkeypatch.setattr(_bench_quiet._witness, "read_host", lambda *_a: host)
    return _bench_quiet.look(Smi(apps=apps), CARD, "smol", slots)


def test_RL_009_io_pressure_is_the_signal_not_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(monkeypatch, io=60.0)["busy"] == ["IO pressure is 60 %"]


def test_RL_010_a_foreign_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(monkeypatch, apps="999999, python3, 900\n")["busy"] == ["process 999999 (python3) is on the card"]


def test_a_request_in_the_slot_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(monkeypatch, slots=[{"is_processing": True}])["busy"] == ["a request is in the server's slot"]
    assert look(monkeypatch, slots=[{"is_processing": False}])["busy"] == []


def test_RL_010_busy_is_refused_or_measured_and_written_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = Smi(apps="999999, python3, 900\n")
    with FakeLlama([Answer(frames(8)), Answer(frames(16))]) as server:
        options: dict[str, Any] = {"port": server.port, "card_uuid": CARD, "runs": 1, "tokens": 16}
        options["lease_dir"] = str(tmp_path)
        with pytest.raises(BenchError, match=r"not quiet: process 999999 \(python3\) is on the card"):
            Bench(Request("m", on_busy="refuse", **options), smi).measure()
        assert list(tmp_path.glob("GPU*")) == []
        result = Bench(Request("m", on_busy="label", **options), smi).measure()
    assert any("not quiet" in label and "python3" in label for label in result["labels"])
