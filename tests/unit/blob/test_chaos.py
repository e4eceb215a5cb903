# SPDX-License-Identifier: Apache-2.0
"""Faults drawn at random, several at once, upon a partial file drawn at random: the file ends right or is not there."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_state import Ranges

from tests.hub import FakeHub
from tests.hub.jobs import PARTS, QUICK, Bench, noise

SIZE = 400_000


def drawn_fault(chance: random.Random) -> dict[str, Any]:
    """One deviation of the Hub or of the content server."""
    at = chance.randrange(SIZE)
    garbage = bytes(chance.randrange(256) for _n in range(chance.randrange(1, 200)))
    menu: list[dict[str, Any]] = [
        {"ignore_range": True},
        {"cut_after": at},
        {"cut_at": at, "times": chance.randrange(1, 4)},
        {"cut_after": chance.randrange(3000), "reset": True},
        {"stall_after": at, "stall_seconds": 30.0, "times": 1},
        {"status": chance.choice([400, 401, 403, 404, 410, 416, 429, 500, 503, 520])},
        {"status": 503, "headers": {"Retry-After": chance.choice(["0", "1", "soon", "Sun, 06 Nov 1994 08:49:37 GMT"])}},
        {"status": 416, "headers": {"Content-Range": chance.choice([f"bytes */{SIZE}", "bytes */*", "x"])}},
        {"headers": {"Content-Range": f"bytes {at}-{min(SIZE, at + 9)}/{SIZE}"}},
        {"headers": {"Content-Range": None}},
        {"headers": {"Content-Length": None}},
        {"headers": {"Content-Length": str(at)}},
        {"headers": {"Content-Encoding": chance.choice(["gzip", "identity", "br"])}},
        {"headers": {"Transfer-Encoding": "chunked", "Content-Length": None}},
        {"headers": {"ETag": '"' + "d" * 64 + '"'}},
        {"headers": {"Content-Type": "text/html"}},
        {"flip_at": at},
        {"content": noise(SIZE, 99)},
        {"content": noise(SIZE // 2, 1)},
        {"content": b"<html>" + bytes(SIZE)},
        {"raw": garbage},
        {"raw": b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-9/400000\r\n\r\n" + garbage},
        {"raw": b""},
        {"where": "hub", "status": chance.choice([401, 404, 429, 500, 504])},
        {"where": "hub", "headers": {"Location": chance.choice([None, "/", "http://[", "http://127.0.0.1:9/x", "%"])}},
        {"where": "hub", "headers": {"X-Linked-Size": chance.choice([None, "x", "0", str(at)])}},
        {"where": "hub", "headers": {"X-Linked-ETag": chance.choice([None, '""', 'W/"x"', '"' + "0" * 64 + '"'])}},
        {"where": "hub", "raw": garbage},
    ]  # fmt: skip
    fault = chance.choice(menu)
    fault.setdefault("times", chance.choice([1, 1, 2, 3, 8, None]))
    if fault.get("where") != "hub" and chance.random() < 0.3:
        fault["when"] = lambda request: request.range is not None
    return fault


def leave(bench: Bench, chance: random.Random) -> None:
    """What an earlier run, another tool, or an accident may have left."""
    kind = chance.choice(["nothing", "nothing", "prefix", "noted", "noted", "holes", "junk", "longer", "sidecar only"])
    if kind == "nothing":
        return
    bench.partial.parent.mkdir(parents=True)
    if kind == "prefix":
        bench.partial.write_bytes(bench.data[: chance.randrange(SIZE + 1)])
    elif kind == "longer":
        bench.partial.write_bytes(bench.data + b"more")
    elif kind == "junk":
        bench.partial.write_bytes(bytes(chance.randrange(1, SIZE)))
    else:
        cuts = sorted(chance.randrange(SIZE + 1) for _n in range(6))
        done = Ranges(zip(cuts[::2], cuts[1::2]))
        if kind != "sidecar only":
            with bench.partial.open("wb") as stream:
                for start, end in done.spans():
                    os.pwrite(stream.fileno(), bench.data[start:end], start)
                if kind == "holes":
                    stream.truncate(chance.randrange(SIZE))
        value = {"version": 1, "sha256": bench.sha, "size": SIZE, "done": done.spans()}
        bench.sidecar.write_text(json.dumps(value))


def once(folder: Path, seed: int) -> str:
    """One drawn case; returns what the first run said."""
    chance = random.Random(seed)
    with FakeHub() as hub:
        bench = Bench(hub, folder, noise(SIZE))
        leave(bench, chance)
        for _n in range(chance.randrange(1, 4)):
            hub.fault(**drawn_fault(chance))
        limits = chance.choice([PARTS, QUICK])._replace(
            retries=3, silence=1.5, part_silence=0.3, window=1.0, floor=1000, wait_max=2.0
        )
        said = "right"
        try:
            bench.run(limits, repair=chance.random() < 0.3)
        except BlobError as error:
            said = error.reason
            assert not bench.blob.exists()
            assert not os.path.lexists(bench.snapshot)
            assert "\n" not in str(error)
        else:
            assert bench.right()
        assert not Path(str(bench.partial) + ".lock").exists()
        hub.faults.clear()
        try:
            bench.run(limits)
        except BlobError as error:
            # As documented: a partial file without notes whose bytes are wrong is deleted, and the run has failed.
            assert error.reason == "sha256_mismatch"
            bench.run(limits)
        assert bench.right()
        return said


@pytest.mark.parametrize("seed", range(24))
def test_drawn_faults(tmp_path: Path, seed: int) -> None:
    once(tmp_path, seed)


@pytest.mark.soak
def test_soak_drawn_faults(tmp_path: Path) -> None:
    said: dict[str, int] = {}
    for seed in range(1000, 3000):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            what = once(folder, seed)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
        said[what] = said.get(what, 0) + 1
    print(f"2000 drawn cases: {said}")
