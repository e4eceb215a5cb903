# SPDX-License-Identifier: Apache-2.0
"""Further outputs of the kinds that were collected: other drivers, encodings, spellings, and cards in trouble."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils._doctor import Seen, documented
from ansible_collections.tensorless.fleet.plugins.module_utils._doctor_host import HostSeen, host_checks
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu import read_gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu_cells import query
from ansible_collections.tensorless.fleet.plugins.module_utils._host import TIMED_OUT, bounded

from tests.unit.gpu.fakes import P100, UUID, FakeFiles, Smi, facts, loaded, pci, really

SECOND = {**P100, "index": "1", "uuid": UUID[:-1] + "6", "pci.bus_id": "00000000:5E:00.0"}


def card(**cells: str) -> dict[str, Any]:
    row = {**P100, **{name.replace("__", "."): text for name, text in cells.items()}}
    found: dict[str, Any] = facts(Smi([row]))["cards"][0]
    return found


# Around the rows


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\ufeff" + text,
        lambda text: "\ufeff" + text.replace("\n", "\r\n"),
        lambda text: "\n\n" + text + "\n\n",
        lambda text: text.rstrip("\n"),
        lambda text: "  " + text,
        lambda text: text.replace("\n", "\0\n"),
    ],
    ids=["crlf", "bom", "bom and crlf", "empty lines", "no last line feed", "indented", "nul"],
)
def test_encodings(change: Any) -> None:
    def raw(fields: Sequence[str]) -> str:
        lines = [", ".join(row.get(name, "[N/A]") for name in fields) + "\n" for row in (P100, SECOND)]
        return str(change("".join(lines)))

    found = facts(Smi(raw=raw))
    assert [(item["index"], item["uuid"], item["memory_mib"]) for item in found["cards"]] == [
        (0, UUID, 16384),
        (1, SECOND["uuid"], 16384),
    ]
    assert found["state"] == "ok"


def test_a_line_separator_in_a_name_is_no_line_s_end() -> None:
    found = facts(Smi([{**P100, "name": "Tesla\u2028P100\x85PCIE"}, SECOND]))
    assert [item["index"] for item in found["cards"]] == [0, 1]
    assert found["state"] == "ok"


def test_header_and_units_together() -> None:
    def raw(fields: Sequence[str]) -> str:
        head = ", ".join(query(fields)) + "\n"
        return head + ", ".join(P100.get(name, "[N/A]") for name in fields) + "\n"

    found = facts(Smi(raw=raw))
    assert (len(found["cards"]), found["cards"][0]["power_w"], found["state"]) == (1, 27.5, "ok")


def test_a_warning_without_a_card_degrades_the_host_and_no_card() -> None:
    found = facts(Smi(after="WARNING: infoROM is corrupted at gpu 0000:99:00.0\n", rc=14))
    assert (found["state"], found["cards"][0]["healthy"]) == ("degraded", True)


def test_two_warnings() -> None:
    text = "".join(f"WARNING: infoROM is corrupted at gpu 0000:{bus}:00.0\n" for bus in ("3B", "5E"))
    found = facts(Smi([P100, SECOND], after=text, rc=14))
    assert [item["healthy"] for item in found["cards"]] == [False, False]


@pytest.mark.parametrize("rc", [1, 4, 15, 255])
def test_rows_and_a_bad_status(rc: int) -> None:
    """What was printed is kept, and the status is said."""
    found = facts(Smi([P100], rc=rc))
    assert (found["state"], len(found["cards"])) == ("degraded", 1)
    assert f"ended with status {rc}" in " ".join(found["reasons"])


def test_rows_before_the_tool_hung() -> None:
    """Half a list is no list: the cards that the bus shows are named, and nothing else is claimed."""
    found = facts(Smi([P100], rc=TIMED_OUT))
    assert (found["state"], found["cards"], len(found["pci_cards"])) == ("failed", [], 1)
    assert found["nvidia_smi"]["timed_out"]


def test_partial_output_of_a_tool_that_really_hangs(tmp_path: pathlib.Path) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nprintf '0, GPU-1'\nsleep 300 &\nwait\n")
    fake.chmod(0o755)

    found = read_gpus(bounded(really, 0.5), str(fake), FakeFiles({**pci(), **loaded()}), limit=0.5)
    assert (found["state"], found["cards"], found["nvidia_smi"]["timed_out"]) == ("failed", [], True)


def test_cut_last_row() -> None:
    def raw(fields: Sequence[str]) -> str:
        whole = ", ".join(SECOND.get(name, "[N/A]") for name in fields)
        return ", ".join(P100.get(name, "[N/A]") for name in fields) + "\n" + whole[: len(whole) // 2]

    found = facts(Smi(raw=raw))
    assert [item["index"] for item in found["cards"]] == [0]
    assert found["state"] == "degraded"


@pytest.mark.parametrize(
    ("rc", "text", "words"),
    [
        (9, "Failed to initialize NVML: Driver Not Loaded\n", "the driver is not loaded"),
        (1, "Failed to initialize NVML: Driver Not Loaded\n", "the driver is not loaded"),
        (17, "Failed to initialize NVML: GPU access blocked by the operating system\n", "status 17"),
        (255, "FAILED TO INITIALIZE NVML: DRIVER/LIBRARY VERSION MISMATCH\n", "libraries are newer"),
        (127, "nvidia-smi: error while loading shared libraries: libnvidia-ml.so.1: cannot open\n", "library"),
        (1, "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.\n", "library"),
        (4, "Failed to initialize NVML: INSUFFICIENT PERMISSIONS\n", "may not open the card"),
        (6, "No supported GPUs were found\n", "drives none of the cards"),
        (126, "sh: 1: nvidia-smi: Permission denied\n", "status 126"),
        (-11, "", "status -11"),
        (1, "Échec de la communication avec le pilote NVIDIA.\n", "status 1: Échec"),
    ],
)
def test_failures_in_other_words(rc: int, text: str, words: str) -> None:
    found = facts(Smi(rc=rc, text=text))
    assert (found["state"], found["cards"]) == ("failed", [])
    assert words in " ".join(found["reasons"])
    assert not found["driver_ok"]


def test_a_tool_that_is_not_there() -> None:
    assert (
        facts(Smi(rc=127, text="timeout: failed to run command 'nvidia-smi': No such file or directory\n"))[
            "nvidia_smi"
        ]["found"]
        is False
    )


@pytest.mark.parametrize(
    ("line", "index", "bus"),
    [
        ("Unable to determine the device handle for GPU 00000000:0B:00.0: Unknown Error", None, "0000:0b:00.0"),
        ("Unable to determine the device handle for gpu 0000:0b:00.0: GPU requires reset", None, "0000:0b:00.0"),
        ("Unable to determine the device handle for GPU 3: Unknown Error", 3, None),
        ("Unable to detect the device handle for GPU7: 00010000:0B:00.0: Not Found", 7, "10000:0b:00.0"),
        ("  Unable to determine the device handle for GPU0000:0B:00.0: Unknown Error\r", None, "0000:0b:00.0"),
    ],
)
def test_lost_in_other_words(line: str, index: int | None, bus: str | None) -> None:
    found = facts(Smi([SECOND], before=line + "\n"))
    assert [(item["index"], item["pci_id"]) for item in found["lost_cards"]] == [(index, bus)]
    assert [item["index"] for item in found["cards"]] == [1]


# In the cells


@pytest.mark.parametrize(
    "token",
    [
        "n/a",
        "N/A ",
        " N/A",
        "NA",
        "[n/a]",
        "Unknown Error",
        "GPU is lost",
        "Not Supported",
        "Err!",
        "[ERR!]",
        "-",
        "none",
    ],
)
def test_no_value_in_other_spellings(token: str) -> None:
    found = card(temperature__gpu=token, name=token, uuid=token, memory__total=token)
    assert (found["temperature_c"], found["name"], found["uuid"], found["memory_mib"]) == (None, None, None, None)
    assert found["index"] == 0
    assert found["memory_used_mib"] == 0
    assert found["missing"]["temperature.gpu"] == token.strip().strip("[]")


def test_one_unreadable_sensor_is_no_fault() -> None:
    found = facts(Smi([{**P100, "power.default_limit": "[Unknown Error]"}]))
    assert (found["state"], found["cards"][0]["power_default_limit_w"]) == ("ok", None)
    assert found["cards"][0]["missing"]["power.default_limit"] == "Unknown Error"


def test_a_card_without_memory_is_at_fault() -> None:
    assert not card(memory__total="[Unknown Error]")["healthy"]


@pytest.mark.parametrize(
    ("field", "key", "cell"),
    [
        ("memory.total", "memory_mib", "0 MiB"),
        ("memory.total", "memory_mib", "4294967295 MiB"),
        ("memory.total", "memory_mib", "18446744073709551615 MiB"),
        ("memory.total", "memory_mib", "-16384 MiB"),
        ("memory.total", "memory_mib", "16 GiB"),
        ("memory.total", "memory_mib", "16,384 MiB"),
        ("memory.total", "memory_mib", "16384.5 MiB"),
        ("memory.total", "memory_mib", "1.6384e4 MiB"),
        ("memory.total", "memory_mib", "0x4000 MiB"),
        ("memory.total", "memory_mib", "١٦٣٨٤ MiB"),
        ("memory.used", "memory_used_mib", "17179869183 MiB"),
        ("memory.used", "memory_used_mib", "16385 MiB"),
        ("temperature.gpu", "temperature_c", "-1"),
        ("temperature.gpu", "temperature_c", "4294967295"),
        ("temperature.gpu", "temperature_c", "65535"),
        ("clocks.sm", "clock_sm_mhz", "4294967295 MHz"),
        ("power.draw", "power_w", "4294967.29 W"),
        ("power.draw", "power_w", "inf W"),
        ("power.draw", "power_w", "nan"),
        ("power.draw", "power_w", "-0.01 W"),
        ("pcie.link.gen.current", "pcie_gen", "0"),
        ("pcie.link.gen.current", "pcie_gen", "255"),
        ("pcie.link.width.current", "pcie_width", "0"),
        ("utilization.gpu", "utilization_percent", "101 %"),
        ("ecc.errors.uncorrected.volatile.total", "ecc_uncorrected", "4294967295"),
        ("compute_cap", "compute_capability_source", "60"),
        ("clocks_throttle_reasons.active", "throttle_mask", "Not Active"),
        ("persistence_mode", "persistence_mode", "On"),
    ],
)
def test_a_cell_is_right_or_null(field: str, key: str, cell: str) -> None:
    found = card(**{field.replace(".", "__"): cell})
    assert found[key] is None or (field == "compute_cap" and found[key] == "table")
    assert field in found["missing"]


def test_a_count_of_errors_may_be_large() -> None:
    assert card(ecc__errors__corrected__volatile__total="3999999999")["ecc_corrected"] == 3999999999


@pytest.mark.parametrize(
    "name",
    [
        "GRID P100-8Q",
        "NVIDIA, Inc. P100, 16GB, PCIe",
        "Tesla P100-SXM2-16GB",
        "A" * 300,
        "Tesla  P100",
        'P100 "x"',
        "%s{}",
    ],
)
def test_names(name: str) -> None:
    assert card(name=name)["name"] == name


@pytest.mark.parametrize(
    ("cell", "wanted"),
    [
        ("0000:3B:00.0", "0000:3b:00.0"),
        ("00000000:3b:00.0", "0000:3b:00.0"),
        ("0000000A:3B:00.0", "000a:3b:00.0"),
        ("00010000:FF:1F.7", "10000:ff:1f.7"),
        ("[N/A]", None),
    ],
)
def test_bus_ids(cell: str, wanted: str | None) -> None:
    assert card(pci__bus_id=cell)["pci_id"] == wanted


@pytest.mark.parametrize("version", ["525.60.13", "535.129.03", "550.163.01", "570.195.03", "575.57.08", "580.178.04"])
def test_drivers_of_the_range(version: str) -> None:
    found = facts(Smi([{**P100, "driver_version": version}]), {**pci(), **loaded(version)})
    assert (found["driver_ok"], found["branch"]) == (True, int(version.split(".")[0]))


@pytest.mark.parametrize(
    "version", ["390.157", "470.256.02", "520.61.05", "590.44.01", "595.71.05", "610.43.02", "1000.1"]
)
def test_drivers_out_of_the_range(version: str) -> None:
    found = facts(Smi([{**P100, "driver_version": version}]), {**pci(), **loaded(version)})
    assert not found["driver_ok"]
    assert version in found["driver_message"]


def test_two_cards_in_one_place_of_the_list() -> None:
    found = facts(Smi([P100, {**SECOND, "index": "0"}]))
    assert [item["uuid"] for item in found["cards"]] == [UUID]
    assert "twice" in " ".join(found["reasons"])


def test_index_holes_and_order() -> None:
    rows = [{**SECOND, "index": "11"}, {**P100, "index": "3"}]
    assert [item["index"] for item in facts(Smi(rows))["cards"]] == [11, 3]


def test_reset_and_loss_in_more_words() -> None:
    """A card that needs a reset is at fault however the driver says so, and its neighbour is not."""
    for token in (
        "[GPU requires reset.]",
        "[GPU Reset Required]",
        "Reset required",
        "[GPU is lost.  Reboot the system to recover this GPU]",
        "GPU is lost.  Reboot the system to recover this GPU",
    ):
        found = facts(Smi([{**P100, "memory.total": token, "temperature.gpu": token}, SECOND]))
        assert [item["healthy"] for item in found["cards"]] == [False, True], token
        assert found["state"] == "degraded"
        assert found["cards"][0]["missing"]["memory.total"] == token.strip("[]")


@pytest.mark.parametrize("token", ["ERR!", "[Unknown Error]", "[Timeout]", "[N/A]", ""])
def test_a_card_that_says_nothing_is_at_fault(token: str) -> None:
    row = dict.fromkeys(P100, token) | {"index": "0"}
    found = facts(Smi([row, SECOND]))
    assert [(item["index"], item["healthy"]) for item in found["cards"]] == [(0, False), (1, True)]
    assert found["cards"][0]["memory_mib"] is None


def test_a_card_with_the_host_s_memory_is_not_at_fault() -> None:
    """GB10 shares the host's memory and has no size of its own to tell."""
    row = {**P100, "name": "NVIDIA GB10", "compute_cap": "12.1", "pci.bus_id": "0000000F:01:00.0"}
    row |= dict.fromkeys(("memory.total", "memory.used", "memory.free", "power.limit"), "[N/A]")
    found = facts(Smi([row]), {**pci("000f:01:00.0", "0x2e12"), **loaded()})
    assert (found["state"], found["cards"][0]["memory_mib"]) == ("ok", None)


@pytest.mark.parametrize("knows_new", [True, False])
def test_the_new_spelling_where_the_old_one_is_gone(knows_new: bool) -> None:
    """A driver that knows only the new name of the throttle reasons still tells them."""
    new = "clocks_event_reasons.active"
    row = {**P100, new: "0x0000000000000004"}
    smi = Smi([row], refused=("clocks_throttle_reasons.active", *(() if knows_new else (new,))))
    found = facts(smi)["cards"][0]
    assert found["throttle_reasons"] == (["sw_power_cap"] if knows_new else None)
    assert found["memory_mib"] == 16384
    assert smi.starts == (2 if knows_new else 4)


@pytest.mark.parametrize(
    "line",
    [
        "ERROR: ld.so: object 'libgtk3-nocsd.so.0' from LD_PRELOAD cannot be preloaded (cannot open): ignored.",
        "/bin/bash: warning: setlocale: LC_ALL: cannot change locale (de_DE.UTF-8)",
        "nvidia-smi: /usr/lib/libnvidia-ml.so.1: no version information available (required by nvidia-smi)",
        "  index, uuid, name",
    ],
)
def test_what_loader_and_shell_say_is_not_about_the_card(line: str) -> None:
    found = facts(Smi(before=line + "\n"))
    assert (found["state"], len(found["cards"]), found["reasons"]) == ("ok", 1, [])


def test_a_flood_of_lines_stays_readable() -> None:
    text = "x\n" * 20000 + "WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n" * 500
    found = facts(Smi(before=text, rc=14))
    assert (found["state"], len(found["cards"])) == ("degraded", 1)
    assert len(found["reasons"]) < 10
    assert "19995 more unexpected lines from nvidia-smi" in found["reasons"]
    assert len(found["cards"][0]["reasons"]) == 1


@pytest.mark.parametrize(
    ("driver", "device", "words"),
    [
        ("nvidia", "0x15f8", "nvidia-smi does not list it"),
        (None, "0x15f8", "no driver holds it"),
        ("nouveau", "0x15f8", "nouveau holds it"),
        ("vfio-pci", "0x15f8", None),
        (None, "0x0a65", None),  # a GeForce 210 for the console
    ],
)
def test_a_second_card_on_the_bus_only(driver: str | None, device: str, words: str | None) -> None:
    """A probe that failed leaves a card without a driver, and nvidia-smi lists the others as if all were well."""
    found = facts(Smi(), {**pci(), **pci("0000:5e:00.0", device, driver), **loaded()})
    assert (words or "none") in (" ".join(found["reasons"]) or "none")
    assert found["healthy"] is (words is None)
    reachable = next(check for check in host_checks(HostSeen(found)) if check.id == "cards_reachable")
    assert reachable.level == ("PASS" if words is None else "FAIL")


@pytest.mark.parametrize(
    ("rc", "text", "words"),
    [
        (255, "Failed to initialize NVML: Unknown Error\n", "nvidia-smi failed: status 255: Failed to initialize NVML"),
        (0, "", "nvidia-smi lists no GPU"),
        (137, "", "nvidia-smi failed: status 137: no message"),
        (139, "Segmentation fault (core dumped)\n", "nvidia-smi failed: status 139: Segmentation fault"),
    ],
)
def test_the_doctor_says_it_once(rc: int, text: str, words: str) -> None:
    found = facts(Smi(rc=rc, text=text))
    line = documented(Seen(gpu_facts=found), [])[0].text
    assert line.startswith(words)
    assert line.count("failed with") == 0
    assert len(found["reasons"]) == 1
    assert not found["reasons"][0].startswith("nvidia-smi failed with status 0")


def test_the_doctor_without_the_installed_version() -> None:
    found = facts(Smi(rc=18, text="Driver/library version mismatch\n"))
    line = next(check for check in host_checks(HostSeen(found)) if check.id == "driver_loaded")
    assert line.text == "the installed driver is not the loaded one (580.178.04)"


# Processes


def busy(xml: str, **cells: str) -> dict[str, Any]:
    return facts(Smi([{**P100, "memory.used": "900 MiB", **cells}], xml=xml))


HEAD = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
ONE = f"""<nvidia_smi_log><gpu id="0"><uuid>{UUID}</uuid><processes><process_info><gpu_instance_id>N/A</gpu_instance_id>
<pid>77</pid><type>C</type><process_name>/usr/bin/x, y</process_name><used_memory>{{}}</used_memory></process_info>
</processes></gpu></nvidia_smi_log>"""


@pytest.mark.parametrize(
    ("memory", "wanted"), [("900 MiB", 900), ("N/A", None), ("Not available in WDDM driver model", None), ("", None)]
)
def test_memory_of_a_process(memory: str, wanted: int | None) -> None:
    found = busy("\ufeffwords before\r\n" + HEAD + ONE.format(memory))
    assert [(item["pid"], item["memory_mib"]) for item in found["processes"]] == [(77, wanted)]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a & b", "a & b"),
        ("&nbsp;", "&nbsp;"),
        ("a &amp; b &lt;c&gt;", "a & b <c>"),
        ("python -c 'if a<b: x'", "python -c 'if a<b: x'"),
        ("a << b <", "a << b <"),
        ("red \x1b[31m \x00 \ud800", "red ?[31m ? ?"),
        ("Ärger 🙂", "Ärger 🙂"),
    ],
)
def test_any_name_of_a_process(name: str, wanted: str) -> None:
    """Whoever may start a program chooses its name, and must not hide who is on a card with it."""
    found = busy(HEAD + ONE.replace("/usr/bin/x, y", name).format("900 MiB"))
    assert [(item["pid"], item["name"], item["memory_mib"]) for item in found["processes"]] == [(77, wanted, 900)]
    assert found["state"] == "ok"


@pytest.mark.parametrize(
    "xml",
    [
        "",
        HEAD,
        ONE[:150],
        ONE.replace("</processes>", ""),
        ONE.replace("/usr/bin/x, y", "</gpu>"),
        ONE.replace("<used_memory>", "<used_memory"),
        "No devices were found",
    ],
)
def test_broken_reports(xml: str) -> None:
    found = busy(xml)
    assert (found["processes"], found["state"], len(found["cards"])) == ([], "degraded", 1)


def test_mig_parts_are_no_cards() -> None:
    found = facts(Smi([{**P100, "mig.mode.current": "Enabled", "memory.used": "[N/A]"}]))
    assert len(found["cards"]) == 1
    assert "MIG is on" in " ".join(found["reasons"])
