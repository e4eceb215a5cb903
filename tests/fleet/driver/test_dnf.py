# SPDX-License-Identifier: Apache-2.0
"""Real dnf and rpm, as far as Debian's own can serve: signed packages with NVIDIA's names for EL 9.

The host is told that it is of the RHEL family, and apt is out of its way. Module streams need a real one.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet.driver.conftest import Rig, start
from tests.fleet.hosts import Host

pytestmark = [pytest.mark.fleet, pytest.mark.soak]
RELEASES = ("570.195.03", "580.95.05", "580.105.08", "590.48.01")
REPOSITORY = "/srv/rpms"
SPEC = """
%define _build_id_links none
AutoReqProv: no
Name: nvidia-driver
Epoch: 3
Version: @RELEASE@
Release: 1.el9
Summary: stand-in
License: none
%description
stand-in
%package cuda-libs
AutoReqProv: no
Summary: stand-in
%description cuda-libs
stand-in
%package cuda
AutoReqProv: no
Summary: stand-in
Requires: nvidia-driver-cuda-libs = 3:@RELEASE@
Requires: nvidia-kmod = 3:@RELEASE@
%description cuda
stand-in
%package -n kmod-nvidia-latest-dkms
AutoReqProv: no
Summary: stand-in
Provides: nvidia-kmod = 3:@RELEASE@
Conflicts: kmod-nvidia-open-dkms
%description -n kmod-nvidia-latest-dkms
stand-in
%package -n kmod-nvidia-open-dkms
AutoReqProv: no
Summary: stand-in
Provides: nvidia-kmod = 3:@RELEASE@
Conflicts: kmod-nvidia-latest-dkms
%description -n kmod-nvidia-open-dkms
stand-in
%package -n nvidia-open
AutoReqProv: no
Summary: stand-in
Requires: nvidia-driver-cuda = 3:@RELEASE@
Requires: kmod-nvidia-open-dkms = 3:@RELEASE@
%description -n nvidia-open
stand-in
%install
for name in nvidia-driver-cuda libnvidia-ml1 libcuda1 nvidia-kernel-dkms; do
    dpkg-deb -x /opt/sim/cuda/${name}_@RELEASE@-1_amd64.deb %{buildroot}
done
%files cuda
/usr/bin/nvidia-smi
%files cuda-libs
/usr/lib/x86_64-linux-gnu/*
%files -n kmod-nvidia-latest-dkms
/usr/lib/nvidia-sim/module.json
%files -n kmod-nvidia-open-dkms
%files -n nvidia-open
"""
ROLES = ["preflight", "nvidia_driver"]


@pytest.fixture(scope="module")
def dnf_host(repository: None) -> Iterator[Host]:
    host = start("drv-r", "10.213.25.15")
    host.sh(
        "apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "
        "dnf createrepo-c rpm gnupg gpg-agent >/dev/null"
    )
    for release in RELEASES:
        host.write(f"/root/{release}.spec", SPEC.replace("@RELEASE@", release))
        host.sh(f"rpmbuild -bb --quiet --define '_rpmdir {REPOSITORY}' --target x86_64 /root/{release}.spec 2>&1")
    host.sh(
        "gpg --batch --passphrase '' --quick-generate-key 'Tests <tests@example.invalid>' rsa3072 sign never && "
        f"gpg --armor --export >{REPOSITORY}/key.asc && "
        "rpmsign --define '__gpg /usr/bin/gpg' --define '_gpg_name tests@example.invalid' "
        f"--addsign {REPOSITORY}/x86_64/*.rpm >/dev/null 2>&1 && "
        f"createrepo_c -q {REPOSITORY} && mv /usr/bin/apt-get /usr/bin/apt-get.away"
    )
    yield host
    if not os.environ.get("TENSORLESS_TEST_KEEP"):
        host.remove()


@pytest.fixture
def rig(dnf_host: Host, tmp_path: pathlib.Path) -> Rig:
    found = Rig(dnf_host, tmp_path)
    found.sh(
        "mkdir -p /etc/yum.repos.d; rm -f /etc/yum.repos.d/*; rpm -qa '*nvidia*' | xargs -r rpm -e --nodeps; "
        "dnf -q clean all; rm -f /etc/modprobe.d/tensorless*; /usr/lib/nvidia-sim/nvidia-sim unload",
        check=False,
    )
    found.state()
    return found


def play(rig: Rig, *argv: str, check: bool = True, **variables: Any) -> tuple[int, str, dict[str, int]]:
    family = {"ansible.builtin.set_fact": {"ansible_os_family": "RedHat", "cacheable": True}}
    roles = [f"tensorless.fleet.{name}" for name in ROLES]
    variables = {
        "nvidia_driver_manage": True,
        "nvidia_driver_repository_url": f"file://{REPOSITORY}",
        "nvidia_driver_repository_key": f"file://{REPOSITORY}/key.asc",
        **variables,
    }
    whole = {"hosts": "gpu", "become": True, "gather_facts": True, "pre_tasks": [family], "roles": roles}
    return rig.run(whole, *argv, check=check, **variables)


def install(rig: Rig, release: str) -> None:
    """As an owner did it before Ansible came."""
    names = ("nvidia-driver-cuda", "nvidia-driver-cuda-libs", "kmod-nvidia-latest-dkms")
    files = " ".join(f"{REPOSITORY}/x86_64/{name}-{release}-1.el9.x86_64.rpm" for name in names)
    rig.sh(f"rpm -i --force-debian --nodeps {files}")


def installed(rig: Rig) -> dict[str, str]:
    out = rig.sh("rpm -qa --qf '%{NAME} %{VERSION}\\n' '*nvidia*'")
    return dict(line.split() for line in out.splitlines())


def test_fresh_host_ends_on_580(rig: Rig) -> None:
    _rc, output, _recap = play(rig, "--check", "--diff")
    assert installed(rig) == {}, "check mode installs nothing"
    _rc, output, recap = play(rig)
    assert recap["changed"] > 0
    assert installed(rig) == dict.fromkeys(
        ("nvidia-driver-cuda", "nvidia-driver-cuda-libs", "kmod-nvidia-latest-dkms"), "580.105.08"
    )
    assert "GPU 0: Tesla P100" in rig.sh("nvidia-smi -L")
    _rc, output, recap = play(rig)
    assert recap["changed"] == 0, output[-3000:]


def test_upgrade_and_refusals(rig: Rig) -> None:
    """Inside the range it goes up; a driver above it is refused, and so are the open flavour and another branch."""
    play(rig, "--check")
    install(rig, "580.95.05")
    assert set(installed(rig).values()) == {"580.95.05"}
    rig.sh("nvidia-smi -L")
    play(rig)
    assert set(installed(rig).values()) == {"580.95.05"}, "a driver that serves is left alone"
    rc, output, _recap = play(rig, check=False, nvidia_driver_upgrade=True)
    assert rc != 0
    assert "is not the loaded one (580.95.05): reboot" in " ".join(output.split())
    assert set(installed(rig).values()) == {"580.105.08"}

    rc, output, _recap = play(rig, check=False, nvidia_driver_upgrade=True, nvidia_driver_packages=["nvidia-open"])
    assert rc != 0
    assert "nvidia-open is refused" in " ".join(output.split())
    wish = {"nvidia_driver_upgrade": True, "nvidia_driver_branch": "570"}
    rc, output, _recap = play(rig, check=False, **wish)
    assert rc != 0
    assert "would go back from" in " ".join(output.split())
    assert set(installed(rig).values()) == {"580.105.08"}


def test_a_driver_above_the_range(rig: Rig) -> None:
    install(rig, "590.48.01")
    rig.rc("nvidia-smi")
    rc, output, _recap = play(rig, check=False)
    assert rc != 0
    assert "nvidia_driver_allow_downgrade" in output
    assert set(installed(rig).values()) == {"590.48.01"}
    play(rig, check=False, nvidia_driver_allow_downgrade=True)
    assert set(installed(rig).values()) == {"580.105.08"}
    rig.host.reboot()
    rig.sh("nvidia-smi -L")
    _rc, output, recap = play(rig)
    assert recap["changed"] == 0, output[-3000:]
