# SPDX-License-Identifier: Apache-2.0
"""Cache directory, paths in it, and the download address."""

from __future__ import annotations

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_paths as paths
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal


@pytest.mark.parametrize(
    ("given", "env", "path"),
    [
        (None, {}, "/home/you/.cache/huggingface/hub"),
        ("", {"HF_HUB_CACHE": "", "HF_HOME": ""}, "/home/you/.cache/huggingface/hub"),
        (None, {"HF_HOME": "/data/hf"}, "/data/hf/hub"),
        (None, {"HF_HOME": "/data/hf/"}, "/data/hf/hub"),
        (None, {"HF_HOME": "~/hf"}, "/home/you/hf/hub"),
        (None, {"HF_HUB_CACHE": "/hub", "HF_HOME": "/data/hf"}, "/hub"),
        ("/given", {"HF_HUB_CACHE": "/hub"}, "/given"),
        ("models", {}, "/srv/work/models"),
        ("../models/./x", {}, "/srv/models/x"),
        ("~/x", {}, "/home/you/x"),
        ("~", {}, "/home/you"),
        ("~x", {}, "/srv/work/~x"),
    ],
)
def test_the_cache(given: str | None, env: dict[str, str], path: str) -> None:
    assert paths.hub_cache(given, env, "/home/you", "/srv/work") == path


@pytest.mark.parametrize("given", ["/a:b", "/a\nb", "/a\x1fb"])
def test_a_cache_that_no_mount_can_express(given: str) -> None:
    with pytest.raises(Refusal) as error:
        paths.hub_cache(given, {}, "/home/you", "/srv/work")
    assert 'contains ":" or a control character' in error.value.message
    assert error.value.rc == 2


def test_a_cache_is_absolute() -> None:
    paths.check_cache("/a b")
    with pytest.raises(Refusal) as error:
        paths.check_cache("a")
    assert (error.value.message, error.value.rc) == ('the model cache "a" must be an absolute path', 2)


def test_places() -> None:
    assert paths.blob_path("/c", "Org/Repo", "ab") == "/c/models--Org--Repo/blobs/ab"
    assert paths.snapshot_path("/c", "Org/Repo", "rev", "d/f.gguf") == "/c/models--Org--Repo/snapshots/rev/d/f.gguf"
    assert paths.snapshot_link("f.gguf") == "../../blobs/"
    assert paths.snapshot_link("a/b/f.gguf") == "../../../../blobs/"


@pytest.mark.parametrize(
    ("endpoint", "file", "url"),
    [
        ("https://huggingface.co", "f.gguf", "https://huggingface.co/Org/Repo/resolve/rev/f.gguf"),
        ("", "f.gguf", "https://huggingface.co/Org/Repo/resolve/rev/f.gguf"),
        ("http://hub:8090/", "a b/c#d?e%.gguf", "http://hub:8090/Org/Repo/resolve/rev/a%20b/c%23d%3Fe%25.gguf"),
    ],
)
def test_address(endpoint: str, file: str, url: str) -> None:
    assert paths.resolve_url(endpoint, "Org/Repo", "rev", file) == url


@pytest.mark.parametrize(
    "endpoint", ["", "https://huggingface.co", "http://hub:1", "http://hub:8090/", "http://[::1]:8090/a"]
)
def test_endpoint_that_can_work(endpoint: str) -> None:
    paths.check_endpoint(endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "nonsense",
        "ftp://hub",
        "https://",
        "http://:80",
        "http://hub:0",
        "http://hub:x",
        "http://hub:99999",
        "http://h\n",
        "http://h b",
        "http://h/\u200b",
        "http://[",
    ],
)
def test_endpoint_that_can_never_work(endpoint: str) -> None:
    with pytest.raises(Refusal, match="is not an http or https address") as refused:
        paths.check_endpoint(endpoint)
    assert refused.value.rc == 2


@pytest.mark.parametrize("endpoint", ["https://user:hunter2@hub", "http://user:hunter2@hub:x", "//user:hunter2@hub"])
def test_endpoint_with_a_secret_is_refused_without_showing_it(endpoint: str) -> None:
    with pytest.raises(Refusal, match="user name or a password") as refused:
        paths.check_endpoint(endpoint)
    assert "hunter2" not in str(refused.value)
    assert refused.value.rc == 2


@pytest.mark.parametrize(
    ("size", "partial", "state"),
    [
        (10, False, "yes"),
        (11, False, "no"),
        (10, True, "yes"),
        (9, False, "no"),
        (9, True, "partial"),
        (None, True, "partial"),
        (None, False, "no"),
    ],
)
def test_cached(size: int | None, partial: bool, state: str) -> None:
    assert paths.cached_state(size, partial, 10) == state


def test_a_whole_file_of_a_real_size() -> None:
    size = 12954114496
    assert paths.cached_state(int(str(size)), False, size) == "yes"
