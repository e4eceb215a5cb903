# SPDX-License-Identifier: Apache-2.0
"""The orchestrator of the Ansible collection ``tensorless.fleet``.

Public: ``Fleet``, ``AsyncFleet``, ``Run``, everything in ``tensorless_fleet.results`` and ``tensorless_fleet.errors``.
Modules whose names begin with an underscore may change at any time. Nothing is imported before it is used, so that
``import tensorless_fleet`` is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tensorless_fleet.errors import (
        CollectionConflict,
        HostsFailed,
        Interrupted,
        InventoryError,
        PlayError,
        TensorlessError,
        UsageError,
    )
    from tensorless_fleet.fleet import AsyncFleet, Fleet, Run, ServerOptions
    from tensorless_fleet.results import Bench, Card, Check, Event, HostResult, Result, Server

_HOMES = {
    "errors": (
        "CollectionConflict", "HostsFailed", "Interrupted", "InventoryError", "PlayError", "TensorlessError",
        "UsageError",
    ),
    "fleet": ("AsyncFleet", "Fleet", "Run", "ServerOptions"),
    "results": ("Bench", "Card", "Check", "Event", "HostResult", "Result", "Server"),
}  # fmt: skip
__all__ = [
    "AsyncFleet", "Bench", "Card", "Check", "CollectionConflict", "Event", "Fleet", "HostResult", "HostsFailed",
    "Interrupted", "InventoryError", "PlayError", "Result", "Run", "Server", "ServerOptions", "TensorlessError",
    "UsageError", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            import importlib

            return getattr(importlib.import_module(f"tensorless_fleet.{module}"), name)
    raise AttributeError(f"module 'tensorless_fleet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
