# SPDX-License-Identifier: Apache-2.0
"""What the witness costs the server it watches: `make bench-witness`, or `python -m tests.bench.witness [QUADS]`.

One long answer after the other is streamed while the sampling process is let go and held by turns, a second each, in
the order on off off on: a drift of the machine, of its heat or of the growing context falls on both alike. Each four
seconds give one difference; the median of them stands with the 95 % interval of a bootstrap. The server has a processor
of its own, the client and the witness have another, as on a host with more than one.

Beside it stands what the witness takes of one processor, all its children included: where the server's processors are
not all busy it cannot cost the server more than that. An `nvidia-smi` is played by a shell script; what the real one
does inside the driver cannot be seen on a machine without a card.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ansible_collections.tensorless.fleet.plugins.module_utils import _bench, _witness
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_http import completion

from tests.bench import llama

BLOCK_S = 1.0
EDGE_S = 0.05  # after a switch the witness looks at once; what straddles a switch belongs to neither side
ORDER = (True, False, False, True)
TOKENS = 1500  # of each answer; with the prompt they fit the server's context
LIMIT_PERCENT = 0.5
CARD = "GPU-00000000-0000-0000-0000-000000000000"
STAND_IN = """#!/bin/sh
case "$*" in
*compute-apps*) echo "1, llama-server, 14577" ;;
*) echo "1328, 715, 182.5, 250, 61, [N/A], [N/A], 0x0000000000000000, 14577, 98, 3, 3, 16, 16" ;;
esac
"""


def run(argv: Sequence[str]) -> tuple[int, str, str]:
    done = subprocess.run(list(argv), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


class Switch(threading.Thread):
    """Lets the witness go and holds it, block by block, and keeps when which block began."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.blocks: list[tuple[float, bool]] = []
        self.over = threading.Event()

    def run(self) -> None:
        due = time.monotonic()
        number = 0
        while not self.over.wait(max(0.0, due - time.monotonic())):
            on = ORDER[number % len(ORDER)]
            os.kill(self.pid, signal.SIGCONT if on else signal.SIGSTOP)
            self.blocks.append((time.monotonic(), on))
            number += 1
            due += BLOCK_S
        os.kill(self.pid, signal.SIGCONT)


def rates(blocks: Sequence[tuple[float, bool]], stamps: Sequence[tuple[float, int]]) -> list[tuple[bool, float | None]]:
    """The rate of each whole block; None where the stream did not fill it."""
    found: list[tuple[bool, float | None]] = []
    for (begin, on), (end, _next) in zip(blocks, blocks[1:]):
        inside = [stamp for stamp in stamps if begin + EDGE_S <= stamp[0] < end]
        full = len(inside) > 4 and inside[0][0] - begin < 0.4 * BLOCK_S and end - inside[-1][0] < 0.4 * BLOCK_S
        found.append((on, (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0]) if full else None))
    return found


def differences(found: Sequence[tuple[bool, float | None]]) -> list[float]:
    """One difference in percent for each whole on off off on."""
    out = []
    for place in range(0, len(found) - 3, 4):
        four = found[place : place + 4]
        values = [value for _on, value in four if value is not None]
        if len(values) == 4:
            out.append(((values[0] + values[3]) / (values[1] + values[2]) - 1) * 100)
    return out


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by a bootstrap with a fixed seed."""
    noise = random.Random(1)
    medians = sorted(statistics.median(noise.choices(values, k=len(values))) for _ in range(4000))
    return medians[100], medians[3899]


def spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def own_share(seconds: float = 10.0) -> float:
    """What the sampling process and its children take of one processor at the default interval, in percent."""
    witness = _witness.Witness(run, CARD, os.getpid())
    begin, before = time.monotonic(), spent()
    witness.start()
    time.sleep(seconds)
    witness.stop()
    return (spent() - before) / (time.monotonic() - begin) * 100


@contextlib.contextmanager
def surroundings() -> Iterator[list[int]]:
    """The stand-in for nvidia-smi on the path, this process off the first processor; all as before at the end."""
    processors, path = sorted(os.sched_getaffinity(0)), os.environ["PATH"]
    with tempfile.TemporaryDirectory() as folder:
        stand_in = Path(folder, "nvidia-smi")
        stand_in.write_text(STAND_IN)
        stand_in.chmod(0o755)
        os.environ["PATH"] = f"{folder}:{path}"
        os.sched_setaffinity(0, set(processors[1:] or processors))
        try:
            yield processors
        finally:
            os.sched_setaffinity(0, set(processors))
            os.environ["PATH"] = path


def measure(quads: int, limit_s: float = 330.0) -> dict[str, float]:
    """Differences until there are enough of them or the time is up."""
    until = time.monotonic() + limit_s
    got: list[float] = []
    with surroundings() as processors:
        share = own_share()
        with llama.server(cpus=processors[:1] if len(processors) > 1 else ()) as port:
            completion("127.0.0.1", port, _bench.request_body("Once upon a time", 16))
            while len(got) < quads and time.monotonic() < until:
                witness = _witness.Witness(run, CARD, os.getpid()).start()
                switch = Switch(witness._pid)
                switch.start()
                stream = completion("127.0.0.1", port, _bench.request_body("Once upon a time", TOKENS))
                switch.over.set()
                switch.join()
                witness.stop()
                got += differences(rates(switch.blocks, stream.stamps))
                print(f"{len(got)} of {quads}: median {statistics.median(got or [0.0]):+.2f} %", flush=True)
    low, high = interval(got)
    return {"median": statistics.median(got), "low": low, "high": high, "quads": len(got), "share": share}


def main(quads: int) -> int:
    found = measure(quads)
    print(
        f"witness on against off, {found['quads']} times on off off on, a second each: "
        f"median {found['median']:+.3f} %, 95 % interval {found['low']:+.3f} to {found['high']:+.3f} %; "
        f"the witness takes {found['share']:.2f} % of one processor"
    )
    if max(abs(found["low"]), abs(found["high"])) > LIMIT_PERCENT and abs(found["median"]) <= LIMIT_PERCENT:
        print(f"the interval is wider than {LIMIT_PERCENT} %: this machine is too noisy for a verdict")
    return 0 if abs(found["median"]) <= LIMIT_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 75))
