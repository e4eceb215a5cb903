# SPDX-License-Identifier: Apache-2.0
"""The doctor's report, and each of its further checks."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import (
    _doctor,
    _doctor_entry,
    _doctor_host,
    _doctor_observe,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._doctor_host import HostSeen, host_checks
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu import read_gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import load_directory
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.gpu.fakes import OPEN, P100, FakeFiles, Smi, facts, loaded, pci

ROOT = pathlib.Path(__file__).resolve().parents[3]
RECIPES = load_directory(str(ROOT / "recipes")).recipes


def test_the_documented_example_host_line_for_line() -> None:
    seen = _doctor.Seen(
        gpu_facts=read_gpus(Smi(), None, FakeFiles()),
        runtimes={"podman": "/usr/bin/podman"},
        cache="/home/you/.cache/huggingface/hub",
        free_bytes=231190000000,
    )
    assert _doctor.text(_doctor.documented(seen, RECIPES)).splitlines() == [
        "FAIL  nvidia-smi not found: no NVIDIA driver is installed",
        "      fix: install the NVIDIA driver, 525.60.13 or newer, and reboot",
        "PASS  container runtime: podman (/usr/bin/podman)",
        "FAIL  no NVIDIA CDI spec for podman in /etc/cdi/nvidia.yaml or /var/run/cdi/nvidia.yaml",
        "      fix: install nvidia-container-toolkit, then: sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        "PASS  model cache /home/you/.cache/huggingface/hub: 231.19 GB free, the model needs 12.95 GB",
        "",
        "2 checks failed.",
    ]


def test_the_documented_ready_host_line_for_line() -> None:
    seen = _doctor.Seen(
        gpu_facts=facts(Smi([{**P100, "memory.total": "16269 MiB", "driver_version": "535.183.01"}])),
        runtimes={"podman": "/usr/bin/podman"},
        cdi_files=["/etc/cdi/nvidia.yaml"],
        cache="/home/you/.cache/huggingface/hub",
        free_bytes=231190000000,
    )
    fits = "iamMrDuncan/Qwen3.8-27B-PN3-GGUF on p100, iamMrDuncan/Qwen3.8-27B-UD-IQ3_XXS-Q3Floor-GGUF on p100"
    assert _doctor.text(_doctor.documented(seen, RECIPES)).splitlines() == [
        "PASS  nvidia-smi lists 1 GPU",
        f"PASS  GPU 0: Tesla P100-PCIE-16GB, compute 6.0, 16269 MiB, driver 535.183.01; fits {fits}",
        "PASS  driver 535.183.01 is at least 525.60.13 (needed by iamMrDuncan/Qwen3.8-27B-PN3-GGUF on p100)",
        "PASS  container runtime: podman (/usr/bin/podman)",
        "PASS  NVIDIA CDI spec for podman: /etc/cdi/nvidia.yaml",
        "PASS  model cache /home/you/.cache/huggingface/hub: 231.19 GB free, the model needs 12.95 GB",
        "",
        "all checks passed.",
    ]


def seen(smi: Smi | None = None, files: dict[str, str] | None = None, **more: Any) -> HostSeen:
    values: dict[str, Any] = {
        "cpu_flags": ["avx2", "fma", "f16c"],
        "kernel_log": "",
        "cdi_problems": [],
        "ports": {"127.0.0.1:8080": "free"},
        "clock_synchronised": True,
        "image_store": "/var/lib/containers/storage",
        "image_free": 10**11,
        "runtime": "podman",
        "toolkit": True,
    }
    return HostSeen(gpu_facts=facts(smi or Smi(), files), **(values | more))


def levels(host: HostSeen) -> dict[str, str]:
    return {check.id: check.level for check in host_checks(host)}


def test_a_ready_host_passes_everything() -> None:
    assert set(levels(seen()).values()) == {"PASS"}


XML = """<nvidia_smi_log><gpu id="0"><uuid>GPU-11111111-2222-3333-4444-555555555555</uuid><processes><process_info>
<pid>77</pid><type>C</type><process_name>/usr/bin/miner</process_name><used_memory>900 MiB</used_memory></process_info>
</processes></gpu></nvidia_smi_log>"""
BUSY = Smi([{**P100, "memory.used": "900 MiB"}], xml=XML)
LOST = Smi(before="Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error\n")
NO_CARD = Smi(rc=6, text="No devices were found\n")
NO_DRIVER = Smi(rc=9, text="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")
MISMATCH = Smi(rc=18, text="Failed to initialize NVML: Driver/library version mismatch\n")
LIBRARY = {"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1": "->/x/libnvidia-ml.so.580.105.08"}
FAILURES: dict[str, HostSeen] = {
    "cpu_flags": seen(cpu_flags=["avx2", "fma"]),
    "driver_branch": seen(NO_CARD, {**pci(), **loaded("590.48.01")}),
    "kernel_module": seen(NO_CARD, {**pci(), **loaded(shape=OPEN)}),
    "driver_loaded": seen(MISMATCH, {**pci(), **loaded("535.1.2"), **LIBRARY}),
    "nouveau": seen(NO_DRIVER, {**pci(driver="nouveau"), "/sys/module/nouveau/refcnt": "0"}),
    "secure_boot": seen(NO_DRIVER, pci(driver=None), secure_boot=True),
    "unattended_upgrades": seen(movable=["nvidia-driver-cuda", "libnvidia-ml1"]),
    "cdi_spec": seen(cdi_problems=["/etc/cdi/nvidia.yaml was made for driver 535.1.2, but 580.178.04 is loaded"]),
    "cards_reachable": seen(LOST),
    "persistence": seen(Smi([{**P100, "persistence_mode": "Disabled"}])),
    "throttle": seen(Smi([{**P100, "clocks_throttle_reasons.active": "0x0000000000000040"}])),
    "memory_errors": seen(Smi([{**P100, "retired_pages.pending": "Yes"}])),
    "card_processes": seen(BUSY),
    "kernel_log": seen(kernel_log="NVRM: Xid (PCI:0000:3b:00): 48, pid=1\n"),
    "port": seen(ports={"127.0.0.1:8080": "address already in use"}),
    "clock": seen(clock_skew=90000.0),
    "image_disk": seen(image_free=10**9),
    "hf_token": seen(token="refused"),
    "docker_reload": seen(lost_access=["tensorless-pn3"]),
}


@pytest.mark.parametrize("name", sorted(FAILURES))
def test_each_check_can_fail_alone(name: str) -> None:
    checks = host_checks(FAILURES[name])
    assert [check.id for check in checks if check.level == "FAIL"] == [name]
    check = next(check for check in checks if check.id == name)
    assert check.fix
    assert bool(check.fix_command) != (name in _doctor_host.NO_COMMAND), "a command, or the reason why there is none"


def test_the_table_of_the_documentation_is_this_one() -> None:
    text = (ROOT / "docs" / "reference" / "doctor.md").read_text(encoding="utf-8")
    for name, why in _doctor_host.NO_COMMAND.items():
        assert f"| `{name}` | {why} |" in text
    for name in FAILURES:
        assert f"| `{name}` |" in text


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("memory_errors", seen(Smi([{**P100, "ecc.mode.current": "Disabled"}]))),
        ("cards_reachable", seen(Smi([{**P100, "pcie.link.width.current": "8"}]))),
        ("kernel_log", seen(kernel_log=None)),
        ("driver_kernels", seen(unbuilt=["dkms has no module for kernel 6.8.0-101-generic"])),
        ("card_processes", seen(Smi([{**P100, "memory.used": "900 MiB"}], xml="<nvidia_smi_log></nvidia_smi_log>"))),
        ("clock", seen(clock_skew=-300.0)),
        ("clock", seen(clock_synchronised=False)),
        ("hf_token", seen(token="no answer in time")),
    ],
)
def test_warnings_fail_nothing(name: str, host: HostSeen) -> None:
    found = levels(host)
    assert found[name] == "WARN"
    assert "FAIL" not in found.values()


def test_our_own_server_is_no_stranger() -> None:
    assert levels(seen(BUSY, our_pids=[77]))["card_processes"] == "PASS"
    assert levels(seen(ports={"127.0.0.1:8080": "ours"}))["port"] == "PASS"


def test_exit_code_counts_both_blocks() -> None:
    for checks, code in (([], 0), (host_checks(FAILURES["port"]), 1), (host_checks(seen()), 0)):
        assert _doctor.report(checks)["exit_code"] == code
    report = _doctor.report(host_checks(FAILURES["port"]))
    assert (report["failed_checks"], report["host_failed_checks"]) == (0, 1)
    assert report["summary"] == "all checks passed."
    assert report["host_summary"] == "further checks: 1 check failed."


def test_text_from_a_card_cannot_reach_the_terminal() -> None:
    smi = Smi([{**P100, "name": "Tesla \x1b]0;owned\x07 P100", "compute_cap": "6.0"}])
    text = _doctor.text(_doctor.documented(_doctor.Seen(gpu_facts=facts(smi), cache="/c"), RECIPES))
    assert "\x1b" not in text
    assert "\x07" not in text


def test_unattended_upgrades_are_read_as_apt_has_them() -> None:
    packages = "install installed unattended-upgrades\ninstall installed libnvidia-ml1\nhold installed nvidia-driver\n"
    packages += "install installed nvidia-container-toolkit\ninstall installed libcuda1\n"
    config = 'APT::Periodic::Unattended-Upgrade "1";\nUnattended-Upgrade::Package-Blacklist:: "libcuda";\n'

    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        return 0, packages if argv[0] == "dpkg-query" else config, ""

    ask = _doctor_observe.Question(run, lambda name: f"/usr/bin/{name}", RECIPES, "/c")
    assert _doctor_observe._movable(ask) == ["libnvidia-ml1"]
    config = 'APT::Periodic::Unattended-Upgrade "0";\n'
    assert _doctor_observe._movable(ask) is None


def test_places_of_the_planned_servers() -> None:
    """One for each card that the model fits, with gpu: each; an IPv6 address stands in brackets."""
    rows = [{**P100, "index": str(n), "uuid": f"GPU-{n}", "pci.bus_id": f"00000000:{n + 16}:00.0"} for n in range(3)]
    rows[1]["compute_cap"] = "8.6"
    repo = RECIPES[0].repo
    servers = [
        {"model": "x", "repo": repo, "gpu": "each", "port": 9000},
        {"model": "x", "repo": repo, "gpu": 0, "host": "::1", "port": "9100"},
        {"model": "unknown", "gpu": "each", "host": "0.0.0.0"},
    ]
    ask = _doctor_observe.Question(lambda argv: (1, "", ""), lambda name: None, RECIPES, "/c", servers=servers)
    assert _doctor_observe.places(ask, facts(Smi(rows))) == [
        "127.0.0.1:9000",
        "127.0.0.1:9001",
        "[::1]:9100",
        "0.0.0.0:8080",
    ]
    assert _doctor_observe.places(ask, facts(NO_CARD))[0] == "127.0.0.1:9000"


@pytest.mark.parametrize("entry", ["pn3", {"model": "x", "port": "http"}, {"port": 70000}, {"port": -1}])
def test_entries_that_are_no_servers(entry: Any) -> None:
    with pytest.raises(Refusal, match="no entry of tensorless_servers"):
        _doctor_entry.check_server(entry)


def test_port_in_use() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert _doctor_observe._port_state(f"127.0.0.1:{port}", []) == "address already in use"
        assert _doctor_observe._port_state(f"127.0.0.1:{port}", [port]) == "ours"
    assert _doctor_observe._port_state(f"127.0.0.1:{port}", []) == "free"


def test_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path: pathlib.Path) -> None:
    found = _doctor_observe.free_bytes(str(tmp_path / "a" / "b"))
    assert found is not None
    assert found > 0
