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
import threading
import time
from collections.abc import Callable
from typing import Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError, giga
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_answer import BadAnswer, Judge, NoRanges
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_parts import (
    BLOCK,
    Limits,
    Outcome,
    Pace,
    Part,
    Status,
    free_part,
    half_of_slowest,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_state import Ranges, write_sidecar
from ansible_collections.tensorless.fleet.plugins.module_utils._hub import Busy, Resolver, Source
from ansible_collections.tensorless.fleet.plugins.module_utils._hub_http import Answer, Session, TransportError

FULL = (errno.ENOSPC, errno.EDQUOT)


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
        self._judge = Judge(resolver, source.size)
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
        self._reach = 0  # the most that was there when everything began anew
        self._in_vain = 0  # times that it began anew without having come further than before
        self._parts = 0
        self._restarts = 0
        self._host = source.host
        self._pace = Pace(limits)
        self._sync_failed = False
        self._unsynced = 0
        self._worth = min(32 << 20, max(256 << 10, self._size // 128))  # bytes that are worth a sync

    # ----- the calling thread -----

    def run(self) -> Outcome:
        """Fetches what is missing. On any error what has come is synced and named before it is raised."""
        self._save()
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
            if self._fatal is not None and not self._sync_failed:
                # Disk full or lock lost: the older sidecar stays, which claims less.
                with contextlib.suppress(OSError, BlobError):
                    self._save()
        os.fsync(self._fd)
        return Outcome(self._digest.hexdigest(), self._fetched, self._parts, self._restarts, self._host)

    def _supervise(self) -> None:
        synced, pause = time.monotonic(), 0.1
        while True:
            with self._lock:
                if self._fatal is None and self._hashed < self._size:
                    due = self._limits.tick
                    if self._unsynced >= self._worth:
                        due = synced + pause - time.monotonic() if self._unsynced < 4 * self._worth else 0.0
                    self._ended.wait(max(0.0, min(self._limits.tick, due)))
                if self._fatal is not None:
                    raise self._fatal
                finished = self._hashed >= self._size
                have, unsynced = self._done.total(), self._unsynced
                status = Status(have, self._size, self._hashed, self._fetched, len(self._active))
            self._watch(status)
            if finished:
                return
            if have < self._size:
                with self._lock:
                    stalled = self._pace.check(self._active.values(), self._fetched)
                if stalled:
                    raise self._stopped(stalled, "stalled")
            began = time.monotonic()
            # When all has come, and its tail is being hashed, there is no better moment to sync.
            over = self._limits.sync_every if unsynced < self._worth else pause
            if unsynced and (began - synced >= over or have == self._size or unsynced >= 4 * self._worth):
                self._save()
                synced = time.monotonic()
                # A slow disk is not kept busy with small syncs: a fifth of its time at most.
                pause = max(0.1, 4 * (synced - began))

    def _save(self) -> None:
        """Syncs the data, then names it: what is claimed has always reached the disk before."""
        with self._syncing:
            with self._lock:
                claimed = Ranges(self._done.spans())
                self._unsynced = 0
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                # The kernel reports a lost write once; a second sync would succeed and vouch for what is not there.
                self._sync_failed = True
                raise self._disk(error) from error
            self._fence()
            try:
                write_sidecar(self._sidecar, self._wanted.sha256, self._size, claimed)
            except OSError as error:
                raise self._disk(error) from error

    def _disk(self, error: OSError) -> BlobError:
        """The disk refuses to take what has come."""
        if error.errno in FULL:
            return self._stopped("no space left on the disk", "no_space")
        return BlobError(f"could not write the partial file: {error.strerror}", "write_failed")

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
                part = self._next(number)
                if part is not None:
                    self._active[number] = part
                    self._parts += 1
                    return part
                self._free.wait(0.5)

    def _next(self, number: int) -> Optional[Part]:
        active = self._active.values()
        if self._single:
            return None if active else free_part(self._done, active, self._size, None)
        if number >= self._width:
            return None
        piece = (self._limits.piece_min, self._limits.piece_max, self._width)
        return free_part(self._done, active, self._size, piece) or half_of_slowest(active)

    def _attempt(self, number: int, session: Session, part: Part, view: memoryview) -> None:
        """One request for what the part still lacks, and what to do when it does not work out."""
        try:
            self._fetch(session, part, view)
        except NoRanges as signal:
            session.close()
            self._go_single(signal.never)
            part.dropped = True
        except TransportError as error:
            session.close()
            if part.slow:
                part.slow = False
                part.reopened += 1
                return
            if isinstance(error, BadAnswer):
                part.bad += 1
                if not self._no_ranges and part.bad >= (min(4, self._limits.retries) if self._single else 2):
                    # First without parts; where the rest cannot be had either, without ranges, though it costs more.
                    self._go_single(self._single)
                    part.dropped = True
                    return
            part.failures += 1
            if part.failures > self._limits.retries:
                raise self._stopped(str(error), "interrupted") from error
            self._pause(error, part.failures)
        finally:
            part.answer = None

    def _pause(self, error: TransportError, failures: int) -> None:
        wait = self._limits.pause(failures) * random.uniform(0.5, 1.0)
        if isinstance(error, Busy):
            if error.wait is not None:
                if error.wait > self._limits.wait_max:
                    raise self._stopped(f"{error}; it asks to wait {error.wait:.0f} seconds", "busy")
                wait = max(wait, error.wait + random.uniform(0.0, 0.1 * error.wait))
            with self._lock:
                self._pace.alive(time.monotonic() + wait)
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
        plain = whole or self._no_ranges
        headers = {}
        if not plain:
            last = "" if self._single and part.end == self._size else str(part.end - 1)
            headers["Range"] = f"bytes={part.position}-{last}"
        answer = self._resolver.open(session, source, headers)
        part.answer = answer
        try:
            end = self._judge.end(answer, part, source, plain, self._single)
            if end == 0 or (plain and not whole):
                self._restart(part)  # not before there is something to take the place of what had come
                end = self._size
            self._receive(answer, part, view, end)
        finally:
            answer.finish()

    def _restart(self, part: Part) -> None:
        """Everything from the start: the sidecar forgets the bytes before the file does."""
        with self._syncing:
            with self._lock:
                if part.dropped:
                    return
                have = self._done.total()
                self._in_vain = 0 if have > self._reach else self._in_vain + 1
                self._reach = max(self._reach, have)
                if self._in_vain > self._limits.retries:
                    raise self._stopped("the server begins anew each time, and never comes to the end", "interrupted")
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

    def _receive(self, answer: Answer, part: Part, view: memoryview, end: int) -> None:
        filled = 0
        flushed = time.monotonic()
        while not part.dropped and self._fatal is None:
            left = min(end, part.end) - part.position - filled
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
                if part.position < min(end, part.end):
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
            self._judge.head(bytes(view[: min(filled, 512)]), self._host)
        try:
            written = 0
            while written < filled:
                written += os.pwrite(self._fd, view[written:filled], position + written)
        except OSError as error:
            raise self._disk(error) from error
        with self._lock:
            if part.dropped:
                return
            now = time.monotonic()
            part.position += filled
            part.marks.append((now, part.position))
            part.failures = part.bad = part.refused = 0
            self._done.add(position, position + filled)
            self._fetched += filled
            before, self._unsynced = self._unsynced, self._unsynced + filled
            self._pace.alive(now)
            self._grown.notify_all()
            if before // self._worth < self._unsynced // self._worth or self._done.total() >= self._size:
                self._ended.notify_all()
