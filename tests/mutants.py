# SPDX-License-Identifier: Apache-2.0
"""Mutation testing of the planner and the validator with cosmic-ray: `make mutants`.

Works on a copy of the tree in .build/mutants, since cosmic-ray changes files in place. Prints every mutant that the
tests of tests/unit/recipe let live, and exits 1 when fewer than 90 % were killed. Not part of CI: the whole takes an
hour or more; `--sample N` tries only N mutants, always the same ones.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import random
import shutil
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORK = ROOT / ".build/mutants"
NAMES = ("_recipe_schema", "_recipe", "_cards", "_plan", "_plan_rules", "_plan_paths")
MODULES = [f"plugins/module_utils/{name}.py" for name in NAMES]
NEEDED = ("plugins/", "tests/", "tools/", "recipes/", "docs/reference/", "pyproject")
TESTS = [
    f"tests/unit/recipe/test_{name}.py"
    for name in ("plan", "plan_rules", "cards", "recipe_load", "plan_paths", "recipe_schema", "recipe_released")
]
LEAST = 0.9
COSMIC_RAY = "cosmic-ray==8.7.0"  # not among the developers' tools: large, and needed for nothing else
CONFIG = """\
[cosmic-ray]
module-path = [{modules}]
timeout = 120.0
excluded-modules = []
test-command = "{python} -m pytest -x -q -p no:cacheprovider {tests}"

[cosmic-ray.distributor]
name = "local"
"""


def copy_tree() -> pathlib.Path:
    """A copy of the working tree, with the collection's link pointing into the copy."""
    tree = WORK / "tree"
    shutil.rmtree(WORK, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_file() and name.startswith(
            ("plugins/", "tests/", "tools/", "recipes/", "docs/reference/", "pyproject")
        ):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, tree / name)
    link = tree / ".build/collections/ansible_collections/tensorless"
    link.mkdir(parents=True)
    (link / "fleet").symlink_to(tree)
    return tree


def sample(session: pathlib.Path, count: int) -> None:
    """Leave only some mutants in the session, the same ones each time."""
    from cosmic_ray.work_db import WorkDB, use_db

    def place(item: Any) -> tuple[str, Any, str, int]:
        mutation = item.mutations[0]
        return str(mutation.module_path), mutation.start_pos, mutation.operator_name, mutation.occurrence

    with use_db(str(session), WorkDB.Mode.open) as database:
        items = sorted(database.work_items, key=place)
        database.clear()
        database.add_work_items(random.Random(1).sample(items, min(count, len(items))))


def report(session: pathlib.Path) -> int:
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import TestOutcome

    killed, alive = 0, []
    with use_db(str(session), WorkDB.Mode.open) as database:
        results = dict(database.results)
        for item in database.work_items:
            result = results.get(item.job_id)
            if result is None or result.test_outcome is None:
                continue
            if result.test_outcome == TestOutcome.KILLED:
                killed += 1
            else:
                alive.append((item.mutations[0], result.diff))
    for mutation, diff in alive:
        changed = [line for line in (diff or "").splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        print(f"{mutation.module_path}:{mutation.start_pos[0]} {mutation.operator_name}")
        print("\n".join("    " + line for line in changed))
    total = killed + len(alive)
    print(f"{killed} of {total} mutants killed ({killed / max(total, 1):.1%}), {len(alive)} survived")
    return 0 if total and killed / total >= LEAST else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="only so many mutants, picked at random but always the same")
    parser.add_argument("modules", nargs="*", default=MODULES, help="files to mutate")
    given = parser.parse_args()
    if importlib.util.find_spec("cosmic_ray") is None:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", COSMIC_RAY], check=True)
    tree = copy_tree()
    config, session = WORK / "config.toml", WORK / "session.sqlite"
    modules = ", ".join(f'"{name}"' for name in given.modules)
    config.write_text(CONFIG.format(modules=modules, python=sys.executable, tests=" ".join(TESTS)), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": f"{tree}/.build/collections:{tree}", "PYTHONDONTWRITEBYTECODE": "1"}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none of them is needed, and each mutant pays for their start
    program = [sys.executable, "-m", "cosmic_ray.cli"]

    def run(*words: str) -> None:
        subprocess.run([*program, *words], cwd=tree, env=env, check=True)

    run("baseline", str(config))
    run("init", str(config), str(session))
    if given.sample:
        sample(session, given.sample)
    run("exec", str(config), str(session))
    return report(session)


if __name__ == "__main__":
    sys.exit(main())
