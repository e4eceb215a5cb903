# SPDX-License-Identifier: Apache-2.0
"""Answers as servers, mirrors, proxies and content networks spell them: the file ends right, or one line says why."""

from __future__ import annotations

import email.utils
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError
from ansible_collections.tensorless.fleet.plugins.module_utils._hub import expiry, retry_after, what_is
from ansible_collections.tensorless.fleet.plugins.module_utils._hub_http import Session

from tests.hub import FakeHub, Request
from tests.hub.jobs import COMMIT, PARTS, QUICK, REPO, Bench, noise

TOKEN = "hf_0123456789abcdefghijklmnop"


def is_get(request: Request) -> bool:
    return request.method == "GET"


def ranged(request: Request) -> bool:
    return request.range is not None


class Scripted:
    """A server whose answers are written out byte by byte: a function from the request's head to the answer."""

    def __init__(self, answer: Callable[[str], bytes]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.heads: list[str] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _address = self._listener.accept()
            except OSError:
                return
            with peer:
                head = b""
                while b"\r\n\r\n" not in head:
                    some = peer.recv(65536)
                    if not some:
                        break
                    head += some
                if head:
                    self.heads.append(head.decode("latin-1"))
                    try:
                        peer.sendall(self._answer(self.heads[-1]))
                    except OSError:
                        continue

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def scripted() -> Iterator[Callable[[Callable[[str], bytes]], Scripted]]:
    made: list[Scripted] = []

    def make(answer: Callable[[str], bytes]) -> Scripted:
        made.append(Scripted(answer))
        return made[-1]

    yield make
    for one in made:
        one.close()


def asked_range(head: str, size: int) -> tuple[int, int] | None:
    for line in head.split("\r\n"):
        if line.lower().startswith("range: bytes="):
            first, _dash, last = line.partition("=")[2].partition("-")
            return int(first), int(last) + 1 if last else size
    return None


# ----- spellings of one and the same answer -----


def spelled(data: bytes, style: str) -> Callable[[str], bytes]:
    """A mirror that serves the bytes itself, in one of many styles."""

    def answer(head: str) -> bytes:
        span = asked_range(head, len(data))
        start, end = span or (0, len(data))
        body = data[start:end]
        version, status = "HTTP/1.1", "206 Partial Content" if span else "200 OK"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(body)), "Connection": "close"}
        if span:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        before = b""
        if style == "http/1.0 ended by closing":
            version = "HTTP/1.0"
            del headers["Content-Length"], headers["Connection"]
        elif style == "no reason":
            status = status.split()[0]
        elif style == "lower case":
            headers = {key.lower(): value for key, value in headers.items()}
        elif style == "upper case":
            headers = {key.upper(): value for key, value in headers.items()}
        elif style == "unknown total" and span:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/*"
        elif style == "equals sign" and span:
            headers["Content-Range"] = f"Bytes={start}-{end - 1}/{len(data)}"
        elif style == "spaces" and span:
            headers["Content-Range"] = f"  bytes  {start} - {end - 1} / {len(data)}  "
        elif style == "at most 50000 bytes" and span:
            end = min(end, start + 50_000)
            body = data[start:end]
            headers.update({"Content-Range": f"bytes {start}-{end - 1}/{len(data)}", "Content-Length": str(len(body))})
        elif style in ("chunked", "chunked with a false length"):
            headers["Transfer-Encoding"] = "chunked"
            if style == "chunked":
                del headers["Content-Length"]
            else:
                headers["Content-Length"] = "17"
            step = 40_000
            pieces = [body[n : n + step] for n in range(0, len(body), step)]
            body = b"".join(b"%X;x=y\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\nX-Sum: none\r\n\r\n"
        elif style == "hints first":
            before = b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
        elif style == "encoding identity":
            headers["Content-Encoding"] = "Identity"
        elif style == "head says zero" and head.startswith("HEAD"):
            headers["Content-Length"] = "0"
        elif style == "head says how long its gzip is" and head.startswith("HEAD"):
            headers.update({"Content-Length": "1234", "Content-Encoding": "gzip"})
        elif style == "weak etag":
            headers["ETag"] = 'W/"abc-gzip"'
        elif style == "linked etag of a gateway":
            headers["X-Linked-ETag"] = '"abc-gzip"'
        elif style == "length that is none":
            headers["Content-Length"] = "12,x"
        if head.startswith("HEAD"):
            body = b""
        lines = [f"{version} {status}", *(f"{key}: {value}" for key, value in headers.items()), "", ""]
        return before + "\r\n".join(lines).encode() + body

    return answer


STYLES = [
    "http/1.0 ended by closing", "no reason", "lower case", "upper case", "unknown total", "equals sign", "spaces",
    "at most 50000 bytes", "chunked", "chunked with a false length", "hints first", "encoding identity",
    "head says zero", "head says how long its gzip is", "weak etag", "linked etag of a gateway", "length that is none",
]  # fmt: skip


@pytest.mark.parametrize("limits", [PARTS, QUICK], ids=["parts", "one"])
@pytest.mark.parametrize("style", STYLES)
def test_spellings_that_mean_the_file(bench: Bench, scripted: Any, style: str, limits: Any) -> None:
    server = scripted(spelled(bench.data, style))
    bench.leave_partial(bench.data[:1000])
    ran = bench.run(limits, endpoint=server.url)
    assert bench.right()
    assert ran.job.outcome is not None
    assert ran.job.outcome.restarts == 0
    assert ran.job.outcome.fetched == len(bench.data) - 1000


# ----- answers that are not the range, from a server that goes on like that -----


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Range": "bytes 0-9/700000"},
        {"Content-Range": "bytes 700000-699999/700000"},
        {"Content-Range": "items 0-1/2"},
        {"Content-Range": None, "Content-Type": "multipart/byteranges; boundary=x"},
        {"Content-Encoding": "gzip"},
        {"Transfer-Encoding": "gzip, chunked"},
        {"Content-Length": "5"},
    ],
)
@pytest.mark.parametrize("limits", [PARTS, QUICK], ids=["parts", "one"])
def test_ranges_that_cannot_be_used_end_in_one_plain_stream(
    bench: Bench, headers: dict[str, str | None], limits: Any
) -> None:
    bench.leave_partial(bench.data[:1000])
    bench.hub.fault(headers=headers, when=ranged)
    bench.run(limits)
    assert bench.right()
    assert bench.hub.requests("cdn", "GET")[-1].range is None


@pytest.mark.parametrize("limits", [PARTS, QUICK], ids=["parts", "one"])
@pytest.mark.parametrize("total", ["bytes */700000", "bytes */*", None])
def test_416_for_every_range_ends_in_one_plain_stream(bench: Bench, total: str | None, limits: Any) -> None:
    bench.leave_partial(bench.data[:1000])
    bench.hub.fault(status=416, headers={"Content-Range": total}, when=ranged)
    bench.run(limits)
    assert bench.right()


def test_what_has_come_is_not_given_up_for_a_promise(bench: Bench) -> None:
    """Ranges are refused, and the plain request that would begin anew fails: the bytes stay."""
    bench.leave_partial(bench.data[:300_000])
    bench.hub.fault(headers={"Content-Range": "bytes 0-9/700000"}, when=ranged)
    bench.hub.fault(status=503)
    with pytest.raises(BlobError, match="HTTP 503"):
        bench.run(QUICK._replace(retries=2))
    assert bench.hub.requests("cdn", "GET")[-1].range is None
    assert bench.goes_on_from(300_000)


def test_206_with_another_total(bench: Bench) -> None:
    bench.leave_partial(bench.data[:1000])
    bench.hub.fault(headers={"Content-Range": "bytes 1000-699999/800000"}, when=ranged)
    with pytest.raises(BlobError, match="has 800000 bytes") as error:
        bench.run()
    assert error.value.reason == "size_differs"
    assert bench.partial.read_bytes() == bench.data[:1000]


@pytest.mark.parametrize("status", [520, 521, 522, 524, 529, 530, 598])
def test_statuses_of_content_networks_pass(bench: Bench, status: int) -> None:
    bench.hub.fault(status=status, times=2)
    bench.run()
    assert bench.right()


@pytest.mark.parametrize("status", [204, 407, 451, 501, 505, 511])
def test_statuses_that_are_final(bench: Bench, status: int) -> None:
    bench.hub.fault(status=status, when=is_get)
    with pytest.raises(BlobError, match=f"HTTP {status} from 127.0.0.1"):
        bench.run()
    assert len(bench.hub.requests("cdn")) == 1


def test_page_in_the_middle_keeps_what_has_come(bench: Bench) -> None:
    bench.leave_partial(bench.data[:300_000])
    page: dict[str, str | None] = {"Content-Type": "text/html; charset=utf-8"}
    bench.hub.fault(status=200, headers=page, body=b"<html>Please log in</html>")
    with pytest.raises(BlobError, match="an intermediary answered") as error:
        bench.run()
    assert error.value.reason == "html"
    bench.hub.faults.clear()
    bench.hub.fault(status=200, body=b"\xef\xbb\xbf <head><title>Please log in</title>", when=is_get)
    with pytest.raises(BlobError, match="looks like an HTML page"):
        bench.run()
    assert bench.partial.read_bytes()[:300_000] == bench.data[:300_000]
    assert bench.goes_on_from(300_000)


def test_server_that_begins_anew_and_never_ends_is_given_up(bench: Bench) -> None:
    bench.hub.fault(ignore_range=True, cut_at=300_000)
    with pytest.raises(BlobError, match="begins anew each time, and never comes to the end") as error:
        bench.run(QUICK._replace(retries=3))
    assert error.value.reason == "interrupted"
    assert len(bench.hub.requests("cdn", "GET")) == 6
    bench.hub.faults.clear()
    bench.run()
    assert bench.right()


@pytest.mark.parametrize("said", [b"<b>\x1b[31mno\x00\nway\r\n", b"\xff\xfe\x07"])
def test_what_a_server_says_cannot_write_to_the_terminal(bench: Bench, said: bytes) -> None:
    bench.hub.fault(status=400, body=said)
    with pytest.raises(BlobError) as error:
        bench.run()
    assert str(error.value).isprintable()
    bench.hub.faults.clear()
    bench.hub.fault(raw=said)
    with pytest.raises(BlobError) as error:
        bench.run(QUICK._replace(retries=1))
    assert str(error.value).isprintable()


# ----- redirects -----


@pytest.mark.parametrize(
    "place",
    ["{cdn}/a b/ü?x=ä y", "{cdn}/a%20b/%C3%BC?sig=a%2Bb%3D", "//{host}/x", "{cdn}/x#part", "{upper}/x", "{user}/x"],
)
def test_redirects_in_every_spelling(bench: Bench, scripted: Any, place: str) -> None:
    server = scripted(spelled(bench.data, "plain"))
    host = server.url.partition("//")[2]
    place = place.format(cdn=server.url, host=host, upper=server.url.replace("http", "HTTP"), user=f"http://u:p@{host}")
    bench.hub.fault(where="hub", location=place.encode().decode("latin-1"))
    bench.run(token=TOKEN)
    assert bench.right()
    line = server.heads[0].split("\r\n")[0]
    assert line.isascii()
    assert line.count(" ") == 2
    assert "#" not in line
    assert "Authorization" not in server.heads[0]


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"Location": None}, "bad_address"),
        ({"Location": "http://[::1"}, "bad_address"),
        ({"Location": "http://127.0.0.1:99999/x"}, "bad_address"),
        ({"Location": "ftp://127.0.0.1/x"}, "bad_address"),
        ({"Location": "file:///etc/passwd"}, "bad_address"),
        ({"Location": "http://a..b/x"}, "bad_address"),
    ],
)
def test_redirects_to_nowhere_are_one_line(bench: Bench, headers: dict[str, str | None], reason: str) -> None:
    bench.hub.fault(where="hub", headers=headers)
    with pytest.raises(BlobError) as error:
        bench.run()
    assert error.value.reason == reason
    assert "\n" not in str(error.value)


def test_content_server_that_redirects_once_more(bench: Bench, scripted: Any) -> None:
    edge = scripted(spelled(bench.data, "plain"))
    bench.hub.fault(status=302, headers={"Location": f"{edge.url}/edge?sig=1"})
    bench.run(PARTS, token=TOKEN)
    assert bench.right()
    assert not [head for head in edge.heads if "authorization" in head.lower()]


@pytest.mark.parametrize("path", ["/hf", "/a/b/", "/m%20x"])
def test_endpoint_with_a_path(bench: Bench, scripted: Any, path: str) -> None:
    server = scripted(spelled(bench.data, "plain"))
    bench.run(endpoint=server.url + path)
    assert bench.right()
    assert server.heads[0].split()[1] == f"{path.rstrip('/')}/{REPO}/resolve/{COMMIT}/f.gguf"


@pytest.mark.parametrize(
    "file", ["a b.gguf", "ü/ß 漢.gguf", "100%.gguf", "a#b?c&d=e+f.gguf", "x/~y/'z'.gguf", "%41.gguf"]
)
def test_names_that_an_address_cannot_hold(hub: FakeHub, tmp_path: Path, file: str) -> None:
    bench = Bench(hub, tmp_path, noise(3000), file=file)
    bench.run()
    assert bench.right()
    assert urllib.parse.unquote(hub.requests("hub")[0].path).endswith(f"/resolve/{COMMIT}/{file}")


# ----- time -----


def test_retry_after_in_every_form() -> None:
    now = 1_000_000_000.0
    date = email.utils.formatdate(now + 90, usegmt=True)
    cases = {
        "5": 5.0, "1.5": 1.5, " 7 ": 7.0, date: 90.0, date.replace("GMT", "-0000"): 90.0,
        "Sun, 06 Nov 1994 08:49:37 GMT": 0.0, "Sunday, 06-Nov-94 08:49:37 GMT": 0.0, "Sun Nov  6 08:49:37 1994": 0.0,
        "soon": None, "-5": None, "": None, "9" * 400: None, "٣": None, "Mon, 99 Foo 2026 99:99:99 GMT": None,
    }  # fmt: skip
    assert {text: retry_after({"Retry-After": text}, now) for text in cases} == cases


@pytest.mark.parametrize("zone", ["UTC0", "EST5", "XXX-9"])
def test_dates_do_not_depend_on_the_time_zone(monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert retry_after({"Retry-After": "Sun Sep  9 01:47:40 2001"}, 1_000_000_000.0) == 60.0
        assert expiry("http://x/?X-Amz-Date=20010909T014640Z&X-Amz-Expires=60") == 1_000_000_060.0
    finally:
        monkeypatch.undo()
        time.tzset()


def test_clock_that_is_ahead_does_not_ask_the_hub_for_every_part(bench: Bench) -> None:
    job = bench.job(PARTS)
    ahead = type(job)(job.wanted, job.options, job.tools._replace(now=lambda: time.time() + 7200))
    ahead.apply(ahead.observe(), ahead.plan(ahead.observe()))
    assert bench.right()
    assert len(bench.hub.requests("hub")) == 1


# ----- proxies -----


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"http_proxy": "{url}"}, None),
        ({"all_proxy": "{host}"}, None),
        ({"http_proxy": "http://me:p%40ss@{host}/"}, "Basic bWU6cEBzcw=="),
    ],
)
def test_proxy_with_and_without_a_password(
    bench: Bench, scripted: Any, environ: dict[str, str], expected: str | None
) -> None:
    proxy = scripted(spelled(bench.data, "plain"))
    host = proxy.url.partition("//")[2]
    given = {name: value.format(url=proxy.url, host=host) for name, value in environ.items()}
    bench.run(endpoint="http://hub.example/x", environ=given)
    assert bench.right()
    assert proxy.heads[0].startswith(f"HEAD http://hub.example/x/{REPO}/resolve/")
    lines = proxy.heads[0].split("\r\n")
    assert "Host: hub.example" in lines
    assert [line for line in lines if "Proxy-Authorization" in line] == (
        [f"Proxy-Authorization: {expected}"] if expected else []
    )


@pytest.mark.parametrize("value", ["socks5://me:hunter2@p:1080", "https://p:443", "http://"])
def test_proxy_of_another_kind_is_one_line(value: str) -> None:
    with pytest.raises(BlobError, match="http_proxy is not the address of an http proxy") as error:
        Session("test", 1, {"http_proxy": value}).request("GET", "http://hub.example/", {})
    assert "hunter2" not in str(error.value)


def test_no_proxy_is_respected(bench: Bench) -> None:
    bench.run(environ={"http_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"})
    assert bench.right()


# ----- first bytes -----


@pytest.mark.parametrize(
    ("head", "looks"),
    [
        (b"\xef\xbb\xbf<!DOCTYPE HTML>", "HTML"), (b"\n\n <HTML lang=en>", "HTML"), (b"<head>", "HTML"),
        (b"<script>location=1</script>", "HTML"), (b"<?xml version='1.0'?>", "XML"), (b"GGUF\x03\0\0\0", ""),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS"), (b"", ""),
    ],
)  # fmt: skip
def test_what_the_first_bytes_are(head: bytes, looks: str) -> None:
    assert looks in what_is(head)
    assert bool(looks) == bool(what_is(head))
