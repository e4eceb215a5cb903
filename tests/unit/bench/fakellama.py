# SPDX-License-Identifier: Apache-2.0
"""A scripted llama-server for tests: raw sockets, so that every byte and every moment is chosen by the test."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class Answer:
    """One /completion. `parts` are (seconds after the headers, bytes); a part without a time goes out at once."""

    parts: Sequence[Any]
    status: int = 200
    chunked: bool = True
    end: bool = True  # False: the connection closes without the last chunk
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    path: str
    body: bytes
    connection: int
    headers: bytes = b""


def frame(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(count: int, content: str = "x", **more: Any) -> bytes:
    return frame(index=0, content=content, tokens=[count], stop=False, id_slot=0, tokens_predicted=count, **more)


def last(count: int, prompt: int = 429, spent_ms: float = 1000.0, **more: Any) -> bytes:
    timings = {"cache_n": 0, "prompt_n": prompt, "prompt_ms": 10.0, "predicted_n": count, "predicted_ms": spent_ms}
    timings.update(more.pop("timings", {}))
    fields = {"stop_type": "limit", "tokens_predicted": count, "tokens_evaluated": prompt, "timings": timings, **more}
    return frame(index=0, content="", tokens=[], stop=True, model="m", **fields)


def frames(count: int, gap: float = 0.004, **more: Any) -> list[Any]:
    """An ordinary answer of `count` tokens."""
    parts: list[Any] = [(0.002 + place * gap, token(place + 1)) for place in range(count)]
    return [*parts, last(count, spent_ms=max(0.001, (count - 1) * gap * 1000), **more)]


class FakeLlama:
    """Answers /completion from the script, one Answer after the other, and the rest from what it is told."""

    def __init__(
        self,
        answers: Sequence[Answer],
        models: Sequence[str] = (),
        slots: Any = None,
        health: Sequence[int] = (200,),
        metrics: Optional[Sequence[int]] = None,
        key: Optional[str] = None,
    ) -> None:
        self.answers = list(answers)
        self.models = list(models)
        self.slots = slots
        self.health = list(health)
        self.metrics = list(metrics) if metrics is not None else None
        self.key = key
        self.requests: list[Seen] = []
        self.sent_at: list[float] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._count = 0
        self._lock = threading.Lock()

    def __enter__(self) -> FakeLlama:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _peer = self._socket.accept()
            except OSError:
                return
            self._count += 1
            threading.Thread(target=self._one, args=(sock, self._count), daemon=True).start()

    def _one(self, sock: socket.socket, number: int) -> None:
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            data = b""
            while b"\r\n\r\n" not in data:
                more = sock.recv(65536)
                if not more:
                    return
                data += more
            head, body = data.split(b"\r\n\r\n", 1)
            length = next(
                (int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")), 0
            )
            while len(body) < length:
                body += sock.recv(65536)
            path = head.split(b" ")[1].decode()
            self.requests.append(Seen(path, body, number, head))
            try:
                self._answer(sock, path, head)
            except OSError:
                return

    def _plain(self, sock: socket.socket, status: int, body: Any) -> None:
        text = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        sock.sendall(b"HTTP/1.1 %d X\r\nServer: llama.cpp\r\nContent-Length: %d\r\n\r\n" % (status, len(text)) + text)

    def _answer(self, sock: socket.socket, path: str, head: bytes) -> None:
        if path == "/health":
            status = self.health.pop(0) if len(self.health) > 1 else self.health[0]
            self._plain(sock, status, {"status": "ok"} if status == 200 else {"error": {"message": "Loading model"}})
        elif self.key and f"Authorization: Bearer {self.key}".encode() not in head:
            self._plain(
                sock, 401, {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}}
            )
        elif path == "/v1/models":
            self._plain(sock, 200, {"data": [{"id": name} for name in self.models]})
        elif path == "/props":
            self._plain(
                sock, 200, {"build_info": "b1-test", "total_slots": 1, "default_generation_settings": {"n_ctx": 4096}}
            )
        elif path == "/slots" and self.slots is not None:
            self._plain(sock, 200, self.slots)
        elif path == "/metrics" and self.metrics is not None:
            total = self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]
            self._plain(sock, 200, f"# TYPE x counter\nllamacpp:tokens_predicted_total {total}\n")
        elif path == "/completion":
            with self._lock:
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            self._stream(sock, answer)
        else:
            self._plain(sock, 404, {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}})

    def _stream(self, sock: socket.socket, answer: Answer) -> None:
        if answer.status != 200:
            self._plain(sock, answer.status, answer.parts[0])
            return
        headers = {"Server": "llama.cpp", "Content-Type": "text/event-stream", **answer.headers}
        if answer.chunked:
            headers["Transfer-Encoding"] = "chunked"
        sock.sendall(b"HTTP/1.1 200 OK\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()).encode() + b"\r\n")
        begin = time.monotonic()
        for part in answer.parts:
            due, data = part if isinstance(part, tuple) else (None, part)
            if due is not None:
                while (left := begin + due - time.monotonic()) > 0:
                    # The last moments are waited out awake: a sleep may come back late by as much as a token's time.
                    time.sleep(left - 0.0005 if left > 0.001 else 0)
            self.sent_at.append(time.monotonic())
            sock.sendall(b"%x\r\n%s\r\n" % (len(data), data) if answer.chunked else data)
        if answer.chunked and answer.end:
            sock.sendall(b"0\r\n\r\n")
