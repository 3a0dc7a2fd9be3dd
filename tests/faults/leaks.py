"""Nothing may be left: what a gateway holds while it serves, counted before and after.

    leaks = await Leaks.of(gateway, backends)  # before the first request
    ...                                   # requests, with whatever end
    await leaks.none_left()               # everything is back at its start value, or AssertionError says what is not

Counted: requests in hand, what limits hold for them, in-flight and context tokens (the pool's and the fleet's), who waits
in line, the gate's futures, admission's books, connections to backends and from clients, tasks, timers, descriptors. Idle
connections that wait for reuse are no leak; the check has the backends close them first, so that a descriptor more is one
too many.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from collections.abc import Sequence
from typing import Self

from proxy.ledger import LocalLedger
from tests.fake_clock import FakeClock
from tests.proxy.conftest import Gateway
from tests.proxy.scenes import eventually
from tests.scripted import ScriptedBackend

OURS = ("RequestHandler", "Gateway.", "Exchange.", "Relay.", "ConnectionPool.", "Server.", "Gate.", "Pool.")
Counts = dict[str, float]


def descriptors() -> Counter[str]:
    """Open files and sockets of this process, by kind."""
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            kinds[os.readlink(f"/proc/self/fd/{name}").split(":")[0]] += 1
        except OSError:
            continue  # the listing's own
    return kinds


def tasks() -> Counter[str]:
    """What runs of the gateway's, by name."""
    names = [getattr(t.get_coro(), "__qualname__", "") for t in asyncio.all_tasks() if not t.done()]
    return Counter(name for name in names if name.startswith(OURS))


def counts(gateway: Gateway) -> Counts:
    """Everything that rises while a request runs and has to fall again, by name."""
    app = gateway.app
    fleet, admission = app.pool.fleet, app.gate._admission
    found: Counts = {
        "requests in hand": len(app.gateway.exchanges),
        "requests in the fleet": len(fleet._where),
        "waiting in line": sum(app.gate.waiting().values()),
        "futures of the gate": len(app.gate.waiters),
        "waiting in admission's books": len(admission._waiting),
        "client connections in use": sum(
            getattr(c, "_current_request", None) is not None for c in app._server.connections
        )
        if app._server is not None
        else 0,
    }
    ledger = app.gateway.limiter._ledger
    assert isinstance(ledger, LocalLedger)
    found["let in by limits"] = sum(account.running for account in ledger._accounts.values())
    found["tokens held by limits"] = sum(account.held_tokens for account in ledger._accounts.values())
    for name, backend in app.pool.backends.items():
        pool = backend.connections
        found[f"{name}: in flight"] = backend.in_flight
        found[f"{name}: context tokens"] = backend.in_flight_tokens
        found[f"{name}: connections in use"] = pool.open_connections - len(pool._idle)
    for name, state in fleet.states.items():
        found[f"{name}: running in the fleet"] = len(state.running)
        found[f"{name}: before its first token in the fleet"] = len(state.pending)
        found[f"{name}: prompts of those running"] = state.prompts
        found[f"{name}: answers expected of those running"] = round(state.outputs, 6)
        found[f"{name}: cache held for those running"] = round(state.held_tokens, 6)
    return found


class Leaks:
    """The start values of one gateway; made while it is idle."""

    @classmethod
    async def of(cls, gateway: Gateway, backends: Sequence[ScriptedBackend] = ()) -> Self:
        """Now, once what polls left open is closed: it is no part of any request."""
        await _close_idle(backends)
        await eventually(lambda: "RequestHandler.start" not in tasks(), "clients to close their connections")
        pools = [backend.connections for backend in gateway.app.pool.backends.values()]
        await eventually(lambda: not any(pool.open_connections for pool in pools), "the pools to notice")
        return cls(gateway, backends)

    def __init__(self, gateway: Gateway, backends: Sequence[ScriptedBackend] = ()) -> None:
        self._gateway, self._backends = gateway, backends
        self._counts = counts(gateway)
        self._tasks, self._descriptors = tasks(), descriptors()
        self._pooled = self._open()

    def _open(self) -> int:
        return sum(b.connections.open_connections for b in self._gateway.app.pool.backends.values())

    def _timers(self) -> int:
        clock = self._gateway.app.clock
        return clock.pending if isinstance(clock, FakeClock) else 0

    async def none_left(self) -> None:
        """Once the clients have closed their connections. Ends idle connections to the backends."""
        await eventually(lambda: counts(self._gateway) == self._counts, f"the counts to fall: {self.left()}")
        await eventually(lambda: not tasks() - self._tasks, f"the tasks to end: {tasks() - self._tasks}")
        await _close_idle(self._backends)
        for backend in self._gateway.app.pool.backends.values():  # to a backend that is not one of these
            for connection in tuple(backend.connections._idle):
                connection.abort()
        await eventually(lambda: self._open() == self._pooled, "connections to backends to be closed")
        if self.more():
            gc.collect()
        await eventually(lambda: not self.more(), f"descriptors: {self.more()}")

    def left(self) -> Counts:
        """What differs from the start, by name."""
        now = counts(self._gateway)
        return {
            name: value - self._counts.get(name, 0)
            for name, value in now.items()
            if value != self._counts.get(name)
        }

    def more(self) -> Counter[str]:
        """Descriptors beyond those at the start, by kind."""
        return descriptors() - self._descriptors


async def _close_idle(backends: Sequence[ScriptedBackend]) -> None:
    def closed() -> bool:
        for backend in backends:
            backend.close_idle()
        return all(backend.open_connections == 0 for backend in backends)

    await eventually(closed, "idle connections to be closed")
