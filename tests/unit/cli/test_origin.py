# SPDX-License-Identifier: Apache-2.0
"""Two versions of the collection: the command and the play refuse to mix them, naming both."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tensorless_fleet import CollectionConflict, Fleet, _collection, cli

INSIDE = pathlib.Path("ansible_collections/tensorless/fleet")


def copy(root: pathlib.Path, version: str) -> pathlib.Path:
    """An installed copy of the collection that is little more than its version."""
    path = root / INSIDE
    (path / "plugins").mkdir(parents=True)
    (path / "MANIFEST.json").write_text(
        json.dumps({"collection_info": {"namespace": "tensorless", "name": "fleet", "version": version}})
    )
    return path


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("ANSIBLE_COLLECTIONS_PATH", "ANSIBLE_CONFIG", "ANSIBLE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_copy_of_another_version_in_the_home_folder_is_refused(home, capsys):
    other = copy(home / ".ansible" / "collections", "0.0.1")
    with pytest.raises(CollectionConflict) as error:
        _collection.refuse_other_versions(dict(os.environ))
    message = str(error.value)
    assert "0.0.1" in message and str(other) in message and _collection.own_path() in message
    assert f"rm -r {other}" in message and "\n" not in message
    assert cli.main(["models"]) == 1 and str(other) in capsys.readouterr().err
    with pytest.raises(CollectionConflict):
        Fleet("localhost,")
    assert cli.main(["version"]) == 0 and cli.main(["help"]) == 0


def test_a_copy_of_the_same_version_is_no_conflict(home):
    copy(home / ".ansible" / "collections", _collection.version_of(_collection.own_path()))
    _collection.refuse_other_versions(dict(os.environ))


def test_the_places_are_those_that_ansible_reads(home, monkeypatch):
    elsewhere = copy(home / "elsewhere", "0.0.2")
    _collection.refuse_other_versions(dict(os.environ))
    (home / "ansible.cfg").write_text("[defaults]\ncollections_path = elsewhere:/usr/share/ansible/collections\n")
    home.chmod(0o755)
    with pytest.raises(CollectionConflict, match=r"0\.0\.2"):
        _collection.refuse_other_versions(dict(os.environ))
    home.chmod(0o777)  # Ansible ignores a configuration in a folder that everybody may write to
    _collection.refuse_other_versions(dict(os.environ))
    monkeypatch.setenv("ANSIBLE_COLLECTIONS_PATH", str(home / "elsewhere"))
    with pytest.raises(CollectionConflict, match=str(elsewhere)):
        _collection.refuse_other_versions(dict(os.environ))


def test_a_broken_manifest_counts_as_another_version(home):
    path = copy(home / ".ansible" / "collections", "0.0.1")
    (path / "MANIFEST.json").write_text("{")
    with pytest.raises(CollectionConflict, match="unknown"):
        _collection.refuse_other_versions(dict(os.environ))


def play(home: pathlib.Path, path: str) -> subprocess.CompletedProcess[str]:
    book = home / "play.yml"
    book.write_text("- hosts: localhost\n  gather_facts: false\n  tasks:\n    - tensorless.fleet.tensorless_origin:\n")
    env = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": path}
    words = [sys.executable, "-m", "ansible", "playbook", "-i", "localhost,", "-c", "local", str(book)]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False)


def test_the_play_itself_refuses_as_well(home):
    own = _collection.own_root()
    done = play(home, own)
    assert done.returncode == 0, done.stdout
    copy(home / "second", "0.0.3")
    done = play(home, f"{own}:{home / 'second'}")
    text = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2 and "several versions of the collection" in text and "0.0.3 at" in text
