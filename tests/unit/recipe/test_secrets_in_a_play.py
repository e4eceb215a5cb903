# SPDX-License-Identifier: Apache-2.0
"""A key that somebody put where it does not belong: refused on the controller, and in no line of -vvv."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

SECRET = "sk-ThisIsTheKey"
ENTRIES: list[tuple[dict[str, Any], str]] = [
    ({"model": "pn3", "extra_args": ["--api-key", SECRET]}, "write the key to a file of mode 0600"),
    ({"model": "pn3", "extra_args": [f"--api_key={SECRET}"]}, "write the key to a file of mode 0600"),
    ({"model": "pn3", "extra_args": f"--api-key,{SECRET}"}, "write the key to a file of mode 0600"),
    ({"model": "pn3", "api_key": SECRET}, "Entry 1 of plan_servers"),
]


@pytest.mark.parametrize(("entry", "said"), ENTRIES)
def test_the_key_is_in_no_line(tmp_path: pathlib.Path, entry: dict[str, Any], said: str) -> None:
    role = {"ansible.builtin.include_role": {"name": "tensorless.fleet.plan"}, "vars": {"plan_servers": [entry]}}
    play = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [role]}]
    (tmp_path / "play.yml").write_text(json.dumps(play))
    program = f"{os.path.dirname(sys.executable)}/ansible-playbook"
    environment = {**os.environ, "ANSIBLE_LOCAL_TEMP": str(tmp_path), "ANSIBLE_REMOTE_TMP": str(tmp_path)}
    done = subprocess.run(
        [program, "-i", "localhost,", "-vvv", str(tmp_path / "play.yml")],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    shown = done.stdout + done.stderr
    assert done.returncode != 0
    assert said in " ".join(shown.split())
    assert SECRET not in shown
