# SPDX-License-Identifier: Apache-2.0
"""What runs on managed hosts runs on Python 3.9: seen from the source, and by a real 3.9 where this machine has one."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
MODULES = sorted(p for p in (ROOT / "plugins" / "modules").glob("*.py"))
UTILS = sorted(p for p in (ROOT / "plugins" / "module_utils").glob("*.py"))


def on_hosts() -> list[pathlib.Path]:
    launchers = [p for p in (ROOT / "roles").glob("*/files/*") if p.read_bytes().startswith(b"#!/usr/bin/python3")]
    launchers += (ROOT / "roles").glob("*/files/*.py")
    return [*MODULES, *UTILS, *sorted(set(launchers))]


def python39() -> str | None:
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT") or pathlib.Path.home() / ".pyenv", "versions")
    found = [shutil.which("python3.9"), *map(str, sorted(pyenv.glob("3.9.*/bin/python3.9")))]
    return next((p for p in found if p and subprocess.run([p, "-c", ""], capture_output=True).returncode == 0), None)


def test_sources_need_no_newer_python() -> None:
    vermin = pathlib.Path(sys.executable).with_name("vermin")
    options = ["--target=3.9-", "--violations", "--eval-annotations", "--no-parse-comments", "--backport", "typing"]
    # tomllib: only the action plugin's side of _recipe.py, on the controller, imports it, and says so where it cannot.
    options += ["--exclude", "tomllib", "--exclude", "tomllib.loads"]
    files = [str(path) for path in on_hosts()]
    done = subprocess.run([str(vermin), *options, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(python39() is None, reason="no Python 3.9 on this machine; the static check above stands alone")
def test_a_real_python_39_imports_everything() -> None:
    """ansible-core's module_utils still run on 3.9, so the modules can be imported there as on a host."""
    interpreter = python39()
    assert interpreter
    names = [
        ".".join(["ansible_collections.tensorless.fleet", *path.relative_to(ROOT).with_suffix("").parts])
        for path in [*MODULES, *UTILS]
    ]
    script = f"import importlib\nfor name in {names!r}: importlib.import_module(name)\nprint(len({names!r}))"
    paths = [sysconfig.get_paths()["purelib"], str(ROOT / ".build" / "collections")]
    done = subprocess.run(
        [interpreter, "-SE", "-c", f"import sys; sys.path[1:1] = {paths!r}\n{script}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(names))
