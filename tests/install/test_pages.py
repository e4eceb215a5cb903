# SPDX-License-Identifier: Apache-2.0
"""The pages on installing, updating and removing, followed as they are written.

Each fenced ``sh`` block of a page runs as it stands, in one folder that holds ``dist/``. A ``console`` block shows a
command that needs a fleet; the fleet tests run those.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ("install", "update", "remove")


def blocks(page: str) -> list[str]:
    """The ``sh`` blocks of a page, without the indent of a list item."""
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"^( *)```sh\n(.*?)^\1```", text, flags=re.MULTILINE | re.DOTALL)
    return [re.sub(f"^{indent}", "", body, flags=re.MULTILINE) for indent, body in found]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with ``dist/`` as the pages expect it. ``make dist`` makes it."""
    if not list((ROOT / "dist").glob("*.whl")):
        pytest.skip("dist/ holds no wheel: run make dist first")
    folder = tmp_path_factory.mktemp("user")
    shutil.copytree(ROOT / "dist", folder / "dist")
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_page_works_as_written(page: str, place: pathlib.Path) -> None:
    steps = blocks(page)
    assert steps, f"docs/how-to/{page}.md has no command to follow"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ANSIBLE_", "VIRTUAL_ENV", "PYTHON"))}
    environment.update(HOME=str(place), PATH="/usr/local/bin:" + os.environ["PATH"])
    for step in steps:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", step], cwd=place, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{step}\n{done.stdout}\n{done.stderr}"
    if page == "install":
        assert "tensorless_server" in (place / "module-page.txt").read_text(encoding="utf-8").lower()
    if page == "remove":
        assert not (place / "tensorless-env").exists()
