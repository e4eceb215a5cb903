# SPDX-License-Identifier: Apache-2.0
"""How good the measurement itself is, on this machine, against a real llama-server. `make soak` runs it.

TENSORLESS_LLAMA_SERVER and TENSORLESS_TEST_MODEL name the program and a small GGUF file.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _bench, _witness
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_http import HttpFault, completion, get_json
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_run import Bench, Request

from tests.unit.bench.fakellama import Answer, FakeLlama, last, token

pytestmark = pytest.mark.soak


def no_programs(_argv: Sequence[str]) -> tuple[int, str, str]:
    return 127, "", ""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    program, model = os.environ.get("TENSORLESS_LLAMA_SERVER"), os.environ.get("TENSORLESS_TEST_MODEL")
    if not program or not model:
        pytest.skip("TENSORLESS_LLAMA_SERVER and TENSORLESS_TEST_MODEL are not set")
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = int(free.getsockname()[1])
    folder = str(Path(program).parent)
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{folder}:{Path(folder).parent / 'lib'}"}
    argv = [program, "-m", model, "-t", "1", "-tb", "1", "-np", "1", "-c", "2048", "--host", "127.0.0.1"]
    server = subprocess.Popen(
        [*argv, "--port", str(number), "--no-webui"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(240):
            try:
                get_json("127.0.0.1", number, "/health")
                break
            except HttpFault:
                time.sleep(0.5)
        yield number
    finally:
        server.terminate()
        server.wait(60)


def test_decode_agrees_with_the_servers_own_timings(port: int) -> None:
    request = Request("m", port=port, runs=10, tokens=128, on_busy="label")
    result = Bench(request, no_programs).measure()
    off = sorted(abs(run["server"]["disagreement_percent"]) for run in result["runs"])
    print(f"\nclient against server, 10 runs of 128 tokens: median {_bench.median(off):.3f} %, worst {off[-1]:.3f} %")
    assert _bench.median(off) <= 0.5


def test_decode_agrees_with_exact_time_stamps() -> None:
    off = []
    for _ in range(7):
        parts = [(0.05 + n * 0.012, token(n + 1)) for n in range(256)]
        with FakeLlama([Answer([*parts, last(256)])]) as server:
            stream = completion("127.0.0.1", server.port, _bench.request_body("x", 256))
        sent = server.sent_at[:256]
        off.append(abs(_bench.rates(stream.start, stream.stamps)[0] / (255 / (sent[-1] - sent[0])) - 1) * 100)
    shown = f"median {_bench.median(off):.4f} %, worst {max(off):.4f} %"
    print(f"\nclient against exact stamps, 7 runs of 256 tokens: {shown}")
    assert _bench.median(off) <= 0.05


def test_the_witness_does_not_touch_the_rate(port: int) -> None:
    """Twenty pairs, with and without, in the order A B B A, so that a drift of the machine falls on both."""

    def rate(watched: bool) -> float:
        witness = _witness.Witness(no_programs, None, None, 0.5)
        if watched:
            witness.start()
        stream = completion("127.0.0.1", port, _bench.request_body("The quick brown fox", 96))
        witness.stop()
        return _bench.rates(stream.start, stream.stamps)[0]

    rate(True)
    differences = []
    for pair in range(20):
        first, second = (True, False) if pair % 2 else (False, True)
        got = {first: rate(first), second: rate(second)}
        differences.append((got[True] / got[False] - 1) * 100)
    noise = random.Random(1)
    medians = sorted(_bench.median(noise.choices(differences, k=20)) for _ in range(2000))
    low, high = medians[50], medians[1949]
    middle = _bench.median(differences)
    print(f"\nwitness on against off, 20 pairs: median {middle:+.2f} %, 95 % interval {low:+.2f} to {high:+.2f} %")
    if abs(middle) > 0.5 and low <= 0 <= high:
        pytest.skip(f"this machine is too noisy to tell: {middle:+.2f} %, interval {low:+.2f} to {high:+.2f} %")
    assert abs(middle) <= 0.5
