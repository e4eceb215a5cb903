# SPDX-License-Identifier: Apache-2.0
"""Two HTTP servers that answer as the Hugging Face Hub and the CDN behind it do.

The Hub part knows repositories, revisions, gates and tokens, and redirects large files to the CDN part with a signed
address that expires. The CDN part serves bytes, by ranges too. Both keep a log of every request with the bytes sent,
and both can be told to misbehave (`Fault`). Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.hub.records import Fault, HubFile, Request

BLOCK = 256 * 1024


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True
    where = "hub"
    owner: FakeHub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is nothing to print."""


class FakeHub:
    """`with FakeHub() as hub: hub.add(...)`; then `hub.url` is the endpoint and `hub.log` what happened."""

    def __init__(
        self,
        bind: str = "127.0.0.1",
        port: int = 0,
        cdn_port: int = 0,
        tokens: Iterable[str] = (),
        lifetime: float = 3600.0,
        rate: float | None = None,
        delay: float = 0.0,
        cdn_base: str | None = None,
        log_path: str | None = None,
    ) -> None:
        self.files: dict[tuple[str, str, str], HubFile] = {}
        self.gated: set[str] = set()
        self.tokens = set(tokens)
        self.lifetime = lifetime
        self.rate = rate
        self.delay = delay
        self.faults: list[Fault] = []
        self.log: list[Request] = []
        self.direct = False  # True: the Hub serves the bytes itself, as a plain mirror does
        self.renamed: dict[str, str] = {}
        self._lock = threading.RLock()
        self._secret = os.urandom(16)
        self._log_path = log_path
        self._stopped = threading.Event()
        self._connections = 0
        self._threads: list[threading.Thread] = []
        self._hub = _Server((bind, port), _Handler)
        self._cdn = _Server((bind, cdn_port), _Handler)
        self._cdn.where = "cdn"
        self._hub.owner = self._cdn.owner = self
        shown = "127.0.0.1" if bind in ("", "0.0.0.0") else bind
        self.url = f"http://{shown}:{self._hub.server_address[1]}"
        self.cdn_url = (cdn_base or f"http://{shown}:{self._cdn.server_address[1]}").rstrip("/")

    def __enter__(self) -> FakeHub:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        for server in (self._hub, self._cdn):
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        self._stopped.set()
        for server in (self._hub, self._cdn):
            server.shutdown()
            server.server_close()

    # ----- content -----

    def add(
        self,
        repo: str,
        revision: str,
        name: str,
        content: bytes | Path,
        sha256: str | None = None,
        lfs: bool = True,
        gated: bool = False,
    ) -> HubFile:
        if sha256 is None:
            sha256 = _sha256(content)
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        entry = HubFile(repo, revision, name, content, sha256, size, lfs)
        with self._lock:
            self.files[(repo.lower(), revision, name)] = entry
            if gated:
                self.gated.add(repo.lower())
        return entry

    def add_tree(self, root: Path) -> None:
        """Everything under ROOT/<org>/<repo>/<revision>/<file...>; `.sha256` beside a file saves hashing it."""
        for path in sorted(root.glob("*/*/*/**/*")):
            if path.is_file() and not path.name.endswith(".sha256"):
                org, repo, revision, *rest = path.relative_to(root).parts
                beside = path.with_name(path.name + ".sha256")
                known = beside.read_text().split()[0] if beside.exists() else None
                self.add(f"{org}/{repo}", revision, "/".join(rest), path, sha256=known)

    def fault(self, **fields: Any) -> Fault:
        fault = Fault(**fields)
        self.faults.append(fault)
        return fault

    # ----- log -----

    def requests(self, where: str | None = None, method: str | None = None) -> list[Request]:
        with self._lock:
            return [r for r in self.log if where in (None, r.where) and method in (None, r.method)]

    def bytes_sent(self, where: str | None = None) -> int:
        return sum(r.sent for r in self.requests(where))

    def new_connection(self) -> int:
        with self._lock:
            self._connections += 1
            return self._connections

    def note(self, request: Request) -> None:
        with self._lock:
            request.number = len(self.log)
            self.log.append(request)

    def write_log(self, request: Request) -> None:
        """Appends the finished request to the byte log; secrets stay out of it."""
        if self._log_path is None:
            return
        line = {
            "where": request.where,
            "method": request.method,
            "path": request.path,
            "range": request.range,
            "status": request.status,
            "start": request.start,
            "sent": request.sent,
            "file": request.file,
            "authorization": request.header("Authorization") is not None,
            "time": round(request.time, 3),
        }
        with self._lock, open(self._log_path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def take_fault(self, request: Request) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.where != request.where or fault.times == 0:
                    continue
                if fault.when is not None and not fault.when(request):
                    continue
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None

    # ----- signed addresses -----

    def sign(self, entry: HubFile, now: float | None = None) -> str:
        expires = int((time.time() if now is None else now) + self.lifetime)
        path = f"/xet-bridge-us/{entry.git_oid[:24]}/{entry.xet}"
        mac = hmac.new(self._secret, f"{path}:{expires}".encode(), "sha256").hexdigest()
        disposition = urllib.parse.quote(f'inline; filename="{entry.name.rsplit("/", 1)[-1]}";')
        session = os.urandom(4).hex()  # two addresses of one second differ, as real ones do
        query = f"response-content-disposition={disposition}&Expires={expires}&Policy={session}&Signature={mac}"
        return f"{self.cdn_url}{path}?{query}"

    def check(self, path: str, query: str) -> HubFile | None:
        """The file that a signed address stands for; None when the address is wrong or too old."""
        values = dict(urllib.parse.parse_qsl(query))
        expires = values.get("Expires", "0")
        mac = hmac.new(self._secret, f"{path}:{expires}".encode(), "sha256").hexdigest()
        if not hmac.compare_digest(mac, values.get("Signature", "")) or int(expires) < time.time():
            return None
        xet = path.rsplit("/", 1)[-1]
        with self._lock:
            return next((f for f in self.files.values() if f.xet == xet), None)

    def wait(self, seconds: float) -> None:
        self._stopped.wait(seconds)


def _sha256(content: bytes | Path) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    digest = hashlib.sha256()
    with content.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "hub-for-tests"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.hub = self.server.owner
        self.number = self.hub.new_connection()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 512 * 1024)

    def log_message(self, format: str, *args: Any) -> None:
        """The log is in FakeHub.log."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        split = urllib.parse.urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        self.posted = self.rfile.read(length) if length else b""
        self.seen = Request(
            number=0,
            where=self.server.where,
            method=self.command,
            path=split.path,
            query=split.query,
            headers=list(self.headers.items()),
            time=time.time(),
            connection=self.number,
        )
        self.hub.note(self.seen)
        self.fault = self.hub.take_fault(self.seen) or Fault()
        try:
            self._dispatch()
        except (ConnectionError, TimeoutError, BrokenPipeError):
            self.close_connection = True
        finally:
            self.seen.finished = True
            self.hub.write_log(self.seen)

    def _dispatch(self) -> None:
        self.hub.wait(self.hub.delay + self.fault.delay)
        if self.fault.raw is not None:
            self.connection.sendall(self.fault.raw)
            self.close_connection = True
            return
        if len([k for k, _value in self.seen.headers if k.lower() == "range"]) > 1:
            self._plain(400, b"more than one Range header")
        elif self.fault.status is not None:
            self._plain(self.fault.status, self.fault.body)
        elif self.server.where == "cdn":
            self._cdn()
        elif self.seen.path.startswith("/api/"):
            self._api()
        else:
            self._resolve()

    # ----- the Hub -----

    def _allowed(self, repo: str) -> bool:
        """Answers and returns False where the caller may not see the repository."""
        sent = self.seen.header("Authorization")
        token = sent[7:] if sent and sent.startswith("Bearer ") else None
        if token is not None and self.hub.tokens and token not in self.hub.tokens:
            message = "Invalid credentials in Authorization header"
            self._plain(401, message.encode(), {"X-Error-Message": message})
            return False
        if repo.lower() in self.hub.gated and token is None:
            text = f"Access to model {repo} is restricted. You must have access to it and be authenticated."
            self._plain(401, text.encode(), {"X-Error-Code": "GatedRepo", "X-Error-Message": text})
            return False
        return True

    def _find(self, repo: str, revision: str, name: str) -> HubFile | None:
        known = [f for (r, _rev, _name), f in self.hub.files.items() if r == repo.lower()]
        if not known:
            self._plain(404, b"Repository not found", {"X-Error-Code": "RepoNotFound"})
            return None
        if revision == "main":
            revision = known[-1].revision
        if revision not in {f.revision for f in known}:
            self._plain(404, b"Invalid rev id", {"X-Error-Code": "RevisionNotFound"})
            return None
        entry = self.hub.files.get((repo.lower(), revision, name))
        if entry is None:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": revision}
            self._plain(404, b"Entry not found", headers)
        return entry

    def _resolve(self) -> None:
        parts = urllib.parse.unquote(self.seen.path).strip("/").split("/")
        if len(parts) < 5 or parts[2] != "resolve":
            self._plain(404, b"Not found")
            return
        repo, revision, name = f"{parts[0]}/{parts[1]}", parts[3], "/".join(parts[4:])
        if not self._allowed(repo):
            return
        new = self.hub.renamed.get(repo.lower())
        if new is not None:
            place = f"/{new}/resolve/{revision}/{urllib.parse.quote(name)}?download=true"
            self._plain(307, b"", {"Location": place})
            return
        entry = self._find(repo, revision, name)
        if entry is None:
            return
        self.seen.file = entry.name
        about = {
            "X-Repo-Commit": entry.revision,
            "X-Request-Id": "Root=1-00000000-000000000000000000000000",
            "Accept-Ranges": "bytes",
            "Access-Control-Expose-Headers": "X-Repo-Commit,X-Request-Id,X-Error-Code,X-Error-Message,ETag",
        }
        if not entry.lfs:
            self._bytes(entry, {**about, "ETag": f'"{entry.git_oid}"'})
            return
        about.update({"X-Linked-Size": str(entry.size), "X-Linked-ETag": f'"{entry.sha256}"'})
        if self.hub.direct:
            self._bytes(entry, {**about, "ETag": f'"{entry.sha256}"'})
            return
        about["Location"] = self.fault.location or self.hub.sign(entry)
        self._plain(302, b"Found. Redirecting", {**about, "Vary": "Origin, Accept"})

    def _api(self) -> None:
        parts = urllib.parse.unquote(self.seen.path).strip("/").split("/")
        if parts[:2] == ["api", "whoami-v2"]:
            self._json(200, {"name": "tester", "type": "user", "orgs": [], "auth": {"type": "access_token"}})
            return
        if len(parts) < 4 or parts[1] != "models":
            self._plain(404, b"Not found")
            return
        repo = f"{parts[2]}/{parts[3]}"
        if not self._allowed(repo):
            return
        known = [f for (r, _rev, _name), f in self.hub.files.items() if r == repo.lower()]
        if not known:
            self._plain(404, b"Repository not found", {"X-Error-Code": "RepoNotFound"})
            return
        revision = parts[5] if len(parts) > 5 else "main"
        revision = known[-1].revision if revision == "main" else revision
        files = [f for f in known if f.revision == revision]
        kind = parts[4] if len(parts) > 4 else ""
        if kind == "refs":
            branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": known[-1].revision}
            self._json(200, {"branches": [branch], "tags": [], "converts": []})
        elif kind == "tree":
            self._json(200, [_tree_entry(f) for f in files])
        elif kind == "paths-info":
            wanted = set(_form(self.posted, "paths"))
            self._json(200, [_tree_entry(f) for f in files if f.name in wanted])
        elif not files:
            self._plain(404, b"Invalid rev id", {"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = [{"rfilename": f.name} for f in files]
            self._json(
                200,
                {"_id": "0" * 24, "id": files[0].repo, "modelId": files[0].repo, "sha": revision, "private": False,
                 "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": [], "siblings": siblings},
            )  # fmt: skip

    # ----- the CDN -----

    def _cdn(self) -> None:
        entry = self.hub.check(self.seen.path, self.seen.query)
        if entry is None:
            error = b"<Error><Code>AccessDenied</Code><Message>Access denied</Message></Error>"
            body = b'<?xml version="1.0" encoding="UTF-8"?>' + error
            self._plain(403, body, {"Content-Type": "application/xml"})
            return
        self.seen.file = entry.name
        about = {
            "Content-Disposition": f"inline; filename*=UTF-8''{urllib.parse.quote(entry.name.rsplit('/', 1)[-1])};",
            "Cache-Control": "public, max-age=31536000",
            "ETag": f'"{entry.xet}"',
            "Accept-Ranges": "bytes",
            "X-Cache": "Hit from cloudfront",
        }
        self._bytes(entry, about)

    def _bytes(self, entry: HubFile, about: dict[str, str]) -> None:
        fault = self.fault
        content = fault.content
        size = entry.size if content is None else len(content)
        start, end, status = 0, size, 200
        asked = self.seen.range
        if asked and asked.startswith("bytes=") and not fault.ignore_range:
            first, _dash, last = asked[6:].partition("-")
            start = int(first) if first else max(0, size - int(last))
            end = min(size, int(last) + 1) if first and last else size
            status = 206
            if start >= size or end <= start:
                self._plain(416, b"", {"Content-Range": f"bytes */{size}"})
                return
            about = {**about, "Content-Range": f"bytes {start}-{end - 1}/{size}"}
        self.seen.start = start
        self._head(status, {"Content-Type": "application/octet-stream", **about, "Content-Length": str(end - start)})
        if self.command != "HEAD":
            self._send(entry, start, end)

    def _send(self, entry: HubFile, start: int, end: int) -> None:
        fault = self.fault
        rate = fault.rate or self.hub.rate
        cut = end if fault.cut_after is None else start + fault.cut_after
        cut = cut if fault.cut_at is None else min(cut, fault.cut_at)
        stall = None if fault.stall_after is None else start + fault.stall_after
        stall = stall if fault.stall_at is None else max(start, fault.stall_at)
        stop = max(start, min(end, cut))
        position = start
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            stream = None
            if fault.content is None and isinstance(entry.content, Path):
                stream = stack.enter_context(entry.content.open("rb", buffering=0))
            while position < stop:
                step = (
                    min(BLOCK, stop - position)
                    if rate is None
                    else min(max(512, int(rate / 50)), stop - position, BLOCK)
                )
                if stall is not None and position + step > stall:
                    step = stall - position
                    if step <= 0:
                        self.hub.wait(fault.stall_seconds)
                        stall = None
                        continue
                plain = stream is not None and fault.flip_at is None
                if plain and stream is not None:
                    sent = os.sendfile(self.connection.fileno(), stream.fileno(), position, step)
                else:
                    sent = self._send_block(entry, position, step)
                position += sent
                self.seen.sent += sent
                if rate is not None:
                    ahead = (position - start) / rate - (time.monotonic() - began)
                    if ahead > 0:
                        self.hub.wait(ahead)
        if position < end:
            self.close_connection = True
            if fault.reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")

    def _send_block(self, entry: HubFile, position: int, step: int) -> int:
        source = self.fault.content
        block = entry.read(position, step) if source is None else source[position : position + step]
        flip = self.fault.flip_at
        if flip is not None and position <= flip < position + step:
            changed = bytearray(block)
            changed[flip - position] ^= 1
            block = bytes(changed)
        self.connection.sendall(block)
        return len(block)

    # ----- answers -----

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.seen.status = status
        merged: dict[str, str | None] = dict(headers)
        for name, value in self.fault.headers.items():
            for old in [k for k in merged if k.lower() == name.lower()]:
                del merged[old]
            merged[name] = value
        self.send_response(status)
        for name, value in merged.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if not any(k.lower() == "content-length" and v is not None for k, v in merged.items()):
            self.close_connection = True

    def _plain(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self._head(
            status, {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body)), **(headers or {})}
        )
        if self.command != "HEAD":
            self.connection.sendall(body)

    def _json(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self._head(status, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.connection.sendall(body)


def _tree_entry(entry: HubFile) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "file", "oid": entry.git_oid, "size": entry.size, "path": entry.name}
    if entry.lfs:
        value["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": 134}
    return value


def _form(body: bytes, key: str) -> list[str]:
    """The values of KEY in a posted body, JSON or form."""
    if body.startswith(b"{"):
        value = json.loads(body).get(key, [])
        return [value] if isinstance(value, str) else list(value)
    return urllib.parse.parse_qs(body.decode()).get(key, [])
