# SPDX-License-Identifier: Apache-2.0
"""tensorless_server, state started: every situation that a host can be in, against a host in memory."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_files as files
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_module as work
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.server.fakes import Behaviour, Box, FakeHost, plan

NAME = "tensorless-org-model"


def start(host: FakeHost, *plans: dict[str, Any], **options: Any) -> work.Outcome:
    tools = {k: options.pop(k) for k in list(options) if k in ("cards", "health_timeout")}
    return work.start(list(plans), host.tools(**tools), host.installed, **options)


def state(host: FakeHost) -> dict[str, Any]:
    """Everything that a start may change, for comparing before and after."""
    tree = {}
    for path in sorted(host.tmp.rglob("*")):
        if path.is_symlink():
            tree[str(path)] = str(path.readlink())
        elif path.is_file():
            tree[str(path)] = path.read_text()
    return {"files": tree, "boxes": {r: dict(b) for r, b in host.boxes.items()}, "units": json.dumps(host.units)}


def running(host: FakeHost, name: str = NAME, runtime: str = "podman") -> Box:
    return host.boxes[runtime][name]


def test_bare_host_then_again(host: FakeHost) -> None:
    p = plan(host.tmp)
    planned = start(host, p, check_mode=True)
    assert not host.changes()
    done = start(host, p)
    assert done.changed
    assert done.actions == planned.actions
    assert [a.split(": ")[-1].split()[0] for a in done.actions] == ["write", "write", "write", "start", "start"]
    box = running(host)
    assert box.argv == p["exec"]
    host.calls.clear()
    again = start(host, p)
    assert not again.changed
    assert again.actions == []
    assert running(host) is box
    assert len(host.calls) == 3  # systemctl, podman, docker
    assert again.servers[0]["state"] == "started"
    assert again.servers[0]["container_id"] == box.id


def test_files_have_their_modes(host: FakeHost) -> None:
    start(host, plan(host.tmp))
    modes = {p: pathlib.Path(p).stat().st_mode & 0o777 for p in (host.where.unit, host.where.launcher)}
    assert modes == {host.where.unit: 0o644, host.where.launcher: 0o755}
    assert pathlib.Path(host.where.document(NAME)).stat().st_mode & 0o777 == 0o644


def test_a_new_template_is_not_reloaded_a_changed_one_is(host: FakeHost) -> None:
    start(host, plan(host.tmp))
    assert ["systemctl", "daemon-reload"] not in host.calls
    pathlib.Path(host.where.unit).write_text("[Unit]\nhalf")
    box = running(host)
    done = start(host, plan(host.tmp))
    assert "systemctl daemon-reload" in done.actions
    assert running(host) is box


def test_a_changed_plan_needs_no_reload(host: FakeHost) -> None:
    start(host, plan(host.tmp))
    host.calls.clear()
    start(host, plan(host.tmp, context=8192))
    assert ["systemctl", "daemon-reload"] not in host.calls
    assert all("--no-reload" in call for call in host.calls if "enable" in call)


def test_stopped_container_of_the_name_is_removed_first(host: FakeHost) -> None:
    host.boxes["podman"][NAME] = Box(NAME, ["--rm"], running=False)
    done = start(host, plan(host.tmp))
    assert any("remove the stopped container" in a for a in done.actions)
    assert running(host).label == plan(host.tmp)["plan_hash"]


@pytest.mark.parametrize("runtime", ["podman", "docker"])
@pytest.mark.parametrize("on_change", ["converge", "refuse"])
def test_a_running_stranger_is_refused_and_left_alone(host: FakeHost, runtime: str, on_change: str) -> None:
    host.boxes[runtime][NAME] = Box(NAME, ["--rm"], id="abcdef123456789")
    before = state(host)
    with pytest.raises(Refusal, match=f"{NAME} is already running in {runtime}.*abcdef123456.*{runtime} stop"):
        start(host, plan(host.tmp), on_change=on_change)
    assert state(host) == before


def test_unit_without_container(host: FakeHost) -> None:
    start(host, plan(host.tmp))
    del host.boxes["podman"][NAME]
    done = start(host, plan(host.tmp))
    assert done.changed
    assert running(host).running
    assert not start(host, plan(host.tmp)).changed


def test_container_without_unit(host: FakeHost) -> None:
    p = plan(host.tmp)
    host.boxes["podman"][NAME] = Box(NAME, p["exec"], label=p["plan_hash"])
    first = running(host)
    done = start(host, p)
    assert any("which no service owns" in a for a in done.actions)
    assert running(host) is not first


def test_the_other_runtime_holds_it(host: FakeHost) -> None:
    start(host, plan(host.tmp, runtime="docker"))
    done = start(host, plan(host.tmp, runtime="podman"))
    assert done.changed
    assert NAME not in host.boxes["docker"]
    assert running(host).running


@pytest.mark.parametrize("text", ["", "{", '{"schema": 2}', '{"schema": 1, "exec": "x"}', "\0\0\0"])
def test_half_written_data_file(host: FakeHost, text: str) -> None:
    start(host, plan(host.tmp))
    box = running(host)
    pathlib.Path(host.where.document(NAME)).write_text(text)
    done = start(host, plan(host.tmp))
    assert done.changed
    assert running(host) is box, "the container is the plan's own: its data file alone is mended"
    assert json.loads(pathlib.Path(host.where.document(NAME)).read_text())["exec"] == plan(host.tmp)["exec"]


def test_not_enabled_any_more(host: FakeHost) -> None:
    start(host, plan(host.tmp))
    pathlib.Path(host.where.enabled_link(NAME)).unlink()
    box = running(host)
    done = start(host, plan(host.tmp))
    assert done.actions == [f"{NAME}: start it at boot"]
    assert running(host) is box


def test_image_gone(host: FakeHost) -> None:
    start(host, plan(host.tmp))
    host.images["podman"].clear()
    assert not start(host, plan(host.tmp)).changed, "what runs needs no image"
    before = state(host)
    with pytest.raises(Refusal, match=r"the engine image is not pulled: .*tensorless pull Org/Model"):
        start(host, plan(host.tmp, context=8192))
    assert state(host) == before, "the old server still answers"


def test_model_gone(host: FakeHost) -> None:
    start(host, plan(host.tmp))
    (host.tmp / "blob").unlink()
    (host.tmp / "blob.incomplete").write_bytes(b"G")
    p = plan(host.tmp)
    (host.tmp / "blob").unlink()
    done = start(host, p)
    assert not done.changed
    assert any("could not be started again: the model is not downloaded" in w for w in done.warnings)
    changed = {**p, "plan_hash": "f" * 64}
    with pytest.raises(Refusal, match=r"the model is not downloaded.*a part of it is there.*tensorless pull"):
        start(host, changed)
    assert running(host).label == p["plan_hash"]


def test_model_of_another_size(host: FakeHost) -> None:
    p = plan(host.tmp)
    (host.tmp / "blob").write_bytes(b"GGUFGGUF")
    with pytest.raises(Refusal, match=r"the model is not downloaded: .* has 8 bytes instead of 4"):
        start(host, p)


def test_port_in_use(host: FakeHost) -> None:
    host.boxes["docker"]["other"] = Box("other", ["-p", "127.0.0.1:8080:8080", "--alias", "x"])
    before = state(host)
    with pytest.raises(Refusal, match=r"cannot use port 8080 on 127\.0\.0\.1: address already in use.*another port"):
        start(host, plan(host.tmp))
    assert state(host) == before


def test_daemon_down(host: FakeHost) -> None:
    host.daemon_down.add("docker")
    with pytest.raises(Refusal, match="docker is installed but its daemon does not answer; start it"):
        start(host, plan(host.tmp, runtime="docker"))
    assert start(host, plan(host.tmp)).changed, "podman does not depend on it"


def test_runtime_not_installed(host: FakeHost) -> None:
    host.installed = []
    with pytest.raises(Refusal, match="podman is not installed"):
        start(host, plan(host.tmp))
    planned = start(host, plan(host.tmp), check_mode=True)
    assert planned.changed
    assert planned.notes == ["the containers are known after podman is installed"]


def test_check_mode_on_a_bare_host_does_not_fail(host: FakeHost) -> None:
    host.images["podman"].clear()
    p = plan(host.tmp)
    (host.tmp / "blob").unlink()
    planned = start(host, p, check_mode=True)
    assert planned.servers[0]["state"] == "would be started"
    assert [n.split(":")[1].strip() for n in planned.notes] == [
        "the model is not downloaded",
        "the engine image is not pulled",
    ]


def test_drop_in_is_reported(host: FakeHost) -> None:
    start(host, plan(host.tmp))
    unit = files.unit_name(NAME)
    host.units[unit]["DropInPaths"] = f"/etc/systemd/system/{unit}.d/own.conf"
    done = start(host, plan(host.tmp))
    assert not done.changed
    assert any("own.conf changes tensorless@" in w for w in done.warnings)


def test_refuse_on_change(host: FakeHost) -> None:
    p = plan(host.tmp)
    start(host, p)
    assert not start(host, p, on_change="refuse").changed, "the same plan is no change"
    before = state(host)
    with pytest.raises(Refusal, match=f"{NAME} is already running in podman.*tensorless stop Org/Model"):
        start(host, plan(host.tmp, context=8192), on_change="refuse")
    assert state(host) == before


OTHER = {"instance": "tensorless-org-other", "port": 8081, "uuid": "GPU-bbbbbbbb-0000-0000-0000-000000000000"}


@pytest.mark.parametrize(
    "change",
    [
        {"port": 9000},
        {"host": "0.0.0.0"},
        {"context": 8192},
        {"image": "image@sha256:2"},
        {"uuid": "GPU-cccccccc-0000-0000-0000-000000000000"},
        {"runtime": "docker"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_one_changed_option_restarts_its_server_only(host: FakeHost, change: dict[str, Any]) -> None:
    one, two = plan(host.tmp), plan(host.tmp, **OTHER)
    start(host, one, two)
    kept, first = running(host, OTHER["instance"]), running(host)
    done = start(host, plan(host.tmp, **change), two)
    assert done.changed
    assert running(host, OTHER["instance"]) is kept
    assert running(host, runtime=change.get("runtime", "podman")) is not first
    back = start(host, one, two)
    assert back.servers[0]["plan_hash"] == one["plan_hash"]
    assert not start(host, one, two).changed


def test_what_is_no_effective_input_restarts_nothing(host: FakeHost) -> None:
    p = plan(host.tmp)
    start(host, p)
    box = running(host)
    moved = {**p, "download": {**p["download"], "revision": "another", "url": "elsewhere"}}
    assert not start(host, moved).changed
    assert running(host) is box


def test_failed_first_start_leaves_nothing(host: FakeHost) -> None:
    log = [f"line {n}" for n in range(1, 101)]
    host.behaviour = lambda _argv: Behaviour(healthy_after=None, exits_after=3, log=[*log, "cudaMalloc: out of memory"])
    done = start(host, plan(host.tmp))
    assert done.failure is not None
    assert "the server exited before it was ready" in done.failure
    assert "does not fit beside what already uses the card" in done.failure
    assert done.failure.count("line ") >= 59
    assert "line 42\n" in done.failure
    assert "line 41\n" not in done.failure
    assert done.servers[0]["state"] == "failed"
    assert not host.boxes["podman"]
    assert not pathlib.Path(host.where.document(NAME)).exists()
    assert not pathlib.Path(host.where.enabled_link(NAME)).exists()
    assert host.units == {}


def test_a_refused_command_says_so(host: FakeHost) -> None:
    host.behaviour = lambda _argv: Behaviour(start_fails="Error: unresolvable CDI devices nvidia.com/gpu=7")
    done = start(host, plan(host.tmp))
    assert done.failure is not None
    assert "generate the CDI spec again" in done.failure
    assert "unresolvable CDI devices" in done.failure


def test_failed_change_brings_the_earlier_server_back(host: FakeHost) -> None:
    old, new = plan(host.tmp), plan(host.tmp, context=8192)
    start(host, old)
    host.behaviour = lambda argv: Behaviour(exits_after=2, healthy_after=None) if "8192" in argv else Behaviour()
    done = start(host, new)
    assert done.failure is not None
    assert "the earlier server is back at http://127.0.0.1:8080" in done.failure
    assert running(host).label == old["plan_hash"]
    host.behaviour = lambda _argv: Behaviour()
    assert not start(host, old).changed


def test_never_ready(host: FakeHost) -> None:
    host.behaviour = lambda _argv: Behaviour(healthy_after=None)
    done = start(host, plan(host.tmp), health_timeout=1200)
    assert done.failure is not None
    assert "the server was not ready after 20m, so it was stopped" in done.failure
    assert not host.boxes["podman"]


def test_another_server_answers(host: FakeHost) -> None:
    host.behaviour = lambda _argv: Behaviour(alias="Somebody/Else")
    done = start(host, plan(host.tmp))
    assert done.failure is not None
    assert "another server answers at http://127.0.0.1:8080: it serves Somebody/Else, not Org/Model" in done.failure


def test_all_servers_load_at_the_same_time(host: FakeHost) -> None:
    host.behaviour = lambda _argv: Behaviour(healthy_after=100)
    start(host, plan(host.tmp), plan(host.tmp, **OTHER))
    assert host.clock.now < 110


def test_a_failed_server_does_not_stop_the_others(host: FakeHost) -> None:
    host.behaviour = lambda argv: Behaviour(exits_after=1, healthy_after=None) if NAME in argv else Behaviour()
    done = start(host, plan(host.tmp), plan(host.tmp, **OTHER))
    assert [s["state"] for s in done.servers] == ["failed", "started"]
    assert running(host, OTHER["instance"]).running


@pytest.mark.parametrize("name", ["a:b", "a/b", "../x", "", "-a", "A", "a b", "a%n", "$x", "x" * 201])
def test_names_that_cannot_be_an_instance(host: FakeHost, name: str) -> None:
    before = state(host)
    p = {**plan(host.tmp), "instance": name}
    with pytest.raises(Refusal) as refused:
        start(host, p)
    assert refused.value.rc == 2
    assert state(host) == before


def test_two_plans_in_one_place(host: FakeHost) -> None:
    with pytest.raises(Refusal, match=r"would both use the address 127\.0\.0\.1:8080; give each its own"):
        start(host, plan(host.tmp), plan(host.tmp, instance="tensorless-org-other"))
    with pytest.raises(Refusal, match="would both use the name"):
        start(host, plan(host.tmp), plan(host.tmp, port=8081))


def test_every_interface_is_warned_about(host: FakeHost) -> None:
    done = start(host, plan(host.tmp, host="0.0.0.0"))
    assert any("listens on every interface of this host (--host 0.0.0.0)" in w for w in done.warnings)


@pytest.mark.parametrize("point", range(12))
@pytest.mark.parametrize("earlier", [False, True], ids=["first", "changed"])
def test_a_crash_anywhere_is_repaired(host: FakeHost, point: int, earlier: bool) -> None:
    """Whatever command the run died at, the next one ends healthy, and the one after changes nothing."""
    new = plan(host.tmp, context=8192)
    if earlier:
        start(host, plan(host.tmp))
    host.calls.clear()
    run, left = host.run, [point]

    def dying(argv: Any) -> tuple[int, str, str]:
        if left[0] == 0:
            left[0] = -1
            raise KeyboardInterrupt
        left[0] -= 1
        return run(argv)

    tools = dataclasses.replace(host.tools(), run=dying)
    try:
        work.start([new], tools, host.installed)
    except KeyboardInterrupt:
        pass
    else:
        assert left[0] >= 0, "the run has fewer commands than this point"
    done = start(host, new)
    assert done.failure is None
    assert running(host).label == new["plan_hash"]
    assert not list(host.tmp.rglob(f"*{files.PARTIAL}"))
    assert not start(host, new).changed


def test_files_of_an_interrupted_write_are_removed(host: FakeHost) -> None:
    leftover = pathlib.Path(f"{host.where.document(NAME)}{files.PARTIAL}")
    leftover.parent.mkdir(parents=True)
    leftover.write_text("half")
    done = start(host, plan(host.tmp))
    assert any("left by an interrupted run" in a for a in done.actions)
    assert not leftover.exists()
