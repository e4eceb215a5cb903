# SPDX-License-Identifier: Apache-2.0
"""What the Hub for tests serves, what it notes of each request, and how it can be told to misbehave."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path


@dataclasses.dataclass
class HubFile:
    """One file at one revision. Content is bytes or a path (big files)."""

    repo: str
    revision: str
    name: str
    content: bytes | Path
    sha256: str
    size: int
    lfs: bool = True

    @property
    def xet(self) -> str:
        """What the CDN calls the file: 64 hex digits that are not its sha256."""
        return hashlib.sha256(b"xet:" + self.sha256.encode()).hexdigest()

    @property
    def git_oid(self) -> str:
        return hashlib.sha1(b"blob:" + self.sha256.encode()).hexdigest()

    def read(self, start: int, length: int) -> bytes:
        if isinstance(self.content, bytes):
            return self.content[start : start + length]
        with self.content.open("rb") as stream:
            stream.seek(start)
            return stream.read(length)


@dataclasses.dataclass
class Request:
    """What came in, and what went out for it."""

    number: int
    where: str  # "hub" or "cdn"
    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]
    time: float
    connection: int
    status: int = 0
    start: int = 0  # first byte of the file in the answer's body
    sent: int = 0  # bytes of the body handed to the kernel
    file: str = ""
    finished: bool = False

    def header(self, name: str) -> str | None:
        found = [v for k, v in self.headers if k.lower() == name.lower()]
        return found[0] if found else None

    @property
    def range(self) -> str | None:
        return self.header("Range")


@dataclasses.dataclass
class Fault:
    """A deviation from the ordinary answer. The first one whose `when` holds is applied, at most `times` times."""

    where: str = "cdn"
    when: Callable[[Request], bool] | None = None
    times: int | None = None
    status: int | None = None  # answer this status with `body` instead of the file
    headers: dict[str, str | None] = dataclasses.field(default_factory=dict)  # added; None takes one away
    body: bytes = b""
    raw: bytes | None = None  # exactly these bytes, then close
    delay: float = 0.0  # seconds before the answer
    ignore_range: bool = False
    cut_after: int | None = None  # close after so many bytes of the body
    cut_at: int | None = None  # close at this position of the file: nothing beyond it ever arrives
    stall_after: int | None = None  # go silent after so many bytes of the body
    stall_at: int | None = None  # the same by position in the file
    stall_seconds: float = 3600.0
    rate: float | None = None  # bytes a second
    flip_at: int | None = None  # one bit wrong at this position of the file
    content: bytes | None = None  # other bytes than those of the file
    location: str | None = None  # where the Hub redirects to
    reset: bool = False  # end with RST rather than FIN


def fetched_twice(log: Iterable[Request], size: int) -> int:
    """How many bytes of a file the CDN sent beyond once each (spans counted from the log)."""
    total = 0
    edges: list[tuple[int, int]] = []
    for entry in log:
        if entry.sent > 0 and entry.method == "GET" and entry.status in (200, 206):
            total += entry.sent
            edges.append((entry.start, min(entry.start + entry.sent, size)))
    covered = 0
    reach = 0
    for start, end in sorted(edges):
        covered += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total - covered
