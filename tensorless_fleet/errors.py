# SPDX-License-Identifier: Apache-2.0
"""The errors that tensorless_fleet raises. Each message is one line that says what was found and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorless_fleet.results import Result

__all__ = [
    "CollectionConflict",
    "HostsFailed",
    "Interrupted",
    "InventoryError",
    "PlayError",
    "TensorlessError",
    "UsageError",
]


class TensorlessError(Exception):
    """The base of all errors of this package."""


class UsageError(TensorlessError):
    """A value was refused before anything was touched."""


class InventoryError(UsageError):
    """The inventory cannot be read, or the pattern leads to no host."""


class CollectionConflict(TensorlessError):
    """Another version of the collection would be used instead of the one that belongs to this package."""


class PlayError(TensorlessError):
    """Ansible ended without reaching any host: a configuration, syntax or installation fault."""


class HostsFailed(TensorlessError):
    """Work ended with at least one host failed or unreachable. ``result`` holds every host, failed and not."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result

    @property
    def reasons(self) -> dict[str, str]:
        """Host to reason, for the hosts that failed or were unreachable."""
        return {host.host: host.reason or host.state for host in self.result.hosts.values() if not host.ok}


class Interrupted(TensorlessError):
    """The work was cancelled. ``result`` says in which state each host was left; the next run repairs."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result
