# SPDX-License-Identifier: Apache-2.0
"""tensorless_server, states stopped, absent and previous."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_entry
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_files as files
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_module as work
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.server.fakes import Behaviour, Box, FakeHost, plan

NAME = "tensorless-org-model"
OTHER = {"instance": "tensorless-org-model-bbbbbbbb", "port": 8081, "uuid": "GPU-bbbbbbbb-0000-0000-0000-000000000000"}


def start(host: FakeHost, *plans: dict[str, Any]) -> work.Outcome:
    done = work.start(list(plans), host.tools(), host.installed)
    assert done.failure is None
    return done


def stop(host: FakeHost, *names: str, **options: Any) -> work.Outcome:
    chosen = {name: name for name in names or (NAME,)}
    return work.stop(chosen, host.tools(), options.pop("installed", host.installed), **options)


def test_stop_says_the_documented_lines(host: FakeHost) -> None:
    start(host, plan(host.tmp))
    planned = stop(host, check_mode=True)
    assert NAME in host.boxes["podman"]
    done = stop(host)
    assert done.actions == planned.actions
    assert done.servers[0]["message"] == f"stopped {NAME}"
    assert done.looked_in == ["podman", "docker"]
    assert NAME not in host.boxes["podman"]
    assert not pathlib.Path(host.where.enabled_link(NAME)).exists()
    again = stop(host)
    assert not again.changed
    assert again.servers[0]["message"] == f"{NAME} is not running"


def test_stopped_server_starts_again(host: FakeHost) -> None:
    start(host, plan(host.tmp))
    stop(host)
    assert start(host, plan(host.tmp)).changed
    assert pathlib.Path(host.where.enabled_link(NAME)).is_symlink()


@pytest.mark.parametrize("runtime", ["podman", "docker"])
def test_stop_finds_a_container_started_by_hand(host: FakeHost, runtime: str) -> None:
    host.boxes[runtime][NAME] = Box(NAME, ["--rm"])
    assert stop(host).servers[0]["message"] == f"stopped {NAME}"
    assert not host.boxes[runtime]


def test_a_server_that_was_killed_with_its_monitor(host: FakeHost) -> None:
    """podman's record says that it runs, and to stop it is an error that puts the record right."""
    host.boxes["podman"][NAME] = Box(NAME, ["--rm"], label="1", dead=True)
    assert stop(host).servers[0]["message"] == f"stopped {NAME}"
    assert not host.boxes["podman"]
    host.boxes["podman"][NAME] = Box(NAME, ["--rm"], label="1", dead=True)
    assert start(host, plan(host.tmp)).changed
    assert not start(host, plan(host.tmp)).changed


def test_a_named_runtime_limits_the_search(host: FakeHost) -> None:
    host.boxes["docker"][NAME] = Box(NAME, ["--rm"])
    done = stop(host, installed=["podman"])
    assert not done.changed
    assert done.looked_in == ["podman"]
    assert NAME in host.boxes["docker"]


def test_an_unreachable_runtime_is_named(host: FakeHost) -> None:
    host.daemon_down.add("docker")
    done = stop(host)
    assert done.looked_in == ["podman"]
    assert "nothing was looked for there" in done.notes[0]


def test_answers_that_were_cut_are_counted(host: FakeHost) -> None:
    start(host, plan(host.tmp))
    host.busy = 1
    done = stop(host)
    assert done.servers[0]["answers_cut"] == 1
    assert done.warnings == [f"stopping {NAME} cut 1 answer(s) short"]
    assert sum(host.clock.slept) >= 60, "it waited for idle first"


def test_absent_leaves_the_host_as_it_was(host: FakeHost) -> None:
    before = sorted(p for p in host.tmp.rglob("*"))
    start(host, plan(host.tmp), plan(host.tmp, **OTHER))
    start(host, plan(host.tmp, context=8192), plan(host.tmp, **OTHER))
    first = stop(host, gone=True)
    assert pathlib.Path(host.where.unit).exists(), "the other server needs it"
    assert host.boxes["podman"].keys() == {OTHER["instance"]}
    assert any(".previous" in a for a in first.actions)
    host.boxes["docker"]["somebody-else"] = Box("somebody-else", [])
    stop(host, str(OTHER["instance"]), gone=True)
    assert host.boxes == {"podman": {}, "docker": host.boxes["docker"]}
    left = [p for p in host.tmp.rglob("*") if p not in before and p.name != "units"]
    assert left == []
    assert not stop(host, gone=True).changed


def test_names_are_checked(host: FakeHost) -> None:
    with pytest.raises(Refusal, match="cannot be an instance name"):
        stop(host, "a/b")


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"name": NAME}, {NAME, OTHER["instance"]}),
        ({"name": OTHER["instance"]}, {OTHER["instance"]}),
        ({"name": "nothing-here"}, {"nothing-here"}),
        ({"all": True}, {NAME, OTHER["instance"]}),
        ({"plans": [{"model": "Org/Model", "instance": NAME, "container_name": NAME}]}, {NAME, OTHER["instance"]}),
        ({"plans": [{"model": "Org/X", "instance": "x", "container_name": "x"}]}, {"x"}),
    ],
)
def test_which_servers_are_meant(host: FakeHost, params: dict[str, Any], expected: set[str]) -> None:
    start(host, plan(host.tmp), plan(host.tmp, **OTHER))
    asked = {"name": None, "all": False, "plans": [], **params}
    assert set(_server_entry.targets(asked, host.tools())) == expected


def test_previous_returns_once(host: FakeHost) -> None:
    old, new = plan(host.tmp), plan(host.tmp, context=8192)
    start(host, old)
    done = start(host, new)
    assert done.servers[0]["previous"]["plan_hash"] == old["plan_hash"]
    assert done.servers[0]["seconds_down"] == pytest.approx(2.0)
    planned = work.go_back([NAME], host.tools(), host.installed, check_mode=True)
    assert planned.servers[0]["image"] == old["image"]
    back = work.go_back([NAME], host.tools(), host.installed)
    assert back.actions == planned.actions
    assert host.boxes["podman"][NAME].label == old["plan_hash"]
    again = work.go_back([NAME], host.tools(), host.installed)
    assert not again.changed
    assert again.notes == [f"{NAME}: no earlier plan is kept"]
    assert not start(host, old).changed


def test_a_failed_change_keeps_what_previous_means(host: FakeHost) -> None:
    oldest, old, new = (plan(host.tmp, context=c) for c in (1024, 2048, 8192))
    start(host, oldest)
    start(host, old)
    host.behaviour = lambda argv: Behaviour(exits_after=1, healthy_after=None) if "8192" in argv else Behaviour()
    failed = work.start([new], host.tools(), host.installed)
    assert failed.failure is not None
    _state, kept = files.read_document(host.where.previous(NAME))
    assert kept is not None
    assert kept["plan_hash"] == oldest["plan_hash"]
    assert host.boxes["podman"][NAME].label == old["plan_hash"]
