# SPDX-License-Identifier: Apache-2.0
"""The built wheel alone in a new virtual environment, and beside a copy of another version."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tarfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*argv: str, home: pathlib.Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ANSIBLE_", "VIRTUAL_ENV", "PYTHON"))}
    environment.update(HOME=str(home), PATH=f"{home / 'env' / 'bin'}:/usr/local/bin:/usr/bin:/bin", COLUMNS="200")
    done = subprocess.run(argv, env=environment, cwd=home, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A user's home with the wheel in an environment of its own."""
    wheels = sorted((ROOT / "dist").glob("tensorless_fleet-*.whl"))
    if not wheels:
        pytest.skip("dist/ holds no wheel: run make dist first")
    folder = tmp_path_factory.mktemp("home")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
    run("pip", "install", "-q", "--disable-pip-version-check", str(wheels[-1]), home=folder)
    return folder


def test_documentation_and_playbooks_are_found(home: pathlib.Path) -> None:
    page = run("ansible-doc", "tensorless.fleet.tensorless_server", home=home).stdout
    assert "on_change" in page
    run("ansible-playbook", "tensorless.fleet.site", "--syntax-check", home=home)
    listing = json.loads(run("ansible-galaxy", "collection", "list", "--format", "json", home=home).stdout)
    [versions] = [found["tensorless.fleet"] for found in listing.values() if "tensorless.fleet" in found]
    assert versions["version"] in run("tensorless", "version", home=home).stdout


def test_the_wheel_leaves_the_shared_folder_to_others(home: pathlib.Path) -> None:
    """No __init__.py in ansible_collections or the namespace: other wheels put collections there too."""
    [packages] = (home / "env" / "lib").glob("python3*/site-packages")
    for folder in (packages / "ansible_collections", packages / "ansible_collections" / "tensorless"):
        assert not (folder / "__init__.py").exists()


def test_another_version_in_the_users_collections_is_refused(home: pathlib.Path) -> None:
    [tarball] = (ROOT / "dist").glob("tensorless-fleet-*.tar.gz")
    other = home / ".ansible" / "collections" / "ansible_collections" / "tensorless" / "fleet"
    other.mkdir(parents=True)
    with tarfile.open(tarball) as archive:
        archive.extractall(other, filter="data")
    manifest = json.loads((other / "MANIFEST.json").read_text())
    manifest["collection_info"]["version"] = "0.0.9"
    (other / "MANIFEST.json").write_text(json.dumps(manifest))
    inventory = home / "inventory.yml"
    inventory.write_text(
        "gpu:\n  hosts:\n    localhost:\n      ansible_connection: local\n      ansible_become: false\n"
    )

    command = run("tensorless", "models", home=home, check=False)
    text = command.stdout + command.stderr
    assert command.returncode != 0
    assert "0.0.9" in text and str(other) in text and "Traceback" not in text

    play = run("ansible-playbook", "-i", str(inventory), "tensorless.fleet.site", home=home, check=False)
    words = " ".join((play.stdout + play.stderr).split())
    assert play.returncode != 0
    assert "0.0.9" in words and str(other) in words and "Traceback" not in words
