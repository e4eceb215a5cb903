# SPDX-License-Identifier: Apache-2.0
"""upgrade.yml and rollback.yml on one host: a floor under the decode rate, a run that broke off, the way back."""

from __future__ import annotations

import json
import pathlib
import subprocess
from typing import Any

import pytest

from tests.fleet import demo, engine, fleet, services
from tests.fleet.conftest import Run, one_line
from tests.fleet.hosts import REGISTRY, SSH_USER, ssh_options
from tests.fleet.server.rig import CACHE, Rig, healthy, image

pytestmark = [pytest.mark.fleet, pytest.mark.soak]
TOO_HIGH, LOW = "100000", "0.001"


class Controller:
    """Playbooks of the collection on one prepared host."""

    def __init__(self, rig: Rig, folder: pathlib.Path) -> None:
        self.rig = rig
        self.inventory = folder / "inventory.yml"
        variables = {
            "ansible_host": rig.host.ip,
            "ansible_user": SSH_USER,
            "ansible_ssh_common_args": " ".join(ssh_options()),
            "ansible_python_interpreter": "/usr/bin/python3",
            "tensorless_runtime": rig.runtime,
            "tensorless_servers": [{"model": fleet.NAME, "gpu": "0"}],
            "tensorless_hf_endpoint": services.HUB,
            "tensorless_hf_hub_cache": CACHE,
            # How fast it is does not matter here: one short run, whatever else the machine does.
            "bench_runs": 1,
            "bench_tokens": 16,
            "bench_on_busy": "label",
        }
        self.inventory.write_text(json.dumps({"gpu": {"hosts": {rig.host.name: variables}}}))

    def play(self, name: str, recipes: pathlib.Path, *argv: str, fails: bool = False, **extra: Any) -> Run:
        variables = json.dumps({"tensorless_recipes_dir": str(recipes), **extra})
        command = ["ansible-playbook", "-i", str(self.inventory), f"tensorless.fleet.{name}", "-e", variables, *argv]
        done = subprocess.run(command, env=demo.environment(), capture_output=True, text=True, check=False)
        run = Run(done.returncode, one_line(done.stdout + done.stderr), demo.recap(done.stdout))
        assert (run.rc != 0) == fails, run.output[-6000:]
        return run

    def changed(self, run: Run) -> int:
        return run.changed()[self.rig.host.name]

    def image(self) -> str:
        text = self.rig.sh("cat /etc/tensorless/instances/*.json")
        return str(json.loads(text)["image"])


@pytest.fixture
def controller(rig: Rig, tmp_path: pathlib.Path) -> Controller:
    rig.sh("rm -rf /var/lib/tensorless/bench")
    return Controller(rig, tmp_path)


@pytest.fixture
def newer(tmp_path: pathlib.Path) -> pathlib.Path:
    """Recipes with another engine image."""
    folder = tmp_path / "newer"
    fleet.write_recipe(engine.push(REGISTRY, "0.0.2-floor"), folder)
    return folder


def test_floor_interruption_confirm_and_rollback(controller: Controller, newer: pathlib.Path) -> None:
    new = engine.push(REGISTRY, "0.0.2-floor")
    for name in ("pull", "serve"):
        controller.play(name, fleet.RECIPES)

    slow = controller.play("upgrade", newer, fails=True, tensorless_decode_floor=TOO_HIGH)
    assert f"below the floor of {TOO_HIGH}; the earlier server is back" in slow.output
    assert controller.image() == image()
    assert healthy(controller.rig)

    # It broke off between the move and the measurement: the next run measures, though nothing has to move.
    controller.play("upgrade", newer)
    assert controller.image() == new
    again = controller.play("upgrade", newer, fails=True, tensorless_decode_floor=TOO_HIGH)
    assert "the earlier server is back" in again.output
    assert controller.image() == image()

    controller.play("upgrade", newer, tensorless_decode_floor=LOW)
    assert controller.image() == new
    assert controller.changed(controller.play("upgrade", newer, tensorless_decode_floor=LOW)) == 0

    confirmed = controller.play("upgrade", newer, tensorless_confirm=True)
    assert controller.changed(confirmed) == 1
    assert image() not in controller.rig.sh(f"{controller.rig.runtime} images --digests --format '{{{{.Digest}}}}'")
    assert controller.changed(controller.play("upgrade", newer, tensorless_confirm=True)) == 0

    back = controller.play("rollback", fleet.RECIPES)
    assert controller.changed(back) == 2, "the image is fetched again, and the server goes back"
    assert controller.image() == image()
    assert healthy(controller.rig)
    assert controller.changed(controller.play("rollback", fleet.RECIPES)) == 0
    assert controller.changed(controller.play("serve", fleet.RECIPES)) == 0


def test_below_the_floor_with_nothing_to_go_back_to(controller: Controller) -> None:
    controller.play("pull", fleet.RECIPES)
    failed = controller.play("upgrade", fleet.RECIPES, fails=True, tensorless_decode_floor=TOO_HIGH)
    assert "no earlier plan is kept, so it goes on" in failed.output
    assert healthy(controller.rig)


def test_what_the_list_no_longer_names(controller: Controller) -> None:
    """It runs on and is named; asked for, it goes; the rehearsal shows it."""
    two = [{"model": fleet.NAME, "gpu": "each"}]
    for name in ("pull", "serve"):
        controller.play(name, fleet.RECIPES, tensorless_servers=two)
    listed = controller.rig.sh("ls /etc/tensorless/instances")
    assert len(listed.split()) == 2
    one = [{"model": fleet.NAME, "gpu": "0", "port": 8090}]
    named = controller.play("serve", fleet.RECIPES, tensorless_servers=one)
    assert "runs here too, though this run's tensorless_servers do not name it" in named.output
    quiet = controller.play("serve", fleet.RECIPES, tensorless_servers=one)
    assert controller.changed(quiet) == 0
    foretold = controller.play(
        "serve", fleet.RECIPES, "--check", "--diff", tensorless_servers=one, tensorless_exclusive=True
    )
    assert controller.changed(foretold) == 1
    assert "no longer start it at boot" in foretold.output
    assert len(controller.rig.sh("ls /etc/tensorless/instances").split()) == 3
    controller.play("serve", fleet.RECIPES, tensorless_servers=one, tensorless_exclusive=True)
    assert len(controller.rig.sh("ls /etc/tensorless/instances").split()) == 1
    assert healthy(controller.rig, 8090)
    assert controller.rig.sh("pgrep -c llama-server").strip() == "1"
    last = controller.play("serve", fleet.RECIPES, tensorless_servers=one, tensorless_exclusive=True)
    assert controller.changed(last) == 0
    controller.play("serve", fleet.RECIPES, tensorless_servers=[], tensorless_exclusive=True)
    assert controller.rig.sh("ls -d /etc/tensorless 2>/dev/null; pgrep llama-server", check=False) == ""
