# SPDX-License-Identifier: Apache-2.0
"""The guard rules of the collected cases that are about the whole, by their numbers."""

from __future__ import annotations

import pathlib

import pytest
import yaml
from ansible_collections.tensorless.fleet.plugins.module_utils._cards import from_facts
from ansible_collections.tensorless.fleet.plugins.module_utils._plan import plan_model
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import load_directory, resolve

from tests.unit.gpu.fakes import P100, UUID, Smi, facts

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("rc", "state"),
    [(0, "ok"), (14, "degraded"), (6, "failed"), (9, "failed"), (18, "failed"), (255, "failed"), (124, "failed")],
)
def test_guard_4_status(rc: int, state: str) -> None:
    """0 and 14 are read; 6 is empty; 9 is diagnosed; 18 asks for a reboot; the rest and a timeout are errors."""
    smi = Smi(
        after="WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n" if rc == 14 else "",
        rc=rc,
        text=None if rc in (0, 14) else "",
    )
    found = facts(smi)
    assert found["state"] == state
    assert found["reboot_required"] is (rc == 18)
    assert found["nvidia_smi"]["timed_out"] is (rc == 124)


def test_guard_4_retry_without_the_field() -> None:
    smi = Smi(refused=["mig.mode.current"])
    assert facts(smi)["state"] == "ok"
    assert smi.starts == 3


def test_guard_5_index_holes() -> None:
    rows = [{**P100, "index": index, "uuid": UUID[:-1] + index} for index in ("0", "2", "7")]
    assert [card["index"] for card in facts(Smi(rows))["cards"]] == [0, 2, 7]


def test_guard_7_order_of_an_upgrade() -> None:
    """Drain, upgrade, reboot, verify, CDI, servers anew: the playbook's roles, and the role's own steps."""
    play = yaml.safe_load((ROOT / "playbooks" / "driver.yml").read_text(encoding="utf-8"))[0]
    order = [entry["role"].rpartition(".")[2] for entry in play["roles"]]
    assert order.index("nvidia_driver") < order.index("nvidia_cdi") < order.index("server")
    tasks = yaml.safe_load((ROOT / "roles" / "nvidia_driver" / "tasks" / "manage.yml").read_text(encoding="utf-8"))
    names = [task["name"] for task in tasks]
    reboot = tasks[names.index("Reboot into the new driver")]["block"]
    steps = ["Drain the host", "Install the driver and keep it there", "Reboot into the new driver"]
    assert [name for name in names if name in steps] == steps
    assert [task["name"] for task in reboot] == [
        "Stop the host's servers",
        "Reboot",
        "Read the cards of the new driver",
    ]
    assert play["serial"] == "{{ tensorless_serial | default(1) }}", "one host after the other"


def _plan(runtime: str, gpu: str | None, found: dict[str, object]) -> dict[str, object]:
    recipes, _revision = resolve(load_directory(str(ROOT / "recipes")), "pn3")
    host = HostFacts(gpus=from_facts(found), cpu_count=8, runtimes=[runtime])
    return plan_model(recipes, host, Choice(cache="/c", gpu=gpu, runtime=runtime)).plans[0]


@pytest.mark.parametrize("runtime", ["podman", "docker"])
def test_o01_an_index_becomes_a_uuid_at_once(runtime: str) -> None:
    """nvidia-smi and CUDA count cards in different orders, so what runs names the card by UUID."""
    other = {**P100, "name": "NVIDIA GeForce RTX 3060", "compute_cap": "8.6", "uuid": UUID[:-1] + "0"}
    mine = {**P100, "index": "1", "pci.bus_id": "00000000:5E:00.0"}
    plan = _plan(runtime, "1", facts(Smi([other, mine])))
    words = " ".join(plan["exec"])  # type: ignore[arg-type]
    assert UUID in words
    assert "nvidia.com/gpu=1" not in words
    assert "device=1" not in words


def test_o02_device_value_of_docker() -> None:
    """Without inner quotes docker reads a comma as the next option, and a bare number as a count of cards."""
    rows = [dict(P100), {**P100, "index": "1", "uuid": UUID[:-1] + "6", "pci.bus_id": "00000000:5E:00.0"}]
    words = _plan("docker", None, facts(Smi(rows)))["exec"]
    assert isinstance(words, list)
    value = words[words.index("--gpus") + 1]
    assert "device=GPU-" in value
    assert "," not in value or (value.startswith('"') and value.endswith('"'))
