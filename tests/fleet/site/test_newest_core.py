# SPDX-License-Identifier: Apache-2.0
"""The newest ansible-core: a controller in a Debian 13 host (Python 3.13) with the built wheel provisions one host."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import yaml

from tests.fleet import demo, fleet
from tests.fleet.conftest import Fleet
from tests.fleet.hosts import PRIVATE_KEY, Host
from tests.fleet.machine import CA_BUNDLE

pytestmark = pytest.mark.fleet
ROOT = pathlib.Path(__file__).resolve().parents[3]
CONTROLLER = Host("controller", "trixie", "10.213.7.20")
CA = "/etc/ssl/certs/ca-certificates.crt"


@pytest.fixture(scope="module")
def controller() -> Iterator[Host]:
    wheels = sorted((ROOT / "dist").glob("tensorless_fleet-*.whl"))
    if not wheels:
        pytest.skip("dist/ holds no wheel: run make dist first")
    CONTROLLER.start()
    try:
        CONTROLLER.sh("apt-get update -q && apt-get install -y -q --no-install-recommends python3-venv openssh-client")
        CONTROLLER.put(wheels[-1].read_bytes(), f"/root/{wheels[-1].name}")
        CONTROLLER.put(CA_BUNDLE.read_bytes(), CA)
        CONTROLLER.sh(
            f"python3 -m venv /root/env && PIP_CERT={CA} /root/env/bin/pip install -q --disable-pip-version-check "
            f"/root/{wheels[-1].name} 'ansible-core>=2.21'"
        )
        yield CONTROLLER
    finally:
        CONTROLLER.remove()


def test_site_runs_from_the_newest_controller(hosts: Fleet, controller: Host) -> None:
    version = controller.sh("/root/env/bin/ansible --version | head -n 1; /root/env/bin/python --version")
    core = tuple(int(part) for part in version.split("[core ")[1].split("]")[0].split(".")[:2])
    assert core >= (2, 21) and "Python 3.13" in version, version

    inventory = yaml.safe_load(fleet.INVENTORY.read_text())
    name = hosts.c.name
    inventory["all"]["vars"]["tensorless_report_dir"] = "/root/report"
    group = inventory["gpu"]
    group["hosts"] = {name: group["hosts"][name]}
    group["vars"].update(ansible_ssh_private_key_file="/root/key", tensorless_recipes_dir="/root/recipes")
    controller.write("/root/inventory.yml", yaml.safe_dump(inventory))
    controller.write("/root/key", PRIVATE_KEY.read_text(), "0600")
    for recipe in fleet.RECIPES.rglob("*.toml"):
        controller.write(f"/root/recipes/{recipe.relative_to(fleet.RECIPES)}", recipe.read_text())

    # Another report folder, and so a run with something to do besides the report: the server is stopped first.
    hosts.c.exec("systemctl", "stop", f"tensorless@{hosts.units(hosts.c)[0]}.service")
    run = (
        "cd /root && ANSIBLE_INJECT_FACT_VARS=false PATH=/root/env/bin:$PATH LC_ALL=C.UTF-8 "
        "ansible-playbook -i inventory.yml tensorless.fleet.site 2>&1"
    )
    first = controller.sh(run, check=False)
    rows = demo.recap(first)
    assert rows[name]["failed"] == 0 and rows[name]["changed"] >= 1, first[-5000:]
    assert "DEPRECATION" not in first, first
    assert hosts.healthy(hosts.c)
    second = demo.recap(controller.sh(run))
    assert {row["changed"] for row in second.values()} == {0}, second
