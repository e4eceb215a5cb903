# SPDX-License-Identifier: Apache-2.0
"""What nvidia-smi really prints: each case of the collected ones, under its number."""

from __future__ import annotations

import pathlib
import time

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu import read_gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu_cells import Cells, pci_id, query, throttle
from ansible_collections.tensorless.fleet.plugins.module_utils._host import TIMED_OUT, bounded

from tests.unit.gpu.fakes import OPEN, P100, UUID, FakeFiles, Smi, facts, loaded, pci, really

H200 = pathlib.Path(__file__).parent / "fixtures" / "h200"


def test_n01_p100_r580() -> None:
    smi = Smi()
    found = facts(smi)
    card = found["cards"][0]
    assert (card["index"], card["uuid"], card["name"]) == (0, UUID, "Tesla P100-PCIE-16GB")
    assert (card["memory_mib"], card["compute_capability"], card["pci_id"]) == (16384, "6.0", "0000:3b:00.0")
    assert (found["state"], found["branch"], found["kernel_module"], found["driver_ok"]) == (
        "ok",
        580,
        "proprietary",
        True,
    )
    assert smi.starts == 1


@pytest.mark.parametrize("cell", ["16384 MiB", "16384"])
def test_n01_with_and_without_units(cell: str) -> None:
    assert Cells({"memory.total": cell}).integer("memory.total") == 16384


def test_n01_header_line_is_no_card() -> None:
    head = "index, uuid, driver_version, compute_cap, memory.total [MiB], name, pci.bus_id\n"
    assert len(facts(Smi(before=head))["cards"]) == 1


def test_n01_mixed_3060_p100() -> None:
    """A mixed host: the P100 is index 1, and the open module is wrong for the whole host."""
    geforce = {
        **P100,
        "uuid": "GPU-22222222-2222-3333-4444-555555555555",
        "name": "NVIDIA GeForce RTX 3060",
        "compute_cap": "8.6",
        "memory.total": "12288 MiB",
        "pci.bus_id": "00000000:01:00.0",
        "pci.device_id": "0x250310DE",
    }
    rows = [geforce, {**P100, "index": "1"}]
    found = facts(Smi(rows))
    assert [card["name"] for card in found["cards"]] == ["NVIDIA GeForce RTX 3060", "Tesla P100-PCIE-16GB"]
    assert found["driver_ok"]
    assert not facts(Smi(rows), {**pci(), **loaded(shape=OPEN)})["driver_ok"]


def _captured(argv: list[str], name: str = "csv.rc0.txt", xml: str = "q.xml") -> tuple[int, str, str]:
    """The H200's own answer, arranged as asked: real cells under real headers."""
    if "-x" in argv:
        return 0, (H200 / xml).read_text(encoding="utf-8"), ""
    lines = (H200 / name).read_text(encoding="utf-8").splitlines()
    asked = next(word for word in argv if word.startswith("--query-gpu=")).partition("=")[2].split(",")
    echo = {
        "clocks.sm": "clocks.current.sm",
        "clocks.mem": "clocks.current.memory",
        "clocks.max.mem": "clocks.max.memory",
        "clocks_throttle_reasons.active": "clocks_event_reasons.active",
    }
    heads = [head.split(" [")[0] for head in lines[0].split(", ")]
    cells = dict(zip(heads, lines[1].split(", "), strict=True))
    return 0, ", ".join(cells[echo.get(name, name)] for name in asked) + "\n", ""


def test_n02_real_h200_csv() -> None:
    """A real card: every value of the capture, and null with its reason where it gave none."""
    files = {**pci("0000:83:00.0", "0x2335"), **loaded("580.159.04", OPEN)}
    found = read_gpus(_captured, "nvidia-smi", FakeFiles(files))
    card = found["cards"][0]
    expected = {
        "index": 0,
        "name": "NVIDIA H200",
        "compute_capability": "9.0",
        "memory_mib": 143771,
        "memory_used_mib": 0,
        "memory_free_mib": 143156,
        "pci_id": "0000:83:00.0",
        "device_id": "10de:2335",
        "persistence_mode": True,
        "pcie_gen": 5,
        "pcie_gen_max": 5,
        "pcie_width": 16,
        "temperature_c": 42,
        "temperature_memory_c": 39,
        "clock_sm_mhz": 1980,
        "clock_memory_mhz": 3201,
        "clock_memory_max_mhz": 3201,
        "power_w": 131.38,
        "power_limit_w": 700.0,
        "throttle_mask": "0x0000000000000001",
        "throttle_reasons": ["gpu_idle"],
        "ecc": True,
        "ecc_uncorrected": 0,
        "retired_pages_single": None,
        "retired_pages_pending": None,
        "mig": False,
        "utilization_percent": 0,
        "healthy": True,
    }
    assert {key: card[key] for key in expected} == expected
    assert set(card["missing"]) == {
        "retired_pages.single_bit_ecc.count",
        "retired_pages.double_bit.count",
        "retired_pages.pending",
    }
    assert (found["state"], found["branch"], found["kernel_module"]) == ("ok", 580, "open")
    assert found["driver_ok"], "the open module is right for a card from Turing on"


def test_n02_real_h200_header_differs_from_the_query() -> None:
    """The tool echoes canonical names: positions count, header texts do not."""
    head = (H200 / "csv.rc0.txt").read_text(encoding="utf-8").splitlines()[0]
    assert "clocks.current.sm [MHz]" in head
    assert "clocks_event_reasons.active" in head


def test_n02_real_h200_processes() -> None:
    def smi(argv: list[str]) -> tuple[int, str, str]:
        return _captured(argv, xml="q_busy.xml")

    found = read_gpus(smi, "nvidia-smi", FakeFiles(), processes="yes")
    assert [(item["name"], item["memory_mib"], item["type"], item["uuid"]) for item in found["processes"]] == [
        ("python3", 518, "C", UUID)
    ]
    assert read_gpus(_captured, "nvidia-smi", FakeFiles(), processes="yes")["processes"] == []


def test_n02_real_h200_knows_every_field_that_we_ask_for() -> None:
    listed = (H200 / "help.txt").read_text(encoding="utf-8")
    for field in query(("compute_cap",)) + list(P100):
        assert f'"{field}"' in listed, field


def test_n03_invalid_field() -> None:
    smi = Smi([{**P100}], refused=["compute_cap"])
    card = facts(smi)["cards"][0]
    assert (card["compute_capability"], card["compute_capability_source"]) == ("6.0", "table")
    assert card["missing"]["compute_cap"]
    assert card["memory_mib"] == 16384


def test_n03_several_invalid_fields_cost_one_look_at_the_list() -> None:
    smi = Smi(refused=["compute_cap", "mig.mode.current", "retired_pages.pending", "temperature.memory"])
    assert facts(smi)["cards"][0]["memory_mib"] == 16384
    assert smi.starts == 3


def test_n03_unknown_card_without_compute_cap_stays_unknown() -> None:
    row = {**P100, "name": "NVIDIA Something", "pci.device_id": "0x123410DE"}
    card = facts(Smi([row], refused=["compute_cap"]))["cards"][0]
    assert (card["compute_capability"], card["compute_capability_source"]) == (None, None)


def test_n03_required_field_refused() -> None:
    found = facts(Smi(refused=["uuid"]))
    assert found["state"] == "failed"
    assert 'Field "uuid" is not a valid field' in found["nvidia_smi"]["message"]


def test_n03_real_refusal() -> None:
    assert (H200 / "bad_field.rc2.txt").read_text(encoding="utf-8") == (
        'Field "no_such_field" is not a valid field to query.\n\n'
    )


def test_n04_old_spelling_is_asked() -> None:
    """The old name works from 525 to 580; a driver without it loses only this value."""
    smi = Smi()
    assert facts(smi)["cards"][0]["throttle_reasons"] == ["gpu_idle"]
    assert "clocks_throttle_reasons.active" in smi.calls[0][1]
    card = facts(Smi(refused=["clocks_throttle_reasons.active"]))["cards"][0]
    assert card["throttle_reasons"] is None
    assert card["throttle_mask"] is None


def test_n04_mask() -> None:
    assert throttle("0x0000000000000004") == ["sw_power_cap"]
    assert throttle("0x00000000000000C8") == ["hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"]
    assert throttle("0x0000000000000000") == []


def test_n05_inforom() -> None:
    found = facts(Smi(rc=14, after="WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n"))
    assert (found["state"], found["healthy"], len(found["cards"])) == ("degraded", False, 1)
    assert not found["cards"][0]["healthy"]
    assert "infoROM is corrupted" in found["cards"][0]["reasons"][0]
    assert found["driver_ok"], "a degraded card still serves"


def test_n05_inforom_before_the_table() -> None:
    found = facts(Smi(rc=0, before="WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n"))
    assert (found["state"], found["cards"][0]["healthy"]) == ("degraded", False)


@pytest.mark.parametrize("text", ["No devices were found\n", "No devices found\n"])
def test_n06_none(text: str) -> None:
    found = facts(Smi(rc=6, text=text))
    assert (found["cards"], found["state"], found["driver_ok"]) == ([], "failed", False)
    assert "drives none of the cards" in found["reasons"][0]
    assert len(found["pci_cards"]) == 1


def test_n06_without_a_card() -> None:
    assert facts(Smi(rc=6, text="No devices were found\n"), loaded())["reasons"] == [
        "there is no NVIDIA card on the PCI bus"
    ]


def test_n06_real() -> None:
    found = facts(Smi(rc=6, text=(H200 / "noid.rc6.txt").read_text(encoding="utf-8")), loaded())
    assert (found["cards"], found["nvidia_smi"]["message"]) == ([], "No devices were found")


NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n\n"
)


@pytest.mark.parametrize("rc", [9, 1, 0])
def test_n07_nodriver(rc: int) -> None:
    found = facts(Smi(rc=rc, text=NO_DRIVER), pci(driver=None))
    assert (found["state"], found["driver_version"], found["kernel_module"]) == ("failed", None, "none")
    assert "the driver is not loaded" in found["driver_message"]
    assert "latest" not in found["driver_message"], "the advice in the message is what must not be done on Pascal"


def test_n08_mismatch() -> None:
    files = {
        **pci(),
        **loaded("580.173.02"),
        "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1": "->/x/libnvidia-ml.so.580.178.04",
    }
    text = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.178\n"
    found = facts(Smi(rc=18, text=text), files)
    assert found["reboot_required"]
    assert (found["loaded_version"], found["installed_version"]) == ("580.173.02", "580.178.04")
    assert "reboot" in found["driver_message"]


def test_n08_one_line_and_another_status() -> None:
    found = facts(Smi(rc=1, text="Failed to initialize NVML: Driver/library version mismatch\n"))
    assert found["reboot_required"]


LOST = {
    "n09_lost_new": (
        "Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error",
        1,
        "0000:34:00.0",
        "Unknown Error",
    ),
    "n09_lost_r520": (
        "Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error",
        None,
        "0000:0b:00.0",
        "Unknown Error",
    ),
    "n09_lost_r525": (
        "Unable to determine the device handle for GPU0000:0B:00.0: Unknown Error",
        None,
        "0000:0b:00.0",
        "Unknown Error",
    ),
    "n09_lost_lost": (
        "Unable to determine the device handle for GPU 0000:02:00.0: "
        "GPU is lost.  Reboot the system to recover this GPU",
        None,
        "0000:02:00.0",
        "GPU is lost.  Reboot the system to recover this GPU",
    ),
    "n09_lost_only": ("Unable to determine the device handle for GPU1: Unknown Error", 1, None, "Unknown Error"),
    "not_found": (
        "Unable to determine the device handle for GPU 0000:0B:00.0: Not Found",
        None,
        "0000:0b:00.0",
        "Not Found",
    ),
    "detect": (
        "Unable to detect the device handle for GPU 0000:0B:00.0: Unknown Error",
        None,
        "0000:0b:00.0",
        "Unknown Error",
    ),
}


@pytest.mark.parametrize("name", sorted(LOST))
@pytest.mark.parametrize("rc", [0, 15, 255])
def test_n09_lost(name: str, rc: int) -> None:
    """The survivors keep their indices, with a hole; the status was never captured, so none is trusted."""
    line, index, bus, why = LOST[name]
    rows = [dict(P100), {**P100, "index": "2", "uuid": UUID[:-1] + "2", "pci.bus_id": "00000000:5E:00.0"}]
    found = facts(Smi(rows, rc=rc, before=line + "\n"))
    assert [card["index"] for card in found["cards"]] == [0, 2]
    assert found["lost_cards"] == [{"index": index, "pci_id": bus, "reason": why}]
    assert (found["state"], found["healthy"]) == ("degraded", False)


def test_n09_lost_only_nothing_else() -> None:
    text = "Unable to determine the device handle for GPU1: Unknown Error\nNo devices were found\n"
    found = facts(Smi(rc=255, text=text))
    assert (found["cards"], found["state"]) == ([], "failed")
    assert found["lost_cards"][0]["index"] == 1


def test_n11_hang(tmp_path: pathlib.Path) -> None:
    """A child holds the output open after its parent was killed; the reader still comes back, and kills both."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nsleep 300 & echo $! >>$0.pids; exec sleep 300\n")
    fake.chmod(0o755)

    found = read_gpus(bounded(really, 1.0), str(fake), FakeFiles({**pci(), **loaded()}), limit=1.0)
    assert (found["state"], found["nvidia_smi"]["timed_out"], found["nvidia_smi"]["rc"]) == ("failed", True, TIMED_OUT)
    assert len(found["pci_cards"]) == 1, "the bus is read all the same"
    for pid in (tmp_path / "nvidia-smi.pids").read_text().split():
        for _try in range(50):
            state = pathlib.Path(f"/proc/{pid}/stat")
            if not state.exists() or ") Z" in state.read_text():
                break
            time.sleep(0.02)
        else:
            pytest.fail(f"child {pid} is alive")


def test_n12_comma_in_name() -> None:
    row = {**P100, "name": "Quadro, the second"}
    assert facts(Smi([row]))["cards"][0]["name"] == "Quadro, the second"


@pytest.mark.parametrize("line", ["Tesla T4, GPU-11111111-2222-3333-4444-555555555555, extra", "0, GPU-1", "garbage"])
def test_n12_ragged(line: str) -> None:
    """A line of another width is named, never skipped silently, and no card is renumbered."""
    found = facts(Smi(after=line + "\n"))
    assert [card["index"] for card in found["cards"]] == [0]
    assert found["state"] == "degraded"
    assert any(line[:20] in reason for reason in found["reasons"])


def test_n12_only_ragged() -> None:
    found = facts(Smi(text="Tesla T4, GPU-11111111-2222-3333-4444-555555555555, extra\n"))
    assert (found["cards"], found["state"]) == ([], "failed")
    assert any("cells where" in reason for reason in found["reasons"])


def test_n15_decimal_comma_is_refused() -> None:
    card = facts(Smi([{**P100, "power.draw": "250,00 W"}]))["cards"][0]
    assert card["power_w"] is None
    assert "250,00" in card["missing"]["power.draw"]


def test_n16_table_is_not_parsed() -> None:
    text = "|ERR!   73C    P0   174W / 180W |  11492MiB / 16276MiB |    100%      Default |\n"
    found = facts(Smi(text=text))
    assert found["cards"] == []
    assert found["state"] == "failed"


@pytest.mark.parametrize(
    "token",
    [
        "[N/A]",
        "N/A",
        "[Not Supported]",
        "[Unknown Error]",
        "[GPU is lost]",
        "[GPU requires reset]",
        "ERR!",
        "",
        "[Requested functionality has been deprecated]",
        "[Function Not Found]",
        "[Insufficient Permissions]",
    ],
)
def test_no_value_tokens(token: str) -> None:
    """Every spelling of no value is null with the reason kept; the row stays."""
    row = {**P100, "temperature.gpu": token, "memory.used": token, "retired_pages.pending": token}
    card = facts(Smi([row]))["cards"][0]
    assert (card["temperature_c"], card["memory_used_mib"], card["retired_pages_pending"]) == (None, None, None)
    assert card["missing"]["temperature.gpu"] == (token.strip("[]") or "empty")
    assert card["memory_mib"] == 16384


def test_whole_row_without_values() -> None:
    row = dict.fromkeys(P100, "[N/A]") | {"index": "0", "uuid": UUID, "pci.bus_id": "00000000:3B:00.0"}
    card = facts(Smi([row]))["cards"][0]
    assert (card["index"], card["uuid"], card["name"], card["memory_mib"]) == (0, UUID, None, None)


@pytest.mark.parametrize("token", ["[GPU is lost]", "[GPU requires reset]"])
def test_faulted_card_is_kept_and_unhealthy(token: str) -> None:
    row = dict.fromkeys(P100, token) | {
        "index": "0",
        "uuid": UUID,
        "name": P100["name"],
        "pci.bus_id": P100["pci.bus_id"],
    }
    found = facts(Smi([row]))
    assert (found["state"], found["cards"][0]["healthy"]) == ("degraded", False)


@pytest.mark.parametrize(
    ("rc", "text", "words"),
    [
        (
            12,
            "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.\n",
            "does not find the driver's library",
        ),
        (4, "Failed to initialize NVML: Insufficient Permissions\n", "may not open the card"),
        (255, "Failed to initialize NVML: Unknown Error\n", "status 255"),
        (77, "", "status 77: no message"),
    ],
)
def test_exit_status(rc: int, text: str, words: str) -> None:
    found = facts(Smi(rc=rc, text=text))
    assert (found["state"], found["cards"]) == ("failed", [])
    assert words in found["reasons"][0]


def test_error_on_stderr_counts_as_well() -> None:
    def smi(argv: list[str]) -> tuple[int, str, str]:
        return 18, "", "Failed to initialize NVML: Driver/library version mismatch\n"

    assert read_gpus(smi, "nvidia-smi", FakeFiles())["reboot_required"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:0B:00.0", "0000:0b:00.0"),
        ("00010000:3B:00.0", "10000:3b:00.0"),
        ("0:3B:00.0", None),
        ("[N/A]", None),
        ("00000000:3B:00.9", None),
    ],
)
def test_pci_domains(text: str, wanted: str | None) -> None:
    assert pci_id(text) == wanted


def test_memory_of_a_p100_is_the_driver_s_figure() -> None:
    for cell in ("16308 MiB", "16276 MiB", "16280 MiB", "16384 MiB", "12198 MiB"):
        assert facts(Smi([{**P100, "memory.total": cell}]))["cards"][0]["memory_mib"] == int(cell.split()[0])


def test_tool_older_than_the_driver() -> None:
    """The tool lacks fields of its day; the driver's version comes from the row and not from the tool."""
    found = facts(Smi(refused=["compute_cap", "pcie.link.gen.max"]), {**pci(), **loaded("580.95.05")})
    assert (found["driver_version"], found["loaded_version"]) == ("580.178.04", "580.95.05")


def test_mig_is_said() -> None:
    card = facts(Smi([{**P100, "mig.mode.current": "Enabled", "utilization.gpu": "[N/A]"}]))["cards"][0]
    assert (card["mig"], card["healthy"]) == (True, False)


def test_same_card_twice() -> None:
    found = facts(Smi([dict(P100), dict(P100)]))
    assert len(found["cards"]) == 1
    assert found["state"] == "degraded"


def test_absent_driver_still_names_the_cards() -> None:
    """A P100 is a 3D controller (class 0302), which a search for VGA misses."""
    found = read_gpus(Smi(), None, FakeFiles(pci(driver=None)))
    assert (found["state"], found["nvidia_smi"]["found"], found["driver_ok"]) == ("absent", False, False)
    assert found["pci_cards"][0]["device_id"] == "10de:15f8"
    assert found["pci_cards"][0]["class"] == "0302"
    assert "install" in found["driver_message"]


def test_other_devices_of_the_vendor_are_no_cards() -> None:
    audio = pci("0000:3b:00.1")
    audio["/sys/bus/pci/devices/0000:3b:00.1/class"] = "0x040300\n"
    assert read_gpus(Smi(), None, FakeFiles(audio))["pci_cards"] == []


def test_processes_are_asked_only_where_memory_is_used() -> None:
    idle, busy = (
        Smi(),
        Smi([{**P100, "memory.used": "13997 MiB"}], xml=(H200 / "q_busy.xml").read_text(encoding="utf-8")),
    )
    facts(idle)
    assert idle.starts == 1
    assert facts(busy)["processes"][0]["name"] == "python3"
    assert busy.starts == 2


def test_broken_xml_is_a_reason_and_no_traceback() -> None:
    found = facts(Smi([{**P100, "memory.used": "13997 MiB"}], xml="<nvidia_smi_log><gpu></nvidia_smi_log>"))
    assert found["processes"] == []
    assert any("broken XML" in reason for reason in found["reasons"])


@pytest.mark.parametrize(
    ("field", "cell", "words"),
    [
        ("clocks_throttle_reasons.active", "0x0000000000000048", "hw_slowdown, hw_thermal_slowdown"),
        ("ecc.errors.uncorrected.volatile.total", "2", "2 uncorrected"),
        ("retired_pages.pending", "Yes", "wait for retirement"),
        ("pcie.link.width.current", "63", "link width"),
    ],
)
def test_unhealthy_cards(field: str, cell: str, words: str) -> None:
    card = facts(Smi([{**P100, field: cell}]))["cards"][0]
    assert not card["healthy"]
    assert words in " ".join(card["reasons"])
