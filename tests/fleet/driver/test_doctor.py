# SPDX-License-Identifier: Apache-2.0
"""Each check of the doctor fails on a real host, alone, and its fix_command, where it has one, turns it to PASS."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils._doctor_host import NO_COMMAND

from tests.fleet.driver.conftest import CARD, UUID, Rig
from tests.fleet.driver.test_cdi import IMAGE
from tests.fleet.hosts import Host

pytestmark = [pytest.mark.fleet, pytest.mark.soak]
ROLES = ["preflight", "nvidia_driver", "container_runtime", "nvidia_cdi"]
HUB = "/var/lib/hub"
READY = "/run/doctor-ready"
SECOND = {**CARD, "uuid": UUID[:-1] + "2", "pci_bus_id": "00000000:5E:00.0"}
# Enough room on paper, whatever the disk of the test machine has: nothing is written there.
ROOM = f"mkdir -p {HUB}; umount {HUB} 2>/dev/null; mount -t tmpfs -o size=40g hub {HUB}"
APT = "DEBIAN_FRONTEND=noninteractive apt-get"


@dataclasses.dataclass
class Case:
    """One trouble: how it comes about, which checks fail from it, and how it goes away without the fix."""

    fails: set[str]
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    make: str = "true"
    mend: str = "true"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def journal(line: str) -> str:
    return f"/usr/lib/nvidia-sim/nvidia-sim log '{line}'; sleep 0.3; journalctl --sync"


FORGET = "journalctl --sync; journalctl --rotate -q; sleep 1.1; journalctl --vacuum-time=1s -q 2>/dev/null; true"
REFUSING = "import http.server as h; H = h.BaseHTTPRequestHandler; "
REFUSING += "H.do_GET = lambda s: (s.send_response(401), s.end_headers()); "
REFUSING += "h.HTTPServer(('127.0.0.1', 8097), H).serve_forever()"
CASES: dict[str, Case] = {
    "gpu": Case(
        {"gpu"}, {"cards": [{**CARD, "name": "Tesla P40", "compute_cap": "6.1", "pci_device_id": "0x1B3810DE"}]}
    ),
    "driver_version": Case(
        {"driver_version"},
        {"loaded": {"version": "470.256.02", "flavour": "proprietary"}, "library_version": "470.256.02"},
    ),
    "container_runtime": Case(
        {"container_runtime"},
        make=f"{APT} remove -y -q podman >/dev/null",
        mend=f"{APT} install -y -q podman >/dev/null",
    ),
    "nvidia_container_support": Case(
        {"nvidia_container_support"}, make="rm -f /etc/cdi/nvidia.yaml /run/cdi/nvidia.yaml"
    ),
    "disk_space": Case({"disk_space"}, make=f"umount {HUB}; mount -t tmpfs -o size=1m hub {HUB}", mend=ROOM),
    "cpu_flags": Case(
        {"cpu_flags"},
        make="sed 's/ avx2//' /proc/cpuinfo >/run/cpuinfo; mount --bind /run/cpuinfo /proc/cpuinfo",
        mend="umount /proc/cpuinfo",
    ),
    "unattended_upgrades": Case(
        {"unattended_upgrades"},
        make="rm -f /etc/apt/apt.conf.d/51tensorless-nvidia; apt-mark unhold $(apt-mark showhold) >/dev/null; "
        f"{APT} install -y -q --no-install-recommends unattended-upgrades >/dev/null; "
        "echo 'APT::Periodic::Unattended-Upgrade \"1\";' >/etc/apt/apt.conf.d/20auto-upgrades",
        mend=f"{APT} purge -y -q unattended-upgrades >/dev/null",
    ),
    "cdi_spec": Case(
        {"cdi_spec"}, make="sed -i 's/580.105.08/535.1.2/' $(ls /run/cdi/nvidia.yaml /etc/cdi/nvidia.yaml)"
    ),
    "cards_reachable": Case({"cards_reachable"}, {"cards": [dict(CARD), {**SECOND, "fault": "lost"}]}),
    "persistence": Case(
        {"persistence"}, {"cards": [{**CARD, "persistence": False}]}, make="rm -f /run/nvidia-sim/settings.json"
    ),
    "throttle": Case({"throttle"}, {"cards": [{**CARD, "throttle_mask": 0x48}]}),
    "memory_errors": Case({"memory_errors"}, {"cards": [{**CARD, "ecc_uncorrected": 3}]}),
    "card_processes": Case(
        {"card_processes"}, {"processes": [{"pid": 4242, "uuid": UUID, "name": "/usr/bin/miner", "memory_mib": 900}]}
    ),
    "port": Case(
        {"port"},
        make="systemd-run -q --unit=taken python3 -m http.server --bind ::1 8090; sleep 1.5",
        mend="systemctl stop taken",
        options={"servers": [{"model": "x", "host": "::1", "port": 8090}], "ports": []},
    ),
    "image_disk": Case(
        {"image_disk"},
        make="mount -t tmpfs -o size=1m store /var/lib/containers",
        mend="umount -l /var/lib/containers",
    ),
    "hf_token": Case(
        {"hf_token"},
        make=f'systemd-run -q --unit=refusing python3 -c "{REFUSING}"; sleep 1.5',
        mend="systemctl stop refusing",
        options={"endpoint": "http://127.0.0.1:8097", "token": "hf_refused"},
    ),
    "kernel_log": Case(
        {"kernel_log"}, make=journal("NVRM: Xid (PCI:0000:3b:00): 48, pid=1, double bit ECC"), mend=FORGET
    ),
    "driver_loaded": Case(
        {"driver_loaded", "nvidia_driver"},
        {"loaded": {"version": "580.95.05", "flavour": "proprietary"}},
        make="printf 'NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  x\\n' >/proc/driver/nvidia/version",
        mend="printf 'NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.105.08  x\\n' >/proc/driver/nvidia/version",
    ),
}


class Doctor:
    """Runs the doctor on one host."""

    def __init__(self, rig: Rig, **options: Any) -> None:
        self.rig, self.options = rig, {"cache": HUB, **options}

    def report(self, environ: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
        target = self.rig.tmp / "report.json"
        target.unlink(missing_ok=True)
        copy = {"content": "{{ report | to_json }}", "dest": str(target), "mode": "0644"}
        tasks = [
            {"tensorless.fleet.tensorless_doctor": {**self.options, **options}, "register": "report"},
            {"ansible.builtin.copy": copy, "delegate_to": "localhost", "become": False},
        ]
        self.rig.run({"hosts": "gpu", "become": True, "gather_facts": False, "tasks": tasks}, environ=environ)
        found: dict[str, Any] = json.loads(target.read_text())
        assert found["schema"] == 1
        assert not found["changed"]
        return found

    def failed(self, **options: Any) -> dict[str, dict[str, Any]]:
        checks = self.report(**options)["checks"]
        return {check["id"]: check for check in checks if check["level"] == "FAIL"}


@pytest.fixture
def ready(podman_host: Host, tmp_path: pathlib.Path) -> Rig:
    """A host that passes everything. A test that spoils it says so, and the next one makes it anew."""
    rig = Rig(podman_host, tmp_path)
    if podman_host.exec("test", "-e", READY, check=False).returncode != 0:
        rig.purge()
        rig.state()
        rig.install("580.105.08")
        rig.sh("nvidia-smi -L")
        rig.sh(FORGET)
        rig.play(ROLES)
        rig.sh(f"{ROOM}; touch {READY}")
    return rig


def spoil(rig: Rig) -> None:
    rig.sh(f"rm -f {READY}")


def check_case(doctor: Doctor, name: str, case: Case) -> None:
    rig = doctor.rig
    if case.state:
        rig.state(**case.state)
    rig.sh(case.make)
    found = doctor.failed(**case.options)
    assert set(found) == case.fails, (name, found)
    check = found[name]
    assert check["fix"]
    if check["fix_command"]:
        rig.sh(check["fix_command"])
        assert set(doctor.failed(**case.options)) == set(), f"{name}: {check['fix_command']}"
    else:
        assert NO_COMMAND[name]
    rig.sh(case.mend)
    if case.state:
        rig.state()


def test_a_ready_host(ready: Rig) -> None:
    assert Doctor(ready).failed() == {}


@pytest.mark.parametrize("name", CASES)
def test_each_check(ready: Rig, name: str) -> None:
    spoil(ready)  # unless it goes well
    check_case(Doctor(ready), name, CASES[name])
    ready.sh(f"touch {READY}")


def test_the_clock(ready: Rig, tmp_path: Any) -> None:
    """The controller's clock is set back: hosts here share the machine's, and cannot have another."""
    (tmp_path / "sitecustomize.py").write_text("import time\n_t = time.time\ntime.time = lambda: _t() - 90000\n")
    found = Doctor(ready).report(environ={"PYTHONPATH": str(tmp_path)})
    failed = [check for check in found["checks"] if check["level"] == "FAIL"]
    assert [check["id"] for check in failed] == ["clock"]
    assert NO_COMMAND["clock"]


def test_the_playbook(ready: Rig) -> None:
    """The report for people, the one for programs, the table, and the end."""
    play = {"import_playbook": "tensorless.fleet.doctor"}
    rc, output, _recap = ready.run(play, "-e", "doctor_json_dir=./reports", tensorless_hf_hub_cache=HUB)
    assert rc == 0
    assert "all checks passed." in output
    assert json.loads((ready.tmp / "reports" / f"{ready.host.name}.json").read_text())["exit_code"] == 0
    ready.state(cards=[{**CARD, "ecc_uncorrected": 3}])
    servers = [{"model": "pn3", "host": "::1", "port": 8080, "gpu": "each"}]
    rc, output, _recap = ready.run(play, check=False, tensorless_hf_hub_cache=HUB, tensorless_servers=servers)
    assert rc == 2
    assert "PASS  [::1]:8080 is free" in output
    assert "0 documented and 1 further checks failed" in " ".join(output.split())
    ready.state()


def test_it_changes_nothing(ready: Rig) -> None:
    doctor = Doctor(ready)
    doctor.report()  # what ssh and sudo write on the first visit
    ready.sh("touch /root/mark; sleep 1.1")
    doctor.report()
    written = ready.sh(
        "find / -xdev -newer /root/mark -type f "
        "| grep -v -e '^/proc/' -e '^/sys/' -e '/log/' -e '^/home/ops/' -e '^/run/' -e '/tmp/' || true"
    )
    assert written.strip() == ""


EXAMPLE = r"""FAIL  nvidia-smi not found: no NVIDIA driver is installed
      fix: install the NVIDIA driver, 525\.60\.13 or newer, and reboot
PASS  container runtime: podman \(/usr/bin/podman\)
FAIL  no NVIDIA CDI spec for podman in /etc/cdi/nvidia\.yaml or /var/run/cdi/nvidia\.yaml
      fix: install nvidia-container-toolkit, then: sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia\.yaml
PASS  model cache /home/you/\.cache/huggingface/hub: [\d.]+ GB free, the model needs 12\.95 GB

2 checks failed\.
"""


def test_the_documentation_s_example_host(ready: Rig) -> None:
    """podman, and neither driver nor toolkit: the report of the documentation, line for line."""
    spoil(ready)
    ready.purge()
    cache = "/home/you/.cache/huggingface/hub"
    ready.sh("mkdir -p /home/you; umount /home/you 2>/dev/null; mount -t tmpfs -o size=40g you /home/you")
    report = Doctor(ready, cache=cache).report()
    assert re.match(EXAMPLE, report["text"]), report["text"]
    assert (report["failed_checks"], report["summary"], report["exit_code"]) == (2, "2 checks failed.", 1)


SUPPORT = "nvidia_container_support"  # without a driver that answers there is no CDI spec either


def test_a_driver_above_the_range(ready: Rig) -> None:
    rig, doctor = ready, Doctor(ready)
    spoil(rig)
    rig.sh("rm -f /etc/cdi/*")  # what the fix of an earlier case wrote would outlive the reboot
    rig.install("590.48.01")
    rig.host.reboot()
    rig.sh(ROOM)
    found = doctor.failed()
    # What the module says may be lost: a test host's journal does not always listen again after a restart.
    assert set(found) - {"kernel_log"} == {"nvidia_driver", "driver_branch", SUPPORT}
    assert "R580" in found["driver_branch"]["text"]


def test_open_module_nouveau_and_secure_boot(ready: Rig) -> None:
    """Each has one cause, and shows in the documented check and in ours."""
    rig, doctor = ready, Doctor(ready)
    spoil(rig)
    rig.purge()
    rig.sh(FORGET)
    rig.repositories("cuda")
    rig.sh(f"{APT} install -y -q --no-install-recommends nvidia-driver-pinning-580 >/dev/null")
    rig.sh(f"{APT} install -y -q --no-install-recommends nvidia-kernel-open-dkms nvidia-driver-cuda >/dev/null")
    rig.rc("nvidia-smi")  # loads the module
    assert set(doctor.failed()) - {"kernel_log"} == {"nvidia_driver", "kernel_module", SUPPORT}

    rig.purge()
    rig.sh(FORGET)
    rig.state(nouveau=True)
    assert set(doctor.failed()) == {"nvidia_driver", "nouveau", SUPPORT}
    rig.sh("rm -rf /sys/module/nouveau")
    rig.state(secure_boot=True)
    assert set(doctor.failed()) == {"nvidia_driver", "secure_boot", SUPPORT}
    rig.state()


def test_docker(docker_rig: Rig) -> None:
    """The checks that only a host with docker has."""
    rig = docker_rig
    rig.install("580.105.08")
    rig.sh("nvidia-smi -L")
    rig.sh(FORGET)
    rig.play(ROLES, tensorless_runtime="docker")
    rig.sh(ROOM)
    doctor = Doctor(rig, runtime="docker")
    assert doctor.failed() == {}

    hook = f"{APT} remove -y -q nvidia-container-toolkit >/dev/null; rm -rf /etc/cdi /run/cdi; "
    hook += "python3 -c \"import json; p='/etc/docker/daemon.json'; d=json.load(open(p)); d.pop('runtimes', 0); "
    hook += "json.dump(d, open(p, 'w'))\"; systemctl reset-failed docker.service; systemctl restart docker"
    support = "nvidia_container_support"
    check_case(doctor, support, Case({support}, make=hook))
    # Started so often within a minute that systemd lets it start no more.
    often = "systemctl reset-failed docker.service; for n in 1 2 3; do systemctl restart docker; done; "
    check_case(doctor, support, Case({support}, make=f"{often}systemctl stop docker.socket docker.service"))

    # A server of ours whose card was taken away by a reload of systemd.
    rig.sh(IMAGE.format("docker"))
    rig.host.write("/root/smi", "#!/bin/sh\necho Failed to initialize NVML: Unknown Error\nexit 255\n", "0755")
    rig.sh(
        "docker run -d -i --name tensorless-x --network none --label org.tensorless.plan=x "
        "-v /root/smi:/bin/nvidia-smi localhost/small:1 /bin/sh -c 'read x'"
    )
    lost = Case({"docker_reload"}, mend="docker rm -f tensorless-x")
    check_case(doctor, "docker_reload", lost)
    assert doctor.failed() == {}
