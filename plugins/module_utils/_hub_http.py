# SPDX-License-Identifier: Apache-2.0
"""HTTP for downloads: one connection at a time, redirects by our own rules, the token to one origin only.

urllib copies request headers to wherever a redirect leads; that is why this is written on http.client.
Private to the collection; may change at any time.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError

MAX_HOPS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_PRINTABLE = "".join(chr(code) for code in range(33, 127))
_QUERY = re.compile(r"\?[^\s\"'<>]*")


class TransportError(Exception):
    """The connection broke, was refused, timed out or ended early: worth another try."""


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: what a token belongs to."""
    try:
        split = urllib.parse.urlsplit(url)
        port = split.port
    except ValueError:  # a port that is no number, a bracket that is not closed
        shown = url.partition("?")[0].rpartition("@")[2]
        raise BlobError(f"{shown} has a host or a port that cannot be read.", "bad_address") from None
    scheme = split.scheme.lower()
    return scheme, (split.hostname or "").lower(), port or (443 if scheme == "https" else 80)


def without_query(url: str) -> str:
    """An address that may be shown: query strings of signed addresses are credentials, so is user:password@."""
    split = urllib.parse.urlsplit(url)
    host = split.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit((split.scheme, host, split.path, "", ""))


def token_may_travel(url: str) -> bool:
    """A token goes over https or to this machine only."""
    scheme, host, _port = origin(url)
    if scheme == "https" or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Response(http.client.HTTPResponse):
    """An answer whose forerunners (102, 103: hints for browsers) were passed over; http.client does so for 100 only."""

    def _read_status(self) -> tuple[str, int, str]:
        while True:
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if not 102 <= status < 200:
                return version, status, reason
            http.client.parse_headers(self.fp)


class Answer:
    """Status and headers of an answer whose body is still on its way."""

    def __init__(self, response: http.client.HTTPResponse, url: str, connection: http.client.HTTPConnection) -> None:
        self._response = response
        self._connection = connection
        self.status = response.status
        self.headers = response.headers
        self.url = url
        value = "" if response.chunked else self.headers.get("Content-Length", "").strip()
        self.length: Optional[int] = int(value) if value.isascii() and value.isdigit() else None
        self.left = self.length

    @property
    def host(self) -> str:
        return urllib.parse.urlsplit(self.url).hostname or "?"

    @property
    def is_html(self) -> bool:
        return (self.header("Content-Type") or "").split(";")[0].strip().lower() == "text/html"

    @property
    def location(self) -> Optional[str]:
        """Where a redirect leads, absolute; spaces and bytes beyond ASCII, which no request may hold, encoded."""
        place = self.header("Location")
        if self.status not in _REDIRECTS or place is None:
            return None
        try:
            place = urllib.parse.quote(place.encode("latin-1", "replace"), safe=_PRINTABLE)
            return urllib.parse.urljoin(self.url, place)
        except ValueError:
            raise BlobError(f"{self.host} redirects to an address that cannot be read.", "bad_address") from None

    def header(self, name: str) -> Optional[str]:
        """The header where it was sent exactly once."""
        values = self.headers.get_all(name) or []
        return values[0].strip() if len(values) == 1 else None

    def read_into(self, view: memoryview) -> int:
        """What has arrived, at most one system call's worth. 0 at the end of the body, wherever that comes."""
        if self.left is not None:
            view = view[: self.left]
        if not view:
            return 0
        if self._response.chunked:
            data = self._guard(lambda: self._response.read1(len(view)))
            view[: len(data)] = data
            return len(data)
        reader = self._response.fp
        got = int(self._guard(lambda: reader.readinto1(view)) or 0)
        if self.left is not None:
            self.left -= got
        return got

    def excerpt(self, limit: int = 300) -> str:
        """The first bytes of the body for a message, without query strings."""
        text = bytearray()
        buffer = memoryview(bytearray(1024))
        try:
            while len(text) < limit:
                got = self.read_into(buffer)
                if got == 0:
                    break
                text += buffer[:got]
        except TransportError:
            pass
        plain = _QUERY.sub("", bytes(text).decode("utf-8", "replace"))
        return shown(plain, limit)

    @staticmethod
    def _guard(call: Any) -> Any:
        try:
            return call()
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            # ValueError and AttributeError: the watcher closed the connection under us.
            raise TransportError(explain(error)) from error

    def finish(self) -> None:
        """Done with this answer: its connection stays usable only when the whole body was read."""
        if self.left != 0 or self._response.will_close:
            self._connection.close()
        self._response.close()

    def abort(self) -> None:
        """Ends the transfer from another thread."""
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Session:
    """One connection to one place at a time, kept open between requests to the same origin. Not thread-safe."""

    def __init__(self, agent: str, timeout: float, environ: Mapping[str, str]) -> None:
        self._agent = agent
        self._timeout = timeout
        self._environ = environ
        self._connection: Optional[http.client.HTTPConnection] = None
        self._origin: Optional[tuple[str, str, int]] = None
        self._proxied: Optional[dict[str, str]] = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._origin = None

    def request(self, method: str, url: str, headers: Mapping[str, str]) -> Answer:
        """One request, no redirects. A kept connection that turns out to be dead is replaced once."""
        split = urllib.parse.urlsplit(url)
        if split.scheme not in ("http", "https") or not split.hostname:
            raise BlobError(f"{without_query(url)} is not an http or https address.", "bad_address")
        place = origin(url)
        secret = headers.get("Authorization", "")
        if not (secret.isascii() and secret.isprintable()):  # http.client's own refusal would show it
            raise BlobError(
                "the token holds a line break or another character that no token has; set HF_TOKEN (in a play "
                "tensorless_hf_token) to the token alone.",
                "bad_option",
            )
        if place != self._origin:
            self.close()
        reused = self._connection is not None and self._connection.sock is not None
        try:
            return self._send(method, url, headers, place)
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise BlobError(
                f"the certificate of {split.hostname} could not be verified: {error.verify_message}. Install the "
                "authority's certificate on this host, or set SSL_CERT_FILE for the task.",
                "certificate",
            ) from error
        except ValueError:  # a host name that no name service can hold
            self.close()
            raise BlobError(f"{without_query(url)} cannot be asked for: check its host name.", "bad_address") from None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if reused:
                return self.request(method, url, headers)
            raise TransportError(f"{split.hostname}: {explain(error)}") from error

    def _send(self, method: str, url: str, headers: Mapping[str, str], place: tuple[str, str, int]) -> Answer:
        split = urllib.parse.urlsplit(url)
        if self._connection is None:
            self._connection = self._open(place)
            self._origin = place
        # An endpoint's own path may hold letters beyond ASCII, which no request may.
        path = urllib.parse.quote(split.path or "/", safe=_PRINTABLE)
        target = urllib.parse.urlunsplit(("", "", path, split.query, ""))
        sent = {"Accept-Encoding": "identity", "User-Agent": self._agent, **headers}
        if self._proxied is not None and place[0] == "http":
            netloc = split.netloc.rpartition("@")[2]
            target = urllib.parse.urlunsplit((split.scheme, netloc, path, split.query, ""))
            sent.update(self._proxied)
        self._connection.request(method, target, headers=sent)
        response = self._connection.getresponse()
        return Answer(response, url, self._connection)

    def _open(self, place: tuple[str, str, int]) -> http.client.HTTPConnection:
        scheme, host, port = place
        proxy = self._proxy(scheme, host)
        near, near_port, self._proxied = proxy if proxy is not None else (host, port, None)
        if scheme == "https":
            context = ssl.create_default_context()
            secure = http.client.HTTPSConnection(near, near_port, timeout=self._timeout, context=context)
            secure.response_class = _Response
            if self._proxied is not None:
                secure.set_tunnel(host, port, self._proxied)
            return secure
        plain = http.client.HTTPConnection(near, near_port, timeout=self._timeout)
        plain.response_class = _Response
        return plain

    def _proxy(self, scheme: str, host: str) -> Optional[tuple[str, int, dict[str, str]]]:
        """Host, port and headers of the proxy that the environment names for this host, as for curl and pip."""
        # HTTP_PROXY is left out on purpose, as by curl: a CGI client may set it.
        names = ["http_proxy"] if scheme == "http" else ["https_proxy", "HTTPS_PROXY"]
        names = [n for n in [*names, "all_proxy", "ALL_PROXY"] if self._environ.get(n)]
        if not names:
            return None
        value = self._environ[names[0]]
        skip = self._environ.get("no_proxy") or self._environ.get("NO_PROXY") or ""
        if urllib.request.proxy_bypass_environment(host, {"no": skip}):  # type: ignore[attr-defined]
            return None
        try:
            split = urllib.parse.urlsplit(value if "://" in value else f"http://{value}")
            port = split.port or 80
        except ValueError:
            raise BlobError(f"{names[0]} names a host or a port that cannot be read.", "bad_address") from None
        if split.scheme.lower() != "http" or not split.hostname:
            raise BlobError(
                f"{names[0]} is not the address of an http proxy (http://host:port). Other kinds cannot be used; set "
                f"no_proxy for {host} to go there directly.",
                "bad_address",
            )
        if split.username is None:
            return split.hostname, port, {}
        secret = f"{urllib.parse.unquote(split.username)}:{urllib.parse.unquote(split.password or '')}"
        encoded = base64.b64encode(secret.encode()).decode("ascii")
        return split.hostname, port, {"Proxy-Authorization": f"Basic {encoded}"}


def follow(
    session: Session,
    method: str,
    url: str,
    headers: Mapping[str, str],
    token: Optional[str],
    home: tuple[str, str, int],
    stay_home: bool,
) -> tuple[Answer, list[Answer]]:
    """Sends a request and follows redirects, each hop with headers made afresh.

    HOME is the Hub's origin: the token goes there and nowhere else. With STAY_HOME the first redirect that leaves it
    is returned instead of followed. Returns the last answer and the redirects before it.
    """
    seen = {url}
    hops: list[Answer] = []
    while True:
        sent = dict(headers)
        if token is not None and origin(url) == home:
            sent["Authorization"] = f"Bearer {token}"
        answer = session.request(method, url, sent)
        target = answer.location
        if target is None:
            return answer, hops
        if origin(url)[0] == "https" and origin(target)[0] != "https":
            raise BlobError(
                f"{answer.host} redirects from https to {without_query(target)}, which is not https; refused.",
                "insecure_redirect",
            )
        if stay_home and origin(target) != home:
            return answer, hops
        answer.finish()
        hops.append(answer)
        if target in seen:
            raise BlobError(f"{answer.host} redirects in a circle, back to {without_query(target)}.", "redirect_loop")
        if len(hops) > MAX_HOPS:
            raise BlobError(f"more than {MAX_HOPS} redirects, the last to {without_query(target)}.", "redirect_loop")
        seen.add(target)
        url = target


def shown(text: str, limit: int) -> str:
    """What a server said, fit for a terminal: one line, no control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:limit]


def explain(error: BaseException) -> str:
    """A transport failure in a few words."""
    if isinstance(error, (socket.timeout, TimeoutError)):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {shown(str(error), 100)}" if str(error) else type(error).__name__
