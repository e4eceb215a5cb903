# SPDX-License-Identifier: Apache-2.0
"""Streams, each test named after its case in the catalogue of hub and server cases (group STR)."""

from __future__ import annotations

from typing import Any, Optional

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _bench, _bench_quiet
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_http import HttpFault, completion
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_stream import (
    ChunkDecoder,
    FrameReader,
    Stream,
    StreamFault,
)

from tests.unit.bench.fakellama import Answer, FakeLlama, frame, frames, last, token


def read(parts: list[tuple[float, bytes]], start: float = 0.0) -> Stream:
    """Feed (milliseconds, bytes) as if they had been received then."""
    stream = Stream(start=start)
    reader = FrameReader(stream)
    for at, data in parts:
        reader.feed(data, at / 1000)
    reader.close()
    return stream


def ask(answer: Answer, tokens: int = 256, **limits: Any) -> Stream:
    with FakeLlama([answer]) as server:
        return completion("127.0.0.1", server.port, _bench.request_body("x", tokens), **limits)


def test_STR_01_reference_stream() -> None:
    timings = {"predicted_n": 3, "predicted_ms": 40.0}
    stream = read(
        [
            (100, token(1, " do")),
            (120, token(2, " you")),
            (140, token(3, "?", timings=timings)),
            (140.2, last(3, 6, timings=timings)),
        ]
    )
    decode, ttft, tokens = _bench.rates(stream.start, stream.stamps)
    assert (decode, ttft, tokens) == (pytest.approx(50.0), pytest.approx(100.0), 3)
    assert len(stream.stamps) == 3
    assert _bench.faults(stream, 3) == []


def test_STR_02_a_token_in_the_middle_of_a_character_makes_no_frame() -> None:
    stream = read(
        [
            (100, frame(index=0, content="😀", tokens=[141334], stop=False, tokens_predicted=1)),
            (140, frame(index=0, content=" 😂", tokens=[224], stop=False, tokens_predicted=3)),
            (140.1, frame(index=0, content="", tokens=[], stop=True, tokens_predicted=3, stop_type="limit")),
        ]
    )
    assert _bench.rates(0.0, stream.stamps)[0] == pytest.approx(50.0)
    record = _bench.run_record(stream, 3)
    assert (record["frames"], record["tokens"], record["max_jump"], record["valid"]) == (2, 3, 2, True)


def test_STR_03_and_BEN_02_the_first_stamp_may_stand_for_several_tokens() -> None:
    stream = read([(100, token(4)), (350, token(256)), (351, last(256))])
    assert _bench.rates(0.0, stream.stamps)[0] == pytest.approx(1008.0)
    assert any("bursts" in label for label in _bench.labels(stream))


def test_STR_04_empty_content_with_an_advancing_counter_is_a_token() -> None:
    stream = read([(50, token(1, "")), (60, token(1, "")), (90, token(2, ""))])
    assert stream.stamps == [(0.05, 1), (0.09, 2)]


def test_STR_05_the_frame_that_ends_the_answer_is_not_a_token() -> None:
    stream = read([(100, token(1)), (200, token(2)), (900, last(2))])
    assert stream.stamps[-1] == (0.2, 2)


def test_STR_06_pings_are_no_tokens_and_no_first_token() -> None:
    stream = read([(1, b":\n\n"), (2, b":\n\n:\n\n"), (80, token(1)), (90, b":\n\n"), (99, token(2))])
    assert stream.pings == 4
    assert stream.stamps == [(0.08, 1), (0.099, 2)]


def test_STR_06_pings_do_not_hold_off_the_first_token_limit() -> None:
    pings = [(place * 0.05, b":\n\n") for place in range(40)]
    with pytest.raises(StreamFault, match=r"no token within 0.3 s"):
        ask(Answer(pings), first_token_s=0.3)


@pytest.mark.parametrize(
    "data",
    [
        b'error: {"code":400,"message":"the request exceeds the available context size"}\n\ndata: [DONE]\n\n',
        b'data: {"error":{"code":500,"message":"the request exceeds the available context size"}}\n\n',
    ],
    ids=["old", "new"],
)
def test_STR_07_an_error_in_the_stream_fails_the_run(data: bytes) -> None:
    parts = [(float(n), token(n)) for n in range(1, 201)]
    with pytest.raises(StreamFault, match="exceeds the available context size"):
        read([*parts, (300, data)])


def test_STR_07_done_without_an_end_is_a_failure() -> None:
    with pytest.raises(StreamFault, match=r"\[DONE\] without"):
        read([(1, token(1)), (2, b"data: [DONE]\n\n")])


@pytest.mark.parametrize(("status", "text"), [(400, "exceeds"), (401, "Invalid"), (404, "Not Found"), (501, "no")])
def test_STR_08_a_refusal_before_the_stream_keeps_its_status(status: int, text: str) -> None:
    with pytest.raises(HttpFault, match=text) as caught:
        ask(Answer([{"error": {"code": status, "message": text, "type": "t"}}], status=status))
    assert caught.value.status == status


@pytest.mark.parametrize("size", [1, 2, 3, 7, 4096])
def test_STR_09_frames_may_be_cut_anywhere(size: int) -> None:
    body = b"".join([token(1, "\N{GRINNING FACE}"), token(2, "é"), token(3), last(3)])
    stream = read([(place, body[place : place + size]) for place in range(0, len(body), size)])
    assert stream.tokens == 3
    assert "".join(stream.text) == "\N{GRINNING FACE}éx"
    assert stream.final is not None


def test_STR_09_many_frames_in_one_read_are_one_moment_and_labelled() -> None:
    together = b"".join(token(n) for n in range(2, 101))
    stream = read([(100, token(1)), (200, together), (300, token(101)), (301, last(101))])
    assert _bench.rates(0.0, stream.stamps)[0] == pytest.approx(500.0)
    assert any(label.startswith("coalesced: 98 of 101") for label in _bench.labels(stream))


@pytest.mark.parametrize("kind", ["eos", "word", None])
def test_STR_10_an_early_end_is_no_measurement(kind: Optional[str]) -> None:
    more = {"stop_type": kind} if kind else {}
    stream = read([(1, token(1)), (2, token(31)), (3, last(31, **more))])
    record = _bench.run_record(stream, 256)
    assert record["valid"] is False
    assert any("31" in reason for reason in record["reasons"])


def test_STR_10_the_warm_up_tells_what_the_server_made_of_the_request() -> None:
    asked = {"ignore_eos": True, "logit_bias": [], "seed": 424242, "temperature": 0.0, "top_k": 1}
    assert any("ignore_eos may be without effect" in note for note in _bench_quiet.echo_notes(asked))
    assert any("top_k as 40" in note for note in _bench_quiet.echo_notes({**asked, "top_k": 40}))
    assert _bench_quiet.echo_notes({**asked, "logit_bias": [{"bias": None, "token": 2}]}) == []


def test_STR_11_the_prompt_cache_is_seen_by_the_servers_counter() -> None:
    stream = read([(1, token(1)), (2, token(2)), (3, last(2, tokens_cached=430))])
    assert _bench.faults(stream, 2) == []
    stream = read([(1, token(1)), (2, token(2)), (3, last(2, timings={"cache_n": 400, "prompt_n": 29}))])
    assert _bench.faults(stream, 2) == ["400 prompt tokens came from the prompt cache"]
    stream = read([(1, token(1)), (2, token(2)), (3, last(2, timings={"prompt_n": 1}))])
    assert _bench.faults(stream, 2) == ["the server read 1 of 429 prompt tokens in this run"]


def test_STR_12_a_cut_prompt_is_no_measurement() -> None:
    stream = read([(1, token(1)), (2, token(2)), (3, last(2, truncated=True))])
    assert any("context" in reason for reason in _bench.faults(stream, 2))


def test_STR_13_progress_frames_are_no_tokens() -> None:
    progress = {"total": 2048, "cache": 0, "processed": 512, "time_ms": 80}
    early = frame(index=0, content="", tokens=[0], stop=False, tokens_predicted=0, prompt_progress=progress)
    late = frame(index=0, content="", tokens=[7], stop=False, tokens_predicted=1, prompt_progress=progress)
    stream = read([(10, early), (20, late), (50, token(1)), (60, token(2))])
    assert stream.stamps == [(0.05, 1), (0.06, 2)]


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_STR_14_line_ends(end: bytes) -> None:
    body = (token(1) + token(2) + last(2)).replace(b"\n", end)
    assert read([(1, body[:-1]), (2, body[-1:])]).tokens == 2


@pytest.mark.parametrize("chunked", [True, False])
def test_STR_15_a_server_that_dies_in_the_middle(chunked: bool) -> None:
    parts = [(place * 0.001, token(place + 1)) for place in range(40)]
    with pytest.raises(StreamFault, match="stream ended after 40 of 256 tokens"):
        ask(Answer(parts, chunked=chunked, end=False))


def test_STR_16_a_stall_ends_the_run_by_the_last_token_not_by_the_last_byte() -> None:
    parts: list[Any] = [(0.0, token(1)), *[(0.05 * n, b":\n\n") for n in range(1, 40)]]
    with pytest.raises(StreamFault, match=r"no token for 0\.4 s after 1 of 256 tokens"):
        ask(Answer(parts), gap_s=0.4)


def test_STR_17_a_stop_word_of_the_server_is_named() -> None:
    stream = read([(1, token(1)), (2, token(12)), (3, last(12, stop_type="word", stopping_word="User:"))])
    assert any("'User:'" in reason and "-r" in reason for reason in _bench.faults(stream, 256))


def test_STR_18_the_servers_rate_is_taken_over_gaps() -> None:
    stream = read([(1, token(1)), (1001, token(256)), (1002, last(256, spent_ms=1000.0))])
    decode = _bench.rates(0.0, stream.stamps)[0]
    own = _bench.server_timings(stream, decode)
    assert own["decode_tps"] == pytest.approx(255.0)
    assert own["disagreement_percent"] == pytest.approx(0.0, abs=1e-9)


def test_STR_19_each_request_is_one_send_on_its_own_connection_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with FakeLlama([Answer(frames(2))]) as server:
        streams = [completion("127.0.0.1", server.port, _bench.request_body("x", 2)) for _ in range(2)]
    assert len({seen.connection for seen in server.requests}) == 2
    assert all(stream.peer == "127.0.0.1" and stream.connect_s >= 0 for stream in streams)


def test_STR_19_a_proxy_that_answers_is_labelled() -> None:
    with FakeLlama([Answer(frames(2), headers={"Via": "1.1 haproxy"})]) as server:
        stream = completion("127.0.0.1", server.port, _bench.request_body("x", 2))
    assert any("proxy" in label for label in _bench.labels(stream))


def test_STR_20_and_BEN_03_chat_frames_are_refused() -> None:
    chat = frame(
        choices=[{"index": 0, "delta": {"role": "assistant", "content": None}}], object="chat.completion.chunk"
    )
    with pytest.raises(StreamFault, match="unexpected frame shape"):
        read([(5, chat)])


def test_a_server_without_a_counter_is_counted_by_frames_and_labelled() -> None:
    plain = [frame(content=c, stop=False) for c in ("a", "", "b")]
    stream = read([(1, plain[0]), (2, plain[1]), (3, plain[2]), (4, frame(content="", stop=True))])
    assert stream.tokens == 2
    assert any("frames with text were counted" in label for label in _bench.labels(stream))


def test_RL_024_time_after_the_last_token_does_not_count() -> None:
    quick = read([(100, token(1)), (200, token(3)), (201, last(3))])
    slow = read([(100, token(1)), (200, token(3)), (10_200, last(3))])
    assert _bench.rates(0.0, quick.stamps) == _bench.rates(0.0, slow.stamps)


@pytest.mark.parametrize("bad", [b"zz\r\n", b"3\r\nabcXX"])
def test_broken_chunks_are_a_fault(bad: bytes) -> None:
    with pytest.raises(StreamFault, match="broken chunk"):
        ChunkDecoder({"transfer-encoding": "chunked"}).feed(bad)


def test_a_counter_that_goes_back_is_a_fault() -> None:
    with pytest.raises(StreamFault, match="went back from 5 to 4"):
        read([(1, token(5)), (2, token(4))])
