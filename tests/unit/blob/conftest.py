# SPDX-License-Identifier: Apache-2.0
"""A Hub, and a file on it with a cache to fetch it into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub import FakeHub
from tests.hub.jobs import Bench, noise


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as server:
        yield server


@pytest.fixture
def bench(hub: FakeHub, tmp_path: Path) -> Bench:
    return Bench(hub, tmp_path, noise(700_000))
