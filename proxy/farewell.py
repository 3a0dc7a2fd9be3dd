"""Backends that are configured no more: each is waited for until nothing runs there, then dropped with all that it has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from proxy.clock import Clock
from proxy.health import HealthPoller
from proxy.pool import Pool

log = logging.getLogger("tierline")

LOOK_SECONDS = 0.25
"""Between two looks at whether a backend has nothing to do any more."""


class Farewell:
    """`look` is called whenever some may have begun to leave; `close` once, at the end."""

    def __init__(self, clock: Clock, pool: Pool, health: HealthPoller) -> None:
        self._clock, self._pool, self._health = clock, pool, health
        self.dropped: Callable[[str], None] = lambda name: None
        """Told of each."""
        self.waiting: dict[str, asyncio.Task[None]] = {}

    def look(self) -> None:
        """Whoever leaves, and is not waited for yet."""
        for name in self._pool.leaving:
            if name not in self.waiting:
                task = asyncio.get_running_loop().create_task(self._wait(name), name=f"leaving {name}")
                self.waiting[name] = task
                task.add_done_callback(partial(self._done, name))

    def _done(self, name: str, task: asyncio.Task[None]) -> None:
        del self.waiting[name]
        if not task.cancelled():
            self.look()  # it may have come and gone again meanwhile

    async def _wait(self, name: str) -> None:
        while (backend := self._pool.backends[name]).leaving:
            if not backend.in_flight:
                self._health.drop(name)
                await self._pool.drop(name)
                log.info("backend %s has left", name)
                self.dropped(name)
                return
            await self._clock.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        waiting = tuple(self.waiting.values())
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
