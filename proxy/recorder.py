"""Records become lines in a file or on stdout.

Rules: off the response path: lines are batched, one thread at a time writes, a full buffer drops and counts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

from proxy.clock import Clock, Timer
from proxy.record import Measures, Record, line

log = logging.getLogger(__name__)

Write = Callable[[bytes], None]
"""Takes whole lines; returns when all are written or raises OSError. Called by one thread at a time."""


class Recorder:
    """Batches lines and has a thread write them, at most `flush_seconds` after they were added.

    `write` None: records are off. At most `capacity` lines wait (and as many are being written); beyond that,
    and when writing fails, lines are dropped and counted: a slow disk must not slow an answer.
    """

    def __init__(
        self, clock: Clock, write: Write | None, *, flush_seconds: float = 0.5, capacity: int = 20_000
    ) -> None:
        self._clock = clock
        self._write = write
        self._flush_seconds = flush_seconds
        self._capacity = capacity
        self._lines: list[bytes] = []
        self._timer: Timer | None = None
        self._writing: Future[None] | None = None
        self._failing = False
        self._closed = False
        self.dropped = 0

    def __repr__(self) -> str:
        return f"Recorder(waiting={len(self._lines)}, dropped={self.dropped}, closed={self._closed})"

    def add(self, record: Record, derived: Measures) -> None:
        """Take a closed record. Never blocks, never raises for what is in it."""
        if self._write is None:
            return
        if self._closed or len(self._lines) >= self._capacity:
            self.dropped += 1
            return
        self._lines.append(line(record, derived))
        if self._timer is None:
            self._arm()

    def _arm(self) -> None:
        self._timer = self._clock.call_at(self._clock.now() + self._flush_seconds, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if self._writing is not None and not self._writing.done():
            self._arm()  # the disk is slow: the next batch waits, bounded by the capacity
        elif self._lines:
            self._start()

    def _start(self) -> None:
        lines, self._lines = self._lines, []
        self._writing = Future()
        self._writing.set_running_or_notify_cancel()  # whoever waits may give up; the thread goes on
        # Not a pool: a pool's thread, stuck in a blocked pipe, would keep the process alive.
        threading.Thread(target=self._run, args=(lines, self._writing), name="records", daemon=True).start()

    def _run(self, lines: list[bytes], done: Future[None]) -> None:
        assert self._write is not None
        try:
            self._write(b"".join(lines))
            if self._failing:
                log.warning("records are written again; %d were dropped so far", self.dropped)
            self._failing = False
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self.dropped += len(lines)
            if not self._failing:
                log.error("records cannot be written and are dropped: %s", error)
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
                if self._writing is not None:
                    await asyncio.wrap_future(self._writing)
                if self._lines:
                    self._start()
                    assert self._writing is not None
                    await asyncio.wrap_future(self._writing)
        except TimeoutError:
            self.dropped += len(self._lines)
            log.error("records could not be written within %g s; %d dropped", timeout_seconds, self.dropped)


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


def write_stdout(lines: bytes) -> None:
    """Straight to the descriptor: a buffered stream could tear a line that something else prints."""
    write_all(1, lines)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
