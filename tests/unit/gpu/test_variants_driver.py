# SPDX-License-Identifier: Apache-2.0
"""Further states of hosts of the kinds that were collected: half-made installations, odd packages, other tools."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _driver, _driver_apt, _driver_dnf
from ansible_collections.tensorless.fleet.plugins.module_utils._driver_apt import Step
from ansible_collections.tensorless.fleet.plugins.module_utils._driver_plan import Driver, Wish
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.gpu.fakes import FakeFiles, Smi, facts, loaded, pci
from tests.unit.gpu.test_cases_driver import FakeManager, bare, work

RUNNING, NEWEST = "6.8.0-90-generic", "6.8.0-101-generic"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        # dkms before 3 writes commas where later ones write a slash.
        (f"nvidia, 580.95.05, {RUNNING}, x86_64: installed\nnvidia, 580.95.05, {NEWEST}, x86_64: installed\n", []),
        # Debian's name of the module.
        (f"nvidia-current/580.95.05, {RUNNING}, x86_64: installed\n", [NEWEST]),
        (
            f"nvidia/580.95.05, {RUNNING}, x86_64: installed (WARNING! Diff between built and installed module!)\n"
            f"nvidia/580.95.05, {NEWEST}, x86_64: installed (original_module exists)\n",
            [],
        ),
        # The build failed: dkms knows the source and no kernel.
        ("nvidia/580.95.05: added\n", [RUNNING, NEWEST]),
        # Two versions: the old one is built for both kernels, and that is no help.
        (
            f"nvidia/535.261.03, {RUNNING}, x86_64: installed\nnvidia/535.261.03, {NEWEST}, x86_64: installed\n"
            f"nvidia/580.95.05, {RUNNING}, x86_64: installed\n",
            [NEWEST],
        ),
        ("virtualbox/7.0, 6.8.0-90-generic, x86_64: installed\n", []),
    ],
)
def test_dkms(text: str, missing: list[str]) -> None:
    found = _driver.dkms_problems(lambda argv: (0, text, ""), [RUNNING, NEWEST], RUNNING, "580.95.05")
    assert [line.split()[-1] for line in found] == missing


def test_the_folder_of_a_removed_kernel_is_no_kernel() -> None:
    release = platform.release()
    files = FakeFiles({f"/lib/modules/{release}/kernel/x.ko": "", "/lib/modules/99.0/updates/dkms/nvidia.ko": ""})
    status = f"nvidia/580.95.05, {release}, x86_64: installed\n"
    driver = work(FakeManager(), bare(), files=files)
    driver.run = lambda argv: (0, status, "")
    driver.check_installed()


def test_a_module_that_was_not_built_stops_before_the_reboot() -> None:
    driver = work(FakeManager(), bare())
    driver.run = lambda argv: (0, "nvidia/580.95.05: added\n", "")
    with pytest.raises(Refusal, match="Do not reboot"):
        driver.check_installed()


def test_half_configured() -> None:
    """A build that failed leaves the package half-configured, and apt sees nothing to install."""
    manager = FakeManager(installed={"libnvidia-ml1": "580.95.05-1"})
    manager.unfinished = lambda: {"nvidia-kernel-dkms": "half-configured"}  # type: ignore[method-assign]
    with pytest.raises(Refusal, match=r"nvidia-kernel-dkms.*half-configured.*dpkg --configure -a.*make\.log"):
        work(manager, bare()).plan()


def test_states_of_dpkg() -> None:
    states = (
        "half-configured nvidia-kernel-dkms",
        "unpacked libcuda1",
        "half-installed bash",
        "config-files nvidia-smi",
    )
    apt = _driver_apt.Apt(lambda argv: (0, "".join(f"{state}\n" for state in states), ""))
    assert apt.unfinished() == {"nvidia-kernel-dkms": "half-configured", "libcuda1": "unpacked"}


def mismatch() -> dict[str, Any]:
    text = "Failed to initialize NVML: Driver/library version mismatch\n"
    return facts(Smi(rc=18, text=text), {**pci(), **loaded("570.195.03")})


def test_a_module_beside_libraries_of_another_version_is_not_waited_for() -> None:
    """An upgrade that stopped half-way stays that way however often the host is rebooted."""
    installed = {"nvidia-kernel-dkms": "570.195.03-1", "libnvidia-ml1": "580.105.08-1", "libcuda1": "580.105.08-1"}
    manager = FakeManager(installed, [Step("nvidia-kernel-dkms", "570.195.03-1", "580.105.08-1")])
    assert any("install the driver 580.105.08-1" in change.text for change in work(manager, mismatch()).plan())


@pytest.mark.parametrize(
    "installed",
    [
        {"nvidia-kernel-dkms": "580.105.08-1", "libnvidia-ml1": "580.105.08-1", "libcuda1": "580.105.08-2"},
        {
            "nvidia-dkms-580-server": "580.105.08-0ubuntu0.24.04.1",
            "libnvidia-compute-580-server": "580.105.08-0ubuntu2",
        },
        {
            "linux-modules-nvidia-580-server-generic": "6.8.0-90.91",
            "libnvidia-compute-580-server": "580.105.08-0ubuntu2",
        },
        {"kmod-nvidia-latest-dkms": "3:580.105.08-1.el9", "nvidia-driver-cuda-libs": "3:580.105.08-1.el9"},
    ],
)
def test_a_whole_installation_only_waits_for_its_reboot(installed: dict[str, str]) -> None:
    manager = FakeManager(installed)
    work(manager, mismatch()).plan()
    assert manager.asked == []


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("linux-modules-nvidia-590-server-generic", "6.8.0-101.103", "outside R525 to R580"),
        ("linux-modules-nvidia-580-server-open-generic", "6.8.0-101.103", "open kernel module"),
        ("linux-objects-nvidia-470-server-6.8.0-101-generic", "6.8.0-101.103", "outside R525 to R580"),
        ("libnvidia-ml1", "610.43.02-1", "outside R525 to R580"),
        ("nvidia-kernel-dkms", "3:590.48.01-1", "outside R525 to R580"),
        ("nvidia-utils-580", "580.95.05-0ubuntu0~gpu24.04.1", None),
        ("linux-modules-nvidia-580-server-generic", "6.8.0-101.103", None),
        ("nvidia-prime", "0.8.17.1", None),
        ("nvidia-container-toolkit", "590.1-1", None),
        ("nvidia-firmware-580-580.105.08", "580.105.08-0ubuntu1", None),
    ],
)
def test_what_may_land(name: str, version: str, words: str | None) -> None:
    found = _driver_apt.transaction_problems([Step(name, None, version)], 580, False, True)
    assert (words is None and found == []) or (words is not None and words in found[0])


def test_nothing_but_the_driver_is_removed_for_it() -> None:
    """A transaction may take the open module away, and no program of others."""
    manager = FakeManager(steps=[Step("nvidia-kernel-dkms", None, "580.105.08-1")])
    found = manager.simulate([], "", False)
    found.remove = ["nvidia-kernel-open-dkms"]
    manager.simulate = lambda packages, pins, downgrade: found  # type: ignore[method-assign]
    work(manager, bare()).plan()
    found.remove.append("blender")
    with pytest.raises(Refusal, match="blender would have to be removed"):
        work(manager, bare()).plan()


@pytest.mark.parametrize("held", [[], ["nvidia-kernel-dkms", "libnvidia-ml1"]])
def test_only_what_is_not_held_is_held(held: list[str]) -> None:
    installed = {"nvidia-kernel-dkms": "580.105.08-1", "libnvidia-ml1": "580.105.08-1"}
    ran: list[list[str]] = []

    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        ran.append(list(argv))
        rows = "".join(f"installed {name} {version}\n" for name, version in installed.items())
        return 0, rows if argv[0] == "dpkg-query" else "\n".join(held), ""

    driver = Driver(run, FakeFiles(), _driver_apt.Apt(run), facts(Smi()), Wish(headers=False), lambda path, text: None)
    holds = [change for change in driver.plan() if change.text.startswith("hold")]
    assert len(holds) == (0 if held else 1)
    for change in holds:
        change.apply()
        assert ran[-1] == ["apt-mark", "hold", "libnvidia-ml1", "nvidia-kernel-dkms"]


def test_our_pins_are_read_before_those_of_others() -> None:
    """Of several pins for one version, apt takes the first in the order of the files' names."""
    others = ["nvidia-driver-pinning-580", "nvidia", "99nvidia", "50-cuda", "cuda-repository-pin-600"]
    assert sorted([_driver_apt.PREFERENCES.rpartition("/")[2], *others])[0].startswith("00-tensorless")


@pytest.mark.parametrize(
    ("rc", "err", "words"),
    [
        (
            100,
            "E: dpkg was interrupted, you must manually run 'dpkg --configure -a' to correct the problem.",
            "dpkg --conf",
        ),
        (100, "E: Unable to correct problems, you have held broken packages.", "held broken packages"),
        (100, "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 77 (apt-get)", "process 77"),
        (100, "E: Failed to fetch http://x/y.deb  Temporary failure resolving 'x'", "Temporary failure resolving"),
    ],
)
def test_apt_s_own_words_are_said(rc: int, err: str, words: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(_driver_apt, "PARTS", str(tmp_path))
    apt = _driver_apt.Apt(lambda argv: (rc, "", err))
    for step in (lambda: apt.simulate(["x"], "", False), lambda: apt.install(["x"], False, "")):
        with pytest.raises(Refusal, match=words):
            step()


DNF5 = """Updating and loading repositories:
Repositories loaded.
Package                   Arch   Version              Repository        Size
Installing:
 nvidia-driver-cuda       x86_64 3:580.105.08-1.fc41  cuda-fedora41  1.2 MiB
Downgrading:
 kmod-nvidia-latest-dkms  x86_64 3:580.105.08-1.fc41  cuda-fedora41 40.1 MiB
   replacing kmod-nvidia-latest-dkms x86_64 3:590.48.01-1.fc41 cuda-fedora41 41.0 MiB
Removing:
 nvidia-open              noarch 3:590.48.01-1.fc41   cuda-fedora41  0.0   B

Transaction Summary:
 Installing:         1 package
"""
WRAPPED = """Installing:
 nvidia-driver-cuda
               x86_64   3:580.105.08-1.el9
                                           a-repository-with-a-long-name   1.2 M
"""


def test_other_tables_of_dnf() -> None:
    found = _driver_dnf.parse_transaction(DNF5)
    assert [(step.name, step.new) for step in found.install] == [
        ("nvidia-driver-cuda", "3:580.105.08-1.fc41"),
        ("kmod-nvidia-latest-dkms", "3:580.105.08-1.fc41"),
    ]
    assert found.remove == ["nvidia-open"]
    assert [step.name for step in _driver_dnf.parse_transaction(WRAPPED).install] == ["nvidia-driver-cuda"]


def test_dnf_says_what_a_step_replaces() -> None:
    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        if argv[0] == "rpm" and "--eval" in argv:
            return 0, "-1\n", ""
        return (0, "kmod-nvidia-latest-dkms 3:590.48.01-1.fc41\n", "") if argv[0] == "rpm" else (1, DNF5, "")

    dnf = _driver_dnf.Dnf(run)
    step = next(step for step in dnf.simulate(["x"], "", False).driver if step.name.startswith("kmod"))
    assert step.old == "3:590.48.01-1.fc41"
    assert dnf.is_older(step.new, step.old)


def test_dnf_takes_the_newest_of_a_branch() -> None:
    """By number: dnf lists by letter, in which 580.105 comes before 580.95."""
    names = ("nvidia-driver-cuda", "kmod-nvidia-latest-dkms")
    versions = ("3:570.195.03-1.el9", "3:580.105.08-1.el9", "3:580.95.05-1.el9", "3:590.48.01-1.el9")
    out = "".join(f"{name} {version}\n" for name in names for version in versions)
    chosen = _driver_dnf.Dnf(lambda argv: (0, out, "")).choose(None)
    assert chosen == (580, [f"{name}-3:580.105.08-1.el9" for name in names])


# Sets of packages

UBUNTU = {
    "nvidia-driver-580-server": "580.105.08-0ubuntu0.24.04.1",
    "nvidia-dkms-580-server": "580.105.08-0ubuntu0.24.04.1",
    "libnvidia-compute-580-server": "580.105.08-0ubuntu0.24.04.1",
}
DEBIAN = {"nvidia-kernel-dkms": "550.163.01-2", "libnvidia-ml1": "550.163.01-2", "libcuda1": "550.163.01-2"}
TESLA = {
    "nvidia-tesla-535-driver": "535.261.03-1",
    "nvidia-tesla-535-kernel-dkms": "535.261.03-1",
    "libnvidia-tesla-535-cuda1": "535.261.03-1",
}


@pytest.mark.parametrize(
    ("name", "version", "branch"),
    [
        ("nvidia-settings", "510.47.03-0ubuntu4", 510),  # Ubuntu's own, beside every driver
        ("nvidia-modprobe", "570.133.07-1", 570),  # Debian builds it from its own source
        ("libxnvctrl0", "535.171.04-1~deb12u1", 535),
        ("nvidia-cuda-dev", "12.4.131~12.4.1-2", None),
        ("libnvidia-ml-dev", "12.4.127~12.4.1-2", None),
        ("nvidia-gds-12-8", "12.8.0-1", None),
        ("nvidia-profiler", "11.8.87~11.8.0-5~deb12u1", None),
        ("nvidia-nsight", "2025.3.1-1", None),
        ("nvidia-prime", "0.8.17.2", None),
        ("nvidia-kernel-common", "20220217+3~deb12u1", None),
        ("firmware-nvidia-graphics", "20250410-2", None),
        ("libnvidia-egl-wayland1", "1:1.1.13-1build1", None),
        ("glx-alternative-nvidia", "1.2.2", None),
        ("libegl-nvidia0", "550.163.01-2", 550),
        ("libgl1-nvidia-glvnd-glx", "550.163.01-2", 550),
        ("libcudadebugger1", "580.105.08-1", 580),
        ("libnvsdm-580", "580.105.08-1", 580),
        ("nvidia-open-590", "590.48.01-1ubuntu1", 590),
        ("nvidia-tesla-535-driver", "535.261.03-1", 535),
        ("linux-modules-nvidia-580-server-aws", "6.14.0-1018.18", 580),
        ("linux-signatures-nvidia-6.8.0-90-generic", "6.8.0-90.91+1", None),
    ],
)
def test_whose_version_it_is(name: str, version: str, branch: int | None) -> None:
    assert _driver.package_branch(name, version) == branch


@pytest.mark.parametrize(
    ("installed", "more", "branch"),
    [
        (UBUNTU, {"nvidia-settings": "510.47.03-0ubuntu4", "nvidia-prime": "0.8.17.2"}, 580),
        (DEBIAN, {"nvidia-modprobe": "570.133.07-1", "nvidia-persistenced": "535.171.04-1"}, 550),
        (DEBIAN, {"nvidia-cuda-dev": "12.4.131-2", "libnvidia-ml-dev": "12.4.127-2"}, 550),
        (TESLA, {"nvidia-xconfig": "525.85.05-1"}, 535),
        ({**UBUNTU, "nvidia-headless-565-server": "565.57.01-0ubuntu0.24.04.4"}, {}, 580),  # transitional
    ],
)
def test_what_stands_beside_the_driver_decides_nothing(
    installed: dict[str, str], more: dict[str, str], branch: int
) -> None:
    """A host that waits for its reboot is left alone, and passes the check after a transaction."""
    manager = FakeManager({**installed, **more})
    driver = work(manager, mismatch())
    driver.plan()
    assert (manager.asked, driver.branch) == ([], branch)
    driver.check_installed()


def test_a_tool_of_another_branch_may_land_with_the_driver() -> None:
    """Debian: nvidia-kernel-support wants nvidia-modprobe, which has a source and versions of its own."""
    steps = [Step("nvidia-kernel-dkms", None, "550.163.01-2"), Step("nvidia-modprobe", None, "570.133.07-1")]
    assert _driver_apt.transaction_problems(steps, 550, False, True) == []
    manager = FakeManager(steps=steps, branch=550)
    driver = work(manager, bare())
    assert any("install the driver 550.163.01-2" in change.text for change in driver.plan())


@pytest.mark.parametrize("version", ["590.48.01-1", "610.43.02-1"])
def test_the_ceiling_is_for_tools_as_well(version: str) -> None:
    found = _driver_apt.transaction_problems([Step("nvidia-modprobe", None, version)], 580, True, True)
    assert "outside R525 to R580" in found[0]
    with pytest.raises(Refusal, match=r"above R580.*nvidia_driver_allow_downgrade"):
        work(FakeManager({"nvidia-settings": version}), bare()).plan()


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({"nvidia-open-590": "590.48.01-1ubuntu1"}, "above R580"),
        ({"nvidia-driver": "595.58.03-1ubuntu1", "libnvidia-compute": "595.58.03-1ubuntu1"}, "2 packages"),
        ({"linux-modules-nvidia-590-server-generic": "6.8.0-101.103"}, "above R580"),
        ({"libegl-nvidia0": "590.48.01-1"}, "above R580"),
    ],
)
def test_sets_that_are_refused(installed: dict[str, str], words: str) -> None:
    with pytest.raises(Refusal, match=words):
        work(FakeManager(installed), bare()).plan()


@pytest.mark.parametrize(
    "installed",
    [
        {"nvidia-driver-580-server-open": "580.105.08-0ubuntu0.24.04.1", **UBUNTU},
        {"nvidia-legacy-390xx-driver": "390.157-6~deb12u1"},
        {"nvidia-tesla-470-driver": "470.256.02-2~deb12u1", "nvidia-tesla-470-kernel-dkms": "470.256.02-2~deb12u1"},
        {"nvidia-driver-470": "470.256.02-0ubuntu0.22.04.1"},
        {"nvidia-settings": "510.47.03-0ubuntu4"},  # what is left of a removed driver
    ],
)
def test_sets_that_get_a_driver(installed: dict[str, str]) -> None:
    manager = FakeManager(installed, [Step("nvidia-kernel-dkms", None, "580.105.08-1")])
    assert any("install the driver 580" in change.text for change in work(manager, bare()).plan())


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("nvidia-open-590", True),
        ("nvidia-driver-580-server-open", True),
        ("linux-modules-nvidia-580-server-open-aws-64k", True),
        ("nvidia-legacy-340xx-driver", True),
        ("nvidia-tesla-470-driver", True),
        ("nvidia-340", True),
        ("akmod-nvidia-470xx", True),
        ("kmod-nvidia-open-580.105.08-6.12.0-55", True),
        ("nvidia-driver-595-server", True),
        ("nvidia-driver-580-server", False),
        ("nvidia-headless-no-dkms-535-server", False),
        ("linux-modules-nvidia-580-server-generic-hwe-24.04", False),
        ("nvidia-tesla-535-driver", False),
        ("akmod-nvidia-580xx", False),
        ("nvidia-firmware-580-server-580.105.08", False),
    ],
)
def test_names_that_may_be_asked_for(name: str, refused: bool) -> None:
    assert bool(_driver.name_problem(name)) is refused


@pytest.mark.parametrize(
    ("version", "pinned"),
    [
        ("590.48.01-1", True),
        ("3:581.15-1", True),
        ("610.43.02-1", True),
        ("1002.7-1", True),
        ("580.105.08-1", False),
        ("12.8.0-1", False),
        ("2025.3.1-1", False),
        ("1.18.2-1", False),
    ],
)
def test_versions_that_the_pins_keep_away(version: str, pinned: bool) -> None:
    """By the same measure as the check of the transaction: what has a version of its own stays free."""
    text = _driver_apt.preferences(550, 600, False)
    away = re.search(r"Pin: version /(.*)/\nPin-Priority: -1\n", text)
    assert away
    assert bool(re.search(away.group(1), version)) is pinned
    assert ((_driver.package_branch("nvidia-x", version) or 0) > _driver.NEWEST) is pinned


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        (["nvidia-headless-580-server", "nvidia-utils-580-server", "nvidia-dkms-580-server"], "headless-580-server"),
        (["nvidia-dkms-580", "nvidia-utils-580", "libnvidia-compute-580"], "dkms-580"),
        (
            ["nvidia-dkms-580", "nvidia-utils-580", "nvidia-headless-580-server", "nvidia-utils-580-server"],
            "580-server",
        ),
    ],
)
def test_what_repositories_for_ubuntu_offer(rows: list[str], chosen: str) -> None:
    """The archive has metapackages without a display; a mirror may have only the parts."""
    text = "".join(f"{name} | 580.105.08-0ubuntu1 | http://x noble Packages\n" for name in rows)
    number, names = _driver_apt.Apt(lambda argv: (0, text, "")).choose(None)
    assert number == 580
    assert names[0].endswith(chosen)
    assert set(names) <= set(rows)


def test_nothing_of_a_display_is_a_stranger() -> None:
    """Going from a desktop's driver to another one takes its GL libraries away as well."""
    manager = FakeManager(steps=[Step("nvidia-kernel-dkms", None, "580.105.08-1")])
    found = manager.simulate([], "", False)
    found.remove = ["libgl1-nvidia-glvnd-glx", "libegl-nvidia0", "libgles-nvidia2", "libglx-nvidia0", "libnvoptix1"]
    manager.simulate = lambda packages, pins, downgrade: found  # type: ignore[method-assign]
    work(manager, bare()).plan()
    blacklist = _driver_apt.upgrades_text()
    for name in found.remove:
        assert any(name.startswith(prefix) and f'"{prefix}"' in blacklist for prefix in _driver_apt.BLACKLIST)


@pytest.mark.parametrize(
    ("name", "follows"),
    [
        ("linux-modules-nvidia-580-server-generic", True),
        ("linux-modules-nvidia-580-generic-hwe-24.04", True),
        ("linux-modules-nvidia-580-server-6.8.0-90-generic", False),
        ("linux-modules-nvidia-580-6.8.0-90-generic", False),
        ("nvidia-dkms-580-server", False),
    ],
)
def test_what_brings_the_module_for_the_next_kernel_is_not_held(name: str, follows: bool) -> None:
    """A new kernel comes all the same, and would boot without a card."""
    held: list[list[str]] = []

    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        if argv[0] == "apt-mark" and argv[1] == "hold":
            held.append(list(argv[2:]))
        return 0, f"installed {name} 580.1-1\ninstalled libcuda1 580.1-1\n" if argv[0] == "dpkg-query" else "", ""

    driver = Driver(run, FakeFiles(), _driver_apt.Apt(run), facts(Smi()), Wish(headers=False), lambda path, text: None)
    for change in driver.plan():
        if change.text.startswith("hold"):
            change.apply()
    assert held == [sorted({"libcuda1"} | (set() if follows else {name}))]


@pytest.mark.parametrize(
    ("running", "newest", "words"),
    [
        (
            "kernel/nvidia-580-server/nvidia.ko.zst:",
            "",
            ["there is no module of the driver for kernel 6.8.0-101-generic"],
        ),
        ("kernel/drivers/video/nvidia.ko:", "kernel/drivers/video/nvidia.ko:", []),
        ("updates/dkms/nvidia-current.ko.xz:", "kernel/drivers/net/nvidia-net.ko:", ["kernel 6.8.0-101-generic"]),
        ("", "", []),  # nothing is known of the running kernel's
    ],
)
def test_a_kernel_without_a_prebuilt_module(running: str, newest: str, words: list[str]) -> None:
    files = FakeFiles()
    for kernel, text in ((RUNNING, running), (NEWEST, newest)):
        files.content[f"/lib/modules/{kernel}/kernel/x.ko"] = ""
        files.content[f"/lib/modules/{kernel}/modules.dep"] = f"kernel/fs/fat.ko:\n{text}\n"
    found = _driver.unbuilt(lambda argv: (127, "", ""), files, RUNNING, "580.95.05")
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found))
