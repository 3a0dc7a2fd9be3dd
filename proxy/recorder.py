"""Records become lines in a file or on stdout, and rows of a database.

Rules: off the response path: they are batched, one thread of each kind at a time writes, a full buffer drops and counts.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from proxy.clock import Clock, Timer
from proxy.config import Config
from proxy.record import Measures, Record, line
from proxy.recordrow import Row, row

log = logging.getLogger(__name__)

Write = Callable[[bytes], None]
"""Takes whole lines; returns when all are written or raises OSError. Called by one thread at a time."""


T = TypeVar("T")


class Batches(Generic[T]):
    """Collects things and has a thread write them, at most `flush_seconds` after they were put there.

    At most `capacity` wait (and as many are being written); beyond that, and when writing fails, they are dropped and
    counted: a slow disk must not slow an answer. write: called by one thread at a time; returns when all are written or
    raises OSError. what: they are, in the log.
    """

    def __init__(
        self,
        clock: Clock,
        write: Callable[[Sequence[T]], None],
        what: str,
        flush_seconds: float,
        capacity: int,
    ) -> None:
        self._clock = clock
        self._write = write
        self._what = what
        self._flush_seconds = flush_seconds
        self._capacity = capacity
        self._waiting: list[T] = []
        self._timer: Timer | None = None
        self.writing: Future[None] | None = None
        """Done when the last batch that was taken is written, or dropped."""
        self._failing = False
        self._closed = False
        self.dropped = 0

    def __repr__(self) -> str:
        return f"Batches(waiting={len(self._waiting)}, dropped={self.dropped}, closed={self._closed})"

    def room(self) -> bool:
        """Whether one more is taken; if not, it is counted as dropped."""
        if self._closed or len(self._waiting) >= self._capacity:
            self.dropped += 1
            return False
        return True

    def put(self, one: T) -> None:
        """After `room`. Never blocks."""
        self._waiting.append(one)
        if self._timer is None:
            self._arm()

    def _arm(self) -> None:
        self._timer = self._clock.call_at(self._clock.now() + self._flush_seconds, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if self.writing is not None and not self.writing.done():
            self._arm()  # the disk is slow: the next batch waits, bounded by the capacity
        elif self._waiting:
            self._start()

    def _start(self) -> None:
        batch, self._waiting = self._waiting, []
        self.writing = Future()
        self.writing.set_running_or_notify_cancel()  # whoever waits may give up; the thread goes on
        # Not a pool: a pool's thread, stuck in a blocked pipe, would keep the process alive.
        threading.Thread(target=self._run, args=(batch, self.writing), name=self._what, daemon=True).start()

    def _run(self, batch: list[T], done: Future[None]) -> None:
        try:
            self._write(batch)
            if self._failing:
                log.warning("%s are written again; %d were dropped so far", self._what, self.dropped)
            self._failing = False
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self.dropped += len(batch)
            if not self._failing:
                log.error("%s cannot be written and are dropped: %s", self._what, error)
            self._failing = True
        finally:
            done.set_result(None)

    async def close(self, timeout_seconds: float = 5.0) -> None:
        """Write what is left; gives up after `timeout_seconds` if the disk hangs. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            async with self._clock.timeout_at(self._clock.now() + timeout_seconds):
                if self.writing is not None:
                    await asyncio.wrap_future(self.writing)
                if self._waiting:
                    self._start()
                    assert self.writing is not None
                    await asyncio.wrap_future(self.writing)
        except TimeoutError:
            self.dropped += len(self._waiting)
            log.error(
                "%s could not be written within %g s; %d dropped", self._what, timeout_seconds, self.dropped
            )


class Recorder:
    """Takes each closed record, once. write: where lines go, store: where rows do; None: nowhere."""

    def __init__(
        self,
        clock: Clock,
        write: Write | None,
        store: Callable[[Sequence[Row]], None] | None = None,
        *,
        flush_seconds: float = 0.5,
        capacity: int = 20_000,
    ) -> None:
        self.lines: Batches[bytes] | None = None
        self.rows: Batches[Row] | None = None
        if write is not None:
            self.lines = Batches(clock, _joined(write), "lines of records", flush_seconds, capacity)
        if store is not None:
            self.rows = Batches(clock, store, "records in the database", flush_seconds, capacity)

    def __repr__(self) -> str:
        return f"Recorder(lines={self.lines}, rows={self.rows})"

    @property
    def dropped(self) -> int:
        """Lines and rows that were not written."""
        return sum([batches.dropped for batches in (self.lines, self.rows) if batches is not None])

    @property
    def busy(self) -> bool:
        """A thread still writes rows."""
        writing = None if self.rows is None else self.rows.writing
        return writing is not None and not writing.done()

    def add(self, record: Record, derived: Measures) -> None:
        """Never blocks, never raises for what is in it."""
        lines, rows = self.lines, self.rows
        if lines is not None and lines.room():
            lines.put(line(record, derived))
        if rows is not None and rows.room():
            rows.put(row(record, derived))

    async def close(self, timeout_seconds: float = 5.0) -> None:
        """As `Batches.close`, of both at once."""
        both = [batches.close(timeout_seconds) for batches in (self.lines, self.rows) if batches is not None]
        await asyncio.gather(*both)


def _joined(write: Write) -> Callable[[Sequence[bytes]], None]:
    return lambda lines: write(b"".join(lines))


class FileWriter:
    """Appends whole lines to a file; follows it when a log rotator moves it away."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = self._open()

    def _open(self) -> int:
        # Records hold who asked for what and when: not for every user of the machine.
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        size = os.fstat(fd).st_size  # of what is no file: 0
        self._torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"  # whoever wrote before was killed
        return fd

    def __call__(self, lines: bytes) -> None:
        if self._moved():
            os.close(self._fd)
            self._fd = self._open()
        if self._torn:  # a line broke off (killed, the disk was full): end that one before the next begins
            lines = b"\n" + lines
        self._torn = True
        write_all(self._fd, lines)
        self._torn = False

    def _moved(self) -> bool:
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return True
        return not os.path.samestat(there, os.fstat(self._fd))

    def close(self) -> None:
        os.close(self._fd)


def locked(write: Write, lock: int) -> Write:
    """One process at a time. lock: a descriptor that all of them have; the lock is the process's own, and ends with it."""

    def alone(lines: bytes) -> None:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        try:
            write(lines)
        finally:
            fcntl.lockf(lock, fcntl.LOCK_UN)

    return alone


def write_stdout(lines: bytes) -> None:
    """Straight to the descriptor: a buffered stream could tear a line that something else prints."""
    write_all(1, lines)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def writer_for(config: Config) -> Write | None:
    """Where lines go, as configured."""
    path = config.telemetry.records_path
    if path is not None:
        return FileWriter(str(path))
    return write_stdout if config.telemetry.records == "stdout" else None
