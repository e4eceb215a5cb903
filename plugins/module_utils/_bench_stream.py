# SPDX-License-Identifier: Apache-2.0
"""What a streamed completion says, and when. Private to the collection: it may change at any time.

Two rules carry the whole measurement. Tokens are counted by the server's own counter, because a token that ends
inside a UTF-8 character makes no frame and a draft model puts several tokens into one. And a frame's time is the
time at which the bytes that completed it were received, taken before anything looked at them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Optional


class StreamFault(Exception):
    """The stream cannot be a measurement; the text says why."""


@dataclass
class Stream:
    """One request, as far as it has been received. Times are seconds on one monotonic clock."""

    start: float = 0.0
    connect_s: float = 0.0
    stamps: list[tuple[float, int]] = field(default_factory=list)
    frames: int = 0
    pings: int = 0
    max_jump: int = 0
    counted_by: str = "tokens_predicted"
    final: Optional[dict[str, Any]] = None
    text: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    peer: str = ""

    @property
    def tokens(self) -> int:
        return self.stamps[-1][1] if self.stamps else 0


class FrameReader:
    """Turns bytes into frames and stamps. Feed it the body as it comes; it keeps what is not complete yet."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._rest = b""

    def feed(self, data: bytes, at: float) -> None:
        """Take bytes that were received at `at`. Lines may end in LF, CR LF or CR LF split over two reads."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line.rstrip(b"\r"), at)

    def close(self) -> None:
        """The body has ended. Some servers leave out the last line end."""
        if self._rest.strip():
            self._line(self._rest.strip(), self.stream.stamps[-1][0] if self.stream.stamps else self.stream.start)
        self._rest = b""

    def _line(self, line: bytes, at: float) -> None:
        if not line:
            return
        if line.startswith(b":"):
            self.stream.pings += 1
        elif line.startswith(b"data:"):
            payload = line[5:].strip()
            if payload == b"[DONE]":
                if self.stream.final is None:
                    raise StreamFault("the server said [DONE] without a frame that ends the answer")
            else:
                self._frame(_load(payload), at)
        elif line.startswith(b"error:"):
            raise StreamFault(_server_error(_load(line[6:].strip())))
        elif line.startswith((b"event:", b"id:", b"retry:")):
            return
        else:
            raise StreamFault(f"not an event stream: {_shown(line)}")

    def _frame(self, frame: dict[str, Any], at: float) -> None:
        stream = self.stream
        if "error" in frame:
            raise StreamFault(_server_error(frame["error"]))
        if "choices" in frame or ("content" not in frame and not frame.get("stop") and "prompt_progress" not in frame):
            raise StreamFault(
                "unexpected frame shape: this is not llama-server's /completion "
                "(a chat route or a proxy in between?): " + _shown(json.dumps(frame).encode())
            )
        if stream.final is not None:
            raise StreamFault("the server sent another frame after the one that ended the answer")
        if frame.get("stop") is True:
            stream.final = frame
            return
        if "prompt_progress" in frame:
            return
        content = str(frame.get("content") or "")
        counter = frame.get("tokens_predicted")
        if isinstance(counter, int) and not isinstance(counter, bool):
            self._stamp(at, counter, content)
        elif content:
            # No counter: the best that is left is one token a frame with text, and the result says so.
            stream.counted_by = "frames"
            self._stamp(at, stream.tokens + 1, content)

    def _stamp(self, at: float, counter: int, content: str) -> None:
        stream = self.stream
        if content:
            stream.text.append(content)
        if counter < stream.tokens:
            raise StreamFault(f"the server's token counter went back from {stream.tokens} to {counter}")
        if counter == stream.tokens:
            return
        stream.frames += 1
        stream.max_jump = max(stream.max_jump, counter - stream.tokens)
        if stream.stamps and stream.stamps[-1][0] == at:
            # Several frames in one read: that moment stands for the last of them, so the gap is not counted twice.
            stream.stamps[-1] = (at, counter)
        else:
            stream.stamps.append((at, counter))


def _load(payload: bytes) -> dict[str, Any]:
    try:
        frame = json.loads(payload.decode("utf-8"))
    except (UnicodeDecodeError, ValueError):
        raise StreamFault(f"a frame is not JSON: {_shown(payload)}") from None
    if not isinstance(frame, dict):
        raise StreamFault(f"a frame is not an object: {_shown(payload)}")
    return frame


def _shown(data: bytes) -> str:
    text = data[:120].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _server_error(error: Any) -> str:
    if isinstance(error, dict):
        message, kind = str(error.get("message", "")), str(error.get("type", ""))
        return "the server reported an error: " + _shown(message.encode()) + (f" ({kind})" if kind else "")
    return "the server reported an error: " + _shown(str(error).encode())


class ChunkDecoder:
    """Removes HTTP/1.1 chunk framing, or counts down a Content-Length, or passes everything until the end."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length", "")
        self.left: Optional[int] = int(length) if length.isdigit() and not self.chunked else None
        self.ended = self.left == 0
        self._buffer = b""
        self._in_chunk: Optional[int] = None

    @property
    def must_end(self) -> bool:
        """Whether a closed connection before `ended` means a cut answer."""
        return (self.chunked or self.left is not None) and not self.ended

    def feed(self, data: bytes) -> bytes:
        if self.left is not None:
            taken = data[: self.left]
            self.left -= len(taken)
            self.ended = self.left == 0
            return taken
        if not self.chunked:
            return data
        self._buffer += data
        out = []
        while not self.ended:
            if self._in_chunk is None:
                head, found, rest = self._buffer.partition(b"\r\n")
                if not found:
                    break
                try:
                    self._in_chunk = int(head.split(b";")[0].strip(), 16)
                except ValueError:
                    raise StreamFault(f"broken chunk size: {_shown(head)}") from None
                self._buffer = rest
                if self._in_chunk == 0:
                    self.ended = True
                    break
            # A chunk's bytes are passed on as they come: a slow chunk must not hold back a finished frame.
            taken = self._buffer[: self._in_chunk]
            out.append(taken)
            self._buffer = self._buffer[len(taken) :]
            self._in_chunk -= len(taken)
            if self._in_chunk or len(self._buffer) < 2:
                break
            if self._buffer[:2] != b"\r\n":
                raise StreamFault("broken chunk: its end is missing")
            self._buffer = self._buffer[2:]
            self._in_chunk = None
        return b"".join(out)
