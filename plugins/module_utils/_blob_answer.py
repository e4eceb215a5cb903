# SPDX-License-Identifier: Apache-2.0
"""Whether an answer holds the bytes that were asked for, and what it means when it does not.

Private to the collection; may change at any time.
"""

from __future__ import annotations

import re

from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_parts import BLOCK, Part
from ansible_collections.tensorless.fleet.plugins.module_utils._hub import (
    Resolver,
    Source,
    Wanted,
    html_page,
    may_pass,
    refusal,
    what_is,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._hub_http import Answer, TransportError

# Tolerant of spelling: what counts are the three numbers.
_CONTENT_RANGE = re.compile(r"bytes[ =]\s*(\d+)\s*-\s*(\d+)\s*/\s*(\d+|\*)", re.ASCII | re.IGNORECASE)


class BadAnswer(TransportError):
    """An answer that is not the range that was asked for."""


class NoRanges(Exception):
    """The server does not serve ranges; `never` when not even one from the middle can be trusted."""

    def __init__(self, never: bool = False) -> None:
        super().__init__()
        self.never = never


class Judge:
    """Looks at every answer of one download before a byte of it is taken."""

    def __init__(self, resolver: Resolver, size: int) -> None:
        self._resolver = resolver
        self._wanted: Wanted = resolver.wanted
        self._size = size

    def end(self, answer: Answer, part: Part, source: Source, whole: bool, single: bool) -> int:
        """Where in the file the answer's body ends, which begins at the part's position. 0: it is the whole file
        although a range was asked for, to be taken from the start. Raises what any other answer means."""
        status = answer.status
        if status in (200, 206):
            coding = (answer.header("Content-Encoding") or "identity").lower()
            if coding != "identity" or len(answer.headers.get_all("Content-Encoding") or []) > 1:
                raise BadAnswer(f"{answer.host} sent the file with Content-Encoding {coding}")
            transfer = (answer.header("Transfer-Encoding") or "chunked").lower()
            if transfer not in ("chunked", "identity"):
                raise BadAnswer(f"{answer.host} sent the file with Transfer-Encoding {transfer}")
            if answer.is_html:
                raise html_page(answer, self._wanted)
        if status == 200:
            return self._whole_file(answer, whole, single)
        if status == 206:
            return self._range(answer, part, whole)
        if status == 416:
            self._other_size(answer, (answer.header("Content-Range") or "").rpartition("/")[2])
            raise BadAnswer(f"HTTP 416 from {answer.host} for a range inside the file")
        if may_pass(status):
            raise self._resolver.trouble(answer)
        home = self._resolver.is_home(answer.url)
        if status in (401, 403, 410) and not home:
            raise self._renewed(answer, part, source, single)
        raise refusal(answer, self._wanted, home, self._resolver.token, self._resolver.token_sent)

    def _whole_file(self, answer: Answer, whole: bool, single: bool) -> int:
        if answer.length is not None and answer.length != self._size:
            self.head(answer.excerpt(512).encode(), answer.host, only_known=True)
            raise BadAnswer(f"{answer.host} sends {answer.length} bytes instead of {self._size}")
        if whole:
            return self._size
        if not single:
            raise NoRanges()
        return 0

    def _range(self, answer: Answer, part: Part, whole: bool) -> int:
        """An answer may end earlier than asked (some servers limit a range's length), but begins where it should."""
        text = answer.header("Content-Range")
        if text is None and whole:
            raise BadAnswer(f"{answer.host} answered a plain request with a range")
        if text is None:
            raise NoRanges(never=True)
        found = _CONTENT_RANGE.fullmatch(text.strip())
        if found is not None:
            self._other_size(answer, found[3])
            first, end = int(found[1]), int(found[2]) + 1
            if first == part.position < end <= part.end:
                if answer.length is not None and answer.length != end - first:
                    raise BadAnswer(f"{answer.host} announces {answer.length} bytes for a range of {end - first}")
                return end
        asked = f"{part.position}-{part.end - 1}/{self._size}"
        raise BadAnswer(f"{answer.host} answered with Content-Range '{text}' instead of 'bytes {asked}'")

    def _other_size(self, answer: Answer, total: str) -> None:
        if total.isascii() and total.isdigit() and int(total) != self._size:
            raise BlobError(
                f"{answer.host} has {total} bytes for {self._wanted.file}, but {self._size} are wanted.",
                "size_differs",
                want=self._size,
                got=int(total),
            )

    def _renewed(self, answer: Answer, part: Part, source: Source, single: bool) -> TransportError:
        """The content server refuses: once more with a new address, but only once if the old had not ended."""
        excerpt = answer.excerpt()
        if "invalid range" in excerpt.lower() and not single:
            raise NoRanges()
        part.refused += 1
        if part.refused > (1 if self._resolver.fresh(source) else 3):
            where = f"HTTP {answer.status} from {answer.host} for {self._wanted.file}"
            raise BlobError(
                f'{where}, with a fresh address too. The server said: "{excerpt}". What has come is kept.',
                "cdn_forbidden",
                status=answer.status,
                host=answer.host,
            )
        self._resolver.source(worse_than=source.generation)
        part.slow = True  # ask again at once, and do not count it as a failure
        return TransportError(f"HTTP {answer.status} from {answer.host}: the address has ended")

    def head(self, first: bytes, host: str, only_known: bool = False) -> None:
        """A pointer, a page or an error message shows in the first bytes; small files are left to their hash."""
        looks = what_is(first)
        gguf = self._wanted.file.endswith(".gguf") and self._size >= BLOCK
        if not looks and not only_known and gguf and first[:4] != b"GGUF":
            looks = f"no GGUF file (it begins with {first[:4]!r})"
        if looks:
            raise BlobError(
                f"what {host} sends for {self._wanted.file} looks like {looks}. Stopped after its first bytes.",
                "not_the_file",
                host=host,
                discard=True,
            )
