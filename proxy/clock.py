"""The only module that touches loop time, timers, timeouts and sleep.

Everything above takes a `Clock`; tests hand in a `FakeClock` (tests/fake_clock.py) that moves when told.
All times are seconds on one monotonic axis; `wall()` is for records only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol


class Timer(Protocol):
    """A scheduled call; `cancel()` is idempotent."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    now: Callable[[], float]
    """Monotonic seconds."""
    wall: Callable[[], float]
    """Seconds since the epoch."""

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Run `callback` once at monotonic time `when`."""
        ...

    def timeout_at(self, when: float | None) -> AbstractAsyncContextManager[object]:
        """Raise TimeoutError inside the block at `when`; None never fires."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class LoopClock:
    """The running event loop's own axis. Read from the system: uvloop's `time()` moves in whole milliseconds and only
    between iterations, too coarse for chunk gaps; both are the monotonic clock."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.now = time.monotonic
        self.wall = time.time

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        return self._loop.call_at(when, callback)

    def timeout_at(self, when: float | None) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout_at(when)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
