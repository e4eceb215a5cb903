# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

The engine image: present by digest, kept by a local tag, pulled with retries.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.module_utils._runtime import Run, Runtime, last_line

_REFERENCE = re.compile(r"[a-z0-9][A-Za-z0-9._:/-]*@sha256:[0-9a-f]{64}")
KEEP = "localhost/tensorless-engine"  # a clean-up of untagged images leaves what bears this tag

# What no second try can mend.
_FINAL = ("manifest unknown", "not found", "unauthorized", "denied", "invalid reference", "no space left")


def check_reference(image: str) -> str:
    if not _REFERENCE.fullmatch(image):
        raise Refusal(
            f"{image!r} is not an image by digest; give name@sha256: and 64 lower-case hexadecimal digits", rc=2
        )
    return image


def keep_tag(image: str) -> str:
    return f"{KEEP}:sha256-{image.rsplit(':', 1)[1][:16]}"


@dataclass
class ImageResult:
    changed: bool = False
    pulled: bool = False
    id: Optional[str] = None
    labels: dict[str, str] = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)


def present(
    image: str,
    runtime: Runtime,
    run: Run,
    retries: int,
    sleep: Callable[[float], None],
    progress: Callable[[str], None],
    check_mode: bool,
) -> ImageResult:
    result = ImageResult()
    found = runtime.image(image)
    if found is None:
        result.actions.append(f"{runtime.name} pull {image}")
    tag = keep_tag(image)
    if found is None or not _has_tag(found, tag):
        result.actions.append(f"{runtime.name} tag {image} {tag}")
    result.changed = bool(result.actions)
    if not check_mode:
        if found is None:
            pull(image, runtime.name, run, retries, sleep, progress)
            result.pulled = True
            found = runtime.image(image)
            if found is None:
                raise Refusal(f"{runtime.name} pulled {image}, but does not find it by this digest")
        if not _has_tag(found, tag):
            rc, _out, err = run([runtime.name, "tag", image, tag])
            if rc != 0:
                raise Refusal(f"{runtime.name} tag {image} {tag} failed: {last_line(err)}")
    if found is not None:
        result.id = str(found.get("Id", ""))
        labels = (found.get("Config") or {}).get("Labels") or found.get("Labels") or {}
        result.labels = {str(k): str(v) for k, v in labels.items()}
    return result


def pull(
    image: str, runtime: str, run: Run, retries: int, sleep: Callable[[float], None], progress: Callable[[str], None]
) -> None:
    """Pulls; waits 2, 4, 8... seconds between tries, and does not repeat what cannot get better."""
    for attempt in range(1, retries + 2):
        progress(f"{runtime} pull {image}" + (f" (try {attempt} of {retries + 1})" if attempt > 1 else ""))
        rc, out, err = run([runtime, "pull", image])
        if rc == 0:
            return
        reason = last_line(err) or last_line(out) or f"exit status {rc}"
        if attempt > retries or any(words in reason.lower() for words in _FINAL):
            host = image.split("/", 1)[0]
            raise Refusal(
                f"could not pull the engine image {image}: {reason}; check that this host can reach {host} and that "
                "the registry has this digest, then run again"
            )
        sleep(2.0**attempt)


def absent(image: str, runtime: Runtime, run: Run, check_mode: bool) -> ImageResult:
    """Takes the tag and, when nothing else uses it, the image away."""
    result = ImageResult()
    found = runtime.image(image)
    if found is None:
        return result
    tag = keep_tag(image)
    if _has_tag(found, tag):
        result.actions.append(f"{runtime.name} rmi {tag}")
    result.actions.append(f"{runtime.name} rmi {image}")
    result.changed = True
    if not check_mode:
        if _has_tag(found, tag):
            run([runtime.name, "rmi", tag])
        if runtime.image(image) is not None:
            rc, _out, err = run([runtime.name, "rmi", image])
            if rc != 0:
                raise Refusal(f"{runtime.name} rmi {image} failed: {last_line(err)}")
    return result


def _has_tag(found: dict[str, Any], tag: str) -> bool:
    return tag in (found.get("RepoTags") or [])
