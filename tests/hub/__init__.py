# SPDX-License-Identifier: Apache-2.0
"""A Hub and its CDN for tests: real answers on the wire, and faults on request."""

from __future__ import annotations

from tests.hub.records import Fault, Request, fetched_twice
from tests.hub.server import FakeHub

__all__ = ["FakeHub", "Fault", "Request", "fetched_twice"]
