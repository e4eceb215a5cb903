# SPDX-License-Identifier: Apache-2.0
"""Is a GGUF file whole by its own header? Looks at a file, or at an address by range requests of the header only.

Private to the collection; may change at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError, giga
from ansible_collections.tensorless.fleet.plugins.module_utils._gguf import (
    GgufError,
    Header,
    RangeStream,
    check,
    read_file,
    read_header,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._hub import what_is
from ansible_collections.tensorless.fleet.plugins.module_utils._hub_http import (
    Session,
    TransportError,
    follow,
    origin,
    token_may_travel,
    without_query,
)


class Finding(NamedTuple):
    """What the header says about the file."""

    target: str
    size: int
    header: Header
    faults: list[str]
    fetched: int

    def lines(self) -> list[str]:
        """The finding in words."""
        kinds = Counter(t.type_name for t in self.header.tensors)
        listed = ", ".join(f"{count} {name}" for name, count in kinds.most_common())
        verdict = "every tensor's region is there" if not self.faults else f"{len(self.faults)} tensors are not whole"
        lines = [
            f"{self.target}: GGUF version {self.header.version}, {giga(self.size)}, "
            f"{len(self.header.tensors)} tensors ({listed}){', a PN file' if self.header.pn else ''}",
            *self.faults[:10],
        ]
        if len(self.faults) > 10:
            lines.append(f"... and {len(self.faults) - 10} more")
        return [*lines, verdict]


def check_target(target: str, environ: Mapping[str, str], token: Optional[str] = None) -> Finding:
    """Reads the header of a file or an http(s) address. Raises a refusal that says what is there instead."""
    try:
        if target.startswith(("http://", "https://")):
            return _check_address(target, environ, token)
        header, size = read_file(target)
        return Finding(target, size, header, check(header, size), 0)
    except GgufError as error:
        raise BlobError(f"{without_query(target)}: {error}.", "not_gguf") from error
    except (OSError, TransportError) as error:
        said = getattr(error, "strerror", None) or error
        raise BlobError(f"could not read {without_query(target)}: {said}.", "unreadable") from error


def _check_address(url: str, environ: Mapping[str, str], token: Optional[str]) -> Finding:
    session = Session("tensorless-fleet/0.1", 30.0, environ)
    home = origin(url)
    sent = token if token and token_may_travel(url) else None
    total = 0

    def fetch(start: int, length: int) -> bytes:
        nonlocal total
        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        answer, _hops = follow(session, "GET", url, headers, sent, home, stay_home=False)
        try:
            if answer.status not in (200, 206):
                raise BlobError(f"HTTP {answer.status} from {answer.host} for {without_query(url)}.", "http_error")
            said = (answer.header("Content-Range") or "").rpartition("/")[2]
            known = int(said) if said.isascii() and said.isdigit() else answer.length
            if answer.status == 200 and start:
                raise BlobError(
                    f"{answer.host} does not serve ranges, so only the whole file could be read.", "no_ranges"
                )
            if known is None:
                raise BlobError(f"{answer.host} does not say how large the file is.", "size_unknown")
            total = known
            buffer = memoryview(bytearray(length))
            filled = 0
            while filled < length:
                got = answer.read_into(buffer[filled:])
                if not got:
                    break
                filled += got
            return bytes(buffer[:filled])
        finally:
            answer.finish()

    try:
        first = fetch(0, 64 << 10)
        looks = what_is(first)
        if looks:
            raise BlobError(f"{without_query(url)} is {looks}, no GGUF file.", "not_gguf")
        stream = RangeStream(fetch, total)
        stream.seed(first)
        header = read_header(stream, total)
        return Finding(without_query(url), total, header, check(header, total), stream.fetched)
    finally:
        session.close()
