# SPDX-License-Identifier: Apache-2.0
"""Real apt, real dpkg, packages named and depending like the real ones: what lands is what counts."""

from __future__ import annotations

import pytest

from tests.fleet.driver.conftest import Rig

pytestmark = pytest.mark.fleet
ROLES = ["preflight", "nvidia_driver"]


def branches(rig: Rig) -> set[str]:
    return {version.split(".")[0] for version in rig.versions().values()}


def test_the_trap_the_refusal_and_the_way_back(rig: Rig) -> None:
    rig.repositories("cuda")
    rig.sh("apt-get install -y -q --no-install-recommends cuda-drivers-580")
    landed = rig.versions()
    assert landed["cuda-drivers-580"].startswith("580.")
    assert landed["nvidia-kernel-dkms"].startswith("590."), "a plain installation of cuda-drivers-580 pulls 590 in"
    assert "No devices were found" in rig.rc("nvidia-smi")[1]

    rc, output, _recap = rig.play(ROLES, check=False)
    assert rc != 0
    assert "590.48.01 is newer than the last branch that supports Pascal" in " ".join(output.split())
    rc, output, _recap = rig.play(ROLES, check=False, nvidia_driver_manage=True)
    assert rc != 0
    assert "nvidia_driver_allow_downgrade" in output
    assert rig.versions() == landed, "a refusal changes nothing"

    rc, output, _recap = rig.play(ROLES, check=False, nvidia_driver_manage=True, nvidia_driver_allow_downgrade=True)
    assert "the installed driver 580.105.08 is not the loaded one (590.48.01): reboot" in " ".join(output.split())
    assert branches(rig) == {"580"}
    rig.host.reboot()
    rig.play(ROLES, nvidia_driver_manage=True)
    _rc, _out, recap = rig.play(ROLES, nvidia_driver_manage=True)
    assert recap["changed"] == 0
    assert "x86_64 Kernel Module  580.105.08" in rig.sh("cat /proc/driver/nvidia/version")
    assert "GPU 0: Tesla P100" in rig.sh("nvidia-smi -L")


def test_fresh_host_ends_on_580_and_stays_there(rig: Rig) -> None:
    rig.repositories("cuda")
    _rc, output, _recap = rig.play(ROLES, "--check", "--diff", nvidia_driver_manage=True)
    assert "+install the driver 580.105.08-1" in output
    assert rig.versions() == {}, "check mode installs nothing"
    _rc, _out, recap = rig.play(ROLES, nvidia_driver_manage=True)
    assert recap["changed"] > 0
    before = rig.versions()
    assert branches(rig) == {"580"}
    assert "nvidia-kernel-dkms" in before
    assert not any("open" in name for name in before)
    assert "GPU 0: Tesla P100" in rig.sh("nvidia-smi -L")

    rig.sh("DEBIAN_FRONTEND=noninteractive apt-get dist-upgrade -y -q")
    assert rig.versions() == before
    rig.sh("DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends unattended-upgrades")
    origins = 'Unattended-Upgrade::Origins-Pattern { "origin=tests"; };'
    rig.sh(f"echo '{origins}' >/etc/apt/apt.conf.d/52tests")
    rig.sh("unattended-upgrade -v")
    assert rig.versions() == before
    rig.sh("apt-mark unhold $(apt-mark showhold) >/dev/null")
    rig.sh("unattended-upgrade -v; DEBIAN_FRONTEND=noninteractive apt-get dist-upgrade -y -q")
    assert rig.versions() == before, "pins and blacklist keep it without the hold as well"
    rig.sh("apt-get purge -y -q unattended-upgrades >/dev/null; rm -f /etc/apt/apt.conf.d/52tests")
    _rc, _out, recap = rig.play(ROLES, nvidia_driver_manage=True)
    assert recap["changed"] == 1, "the hold comes back"
    _rc, _out, recap = rig.play(ROLES, nvidia_driver_manage=True)
    assert recap["changed"] == 0


@pytest.mark.soak
def test_upgrade_inside_the_range(rig: Rig) -> None:
    rig.repositories("cuda")
    rig.install("580.95.05")
    rig.sh("nvidia-smi -L")
    _rc, _out, recap = rig.play(ROLES, nvidia_driver_manage=True)
    assert rig.versions()["nvidia-kernel-dkms"] == "580.95.05-1", "a driver that serves is left alone"
    rc, output, _recap = rig.play(ROLES, check=False, nvidia_driver_manage=True, nvidia_driver_upgrade=True)
    assert rc != 0
    assert "is not the loaded one (580.95.05): reboot" in " ".join(output.split())
    assert rig.versions()["nvidia-kernel-dkms"] == "580.105.08-1"
    rig.host.reboot()
    _rc, _out, recap = rig.play(ROLES, nvidia_driver_manage=True, nvidia_driver_upgrade=True)
    assert recap["changed"] == 0


@pytest.mark.soak
def test_open_module_is_replaced(rig: Rig) -> None:
    rig.repositories("cuda")
    rig.sh("apt-get install -y -q --no-install-recommends nvidia-driver-pinning-580 >/dev/null")
    rig.sh("apt-get install -y -q --no-install-recommends nvidia-kernel-open-dkms nvidia-driver-cuda >/dev/null")
    assert "No devices were found" in rig.rc("nvidia-smi")[1]
    rc, output, _recap = rig.play(ROLES, check=False)
    assert rc != 0
    assert "open kernel module, which does not drive Pascal" in " ".join(output.split())
    rig.play(ROLES, check=False, nvidia_driver_manage=True)
    rig.host.reboot()
    rig.play(ROLES, nvidia_driver_manage=True)
    assert "nvidia-kernel-open-dkms" not in rig.versions()
    assert "x86_64 Kernel Module  580.105.08" in rig.sh("cat /proc/driver/nvidia/version")


@pytest.mark.soak
def test_transitional_packages(rig: Rig) -> None:
    """A name of one branch that delivers another: judged by what would land."""
    rig.repositories("ubuntu")
    base = {
        "nvidia_driver_manage": True,
        "nvidia_driver_packages": ["nvidia-headless-565-server"],
        "nvidia_driver_branch": "565",
    }
    rc, output, _recap = rig.play(ROLES, "--check", check=False, **base)
    assert rc != 0
    assert "which is not of branch 565" in " ".join(output.split())
    rig.play(ROLES, "--check", **base, nvidia_driver_allow_branch_drift=True)
    base["nvidia_driver_packages"] = ["nvidia-driver-575-server"]
    rc, output, _recap = rig.play(ROLES, "--check", check=False, **base, nvidia_driver_allow_branch_drift=True)
    assert rc != 0, "drift never goes above the ceiling"
    _rc, output, _recap = rig.play(ROLES, "--check", "--diff", nvidia_driver_manage=True)
    assert "nvidia-dkms-580-server 580.105.08" in output
    assert "-open " not in output.partition("+install the driver")[2].splitlines()[0]


@pytest.mark.soak
def test_debian_archive_has_no_580(rig: Rig) -> None:
    rig.repositories("debian")
    _rc, output, _recap = rig.play(ROLES, "--check", "--diff", nvidia_driver_manage=True)
    assert "R550 is the newest allowed one" in " ".join(output.split())
    assert "+install the driver 550.163.01-2" in output
    # A tool and a part of CUDA that have versions of their own are no reason to refuse, and none to start over.
    rig.sh("apt-get install -y -q --no-install-recommends nvidia-cuda-dev")
    rig.play(ROLES, nvidia_driver_manage=True)
    landed = rig.versions()
    assert landed["nvidia-kernel-dkms"] == "550.163.01-2"
    assert landed["nvidia-modprobe"].startswith("570.")
    assert "^([0-9]+:)?550" in rig.sh("cat /etc/apt/preferences.d/00-tensorless-nvidia")
    _rc, _out, recap = rig.play(ROLES, nvidia_driver_manage=True)
    assert recap["changed"] == 0


@pytest.mark.soak
def test_only_newer_branches_in_the_repositories(rig: Rig) -> None:
    rig.sh("rm -f /etc/apt/sources.list.d/tests.list; apt-get update -q")
    rc, output, _recap = rig.play(ROLES, "--check", check=False, nvidia_driver_manage=True)
    assert rc != 0
    assert "have no driver of R525 to R580" in " ".join(output.split())


@pytest.mark.soak
def test_repository_is_one_variable(rig: Rig) -> None:
    """Air-gapped: the address of a mirror, and nothing else."""
    rig.sh("rm -f /etc/apt/sources.list.d/tests.list; apt-get update -q")
    mirror = {
        "nvidia_driver_repository_url": f"{rig.url}/cuda",
        "nvidia_driver_repository_key": f"{rig.url}/key.asc",
    }
    rig.play(ROLES, nvidia_driver_manage=True, **mirror)
    assert rig.versions()["nvidia-kernel-dkms"] == "580.105.08-1"
    _rc, _out, recap = rig.play(ROLES, nvidia_driver_manage=True, **mirror)
    assert recap["changed"] == 0


@pytest.mark.soak
def test_nouveau_and_secure_boot(rig: Rig) -> None:
    rig.repositories("cuda")
    rig.state(secure_boot=True)
    rc, output, _recap = rig.play(ROLES, check=False, nvidia_driver_manage=True)
    assert rc != 0
    assert "Secure Boot is on" in output
    assert rig.versions() == {}
    rig.state(nouveau=True)
    rc, output, _recap = rig.play(ROLES, check=False, nvidia_driver_manage=True)
    assert rc != 0, "nouveau goes with the reboot"
    assert "blacklist nouveau" in rig.sh("cat /etc/modprobe.d/tensorless-nouveau.conf")
    rig.host.reboot()
    rig.play(ROLES, nvidia_driver_manage=True)
    assert "GPU 0: Tesla P100" in rig.sh("nvidia-smi -L")
