# SPDX-License-Identifier: Apache-2.0
"""Schema 1: every key, its type and its rule; and the JSON Schema that comes from the same tables."""

from __future__ import annotations

import datetime
from typing import Any

import jsonschema
import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _recipe_schema as schema
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import validate

from tests.unit.recipe.recipe_made import DIGEST, VALID, changed
from tools.recipe_schema import TARGET, text

PATH = "Org/Tiny-GGUF/x1.toml"
KEYS = [(table, key) for table, keys in schema.TABLES.items() for key in keys]
NAMES = [f"{table}.{key.name}" for table, key in KEYS]


def test_the_valid_recipe_has_no_problem() -> None:
    assert validate(VALID, PATH) == []


@pytest.mark.parametrize(("table", "key"), KEYS, ids=NAMES)
def test_each_key_is_required_or_not_as_documented(table: str, key: schema.Key) -> None:
    data = changed()
    data.setdefault(table, {}).pop(key.name, None)
    optional = {"name", "title", "args", "env", "source", "summary", "decode_tps", "prefill_tps", "notes"}
    assert key.required == (key.name not in optional)
    assert validate(data) == ([f"{table}.{key.name} is required"] if key.required else [])


WRONG: tuple[Any, ...] = (None, True, 1, 1.5, "text", [], {}, datetime.date(2026, 1, 1))


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [(table, key, value) for table, key in KEYS for value in WRONG if type(value) is not key.kind],
)
def test_each_key_refuses_other_types(table: str, key: schema.Key, value: Any) -> None:
    data = changed()
    data.setdefault(table, {})[key.name] = value
    problems = validate(data)
    assert problems == [f"{table}.{key.name} must be {key.kind_name}, not {schema.kind_of(value)}"]


def test_types_are_named_in_toml_words() -> None:
    words = [
        "a date or time",
        "a boolean",
        "an integer",
        "a float",
        "a string",
        "an array",
        "a table",
        "a date or time",
    ]
    assert [schema.kind_of(value) for value in WRONG] == words


@pytest.mark.parametrize("table", ["model", "card", "engine", "run", "receipt"])
def test_tables(table: str) -> None:
    problems = validate(changed(**{table: "text"}))
    assert problems == [f"{table} must be a table, not a string"]
    problems = validate(changed(**{table: ...}))
    if table == "receipt":
        assert problems == []
    else:
        required = ", ".join(key.name for key in schema.TABLES[table] if key.required)
        assert problems == [f"[{table}] is required, with {required}"]


def test_unknown_keys_are_named_at_every_level_in_one_line() -> None:
    data = changed(extra=1, Model={}, model__memory=1, card__x=1, engine__tag=1, run__contxt=1, receipt__when=1)
    data["run"]["odd key\n"] = 1
    assert validate(data) == [
        "unknown keys: Model, extra, model.memory, card.x, engine.tag, run.contxt, " + '"run.odd key\\n", receipt.when'
    ]


def test_a_misspelt_required_key_is_named_with_the_missing_one() -> None:
    data = changed(run__context=..., run__contxet=65536)
    assert validate(data) == ["unknown keys: run.contxet", "run.context is required"]


@pytest.mark.parametrize("number", [2, 0, -1, "1", 1.0, True, None, [1]])
def test_another_schema_asks_for_an_update_and_nothing_else(number: Any) -> None:
    problems = validate(changed(schema=number, status="odd"))
    assert len(problems) == 1
    assert problems[0].startswith("schema must be the integer 1, not ")
    assert problems[0].endswith("this recipe is for another version; update tensorless")


def test_schema_and_status_are_required() -> None:
    assert validate(changed(schema=..., status=...)) == ["schema is required", "status is required"]


@pytest.mark.parametrize("data", [None, [], "text", 1])
def test_a_recipe_is_a_table(data: Any) -> None:
    assert validate(data) == [f"a recipe is a table, not {schema.kind_of(data)}"]


HEX40, HEX64 = "a1" * 20, "a1" * 32
GOOD: dict[str, list[Any]] = {
    "status": ["draft", "released"],
    "model__name": ["a", "a.b_c-9", "0"],
    "model__title": ["", "Ein Titel (äöü)", "{{ 7 * 7 }}"],
    "model__hf_repo": ["o/" + "x" * 178, "A.b_c-9/..."],
    "model__revision": [HEX40, "0" * 40],
    "model__file": ["a.gguf", "a/b/c.gguf", "...", "..a", "a..b", "with space.gguf", "{{ x }}.gguf"],
    "model__sha256": [HEX64, "0" * 64],
    "model__size_bytes": [0, 1, 2**63 - 1],
    "model__license": ["MIT", " MIT"],
    "card__compute_capability": ["6.0", "12.1"],
    "card__min_memory_mib": [1, 16000],
    "card__min_driver": ["525", "525.60.13", "1.2.3.4.5"],
    "card__title": ["", "x"],
    "engine__release": ["engine-v0.1.0"],
    "engine__arch": ["sm60"],
    "engine__image": [f"{name}@sha256:{HEX64}" for name in ("a", "a/b", "r.io/a/b_c", "localhost:5000/a", "[::1]:5/a")],
    "run__alias": ["a", "A/b.c_d-e", "/"],
    "run__context": [1, 65536],
    "run__threads_max": [1, 8],
    "run__args": [
        [],
        ["--threads-http", "4", "-ctk", "q8_0", "-mg", "0", "--cache-type-v", "q8_0"],
        ["{{ x }}"],
        ["ä b"],
    ],
    "run__env": [{}, {"_A": "", "a9": "x=y"}, {"OMP_NUM_THREADS_X": "1"}, {"A": "{{ 7 * 7 }}"}],
    "receipt__source": ["", "anyone\nanywhere"],
    "receipt__summary": ["x"],
    "receipt__decode_tps": [{}, {"short": 0}, {"short": 1, "anything else": 2.5}],
    "receipt__prefill_tps": [{"ctx_4k": 121.4}],
    "receipt__notes": [[], ["a", "b\nc"]],
}
BAD: dict[str, list[Any]] = {
    "status": ["", "Released", "beta", "draft "],
    "model__name": ["", "PN3", "my pn3", "a/b", "ä", "a\n"],
    "model__title": ["a\nb", "a\x1bb", "a\x7f", "a\u2028b"],
    "model__hf_repo": [
        "o/" + "x" * 179,
        "",
        "a",
        "a/b/c",
        "/b",
        "a/",
        "a b/c",
        "a/..",
        "../b",
        "./b",
        "a/b\n",
        "ä/b",
        "a@b/c",
    ],
    "model__revision": ["", "main", "a1", HEX40[:-1], HEX40 + "a", HEX40.upper(), HEX40 + "\n", "g" * 40],
    "model__file": ["", "/a", "a/", "a//b", "./a", "a/./b", "../a", "a/../b", "..", ".", "a\\b", "a:b", "a\n", "a\0b"],
    "model__sha256": ["", HEX64[:-1], HEX64 + "a", HEX64.upper(), "sha256:" + HEX64, "z" * 64],
    "model__size_bytes": [-1, 2**63],
    "model__license": ["", " ", "a\nb"],
    "card__id": ["", "P100", "p 100", "p/100", "p100\n"],
    "card__compute_capability": ["", "6", "6.", ".0", "6.0.0", "sm60", "6.0 ", "\u0666.\u0660"],
    "card__min_memory_mib": [0, -1, 2**63],
    "card__min_driver": ["", "latest", "525.", ".525", "525.60.x", "v525", "525 ", "1" * 10],
    "card__title": ["a\nb"],
    "engine__release": ["", "a\tb"],
    "engine__arch": ["", "\n"],
    "engine__image": [
        "",
        "a",
        "a:1",
        f"a:1@sha256:{HEX64}",
        f"@sha256:{HEX64}",
        f"a@sha512:{HEX64}",
        f"a@sha256:{HEX64[:-1]}",
        f"a@sha256:{HEX64}0",
        f"a@sha256:{HEX64.upper()}",
        f"a@sha256:{HEX64}\n",
        f"a@b@sha256:{HEX64}",
        f"--privileged@sha256:{HEX64}",
        f"A@sha256:{HEX64}",
        f"a b@sha256:{HEX64}",
        f"r.io:x/a@sha256:{HEX64}",
    ],
    "run__alias": ["", "my model", "a:b", "$(id)", "a\n", "ä"],
    "run__context": [0, -1, 2**63],
    "run__threads_max": [0, -8],
    "run__args": [["-np", 1], [True], ["a\nb"], ["a\0"], ["a\r"], ["\x1b"], ["\u2029"], [["x"]]],
    "run__env": [
        {"1A": "1"},
        {"A=B": "1"},
        {"": "1"},
        {"A B": "1"},
        {"A": 1},
        {"A": "x\ny"},
        {"A": "\0"},
        {"A\n": "1"},
    ],
    "receipt__decode_tps": [
        {"short": -0.1},
        {"short": True},
        {"short": "30"},
        {"short": float("nan")},
        {"x": float("inf")},
    ],
    "receipt__prefill_tps": [{"ctx_4k": None}],
    "receipt__notes": [[1], ["a", False]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_good_values(name: str, value: Any) -> None:
    data = changed(**{name: value})
    assert validate(data) == []
    jsonschema.Draft202012Validator(schema.json_schema()).validate(data)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_values(name: str, value: Any) -> None:
    problems = validate(changed(**{name: value}))
    assert len(problems) == 1
    assert problems[0].startswith(name.replace("__", ".") + " ")
    assert "\n" not in problems[0]


@pytest.mark.parametrize("flag", schema.OWNED_FLAGS)
@pytest.mark.parametrize("form", ["{}", "{}=1"])
def test_owned_flags(flag: str, form: str) -> None:
    problems = validate(changed(run__args=["-np", "1", form.format(flag)]))
    assert problems == [f"run.args must not set {flag}; the launcher sets it"]


def test_owned_flags_as_llama_server_reads_them() -> None:
    assert schema.owned_flag("--ctx_size=1") == "--ctx_size"
    assert schema.owned_flag("--threads_batch") == "--threads_batch"
    assert schema.owned_flag("-m_x") is None
    assert validate(changed(run__args=["-c", "1", "--port=2"])) == [
        "run.args must not set -c, --port; the launcher sets it"
    ]


def test_the_documented_messages() -> None:
    data = changed(engine__image="ghcr.io/x/y:0.1.0-sm60", run__env={"OMP_NUM_THREADS": "4"})
    assert validate(data) == [
        'engine.image must be pinned by digest (name@sha256:<64 hex>), not "ghcr.io/x/y:0.1.0-sm60"',
        "run.env must not set OMP_NUM_THREADS; the launcher sets it",
    ]


def test_messages_name_the_kind_that_is_needed_and_unknown_keys_come_first() -> None:
    data = changed(model__size_bytes="1", card__id=1, run__args="-b", run__env=[], receipt__notes={}, later=1)
    assert validate(data) == [
        "unknown keys: later",
        "model.size_bytes must be an integer, not a string",
        "card.id must be a string, not an integer",
        "run.args must be an array, not a string",
        "run.env must be a table, not an array",
        "receipt.notes must be an array, not a table",
    ]


def test_the_largest_numbers() -> None:
    keys = ("model__size_bytes", "card__min_memory_mib", "run__context", "run__threads_max")
    assert validate(changed(**dict.fromkeys(keys, 2**63 - 1))) == []
    assert len(validate(changed(**dict.fromkeys(keys, 2**63)))) == 4


def test_the_first_value_of_a_wrong_kind_is_named() -> None:
    problems = validate(changed(run__args=["-b", 1, True], receipt__notes=["x", 1.5, 1]))
    assert problems == [
        "run.args must be an array of strings; it holds an integer",
        "receipt.notes must be an array of strings; it holds a float",
    ]


def test_messages_say_what_was_found() -> None:
    data = changed(card__min_memory_mib=0, model__size_bytes=-5, model__revision="main", run__context=2**63)
    assert validate(data) == [
        'model.revision must be a commit of 40 lower-case hex characters, not "main"',
        "model.size_bytes must not be negative, not -5",
        "card.min_memory_mib must be positive, not 0",
        "run.context must fit 64 bits",
    ]


def test_long_and_odd_values_are_shown_short_and_on_one_line() -> None:
    assert schema.shown("a\x1b\n") == '"a\\x1b\\n"'
    assert schema.shown("x" * 400) == '"' + "x" * 297 + '..."'
    assert schema.shown("x" * 300) == '"' + "x" * 300 + '"'
    assert schema.shown("x" * 301) == '"' + "x" * 297 + '..."'
    assert schema.shown(True) == "true"
    assert schema.shown(False) == "false"
    assert schema.shown(2.5) == "2.5"
    assert len(schema.shown(list(range(1000)))) == 300


def test_speeds_that_cannot_be_are_shown_where_they_can_be_read() -> None:
    for value, words in ((-0.1, "-0.1"), (2**63, "this"), (-(2**63), "this"), (1e300, "this"), (float("nan"), "this")):
        assert validate(changed(receipt__decode_tps={"short": value})) == [
            f'receipt.decode_tps "short" must be a number that is not negative, not {words}'
        ]
    assert validate(changed(receipt__decode_tps={"short": 2**63 - 1, "x": 0})) == []


def test_what_breaks_a_line() -> None:
    for word in ("\0", "a\x1f", "\x7f", "\x80", "\x9f", "\u2028", "\u2029", "\t"):
        assert schema.has_control(word)
    for word in ("", "a b", " \u200b", "~\u200b", "\xa0\xad", "\u202e"):
        assert not schema.has_control(word)


@pytest.mark.parametrize(
    ("path", "problems"),
    [
        ("Org/Tiny-GGUF/x1.toml", []),
        ("org/Tiny-GGUF/x1.toml", ['model.hf_repo "Org/Tiny-GGUF" does not match the directory "org/Tiny-GGUF"']),
        ("Org/Tiny-GGUF/x2.toml", ['card.id "x1" does not match the file name "x2"']),
    ],
)
def test_a_recipe_sits_where_it_says(path: str, problems: list[str]) -> None:
    assert validate(VALID, path) == problems


def test_path_and_values_are_compared_even_where_a_table_is_wrong() -> None:
    problems = validate(changed(model="x", card__id="y1"), PATH)
    assert problems == ["model must be a table, not a string", 'card.id "y1" does not match the file name "x1"']


def test_the_published_json_schema_is_up_to_date() -> None:
    assert TARGET.read_text(encoding="utf-8") == text(), "run: python tools/recipe_schema.py"


def test_the_json_schema_is_one_and_refuses_what_it_can_express() -> None:
    validator = jsonschema.Draft202012Validator(schema.json_schema())
    jsonschema.Draft202012Validator.check_schema(schema.json_schema())
    # Not expressible, or read otherwise by this library's regular expressions ($ before a newline) and numbers.
    beyond = {
        "a\n",
        "\n",
        "a/b\n",
        "p100\n",
        HEX40 + "\n",
        f"a@sha256:{HEX64}\n",
        " ",
        "a\u2028b",
        "a/..",
        "../b",
        "./b",
    }
    for name, values in BAD.items():
        for value in values:
            if isinstance(value, str) and value in beyond:
                continue
            if isinstance(value, dict) and ("A\n" in value or any(item != item for item in value.values())):
                continue
            if value == {"x": float("inf")}:
                continue
            assert not validator.is_valid(changed(**{name: value})), (name, value)
    assert not validator.is_valid(changed(schema=2))
    assert not validator.is_valid(changed(extra=1))
    assert not validator.is_valid(changed(run__args=["--port=1"]))
    assert not validator.is_valid(changed(run__env={"OMP_NUM_THREADS": "1"}))
    assert validator.is_valid(changed(receipt=...))
    assert DIGEST in VALID["engine"]["image"]
