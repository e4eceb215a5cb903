# SPDX-License-Identifier: Apache-2.0
"""A run that changes nothing is cheap: few child processes, no byte of the model, and one task instead of many."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import statistics
import subprocess

import pytest

from tests.fleet.server.rig import Rig, environment

pytestmark = pytest.mark.fleet
PAIRS = 5
TRACED = """#!/bin/sh
exec strace -ff -o /root/trace/of -e trace=process,openat,open /usr/bin/python3 "$@"
"""
FORKED = re.compile(r"^(?:vfork|fork|clone3?)\(.* = ([0-9]+)$", re.MULTILINE)
RAN = re.compile(r"^execve\(\"[^\"]*\", \[(.*?)\]", re.MULTILINE)


def test_children_and_model(rig: Rig) -> None:
    """As the kernel saw it: what the module's process started, and what anything in this run opened."""
    plan = rig.plan()
    rig.serve(plan)
    rig.host.write("/root/traced", TRACED, "0755")
    rig.sh("rm -rf /root/trace; mkdir /root/trace")
    done = dataclasses.replace(rig, interpreter="/root/traced").serve(plan)
    assert not done["changed"]
    traces = {name: rig.sh(f"cat /root/trace/{name}") for name in rig.sh("ls /root/trace").split()}
    module = min(traces, key=lambda name: int(name.rpartition(".")[2]))
    forked = [line for line in FORKED.finditer(traces[module]) if "CLONE_THREAD" not in line.group(0)]
    words = [RAN.findall(traces.get(f"of.{line.group(1)}", "")) for line in forked]
    print(f"child processes of a run that changes nothing ({rig.runtime}): {[ran[-1:] for ran in words]}")
    assert RAN.search(traces[module]), "the trace begins with the interpreter"
    assert 1 <= len(forked) <= 3
    blob = plan["download"]["blob"]
    assert not any(blob in text for text in traces.values()), "the model was opened"


def _separate(plan: dict[str, object], runtime: str) -> list[dict[str, object]]:
    """The same look with modules of ansible-core, one task for each question."""
    unit = f"tensorless@{plan['instance']}.service"
    files = ("/etc/systemd/system/tensorless@.service", f"/etc/tensorless/instances/{plan['instance']}.json")
    return [
        *({"ansible.builtin.slurp": {"src": path}} for path in (*files, "/usr/local/lib/tensorless/launch")),
        {"ansible.builtin.systemd_service": {"name": unit, "enabled": True, "state": "started"}},
        {"ansible.builtin.command": {"argv": [runtime, "container", "inspect", plan["container_name"]]}},
        {"ansible.builtin.uri": {"url": plan["health_url"]}},
        {"ansible.builtin.uri": {"url": f"{plan['endpoint']}/v1/models"}},
    ]


def test_one_task_beside_seven(rig: Rig, tmp_path: pathlib.Path) -> None:
    """Both ways in one run, in pairs; the ratio of the medians is printed."""
    plan = rig.plan()
    rig.serve(plan)
    clock = "{{ now().timestamp() }}"
    (tmp_path / "options.json").write_text(json.dumps({"plans": [plan]}))
    tasks: list[dict[str, object]] = []
    for pair in range(PAIRS):
        tasks += [
            {"ansible.builtin.set_fact": {f"a{pair}": clock}},
            {"tensorless.fleet.tensorless_server": "{{ lookup('file', 'options.json') | from_json }}"},
            {"ansible.builtin.set_fact": {f"b{pair}": clock}},
            *_separate(plan, rig.runtime),
            {"ansible.builtin.set_fact": {f"c{pair}": clock}},
        ]
    stamps = {f"{letter}{pair}": f"{{{{ {letter}{pair} }}}}" for pair in range(PAIRS) for letter in "abc"}
    tasks.append(rig.bring(json.dumps(stamps), tmp_path / "stamps.json"))
    argv = rig.command(tmp_path, tasks)
    done = subprocess.run(argv, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    times = {key: float(value) for key, value in json.loads((tmp_path / "stamps.json").read_text()).items()}
    ours = [times[f"b{pair}"] - times[f"a{pair}"] for pair in range(PAIRS)]
    theirs = [times[f"c{pair}"] - times[f"b{pair}"] for pair in range(PAIRS)]
    ratio = statistics.median(ours) / statistics.median(theirs)
    print(f"no-op of tensorless_server: {statistics.median(ours):.2f} s; separate tasks: "
          f"{statistics.median(theirs):.2f} s; ratio {ratio:.2f} ({PAIRS} pairs)")  # fmt: skip
    assert ratio <= 0.4
