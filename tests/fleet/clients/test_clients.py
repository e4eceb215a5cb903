# SPDX-License-Identifier: Apache-2.0
"""Programs that people use anyway, against a provisioned host."""

from __future__ import annotations

import pathlib
import subprocess

import huggingface_hub
import openai
import pytest

from tests.fleet import demo, fleet, wheels
from tests.fleet.conftest import Fleet
from tests.fleet.hosts import command

pytestmark = pytest.mark.fleet


def test_openai_streams_a_chat_completion(hosts: Fleet) -> None:
    tunnel = demo.endpoint()
    tunnel.start()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{demo.PORT}/v1", api_key="none", timeout=60)
    assert [model.id for model in client.models.list()] == [fleet.MODEL]
    stream = client.chat.completions.create(
        model=fleet.MODEL, messages=[{"role": "user", "content": "Say hello."}], max_tokens=24, stream=True
    )
    chunks = [chunk for chunk in stream if chunk.choices]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert len(chunks) > 5 and text.strip()
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_huggingface_hub_finds_the_model(hosts: Fleet, tmp_path: pathlib.Path) -> None:
    """The cache of a host, brought here with its links, as huggingface_hub reads one."""
    archive = subprocess.run(
        command(hosts.a.name, ["tar", "-C", "/var/lib/tensorless/hub", "-cf", "-", "."], tty=False),
        check=True,
        capture_output=True,
    ).stdout
    subprocess.run(["tar", "-C", str(tmp_path), "-xf", "-"], input=archive, check=True)
    found = huggingface_hub.try_to_load_from_cache(
        fleet.MODEL, wheels.GGUF_NAME, cache_dir=tmp_path, revision=fleet.REVISION
    )
    assert isinstance(found, str)
    assert pathlib.Path(found).resolve().name == wheels.GGUF_SHA256
    cache = huggingface_hub.scan_cache_dir(tmp_path)
    assert [str(warning) for warning in cache.warnings] == []
    [repo] = cache.repos
    assert (repo.repo_id, repo.size_on_disk) == (fleet.MODEL, wheels.GGUF_SIZE)
    assert [revision.commit_hash for revision in repo.revisions] == [fleet.REVISION]
