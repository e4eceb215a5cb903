# SPDX-License-Identifier: Apache-2.0
"""HTTP for the benchmark. Private to the collection: it may change at any time.

A plain socket, because the time of a token is the time of the read that brought it, and because no proxy setting of
the environment may come between the clock and the server.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._bench_stream import (
    ChunkDecoder,
    FrameReader,
    Stream,
    StreamFault,
)

RECEIVE = 65536


class HttpFault(Exception):
    """An answer other than 200, or none. `status` is 0 where there was none."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


def connect_host(host: str) -> str:
    """The address to connect to for a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def endpoint(host: str, port: int) -> str:
    """The endpoint as people write it."""
    host = connect_host(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _auth(api_key: Optional[str]) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def get_json(host: str, port: int, path: str, api_key: Optional[str] = None, timeout: float = 10.0) -> Any:
    """The JSON of a GET, or HttpFault."""
    connection = http.client.HTTPConnection(connect_host(host), port, timeout=timeout)
    try:
        connection.request("GET", path, headers=_auth(api_key))
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as fault:
        raise HttpFault(f"GET {path}: {fault}") from None
    finally:
        connection.close()
    if response.status != 200:
        raise HttpFault(f"GET {path}: {error_text(response.status, body)}", response.status)
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")


def error_text(status: int, body: bytes) -> str:
    """A server's refusal in one line."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode("utf-8", "replace").strip()
    return f"HTTP {status}: {message}" if message else f"HTTP {status}"


def completion(
    host: str,
    port: int,
    body: dict[str, Any],
    api_key: Optional[str] = None,
    first_token_s: float = 600.0,
    gap_s: float = 120.0,
    clock: Callable[[], float] = time.monotonic,
    on_token: Optional[Callable[[int], None]] = None,
) -> Stream:
    """One streamed /completion on a connection of its own.

    Raises StreamFault when the stream is broken and HttpFault when it never began. Pings keep a socket alive but not
    a measurement: both limits count from the last token, whatever else arrives.
    """
    payload = json.dumps(body).encode("utf-8")
    head = {
        "Host": f"{host}:{port}",
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "Content-Length": str(len(payload)),
        "Connection": "close",
        **_auth(api_key),
    }
    request = "POST /completion HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in head.items()) + "\r\n"
    stream = Stream()
    before = clock()
    try:
        sock = socket.create_connection((connect_host(host), port), timeout=10.0)
    except OSError as fault:
        raise HttpFault(f"cannot connect to {endpoint(host, port)}: {fault}") from None
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.peer = str(sock.getpeername()[0])
        stream.start = clock()
        stream.connect_s = stream.start - before
        sock.sendall(request.encode("latin-1") + payload)
        _receive(sock, stream, int(body.get("n_predict", 0)), first_token_s, gap_s, clock, on_token)
    return stream


def _receive(
    sock: socket.socket,
    stream: Stream,
    asked: int,
    first_token_s: float,
    gap_s: float,
    clock: Callable[[], float],
    on_token: Optional[Callable[[int], None]],
) -> None:
    decoder: Optional[ChunkDecoder] = None
    reader = FrameReader(stream)
    header = b""
    while decoder is None or not decoder.ended:
        limit = stream.stamps[-1][0] + gap_s if stream.stamps else stream.start + first_token_s
        left = limit - clock()
        if left <= 0:
            raise StreamFault(_stalled(stream, asked, first_token_s, gap_s))
        sock.settimeout(left)
        try:
            data = sock.recv(RECEIVE)
            at = clock()
        except socket.timeout:
            raise StreamFault(_stalled(stream, asked, first_token_s, gap_s)) from None
        except OSError as fault:
            raise StreamFault(f"the connection broke after {stream.tokens} of {asked} tokens: {fault}") from None
        if not data:
            break
        if decoder is None:
            header += data
            if b"\r\n\r\n" not in header:
                continue
            head, data = header.split(b"\r\n\r\n", 1)
            decoder = _open(head, data, sock, stream)
        had = stream.tokens
        reader.feed(decoder.feed(data), at)
        if on_token is not None and stream.tokens > had:
            on_token(stream.tokens)
    if decoder is None:
        raise HttpFault("the server closed the connection without an answer")
    reader.close()
    if stream.final is None:
        raise StreamFault(f"stream ended after {stream.tokens} of {asked} tokens")


def _open(head: bytes, data: bytes, sock: socket.socket, stream: Stream) -> ChunkDecoder:
    lines = head.decode("latin-1").split("\r\n")
    for line in lines[1:]:
        name, _colon, value = line.partition(":")
        stream.headers[name.strip().lower()] = value.strip()
    words = lines[0].split(" ", 2)
    if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
        raise HttpFault(f"not an HTTP/1.1 answer: {lines[0][:80]}")
    decoder = ChunkDecoder(stream.headers)
    status = int(words[1])
    if status == 200:
        return decoder
    body = decoder.feed(data)
    sock.settimeout(10.0)
    try:
        while not decoder.ended and len(body) < RECEIVE:
            more = sock.recv(RECEIVE)
            if not more:
                break
            body += decoder.feed(more)
    except OSError:
        pass  # the status is what counts; its text is a courtesy
    raise HttpFault(error_text(status, body), status)


def _stalled(stream: Stream, asked: int, first_token_s: float, gap_s: float) -> str:
    if not stream.stamps:
        return f"no token within {first_token_s:g} s of the request"
    return f"no token for {gap_s:g} s after {stream.tokens} of {asked} tokens"
