# SPDX-License-Identifier: Apache-2.0
"""Values as files, facts and command lines bring them: equal to the planner's own texts, but other objects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_rules as rules
from ansible_collections.tensorless.fleet.plugins.module_utils import _recipe_schema as schema
from ansible_collections.tensorless.fleet.plugins.module_utils._cards import from_facts
from ansible_collections.tensorless.fleet.plugins.module_utils._plan import Plan, plan_model
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Recipe, choose_card, validate
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.recipe.recipe_made import VALID, changed, gpu

SHA = "cd" * 32
IMAGE = VALID["engine"]["image"]
CARD = {"index": 0, "uuid": gpu().uuid, "name": "Tesla X1", "compute_capability": "6.0", "memory_mib": 16269}


def facts(*cards: dict[str, Any]) -> dict[str, Any]:
    return {"nvidia_smi": {"found": True, "rc": 0}, "driver_version": "535.1", "cards": list(cards)}


def made(data: dict[str, Any], host: dict[str, Any], choice: dict[str, Any]) -> Plan:
    host = {"gpus": from_facts(facts(CARD)), "runtimes": ["podman", "docker"], **host}
    return plan_model([Recipe(data)], HostFacts(**host), Choice(cache="/cache", **choice)).plans[0]


def arrived(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize(
    ("recipe", "host", "choice"),
    [
        *(({}, {}, {"runtime": runtime}) for runtime in ("auto", "podman", "docker")),
        *(({}, {}, {"gpu": wanted}) for wanted in ("0", "each", CARD["uuid"])),
        *(({}, {}, {"command": command, "context": 1}) for command in ("bench", "info", "plan", "stop", "run")),
        *(({}, {}, {"host": address}) for address in ("0.0.0.0", "::", "127.0.0.1")),
        ({}, {}, {"card": "x1"}),
        ({}, {}, {"card": "x1", "runtime": "docker"}),
        ({}, {}, {"revision": VALID["model"]["revision"]}),
        ({"status": "draft"}, {}, {"allow_draft": True}),
        ({"run__args": ["-sm", "none", "-dev", "none", "-ncmoe", "0", "-ngl", "all"]}, {"pn": {SHA: "no"}}, {}),
        (
            {"run__args": ["--split-mode", "none", "-ngl", "auto"]},
            {"pn": {SHA: "yes"}, "labels": {IMAGE: {}}},
            {"extra_args": ("-ngl", "auto")},
        ),
        ({}, {"pn": {SHA: "yes"}, "labels": {IMAGE: {rules.PN_CPU_LABEL: "exact"}}}, {"extra_args": ("-cmoe",)}),
        ({}, {"pn": {SHA: "yes"}, "labels": {IMAGE: {}}}, {"extra_args": ("-ngl", "all")}),
        ({}, {"labels": {IMAGE: {rules.SWITCHES_LABEL: "GGML_A,GGML_B"}}}, {}),
        ({}, {}, {"extra_args": ("--api-key", "x")}),
    ],
)
def test_equal_values_give_an_equal_plan(recipe: dict[str, Any], host: dict[str, Any], choice: dict[str, Any]) -> None:
    data = changed(**recipe)
    elsewhere = {**choice, **arrived(choice)}
    elsewhere |= {"extra_args": tuple(elsewhere["extra_args"])} if "extra_args" in elsewhere else {}
    plan = made(arrived(data), arrived(host) | {"gpus": from_facts(arrived(facts(CARD)))}, elsewhere)
    assert plan == made(data, host, choice)
    assert plan["fits"] == "yes"


def test_equal_texts_are_refused_alike() -> None:
    with pytest.raises(Refusal, match="do not pass -m"):
        made(VALID, {}, {"extra_args": tuple(arrived(["-m"]))})
    with pytest.raises(Refusal, match="is a draft"):
        made(arrived(changed(status="draft")), {}, {})
    with pytest.raises(Refusal, match="off the card"):
        made(
            VALID,
            arrived({"pn": {SHA: "yes"}, "labels": {IMAGE: {}}}),
            {"extra_args": tuple(arrived(["-dev", "none"]))},
        )
    assert choose_card([Recipe(arrived(VALID))], arrived("x1")).card_id == "x1"
    assert rules.masked(arrived(["--api-key", "s"])) == ["--api-key", "***"]
    assert rules.quoted(rules.masked(arrived(["--api-key", "s"]))) == "--api-key ***"
    assert validate(changed(run__env={arrived(schema.OWNED_VARIABLE): "1"})) == [
        "run.env must not set OMP_NUM_THREADS; the launcher sets it"
    ]


def test_of_several_cards_and_recipes_the_first_one_is_named() -> None:
    second = Recipe(changed(card__id="x2", card__compute_capability="6.1", card__min_driver="530.1"))
    with pytest.raises(Refusal, match=r"driver, 525\.60\.13 or newer.* pass --card x1$"):
        plan_model([Recipe(VALID), second], HostFacts(gpus=from_facts({})), Choice(cache="/c"))
    two = from_facts(facts(CARD, {**CARD, "index": 1, "uuid": gpu(1).uuid}))
    assert len(made(arrived(VALID), {"gpus": two}, {})["cards"]) == 1  # it has -sm none
    split = made(changed(run__args=[]), {"gpus": two}, arrived({"suffix": True, "runtime": "podman"}))
    assert split["exec"].count("--device") == 2
    assert (len(split["cards"]), split["instance"]) == (2, "tensorless-org-tiny-gguf-00000000")


def test_an_untuned_measurement_is_noted() -> None:
    assert made(VALID, {}, {"command": "bench", "context": 1})["notes"] == [
        "this run is untuned (--context 1 instead of 4096): its comparison with the receipt is only a rough guide"
    ]
    assert made(VALID, {}, {"command": "info", "context": 1})["notes"] == []


def test_looking_at_a_recipe_needs_no_card_that_fits() -> None:
    other = from_facts(facts({**CARD, "compute_capability": "6.1"}))
    assert made(VALID, {"gpus": other}, arrived({"command": "info"}))["fits"] == "no"


def test_the_hash_of_a_known_plan_stays() -> None:
    """Another hash for the same server would have an update of the collection load every model anew."""
    assert made(VALID, {"cpu_count": 4}, {})["plan_hash"] == (
        "2b79d70e5b78277861b65221a47854e802294fd0cd3c321c3bc7265487681c49"
    )
