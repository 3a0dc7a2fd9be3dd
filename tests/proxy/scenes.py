"""What stories of broken and slow requests need: a clock of ours, the moments to wait for, and what must hold at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from proxy.errors import Outcome
from tests.client import DEADLINE, Connection
from tests.fake_clock import FakeClock
from tests.proxy.conftest import Gateway, MakeGateway
from tests.scripted import ScriptedBackend

QUIET = "[health]\ninterval = 86400\n"
LEAST_LOAD = '[policy]\nname = "least_load"\n'
"""Choices that need no forecast, and nobody waits."""
"""Backends are polled once: a clock that jumps polls nobody."""


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Let the loop turn until it holds: for what follows from a socket's end and nobody announces."""
    try:
        async with asyncio.timeout(DEADLINE):
            while not condition():  # noqa: ASYNC110 (nothing announces it)
                await asyncio.sleep(0)
    except TimeoutError:
        raise AssertionError(f"waited {DEADLINE:g} s for {what}") from None


async def dispatching(gateway: Gateway) -> None:
    """Until a request has its backend, and connects to it if it must."""
    await eventually(
        lambda: any(e.record.attempts for e in gateway.app.gateway.exchanges), "a request's attempt"
    )


async def polled(gateway: Gateway) -> None:
    """Until the first poll of every backend is over: a clock that jumps into it would end it as too late."""
    clock = gateway.app.clock
    assert isinstance(clock, FakeClock)
    count = len(gateway.app.pool.backends)

    def asleep() -> bool:
        due = [when for when, _, timer in clock._timers if timer.callback is not None]
        return sum(when > clock.time + 3600 for when in due) == count

    await eventually(asleep, "the end of the first polls")


async def held_back(gateway: Gateway) -> None:
    """Until the only client has stopped reading, and everything between has filled."""
    (exchange,) = gateway.app.gateway.exchanges
    still = 0

    def full() -> bool:
        nonlocal still
        still = still + 1 if exchange.answer.paused else 0  # the kernel takes more for a while
        return still > 100

    await eventually(full, "back-pressure")


def _running() -> set[str]:
    """What runs beside the test, its backends' scripts and the pollers."""
    ours = ("RequestHandler", "Gateway.", "Exchange.", "Relay.", "ConnectionPool.", "Server.")
    names = {task.get_coro().__qualname__ for task in asyncio.all_tasks() if not task.done()}  # type: ignore[union-attr]
    return {name for name in names if name.startswith(ours)}


async def settled(gateway: Gateway, *, pooled: int | None = None) -> int:
    """After the clients' connections are closed: no count, no connection but pooled ones, no task, no timer.
    How many are pooled; `pooled` says how many there must be."""
    gateway.assert_idle()
    pools = [backend.connections for backend in gateway.app.pool.backends.values()]

    def open_connections() -> int:
        return sum(pool.open_connections for pool in pools)

    def idle_connections() -> int:
        return sum(len(pool._idle) for pool in pools)

    await eventually(
        lambda: (
            open_connections() == idle_connections() == (idle_connections() if pooled is None else pooled)
        ),
        f"{'only' if pooled is None else pooled} idle connections in {pools}",
    )
    await eventually(lambda: not _running(), "the end of every task")
    clock = gateway.app.clock
    if isinstance(clock, FakeClock):
        expected = len(pools) + sum(
            bool(pool._idle) for pool in pools
        )  # one poll each; one sweep where any is idle
        await eventually(lambda: clock.pending == expected, f"{expected} timers")
    return idle_connections()


TIMES = """[timeouts]
first_token = 60
first_token_per_1k_tokens = 10
gap = 20
total = 300
client_idle = 30
keepalive_after = 0
"""
COMMENTS = TIMES.replace("keepalive_after = 0", "keepalive_after = 15\nkeepalive_interval = 5")


class Scene:
    """One gateway on a clock of ours, one request on its way."""

    def __init__(self, gateway: Gateway, clock: FakeClock, client: Connection) -> None:
        self.gateway, self.clock, self.client = gateway, clock, client

    async def ended(self, *outcomes: Outcome) -> None:
        self.client.close()
        await self.gateway.ended(*outcomes)
        await settled(self.gateway)

    def over(self) -> bool:
        """Whether the gateway is done with the request."""
        return not self.gateway.app.gateway.exchanges


@asynccontextmanager
async def scene(
    make_gateway: MakeGateway, *backends: ScriptedBackend, config: str = TIMES, per: str = ""
) -> AsyncIterator[Scene]:
    clock = FakeClock()
    gateway = await make_gateway(*backends, config=QUIET + config, clock=clock, per_backend={"a": per})
    await polled(gateway)
    async with await gateway.connect() as client:
        yield Scene(gateway, clock, client)
