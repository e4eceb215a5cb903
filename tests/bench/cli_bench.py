# SPDX-License-Identifier: Apache-2.0
"""What the command costs: ``info`` and ``models`` against ``python -c pass``; Fleet against plain ansible-playbook.

    python tests/bench/cli_bench.py start [PAIRS]    fails when the median of the pairs is over 8
    python tests/bench/cli_bench.py fleet [HOSTS]    fails over 10 % more time or over 1 GB; 32 hosts, 16 steps each

Pairs in one run, the first of a pair in turn: this machine's own load changes by more than what is measured. The time
of all processors stands beside the time on the clock; a busy machine moves it less.
"""

from __future__ import annotations

import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT = 8.0
OVERHEAD = 1.10
MEMORY_MIB = 1024


def seconds(argv: list[str], env: dict[str, str] | None = None) -> float:
    begin = time.perf_counter()
    subprocess.run(argv, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def start(pairs: int) -> bool:
    """Pairs of ``python -c pass`` and the command; the median ratio and time of each command."""
    good = True
    for words in (["info", "pn3", "--card", "p100"], ["models"]):
        command = [str(pathlib.Path(sys.executable).with_name("tensorless")), *words]
        seconds(command)
        ratios, times = [], []
        for _pair in range(pairs):
            base = seconds([sys.executable, "-c", "pass"])
            times.append(seconds(command))
            ratios.append(times[-1] / base)
        ratio = statistics.median(ratios)
        good = good and ratio <= LIMIT
        print(f"tensorless {' '.join(words)}: {statistics.median(times):.3f} s, {ratio:.1f} times python -c pass")
    return good


PLAY = """- hosts: gpu
  gather_facts: false
  tasks:
""" + "".join(
    f"    - name: Work {number}\n      ansible.builtin.command: sleep 0.5\n      changed_when: false\n"
    if number % 4 == 0
    else f"    - name: Step {number}\n      ansible.builtin.debug: {{msg: '{number}: {{{{ inventory_hostname }}}}'}}\n"
    for number in range(16)
)
CHILD = """
import sys, time, resource
from tensorless_fleet._play import Job
from tensorless_fleet.fleet import Run
begin = time.time()
run = Run(Job("run", sys.argv[1], [sys.argv[2]], forks=8), True)
first = None
count = 0
for event in run.events():
    count += 1
    if first is None and event.kind == "step":
        first = time.time()
result = run.result()
end = time.time()
assert len(result.hosts) == int(sys.argv[3]) and result.ok
own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(count, round(first - begin, 2), round(end - begin, 2), own // 1024)
"""


def spent(argv: list[str], env: dict[str, str] | None = None) -> tuple[float, float, str]:
    """Seconds on the clock and of all processors, and what was said."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - begin, used, done.stdout


def fleet(hosts: int, limit_s: float = 300.0, wanted: int = 7) -> bool:
    """One play over simulated hosts, plain and through Fleet, pair after pair until there are enough or it is late."""
    with tempfile.TemporaryDirectory() as folder:
        inventory, book = pathlib.Path(folder, "inventory.ini"), pathlib.Path(folder, "play.yml")
        inventory.write_text(
            f"[gpu]\nh[1:{hosts}] ansible_connection=local ansible_python_interpreter={sys.executable}\n"
        )
        book.write_text(PLAY)
        plain = [sys.executable, "-m", "ansible", "playbook", "-i", str(inventory), "--forks", "8", str(book)]
        ours = [sys.executable, "-c", CHILD, str(book), str(inventory), str(hosts)]
        quiet = {**os.environ, "ANSIBLE_NOCOLOR": "1"}
        clock, processors, notes = [], [], []
        begin, longest = time.perf_counter(), 0.0
        while len(clock) < wanted and time.perf_counter() - begin + longest < limit_s:
            start = time.perf_counter()
            if len(clock) % 2:
                mine, base = spent(ours), spent(plain, quiet)
            else:
                base, mine = spent(plain, quiet), spent(ours)
            longest = max(longest, time.perf_counter() - start)
            clock.append(mine[0] / base[0])
            processors.append(mine[1] / base[1])
            notes.append(mine[2].split())
            print(
                f"plain {base[0]:.1f} s ({base[1]:.1f} s of processors), Fleet {mine[0]:.1f} s ({mine[1]:.1f} s); "
                f"events, first after, all after, MiB: {notes[-1]}",
                flush=True,
            )
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
        memory = max(int(note[3]) for note in notes)
        ratio = statistics.median(clock)
        print(
            f"{hosts} hosts, {len(clock)} pairs: {ratio:.2f} times plain on the clock ({min(clock):.2f} to "
            f"{max(clock):.2f}), {statistics.median(processors):.2f} times the processors' time; "
            f"{memory} MiB, largest child {children} MiB"
        )
        late = all(float(note[1]) < float(note[2]) / 2 for note in notes)
        return ratio <= OVERHEAD and memory + children <= MEMORY_MIB and late


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else "start"
    number = int(sys.argv[2]) if len(sys.argv) > 2 else (15 if what == "start" else 32)
    sys.exit(0 if {"start": start, "fleet": fleet}[what](number) else 1)
