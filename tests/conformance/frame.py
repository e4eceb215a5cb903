# SPDX-License-Identifier: Apache-2.0
"""What every area's driver shares: recipes of a case, a fake clock, a local HTTP server, and the comparison.

A driver is a file area_NN_<name>.py with AREA (the cases' area), run_case(case, env) -> got and, where a key of expect
is not simply equal to the key of the same name in got, CHECKS[key](expected, got, case) -> None or what is wrong.
`got` holds failed (bool), exit_code, message, output, notes, warnings and any key of `expect`.
"""

from __future__ import annotations

import copy
import heapq
import json
import pathlib
import threading
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import tomllib
import yaml
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Catalog, load_directory

ROOT = pathlib.Path(__file__).resolve().parents[2]
ACCEPTED = ("loads", "resolves", "selected", "allowed", "reported", "accepted")
Check = Callable[[Any, dict[str, Any], dict[str, Any]], "str | None"]


class FakeClock:
    """Time that passes only when somebody sleeps; callbacks set with at() run on the way."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self.start = start
        self.passed = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.start + self.passed

    def monotonic(self) -> float:
        return self.passed

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def at(self, seconds: float, callback: Callable[[], None]) -> None:
        """Run callback once `seconds` have passed since the start."""
        heapq.heappush(self._due, (seconds, len(self._due), callback))

    def advance(self, seconds: float) -> None:
        end = self.passed + max(0.0, seconds)
        while self._due and self._due[0][0] <= end:
            when, _order, callback = heapq.heappop(self._due)
            self.passed = max(self.passed, when)
            callback()
        self.passed = end


class Env:
    """What a driver gets for one case. Everything it opens is closed after the case."""

    def __init__(self, tmp: pathlib.Path, fixtures: pathlib.Path | None) -> None:
        self.tmp = tmp
        self.clock = FakeClock()
        self._fixtures = fixtures
        self._stack = ExitStack()

    def close(self) -> None:
        self._stack.close()

    def fixture(self, name: str) -> dict[str, Any]:
        """One of the two released recipes, as data: beside the cases, else the product's own."""
        if self._fixtures is not None:
            loaded: dict[str, Any] = yaml.safe_load((self._fixtures / f"{name}.yml").read_text(encoding="utf-8"))
            return loaded
        for path in sorted((ROOT / "recipes").glob("*/*/*.toml")):
            data = tomllib.loads(path.read_text(encoding="utf-8"))
            if data["model"].get("name") == name:
                return data
        raise KeyError(name)

    def recipe(self, given: dict[str, Any]) -> dict[str, Any]:
        """The recipe of a case with `recipe` and an optional `patch`."""
        return patched(self.fixture(given["recipe"]), given.get("patch"))

    def recipes(self, given: dict[str, Any]) -> dict[str, Any]:
        """path -> recipe (a dict, or raw text) for `files`, `recipes` or `recipe`."""
        spec = given.get("files", given.get("recipes", "released" if "recipe" not in given else None))
        if spec is None:
            data = self.recipe(given)
            return {f"{self.fixture(given['recipe'])['model']['hf_repo']}/p100.toml": data}
        if spec == "released":
            both = [self.fixture(name) for name in ("pn3", "q3floor")]
            return {f"{data['model']['hf_repo']}/{data['card']['id']}.toml": data for data in both}
        return {
            entry["path"]: entry["text"]
            if "text" in entry
            else patched(self.fixture(entry["base"]), entry.get("patch"))
            for entry in spec
        }

    def write_recipes(self, given: dict[str, Any]) -> pathlib.Path:
        """The case's recipes as files in a directory of their own."""
        directory = self.tmp / "recipes"
        for path, data in self.recipes(given).items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(data if isinstance(data, str) else to_toml(data), encoding="utf-8", newline="")
        directory.mkdir(exist_ok=True)
        return directory

    def catalog(self, given: dict[str, Any]) -> Catalog:
        """The case's recipes, loaded and validated by the product."""
        return load_directory(str(self.write_recipes(given)))

    def load(self, given: dict[str, Any]) -> list[Any]:
        """The validated recipes of a case."""
        return self.catalog(given).recipes

    def serve(self, handler: type[BaseHTTPRequestHandler], host: str = "127.0.0.1") -> str:
        """A real HTTP server on this machine; returns its address."""
        server = ThreadingHTTPServer((host, 0), handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._stack.callback(stop)
        return f"http://{host}:{server.server_address[1]}"

    def on_close(self, callback: Callable[[], Any]) -> None:
        """Run something after the case."""
        self._stack.callback(callback)


def patched(recipe: dict[str, Any], patch: list[dict[str, Any]] | None) -> dict[str, Any]:
    """A copy of a recipe with the patch steps of a case applied in order."""
    out = copy.deepcopy(recipe)
    for step in patch or []:
        node = out
        for key in step["path"][:-1]:
            node = node.setdefault(key, {})
        last = step["path"][-1]
        if step["op"] == "set":
            node[last] = copy.deepcopy(step["value"])
        elif step["op"] == "unset":
            del node[last]
        elif step["op"] == "append":
            node[last] = [*node.get(last, []), *step["values"]]
        else:
            raise ValueError(f"unknown patch step {step['op']!r}")
    return out


def to_toml(data: dict[str, Any]) -> str:
    """A dict as TOML: plain, for tests only."""
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in data.items())


def _key(key: str) -> str:
    return _value(str(key))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (int, float)):
        return {"inf": "inf", "-inf": "-inf", "nan": "nan"}.get(repr(value), repr(value))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    return value.isoformat() if hasattr(value, "isoformat") else _value(str(value))


def compare(case: dict[str, Any], got: dict[str, Any], checks: dict[str, Check]) -> list[str]:
    """What does not hold, each with what was expected and what came; an empty list: the case passes."""
    return _compare(case["expect"], case, got, checks)


def _compare(expect: dict[str, Any], case: dict[str, Any], got: dict[str, Any], checks: dict[str, Check]) -> list[str]:
    problems = []
    tolerance = expect.get("tolerance", case["expect"].get("tolerance", 0))
    for key, expected in expect.items():
        if key == "tolerance":
            continue
        if key in checks:
            problem = checks[key](expected, got, case)
        elif key == "any_of":
            tries = [_compare(one, case, got, checks) for one in expected]
            problem = None if any(not one for one in tries) else f"none of any_of holds: {tries}"
        elif key in _COMMON:
            problem = _COMMON[key](expected, got)
        elif key not in got:
            problem = f"{key}: expected {expected!r}, the driver reports no {key}"
        else:
            problem = (
                None if _same(expected, got[key], tolerance) else f"{key}: expected {expected!r}, got {got[key]!r}"
            )
        if problem:
            problems.append(problem)
    return problems


def _same(expected: Any, value: Any, tolerance: float) -> bool:
    numbers = (int, float)
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, numbers) and isinstance(value, numbers):
        return abs(expected - value) <= tolerance
    if isinstance(expected, dict) and isinstance(value, dict):
        return all(key in value and _same(item, value[key], tolerance) for key, item in expected.items())
    if isinstance(expected, list) and isinstance(value, (list, tuple)):
        return len(expected) == len(value) and all(_same(a, b, tolerance) for a, b in zip(expected, value))
    return bool(expected == value)


def text_of(value: Any) -> str:
    """All text in a value, for searching."""
    if isinstance(value, dict):
        return "\n".join(text_of(item) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple, set)):
        return "\n".join(map(text_of, value))
    return "" if value is None else str(value)


def _message(got: dict[str, Any]) -> str:
    return text_of(got.get("message"))


def _notes(got: dict[str, Any]) -> str:
    return text_of([got.get("notes"), got.get("warnings")])


def _everything(got: dict[str, Any]) -> str:
    return text_of(got)


def _outcome(expected: str, got: dict[str, Any]) -> str | None:
    failed = bool(got["failed"])
    if expected in ACCEPTED:
        return None if not failed else f"outcome: expected {expected}, but it failed: {_message(got)!r}"
    if expected == "refused":
        return None if failed else "outcome: expected a refusal, but it was accepted"
    if expected == "refused_or_flagged":
        flagged = failed or bool(got.get("warnings") or got.get("notes"))
        return None if flagged else "outcome: expected a refusal or a warning, there was neither"
    return f"outcome: the runner does not know {expected!r}"


def _each(where: Callable[[dict[str, Any]], str], fold: bool = False, one: bool = False, lack: bool = False) -> Any:
    def check(expected: Any, got: dict[str, Any]) -> str | None:
        words = [expected] if isinstance(expected, str) else [str(word) for word in expected]
        text = where(got)
        haystack = text.lower() if fold else text
        there = [word for word in words if (word.lower() if fold else word) in haystack]
        if lack:
            return f"expected none of {there} in {text!r}" if there else None
        if one:
            return None if there else f"expected one of {words} in {text!r}"
        missing = [word for word in words if word not in there]
        return f"expected {missing} in {text!r}" if missing else None

    return check


_COMMON: dict[str, Callable[[Any, dict[str, Any]], str | None]] = {
    "failed": lambda want, got: None if bool(got["failed"]) is want else f"failed: expected {want}; {_message(got)!r}",
    "exit_code": lambda want, got: (
        None if got.get("exit_code") == want else f"exit_code: expected {want}, got {got.get('exit_code')!r}"
    ),
    "outcome": _outcome,
    "message_contains": _each(_message),
    "message_contains_any": _each(_message, one=True),
    "message_mentions": _each(_message, fold=True),
    "message_mentions_any": _each(lambda got: _message(got) + "\n" + _notes(got), fold=True, one=True),
    "message_lacks": _each(_message, lack=True),
    "message_exact": lambda want, got: (
        None if _message(got) == want else f"message: expected {want!r}, got {_message(got)!r}"
    ),
    "output_contains": _each(_everything),
    "output_contains_any": _each(_everything, one=True),
    "output_mentions": _each(_everything, fold=True),
    "output_lacks": _each(_everything, lack=True),
    "note_exact": lambda want, got: (
        None
        if want.removeprefix("note: ") in [*(got.get("notes") or []), *(got.get("warnings") or [])]
        else f"note: expected {want!r}, got {_notes(got)!r}"
    ),
    "notes_mention": _each(_notes, fold=True),
    "warning_mentions": _each(_notes, fold=True),
}
