# SPDX-License-Identifier: Apache-2.0
"""The guard rules of the collected cases that are about the whole, by their numbers."""

from __future__ import annotations

import pathlib
import re

import pytest
import yaml
from ansible_collections.tensorless.fleet.plugins.module_utils import _cdi, _driver, _driver_apt
from ansible_collections.tensorless.fleet.plugins.module_utils._cards import from_facts
from ansible_collections.tensorless.fleet.plugins.module_utils._plan import plan_model
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import load_directory, resolve
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.gpu.fakes import P100, UUID, Smi, facts, loaded, pci
from tests.unit.gpu.test_cases_cdi import CARD, problems, spec
from tests.unit.gpu.test_cases_driver import FakeManager, work

ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_every_case_and_every_rule_is_a_test_by_its_name() -> None:
    cases = ROOT.parent / "shared" / "research" / "nvidia-cases.md"
    if not cases.exists():
        pytest.skip("the collected cases (../shared/research/nvidia-cases.md) are not beside this checkout")
    tests = "\n".join(
        path.read_text(encoding="utf-8") for path in sorted(pathlib.Path(__file__).parent.glob("test_*.py"))
    )
    ids = re.findall(r"^### ([A-Z]\d\d)\b", cases.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(ids) >= 30
    missing = [name for name in ids if f"def test_{name.lower()}" not in tests]
    missing += [f"rule {number}" for number in range(1, 8) if f"def test_guard_{number}" not in tests]
    assert missing == []


@pytest.mark.parametrize(
    "name",
    [
        "nvidia-open",
        "nvidia-dkms-open",
        "nvidia-dkms-580-open",
        "nvidia-driver-580-server-open",
        "nvidia-open-580",
        "kmod-nvidia-open-dkms",
        "linux-modules-nvidia-580-open-generic-hwe-24.04",
        "nvidia-driver:open-dkms",
    ],
)
def test_guard_2_open_is_refused_where_a_card_is_older_than_turing(name: str) -> None:
    """Asked for by name, planned in a transaction, or installed already; right where every card is newer."""
    assert "open kernel module" in str(_driver.name_problem(name))
    assert _driver.name_problem(name, old_cards=False) is None or "newest" in str(_driver.name_problem(name, False))
    if ":" in name:
        return
    steps = [_driver_apt.Step(name, None, "580.105.08-1")]
    assert "open kernel module" in _driver_apt.transaction_problems(steps, 580, False, True)[0]
    assert _driver_apt.transaction_problems(steps, 580, False, False) == []
    old = facts(Smi(rc=9, text="NVIDIA-SMI has failed\n"), pci(driver=None))
    with pytest.raises(Refusal, match="open kernel module"):
        work(FakeManager(steps=steps), old).plan()
    with pytest.raises(Refusal, match="open kernel module"):
        work(FakeManager(installed={name: "580.105.08-1"}), old).check_installed()


def test_guard_2_a_mixed_host_needs_the_proprietary_module() -> None:
    new = {**P100, "index": "1", "uuid": UUID[:-1] + "0", "compute_cap": "8.6", "pci.bus_id": "00000000:5E:00.0"}
    assert _driver.old_cards(facts(Smi([new, P100])))
    assert not _driver.old_cards(facts(Smi([new]), {**pci("0000:5e:00.0", "0x2503"), **loaded()}))


def test_guard_6_fresh_is_what_is_effective() -> None:
    """Every live index and UUID, every path, every version; each of them alone makes a spec stale."""
    assert problems({_cdi.OURS: spec()}) == []
    other = {"index": 1, "uuid": UUID[:-1] + "6"}
    for content, more, words in (
        ({_cdi.OURS: spec()}, {"cards": [CARD, other]}, f"card 1 is missing as 1 and {other['uuid']}"),
        ({_cdi.OURS: spec()}, {"cards": [{**CARD, "index": 1}]}, "card 1 is missing as 1"),
        ({_cdi.OURS: spec()}, {"cards": [other]}, f"cards that are not here: {UUID}"),
        ({_cdi.OURS: spec()}, {"library": "580.95.05"}, "which does not exist"),
        ({_cdi.OURS: spec()}, {"driver": "580.95.05"}, "made for driver 580.159.04, but 580.95.05 is loaded"),
        ({_cdi.OURS: spec(), _cdi.TOOLKIT: spec("580.95.05")}, {}, f"{_cdi.TOOLKIT} was made for driver 580.95.05"),
        ({"/etc/cdi/nvidia.yml": spec()}, {}, "there is no CDI spec"),
        ({}, {}, "there is no CDI spec"),
    ):
        found = problems(content, **more)  # type: ignore[arg-type]
        assert any(words in text for text in found), (words, found)


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
    block = next(task for task in tasks if "block" in task)
    steps = ["Drain the host", "Install the driver and keep it there", "Reboot into the new driver"]
    steps += ["Read the cards after the reboot"]
    assert [task["name"] for task in block["block"] if task["name"] in steps] == steps
    assert block["rescue"][0]["name"] == "Start the drained servers again"
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
