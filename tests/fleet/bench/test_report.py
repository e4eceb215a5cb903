# SPDX-License-Identifier: Apache-2.0
"""The fleet's measurements and what its report makes of simulated trouble."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fleet.conftest import Fleet
from tests.fleet.hosts import Host

pytestmark = pytest.mark.fleet

A1, B1, B2, C1 = (f"GPU-000000{n}-7e57-4a11-8c0d-0123456789ab" for n in ("a1", "b1", "b2", "c1"))
STATE = "/etc/nvidia-sim/state.json"
# What the simulated cards can show; the load of a test machine is true of all of them and stands beside it.
SHOWN = {"heat", "power", "narrow_link", "other_process", "untuned"}
SHORT = ("-e", "bench_runs=1", "-e", "bench_tokens=32")


def state(host: Host) -> dict[str, Any]:
    return dict(json.loads(host.exec("cat", STATE).stdout))


def change(host: Host, edit: Callable[[dict[str, Any]], None]) -> None:
    data = state(host)
    edit(data)
    host.exec("python3", "-c", f"open({STATE!r}, 'w').write({json.dumps(data)!r})")


def set_card(uuid: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    def edit(data: dict[str, Any]) -> None:
        next(card for card in data["cards"] if card["uuid"] == uuid).update(values)

    return edit


@pytest.fixture
def troubled(hosts: Fleet) -> Iterator[Fleet]:
    """The cards' former state and their servers come back; the next test measures them again under their own plans."""
    before = {host.name: state(host) for host in (hosts.a, hosts.b, hosts.c)}
    yield hosts
    for host in (hosts.a, hosts.b, hosts.c):
        change(host, lambda data, host=host: (data.clear(), data.update(before[host.name])))  # type: ignore[misc]
    hosts.play("--limit", hosts.b.name, name="serve")


# On p100-b the card 0 is named with another context than the recipe's: untuned. The others are as the inventory says.
ON_B = "[{'model': 'smol', 'gpu': 0, 'context': 1024}, {'model': 'smol', 'gpu': 2, 'port': 8081}]"
UNTUNED = {"tensorless_servers": f"{{{{ {ON_B} if inventory_hostname == 'p100-b' else [{{'model': 'smol'}}] }}}}"}


def test_each_trouble_is_named_and_the_cards_beside_it_are_not_accused(troubled: Fleet) -> None:
    hosts = troubled
    change(hosts.a, set_card(A1, throttle_mask=0x20))
    change(hosts.b, set_card(B2, pcie_width=4))
    process = {"pid": 4711, "uuid": C1, "name": "python3", "memory_mib": 900}
    change(hosts.c, lambda data: data.update(processes=[process]))
    hosts.play("--limit", hosts.b.name, "-e", json.dumps(UNTUNED), name="serve")
    hosts.play(*SHORT, "-e", json.dumps(UNTUNED), name="bench")
    cards = {card["uuid"]: card for card in hosts.report()["cards"]}
    found = {uuid: SHOWN & {finding["code"] for finding in card["findings"]} for uuid, card in cards.items()}
    assert found[A1] == {"heat"}
    assert found[B1] == {"untuned"}
    assert found[B2] == {"narrow_link"}
    assert found[C1] == {"other_process"}
    assert not cards[B1]["receipt_applies"] and not cards[B1]["slow"]


def test_every_card_is_measured_agrees_with_its_server_and_is_accused_of_nothing(hosts: Fleet) -> None:
    """The same definition on both sides: gaps, not tokens."""
    hosts.play(*SHORT, name="bench")
    cards = {card["uuid"]: card for card in hosts.report()["cards"]}
    assert {A1, B1, B2, C1} <= set(cards)
    for uuid in (A1, B1, B2, C1):
        card = cards[uuid]
        assert card["status"] == "benched", card["reason"]
        assert abs(card["decode_tps"] / card["server_decode_tps"] - 1) <= 0.02
        assert card["witness"]["samples"] > 0 and card["witness"]["fields"]["sm_mhz"]
        assert not SHOWN & {finding["code"] for finding in card["findings"]}
    skipped = [card for card in cards.values() if card["status"] == "skipped"]
    assert len(skipped) == 1 and "6.1" in skipped[0]["reason"]
