# SPDX-License-Identifier: Apache-2.0
"""What an administrator did by hand to a unit, a container or a port, and the words for it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_check as check
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_module as work
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.module_utils._runtime import Runtime
from ansible_collections.tensorless.fleet.plugins.module_utils._server_apply import Failed

from tests.unit.server.fakes import Behaviour, FakeHost, plan

NAME = "tensorless-org-model"
UNIT = f"tensorless@{NAME}.service"


def start(host: FakeHost, **changes: Any) -> work.Outcome:
    return work.start([plan(host.tmp, **changes)], host.tools(), host.installed)


@pytest.mark.parametrize("runs", [False, True])
def test_a_masked_unit_is_refused_before_anything_stops(host: FakeHost, runs: bool) -> None:
    if runs:
        start(host)
    boxes = dict(host.boxes["podman"])
    host.units.setdefault(UNIT, {})["LoadState"] = "masked"
    with pytest.raises(Refusal, match=f"{UNIT} is masked, so it cannot be started; allow it: systemctl unmask {UNIT}"):
        start(host, context=1)
    assert host.boxes["podman"] == boxes


def test_a_unit_of_its_own_is_reported(host: FakeHost) -> None:
    """`systemctl edit --full` writes a file that hides the template."""
    start(host)
    own = f"{host.where.unit_dir}/{UNIT}"
    host.units[UNIT]["FragmentPath"] = own
    done = start(host)
    assert not done.changed
    assert any(f"{own} takes the place of {host.where.unit}" in text for text in done.warnings)
    host.units[UNIT]["FragmentPath"] = host.where.unit
    assert start(host).warnings == []


def test_what_a_distribution_ships_for_every_service_is_no_news(host: FakeHost) -> None:
    start(host)
    own = f"{host.where.unit_dir}/tensorless@.service.d/override.conf"
    host.units[UNIT]["DropInPaths"] = f"/usr/lib/systemd/system/service.d/10-timeout-abort.conf {own}"
    warnings = start(host).warnings
    assert len(warnings) == 1
    assert warnings[0].startswith(own)


@pytest.mark.parametrize("changed", [False, True])
def test_a_paused_server_is_resumed(host: FakeHost, changed: bool) -> None:
    start(host)
    box = host.boxes["podman"][NAME]
    box.paused = True
    changes = {"context": 1} if changed else {}
    foretold = work.start([plan(host.tmp, **changes)], host.tools(), host.installed, check_mode=True)
    done = start(host, **changes)
    assert done.actions == foretold.actions
    assert done.actions[0] == f"{NAME}: resume {NAME}, which is paused (podman)"
    assert len(done.actions) == (4 if changed else 1)
    assert (host.boxes["podman"][NAME] is box) != changed
    assert not start(host, **changes).changed


def test_a_paused_server_can_be_stopped(host: FakeHost) -> None:
    start(host)
    host.boxes["podman"][NAME].paused = True
    done = work.stop({NAME: NAME}, host.tools(), host.installed)
    assert done.servers[0]["message"] == f"stopped {NAME}"
    assert ["podman", "unpause", NAME] in host.calls


def test_a_server_that_does_not_answer_is_told_and_left(host: FakeHost) -> None:
    """It runs its plan and this run did not start it; nothing says that it was stopped."""
    start(host)
    box = host.boxes["podman"][NAME]
    host.behaviour = lambda _argv: Behaviour(healthy_after=None)
    done = start(host)
    assert done.failure is not None
    assert "was not ready after 20m (HTTP 503); it was left as it is; start it anew: systemctl restart" in done.failure
    assert "stopped" not in done.failure
    assert host.boxes["podman"][NAME] is box


def test_a_killed_start_names_memory() -> None:
    killed = Failed(NAME, "the server exited before it was ready (exit-code, exit status 137)", [])
    assert "as the kernel does when memory (or the limit set in hardening) runs out" in killed.text()
    killed = Failed(NAME, "the server exited before it was ready (exit-code, exit status 1)", [])
    assert "kernel" not in killed.text()


@contextlib.contextmanager
def listener(family: int, address: str, only_6: bool = True) -> Iterator[int]:
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as sock:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(only_6))
        try:
            sock.bind((address, 0))
        except OSError as exc:
            pytest.skip(f"this machine does not give {address}: {exc}")
        sock.listen(1)
        yield int(sock.getsockname()[1])


@pytest.mark.parametrize(
    ("family", "address", "only_6", "host"),
    [
        (socket.AF_INET, "127.0.0.1", True, "127.0.0.1"),
        (socket.AF_INET, "127.0.0.1", True, "0.0.0.0"),
        (socket.AF_INET, "0.0.0.0", True, "127.0.0.1"),
        (socket.AF_INET6, "::1", True, "::1"),
        (socket.AF_INET6, "::1", True, "::"),
        (socket.AF_INET6, "::", True, "::1"),
        (socket.AF_INET6, "::", False, "127.0.0.1"),
        (socket.AF_INET6, "::ffff:127.0.0.1", False, "127.0.0.1"),
    ],
)
def test_who_holds_a_port(family: int, address: str, only_6: bool, host: str) -> None:
    with listener(family, address, only_6) as port:
        taken = check.port_taken(host, port)
        assert taken is not None
        assert f"(pid {os.getpid()}, " in taken


def test_a_listener_on_another_address_is_not_named() -> None:
    with listener(socket.AF_INET, "127.0.0.2") as port:
        assert check._process_on("127.0.0.1", port) == ""
        assert check._process_on("127.0.0.2", port) != ""


def test_an_ipv6_listener_alone_does_not_hold_the_ipv4_port() -> None:
    with listener(socket.AF_INET6, "::", only_6=True) as port:
        assert check.port_taken("127.0.0.1", port) is None


@pytest.mark.parametrize(
    ("ports", "found"),
    [
        ("127.0.0.1:8080->8080/tcp", True),
        ("0.0.0.0:8080->80/tcp, :::8080->80/tcp", True),
        ("0.0.0.0:8079-8082->8079-8082/tcp", True),
        ("0.0.0.0:18080->8080/tcp", False),
        ("8080/tcp", False),
        ("", False),
    ],
)
def test_which_container_publishes_a_port(ports: str, found: bool) -> None:
    runtime = Runtime("docker", lambda _argv: (0, f"other\t\nweb\t{ports}\n", ""))
    assert runtime.publishing(8080) == (["web"] if found else [])
