# SPDX-License-Identifier: Apache-2.0
"""A host in memory, with both runtimes and two engine images."""

from __future__ import annotations

import pathlib

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_check, _server_health

from tests.unit.server.fakes import FakeHost, plan


@pytest.fixture
def host(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    made = FakeHost(tmp_path, ("podman", "docker"))
    plan(tmp_path)  # its model file is there
    for images in made.images.values():
        images |= {"image@sha256:1", "image@sha256:2"}
    monkeypatch.setattr(_server_check.port_taken, "__defaults__", (made.bind,))
    monkeypatch.setattr(_server_health, "properties", lambda *_a: None)
    monkeypatch.setattr(_server_health, "busy_slots", lambda *_a, **_k: made.busy)
    return made
