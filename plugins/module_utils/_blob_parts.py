# SPDX-License-Identifier: Apache-2.0
"""The terms of a download: its limits, its parts, what is told about it, and what can be wrong with an answer.

Private to the collection; may change at any time.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._hub_http import Answer, TransportError

BLOCK = 1 << 20


class Limits(NamedTuple):
    """Numbers that govern a download; seconds, bytes and bytes a second."""

    connections: int = 8
    piece_max: int = 32 << 20
    piece_min: int = 4 << 20
    retries: int = 8  # of one part without a new byte
    backoff: float = 0.5
    backoff_max: float = 30.0
    wait_max: float = 600.0  # the longest pause that a server may ask for
    part_silence: float = 30.0
    silence: float = 120.0
    floor: int = 64 << 10
    window: float = 120.0
    sync_every: float = 2.0
    tick: float = 0.25


class Status(NamedTuple):
    """A moment of the download, for those who watch."""

    have: int
    size: int
    hashed: int
    fetched: int
    connections: int


class Outcome(NamedTuple):
    """What came of it. The bytes are synced; `sha256` is what they hash to."""

    sha256: str
    fetched: int
    parts: int
    restarts: int
    host: str


class Part:
    """A span that one worker is fetching. `end` may shrink when another worker takes the rest over."""

    def __init__(self, start: int, end: int, now: float) -> None:
        self.start = start
        self.position = start
        self.end = end
        self.answer: Optional[Answer] = None
        self.failures = 0
        self.bad = 0
        self.refused = 0
        self.reopened = 0
        self.slow = False
        self.dropped = False
        self.opened = now
        self.marks: list[tuple[float, int]] = [(now, start)]

    def rate(self, now: float, seconds: float) -> Optional[float]:
        """Bytes a second over the last SECONDS; None while the connection is younger than that."""
        old = [m for m in self.marks if m[0] <= now - seconds]
        if not old:
            return None
        return (self.position - old[-1][1]) / (now - old[-1][0])


class BadAnswer(TransportError):
    """An answer that is not the range that was asked for."""


class NoRanges(Exception):
    """The server does not serve ranges; `never` when not even one from the middle can be trusted."""

    def __init__(self, never: bool = False) -> None:
        super().__init__()
        self.never = never
