# SPDX-License-Identifier: Apache-2.0
"""Small plays on hosts that are this machine, for what the orchestrator does around a play."""

from __future__ import annotations

import pathlib
import sys
from typing import Callable

import pytest

from tensorless_fleet._play import Job
from tensorless_fleet.fleet import Run


@pytest.fixture(autouse=True)
def own_state(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Logs and private folders below the test's own folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runtime = tmp_path / "r"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return runtime


@pytest.fixture
def play(tmp_path: pathlib.Path) -> Callable[..., Run]:
    """Starts a play of the given tasks (YAML) on local hosts; returns the Run."""

    def start(tasks: str, hosts: str = "h[1:2]", check: bool = True, **job: object) -> Run:
        inventory = tmp_path / "inventory.ini"
        lines = "\n".join(
            f"{name} ansible_connection=local ansible_python_interpreter={sys.executable}" for name in hosts.split()
        )
        inventory.write_text(f"[gpu]\n{lines}\n")
        book = tmp_path / "play.yml"
        indented = "\n".join("    " + line for line in tasks.strip("\n").split("\n"))
        book.write_text(f"- name: Try\n  hosts: gpu\n  gather_facts: false\n  tasks:\n{indented}\n")
        return Run(Job("run", str(book), [str(inventory)], **job), check)  # type: ignore[arg-type]

    return start
