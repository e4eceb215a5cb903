# SPDX-License-Identifier: Apache-2.0
"""Drivers and the kernel log: each case of the collected ones, under its number, and the guard rules."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _driver, _driver_apt, _driver_dnf, _gpu_log
from ansible_collections.tensorless.fleet.plugins.module_utils._driver_apt import Step
from ansible_collections.tensorless.fleet.plugins.module_utils._driver_plan import Driver, Wish
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu_bus import (
    branch,
    kernel_module,
    pci_cards,
    secure_boot,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.gpu.fakes import OPEN, P100, FakeFiles, Smi, facts, loaded, pci

D02 = """NVRM: The NVIDIA Tesla P100-PCIE-16GB GPU installed in this system is
NVRM:  supported through the NVIDIA 580.xx Legacy drivers. Please
NVRM:  visit http://www.nvidia.com/object/unix.html for more
NVRM:  information.  The 595.71.05 NVIDIA driver will ignore
NVRM:  this GPU.  Continuing probe...
NVRM: No NVIDIA GPU found.
"""
D03 = """NVRM: The NVIDIA GPU 0000:03:00.0 (PCI ID: 10de:15f8)
NVRM: installed in this system is not supported by open
NVRM: nvidia.ko because it does not include the required GPU
NVRM: System Processor (GSP).
nvidia 0000:03:00.0: probe with driver nvidia failed with error -1
NVRM: None of the NVIDIA devices were initialized.
"""
D09 = "modprobe: ERROR: could not insert 'nvidia': Key was rejected by service\n"
D10 = """NVRM: The NVIDIA probe routine was not called for 3 device(s).
NVRM: This can occur when a driver such as:
NVRM: nouveau, rivafb, nvidiafb or rivatv
NVRM: was loaded and obtained ownership of the NVIDIA device(s).
"""
NONE = "No devices were found\n"
FAILED = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"


class FakeManager:
    """A package manager whose repositories and simulation are given."""

    def __init__(self, installed: dict[str, str] | None = None, steps: Sequence[Step] = (), branch: int = 580) -> None:
        self._installed, self._steps, self._branch = installed or {}, list(steps), branch
        self.done: list[list[str]] = []
        self.asked: list[str] = []

    def installed(self) -> dict[str, str]:
        return self._installed

    def unfinished(self) -> dict[str, str]:
        return {}

    def held(self) -> set[str]:
        return set()

    def choose(self, wanted: int | None) -> tuple[int, list[str]]:
        return wanted or self._branch, ["nvidia-driver-cuda", "nvidia-kernel-dkms"]

    def lower(self, names: Sequence[str], branch: int) -> list[str]:
        return list(names)

    def simulate(self, packages: Sequence[str], pins: str, downgrade: bool) -> _driver_apt.Transaction:
        self.asked = list(packages)
        return _driver_apt.Transaction(self._steps)

    def install(self, packages: Sequence[str], downgrade: bool, pins: str) -> None:
        self.done.append(list(packages))

    def is_older(self, new: str, old: str) -> bool:
        return (branch(new) or 0) < (branch(old) or 0)


def work(
    manager: FakeManager, found: dict[str, object], wish: Wish | None = None, files: FakeFiles | None = None
) -> Driver:
    wish = wish or Wish(headers=False)
    return Driver(lambda argv: (127, "", ""), files or FakeFiles(), manager, found, wish, lambda path, text: None)


def bare() -> dict[str, object]:
    return facts(Smi(rc=9, text=FAILED), pci(driver=None))


def test_d01_a_versioned_metapackage_is_no_ceiling() -> None:
    """What cuda-drivers-580 really pulls in: everything from 590. The transaction is refused before it runs."""
    text = """Inst libnvidia-ml1 (590.48.01-1 cuda [amd64])
Inst nvidia-kernel-dkms (590.48.01-1 cuda [amd64])
Inst nvidia-driver (590.48.01-1 cuda [amd64])
Inst cuda-drivers-580 (580.105.08-1 cuda [amd64])
Conf nvidia-driver (590.48.01-1 cuda [amd64])
"""
    steps = _driver_apt.parse_simulation(text).driver
    assert [step.name for step in steps] == ["libnvidia-ml1", "nvidia-kernel-dkms", "nvidia-driver", "cuda-drivers-580"]
    manager = FakeManager(steps=steps)
    with pytest.raises(Refusal, match=r"libnvidia-ml1 would land at 590\.48\.01-1, outside R525 to R580"):
        work(manager, bare()).plan()
    assert manager.done == []


def test_d01_names_that_follow_the_newest_driver() -> None:
    for name in (
        "cuda-drivers",
        "cuda",
        "nvidia-open",
        "nvidia-driver-latest-dkms",
        "cuda-drivers-590",
        "nvidia-driver-595",
    ):
        assert _driver.name_problem(name), name
    for name in ("cuda-drivers-580", "nvidia-headless-580-server", "nvidia-kernel-dkms", "nvidia-driver-pinning-580"):
        assert _driver.name_problem(name) is None, name


def test_d02_branch_too_new() -> None:
    problem = _gpu_log.driver_problem(D02)
    assert problem is not None
    assert (problem["cause"], "R580" in problem["fix"]) == ("branch_too_new", True)
    found = facts(Smi(rc=6, text=NONE, log=D02), {**pci(driver="nvidia"), **loaded("595.71.05")})
    assert found["problem"]["cause"] == "branch_too_new"
    assert "595.71.05" in found["driver_message"]
    assert "R580" in found["driver_message"]


def test_d02_wrapped_otherwise_and_name_repeated() -> None:
    log = D02.replace("NVIDIA Tesla", "NVIDIA NVIDIA Tesla").replace(
        "GPU installed in this system is\nNVRM:  supported", "GPU\nNVRM: installed in this system is supported"
    )
    problem = _gpu_log.driver_problem(log)
    assert problem is not None
    assert problem["cause"] == "branch_too_new"


def test_d02_without_a_readable_log() -> None:
    found = facts(Smi(rc=6, text=NONE), {**pci(), **loaded("590.48.01")})
    assert found["problem"]["cause"] == "branch_too_new"


def test_d03_open_module() -> None:
    problem = _gpu_log.driver_problem(D03)
    assert problem is not None
    assert problem["cause"] == "open_module"
    found = facts(Smi(rc=6, text=NONE, log=D03), {**pci(), **loaded(shape=OPEN)})
    assert (found["kernel_module"], found["problem"]["cause"], found["driver_ok"]) == ("open", "open_module", False)
    assert "proprietary" in found["driver_message"]


@pytest.mark.parametrize(
    "name",
    [
        "nvidia-open",
        "nvidia-dkms-580-open",
        "nvidia-driver-570-server-open",
        "linux-modules-nvidia-580-open-generic",
        "linux-modules-nvidia-580-server-open-generic",
        "nvidia-open-kernel-dkms",
        "nvidia-tesla-535-open-kernel-dkms",
        "kmod-nvidia-open-dkms",
        "nvidia-lts-open",
        "nvidia-driver:open-dkms",
        "nvidia-driver:580-open",
    ],
)
def test_d03_open_packages_are_refused(name: str) -> None:
    assert _driver.is_open_package(name)
    assert _driver.name_problem(name)


@pytest.mark.parametrize(
    "name", ["nvidia-kernel-dkms", "openssl", "libopenblas0", "nvidia-driver-580-server", "nvidia-opencl-icd"]
)
def test_d03_open_is_a_word_and_no_syllable(name: str) -> None:
    assert not _driver.is_open_package(name)


def test_d03_open_packages_in_a_transaction() -> None:
    steps = [Step("nvidia-kernel-open-dkms", None, "580.105.08-1")]
    assert "open kernel module" in _driver_apt.transaction_problems(steps, 580, False, True)[0]
    assert _driver_apt.transaction_problems(steps, 580, False, False) == []


def test_d04_transitional_package_lands_in_another_branch() -> None:
    steps = _driver_apt.parse_simulation("Inst nvidia-headless-580-server (580.173.02-0ubuntu1 u [amd64])\n").driver
    assert "not of branch 565" in _driver_apt.transaction_problems(steps, 565, False, True)[0]
    assert _driver_apt.transaction_problems(steps, 565, True, True) == []
    high = [Step("nvidia-headless-590-server", None, "590.48.01-0ubuntu1")]
    assert _driver_apt.transaction_problems(high, 580, True, True), "drift never goes above the ceiling"


def test_d05_pins() -> None:
    text = _driver_apt.preferences(580, 600, True)
    assert "Pin-Priority: -1" in text
    assert "nvidia-kernel-open*" in text
    assert "nvidia-kernel-open*" not in _driver_apt.preferences(580, 600, False)


def test_d05_blacklist_names_the_libraries_too() -> None:
    text = _driver_apt.upgrades_text()
    for name in ("nvidia-", "libnvidia-", "libcuda", "cuda-drivers", "firmware-nvidia"):
        assert f'"{name}";' in text


@pytest.mark.parametrize(
    ("name", "driver"),
    [
        ("nvidia-container-toolkit", False),
        ("nvidia-container-toolkit-base", False),
        ("libnvidia-container1", False),
        ("libnvidia-container-tools", False),
        ("nvidia-cuda-toolkit", False),
        ("libnvidia-ml1", True),
        ("libcuda1", True),
        ("nvidia-utils-580", True),
        ("cuda-drivers-580", True),
        ("firmware-nvidia-gsp", True),
        ("xserver-xorg-video-nvidia", True),
        ("linux-modules-nvidia-580-generic", True),
        ("kmod-nvidia-latest-dkms", True),
        ("bash", False),
    ],
)
def test_d05_what_belongs_to_the_driver(name: str, driver: bool) -> None:
    assert _driver.is_driver_package(name) is driver


def test_d06_repositories_without_580() -> None:
    """Debian's own archive: the newest allowed branch is taken, and that is said."""
    manager = FakeManager(steps=[Step("nvidia-kernel-dkms", None, "550.163.01-2")], branch=550)
    driver = work(manager, bare())
    driver.plan()
    assert "R550 is the newest allowed one" in driver.notes[0]


def test_d06_only_newer_branches() -> None:
    class Newer(_driver_apt.Apt):
        def available(self, names: Sequence[str]) -> dict[str, list[str]]:
            return {"nvidia-driver-cuda": ["590.48.01-1"], "nvidia-kernel-dkms": ["590.48.01-1"]}

    with pytest.raises(Refusal, match=r"have no driver of R525 to R580 \(they have R590\)"):
        Newer(lambda argv: (0, "", "")).choose(None)


def test_d07_module_streams() -> None:
    for stream in ("latest", "latest-dkms", "open-dkms", "580-open", "590-dkms", "525.125.06"):
        assert _driver.name_problem(f"nvidia-driver:{stream}"), stream
    for stream in ("580-dkms", "525-dkms", "570"):
        assert _driver.name_problem(f"nvidia-driver:{stream}") is None, stream


def test_d07_the_package_of_the_right_stream_is_called_latest() -> None:
    assert _driver.name_problem("kmod-nvidia-latest-dkms") is None
    assert branch("3:580.105.08-1.el9") == 580
    steps = [Step("kmod-nvidia-latest-dkms", None, "3:590.48.01-1.el9")]
    assert _driver_apt.transaction_problems(steps, 580, False, True)


DNF = """Dependencies resolved.
================================================================================
 Package                   Architecture Version             Repository     Size
================================================================================
Installing:
 nvidia-driver-cuda        x86_64       3:580.105.08-1.el9  cuda-rhel9    1.2 M
Installing dependencies:
 kmod-nvidia-latest-dkms   x86_64       3:590.48.01-1.el9   cuda-rhel9     40 M
 libnvidia-ml              x86_64       3:580.105.08-1.el9  cuda-rhel9    640 k

Transaction Summary
================================================================================
Install  3 Packages
"""


def test_d07_dnf_transaction_is_read() -> None:
    found = _driver_dnf.parse_transaction(DNF)
    assert [(step.name, step.new) for step in found.install] == [
        ("nvidia-driver-cuda", "3:580.105.08-1.el9"),
        ("kmod-nvidia-latest-dkms", "3:590.48.01-1.el9"),
        ("libnvidia-ml", "3:580.105.08-1.el9"),
    ]
    assert "590.48.01" in _driver_apt.transaction_problems(found.driver, 580, False, True)[0]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("nvidia/580.159.04, 6.8.0-90-generic, x86_64: installed\n", ["6.8.0-101-generic"]),
        (
            "nvidia/580.159.04, 6.8.0-90-generic, x86_64: installed\n"
            "nvidia/580.159.04, 6.8.0-101-generic, x86_64: installed\n",
            [],
        ),
        ("nvidia/580.159.04, 6.8.0-90-generic, x86_64: built\n", ["6.8.0-90-generic", "6.8.0-101-generic"]),
        ("", []),
    ],
)
def test_d08_dkms(text: str, problems: list[str]) -> None:
    """The running and the newest kernel need the module, or the next boot comes up without a card."""
    kernels = ["6.8.0-90-generic", "6.8.0-101-generic"]
    found = _driver.dkms_problems(lambda argv: (0, text, ""), kernels, "6.8.0-90-generic")
    assert [line.split()[-1] for line in found] == problems


def test_d08_headers_missing() -> None:
    with pytest.raises(Refusal, match="no headers for the running kernel"):
        work(FakeManager(), bare(), Wish(headers=True)).plan()


def efi(state: str) -> dict[str, str]:
    return {"/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c": "\x06\0\0\0" + state}


def test_d09_secure_boot() -> None:
    problem = _gpu_log.driver_problem(D09)
    assert problem is not None
    assert problem["cause"] == "secure_boot"
    assert (secure_boot(FakeFiles(efi("\1"))), secure_boot(FakeFiles(efi("\0"))), secure_boot(FakeFiles())) == (
        True,
        False,
        None,
    )
    with pytest.raises(Refusal, match=r"Secure Boot is on.*mokutil"):
        work(FakeManager(), bare(), files=FakeFiles(efi("\1"))).plan()


def test_d10_nouveau() -> None:
    problem = _gpu_log.driver_problem(D10)
    assert problem is not None
    assert problem["cause"] == "other_driver"
    files = {**pci(driver="nouveau"), "/sys/module/nouveau/refcnt": "1"}
    found = facts(Smi(rc=9, text=FAILED), files)
    assert (found["kernel_module"], found["pci_cards"][0]["driver"]) == ("nouveau", "nouveau")
    assert "nouveau" in found["driver_message"]
    texts = [
        change.text for change in work(FakeManager(steps=[Step("nvidia-kernel-dkms", None, "580.1.2-1")]), found).plan()
    ]
    assert "rebuild the initramfs without nouveau" in texts


def test_d10_initramfs_is_left_alone_where_nouveau_is_not_loaded() -> None:
    texts = [
        change.text
        for change in work(FakeManager(steps=[Step("nvidia-kernel-dkms", None, "580.1.2-1")]), bare()).plan()
    ]
    assert not any("initramfs" in text for text in texts)


def test_d10_reserved_for_virtual_machines_is_not_lost() -> None:
    found = facts(Smi(rc=6, text=NONE), {**pci(driver="vfio-pci"), **loaded()})
    assert found["pci_cards"][0]["driver"] == "vfio-pci"
    assert "reserved for virtual machines" in found["reasons"][0]


def test_o04_xid() -> None:
    log = "NVRM: Xid (PCI:0000:82:00): 79, GPU has fallen off the bus.\n"
    log += "NVRM: GPU 0000:82:00.0: GPU has fallen off the bus.\n"
    found = _gpu_log.faults(log)
    assert [(item["kind"], item["pci_id"], item["xid"]) for item in found] == [
        ("xid", "0000:82:00.0", 79),
        ("bus_loss", "0000:82:00.0", None),
    ]


def test_o04_noxid() -> None:
    log = """NVRM: The NVIDIA GPU 0000:b3:00.0
               NVRM: (PCI ID: 10de:15f8) installed in this system has
               NVRM: fallen off the bus and is not responding to commands.
"""
    assert [(item["kind"], item["pci_id"]) for item in _gpu_log.faults(log)] == [("bus_loss", "0000:b3:00.0")]


def test_o04_p100_ecc() -> None:
    log = "".join(f"NVRM: Xid (PCI:0000:82:00): {what}\n" for what in ("48, pid=1", "62, 1", "48, pid=2"))
    assert [(item["xid"], item["count"]) for item in _gpu_log.faults(log)] == [(48, 2), (62, 1)]


def test_o04_dead_link() -> None:
    card = pci_cards(FakeFiles(pci(current_link_width="63\n", current_link_speed="Unknown\n")))[0]
    assert (card["lost"], card["link_width"]) == (True, None)


def test_quiet_log() -> None:
    assert _gpu_log.faults("usb 1-1: new device\nnvidia: loading out-of-tree module taints kernel.\n") == []
    assert _gpu_log.driver_problem("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.105.08\n") is None


def test_guard_1_branches() -> None:
    for text, number in [
        ("580.95.05", 580),
        ("580.95.05-1", 580),
        ("3:580.105.08-1.el9", 580),
        ("1.18.2-1", None),
        ("x", None),
    ]:
        assert branch(text) == number
    for version, fine in [
        ("525.60.13", True),
        ("580.178.04", True),
        ("470.256.02", False),
        ("590.48.01", False),
        ("610.1.2", False),
    ]:
        found = facts(Smi([{**P100, "driver_version": version}]), {**pci(), **loaded(version)})
        assert found["driver_ok"] is fine, version


def test_guard_1_installed_versions_too() -> None:
    manager = FakeManager(installed={"nvidia-driver": "590.48.01-1", "nvidia-kernel-dkms": "590.48.01-1"})
    with pytest.raises(Refusal, match="nvidia_driver_allow_downgrade"):
        work(manager, bare()).plan()


def test_guard_1_way_back() -> None:
    manager = FakeManager(
        installed={
            "nvidia-driver": "590.48.01-1",
            "nvidia-kernel-dkms": "590.48.01-1",
            "cuda-drivers-590": "590.48.01-1",
        },
        steps=[
            Step("nvidia-driver", "590.48.01-1", "580.105.08-1"),
            Step("nvidia-kernel-dkms", "590.48.01-1", "580.105.08-1"),
            Step("cuda-drivers-590", "590.48.01-1", "580.105.08-1"),
        ],
    )
    driver = work(manager, bare(), Wish(headers=False, allow_downgrade=True))
    assert any(change.text.startswith("install the driver 580.105.08-1") for change in driver.plan())
    assert manager.asked == [*driver.packages, "cuda-drivers-590", "nvidia-driver"]
    driver.manager = _driver_apt.Apt(lambda argv: (0, "", ""))
    assert driver._back(manager.installed()) == ["cuda-drivers-590-", "nvidia-driver"]


def test_guard_3_latest() -> None:
    assert _driver.name_problem("nvidia-driver:latest")
    assert _driver.name_problem("cuda-drivers")


def test_a_driver_that_serves_is_left_alone() -> None:
    """However it was installed: here no package at all, as a runfile leaves it."""
    manager = FakeManager(steps=[Step("nvidia-driver", None, "580.105.08-1")])
    changes = work(manager, facts(Smi())).plan()
    assert not any("install" in change.text for change in changes)
    assert manager.asked == []


def test_no_package_is_touched_while_a_reboot_is_due() -> None:
    manager = FakeManager(installed={"nvidia-driver": "580.105.08-1", "nvidia-kernel-dkms": "580.105.08-1"})
    found = facts(
        Smi(rc=18, text="Failed to initialize NVML: Driver/library version mismatch\n"), {**pci(), **loaded("535.1.2")}
    )
    driver = work(manager, found)
    driver.plan()
    assert manager.asked == []
    assert driver.branch == 580


def test_kernel_module_flavours() -> None:
    assert kernel_module(FakeFiles(loaded())) == "proprietary"
    assert kernel_module(FakeFiles(loaded(shape=OPEN))) == "open"
    assert kernel_module(FakeFiles({"/sys/module/nouveau/refcnt": "0"})) == "nouveau"
    assert kernel_module(FakeFiles()) == "none"
