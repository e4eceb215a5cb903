# SPDX-License-Identifier: Apache-2.0
"""Area 1: recipe files are written to disk and loaded as a recipes directory."""

from __future__ import annotations

from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_text as text
from ansible_collections.tensorless.fleet.plugins.module_utils._plan import plan_model
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.conformance.frame import Env
from tests.conformance.planning import CACHE, refused

AREA = "recipe_schema"


def run_case(case: dict[str, Any], env: Env) -> dict[str, Any]:
    try:
        catalog = env.catalog(case["given"])
    except Refusal as error:
        return {**refused(error), "problems": error.message.count("\n  - ")}
    recipes = catalog.recipes
    cards: dict[str, list[str]] = {}
    for recipe in recipes:
        cards.setdefault(recipe.repo, []).append(recipe.card_id)
    shown = ""
    if recipes:
        plan = plan_model(recipes[:1], HostFacts(), Choice(command="info", cache=CACHE)).plans[0]
        shown = text.info_text(plan)
    return {
        "failed": False,
        "message": "",
        "warnings": catalog.warnings,
        "models": sorted({recipe.repo for recipe in recipes}),
        "published": {recipe.repo: not recipe.unpublished for recipe in recipes},
        "cards": {repo: sorted(ids) for repo, ids in cards.items()},
        "data": recipes[0].data if recipes else {},
        "info": shown,
        "problems": 0,
    }


def _models(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    return None if sorted(expected) == got.get("models") else f"models: expected {expected}, got {got.get('models')}"


def _value(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    for dotted, wanted in expected.items():
        node: Any = got.get("data", {})
        for key in dotted.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        if node != wanted:
            return f"{dotted}: expected {wanted!r}, got {node!r}"
    return None


def _problems_min(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    return None if got["problems"] >= expected else f"expected {expected} problems, got {got['problems']}"


def _display_order(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    labels = {"decode_tps": "decode", "prefill_tps": "prefill"}
    for table, keys in expected.items():
        lines = [line.split() for line in got.get("info", "").split("\nReceipt\n")[-1].splitlines()]
        shown = [line[-1].strip("()") for line in lines if line and line[0] == labels[table]]
        if shown != keys:
            return f"display order of {table}: expected {keys}, got {shown}"
    return None


CHECKS = {"models": _models, "value": _value, "problems_min": _problems_min, "display_order": _display_order}
