# SPDX-License-Identifier: Apache-2.0
"""Promotion by digest against the fleet's registry: the measured digest gets the release tag, another is refused."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
REGISTRY = "10.213.7.1:5000"
REPOSITORY = f"{REGISTRY}/engine-promotion-test"
PLAY = str(Path(sys.executable).with_name("ansible-playbook"))
pytestmark = pytest.mark.fleet


def inside(*command: str) -> subprocess.CompletedProcess[str]:
    """A command where podman sees the test network."""
    wrapped = [sys.executable, "-m", "tests.fleet", "ns", "--", *command]
    return subprocess.run(wrapped, cwd=ROOT, capture_output=True, text=True, check=False)


def digest(tag: str) -> str | None:
    """What the registry has under a tag."""
    url = f"http://{REGISTRY}/v2/engine-promotion-test/manifests/{tag}"
    accept = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
    request = urllib.request.Request(url, method="HEAD", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.headers["Docker-Content-Digest"]
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return None


def candidate(tmp_path: Path, content: str, tag: str) -> str:
    """A small image under a candidate tag; its digest."""
    layer = tmp_path / "layer.tar"
    with tarfile.open(layer, "w") as tar:
        info = tarfile.TarInfo("VERSION")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content.encode()))
    for command in (
        ("import", str(layer), f"{REPOSITORY}:{tag}"),
        ("push", "--tls-verify=false", f"{REPOSITORY}:{tag}"),
    ):
        done = inside("podman", *command)
        assert done.returncode == 0, done.stderr
    found = digest(tag)
    assert found
    return found


def promote(tmp_path: Path, version: str, measured: str) -> subprocess.CompletedProcess[str]:
    inventory = tmp_path / "inventory.yml"
    inventory.write_text(json.dumps({"engine_builder": {"hosts": {"builder": {"ansible_connection": "local"}}}}))
    values = {
        "engine_version": version, "engine_candidate": 1, "engine_arch": "cpu", "engine_repository": REPOSITORY,
        "engine_measured_digest": measured, "engine_push_args": ["--tls-verify=false"],
        "ansible_python_interpreter": sys.executable, "engine_recipe_out": str(tmp_path / "draft.toml"),
        "engine_recipe": str(ROOT / "recipes/iamMrDuncan/Qwen3.8-27B-PN3-GGUF/p100.toml"),
    }  # fmt: skip
    return inside(PLAY, "-i", str(inventory), "playbooks/engine_promote.yml", "-e", json.dumps(values))


def test_measured_digest_gets_the_release_tag(tmp_path: Path) -> None:
    measured = candidate(tmp_path, "one", "9.1.0-rc1-cpu")
    done = promote(tmp_path, "9.1.0", measured)
    assert done.returncode == 0, done.stdout[-3000:]
    assert digest("9.1.0-cpu") == measured
    draft = (tmp_path / "draft.toml").read_text()
    assert f'image = "{REPOSITORY}@{measured}"' in draft
    assert re.search(r'^status\s*=\s*"draft"', draft, re.MULTILINE)


def test_candidate_that_was_not_measured_is_refused(tmp_path: Path) -> None:
    measured = candidate(tmp_path, "measured", "9.2.0-rc1-cpu")
    other = candidate(tmp_path, "pushed later", "9.2.0-rc1-cpu")
    assert other != measured
    done = promote(tmp_path, "9.2.0", measured)
    assert done.returncode != 0
    assert "Nothing was tagged" in done.stdout
    assert digest("9.2.0-cpu") is None
