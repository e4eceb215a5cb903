# SPDX-License-Identifier: Apache-2.0
"""What a server says over HTTP, and the wait for it; the SRV cases of the research by their ids."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_health as health
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_module

from tests.unit.server.fakes import Clock

URL = "http://127.0.0.1:8080/health"
OK = (200, b'{"status":"ok"}')
LOADING = (503, b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}')


def answers(*sequence: Any) -> Callable[[str], tuple[int, bytes]]:
    left = list(sequence)

    def get(_url: str) -> tuple[int, bytes]:
        one = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(one, BaseException):
            raise one
        return one

    return get


def wait(get: Any, limit: float = 1200, alive: Any = lambda: None, **more: Any) -> tuple[health.Ready, Clock]:
    clock = Clock()
    return health.wait_ready(URL, limit, alive, clock, get, **more), clock


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (ConnectionRefusedError(), "refused"),
        (ConnectionResetError(), "reset"),
        (http.client.RemoteDisconnected(), "reset"),
        (TimeoutError("timed out"), "refused"),
        (OSError(113, "No route to host"), "refused"),
        (http.client.BadStatusLine("x"), "refused"),
        (LOADING, "loading"),
        (OK, "ready"),
        ((200, b'{"status":"loading model"}'), "other"),
        ((200, b"<html>"), "other"),
        ((200, b"[]"), "other"),
        ((404, b""), "other"),
        ((500, b'{"status":"ok"}'), "other"),
    ],
)
def test_kinds(answer: Any, kind: str) -> None:
    assert health.probe(URL, answers(answer)).kind == kind


def test_srv_01_only_a_good_answer_is_ready() -> None:
    sequence = [ConnectionRefusedError(), ConnectionResetError(), LOADING, LOADING, OK]
    ready, clock = wait(answers(*sequence))
    assert ready.polls == 5
    assert clock.slept == [1.0] * 4


def test_srv_01_a_slow_load_inside_the_limit_is_a_success() -> None:
    seen: list[tuple[float, str]] = []
    ready, _clock = wait(answers(*[LOADING] * 1190, OK), progress=lambda s, h: seen.append((s, h.kind)))
    assert ready.seconds == 1190
    assert seen[-1] == (1189, "loading")


def test_srv_05_an_exit_ends_the_wait_at_once() -> None:
    ends = iter([None, None, "exit-code, exit status 1"])
    with pytest.raises(health.Exited, match="exit status 1"):
        wait(answers(LOADING), alive=lambda: next(ends))


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory", "does not fit"),
        ("llama_model_load: error loading model: unknown model architecture: 'x'", "does not know the model's"),
        ("gguf_init_from_file_impl: invalid magic characters: '<htm', expected 'GGUF'", "not a GGUF file"),
        ("CUDA error: no kernel image is available for execution on the device", "another GPU architecture"),
        ("ggml_cuda_init: forward compatibility was attempted on non supported HW", "driver is too old"),
        ("Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=all", "generate the CDI spec again"),
        ('could not select device driver "" with capabilities: [[gpu]].', "docker cannot hand out the card"),
        ("open: Permission denied", "SELinux"),
        ("couldn't bind HTTP server socket", "could not bind"),
        ("netavark: nftables error: unable to execute nft: No such file or directory (os error 2)", "package nftables"),
        ("llama_model_load: error loading model: unable to allocate CUDA0 buffer", "does not fit"),
        ("gguf_init: tensor 'blk.0.ffn_up.weight' has invalid ggml type 125. should be in [0, 43)", "does not know PN"),
        (
            "this file has PN weights but does not say how (no string tensorless.pn.rotation in",
            "PN weights are rotated",
        ),
        ("tensor 'blk.0.attn_q.weight' (pn3t), block 6: the scale is a NaN or an infinity", "PN weights is damaged"),
        ("tensor 'blk.0.attn_q.weight' (pn3t), block 5: a reserved bit (15 or 31 of a word) is set", "is damaged"),
        ("tensor 'blk.2.attn_q.weight' data is not within the file bounds, model is corrupted", "is truncated"),
        ("Bind for 127.0.0.1:8080 failed: port is already allocated.", "another container publishes that port"),
    ],
)
def test_srv_05_07_12_causes(line: str, cause: str) -> None:
    found = health.likely_cause(["loading", line, "exiting"])
    assert found is not None
    assert cause in found


def test_no_cause_is_made_up() -> None:
    assert health.likely_cause(["all is well"]) is None


def test_srv_06_dropped_connections_mean_not_yet() -> None:
    ready, _clock = wait(answers(*[ConnectionResetError()] * 90, OK))
    assert ready.polls == 91


def test_srv_06_a_listener_behind_dropped_connections_is_broken_forwarding() -> None:
    with pytest.raises(health.NotReady, match="port forwarding is broken"):
        wait(answers(ConnectionResetError()), listening=lambda: True)


def test_never_ready() -> None:
    with pytest.raises(health.NotReady, match=r"the server was not ready after 20m, so it was stopped \(HTTP 503\)"):
        wait(answers(LOADING))


@pytest.mark.parametrize(("seconds", "text"), [(1200, "20m"), (90, "1m30s"), (45.4, "45s"), (0, "0s"), (3600, "60m")])
def test_span(seconds: float, text: str) -> None:
    assert health.span(seconds) == text


def test_served_names() -> None:
    body = b'{"object":"list","data":[{"id":"Org/Model"},{"id":"b"}]}'
    assert health.served_names("http://x", answers((200, body))) == ["Org/Model", "b"]
    assert health.served_names("http://x", answers((503, b""))) is None
    assert health.served_names("http://x", answers(ConnectionRefusedError())) is None


@pytest.mark.parametrize(
    ("answer", "busy"),
    [
        ((200, b'[{"is_processing":true},{"is_processing":false}]'), 1),
        ((200, b"[]"), 0),
        ((501, b'{"error":{}}'), None),
        ((401, b'{"error":{}}'), None),
        ((200, b"{"), None),
        (ConnectionRefusedError(), None),
    ],
)
def test_busy_slots(answer: Any, busy: int | None) -> None:
    assert health.busy_slots("http://x", get=answers(answer)) == busy


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, []),
        ({"total_slots": 1, "n_ctx": 4096}, []),
        ({"total_slots": 4, "n_ctx": 1024}, ["a context of 1024 tokens", "serves 4 requests at a time"]),
        ({"total_slots": None, "n_ctx": None}, []),
    ],
)
def test_srv_08_slots_and_context(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, Any] | None, said: list[str]
) -> None:
    monkeypatch.setattr(health, "properties", lambda *_argv: found)
    document = {"instance": "i", "endpoint": "http://127.0.0.1:1", "context": 4096}
    texts = _server_module._other_than_planned(document)
    assert len(texts) == len(said)
    assert all(words in text for words, text in zip(said, texts, strict=True))


def test_srv_08_properties_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"total_slots": 1, "default_generation_settings": {"n_ctx": 4096}}'
    monkeypatch.setattr(health, "http_get", lambda _url, _headers: (200, body))
    assert health.properties("http://x") == {"total_slots": 1, "n_ctx": 4096}
