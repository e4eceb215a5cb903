# SPDX-License-Identifier: Apache-2.0
"""Recipe schema 1, as data: every table, key, type and rule. Validation and the published JSON Schema both read it.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

# A rule says what is wrong with a value of the right type, or None.
Rule = Callable[[Any], Optional[str]]

SCHEMA = 1
STATUSES = ("draft", "released")
OWNED_VARIABLE = "OMP_NUM_THREADS"
# llama-server flags that the launcher sets itself, each in its spellings.
OWNED_FLAGS = (
    "-m",
    "--model",
    "--host",
    "--port",
    "-c",
    "--ctx-size",
    "-a",
    "--alias",
    "-t",
    "--threads",
    "-tb",
    "--threads-batch",
)
_OWNED = frozenset(OWNED_FLAGS)
_LARGEST = 2**63 - 1  # TOML promises 64-bit integers; a larger one is a slip

SHORT_NAME = r"[a-z0-9._-]+"
REPO_ID = r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+"
LONGEST_REPO = 180  # with what a container's name adds, 200: what a unit and a container can both be called
COMMIT = r"[0-9a-f]{40}"
SHA256 = r"[0-9a-f]{64}"
ALIAS = r"[A-Za-z0-9._/-]+"
VERSION = r"[0-9]{1,9}(\.[0-9]{1,9})*"
CAPABILITY = r"[0-9]{1,3}\.[0-9]{1,3}"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
# A registry (with a port if it has a dot, a colon or is localhost), then lower-case path parts; never a tag.
IMAGE = (
    r"((?:[A-Za-z0-9]+(?:[.-]+[A-Za-z0-9]+)*|\[[0-9A-Fa-f:]+\])(?::[0-9]+)?/)?"
    r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
    r"@sha256:[0-9a-f]{64}"
)


_REPO = re.compile(REPO_ID)
_IMAGE = re.compile(IMAGE)
_VARIABLE = re.compile(VARIABLE)


def owned_flag(argument: str) -> Optional[str]:
    """The launcher-owned flag that this argument sets, as it was written, or None.

    `--flag=value` sets --flag, and llama-server reads `--ctx_size` as `--ctx-size`.
    """
    flag = argument.split("=", 1)[0]
    plain = flag.replace("_", "-") if flag.startswith("--") else flag
    return flag if plain in _OWNED else None


def has_control(text: str) -> bool:
    """Whether a text holds a newline or another control character."""
    return not text.isprintable() and any(ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u2028\u2029" for c in text)


def shown(value: Any) -> str:
    """A value as a message quotes it: short, and on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    text = text if len(text) <= 300 else text[:297] + "..."
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return f'"{text}"' if isinstance(value, str) else text


def kind_of(value: Any) -> str:
    """The type of a value in TOML's words."""
    for kind, name in (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a float"),
        (str, "a string"),
        (list, "an array"),
        (dict, "a table"),
    ):
        if isinstance(value, kind):
            return name
    return "a date or time"


def _pattern(pattern: str, words: str) -> Rule:
    compiled = re.compile(pattern)

    def rule(value: str) -> Optional[str]:
        return None if compiled.fullmatch(value) else f"must be {words}, not {shown(value)}"

    return rule


def _one_line(value: str) -> Optional[str]:
    if not value.strip():
        return "must not be empty"
    return _clean(value)


def _clean(value: str) -> Optional[str]:
    return "must be one line without control characters" if has_control(value) else None


def _positive(value: int) -> Optional[str]:
    if value > _LARGEST:
        return "must fit 64 bits"
    return None if value > 0 else f"must be positive, not {value}"


def _not_negative(value: int) -> Optional[str]:
    if value > _LARGEST:
        return "must fit 64 bits"
    return None if value >= 0 else f"must not be negative, not {value}"


def _status(value: str) -> Optional[str]:
    return None if value in STATUSES else f'must be "draft" or "released", not {shown(value)}'


def _repo(value: str) -> Optional[str]:
    parts = value.split("/")
    if len(value) > LONGEST_REPO:
        return f"must be at most {LONGEST_REPO} characters: units and containers are named after it"
    if _REPO.fullmatch(value) and not {".", ".."} & set(parts):
        return None
    return f"must be a Hugging Face repository, org/name in letters, digits, '.', '_' and '-', not {shown(value)}"


def _file(value: str) -> Optional[str]:
    if ":" in value or "\\" in value or has_control(value):
        return f"must not contain ':', a backslash or a newline: {shown(value)}"
    if any(part in ("", ".", "..") for part in value.split("/")):
        return f"must be a clean relative path with forward slashes (no '..'), not {shown(value)}"
    return None


def _image(value: str) -> Optional[str]:
    if _IMAGE.fullmatch(value):
        return None
    return f"must be pinned by digest (name@sha256:<64 hex>), not {shown(value)}"


def _args(value: Sequence[Any]) -> Optional[str]:
    bad = [item for item in value if not isinstance(item, str)]
    if bad:
        return f"must be an array of strings; it holds {kind_of(bad[0])}"
    flags = [flag for flag in map(owned_flag, value) if flag]
    if flags:
        return f"must not set {', '.join(flags)}; the launcher sets it"
    if any(map(breaks_line, value)):
        return "must not contain a newline or another control character"
    return None


def breaks_line(text: str) -> bool:
    """Whether a text cannot be one argument of a program (NUL) or of a command that is shown on a terminal as lines."""
    return not text.isprintable() and has_control(text.replace("\t", " "))


def _env(value: dict[str, Any]) -> Optional[str]:
    for name, item in value.items():
        if not _VARIABLE.fullmatch(name):
            return f"has {shown(name)}, which is not a valid variable name"
        if name == OWNED_VARIABLE:
            return f"must not set {OWNED_VARIABLE}; the launcher sets it"
        if not isinstance(item, str):
            return f"{name} must be a string, not {kind_of(item)}"
        if breaks_line(item):
            return f"{name} must not contain a newline or another control character"
    return None


def _speeds(value: dict[str, Any]) -> Optional[str]:
    for name, item in value.items():
        if isinstance(item, bool) or not isinstance(item, (int, float)):
            return f"{shown(name)} must be a number, not {kind_of(item)}"
        if not 0 <= item <= _LARGEST or not math.isfinite(item):
            return (
                f"{shown(name)} must be a number that is not negative, not {item if abs(item) < _LARGEST else 'this'}"
            )
    return None


def _notes(value: Sequence[Any]) -> Optional[str]:
    bad = [item for item in value if not isinstance(item, str)]
    return f"must be an array of strings; it holds {kind_of(bad[0])}" if bad else None


@dataclass(frozen=True)
class Key:
    """One key of a table: its type in TOML's words, its rule, and what the JSON Schema says of it."""

    name: str
    kind: type
    meaning: str
    rule: Optional[Rule] = None
    required: bool = True
    json: Optional[dict[str, Any]] = None

    @property
    def kind_name(self) -> str:
        return kind_of(self.kind())


def _text(pattern: str) -> dict[str, Any]:
    return {"pattern": f"^{pattern}$"}


_LINE: dict[str, Any] = {"pattern": r"^[^\x00-\x1f\x7f]+$"}
_WHOLE: dict[str, Any] = {"minimum": 0, "maximum": _LARGEST}
_COUNT: dict[str, Any] = {"minimum": 1, "maximum": _LARGEST}
_SPEEDS: dict[str, Any] = {"additionalProperties": {"type": "number", "minimum": 0}}
_STRINGS: dict[str, Any] = {"items": {"type": "string"}}
_NOT_OWNED = "(?!(" + "|".join(re.escape(flag) for flag in OWNED_FLAGS) + ")(=|$))"
_WORD = r"[^\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]*"
_ARGS: dict[str, Any] = {"items": {"type": "string", "pattern": f"^{_NOT_OWNED}{_WORD}$"}}

TOP: tuple[Key, ...] = (
    Key("schema", int, "The recipe schema: 1.", json={"const": SCHEMA}),
    Key(
        "status",
        str,
        "draft, or released once its image was measured on its card.",
        _status,
        json={"enum": list(STATUSES)},
    ),
)

TABLES: dict[str, tuple[Key, ...]] = {
    "model": (
        Key(
            "name",
            str,
            "A short name that works wherever a repository does. No other model may have it.",
            _pattern(SHORT_NAME, "lower-case letters, digits, '.', '_' and '-'"),
            required=False,
            json=_text(SHORT_NAME),
        ),
        Key(
            "title",
            str,
            "A name for people, on one line.",
            _clean,
            required=False,
            json={"pattern": r"^[^\x00-\x1f\x7f]*$"},
        ),
        Key(
            "hf_repo",
            str,
            "The Hugging Face repository, org/name; the same as the directory.",
            _repo,
            json={**_text(REPO_ID), "maxLength": LONGEST_REPO},
        ),
        Key(
            "revision",
            str,
            "The commit: 40 lower-case hex characters. All zeros: not published.",
            _pattern(COMMIT, "a commit of 40 lower-case hex characters"),
            json=_text(COMMIT),
        ),
        Key(
            "file",
            str,
            "The weights file's path inside the repository.",
            _file,
            json={"pattern": r"^(?!\.{0,2}(/|$))(?!.*/\.{0,2}(/|$))[^:\\\x00-\x1f\x7f]+$"},
        ),
        Key(
            "sha256",
            str,
            "The file's sha256. All zeros: not published.",
            _pattern(SHA256, "64 lower-case hex characters"),
            json=_text(SHA256),
        ),
        Key("size_bytes", int, "The file's exact size. 0: not published.", _not_negative, json=_WHOLE),
        Key("license", str, "The model's licence.", _one_line, json=_LINE),
    ),
    "card": (
        Key(
            "id",
            str,
            "The card's id; the same as the file name without .toml.",
            _pattern(SHORT_NAME, "lower-case letters, digits, '.', '_' and '-'"),
            json=_text(SHORT_NAME),
        ),
        Key(
            "title",
            str,
            "The card's name for people.",
            _clean,
            required=False,
            json={"pattern": r"^[^\x00-\x1f\x7f]*$"},
        ),
        Key(
            "compute_capability",
            str,
            'What nvidia-smi reports as compute_cap, such as "6.0".',
            _pattern(CAPABILITY, 'two numbers with a dot, such as "6.0"'),
            json=_text(CAPABILITY),
        ),
        Key("min_memory_mib", int, "The least memory.total in MiB.", _positive, json=_COUNT),
        Key(
            "min_driver",
            str,
            "The oldest NVIDIA driver.",
            _pattern(VERSION, 'a dotted version such as "525.60.13"'),
            json=_text(VERSION),
        ),
    ),
    "engine": (
        Key("release", str, "The engine release that was measured.", _one_line, json=_LINE),
        Key("arch", str, "The image's GPU architecture, such as sm60.", _one_line, json=_LINE),
        Key("image", str, "The engine image, always by digest. All zeros: not published.", _image, json=_text(IMAGE)),
    ),
    "run": (
        Key(
            "alias",
            str,
            "The served model name.",
            _pattern(ALIAS, "letters, digits, '.', '_', '-' and '/'"),
            json=_text(ALIAS),
        ),
        Key("context", int, "The context length (-c).", _positive, json=_COUNT),
        Key("threads_max", int, "The most CPU threads to use.", _positive, json=_COUNT),
        Key("args", list, "Every other llama-server argument, in order.", _args, required=False, json=_ARGS),
        Key(
            "env",
            dict,
            "The engine switches.",
            _env,
            required=False,
            json={
                "propertyNames": {"pattern": f"^{VARIABLE}$", "not": {"const": OWNED_VARIABLE}},
                "additionalProperties": {"type": "string", "pattern": f"^{_WORD}$"},
            },
        ),
    ),
    "receipt": (
        Key("source", str, "Who measured, and on what build.", required=False),
        Key("summary", str, "One or two sentences on the result.", required=False),
        Key(
            "decode_tps",
            dict,
            "Decode in tokens a second; bench compares with short.",
            _speeds,
            required=False,
            json=_SPEEDS,
        ),
        Key("prefill_tps", dict, "Prefill in tokens a second.", _speeds, required=False, json=_SPEEDS),
        Key("notes", list, "The scope of each number.", _notes, required=False, json=_STRINGS),
    ),
}
OPTIONAL_TABLES = frozenset({"receipt"})

_JSON_TYPES = {int: "integer", str: "string", list: "array", dict: "object"}


def json_schema() -> dict[str, Any]:
    """The JSON Schema that editors use on recipe files; generated from the tables above."""

    def table(keys: Sequence[Key]) -> dict[str, Any]:
        properties = {
            key.name: {"type": _JSON_TYPES[key.kind], "description": key.meaning, **(key.json or {})} for key in keys
        }
        return {
            "type": "object",
            "properties": properties,
            "required": [key.name for key in keys if key.required],
            "additionalProperties": False,
        }

    root = table(TOP)
    for name, keys in TABLES.items():
        root["properties"][name] = table(keys)
    root["required"] += [name for name in TABLES if name not in OPTIONAL_TABLES]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tensorless recipe, schema 1: one model on one card",
        **root,
    }
