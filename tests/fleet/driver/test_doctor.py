# SPDX-License-Identifier: Apache-2.0
"""A host per failing check: it shows exactly that FAIL, and its fix_command, where it has one, turns it to PASS."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils._doctor_host import NO_COMMAND

from tests.fleet.driver.conftest import CARD, Rig

pytestmark = [pytest.mark.fleet, pytest.mark.soak]
ROLES = ["preflight", "nvidia_driver", "container_runtime", "nvidia_cdi"]


def doctor(rig: Rig, playbook: bool = False) -> list[dict[str, Any]]:
    """The checks of the report for programs."""
    (rig.tmp / f"{rig.host.name}.json").unlink(missing_ok=True)
    if playbook:
        rig.play(["doctor"], "-e", f"doctor_json_dir={rig.tmp}", check=False, tensorless_hf_hub_cache="/var/lib/hub")
    else:
        rig.play(["doctor module"])
    report = json.loads((rig.tmp / f"{rig.host.name}.json").read_text())
    assert report["schema"] == 1
    return list(report["checks"])


def failed(checks: list[dict[str, Any]]) -> set[str]:
    # The disk of a test machine may be too small for a model of 13 GB.
    return {check["id"] for check in checks if check["level"] == "FAIL"} - {"disk_space", "image_disk"}


@pytest.fixture
def ready(rig: Rig) -> Rig:
    rig.install("580.105.08")
    rig.sh("nvidia-smi -L")
    rig.play(ROLES)
    return rig


def test_each_check(ready: Rig) -> None:
    rig = ready
    assert failed(doctor(rig, playbook=True)) == set(), "a ready host"

    cases: dict[str, dict[str, Any]] = {
        "persistence": {"cards": [{**CARD, "persistence": False}]},
        "throttle": {"cards": [{**CARD, "throttle_mask": 0x48}]},
        "memory_errors": {"cards": [{**CARD, "ecc_uncorrected": 3}]},
        "card_processes": {
            "processes": [{"pid": 4242, "uuid": CARD["uuid"], "name": "/usr/bin/miner", "memory_mib": 900}]
        },
    }
    for name, change in cases.items():
        rig.state(**change)
        checks = doctor(rig)
        assert failed(checks) == {name}
        check = next(item for item in checks if item["id"] == name)
        assert check["fix"]
        if check["fix_command"]:
            rig.sh(check["fix_command"])
            assert failed(doctor(rig)) == set(), name
        else:
            assert NO_COMMAND[name]
    rig.state()

    rig.sh("sed -i 's/580.105.08/535.1.2/' /run/cdi/nvidia.yaml")
    checks = doctor(rig)
    assert failed(checks) == {"cdi_spec"}
    rig.sh(next(item["fix_command"] for item in checks if item["id"] == "cdi_spec"))
    assert failed(doctor(rig)) == set()

    rig.sh("rm -f /etc/cdi/nvidia.yaml /run/cdi/nvidia.yaml")
    checks = doctor(rig)
    assert failed(checks) == {"nvidia_container_support"}
    rig.sh(next(item["fix_command"] for item in checks if item["id"] == "nvidia_container_support"))
    assert failed(doctor(rig)) == set()

    rig.sh(
        "DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends unattended-upgrades >/dev/null"
    )
    rig.sh("echo 'APT::Periodic::Unattended-Upgrade \"1\";' >/etc/apt/apt.conf.d/20auto-upgrades")
    checks = doctor(rig)
    assert failed(checks) == {"unattended_upgrades"}
    rig.sh(next(item["fix_command"] for item in checks if item["id"] == "unattended_upgrades"))
    assert failed(doctor(rig)) == set()
    rig.sh("apt-get purge -y -q unattended-upgrades >/dev/null")

    rig.sh("systemd-run -q --unit=taken python3 -m http.server --bind 127.0.0.1 8080; sleep 1")
    assert failed(doctor(rig)) == {"port"}
    rig.sh("systemctl stop taken")

    rig.sh("/usr/lib/nvidia-sim/nvidia-sim log 'NVRM: Xid (PCI:0000:3b:00): 48, pid=1, double bit ECC'; sleep 0.5")
    assert failed(doctor(rig)) == {"kernel_log"}


def test_lost_card_and_driver_troubles(ready: Rig) -> None:
    rig = ready
    second = {**CARD, "uuid": CARD["uuid"][:-1] + "2", "pci_bus_id": "00000000:5E:00.0", "fault": "lost"}
    rig.state(cards=[dict(CARD), second])
    assert "cards_reachable" in failed(doctor(rig))
    rig.state()

    rig.install("590.48.01")
    assert {"nvidia_driver", "driver_loaded"} <= failed(doctor(rig))
    rig.host.reboot()
    found = failed(doctor(rig))
    assert {"nvidia_driver", "driver_branch"} <= found

    rig.purge()
    rig.state(nouveau=True)
    assert {"nvidia_driver", "nouveau"} <= failed(doctor(rig))
    rig.host.sh("rm -rf /sys/module/nouveau")
    rig.state(secure_boot=True)
    assert {"nvidia_driver", "secure_boot"} <= failed(doctor(rig))


def test_it_changes_nothing(ready: Rig) -> None:
    rig = ready
    rig.sh("touch /root/mark; sleep 1")
    doctor(rig)
    written = rig.sh(
        "find / -xdev -newer /root/mark -type f | grep -v -e '^/proc' -e '^/sys' -e '/log/' -e '/home/ops/'"
    )
    assert written.strip() == ""
