# SPDX-License-Identifier: Apache-2.0
"""What holds for every recipe, version and input."""

from __future__ import annotations

import copy
import functools
import json
import os
import shlex
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_rules as rules
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_text as text
from ansible_collections.tensorless.fleet.plugins.module_utils import _recipe_schema as schema
from ansible_collections.tensorless.fleet.plugins.module_utils._cards import compare_versions, from_facts
from ansible_collections.tensorless.fleet.plugins.module_utils._plan import plan_model
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Recipe, build_catalog, resolve, validate
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.unit.recipe.recipe_made import VALID

# The machine that runs these may be busy with other things: time is no part of the properties.
EXAMPLES = int(os.environ.get("TENSORLESS_EXAMPLES", "80"))
settings.register_profile("recipe", deadline=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
settings.load_profile("recipe")

versions = st.lists(st.integers(0, 999), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
any_text = st.text(st.characters(exclude_categories=()), max_size=12)
odd_text = any_text | st.sampled_from(
    [
        "",
        "--",
        "-c",
        "--port=1",
        "{{ x }}",
        "a b",
        "'",
        '"',
        "$(id)",
        "\\",
        "\n",
        "\0",
        "\u202e",
        "GPU-1",
        "each",
        "@",
        "=",
    ]
)
whole = st.integers(-5, 2**64) | st.booleans()
tomlish = st.recursive(
    st.none() | whole | st.floats() | odd_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_text, inner, max_size=3),
    max_leaves=8,
)


def typed(key: schema.Key) -> st.SearchStrategy[Any]:
    """Values of a key's type, most of them of a form that its rule may accept."""
    if "pattern" in (key.json or {}):
        return st.from_regex(key.json["pattern"], fullmatch=True) | odd_text  # type: ignore[index]
    return {
        str: st.sampled_from((key.json or {}).get("enum", ["text"])) | odd_text,
        int: st.integers(1, 2**40) | whole,
        list: st.lists(odd_text, max_size=4),
        dict: st.dictionaries(
            st.from_regex(r"[A-Z_]{1,6}", fullmatch=True) | odd_text, odd_text | st.floats(0, 99), max_size=4
        ),
    }[key.kind]


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    """Recipes in which some values are replaced."""
    data = copy.deepcopy(VALID)
    keys = [(table, key) for table, keys in schema.TABLES.items() for key in keys]
    for table, key in draw(st.lists(st.sampled_from(keys), max_size=4, unique_by=lambda pair: (pair[0], pair[1].name))):
        data[table][key.name] = draw(typed(key))
    return data


FACTS = {
    "nvidia_smi": {"found": True, "rc": 0},
    "driver_version": "535.1",
    "cards": [{"index": 0, "uuid": "GPU-0", "name": "X", "compute_capability": "6.0", "memory_mib": 16269}],
}


@given(recipes(), st.sampled_from(["podman", "docker"]), st.lists(any_text, max_size=3))
def test_the_command_of_any_valid_recipe_survives_a_shell(data: dict[str, Any], runtime: str, extra: list[str]) -> None:
    assume(validate(data) == [])
    choice = Choice(cache="/cache", command="info", runtime=runtime, extra_args=tuple(extra))
    try:
        rules.check_choice(choice)
    except Refusal:
        choice = Choice(cache="/cache", command="info", runtime=runtime)
    plan = plan_model([Recipe(data, "p")], HostFacts(from_facts(FACTS)), choice).plans[0]
    for command in (plan["command"], plan["exec"]):
        line = shlex.join(command)
        assert "\n" not in line
        assert shlex.split(line) == command
        pasted = text.command_text(command).replace(" \\\n", " ")
        assert shlex.split(pasted) == rules.masked(command)
    assert len(plan["plan_hash"]) == 64
    assert json.loads(json.dumps(plan)) == plan
    shown = text.info_text(plan) + text.dry_run_text(plan, "tensorless run x", ("pull", "serve"))
    assert not any(schema.breaks_line(line) for line in shown.split("\n"))


@given(recipes())
def test_a_valid_recipe_is_refused_only_for_its_state(data: dict[str, Any]) -> None:
    assume(validate(data) == [])
    facts = copy.deepcopy(FACTS)
    facts["driver_version"] = data["card"]["min_driver"]
    card = data["card"]
    facts["cards"][0] |= {"compute_capability": card["compute_capability"], "memory_mib": card["min_memory_mib"]}
    recipe = Recipe(data, "p")
    try:
        plan = plan_model([recipe], HostFacts(from_facts(facts)), Choice(cache="/c", allow_draft=True)).plans[0]
    except Refusal as refusal:
        branch = int(card["min_driver"].split(".")[0])
        too_new = card["compute_capability"].startswith("6.") and branch > 580
        assert recipe.unpublished or too_new, refusal.message
    else:
        assert plan["fits"] == "yes"


@given(tomlish)
def test_any_data_is_judged(data: Any) -> None:
    problems = validate(data, "a/b/c.toml")
    assert problems
    assert all("\n" not in problem and len(problem) < 2000 for problem in problems)


@given(st.sampled_from(list(schema.TABLES)), odd_text, tomlish)
def test_any_value_is_judged(table: str, key: str, value: Any) -> None:
    data = copy.deepcopy(VALID)
    data[table][key] = value
    assert all("\n" not in problem for problem in validate(data))
    data[table] = value
    validate(data)


@given(versions, versions, versions)
def test_versions_are_totally_ordered(a: str, b: str, c: str) -> None:
    assert compare_versions(a, a) == 0
    assert compare_versions(a, b) == -compare_versions(b, a)
    assert compare_versions(a, b) in (-1, 0, 1)
    if compare_versions(a, b) <= 0 and compare_versions(b, c) <= 0:
        assert compare_versions(a, c) <= 0
    if compare_versions(a, b) == 0:
        assert compare_versions(a, c) == compare_versions(b, c)


@given(st.lists(versions, max_size=6))
def test_versions_sort_as_numbers(listed: list[str]) -> None:
    padded = [tuple(int(part) for part in (version + ".0.0.0.0").split(".")[:4]) for version in listed]
    in_order = sorted(range(len(listed)), key=lambda at: padded[at])
    ours = sorted(range(len(listed)), key=functools.cmp_to_key(lambda x, y: compare_versions(listed[x], listed[y])))
    assert [padded[at] for at in ours] == [padded[at] for at in in_order]


maybe = st.none() | odd_text
choices = st.fixed_dictionaries(
    {
        "cache": odd_text | st.just("/cache"),
        "command": st.sampled_from(["run", "serve", "pull", "stop", "bench", "info", "models", "x"]),
        "revision": maybe,
        "card": maybe | st.just("x1"),
        "gpu": maybe | st.sampled_from(["0", "1", "each", "GPU-0"]),
        "runtime": odd_text | st.sampled_from(["auto", "docker"]),
        "host": odd_text | st.just("::1"),
        "port": whole | st.just(8080),
        "context": st.none() | whole,
        "extra_args": st.lists(odd_text, max_size=4).map(tuple),
        "allow_draft": st.booleans(),
        "endpoint": odd_text,
        "dry_run": st.booleans(),
        "assume_installed": st.booleans(),
        "service": st.booleans(),
        "api_key_file": maybe,
        "hardening": st.dictionaries(
            st.sampled_from(["memory", "pids_limit", "read_only", "x"]), odd_text | whole, max_size=2
        ),
        "suffix": st.booleans(),
    }
)
facts = st.fixed_dictionaries(
    {
        "nvidia_smi": st.fixed_dictionaries({"found": st.booleans(), "rc": st.sampled_from([0, 9, None])}),
        "driver_version": maybe | versions,
        "cards": st.lists(
            st.fixed_dictionaries(
                {
                    "index": st.integers(0, 3),
                    "uuid": maybe,
                    "name": maybe,
                    "compute_capability": maybe | st.just("6.0"),
                    "memory_mib": st.none() | st.integers(0, 20000),
                }
            ),
            max_size=3,
        ),
    }
)


@given(odd_text | st.sampled_from(["tiny", "Org/Tiny-GGUF", "tiny@" + "a" * 40]), choices, facts)
def test_no_input_raises_anything_but_a_refusal(model: str, values: dict[str, Any], seen: dict[str, Any]) -> None:
    host = HostFacts(gpus=from_facts(seen), cpu_count=2, runtimes=("docker",))
    try:
        found, revision = resolve(build_catalog([("Org/Tiny-GGUF/x1.toml", VALID, [])]), model)
    except Refusal as refusal:
        assert refusal.message
        found, revision = [Recipe(VALID)], values["revision"]
    try:
        planned = plan_model(found, host, Choice(**{**values, "revision": revision}))
    except Refusal as refusal:
        assert refusal.message
        assert refusal.rc in (1, 2)
    else:
        for plan in planned.plans:
            assert text.info_text(plan)
            assert text.dry_run_text(plan, "x", ("pull", "serve"))
            assert json.dumps(text.info_json(plan))
