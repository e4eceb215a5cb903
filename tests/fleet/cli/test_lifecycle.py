# SPDX-License-Identifier: Apache-2.0
"""One model's life on hosts through the command and Fleet: changed, stopped, refused, upgraded, rolled back."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

from tensorless_fleet import Fleet, HostsFailed
from tests.fleet import engine, fleet
from tests.fleet.cli.calls import answer, command, rows
from tests.fleet.hosts import REGISTRY

pytestmark = [pytest.mark.fleet, pytest.mark.soak]

ONE, OTHER = fleet.P100_A, fleet.P100_C
HERE = ("--limit", ONE.name)
INSTANCE = "tensorless-test-smollm2-135m-instruct-gguf"


def card(host: str = ONE.name) -> dict[str, Any]:
    """The first card of a host, as `fleet` sees it now."""
    cards = answer("fleet", "--limit", host)["hosts"][host]["cards"]
    assert isinstance(cards[0], dict)
    return cards[0]


def server(result: dict[str, Any]) -> dict[str, Any]:
    """The one server that a result tells of, on the one host that it tells of."""
    assert list(result["hosts"]) == [ONE.name], "no other host was asked"
    (found,) = result["hosts"][ONE.name]["servers"]
    assert found["instance"] == INSTANCE
    return dict(found)


def image() -> str:
    """The image that the container of the server runs."""
    text = ONE.sh(f"cat /etc/tensorless/instances/{INSTANCE}.json")
    return str(json.loads(text)["image"])


@pytest.fixture(scope="module", autouse=True)
def left_serving(hosts):
    """Other tests find the fleet as it was."""
    yield
    assert command("run", "smol").returncode == 0


@pytest.fixture
def served():
    """The model serves as its recipe says."""
    done = command("run", "smol")
    assert done.returncode == 0, done.stdout


def test_a_changed_run_converges_and_a_stop_says_what_it_stopped(served):
    elsewhere = card(OTHER.name)
    changed = server(answer("run", "smol", *HERE, "--context", "2048", "--port", "8090"))
    assert changed["state"] == "started" and changed["actions"] and changed["endpoint"] == "http://127.0.0.1:8090"
    seen = card()
    assert (seen["state"], seen["health"], seen["tuned"]) == ("active", "ok", False)
    assert seen["endpoint"] == "http://127.0.0.1:8090" and "--context 2048 instead of 4096" in seen["note"]
    again = answer("run", "smol", *HERE, "--context", "2048", "--port", "8090")
    assert again["hosts"][ONE.name]["state"] == "ok" and not server(again)["actions"]

    dry = command("stop", "smol", *HERE, "--dry-run")
    assert dry.returncode == 0 and f"systemctl disable --now tensorless@{INSTANCE}.service" in dry.stdout
    assert card()["state"] == "active", "a dry run stops nothing"
    said = command("stop", "smol", *HERE)
    assert said.returncode == 0 and re.search(rf"^{ONE.name} +changed +{INSTANCE} stopped$", said.stdout, re.M)
    assert (card()["state"], card()["health"]) == ("inactive", "none")
    said = command("stop", "smol", *HERE)
    assert said.returncode == 0 and re.search(rf"^{ONE.name} +ok +{INSTANCE} already stopped$", said.stdout, re.M)
    assert card(OTHER.name)["endpoint"] == elsewhere["endpoint"] and card(OTHER.name)["health"] == "ok"

    with pytest.raises(HostsFailed) as error:
        Fleet(fleet.INVENTORY).stop("pn3", hosts=ONE.name)
    assert error.value.reasons[ONE.name].startswith('no recipe for "pn3"; the models known in '), error.value.reasons


def test_where_one_host_refuses_the_others_finish(served):
    assert command("stop", "smol").returncode == 0
    ONE.sh("systemd-run -q --unit squat --collect python3 -m http.server 8080 --bind 127.0.0.1")
    try:
        done = command("run", "smol")
    finally:
        ONE.sh("systemctl stop squat")
    assert done.returncode == 1
    assert re.search(rf"^{ONE.name} +FAILED +cannot use port 8080 on 127.0.0.1: .*python3", done.stdout, re.M)
    assert re.search(rf"^{OTHER.name} +changed +{INSTANCE} started at", done.stdout, re.M)
    states = {(host, state) for host, name, state, _health, _tuned in rows() if "P100" in name}
    assert (ONE.name, "inactive") in states and {state for host, state in states if host != ONE.name} == {"active"}


def test_an_upgrade_and_the_way_back(served, tmp_path: pathlib.Path):
    old = image()
    new = engine.push(REGISTRY, "0.0.1-command", labels={"org.opencontainers.image.version": "0.0.1-command"})
    recipe = next(fleet.RECIPES.glob("*/*/p100.toml"))
    copy = tmp_path / recipe.relative_to(fleet.RECIPES)
    copy.parent.mkdir(parents=True)
    copy.write_text(re.sub(r"(?m)^image .*$", f'image   = "{new}"', recipe.read_text()))
    newer = ("--recipes", str(tmp_path), *HERE)

    dry = command("upgrade", *newer, "--dry-run")
    assert dry.returncode == 0 and "would be started" in dry.stdout and "dry run: nothing was changed" in dry.stdout
    assert image() == old
    done = command("upgrade", *newer)
    assert done.returncode == 0 and image() == new != old
    assert re.search(rf"^{ONE.name} +changed +{INSTANCE} started at http://127.0.0.1:8080$", done.stdout, re.M)
    assert re.search(rf"^ +{INSTANCE} answered nobody for \d+\.\d s$", done.stdout, re.M), done.stdout
    again = answer("upgrade", *newer)
    assert again["hosts"][ONE.name]["state"] == "ok" and not server(again)["actions"]

    back = server(answer("rollback", *HERE))
    assert back["state"] == "started" and back["actions"] and image() == old, "each server is named once"
    nothing = command("rollback", *HERE)
    assert nothing.returncode == 0 and f"{INSTANCE}: no earlier plan is kept" in nothing.stdout
    assert (card()["state"], card()["health"], card()["tuned"]) == ("active", "ok", True)
