# SPDX-License-Identifier: Apache-2.0
"""Hosts for the tests of the servers. CI uses one host with podman 4.3 and docker 20.10; soak adds Debian 13's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.fleet.server.rig import Rig, cgroups, prepare, prepare_rootless

SUITES = {"bookworm": ("srv-bookworm", "10.213.23.11"), "trixie": ("srv-trixie", "10.213.24.11")}
CASES = [
    pytest.param(("bookworm", "podman"), id="podman-4.3"),
    pytest.param(("bookworm", "docker"), id="docker-20.10"),
    pytest.param(("trixie", "podman"), id="podman-5.4", marks=pytest.mark.soak),
    pytest.param(("trixie", "docker"), id="docker-26.1", marks=pytest.mark.soak),
]
# What does not depend on the runtime: CI tries it with podman, soak with both.
ONE_RUNTIME = (
    "test_crash_loop_ends", "test_disk_full_while_writing", "test_image_or_model_gone", "test_drop_in_is_reported",
    "test_port_in_use", "test_one_changed_option", "test_each_card_has_its_server", "test_a_full_card_is_refused",
    "test_a_running_stranger_is_refused", "test_one_task_beside_seven",
)  # fmt: skip
_READY: dict[str, Rig] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name.startswith(tuple(f"{name}[docker" for name in ONE_RUNTIME)):
            item.add_marker(pytest.mark.soak)


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


@pytest.fixture
def rootless() -> Iterator[Rig]:
    """An ordinary account of Debian 13, without servers."""
    found = prepare_rootless(_rig("trixie"))
    found.clean()
    Rig(found.host, "podman").clean()
    yield found
    found.clean()


@pytest.fixture(scope="session", autouse=True)
def _hosts_gone() -> Iterator[None]:
    yield
    if not os.environ.get("TENSORLESS_TEST_KEEP"):
        for ready in _READY.values():
            ready.host.remove()
