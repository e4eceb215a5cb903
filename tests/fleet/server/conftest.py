# SPDX-License-Identifier: Apache-2.0
"""Hosts for the tests of the servers. CI uses one host with podman 4.3 and docker 20.10; soak adds Debian 13's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.fleet.server.rig import Rig, cgroups, prepare

SUITES = {"bookworm": ("srv-bookworm", "10.213.23.11"), "trixie": ("srv-trixie", "10.213.24.11")}
CASES = [
    pytest.param(("bookworm", "podman"), id="podman-4.3"),
    pytest.param(("bookworm", "docker"), id="docker-20.10"),
    pytest.param(("trixie", "podman"), id="podman-5.4", marks=pytest.mark.soak),
    pytest.param(("trixie", "docker"), id="docker-26.1", marks=pytest.mark.soak),
]
_READY: dict[str, Rig] = {}


def _rig(suite: str) -> Rig:
    if suite not in _READY:
        name, ip = SUITES[suite]
        _READY[suite] = prepare(os.environ.get("TENSORLESS_TEST_HOST", name), suite, ip, ["podman", "docker"])
        print(f"{name}: the hosts of this run are {cgroups(_READY[suite])}")
    return _READY[suite]


@pytest.fixture(scope="module", params=CASES)
def prepared(request: pytest.FixtureRequest) -> Rig:
    suite, runtime = request.param
    return Rig(_rig(suite).host, runtime)


@pytest.fixture
def rig(prepared: Rig) -> Rig:
    """A prepared host without servers."""
    prepared.clean()
    return prepared


@pytest.fixture(scope="session", autouse=True)
def _hosts_gone() -> Iterator[None]:
    yield
    if not os.environ.get("TENSORLESS_TEST_KEEP"):
        for ready in _READY.values():
            ready.host.remove()
