# SPDX-License-Identifier: Apache-2.0
"""Servers on hosts whose administrator did something by hand: to the unit, the container, the port, the daemon."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fleet.server.rig import Rig, healthy, until

pytestmark = [pytest.mark.fleet, pytest.mark.soak]


def unit(plan: dict[str, Any]) -> str:
    return f"tensorless@{plan['instance']}.service"


def test_masked(rig: Rig) -> None:
    plan = rig.plan()
    first = rig.serve(plan)["servers"][0]
    rig.systemctl("mask", unit(plan))
    failed = rig.serve(rig.plan(context=2048), fail=True)
    assert f"{unit(plan)} is masked, so it cannot be started; allow it: systemctl unmask {unit(plan)}" in failed["msg"]
    container = rig.container(plan["container_name"])
    assert container is not None
    assert container["Id"] == first["container_id"]
    stopped = rig.module("tensorless_server", name=plan["instance"], state="absent")
    assert stopped["changed"]
    assert rig.container(plan["container_name"]) is None
    rig.systemctl("unmask", unit(plan))
    assert rig.serve(plan)["changed"]
    assert not rig.serve(plan)["changed"]


def test_a_unit_file_of_its_own(rig: Rig) -> None:
    plan = rig.plan()
    rig.serve(plan)
    own = f"/etc/systemd/system/{unit(plan)}"
    rig.sh(f"cp {rig.places.unit} {own} && systemctl daemon-reload")
    done = rig.serve(plan)
    assert not done["changed"]
    assert any(f"{own} takes the place of {rig.places.unit}" in text for text in done["warnings"])


def test_paused(rig: Rig) -> None:
    if rig.runtime == "podman":
        pytest.skip("podman cannot pause without cgroups, which these hosts lack")
    plan = rig.plan()
    first = rig.serve(plan)["servers"][0]
    rig.host.exec(rig.runtime, "pause", plan["container_name"])
    foretold = rig.serve(plan, check=True)
    done = rig.serve(plan)
    assert done["actions"] == foretold["actions"]
    assert len(done["actions"]) == 1
    assert done["servers"][0]["container_id"] == first["container_id"]
    assert healthy(rig)
    rig.host.exec(rig.runtime, "pause", plan["container_name"])
    assert rig.serve(rig.plan(context=2048))["changed"]
    rig.host.exec(rig.runtime, "pause", plan["container_name"])
    stopped = rig.module("tensorless_server", name=plan["instance"], state="stopped")
    assert stopped["servers"][0]["message"] == f"stopped {plan['container_name']}"


def test_a_read_only_etc_stops_nothing(rig: Rig) -> None:
    plan = rig.plan()
    first = rig.serve(plan)["servers"][0]
    rig.sh("mount --bind /etc/tensorless /etc/tensorless && mount -o remount,ro,bind /etc/tensorless")
    try:
        failed = rig.serve(rig.plan(context=2048), fail=True)
        assert "Read-only file system" in failed["msg"]
        assert not rig.serve(plan)["changed"], "what has nothing to write goes on"
    finally:
        rig.sh("umount /etc/tensorless")
    container = rig.container(plan["container_name"])
    assert container is not None
    assert container["Id"] == first["container_id"]


@pytest.mark.parametrize("other", ["podman", "docker"])
def test_a_strangers_container_on_the_port(rig: Rig, other: str) -> None:
    plan = rig.plan()
    sleeping = ["run", "-d", "--name", "web", "-p", "127.0.0.1:8080:80", "--entrypoint", "sleep", plan["image"], "600"]
    rig.host.exec(other, *sleeping)
    before = rig.container("web", other)
    failed = rig.serve(plan, fail=True)
    assert "cannot use port 8080 on 127.0.0.1: address already in use (pid " in failed["msg"]
    assert f"web, a container in {other}); choose another port, or stop what uses it" in failed["msg"]
    after = rig.container("web", other)
    assert before is not None
    assert after is not None
    assert (after["Id"], after["State"]["StartedAt"]) == (before["Id"], before["State"]["StartedAt"])
    assert rig.sh("ls /etc/tensorless/instances 2>/dev/null", check=False) == ""
    assert rig.serve(rig.plan(port=8090))["servers"][0]["state"] == "started"


def test_the_longest_name(rig: Rig) -> None:
    plan = rig.plan()
    name = ("tensorless-" + "x" * 200)[:200]
    words = [name if word == plan["container_name"] else word for word in plan["exec"]]
    long = {**plan, "instance": name, "container_name": name, "exec": words}
    assert rig.serve(long)["servers"][0]["state"] == "started"
    assert not rig.serve(long)["changed"]
    gone = rig.module("tensorless_server", name=name, state="absent")
    assert gone["servers"][0]["message"] == f"stopped {name}"
    assert rig.sh("ls -d /etc/tensorless 2>/dev/null", check=False) == ""


def test_two_servers_change_cards_and_ports(rig: Rig) -> None:
    one, two = rig.plan(gpu="0", suffix=True), rig.plan(gpu="1", port=8081, suffix=True)
    rig.serve(one, two)
    swapped = rig.plan(gpu="0", suffix=True, port=8081), rig.plan(gpu="1", suffix=True, port=8080)
    assert [s["state"] for s in rig.serve(*swapped)["servers"]] == ["started", "started"]
    assert not rig.serve(*swapped)["changed"]


@pytest.mark.parametrize("how", ["restart", "kill", "keeping"])
def test_dockers_daemon_is_restarted(rig: Rig, how: str) -> None:
    """A package upgrade does it. Nobody asked the server to stop, so it is there again, by itself."""
    if rig.runtime != "docker":
        pytest.skip("about docker's daemon")
    plan = rig.plan()
    rig.serve(plan)
    if how == "keeping":
        rig.sh("cp /etc/docker/daemon.json /root/daemon.json")
        rig.sh("sed -i 's/^{/{\"live-restore\": true, /' /etc/docker/daemon.json && systemctl reload docker; sleep 2")
    try:
        rig.sh(
            "kill -9 $(pidof dockerd); sleep 1"
            if how == "kill"
            else "systemctl reset-failed docker; systemctl restart docker"
        )
        until(lambda: rig.unit(plan["instance"])["ActiveState"] == "active" and healthy(rig), 120)
    finally:
        if how == "keeping":
            rig.sh("cp /root/daemon.json /etc/docker/daemon.json && systemctl reload docker; sleep 2")
    until(lambda: not rig.serve(plan)["changed"], 60)
    assert rig.sh("pgrep -c llama-server").strip() == "1"
