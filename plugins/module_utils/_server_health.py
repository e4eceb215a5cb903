# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

What a model server says about itself over HTTP, and waiting for it to be ready.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional, Protocol

PROBE_TIMEOUT = 3.0
POLL_SECONDS = 1.0
BROKEN_FORWARD_SECONDS = 60.0

Get = Callable[[str], "tuple[int, bytes]"]


class Clock(Protocol):
    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


@dataclass(frozen=True)
class Health:
    """`kind`: refused (nobody listens), reset (accepted and dropped), loading, ready, other (not a model server that
    says it is well)."""

    kind: str
    detail: str = ""


def http_get(url: str, headers: Optional[dict[str, str]] = None, timeout: float = PROBE_TIMEOUT) -> tuple[int, bytes]:
    """One GET without proxies (the server is on this host); raises OSError or HTTPException."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout)
    try:
        path = parts.path or "/"
        connection.request("GET", f"{path}?{parts.query}" if parts.query else path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read(1 << 20)
    finally:
        connection.close()


def probe(health_url: str, get: Get = http_get) -> Health:
    try:
        status, body = get(health_url)
    except ConnectionRefusedError:
        return Health("refused", "nobody listens there")
    except (ConnectionResetError, http.client.RemoteDisconnected, BrokenPipeError):
        return Health("reset", "the connection was accepted and dropped")
    except (OSError, http.client.HTTPException) as exc:
        return Health("refused", f"no answer ({exc or type(exc).__name__})")
    if status == 503:
        return Health("loading", "HTTP 503")
    if status == 200 and _json(body).get("status") == "ok":
        return Health("ready")
    return Health("other", f"HTTP {status}, not the answer of a model server that is well")


def _json(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def served_names(endpoint: str, get: Get = http_get) -> Optional[list[str]]:
    """The model names that /v1/models lists (a public path, key or not); None when it cannot be read."""
    try:
        status, body = get(f"{endpoint}/v1/models")
    except (OSError, http.client.HTTPException):
        return None
    if status != 200:
        return None
    data = _json(body).get("data")
    return [str(entry.get("id")) for entry in data if isinstance(entry, dict)] if isinstance(data, list) else None


def properties(endpoint: str, key: Optional[str] = None) -> Optional[dict[str, Any]]:
    """Slots and context for each slot, as the running server has them; None when it does not say."""
    try:
        status, body = http_get(f"{endpoint}/props", _auth(key))
    except (OSError, http.client.HTTPException):
        return None
    if status != 200:
        return None
    data = _json(body)
    settings = data.get("default_generation_settings")
    return {
        "total_slots": data.get("total_slots"),
        "n_ctx": settings.get("n_ctx") if isinstance(settings, dict) else None,
    }


def busy_slots(endpoint: str, key: Optional[str] = None, get: Optional[Get] = None) -> Optional[int]:
    """How many answers are being given right now; None when the server does not tell."""
    url = f"{endpoint}/slots"
    try:
        status, body = get(url) if get else http_get(url, _auth(key))
    except (OSError, http.client.HTTPException):
        return None
    try:
        slots = json.loads(body) if status == 200 else None
    except ValueError:
        return None
    if not isinstance(slots, list):
        return None
    return sum(1 for slot in slots if isinstance(slot, dict) and slot.get("is_processing"))


def _auth(key: Optional[str]) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def read_key(path: Optional[str]) -> Optional[str]:
    if not path:
        return None
    with contextlib.suppress(OSError), open(path, encoding="utf-8") as stream:
        return stream.readline().strip() or None
    return None


class Exited(Exception):
    """The server ended while it was waited for."""


class NotReady(Exception):
    """The time is over."""


@dataclass(frozen=True)
class Ready:
    seconds: float
    polls: int


def wait_ready(
    health_url: str,
    limit: float,
    alive: Callable[[], Optional[str]],
    clock: Clock,
    get: Get = http_get,
    progress: Callable[[float, Health], None] = lambda seconds, health: None,
    listening: Callable[[], bool] = lambda: False,
) -> Ready:
    """Polls once a second until the server is ready.

    `alive` gives None while the server lives, else how it ended. `listening` says that the process itself listens
    inside its container. Only a good answer counts; whatever else comes means that it is not there yet.
    """
    begun = clock.monotonic()
    polls = 0
    dropped_since: Optional[float] = None
    while True:
        ended = alive()
        if ended is not None:
            raise Exited(ended)
        polls += 1
        health = probe(health_url, get)
        now = clock.monotonic()
        if health.kind == "ready":
            return Ready(now - begun, polls)
        if health.kind != "reset":
            dropped_since = None
        elif dropped_since is None:
            dropped_since = now
        elif now - dropped_since >= BROKEN_FORWARD_SECONDS and listening():
            raise NotReady(
                f"the server listens in its container, but {health_url} has been dropping connections for "
                f"{now - dropped_since:.0f} s: port forwarding is broken"
            )
        if now - begun >= limit:
            raise NotReady(f"the server was not ready after {span(limit)}, so it was stopped ({health.detail})")
        progress(now - begun, health)
        clock.sleep(POLL_SECONDS)


def phase(health: Health) -> str:
    return {
        "refused": "the server does not listen yet",
        "reset": "the server does not listen yet",
        "loading": "the server reads the model",
    }.get(health.kind, health.detail)


def span(seconds: float) -> str:
    """20m, 1m30s, 45s."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest}s"
    return f"{minutes}m{rest}s" if rest else f"{minutes}m"


_NO_ROOM = "the model does not fit beside what already uses the card; nvidia-smi lists the processes"
_NO_PN = "the engine in this image does not know PN weights (pn3t, pn4t); the recipe's image, or one built here, does"
_DAMAGED = "a block of PN weights is damaged (the log names tensor and block): tensorless verify, then pull again"
# What the last lines of an engine's log mean, most telling first.
_CAUSES = (
    ("no kernel image is available", "the engine image was built for another GPU architecture than this card's"),
    ("forward compatibility was attempted on non supported hw", "the driver is too old for the image's CUDA"),
    ("out of memory", _NO_ROOM),
    ("unable to allocate cuda", _NO_ROOM),
    ("unresolvable cdi devices", "the runtime has no such card: generate the CDI spec again (tensorless doctor)"),
    ("could not select device driver", "docker cannot hand out the card: tensorless doctor says what is missing"),
    ("invalid ggml type 124", _NO_PN),
    ("invalid ggml type 125", _NO_PN),
    (
        "tensorless.pn.rotation",
        "this engine cannot tell how the model's PN weights are rotated: use the engine that the file was made for",
    ),
    ("a reserved bit (", _DAMAGED),
    ("the scale is a nan or an infinity", _DAMAGED),
    ("data is not within the file bounds", "the model file ends before its last tensor: it is truncated"),
    ("invalid magic", "the model file is not a GGUF file"),
    ("unknown model architecture", "this engine does not know the model's architecture"),
    ("address already in use", "something else listens on that port"),
    ("port is already allocated", "another container publishes that port"),
    ("couldn't bind", "the server could not bind its port"),
    ("permission denied", "the server may not read a file; with SELinux enforcing, look at the denials in its log"),
    ("failed to open", "the server cannot open the model file"),
    ("open() /dev/net/tun", "the network of rootless podman needs /dev/net/tun, which this account may not open"),
    ("unable to execute nft", "podman's network needs the program nft: install the package nftables"),
    ("no such file", "a file that the server needs is not there"),
)  # fmt: skip


def likely_cause(lines: list[str]) -> Optional[str]:
    text = "\n".join(lines).lower()
    return next((cause for words, cause in _CAUSES if words in text), None)
