# SPDX-License-Identifier: Apache-2.0
"""Progress of a long module run: the file that a module keeps on its host, and the words for people.

A report is a dict: stage ("download", "verify", "load", "wait", ...), file (what is worked on), bytes, size (both 0
where there is nothing to count), rate (bytes a second), seconds_left, note (words instead of figures).

Private to the collection; may change at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._blob import giga

_VERBS = {"download": "downloading", "verify": "verifying", "wait": "waiting for", "load": "loading"}


def duration(seconds: float) -> str:
    """Seconds for people."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _share(report: Mapping[str, Any]) -> float:
    size = report.get("size") or 0
    return float(report.get("bytes") or 0) / size if size else 0.0


def words(report: Mapping[str, Any]) -> str:
    """One host's progress, without its name."""
    verb = _VERBS.get(str(report.get("stage")), "working on")
    begin = f"{verb} {report.get('file')}"
    if report.get("note"):
        return f"{begin} ({report['note']})"
    have, size = int(report.get("bytes") or 0), int(report.get("size") or 0)
    text = f"{begin} {100 * _share(report):.0f} % ({giga(have)} of {giga(size)})" if size else begin
    if report.get("rate"):
        text += f", {report['rate'] / 1e6:.1f} MB/s"
    if report.get("seconds_left") is not None:
        text += f", {duration(report['seconds_left'])} left"
    return text


def line(report: Mapping[str, Any]) -> str:
    """One host's progress as it is printed."""
    return f"tensorless: [{report.get('host')}] {words(report)}"


def summary(reports: Sequence[Mapping[str, Any]]) -> str:
    """Many hosts in one line: how far all are, and which one is last."""
    counted = [r for r in reports if r.get("size")]
    have = sum(int(r.get("bytes") or 0) for r in counted)
    size = sum(int(r["size"]) for r in counted)
    rate = sum(float(r.get("rate") or 0) for r in reports)
    last = min(counted or reports, key=_share)
    text = f"tensorless: [{len(reports)} hosts] "
    if size:
        text += f"{100 * have / size:.0f} % ({giga(have)} of {giga(size)}), {rate / 1e6:.1f} MB/s together; "
    return f"{text}last is {last.get('host')}, {words(last)}"


def progress_writer(path: Optional[str]) -> tuple[Callable[[dict[str, Any]], None], Callable[[], None]]:
    """A function that keeps the latest report in PATH, a file made new for this run, and one that removes it."""
    state: dict[str, int] = {}

    def write(report: dict[str, Any]) -> None:
        if path is None:
            return
        with contextlib.suppress(OSError):
            if "fd" not in state:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                state["fd"] = os.open(path, flags, 0o644)
                os.fchmod(state["fd"], 0o644)
            # One write of constant length: a reader never sees half of two reports.
            os.pwrite(state["fd"], json.dumps(report).encode().ljust(600)[:600], 0)

    def close() -> None:
        if "fd" in state and path is not None:
            os.close(state.pop("fd"))
            with contextlib.suppress(OSError):
                os.unlink(path)

    return write, close
