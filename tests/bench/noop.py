# SPDX-License-Identifier: Apache-2.0
"""What a run with nothing to do costs: hf_verified_blob on a verified 13 GB file (sparse) against an empty module.

Whole tasks, in pairs, in one playbook run; the median of the pairs' ratios counts (at most 1.5).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.hub.jobs import COMMIT, REPO

PAIRS = 11
SIZE = 13_000_000_000
EMPTY = """#!/usr/bin/python
from ansible.module_utils.basic import AnsibleModule
AnsibleModule(argument_spec={}, supports_check_mode=True).exit_json(changed=False)
"""
TIMES = """
import time
from ansible.plugins.callback import CallbackBase
class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "times"
    def v2_playbook_on_task_start(self, task, is_conditional):
        self.began = time.monotonic()
    def v2_runner_on_ok(self, result):
        took = time.monotonic() - self.began
        self._display.display("TIME %s %s %.6f" % (result.task_name, result.result.get("changed"), took))
"""


def main() -> int:
    sha = "a" * 64
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder = root / "hub" / f"models--{REPO.replace('/', '--')}"
        blob = folder / "blobs" / sha
        blob.parent.mkdir(parents=True)
        blob.touch(mode=0o644)
        os.truncate(blob, SIZE)
        link = folder / "snapshots" / COMMIT / "f.gguf"
        link.parent.mkdir(parents=True)
        link.symlink_to(f"../../blobs/{sha}")
        marker = root / "state" / "verified" / f"{sha}.json"
        marker.parent.mkdir(parents=True)
        info = blob.stat()
        marker.write_text(
            json.dumps({"sha256": sha, "size": SIZE, "mtime_ns": info.st_mtime_ns, "path": str(blob)})
        )  # fmt: skip
        for place, text in (("library/empty.py", EMPTY), ("callback_plugins/times.py", TIMES)):
            (root / place).parent.mkdir(exist_ok=True)
            (root / place).write_text(text)
        options = {"repo": REPO, "revision": COMMIT, "file": "f.gguf", "sha256": sha, "size_bytes": SIZE,
                   "cache": str(root / "hub"), "state_dir": str(root / "state")}  # fmt: skip
        pair = [{"name": "empty", "empty": {}}, {"name": "ours", "tensorless.fleet.hf_verified_blob": options}]
        play = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": pair * (PAIRS + 1)}]
        (root / "play.yml").write_text(json.dumps(play))
        environ = {
            **os.environ,
            "ANSIBLE_CALLBACKS_ENABLED": "times",
            "ANSIBLE_CALLBACK_PLUGINS": str(root / "callback_plugins"),
        }
        command = [str(Path(sys.executable).with_name("ansible-playbook")), str(root / "play.yml")]
        done = subprocess.run(command, capture_output=True, text=True, env=environ)
        lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("TIME ")]
        if done.returncode or len(lines) != 2 * (PAIRS + 1) or any(changed != "False" for _n, changed, _t in lines):
            print(done.stdout[-3000:] + done.stderr[-3000:])
            return 2
    times = [float(took) for _name, _changed, took in lines][2:]  # the first pair warms up
    ratios = [times[n + 1] / times[n] for n in range(0, len(times), 2)]
    empty, ours = statistics.median(times[0::2]), statistics.median(times[1::2])
    ratio = statistics.median(ratios)
    print(
        f"nothing to do, 13 GB file: {ours:.3f} s a task, an empty module {empty:.3f} s; "
        f"ratio {ratio:.2f} (at most 1.5)"
    )
    return 0 if ratio <= 1.5 else 1


if __name__ == "__main__":
    raise SystemExit(main())
