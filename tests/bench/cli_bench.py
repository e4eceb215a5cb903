# SPDX-License-Identifier: Apache-2.0
"""What the command costs: ``info`` and ``models`` against ``python -c pass``; Fleet against plain ansible-playbook.

    python tests/bench/cli_bench.py start [PAIRS]    fails when the median of the pairs is over 8
    python tests/bench/cli_bench.py fleet [HOSTS]    fails over 10 % more time or over 1 GB; 32 hosts, 30 steps each

Pairs in one run: this machine's own load changes by more than what is measured.
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
    - name: Work on {{ item }}
      ansible.builtin.command: sleep 0.1
      changed_when: false
      loop: "{{ range(2) | list }}"
""" + "".join(
    f"    - name: Step {number}\n      ansible.builtin.debug: {{msg: '{number} on {{{{ inventory_hostname }}}}'}}\n"
    for number in range(28)
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


def fleet(hosts: int) -> bool:
    """One play over simulated hosts, plain and through Fleet, three pairs."""
    with tempfile.TemporaryDirectory() as folder:
        inventory, book = pathlib.Path(folder, "inventory.ini"), pathlib.Path(folder, "play.yml")
        inventory.write_text(
            f"[gpu]\nh[1:{hosts}] ansible_connection=local ansible_python_interpreter={sys.executable}\n"
        )
        book.write_text(PLAY)
        plain = [sys.executable, "-m", "ansible", "playbook", "-i", str(inventory), "--forks", "8", str(book)]
        ratios, notes = [], []
        for _pair in range(3):
            base = seconds(plain, {**os.environ, "ANSIBLE_NOCOLOR": "1"})
            begin = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", CHILD, str(book), str(inventory), str(hosts)],
                cwd=ROOT, capture_output=True, text=True, check=True,
            )  # fmt: skip
            ours = time.perf_counter() - begin
            ratios.append(ours / base)
            notes.append(done.stdout.split())
            print(f"plain {base:.1f} s, Fleet {ours:.1f} s; events, first after, all after, MiB: {notes[-1]}")
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
        memory = max(int(note[3]) for note in notes)
        print(f"{hosts} hosts: {statistics.median(ratios):.2f} times plain; {memory} MiB, largest child {children} MiB")
        late = all(float(note[1]) < float(note[2]) / 2 for note in notes)
        return statistics.median(ratios) <= OVERHEAD and memory + children <= MEMORY_MIB and late


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else "start"
    number = int(sys.argv[2]) if len(sys.argv) > 2 else (15 if what == "start" else 32)
    sys.exit(0 if {"start": start, "fleet": fleet}[what](number) else 1)
