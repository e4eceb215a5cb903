# SPDX-License-Identifier: Apache-2.0
"""driver.yml and selftest.yml on a host that serves.

drain, upgrade, reboot, verify, CDI, servers anew; what a failure leaves; and the bundle for the project's fixtures.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet import fleet
from tests.fleet.conftest import HEALTH, until
from tests.fleet.driver.conftest import PACKAGES, Rig, build
from tests.fleet.hosts import Host
from tests.fleet.machine import podman
from tests.fleet.server.rig import CACHE, CARDS, prepare
from tests.fleet.services import APT

pytestmark = [pytest.mark.fleet, pytest.mark.soak]
ROLES = ["preflight", "container_runtime", "nvidia_cdi", "plan", "server"]
PLAY = {"import_playbook": "tensorless.fleet.driver"}
SERVERS = {
    "tensorless_servers": [{"model": "smol", "gpu": "each"}],
    "tensorless_recipes_dir": str(fleet.RECIPES),
    "tensorless_hf_hub_cache": CACHE,
    "nvidia_cdi_repository_url": f"{APT}/toolkit",
    "nvidia_cdi_repository_key": f"{APT}/key.asc",
    "nvidia_driver_repository_url": f"{APT}/cuda",
    "nvidia_driver_repository_key": f"{APT}/key.asc",
}
# Each boot of a machine has a number of its own; hosts here share one kernel, and so its number.
BOOT = """[Unit]
DefaultDependencies=no
Before=systemd-journald.service sysinit.target
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'cat /proc/sys/kernel/random/uuid >/run/boot-id'
ExecStart=/bin/mount --bind /run/boot-id /proc/sys/kernel/random/boot_id
[Install]
WantedBy=sysinit.target
"""


@contextlib.contextmanager
def comes_back(host: Host) -> Iterator[None]:
    """A machine that reboots comes up again by itself; a container has to be started."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            if not host.running():
                host.start()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def server_host() -> Iterator[Host]:
    host = prepare("drv-p", "bookworm", "10.213.26.11", ["podman"]).host
    host.write("/etc/systemd/system/boot-id.service", BOOT)
    host.sh("systemctl daemon-reload; systemctl enable boot-id.service")
    # There is no logind in a container, which a shutdown is arranged with on a machine.
    host.sh("rm -f /sbin/shutdown")
    host.write("/sbin/shutdown", "#!/bin/sh\nexec systemctl start --no-block reboot.target\n", "0755")
    host.reboot()
    yield host
    if not os.environ.get("TENSORLESS_TEST_KEEP"):
        host.remove()


@pytest.fixture
def serving(server_host: Host, tmp_path: pathlib.Path) -> Rig:
    """A host that serves from two cards, with the driver before the newest."""
    rig = Rig(server_host, tmp_path)
    rig.sh("systemctl stop 'tensorless@*' 2>/dev/null; systemctl reset-failed")
    rig.purge()
    rig.state(cards=CARDS)
    packages(rig)
    rig.install("580.95.05")
    rig.sh("nvidia-smi -L")
    rig.play(ROLES, **SERVERS)
    return rig


def packages(rig: Rig) -> None:
    """What Rig.install takes the driver from."""
    if rig.host.exec("test", "-d", "/opt/sim/cuda", check=False).returncode != 0:
        build(PACKAGES)
        rig.sh("mkdir -p /opt/sim")
        podman("cp", f"{PACKAGES}/.", f"{rig.host.name}:/opt/sim")


def healthy(rig: Rig, port: int) -> bool:
    return rig.host.exec("python3", "-c", HEALTH % port, check=False).stdout.strip() == "200"


def tasks(output: str) -> list[str]:
    """The names of the tasks that did something, in their order."""
    found: list[str] = []
    name = ""
    for line in output.splitlines():
        if line.startswith("TASK ["):
            name = line.partition("[")[2].rpartition("]")[0]
        elif line.startswith(("changed:", "fatal:")):
            found.append(name.rpartition(" : ")[2])
    return found


def test_upgrade_of_a_host_that_serves(serving: Rig) -> None:
    rig = serving
    assert healthy(rig, 8080) and healthy(rig, 8081)
    before = rig.sh("pgrep -x llama-server").split()
    wish: dict[str, Any] = {**SERVERS, "nvidia_driver_upgrade": True}

    _rc, output, _recap = rig.run(PLAY, "--check", "--diff", **wish, nvidia_driver_reboot=True)
    assert rig.sh("pgrep -x llama-server").split() == before, "a rehearsal stops nothing"

    with comes_back(rig.host):
        _rc, output, _recap = rig.run(PLAY, **wish, nvidia_driver_reboot=True)
    done = tasks(output)
    order = ["Drain the host", "Install the driver and keep it there", "Reboot into the new driver"]
    assert [name for name in done if name in order] == order
    assert "x86_64 Kernel Module  580.105.08" in rig.sh("cat /proc/driver/nvidia/version")
    assert "580.105.08" in rig.sh("cat /etc/cdi/nvidia.yaml /run/cdi/nvidia.yaml 2>/dev/null || true")
    for port in (8080, 8081):
        until(lambda port=port: healthy(rig, port), 60, f"port {port} after the upgrade")  # type: ignore[misc]
    after = rig.sh("pgrep -x llama-server").split()
    assert len(after) == 2
    assert rig.sh("nvidia-smi -L").count("GPU-") == 2
    _rc, output, recap = rig.run(PLAY, **wish, nvidia_driver_reboot=True)
    assert recap["changed"] == 0, output[-4000:]
    assert rig.sh("pgrep -x llama-server").split() == after, "and a second run stops nothing"


def test_without_leave_to_reboot_nothing_is_stopped(serving: Rig) -> None:
    rig = serving
    before = rig.sh("pgrep -x llama-server").split()
    rc, output, _recap = rig.run(PLAY, check=False, **SERVERS, nvidia_driver_upgrade=True)
    assert rc != 0
    assert "Set nvidia_driver_reboot to true" in " ".join(output.split())
    assert rig.sh("pgrep -x llama-server").split() == before


def test_a_failed_installation_leaves_no_server_stopped(serving: Rig) -> None:
    """apt breaks off in the middle, for the network is gone: the servers come back, and the message says so."""
    rig = serving
    rig.play(["preflight", "nvidia_driver"], **SERVERS, nvidia_driver_manage=True)  # the repository is known now
    rig.sh("apt-get clean; echo 'Acquire::http::Proxy \"http://127.0.0.1:9\";' >/etc/apt/apt.conf.d/99gone")
    try:
        rc, output, _recap = rig.run(
            PLAY, check=False, **SERVERS, nvidia_driver_upgrade=True, nvidia_driver_reboot=True
        )
    finally:
        rig.sh("rm -f /etc/apt/apt.conf.d/99gone")
    words = " ".join(output.split())
    assert rc != 0
    assert "installing the driver failed" in words
    assert "The servers of this host were started again" in words
    for port in (8080, 8081):
        until(lambda port=port: healthy(rig, port), 60, f"port {port} after the failure")  # type: ignore[misc]
    assert rig.versions()["nvidia-kernel-dkms"] == "580.95.05-1"
    for unit in rig.sh("ls /etc/tensorless/instances | sed -n 's/\\.json$//p'").split():
        assert rig.sh(f"systemctl is-enabled tensorless@{unit}.service").strip() == "enabled"


def test_a_refusal_stops_nothing(serving: Rig) -> None:
    rig = serving
    before = rig.sh("pgrep -x llama-server").split()
    rc, output, _recap = rig.run(
        PLAY, check=False, **SERVERS, nvidia_driver_branch="565", nvidia_driver_reboot=True, nvidia_driver_upgrade=True
    )
    assert rc != 0
    assert "have no driver of R565" in " ".join(output.split())
    assert rig.sh("pgrep -x llama-server").split() == before


def test_selftest(serving: Rig) -> None:
    """The whole bundle comes back, names no card and no host, and says what was proved."""
    rig = serving
    before = rig.sh("pgrep -x llama-server").split()
    play = {"import_playbook": "tensorless.fleet.selftest"}
    _rc, output, _recap = rig.run(play, "-e", "selftest_dir=./bundle", **SERVERS)
    folder = rig.tmp / "bundle" / rig.host.name
    files = {path.name: path.read_text() for path in folder.iterdir()}
    assert {"summary.json", "smi-csv.txt", "smi-csv-nounits.txt", "smi-query.xml", "smi-bad-field.txt"} <= set(files)
    for name, text in files.items():
        assert not any(card["uuid"] in text for card in CARDS), name
        assert rig.host.name not in text, name
    rows = files["smi-csv-nounits.txt"].partition("# stdout:\n")[2].partition("# stderr:")[0].split("\n")
    assert [row.split(", ")[0] for row in rows if row] == ["0", "1"]
    assert "# rc: 2\n" in files["smi-bad-field.txt"]
    summary = json.loads(files["summary.json"])
    assert [card["memory_mib"] for card in summary["facts"]["cards"]] == [16384, 16384]
    assert {check["id"] for check in summary["doctor"] if check["level"] == "FAIL"} <= {"disk_space", "image_disk"}
    assert len(summary["servers"]) == 2
    for server in summary["servers"]:
        assert server["card_seen"] and server["card_seen_after_reload"], server
        assert server["median_decode_tps"] > 0, server
    assert all("card by UUID seen, after a reload seen" in line for line in summary["verdicts"])
    assert "after a reload seen" in " ".join(output.split())
    assert rig.sh("pgrep -x llama-server").split() == before, "servers that run are measured as they are"
