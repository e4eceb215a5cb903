# SPDX-License-Identifier: Apache-2.0
"""How good the measurement itself is, on this machine, against a real llama-server. `make soak` runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _bench
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_http import completion
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_run import Bench, Request

from tests.bench import llama, witness
from tests.unit.bench.fakellama import Answer, FakeLlama, last, token

pytestmark = pytest.mark.soak


def no_programs(_argv: Sequence[str]) -> tuple[int, str, str]:
    return 127, "", ""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with llama.server() as number:
        yield number


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


def test_the_witness_does_not_touch_the_rate() -> None:
    """Sampling let go and held by turns within one stream; `make bench-witness` says how, and does it for longer."""
    found = witness.measure(quads=60)
    low, high, middle = found["low"], found["high"], found["median"]
    shown = f"{middle:+.2f} %, 95 % interval {low:+.2f} to {high:+.2f} %, {found['share']:.2f} % of one processor"
    print(f"\nwitness on against off: median {shown}")
    if abs(middle) > witness.LIMIT_PERCENT and low <= 0 <= high:
        pytest.skip(f"this machine is too noisy to tell: {shown}")
    assert abs(middle) <= witness.LIMIT_PERCENT
