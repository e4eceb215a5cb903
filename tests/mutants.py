# SPDX-License-Identifier: Apache-2.0
"""Mutation testing of the planner and the validator: `make mutants`.

cosmic-ray makes the mutants; each is tried in a process forked from one that has imported pytest and all that the
tests need, but nothing of the collection. The child puts the changed module in place before anything imports it, so
every module and test that uses it gets the changed one. Nothing on disk is changed; the tests run on a copy of the
tree in .build/mutants, so that work can go on meanwhile.

Before the first mutant, the tests have to pass as they are and to fail for one known fault in each module. Prints
every mutant that lives, and exits 1 when fewer than 90 % were killed. Not part of CI.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Optional

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORK = ROOT / ".build/mutants"
TREE = WORK / "tree"
PACKAGE = "ansible_collections.tensorless.fleet.plugins.module_utils"
OURS = ("ansible_collections", "tensorless_fleet", "tests", "tools")
NEEDED = ("plugins/", "tests/", "tools/", "recipes/", "docs/reference/", "pyproject")
TESTS = ("plan", "plan_values", "plan_rules", "cards", "recipe_load", "plan_paths", "recipe_schema", "recipe_released")
# The modules under test, each with a fault that its tests have to see: (text, what takes its place).
MODULES: dict[str, tuple[str, str]] = {
    "_recipe_schema": ("value > 0 else", "value >= 0 else"),
    "_recipe": ("value != expected", "value == expected"),
    "_cards": ('gpu.memory_mib >= card["min_memory_mib"]', 'gpu.memory_mib > card["min_memory_mib"]'),
    "_plan": ('"-d", "--rm"', '"--rm", "-d"'),
    "_plan_rules": ('return " and ".join', 'return " or ".join'),
    "_plan_paths": ('"blobs", sha256', '"blob", sha256'),
}
LEAST = 0.9
CPU_SECONDS = 120  # of one mutant; the tests need about 5
WALL_SECONDS = 600  # of one mutant that waits and uses no CPU
MEMORY = 4 << 30
COSMIC_RAY = "cosmic-ray==8.7.0"  # not among the developers' tools: large, and needed for nothing else


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    operator: str
    occurrence: int

    def __str__(self) -> str:
        return f"{self.module}.py:{self.line} {self.operator} #{self.occurrence}"


def copy_tree() -> None:
    """A copy of the working tree, with the collection's link pointing into the copy."""
    shutil.rmtree(WORK, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_file() and name.startswith(NEEDED):
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, TREE / name)
    link = TREE / ".build/collections/ansible_collections/tensorless"
    link.mkdir(parents=True)
    (link / "fleet").symlink_to(TREE)


def source_of(module: str) -> str:
    return (TREE / f"plugins/module_utils/{module}.py").read_text(encoding="utf-8")


def all_mutants(module: str) -> Iterator[Mutant]:
    """Every mutant that cosmic-ray's operators make of a module, numbered as cosmic-ray does."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    tree = get_ast(source_of(module))
    for name in operator_names():
        kind = get_operator(name)
        if kind.arguments():
            continue  # needs names to be given; none of our business
        found = (start for node in ast_nodes(tree) for start, _end in kind().mutation_positions(node))
        for occurrence, start in enumerate(found):
            yield Mutant(module, start[0], name, occurrence)


def mutated(mutant: Mutant) -> str:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    code = mutate_code(source_of(mutant.module), get_operator(mutant.operator)(), mutant.occurrence)
    if code is None:
        raise RuntimeError(f"{mutant} cannot be made")
    return str(code)


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module of the collection from a text instead of its file."""

    def __init__(self, module: str, source: str) -> None:
        self.name = f"{PACKAGE}.{module}"
        self.path = str(TREE / f"plugins/module_utils/{module}.py")
        self.code = compile(source, self.path, "exec", dont_inherit=True)
        self.used = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Optional[importlib.machinery.ModuleSpec]:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        self.used = True
        exec(self.code, module.__dict__)


def ours() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in OURS]


def run_tests(names: list[str]) -> int:
    """File by file, so that a mutant that the first one kills costs no collecting of the others."""
    import pytest

    status = 0
    for name in names:
        words = ["-x", "-q", "--tb=no", "--no-header", "-p", "no:cacheprovider", "--assert=plain"]
        status = int(pytest.main([*words, f"tests/unit/recipe/test_{name}.py"]))
        if status:
            break
    return status


def in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a forked child makes of this; a child that takes too long or ends otherwise says so."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        try:
            answer = work()
        except BaseException:  # whatever a mutant does, the parent hears of it
            answer = {"error": traceback.format_exc()[-2000:]}
        with os.fdopen(write, "wb") as out:
            out.write(json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    received = b""
    deadline = time.monotonic() + WALL_SECONDS
    while select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
        block = os.read(read, 65536)
        if not block:
            break
        received += block
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.close(read)
    os.waitpid(pid, 0)
    result: dict[str, Any] = json.loads(received) if received else {"late": True}
    return result


def attempt(module: str, source: Callable[[], str]) -> dict[str, Any]:
    """In a child: the tests with this text as the module. Its own tests come first: they see most faults."""
    if ours():
        raise RuntimeError(f"the parent has imported what it tests: {ours()}")
    text = source()
    try:
        finder = Changed(module, text)
    except SyntaxError:  # cosmic-ray takes the stars of {**table} for a power
        return {"no_python": True}
    sys.meta_path.insert(0, finder)
    own = {"_recipe_schema": "recipe_schema", "_recipe": "recipe_load"}.get(module, module.strip("_"))
    status = run_tests(sorted(TESTS, key=lambda name: name != own))
    if not finder.used:
        raise RuntimeError(f"no test imported {module}")
    diff = difflib.unified_diff(source_of(module).splitlines(), text.splitlines(), lineterm="", n=0)
    lines = [line for line in diff if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    imported = sorted(name for name in sys.modules if name.partition(".")[0] not in OURS) if status == 0 else []
    return {"status": status, "diff": lines, "imported": imported}


def try_mutant(mutant: Mutant) -> dict[str, Any]:
    return in_child(lambda: attempt(mutant.module, lambda: mutated(mutant)))


def prove() -> None:
    """Warm up, then see that the tests pass as things are and notice a known fault in each module."""
    for module, (good, bad) in MODULES.items():
        text = source_of(module)
        result = in_child(lambda module=module, text=text: attempt(module, lambda: text))  # type: ignore[misc]
        if result.get("status") != 0:
            sys.exit(f"the tests fail without any mutant: {result.get('error', result.get('status'))}")
        for name in result["imported"]:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        if text.count(good) != 1:
            sys.exit(f"{module}.py no longer has the text {good!r} once: choose another known fault")
        fault = text.replace(good, bad)
        result = in_child(lambda module=module, fault=fault: attempt(module, lambda: fault))  # type: ignore[misc]
        if result.get("status") != 1:
            sys.exit(f"the tests do not see a known fault in {module}.py: {result.get('error', result.get('status'))}")
    print(f"the tests pass, and see a known fault in each of {len(MODULES)} modules", flush=True)


def outcome(result: dict[str, Any]) -> str:
    """What became of a mutant, in a word. pytest ends with 1 for a failed test and 2 for a module that cannot load."""
    if result.get("no_python"):
        return "no Python"
    if result.get("late"):
        return "stopped"
    return {0: "alive", 1: "killed", 2: "killed"}.get(result.get("status", -1), "error")


def worker(mutants: list[Mutant], log: pathlib.Path) -> None:
    with log.open("w", encoding="utf-8") as out:
        for mutant in mutants:
            result = try_mutant(mutant)
            line = {"mutant": str(mutant), "outcome": outcome(result), **result, "imported": None}
            out.write(json.dumps(line) + "\n")
            out.flush()


def survivors() -> set[str]:
    lines = [line for log in WORK.glob("results-*.jsonl") for line in log.read_text(encoding="utf-8").splitlines()]
    return {result["mutant"] for result in map(json.loads, lines) if result["outcome"] == "alive"}


def report(logs: list[pathlib.Path], expected: int) -> int:
    results = [json.loads(line) for log in logs for line in log.read_text(encoding="utf-8").splitlines()]
    for result in sorted(results, key=lambda result: result["mutant"]):
        if result["outcome"] in ("alive", "error"):
            print(result["mutant"], result.get("error", ""))
            print("\n".join("    " + line for line in result.get("diff", [])))
    for module in MODULES:
        counts = Counter(each["outcome"] for each in results if each["mutant"].startswith(module + ".py"))
        print(f"{module}: " + (", ".join(f"{number} {word}" for word, number in sorted(counts.items())) or "not tried"))
    counts = Counter(result["outcome"] for result in results)
    dead = counts["killed"] + counts["stopped"]  # a limit of time or memory is a failed test
    tried = dead + counts["alive"]
    print(f"{dead} of {tried} mutants killed ({dead / max(tried, 1):.1%}); {counts['no Python']} more were no Python")
    if counts["error"] or len(results) != expected:
        print(f"{counts['error']} could not be tried, {expected - len(results)} were not reached")
        return 1
    return 0 if tried and dead / tried >= LEAST else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="only so many mutants, picked at random but always the same")
    parser.add_argument("--again", action="store_true", help="only those that lived in the last run")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default 1)")
    parser.add_argument("modules", nargs="*", default=list(MODULES), help=f"some of: {' '.join(MODULES)}")
    given = parser.parse_args()
    if importlib.util.find_spec("cosmic_ray") is None:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", COSMIC_RAY], check=True)
    lived = survivors() if given.again else None
    copy_tree()
    os.chdir(TREE)
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.path[:0] = [f"{TREE}/.build/collections", str(TREE)]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none of them is needed, and each mutant pays for their start
    prove()
    mutants = [mutant for module in given.modules for mutant in all_mutants(module)]
    mutants = [mutant for mutant in mutants if lived is None or str(mutant) in lived]
    mutants = random.Random(1).sample(mutants, min(given.sample or len(mutants), len(mutants)))
    print(f"{len(mutants)} mutants", flush=True)
    logs, children = [], []
    for number in range(given.jobs):
        log = WORK / f"results-{number}.jsonl"
        logs.append(log)
        pid = os.fork()
        if pid == 0:
            status = 1
            with contextlib.suppress(KeyboardInterrupt):
                worker(mutants[number :: given.jobs], log)
                status = 0
            os._exit(status)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    return report(logs, len(mutants))


if __name__ == "__main__":
    sys.exit(main())
