# SPDX-License-Identifier: Apache-2.0
"""Every start that the contract covers, on real hosts: check mode foretells it, it ends healthy, again is no change."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import tomllib

from tests.fleet import engine
from tests.fleet.fleet import RECIPES
from tests.fleet.hosts import REGISTRY
from tests.fleet.server.rig import Rig, healthy, until

pytestmark = pytest.mark.fleet


def bare(_rig: Rig, _plan: dict[str, Any]) -> None:
    """Nothing is there."""


def unit(plan: dict[str, Any]) -> str:
    return f"tensorless@{plan['instance']}.service"


def stopped_container(rig: Rig, plan: dict[str, Any]) -> None:
    rig.own(f"{rig.runtime} create --name {plan['container_name']} {plan['image']}")


def unit_without_container(rig: Rig, plan: dict[str, Any]) -> None:
    rig.serve(plan)
    rig.systemctl("stop", unit(plan))


def container_without_unit(rig: Rig, plan: dict[str, Any]) -> None:
    rig.serve(plan)
    rig.systemctl("stop", unit(plan))
    rig.own(f"rm {rig.places.unit}")
    rig.systemctl("daemon-reload")
    rig.own(shlex.join([rig.runtime, "run", "-d", *plan["exec"][2:]]))


def killed_without_unit(rig: Rig, plan: dict[str, Any]) -> None:
    """podman's record says that it runs, although nothing does; docker's server goes on without its service."""
    rig.serve(plan)
    rig.own(f"rm {rig.places.unit}")
    rig.systemctl("daemon-reload")
    rig.systemctl("kill", "-s", "KILL", "--kill-who=all", unit(plan))
    until(lambda: rig.unit(plan["instance"])["ActiveState"] in ("inactive", "failed"))
    record = rig.container(plan["container_name"])
    assert record is not None
    assert record["State"]["Running"]


def other_runtime(rig: Rig, plan: dict[str, Any]) -> None:
    other = "docker" if rig.runtime == "podman" else "podman"
    rig.serve(Rig(rig.host, other).plan())


def half_written(rig: Rig, plan: dict[str, Any]) -> None:
    rig.serve(plan)
    rig.own(f"truncate -s 100 {rig.places.unit}; truncate -s 20 {rig.places.document(plan['instance'])}")


def other_plan(rig: Rig, _plan: dict[str, Any]) -> None:
    rig.serve(rig.plan(context=2048))


def not_enabled(rig: Rig, plan: dict[str, Any]) -> None:
    rig.serve(plan)
    rig.systemctl("disable", unit(plan))


SHORT = (bare, other_plan)
STARTS = (
    bare, stopped_container, unit_without_container, container_without_unit, killed_without_unit, other_runtime,
    half_written, other_plan, not_enabled,
)  # fmt: skip
CASES = [pytest.param(start, id=start.__name__, marks=() if start in SHORT else pytest.mark.soak) for start in STARTS]


def identity(rig: Rig, plan: dict[str, Any]) -> tuple[str, str]:
    record = rig.container(plan["container_name"])
    assert record is not None
    return record["Id"], record["State"]["StartedAt"]


def listing(rig: Rig) -> str:
    """Everything that a run may write, with its times."""
    where = rig.places
    roots = f"{where.instances} {where.unit_dir} {where.launcher}"
    return rig.own(f"find {roots} -printf '%p %T@ %s %m\\n' 2>/dev/null; true")


def starts_from(rig: Rig, start: Callable[[Rig, dict[str, Any]], None]) -> None:
    plan = rig.plan()
    start(rig, plan)
    before = listing(rig)
    foretold = rig.serve(plan, check=True)
    after = listing(rig)
    assert before == after, "a rehearsal changes nothing"
    done = rig.serve(plan)
    assert done["actions"] == foretold["actions"]
    assert done["changed"]
    assert foretold["changed"]
    assert '"ok"' in rig.sh("curl -s http://127.0.0.1:8080/health")
    ran = identity(rig, plan)
    again = rig.serve(plan)
    assert not again["changed"]
    assert again["actions"] == []
    assert identity(rig, plan) == ran
    assert not rig.serve(plan, check=True)["changed"]


@pytest.mark.parametrize("start", CASES)
def test_start(rig: Rig, start: Callable[[Rig, dict[str, Any]], None]) -> None:
    starts_from(rig, start)


@pytest.mark.soak
@pytest.mark.parametrize("start", [s for s in STARTS if s is not other_runtime], ids=lambda start: start.__name__)
def test_rootless_start(rootless: Rig, start: Callable[[Rig, dict[str, Any]], None]) -> None:
    """The same for an ordinary account: its own service manager, its own podman. It cannot look into docker."""
    starts_from(rootless, start)


@pytest.mark.soak
def test_rootless_server_is_back_after_a_reboot(rootless: Rig) -> None:
    plan = rootless.plan()
    rootless.serve(plan)
    rootless.host.reboot()
    until(lambda: healthy(rootless), 90)
    assert not rootless.serve(plan)["changed"]


def test_image_or_model_gone(rig: Rig) -> None:
    """What runs goes on; a change that needs what is not there is refused while the old server answers."""
    plan = rig.plan()
    rig.serve(plan)
    blob = plan["download"]["blob"]
    rig.sh(f"mv {blob} {blob}.away")
    try:
        assert not rig.serve(plan)["changed"]
        failed = rig.serve(rig.plan(context=2048), fail=True)
        assert "the model is not downloaded" in failed["msg"]
    finally:
        rig.sh(f"mv {blob}.away {blob}")
    absent = {**rig.plan(context=2048), "image": plan["image"][:-4] + "0000"}
    failed = rig.serve(absent, fail=True)
    assert "the engine image is not pulled" in failed["msg"]
    assert '"ok"' in rig.sh("curl -s http://127.0.0.1:8080/health")


def test_drop_in_is_reported(rig: Rig) -> None:
    plan = rig.plan()
    rig.serve(plan)
    folder = f"/etc/systemd/system/tensorless@{plan['instance']}.service.d"
    rig.host.write(f"{folder}/own.conf", "[Service]\nNice=5\n")
    rig.sh("systemctl daemon-reload")
    try:
        done = rig.serve(plan)
        assert not done["changed"]
        assert any(f"{folder}/own.conf changes tensorless@" in text for text in done["warnings"])
    finally:
        rig.sh(f"rm -r {folder}; systemctl daemon-reload")


def test_docker_down(rig: Rig) -> None:
    if rig.runtime != "docker":
        pytest.skip("about docker's daemon")
    rig.sh("systemctl stop docker.socket docker")
    try:
        failed = rig.serve(rig.plan(), fail=True)
        assert "docker is installed but its daemon does not answer; start it: systemctl start docker" in failed["msg"]
    finally:
        rig.sh("systemctl start docker.socket docker")


def test_port_in_use(rig: Rig) -> None:
    rig.sh("systemd-run -q --unit squatter python3 -m http.server 8080 --bind 127.0.0.1; sleep 2")
    try:
        failed = rig.serve(rig.plan(), fail=True)
        assert "cannot use port 8080 on 127.0.0.1: address already in use (pid " in failed["msg"]
        assert "python3" in failed["msg"]
    finally:
        rig.sh("systemctl stop squatter", check=False)


CHANGES: list[dict[str, Any]] = [
    {"port": 9000}, {"host": "0.0.0.0"}, {"context": 2048}, {"extra_args": ("--no-warmup",)},
    {"hardening": {"no_new_privileges": True, "read_only": True, "drop_capabilities": True}},
]  # fmt: skip


@pytest.mark.parametrize(
    "change", [pytest.param(c, id=next(iter(c)), marks=() if "port" in c else pytest.mark.soak) for c in CHANGES]
)
def test_one_changed_option(rig: Rig, change: dict[str, Any]) -> None:
    """It restarts the server that it concerns and no other; changed back, the first plan hash returns."""
    one, two = rig.plan(gpu="0", suffix=True), rig.plan(gpu="1", port=8081, suffix=True)
    first = rig.serve(one, two)["servers"]
    changed = rig.plan(gpu="0", suffix=True, **change)
    after = rig.serve(changed, two)["servers"]
    assert after[0]["container_id"] != first[0]["container_id"]
    assert after[1]["container_id"] == first[1]["container_id"]
    failed = rig.serve(one, two, on_change="refuse", fail=True)
    assert "is already running in" in failed["msg"]
    back = rig.serve(one, two)["servers"]
    assert back[0]["plan_hash"] == first[0]["plan_hash"]
    assert back[1]["container_id"] == first[1]["container_id"]


def recipe() -> dict[str, Any]:
    return tomllib.loads(next(RECIPES.glob("*/*/p100.toml")).read_text())


@pytest.mark.soak
@pytest.mark.parametrize("part", ["image", "switch"])
def test_one_changed_part_of_a_recipe(rig: Rig, part: str) -> None:
    """It restarts the server of that recipe and not its neighbour; changed back, the first plan hash returns."""
    one, two = rig.plan(gpu="0", suffix=True), rig.plan(gpu="1", port=8081, suffix=True)
    first = rig.serve(one, two)["servers"]
    data = recipe()
    if part == "image":
        data["engine"]["image"] = engine.push(REGISTRY, "0.0.3-matrix")
        rig.host.exec(rig.runtime, "pull", data["engine"]["image"])
    else:
        data["run"]["env"][engine.SWITCHES[1]] = "1"
    after = rig.serve(rig.plan(recipe=data, gpu="0", suffix=True), two)["servers"]
    assert after[0]["plan_hash"] != first[0]["plan_hash"]
    assert after[0]["container_id"] != first[0]["container_id"]
    assert after[1]["container_id"] == first[1]["container_id"]
    back = rig.serve(one, two)["servers"]
    assert back[0]["plan_hash"] == first[0]["plan_hash"]
    assert back[1]["container_id"] == first[1]["container_id"]


@pytest.mark.soak
def test_a_server_moves_to_another_card(rig: Rig) -> None:
    first = rig.serve(rig.plan(gpu="0"))["servers"][0]
    moved = rig.plan(gpu="1")
    after = rig.serve(moved)["servers"][0]
    assert after["container_id"] != first["container_id"]
    used = rig.sh("nvidia-smi --query-compute-apps=gpu_uuid --format=csv,noheader").split()
    assert used == [moved["cards"][0]["uuid"]]
    assert rig.serve(rig.plan(gpu="0"))["servers"][0]["plan_hash"] == first["plan_hash"]


@pytest.mark.soak
def test_the_same_bytes_under_another_revision_restart_nothing(rig: Rig) -> None:
    first = rig.serve(rig.plan())["servers"][0]
    data = recipe()
    data["model"]["revision"] = "f" * 40
    again = rig.serve(rig.plan(recipe=data))
    assert not again["changed"]
    assert again["servers"][0]["container_id"] == first["container_id"]


def test_each_card_has_its_server(rig: Rig) -> None:
    plans = rig.plans(gpu="each")
    rig.serve(*plans)
    used = rig.sh("nvidia-smi --query-compute-apps=gpu_uuid,pid --format=csv,noheader").split()
    assert sorted({word.rstrip(",") for word in used[::2]}) == sorted(p["cards"][0]["uuid"] for p in plans)


def test_a_full_card_is_refused(rig: Rig) -> None:
    plan = rig.plan()
    state = json.loads(rig.sh("cat /etc/nvidia-sim/state.json"))
    for card in state["cards"]:
        card["memory_mib"] = 16000
        card["used_mib"] = card["memory_used_mib"] = 15950
    rig.sh("cp /etc/nvidia-sim/state.json /root/state.json")
    rig.host.write("/etc/nvidia-sim/state.json", json.dumps(state))
    try:
        if "15950" not in rig.sh("nvidia-smi --query-gpu=memory.used --format=csv"):
            pytest.skip("the stand-in for nvidia-smi takes no memory in use from its state")
        failed = rig.serve(plan, fail=True)
        assert "needs about" in failed["msg"]
        assert "of 16000 MiB free" in failed["msg"]
    finally:
        rig.sh("cp /root/state.json /etc/nvidia-sim/state.json")


def test_nothing_secret_is_left_anywhere(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An API key travels as a file: not in process lists, inspect, the journal, unit files or -vvv output."""
    secret = "sk-THE-SECRET-KEY"
    rig.host.write("/root/api-key", secret, "0600")
    plan = rig.plan(api_key_file="/root/api-key")
    monkeypatch.setenv("ANSIBLE_VERBOSITY", "3")
    outputs = [rig.serve(plan)["playbook_output"], rig.serve(rig.plan(), check=True)["playbook_output"]]
    assert rig.sh("curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8080/props") == "401"
    name = plan["container_name"]
    seen = rig.sh(
        "ps axewww -o args; journalctl --no-pager -o export | tr -d '\\0'; systemctl cat 'tensorless@*'; "
        f"cat /etc/tensorless/instances/* /usr/local/lib/tensorless/launch; {rig.runtime} inspect {name}; "
        f"{rig.runtime} logs {name} 2>&1; cat /proc/[0-9]*/environ | tr '\\0' '\\n'; true"
    )
    assert rig.sh(f"grep -rlF {secret} /etc /tmp /var/tmp /run /home /var/log /usr/local; true") == ""
    outputs.append(rig.module("tensorless_server", name=plan["instance"], state="absent")["playbook_output"])
    assert all("task path:" in output for output in outputs), "it was -vvv"
    assert name in seen
    assert secret not in seen
    assert not any(secret in output for output in outputs)
    assert plan["untuned"]
