# SPDX-License-Identifier: Apache-2.0
"""Area 4: the documented container command."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

from ansible_collections.tensorless.fleet.plugins.module_utils import _cards as cards
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_text as text
from ansible_collections.tensorless.fleet.plugins.module_utils._plan import make_plan
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_rules import check_choice
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.conformance.frame import Env
from tests.conformance.planning import CACHE, refused

AREA = "container_command"


def run_case(case: dict[str, Any], env: Env) -> dict[str, Any]:
    given = case["given"]
    try:
        recipe = env.load(given)[0]
        choice = Choice(
            command=given.get("command", "run"),
            runtime=given.get("runtime", "auto"),
            cache=given.get("cache", CACHE),
            host=given.get("host", "127.0.0.1"),
            port=given.get("port", 8080),
            context=given.get("context"),
            extra_args=tuple(given.get("extra_args") or ()),
            allow_draft=given.get("allow_draft", False),
            revision=given.get("model_revision"),
        )
        check_choice(choice)
        host = HostFacts(cpu_count=given.get("cpu_count", 32), runtimes=given.get("installed"))
        with mock.patch.dict(os.environ, given.get("host_environment", {})):
            plan = make_plan(cards.Selection(recipe, str(given.get("container_gpu", "all"))), host, choice)
    except Refusal as error:
        return refused(error)
    shown = text.info_json(plan)
    return {
        "failed": False,
        "message": "",
        "exit_code": 0,
        "notes": plan["notes"],
        "argv": plan["command"],
        "argv0": plan["command"][0],
        "threads": plan["threads"],
        "untuned": plan["untuned"],
        "untuned_label": plan["untuned_label"],
        "output": text.info_text(plan),
        "endpoint": plan["endpoint"],
        "pull_command": plan["pull_command"],
        "info_json": shown,
    }


def _part(argv: list[str], part: list[str]) -> bool:
    return any(argv[at : at + len(part)] == part for at in range(len(argv) - len(part) + 1))


def _contains(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    return None if _part(got.get("argv", []), expected) else f"argv lacks {expected}: {got.get('argv')}"


def _ends(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    end = got.get("argv", [])[-len(expected) :]
    return None if end == expected else f"argv ends in {end}, not {expected}"


def _lacks(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    there = [word for word in expected if word in got.get("argv", [])]
    return f"argv has {there}" if there else None


def _lacks_text(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    there = [word for word in expected if any(word in part for part in got.get("argv", []))]
    return f"argv has the text {there}" if there else None


def _json_keys(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    shown = got.get("info_json", {})
    if isinstance(expected, dict):  # keys of tables in it
        expected = [*expected, *(f"{table}.{key}" for table, keys in expected.items() for key in keys or [])]
    missing = [key for key in expected if not _has(shown, key.split(".")) and key not in shown.get("download", {})]
    return f"the JSON lacks {missing}" if missing else None


def _has(node: Any, keys: list[str]) -> bool:
    return not keys or (isinstance(node, dict) and keys[0] in node and _has(node[keys[0]], keys[1:]))


CHECKS = {
    "argv_contains": _contains,
    "argv_ends": _ends,
    "argv_lacks": _lacks,
    "argv_lacks_text": _lacks_text,
    "json_keys": _json_keys,
}
