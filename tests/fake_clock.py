"""A clock that moves when told: `advance(seconds)` fires every timer on the way, in order."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class FakeTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class FakeClock:
    """Starts at 1000.0 s so that a forgotten zero shows. Implements `proxy.clock.Clock`."""

    def __init__(self, start: float = 1000.0) -> None:
        self.time = start
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._order = itertools.count()
        self.sleepers: list[str] = []
        """Names of the tasks that sleep."""

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return 1_700_000_000.0 + self.time

    def call_at(self, when: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Move time; run what falls due. Callbacks may schedule more."""
        end = self.time + seconds
        while self._timers and self._timers[0][0] <= end:
            when, _, timer = heapq.heappop(self._timers)
            self.time = max(self.time, when)
            if timer.callback is not None:
                timer.callback()
        self.time = end

    @property
    def pending(self) -> int:
        """Timers that would still fire."""
        return sum(timer.callback is not None for _, _, timer in self._timers)

    @asynccontextmanager
    async def timeout_at(self, when: float | None) -> AsyncIterator[None]:
        if when is None:
            yield
            return
        task = asyncio.current_task()
        assert task is not None
        fired = False

        def fire() -> None:
            nonlocal fired
            fired = True
            task.cancel()

        timer = self.call_at(when, fire)
        try:
            yield
        except asyncio.CancelledError:
            if fired and task.uncancel() <= 0:
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()

    async def sleep(self, seconds: float) -> None:
        done = asyncio.get_running_loop().create_future()
        timer = self.call_at(self.time + seconds, lambda: self._wake(done, name))
        task = asyncio.current_task()
        assert task is not None
        name = task.get_name()
        self.sleepers.append(name)
        try:
            await done
        finally:
            timer.cancel()
            if name in self.sleepers and not done.done():
                self.sleepers.remove(name)

    def _wake(self, done: asyncio.Future[None], name: str) -> None:
        if not done.done():
            self.sleepers.remove(name)
            done.set_result(None)
