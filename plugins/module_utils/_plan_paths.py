# SPDX-License-Identifier: Apache-2.0
"""Where a model lives: cache directory, blob, snapshot link and download address. Pure: looks at nothing.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from typing import Optional
from urllib.parse import quote, urlsplit

from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

DEFAULT_ENDPOINT = "https://huggingface.co"


def hub_cache(given: Optional[str], env: Mapping[str, str], home: str, cwd: str) -> str:
    """The Hugging Face cache directory, absolute: what was given, $HF_HUB_CACHE, $HF_HOME/hub or the default.

    An empty value counts as not set, and a leading ~ is the home directory, as in the Hub's own tools.
    """
    if given:
        chosen = given
    elif env.get("HF_HUB_CACHE"):
        chosen = env["HF_HUB_CACHE"]
    elif env.get("HF_HOME"):
        chosen = posixpath.join(env["HF_HOME"], "hub")
    else:
        chosen = "~/.cache/huggingface/hub"
    if chosen == "~" or chosen.startswith("~/"):
        chosen = home + chosen[1:]
    path = posixpath.normpath(posixpath.join(cwd, chosen))
    check_cache(path)
    return path


def check_cache(path: str) -> None:
    """Refuse a cache directory that a container mount cannot express."""
    if ":" in path or any(ord(c) < 32 for c in path):
        raise Refusal(
            f'the model cache "{path}" contains ":" or a control character, which a container mount cannot express; '
            "choose another directory (cache, --cache or HF_HUB_CACHE)",
            rc=2,
        )
    if not path.startswith("/"):
        raise Refusal(f'the model cache "{path}" must be an absolute path', rc=2)


def repo_dir(cache: str, repo: str) -> str:
    """The model's folder in the cache; keeps the recipe's spelling of the repository."""
    return posixpath.join(cache, "models--" + repo.replace("/", "--"))


def blob_path(cache: str, repo: str, sha256: str) -> str:
    """The file itself, named by its sha256."""
    return posixpath.join(repo_dir(cache, repo), "blobs", sha256)


def snapshot_path(cache: str, repo: str, revision: str, file: str) -> str:
    """The name under which other Hugging Face tools find the file."""
    return posixpath.join(repo_dir(cache, repo), "snapshots", revision, file)


def snapshot_link(file: str) -> str:
    """What the snapshot link holds, but for the blob's name: a relative path up to the model's folder."""
    return "../" * (file.count("/") + 2) + "blobs/"


def check_endpoint(endpoint: str) -> None:
    """Refuse an address of the Hub that no request can be sent to, or that holds a secret. Empty is the default."""
    if not endpoint:
        return
    try:
        split = urlsplit(endpoint)
        known = split.scheme in ("http", "https") and bool(split.hostname) and split.port != 0
        known = known and not split.query and not split.fragment  # the file's path comes after it
        secret = "@" in split.netloc
    except ValueError:  # a port that is no number, a bracket that is not closed
        known, secret = False, "@" in endpoint
    if secret:
        raise Refusal(
            "the endpoint (HF_ENDPOINT) holds a user name or a password, which would show wherever the address does; "
            "leave them out and give a token (HF_TOKEN)",
            rc=2,
        )
    if not known or any(c.isspace() or not c.isprintable() for c in endpoint):
        shown = json.dumps(endpoint)
        raise Refusal(
            f"the endpoint (HF_ENDPOINT) {shown} is not an http or https address; give one like {DEFAULT_ENDPOINT}",
            rc=2,
        )


def resolve_url(endpoint: str, repo: str, revision: str, file: str) -> str:
    """The download address; each segment is percent-encoded on its own."""
    base = (endpoint or DEFAULT_ENDPOINT).rstrip("/")
    return "/".join(
        [base, *(quote(part, safe="") for part in [*repo.split("/"), "resolve", revision, *file.split("/")])]
    )


def cached_state(blob_size: Optional[int], partial: bool, size_bytes: int) -> str:
    """yes: there at its full size; partial: an interrupted download; no: anything else."""
    if blob_size is not None and blob_size == size_bytes:
        return "yes"
    return "partial" if partial else "no"
