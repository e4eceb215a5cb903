# SPDX-License-Identifier: Apache-2.0
"""The download itself: parts over several connections into one partial file, hashed while it grows.

Workers fetch parts and write them where they belong; one thread hashes the bytes that reach from the start without a
gap; the calling thread syncs, names what is safe in the sidecar, and watches for silence.
Private to the collection; may change at any time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError, giga
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_parts import (
    BLOCK,
    BadAnswer,
    Limits,
    NoRanges,
    Outcome,
    Part,
    Status,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_state import Ranges, write_sidecar
from ansible_collections.tensorless.fleet.plugins.module_utils._hub import (
    TRY_AGAIN,
    Busy,
    Resolver,
    Source,
    refusal,
    what_is,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._hub_http import Answer, Session, TransportError


class Download:
    """One download of one file into DESCRIPTOR, built upon the ranges in DONE."""

    def __init__(
        self,
        descriptor: int,
        sidecar: str,
        done: Ranges,
        source: Source,
        resolver: Resolver,
        session: Callable[[], Session],
        limits: Limits,
        fence: Callable[[], None],
        watch: Callable[[Status], None],
    ) -> None:
        self._fd = descriptor
        self._sidecar = sidecar
        self._done = done
        self._size = source.size
        self._resolver = resolver
        self._wanted = resolver.wanted
        self._new_session = session
        self._limits = limits
        self._fence = fence
        self._watch = watch
        self._lock = threading.Lock()
        self._grown = threading.Condition(self._lock)  # more bytes to hash, or the end
        self._ended = threading.Condition(self._lock)  # all hashed, or an error
        self._free = threading.Condition(self._lock)  # a span may be there for the taking
        self._syncing = threading.Lock()
        self._active: dict[int, Part] = {}
        self._single = limits.connections == 1 or self._size < 2 * limits.piece_min
        self._no_ranges = False
        self._width = 1 if self._single else limits.connections
        self._generation = 0
        self._hashed = 0
        self._digest = hashlib.sha256()
        self._fatal: Optional[BaseException] = None
        self._closed = False
        self._fetched = 0
        self._parts = 0
        self._restarts = 0
        self._host = source.host
        self._alive = time.monotonic()  # when the last byte came, or will come at the server's own word
        self._unsynced = 0
        self._worth = min(32 << 20, max(256 << 10, self._size // 128))  # bytes that are worth a sync
        self._marks: list[tuple[float, int]] = []

    # ----- the calling thread -----

    def run(self) -> Outcome:
        """Fetches what is missing. On any error what has come is synced and named before it is raised."""
        os.fdatasync(self._fd)
        write_sidecar(self._sidecar, self._wanted.sha256, self._size, self._done)
        threads = [threading.Thread(target=self._hash, name="hash", daemon=True)]
        if self._done.total() < self._size:
            threads += [
                threading.Thread(target=self._work, args=(n,), name=f"part-{n}", daemon=True)
                for n in range(self._width)
            ]
        for thread in threads:
            thread.start()
        try:
            self._supervise()
        except BaseException as error:
            self._stop(error)
            raise
        finally:
            for thread in threads:
                thread.join(timeout=self._limits.part_silence)
            self._closed = True
            if self._fatal is not None:
                # Disk full or lock lost: the older sidecar stays, which claims less.
                with contextlib.suppress(OSError, BlobError):
                    self._save()
        os.fsync(self._fd)
        return Outcome(self._digest.hexdigest(), self._fetched, self._parts, self._restarts, self._host)

    def _supervise(self) -> None:
        synced = time.monotonic()
        pause = 0.1
        while True:
            with self._lock:
                if self._fatal is None and self._hashed < self._size and self._unsynced < self._worth:
                    self._ended.wait(self._limits.tick)
                if self._fatal is not None:
                    raise self._fatal
                finished = self._hashed >= self._size
                unsynced = self._unsynced
                status = Status(
                    self._done.total(), self._size, self._hashed, self._fetched, len(self._active)
                )  # fmt: skip
            self._watch(status)
            if finished:
                return
            now = time.monotonic()
            with self._lock:
                self._check_pace(now)
            if unsynced >= self._worth and now - synced < pause:
                time.sleep(pause - (now - synced))
            if unsynced >= self._worth or (unsynced and now - synced >= self._limits.sync_every):
                began = time.monotonic()
                self._save()
                synced = time.monotonic()
                # A slow disk is not kept busy with syncing: a fifth of its time at most.
                pause = max(0.1, 4 * (synced - began))

    def _save(self) -> None:
        """Syncs the data, then names it: what is claimed has always reached the disk before."""
        with self._syncing:
            with self._lock:
                claimed = Ranges(self._done.spans())
                self._unsynced = 0
            os.fdatasync(self._fd)
            self._fence()
            write_sidecar(self._sidecar, self._wanted.sha256, self._size, claimed)

    def _check_pace(self, now: float) -> None:
        """Silence and drips, of single parts and of the whole. Called with the lock held."""
        have = self._done.total()
        if have >= self._size:
            return
        limits = self._limits
        rates = [r for r in (p.rate(now, 10.0) for p in self._active.values()) if r is not None]
        usual = statistics.median(rates) if len(rates) >= 3 else 0.0
        for part in self._active.values():
            part.marks = [m for m in part.marks if m[0] > now - 2 * limits.window][-1000:]
            drip = part.rate(now, limits.window)
            recent = part.rate(now, 10.0)
            left = part.end - part.position
            late = recent is not None and recent < usual / 8 and left > 15 * recent and part.reopened < 3
            if (drip is not None and drip < limits.floor) or late:
                part.slow = True
                part.marks = [(now, part.position)]
                if part.answer is not None:
                    part.answer.abort()
        if now - self._alive > limits.silence:
            raise self._stopped(f"nothing received for {limits.silence:.0f} seconds", "stalled")
        if not self._marks or now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, self._fetched))
        while len(self._marks) > 1 and self._marks[1][0] <= now - limits.window:
            self._marks.pop(0)
        began, fetched = self._marks[0]
        if now - began >= limits.window and self._alive <= now:
            rate = (self._fetched - fetched) / (now - began)
            if rate < limits.floor:
                raise self._stopped(
                    f"only {rate / 1000:.1f} kB/s over {limits.window:.0f} seconds (less than "
                    f"{limits.floor / 1000:.0f} kB/s counts as stalled)",
                    "stalled",
                )

    def _stopped(self, why: str, reason: str) -> BlobError:
        have = self._done.total()
        return BlobError(
            f"the download of {self._wanted.file} stopped at {have} of {self._size} bytes ({giga(have)} of "
            f"{giga(self._size)}) from {self._host}: {why}. What has come is kept; run again to resume.",
            reason,
            have=have,
            size=self._size,
            host=self._host,
        )

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            if self._fatal is None:
                self._fatal = error
            for part in self._active.values():
                if part.answer is not None:
                    part.answer.abort()
            for condition in (self._grown, self._ended, self._free):
                condition.notify_all()

    # ----- hashing -----

    def _hash(self) -> None:
        view = memoryview(bytearray(BLOCK))
        try:
            while True:
                with self._lock:
                    while self._fatal is None and self._done.prefix() <= self._hashed < self._size:
                        self._grown.wait()
                    if self._fatal is not None or self._hashed >= self._size:
                        return
                    generation, position, reach = self._generation, self._hashed, self._done.prefix()
                    digest = self._digest
                while position < reach:
                    got = os.preadv(self._fd, [view[: reach - position]], position)
                    digest.update(view[:got])
                    position += got
                    with self._lock:
                        if generation != self._generation or self._fatal is not None:
                            break
                        if got == 0:
                            raise BlobError("the partial file became shorter while it was read", "changed_underway")
                        self._hashed = position
                        if position >= self._size:
                            self._ended.notify_all()
        except BaseException as error:
            self._stop(error)

    # ----- workers -----

    def _work(self, number: int) -> None:
        session = self._new_session()
        view = memoryview(bytearray(BLOCK))
        try:
            while True:
                part = self._take(number)
                if part is None:
                    return
                try:
                    while part.position < part.end and not part.dropped and self._fatal is None:
                        self._attempt(number, session, part, view)
                finally:
                    with self._lock:
                        self._active.pop(number, None)
                        self._free.notify_all()
        except BaseException as error:
            self._stop(error)
        finally:
            session.close()

    def _take(self, number: int) -> Optional[Part]:
        """The next span to fetch: the lowest free one, else half of what a slow worker still has before it."""
        with self._lock:
            while True:
                if self._fatal is not None or self._done.total() >= self._size:
                    self._free.notify_all()
                    return None
                part = None
                if not (self._active if self._single else number >= self._width):
                    part = self._free_span() or self._half_of_slowest()
                if part is not None:
                    self._active[number] = part
                    self._parts += 1
                    return part
                self._free.wait(0.5)

    def _free_span(self) -> Optional[Part]:
        taken = Ranges(self._done.spans())
        for part in self._active.values():
            taken.add(part.position, part.end)
        gaps = taken.gaps(self._size)
        if not gaps:
            return None
        start, end = gaps[0]
        if not self._single:
            left = sum(b - a for a, b in gaps)
            fair = left // (4 * self._width)
            piece = min(self._limits.piece_max, max(self._limits.piece_min, fair)) & ~0xFFFF
            end = min(end, start + max(piece, 1 << 16))
        return Part(start, end, time.monotonic())

    def _half_of_slowest(self) -> Optional[Part]:
        now = time.monotonic()
        slowest = max(self._active.values(), key=lambda p: p.end - p.position, default=None)
        if self._single or slowest is None or now - slowest.opened < 2.0:
            return None
        left = slowest.end - slowest.position
        if left < 2 * (1 << 20):
            return None
        middle = slowest.position + left // 2
        part = Part(middle, slowest.end, now)
        slowest.end = middle
        return part

    def _attempt(self, number: int, session: Session, part: Part, view: memoryview) -> None:
        """One request for what the part still lacks, and what to do when it does not work out."""
        before = part.position
        try:
            self._fetch(session, part, view)
        except NoRanges as signal:
            session.close()
            self._go_single(signal.never)
            part.dropped = True
        except TransportError as error:
            session.close()
            if part.position > before:
                part.failures = part.bad = part.refused = 0
            if part.slow:
                part.slow = False
                part.reopened += 1
                return
            if isinstance(error, BadAnswer):
                part.bad += 1
                if part.bad >= 2 and not self._single:
                    self._go_single(False)
                    part.dropped = True
                    return
            part.failures += 1
            if part.failures > self._limits.retries:
                raise self._stopped(str(error), "interrupted") from error
            self._pause(error, part.failures)
        finally:
            part.answer = None

    def _pause(self, error: TransportError, failures: int) -> None:
        wait = min(self._limits.backoff_max, self._limits.backoff * 2 ** (failures - 1))
        wait *= random.uniform(0.5, 1.0)
        if isinstance(error, Busy):
            if error.wait is not None:
                if error.wait > self._limits.wait_max:
                    raise self._stopped(f"{error}; it asks to wait {error.wait:.0f} seconds", "busy")
                wait = error.wait + random.uniform(0.0, 0.1 * error.wait)
            with self._lock:
                self._alive = max(self._alive, time.monotonic() + wait)
                self._width = max(1, self._width - 1)
        ends = time.monotonic() + wait
        with self._lock:
            while self._fatal is None and time.monotonic() < ends:
                self._free.wait(max(0.0, ends - time.monotonic()))

    def _go_single(self, never: bool) -> None:
        """Ranges cannot be relied on: one stream from now on."""
        with self._lock:
            self._single = True
            self._no_ranges = self._no_ranges or never
            for part in self._active.values():
                part.dropped = True
                if part.answer is not None:
                    part.answer.abort()
            self._free.notify_all()

    def _fetch(self, session: Session, part: Part, view: memoryview) -> None:
        source = self._resolver.source()
        if source.size != self._size:
            raise BlobError("the Hub now reports another size for this file", "size_differs", got=source.size)
        self._host = source.host
        whole = part.position == 0 and part.end == self._size
        if self._no_ranges and not whole:
            self._restart(part)
            whole = True
        headers = {}
        if not whole:
            last = "" if self._single and part.end == self._size else str(part.end - 1)
            headers["Range"] = f"bytes={part.position}-{last}"
        answer = self._resolver.open(session, source, headers)
        part.answer = answer
        try:
            self._judge(answer, part, source, whole)
            self._receive(answer, part, view)
        finally:
            answer.finish()

    def _judge(self, answer: Answer, part: Part, source: Source, whole: bool) -> None:
        """Accepts exactly the bytes that were asked for, or raises what the answer means."""
        status = answer.status
        if status in (200, 206):
            coding = (answer.header("Content-Encoding") or "identity").lower()
            if coding != "identity" or len(answer.headers.get_all("Content-Encoding") or []) > 1:
                raise BadAnswer(f"{answer.host} sent the file with Content-Encoding {coding}")
        if status == 200:
            if answer.length is not None and answer.length != self._size:
                self._check_head(answer.excerpt(512).encode(), only_known=True)
                raise BadAnswer(f"{answer.host} sends {answer.length} bytes instead of {self._size}")
            if not whole:
                if not self._single:
                    raise NoRanges()
                self._restart(part)
        elif status == 206:
            self._check_range(answer, part, whole)
        elif status == 416:
            total = (answer.header("Content-Range") or "").rpartition("/")[2]
            if total.isascii() and total.isdigit() and int(total) != self._size:
                raise BlobError(
                    f"{answer.host} has {total} bytes for {self._wanted.file}, but {self._size} are wanted.",
                    "size_differs",
                    want=self._size,
                    got=int(total),
                )
            raise BadAnswer(f"HTTP 416 from {answer.host} for a range inside the file")
        elif status in TRY_AGAIN:
            raise self._resolver.trouble(answer)
        elif status in (401, 403, 410) and not self._resolver.is_home(answer.url):
            self._renew(answer, part, source)
        else:
            home = self._resolver.is_home(answer.url)
            raise refusal(answer, self._wanted, home, self._resolver.token, self._resolver.token_sent)

    def _check_range(self, answer: Answer, part: Part, whole: bool) -> None:
        got = answer.header("Content-Range")
        if got is None and whole:
            raise BadAnswer(f"{answer.host} answered a plain request with a range")
        if got is None:
            raise NoRanges(never=True)
        if got.split() != ["bytes", f"{part.position}-{part.end - 1}/{self._size}"]:
            total = got.rpartition("/")[2]
            if total.isascii() and total.isdigit() and int(total) != self._size:
                raise BlobError(
                    f"{answer.host} has {total} bytes for {self._wanted.file}, but {self._size} are wanted.",
                    "size_differs",
                    want=self._size,
                    got=int(total),
                )
            asked = f"{part.position}-{part.end - 1}/{self._size}"
            raise BadAnswer(f"{answer.host} answered with Content-Range '{got}' instead of 'bytes {asked}'")
        if answer.length is not None and answer.length != part.end - part.position:
            raise BadAnswer(
                f"{answer.host} announces {answer.length} bytes for a range of {part.end - part.position}"
            )  # fmt: skip

    def _renew(self, answer: Answer, part: Part, source: Source) -> None:
        """The content server refuses: once more with a new address, but only once if the old had not ended."""
        excerpt = answer.excerpt()
        if "invalid range" in excerpt.lower() and not self._single:
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
        raise TransportError(f"HTTP {answer.status} from {answer.host}: the address has ended")

    def _restart(self, part: Part) -> None:
        """Everything from the start: the sidecar forgets the bytes before the file does."""
        with self._syncing:
            with self._lock:
                self._generation += 1
                self._done = Ranges()
                self._hashed = 0
                self._digest = hashlib.sha256()
                self._unsynced = 0
                self._restarts += 1
                part.start = part.position = 0
                part.end = self._size
                part.marks = [(time.monotonic(), 0)]
            write_sidecar(self._sidecar, self._wanted.sha256, self._size, Ranges())
            os.ftruncate(self._fd, 0)

    def _receive(self, answer: Answer, part: Part, view: memoryview) -> None:
        filled = 0
        flushed = time.monotonic()
        while not part.dropped and self._fatal is None:
            left = part.end - part.position - filled
            if left <= 0:
                break
            try:
                got = answer.read_into(view[filled : min(len(view), filled + left)])
            except TransportError:
                self._flush(part, view, filled)
                raise
            filled += got
            left -= got
            now = time.monotonic()
            if got == 0:
                self._flush(part, view, filled)
                if part.position < part.end:
                    raise TransportError(
                        f"the connection ended early: got {part.position - part.start} of {part.end - part.start} bytes"
                    )
                return
            some = filled >= len(view) // 16 and now - flushed >= 0.05
            if some or filled == len(view) or left == 0 or now - flushed >= 0.1:
                if part.position == 0 and filled < min(512, self._size):
                    continue
                self._flush(part, view, filled)
                filled = 0
                flushed = now
        self._flush(part, view, filled)

    def _flush(self, part: Part, view: memoryview, filled: int) -> None:
        with self._lock:
            filled = min(filled, part.end - part.position)
            position = part.position
        if filled <= 0 or part.dropped or self._closed:
            return
        if position == 0:
            self._check_head(bytes(view[: min(filled, 512)]))
        try:
            written = 0
            while written < filled:
                written += os.pwrite(self._fd, view[written:filled], position + written)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._stopped("no space left on the disk", "no_space") from error
            raise BlobError(f"could not write the partial file: {error.strerror}", "write_failed") from error
        with self._lock:
            now = time.monotonic()
            part.position += filled
            part.marks.append((now, part.position))
            part.failures = part.bad = part.refused = 0
            self._done.add(position, position + filled)
            self._fetched += filled
            self._unsynced += filled
            self._alive = max(self._alive, now)
            self._grown.notify_all()
            if self._unsynced >= self._worth:
                self._ended.notify_all()

    def _check_head(self, head: bytes, only_known: bool = False) -> None:
        """A pointer, a page or an error message shows in the first bytes; small files are left to their hash."""
        looks = what_is(head)
        if (
            not looks
            and not only_known
            and self._wanted.file.endswith(".gguf")
            and self._size >= BLOCK
            and head[:4] != b"GGUF"
        ):
            looks = f"no GGUF file (it begins with {head[:4]!r})"
        if looks:
            raise BlobError(
                f"what {self._host} sends for {self._wanted.file} looks like {looks}. Stopped after its first bytes.",
                "not_the_file",
                host=self._host,
                discard=True,
            )
