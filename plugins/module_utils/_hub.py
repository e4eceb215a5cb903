# SPDX-License-Identifier: Apache-2.0
"""What the Hub says about a file: address, sha256, size, commit; refusals, quotas and signed addresses that expire.

Private to the collection; may change at any time.
"""

from __future__ import annotations

import calendar
import datetime
import email.utils
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import NamedTuple, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError
from ansible_collections.tensorless.fleet.plugins.module_utils._hub_http import (
    Answer,
    Session,
    TransportError,
    follow,
    origin,
    shown,
    token_may_travel,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_paths import resolve_url

_FINAL = (501, 505, 511)
RENEW_AHEAD = 60.0
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_ID = re.compile(r"[0-9a-f]{40}")
_SECONDS = re.compile(r"\d{1,9}(\.\d*)?", re.ASCII)
_PLAIN_LIMIT = 50 * 10**9


def may_pass(status: int) -> bool:
    """True for an answer that another try may cure. Among 5xx are those that CDNs made up (520 to 530)."""
    return status in (408, 425, 429) or (500 <= status < 600 and status not in _FINAL)


class Busy(TransportError):
    """The server asks for patience: 429, or 503 with Retry-After."""

    def __init__(self, message: str, wait: Optional[float]) -> None:
        super().__init__(message)
        self.wait = wait


class Wanted(NamedTuple):
    """The file that is asked for. The size may be unknown, the hash never."""

    repo: str
    revision: str
    file: str
    sha256: str
    size: Optional[int]


class Source(NamedTuple):
    """Where the bytes are to be had now."""

    url: str
    size: int
    expires: Optional[float]
    renew_at: Optional[float]
    generation: int

    @property
    def host(self) -> str:
        return urllib.parse.urlsplit(self.url).hostname or "?"


def parse_etag(value: Optional[str]) -> Optional[str]:
    """The sha256 in an ETag: 64 hex digits after one W/ prefix and one pair of quotes; None for anything else."""
    text = _bare_etag(value)
    return text if text is not None and _SHA256.fullmatch(text) else None


def is_git_id(value: Optional[str]) -> bool:
    """True for the ETag of a small file: a git id, which says nothing about the sha256."""
    text = _bare_etag(value)
    return text is not None and _GIT_ID.fullmatch(text) is not None


def _bare_etag(value: Optional[str]) -> Optional[str]:
    if value is None:
        return None
    if value.startswith("W/"):
        value = value[2:]
    if len(value) >= 2 and value[0] == value[-1] == '"':
        value = value[1:-1]
    return value


def expiry(url: str) -> Optional[float]:
    """When a signed address ends (seconds since 1970), from Expires or X-Amz-Date with X-Amz-Expires."""
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(url).query))
    plain = query.get("Expires", "")
    if plain.isascii() and plain.isdigit():
        return float(plain)
    try:
        began = time.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ")
        return float(calendar.timegm(began) + int(query["X-Amz-Expires"]))
    except (KeyError, ValueError):
        return None


def retry_after(headers: Mapping[str, str], now: float) -> Optional[float]:
    """Seconds that the server asks to wait: Retry-After (seconds or a date), else the window in RateLimit."""
    value = (headers.get("Retry-After") or "").strip()
    if _SECONDS.fullmatch(value):
        return float(value)
    if value:
        try:
            date = email.utils.parsedate_to_datetime(value)
            # Without a zone it is GMT, as every date in HTTP.
            date = date if date.tzinfo else date.replace(tzinfo=datetime.timezone.utc)
            return max(0.0, date.timestamp() - now)
        except (TypeError, ValueError, OverflowError):
            return None
    window = re.search(r"\bt=(\d+)", headers.get("RateLimit") or "")
    return float(window.group(1)) if window else None


def refusal(answer: Answer, wanted: Wanted, from_hub: bool, token: Optional[str], token_sent: bool) -> BlobError:
    """The error for a final status, told apart by the Hub's own headers where it sends them."""
    code = answer.header("X-Error-Code") or ""
    text = shown(answer.header("X-Error-Message") or "", 300)
    status = answer.status
    excerpt = answer.excerpt()
    if token:
        text, excerpt = text.replace(token, "***"), excerpt.replace(token, "***")
    answer.finish()
    place = f"HTTP {status} from {answer.host} for {wanted.repo}/{wanted.file} at {wanted.revision}"
    reason, advice = _cause(status, code, text, token, token_sent) if from_hub else _cdn_cause(status, excerpt)
    said = text or excerpt
    message = f"{place}: {advice}" + (f' The server said: "{said}".' if said else "")
    return BlobError(message, reason, status=status, host=answer.host)


def html_page(answer: Answer, wanted: Wanted) -> BlobError:
    """The error for a page where the file should be."""
    host = answer.host
    answer.finish()
    return BlobError(
        f"{host} answered with an HTML page instead of {wanted.file}: an intermediary answered (a proxy, a login or a "
        "block page), or the endpoint is wrong. Open the endpoint from this host to see the page.",
        "html",
        host=host,
    )


def _cause(status: int, code: str, text: str, token: Optional[str], token_sent: bool) -> tuple[str, str]:
    held_back = (
        " A token was given but not sent: it goes over https or to this machine only."
        if token and not token_sent
        else ""
    )
    known = {
        "RepoNotFound": ("repo_not_found", "there is no such repository, or it is private." + held_back),
        "RevisionNotFound": ("revision_not_found", "the repository has no such revision; check the recipe's commit."),
        "EntryNotFound": ("entry_not_found", "the revision has no such file; check the recipe's file name."),
        "GatedRepo": (
            "gated",
            "the repository is gated. Accept its terms on the Hub and give a token (HF_TOKEN)." + held_back,
        ),
    }
    if code in known:
        return known[code]
    if status == 403 and "disabled" in text.lower():
        return "disabled", "the repository is disabled."
    if status == 401 and "invalid credentials" in text.lower():
        return "bad_token", "the token was refused. Give a valid one, or none for a public repository."
    if status in (401, 403):
        return "unauthorized", "the repository is missing, private or gated, or the token is absent." + held_back
    if status == 404:
        return "not_found", "the address does not exist; check endpoint, repository, revision and file."
    return "http_error", "the server refused the request."


def _cdn_cause(status: int, excerpt: str) -> tuple[str, str]:
    if status == 400:
        return (
            "cdn_bad_request",
            "the content server refused the request; files above about 400 GB are known to end so, and the Hub's own "
            f"library does not use plain HTTP above {_PLAIN_LIMIT // 10**9} GB.",
        )
    if status in (401, 403):
        return "cdn_forbidden", "the content server refuses a fresh address too."
    return "cdn_error", "the content server refused the request."


class Resolver:
    """Asks the Hub for the address of the bytes, once for all parts, and again when that address has ended."""

    def __init__(
        self,
        wanted: Wanted,
        endpoint: Optional[str],
        token: Optional[str],
        session: Callable[[], Session],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.wanted = wanted
        self.url = resolve_url(endpoint or "", wanted.repo, wanted.revision, wanted.file)
        self.home = origin(self.url)
        self.token = token or None
        self.token_sent = bool(token) and token_may_travel(self.url)
        self.notes: list[str] = []
        if self.token and not self.token_sent:
            self.notes.append(
                f"the token was not sent to {self.home[1]}: the endpoint is neither https nor this machine"
            )
        self._new_session = session
        self._clock = clock
        self._lock = threading.Lock()
        self._source: Optional[Source] = None
        self._failed: Optional[tuple[float, Exception]] = None
        self.requests = 0

    def source(self, worse_than: int = -1) -> Source:
        """The present address; a new one when the present has (nearly) ended or is generation WORSE_THAN."""
        asked = time.monotonic()
        with self._lock:
            now = self._source
            ended = now is not None and now.renew_at is not None and now.renew_at < self._clock()
            if now is not None and now.generation > worse_than and not ended:
                return now
            if self._failed is not None and self._failed[0] > asked:
                raise self._failed[1]  # one question for all parts that waited here, not one each
            try:
                now = self._ask(0 if now is None else now.generation + 1)
            except (TransportError, BlobError) as error:
                self._failed = (time.monotonic(), error)
                raise
            self._source = now
            return now

    def fresh(self, source: Source) -> bool:
        """True while SOURCE has not ended by its own words: a refusal then has another cause."""
        return source.expires is None or source.expires > self._clock()

    def open(self, session: Session, source: Source, headers: Mapping[str, str]) -> Answer:
        """A GET of the bytes. The token travels only where the Hub itself serves them."""
        token = self.token if self.token_sent else None
        answer, _hops = follow(session, "GET", source.url, headers, token, self.home, stay_home=False)
        return answer

    def is_home(self, url: str) -> bool:
        return origin(url) == self.home

    def _ask(self, generation: int) -> Source:
        session = self._new_session()
        try:
            answer, hops = self._follow(session, "HEAD", {})
            if answer.status in (400, 405, 501):
                answer.finish()
                answer, hops = self._follow(session, "GET", {"Range": "bytes=0-0"})
            self._refuse(answer)
            for hop in (*hops, answer):
                self._check(hop)
            size = self._size(answer, hops)
            if size is None:
                answer.finish()
                answer, hops = self._follow(session, "GET", {"Range": "bytes=0-0"})
                self._refuse(answer)
                size = self._size(answer, hops) or self.wanted.size
            if size is None:
                raise BlobError(
                    f"{self.home[1]} does not say how large {self.wanted.file} is (no X-Linked-Size, Content-Length or "
                    "Content-Range in its answers). Give size_bytes, or use another endpoint.",
                    "size_unknown",
                )
            if self.wanted.size is not None and size != self.wanted.size:
                raise self._wrong_size(session, answer, size)
            if answer.status >= 300 and answer.location is None:
                raise BlobError(f"{answer.host} answered HTTP {answer.status} without saying where to.", "bad_address")
            url = answer.location or answer.url
            self._warn_renamed(hops)
            answer.finish()
            ends, present = expiry(url), self._clock()
            if ends is not None and ends <= present:
                ends = None  # over before it began: the two clocks differ, so the time says nothing
            # A minute ahead; half its life ahead for an address that lives for less than two.
            renew = None if ends is None else ends - min(RENEW_AHEAD, max(0.0, ends - present) / 2)
            return Source(url, size, ends, renew, generation)
        finally:
            session.close()

    def _follow(self, session: Session, method: str, headers: Mapping[str, str]) -> tuple[Answer, list[Answer]]:
        self.requests += 1
        token = self.token if self.token_sent else None
        return follow(session, method, self.url, headers, token, self.home, stay_home=True)

    def _refuse(self, answer: Answer) -> None:
        if may_pass(answer.status):
            raise self.trouble(answer)
        if answer.status >= 400 or answer.status < 200:
            raise refusal(answer, self.wanted, True, self.token, self.token_sent)
        if answer.status < 300 and answer.is_html:
            raise html_page(answer, self.wanted)

    def trouble(self, answer: Answer) -> TransportError:
        """The error of an answer that may pass with time."""
        text = f"HTTP {answer.status} from {answer.host}"
        wait = retry_after(dict(answer.headers.items()), self._clock())
        answer.finish()
        if answer.status == 429 or wait is not None:
            return Busy(text, wait)
        return TransportError(text)

    def _check(self, answer: Answer) -> None:
        """Metadata counts only on answers of the Hub itself; where it is given it must agree."""
        linked = answer.header("X-Linked-Etag")
        said = parse_etag(linked)
        if said is not None and said != self.wanted.sha256:
            raise BlobError(
                f"the Hub's sha256 of {self.wanted.file} at {self.wanted.revision} is {said}, but {self.wanted.sha256} "
                "is wanted. Nothing was downloaded. The recipe's revision or sha256 is wrong, or the endpoint is.",
                "sha256_differs",
                want=self.wanted.sha256,
                got=said,
            )
        if linked is not None and said is None and not is_git_id(linked):
            self.notes.append("the Hub's X-Linked-Etag is not a sha256; the given sha256 decides")
        commit = answer.header("X-Repo-Commit")
        if commit is not None and commit.lower() != self.wanted.revision:
            raise BlobError(
                f"the Hub answered for commit {commit}, but {self.wanted.revision} is wanted. Nothing was downloaded.",
                "commit_differs",
                want=self.wanted.revision,
                got=commit,
            )

    @staticmethod
    def _size(answer: Answer, hops: list[Answer]) -> Optional[int]:
        for one in (answer, *hops):
            linked = one.header("X-Linked-Size") or ""
            if linked.isascii() and linked.isdigit():
                return int(linked)
        if answer.status == 206:
            total = (answer.header("Content-Range") or "").rpartition("/")[2].strip()
            return int(total) if total.isascii() and total.isdigit() else None
        encoded = (answer.header("Content-Encoding") or "identity").lower() != "identity"
        # Nothing is as long as 0 bytes: some proxies say so of every HEAD. An encoded body has a length of its own.
        return answer.length or None if answer.status == 200 and not encoded else None

    def _wrong_size(self, session: Session, answer: Answer, size: int) -> BlobError:
        """Says what arrived instead of the file, from its first bytes."""
        looks = ""
        if answer.status == 200:
            answer.finish()
            try:
                token = self.token if self.token_sent else None
                headers = {"Range": "bytes=0-511"}
                body, _hops = follow(session, "GET", answer.url, headers, token, self.home, stay_home=False)
                buffer = memoryview(bytearray(512))
                looks = what_is(bytes(buffer[: body.read_into(buffer)])) if body.status in (200, 206) else ""
                body.finish()
            except TransportError:
                pass
        return BlobError(
            f"{self.home[1]} offers {size} bytes for {self.wanted.file}, but {self.wanted.size} are wanted"
            + (f"; it looks like {looks}" if looks else "")
            + ". Nothing was downloaded.",
            "size_differs",
            want=self.wanted.size,
            got=size,
        )

    def _warn_renamed(self, hops: list[Answer]) -> None:
        for hop in hops:
            path = urllib.parse.urlsplit(hop.location or "").path
            if "/resolve/" in path and f"/{self.wanted.repo}/resolve/" not in path:
                new = path.partition("/resolve/")[0].lstrip("/")
                note = f"the Hub redirects {self.wanted.repo} to {new}: the repository was renamed"
                if note not in self.notes:
                    self.notes.append(note)


def what_is(head: bytes) -> str:
    """A name for the first bytes of something that is no model file; empty when it may be one."""
    text = head[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        return "a Git LFS pointer file"
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<script", b"<!--")):
        return "an HTML page: an intermediary answered"
    if text.startswith(b"<?xml"):
        return "an XML error message"
    return ""
