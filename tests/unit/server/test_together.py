# SPDX-License-Identifier: Apache-2.0
"""Several servers of one host in one run: what one gives up another may take, and what no plan names."""

from __future__ import annotations

import errno
import pathlib
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_files as files
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_module as work
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.server.fakes import Behaviour, Box, FakeHost, plan

A, B = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"
ONE: dict[str, Any] = {"instance": "tensorless-org-one", "port": 8080, "uuid": A}
TWO: dict[str, Any] = {"instance": "tensorless-org-two", "port": 8081, "uuid": B}


def start(host: FakeHost, *plans: dict[str, Any], **options: Any) -> work.Outcome:
    return work.start([plan(host.tmp, **p) for p in plans], host.tools(), host.installed, **options)


def names(host: FakeHost, runtime: str = "podman") -> set[str]:
    return set(host.boxes[runtime])


@pytest.mark.parametrize("key", ["port", "uuid"])
def test_two_servers_change_places(host: FakeHost, key: str) -> None:
    """Everything that ends does so before anything starts."""
    start(host, ONE, TWO)
    one, two = {**ONE, key: TWO[key]}, {**TWO, key: ONE[key]}
    foretold = start(host, one, two, check_mode=True)
    host.calls.clear()
    done = start(host, one, two)
    assert done.failure is None
    assert done.actions == foretold.actions
    verbs = [call[1] for call in host.calls if call[0] == "systemctl" and call[1] in ("stop", "start")]
    assert verbs == ["stop", "stop", "start", "start"]
    assert not start(host, one, two).changed


def test_a_port_goes_from_a_server_to_another_one(host: FakeHost) -> None:
    start(host, ONE)
    assert start(host, {**ONE, "port": 8090}, {**TWO, "port": 8080}).failure is None


def test_one_that_fails_leaves_the_other_its_change(host: FakeHost) -> None:
    start(host, ONE, TWO)
    one, two = {**ONE, "context": 1}, {**TWO, "context": 2}
    host.behaviour = lambda argv: Behaviour(None, exits_after=1) if argv[-1] == "1" else Behaviour()
    done = start(host, one, two)
    assert [s["state"] for s in done.servers] == ["failed", "started"]
    assert host.boxes["podman"][ONE["instance"]].argv[-1] == "4096"
    assert host.boxes["podman"][TWO["instance"]].argv[-1] == "2"


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [("127.0.0.1", "0.0.0.0", True), ("0.0.0.0", "10.0.0.5", True), ("::", "fd00::5", True), ("::1", "::1", True),
     ("127.0.0.1", "10.0.0.5", False), ("::", "127.0.0.1", False), ("0.0.0.0", "::1", False)],
)  # fmt: skip
def test_addresses_that_take_each_others_ports(host: FakeHost, one: str, other: str, clash: bool) -> None:
    plans = [plan(host.tmp, **{**ONE, "host": one}), plan(host.tmp, **{**TWO, "host": other, "port": 8080})]
    if clash:
        with pytest.raises(Refusal, match=r"would both use the address .*:8080; give each its own \(port\)"):
            work.check_plans(plans)
    else:
        work.check_plans(plans)


def test_what_no_plan_names_is_named_and_left(host: FakeHost) -> None:
    start(host, ONE, TWO)
    box = host.boxes["podman"][TWO["instance"]]
    host.calls.clear()
    done = start(host, ONE)
    assert (done.changed, done.unlisted) == (False, [TWO["instance"]])
    assert host.boxes["podman"][TWO["instance"]] is box
    assert len(host.calls) == 3, "it costs no child process"


def test_one_that_was_stopped_for_good_is_not_named(host: FakeHost) -> None:
    start(host, ONE, TWO)
    work.stop({TWO["instance"]: TWO["instance"]}, host.tools(), host.installed)
    assert start(host, ONE).unlisted == []


def test_exclusive_removes_what_no_plan_names(host: FakeHost) -> None:
    start(host, ONE, TWO)
    box = host.boxes["podman"][ONE["instance"]]
    foretold = start(host, ONE, exclusive=True, check_mode=True)
    assert names(host) == {ONE["instance"], TWO["instance"]}
    done = start(host, ONE, exclusive=True)
    assert done.changed
    assert done.actions == foretold.actions
    assert done.actions == [
        f"{TWO['instance']}: stop it (podman)",
        f"{TWO['instance']}: no longer start it at boot",
        f"{TWO['instance']}: remove {host.where.document(TWO['instance'])}",
    ]
    assert done.unlisted == [TWO["instance"]]
    assert [s["instance"] for s in done.servers] == [ONE["instance"]]
    assert host.boxes["podman"] == {ONE["instance"]: box}
    again = start(host, ONE, exclusive=True)
    assert (again.changed, again.unlisted) == (False, [])


def test_exclusive_gives_the_port_and_the_card_to_a_new_name(host: FakeHost) -> None:
    """`gpu: 0` made into `gpu: each`: the same server under a longer name."""
    start(host, ONE)
    renamed = {**ONE, "instance": f"{ONE['instance']}-aaaaaaaa"}
    with pytest.raises(
        Refusal, match=f"cannot use port 8080 .*{ONE['instance']}, a server of this collection in podman"
    ):
        start(host, renamed)
    assert names(host) == {ONE["instance"]}
    assert start(host, renamed, exclusive=True).failure is None
    assert names(host) == {renamed["instance"]}


def test_exclusive_with_an_empty_list_leaves_nothing(host: FakeHost) -> None:
    start(host, ONE, TWO)
    foretold = start(host, exclusive=True, check_mode=True)
    done = start(host, exclusive=True)
    assert done.actions == foretold.actions
    assert sorted(done.unlisted) == [ONE["instance"], TWO["instance"]]
    assert not names(host)
    assert not pathlib.Path(host.where.unit).exists()
    assert not pathlib.Path(host.where.instances).exists()
    assert not start(host, exclusive=True).changed


@pytest.mark.parametrize("runtime", ["podman", "docker"])
def test_exclusive_takes_no_strangers_container(host: FakeHost, runtime: str) -> None:
    start(host, ONE, TWO)
    work.stop({TWO["instance"]: TWO["instance"]}, host.tools(), host.installed)
    host.boxes[runtime][TWO["instance"]] = Box(TWO["instance"], ["--rm"])
    start(host, ONE, exclusive=True)
    assert TWO["instance"] in names(host, runtime)
    assert not pathlib.Path(host.where.document(TWO["instance"])).exists()


def test_the_ports_holder_is_named(host: FakeHost) -> None:
    host.boxes["docker"]["web"] = Box("web", ["-p", "127.0.0.1:8080:8080"])
    with pytest.raises(
        Refusal, match=r"cannot use port 8080 on 127.0.0.1: address already in use \(.*web, a container in"
    ):
        start(host, ONE)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_takes_no_file_stops_no_server(host: FakeHost, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    start(host, ONE, TWO)
    boxes = dict(host.boxes["podman"])

    def refuse(_descriptor: int) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr(files.os, "fsync", refuse)
    host.calls.clear()
    with pytest.raises(OSError, match="no"):
        start(host, {**ONE, "context": 1}, {**TWO, "context": 1})
    assert host.boxes["podman"] == boxes
    assert not host.changes()
    assert not list(host.tmp.rglob(f"*{files.PARTIAL}"))


def test_a_command_that_fails_after_the_stop_brings_the_server_back(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(host, ONE)
    pathlib.Path(host.where.enabled_link(ONE["instance"])).unlink()
    run = host.run

    def no_enable(argv: Any) -> tuple[int, str, str]:
        return (1, "", "Failed to enable unit: nope") if "enable" in argv else run(argv)

    monkeypatch.setattr(host, "run", no_enable)
    done = start(host, {**ONE, "context": 1})
    assert done.failure is not None
    assert "Failed to enable unit: nope" in done.failure
    assert "the earlier server is back at http://127.0.0.1:8080" in done.failure
    assert host.boxes["podman"][ONE["instance"]].argv[-1] == "4096"
