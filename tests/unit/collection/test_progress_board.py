# SPDX-License-Identifier: Apache-2.0
"""What a run prints of its hosts' progress: each line once, again only after a while, and not from every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible import constants
from ansible_collections.tensorless.fleet.plugins.plugin_utils import _progress


def report(host: str, note: str) -> dict[str, Any]:
    return {"host": host, "stage": "measure", "file": "the measurement", "bytes": 0, "size": 0, "note": note}


def test_a_line_is_printed_once_and_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DEFAULT_LOCAL_TMP", str(tmp_path))
    now = [1000.0]
    monkeypatch.setattr(_progress.time, "time", lambda: now[0])
    monkeypatch.setattr(_progress, "STALE", 1e12)  # the files' own times are today's
    a, b = _progress._Board("a"), _progress._Board("b")
    assert len(a.post(report("a", "run 1"))) == 1
    assert b.post(report("b", "run 1")) == [], "another process has just printed"
    now[0] += _progress.EVERY
    assert [text.split("]")[0] for text in b.post(report("b", "run 1"))] == ["tensorless: [b"]
    now[0] += _progress.EVERY
    assert a.post(report("a", "run 1")) == []
    now[0] += _progress.EVERY
    assert [("run 2" in text) for text in a.post(report("a", "run 2"))] == [True]
    now[0] += _progress.AGAIN + 1
    assert len(a.post(report("a", "run 2"))) == 2
