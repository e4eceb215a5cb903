# SPDX-License-Identifier: Apache-2.0
"""Servers of an ordinary user: the user's service manager, which runs without a login once linger is on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_files as files
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_module as work
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.server.fakes import FakeHost, plan


@pytest.fixture
def user(host: FakeHost) -> FakeHost:
    host.where = dataclasses.replace(host.where, scope="user", target="default.target", linger=str(host.tmp / "linger"))
    return host


def test_linger_comes_first(user: FakeHost) -> None:
    begun = user.run

    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        lingers = (user.tmp / "linger").exists()
        if argv[0] == "loginctl":
            (user.tmp / "linger").touch()
            return 0, "", ""
        if argv[0] == "systemctl" and not lingers:
            return 1, "", "Failed to connect to bus: No such file or directory"
        return (0, "", "") if "show-environment" in argv else begun(argv)

    tools = dataclasses.replace(user.tools(user="ops"), run=run)
    done = work.start([plan(user.tmp)], tools, user.installed)
    assert done.failure is None
    assert "loginctl enable-linger, so that servers run without a login" in done.actions
    assert not work.start([plan(user.tmp)], tools, user.installed).changed
    assert all(call[1] == "--user" for call in user.calls if call[0] == "systemctl")


def test_linger_refused(user: FakeHost) -> None:
    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        return (1, "", "Access denied") if argv[0] == "loginctl" else user.run(argv)

    tools: Any = dataclasses.replace(user.tools(user="ops"), run=run)
    with pytest.raises(Refusal, match="as root run: loginctl enable-linger ops"):
        work.start([plan(user.tmp)], tools, user.installed)


def test_places_of_a_user() -> None:
    where = files.places("user", "/home/ops", "ops")
    assert where.unit == "/home/ops/.config/systemd/user/tensorless@.service"
    assert "WantedBy=default.target" in where.unit_text()
    assert "/home/ops/.local/lib/tensorless/launch start" in where.unit_text()
