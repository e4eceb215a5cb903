# SPDX-License-Identifier: Apache-2.0
"""Rules of the rig log that hold outside the measurement itself: who may stop what, and when a server may change."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import (
    _launch,
    _lease,
    _plan,
    _recipe,
    _server_files,
    _server_module,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.recipe import recipe_made as made

ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_RL_013_every_way_to_measure_takes_the_lease() -> None:
    """Whatever sends a timed request holds the card's lease, and no page tells people to time one by hand."""
    utils = ROOT / "plugins" / "module_utils"
    senders = {
        path.name for path in utils.glob("_*.py") if re.search(r"= completion\(|return completion\(", path.read_text())
    }
    assert senders == {"_bench_run.py", "_bench_sweep.py"}
    for name in senders:
        assert "_leased()" in (utils / name).read_text(), f"{name} measures without the lease"
    for page in (ROOT / "docs").rglob("*.md"):
        for block in re.findall(r"```(?:sh|console|bash)\n(.*?)```", page.read_text(), flags=re.DOTALL):
            assert "llama-bench" not in block and "time curl" not in block, page


def test_RL_073_a_decoy_of_the_same_name_survives_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, decoy = (subprocess.Popen(["llama-server", "60"], executable="/bin/sleep") for _ in range(2))
    try:
        monkeypatch.setattr(_launch, "call", lambda *_argv: (0, "", ""))
        _launch.clear("podman", "tensorless-x", {"State": {"Running": True, "Pid": ours.pid}})
        assert ours.wait(timeout=10) == -9
        assert decoy.poll() is None, "a process that only has the same name was stopped"
    finally:
        for process in (ours, decoy):
            process.kill()
            process.wait()


def test_RL_075_no_server_changes_while_its_card_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = {"owner": "bench", "purpose": "3 runs"}
    monkeypatch.setattr(_lease, "read", lambda uuid, *_rest: holder if uuid == "GPU-a" else None)

    class Tools:
        @staticmethod
        def cards() -> dict[str, object]:
            raise AssertionError("the lease is looked at first")

    with pytest.raises(Refusal, match="GPU-a is being measured by bench"):
        _server_module._check_cards([({"cards": [{"uuid": "GPU-a"}]}, None)], [], Tools())  # type: ignore[list-item, arg-type]


def test_RL_075_a_running_script_keeps_its_old_inode(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "launch"
    _server_files.write_text(str(path), "old\n", 0o755)
    before = os.stat(path).st_ino
    with path.open() as running:
        _server_files.write_text(str(path), "new\n", 0o755)
        assert running.read() == "old\n"
    assert os.stat(path).st_ino != before and path.read_text() == "new\n"


def test_RL_077_template_arguments_are_always_on() -> None:
    catalog = _recipe.load_directory(str(ROOT / "recipes"), "recipes")
    assert catalog.recipes
    host = HostFacts(cpu_count=8, gpus=made.gpus(made.gpu(0)), runtimes=("podman",))
    for recipe in catalog.recipes:
        (plan,) = _plan.plan_model([recipe], host, Choice(command="info", cache="/hub")).plans
        assert "--jinja" in plan["command"] and "--jinja" in plan["exec"], json.dumps(plan["command"])
