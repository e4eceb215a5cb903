# SPDX-License-Identifier: Apache-2.0
"""The terms of a download: its limits, its parts and which comes next, what is told about it.

Private to the collection; may change at any time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection
from typing import NamedTuple, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._blob_state import Ranges
from ansible_collections.tensorless.fleet.plugins.module_utils._hub_http import Answer

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

    def pause(self, failures: int) -> float:
        """Seconds before the next try, after so many failures without a new byte."""
        return min(self.backoff_max, self.backoff * 2.0 ** (failures - 1))


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


def free_part(
    done: Ranges, active: Collection[Part], size: int, piece: Optional[tuple[int, int, int]]
) -> Optional[Part]:
    """The lowest span that nobody has or fetches. PIECE is (least, most, connections); without it the whole gap.

    Large pieces at first, small ones towards the end, so that all connections finish at about the same time.
    """
    taken = Ranges(done.spans())
    for part in active:
        taken.add(part.position, part.end)
    gaps = taken.gaps(size)
    if not gaps:
        return None
    start, end = gaps[0]
    if piece is not None:
        least, most, connections = piece
        fair = sum(b - a for a, b in gaps) // (4 * connections)
        length = min(most, max(least, fair)) & ~0xFFFF
        end = min(end, start + max(length, 1 << 16))
    return Part(start, end, time.monotonic())


def half_of_slowest(active: Collection[Part]) -> Optional[Part]:
    """Half of what the part with the most before it still has to fetch, taken away from it."""
    now = time.monotonic()
    slowest = max(active, key=lambda p: p.end - p.position, default=None)
    if slowest is None or now - slowest.opened < 2.0:
        return None
    left = slowest.end - slowest.position
    if left < 2 * (1 << 20):
        return None
    middle = slowest.position + left // 2
    part = Part(middle, slowest.end, now)
    slowest.end = middle
    return part


class Pace:
    """Silence and drips, of single parts and of the whole. Called with the download's lock held."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._alive = time.monotonic()
        self._marks: list[tuple[float, int]] = []

    def alive(self, until: float) -> None:
        """Bytes have come, or will come at the server's own word."""
        self._alive = max(self._alive, until)

    def check(self, active: Collection[Part], fetched: int) -> Optional[str]:
        """Has slow parts opened anew; returns why the whole has to stop, if it has to."""
        limits, now = self._limits, time.monotonic()
        rates = [r for r in (p.rate(now, 10.0) for p in active) if r is not None]
        usual = statistics.median(rates) if len(rates) >= 3 else 0.0
        for part in active:
            part.marks = [m for m in part.marks if m[0] > now - 2 * limits.window][-1000:]
            drip = part.rate(now, limits.window)
            recent = part.rate(now, 10.0)
            left = part.end - part.position
            late = recent is not None and recent < usual / 8 and left > 15 * recent and part.reopened < 3
            if (drip is not None and drip < limits.floor) or late:
                part.slow = True
                part.marks = [(now, part.position)]
                if part.answer is not None:
                    part.answer.abort()
        if now - self._alive > limits.silence:
            return f"nothing received for {limits.silence:.0f} seconds"
        if not self._marks or now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, fetched))
        while len(self._marks) > 1 and self._marks[1][0] <= now - limits.window:
            self._marks.pop(0)
        began, before = self._marks[0]
        if now - began >= limits.window and self._alive <= now:
            rate = (fetched - before) / (now - began)
            if rate < limits.floor:
                return (
                    f"only {rate / 1000:.1f} kB/s over {limits.window:.0f} seconds (less than "
                    f"{limits.floor / 1000:.0f} kB/s counts as stalled)"
                )
        return None
