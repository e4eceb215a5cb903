# SPDX-License-Identifier: Apache-2.0
"""Run cases: `python -m tests.conformance FILE...`. Ends with "N passed, N failed"; exit status 1 if any failed."""

from __future__ import annotations

import importlib
import pathlib
import pkgutil
import shutil
import sys
import tempfile
import traceback
from types import ModuleType
from typing import Any

import yaml

import tests.conformance as package
from tests.conformance.frame import ROOT, Env, compare


def drivers() -> tuple[dict[str, ModuleType], dict[str, str]]:
    """area -> driver, and file name -> why it could not be loaded."""
    found: dict[str, ModuleType] = {}
    broken: dict[str, str] = {}
    for entry in pkgutil.iter_modules(package.__path__):
        if entry.name.startswith("area_"):
            try:
                module = importlib.import_module(f"{package.__name__}.{entry.name}")
            except Exception:
                broken[entry.name] = traceback.format_exc(limit=-2)
            else:
                found[module.AREA] = module
    return found, broken


def fixtures_of(path: pathlib.Path) -> pathlib.Path | None:
    """The fixtures that belong to a file of cases; None: the product's own recipes serve."""
    near = [path.parent / "fixtures", path.parent.parent / "fixtures", ROOT.parent / "shared/conformance/fixtures"]
    return next((folder for folder in near if (folder / "pn3.yml").is_file()), None)


def run_case(case: dict[str, Any], driver: ModuleType, fixtures: pathlib.Path | None) -> list[str]:
    """What does not hold in one case."""
    tmp = pathlib.Path(tempfile.mkdtemp(prefix="conformance-"))
    env = Env(tmp, fixtures)
    try:
        got = driver.run_case(case, env)
        return compare(case, got, getattr(driver, "CHECKS", {}))
    except Exception:
        return ["the driver broke off: " + traceback.format_exc(limit=-3).strip().replace("\n", "\n    ")]
    finally:
        env.close()
        shutil.rmtree(tmp, ignore_errors=True)


def run_files(paths: list[pathlib.Path]) -> tuple[int, int]:
    """Run every case of the files, with a line for each that fails; how many passed and failed."""
    found, broken = drivers()
    for name, why in broken.items():
        print(f"driver {name} could not be loaded:\n{why}", file=sys.stderr)
    passed = failed = 0
    for path in paths:
        fixtures = fixtures_of(path.resolve())
        for case in yaml.safe_load(path.read_text(encoding="utf-8")) or []:
            driver = found.get(case["area"])
            problems = run_case(case, driver, fixtures) if driver else [f"there is no driver for area {case['area']}"]
            if problems:
                failed += 1
                print(f"FAIL {case['id']} ({case['area']}): " + "; ".join(problems))
            else:
                passed += 1
    return passed, failed


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m tests.conformance FILE...", file=sys.stderr)
        return 0 if argv else 2
    passed, failed = run_files([pathlib.Path(name) for name in argv])
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
