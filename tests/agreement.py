"""Does the gateway do what the simulation says? The same arrivals through both, and their times to the first token.

    python -m tests.agreement chat --rate 7.5 --requests 1000

Live: the gateway itself and two `tierline sim` servers, over sockets, in one process, all of them on one clock. With
`--scale` that is the world's, faster or slower; it wants a machine with little else to do. Without, time moves only when
everybody waits: whatever the machine does beside, and as fast as it can. Simulated: the same conversations in
`policies.simulation`. Prints both distributions and how far they are apart.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import heapq
import json
import selectors
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import TypeVar

import aiohttp
import uvloop

from policies import PolicyParams
from policies.engine import BLOCK_TOKENS
from policies.simulation import SHAPES, Client, Conversation, Machine, Served, Simulation, Traffic, Turn, live
from proxy.app import App
from proxy.clock import Timer
from proxy.config import loads
from proxy.sim.faults import Fault
from proxy.sim.server import Options, Simulator
from tests.fake_clock import FakeClock

T = TypeVar("T")

FLEET = {"fp8": "fp8-mtp3-tp2-v17", "bf16": "bf16-dflash8-tp2-v17"}
BYTES = 4
"""Per token, of the simulated tokenizer."""
CONFIG = """
[server]
port = 0
max_body_bytes = 8388608
[admin]
enabled = false
[telemetry]
records = "{records}"
decisions = {decisions}
[health]
timeout = 30.0
[[backends]]
name = "fp8"
url = "{fp8}"
profile = "fp8-mtp3-tp2-v17"
[[backends]]
name = "bf16"
url = "{bf16}"
profile = "bf16-dflash8-tp2-v17"
quality.reference = true
[models.m]
[tiers.exact]
slo.ttft_seconds = 2.0
[tiers.balanced]
max_kl_bits = 0.05
slo.ttft_seconds = 2.0
[tiers.fast]
slo.ttft_seconds = 2.0
{fast}
[timeouts]
keepalive_after = 0
first_token = 600.0
"""


class ScaledClock:
    """The world's clock, faster or slower; begins at 1000."""

    def __init__(self, scale: float) -> None:
        self._loop, self._scale, self._start = asyncio.get_running_loop(), scale, time.monotonic()

    def now(self) -> float:
        return 1000.0 + (time.monotonic() - self._start) * self._scale

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now()

    def _real(self, when: float) -> float:
        return self._start + (when - 1000.0) / self._scale

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        return self._loop.call_at(self._real(when), callback)

    def timeout_at(self, when: float | None) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout_at(None if when is None else self._real(when))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._scale)


class Counting(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Counts what it found."""

    found = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        self.found += len(events)
        return events


QUIET = 12
"""Turns of the loop in which nothing happened: what was written is read by then."""


class IdleClock(FakeClock):
    """Moves to the next timer whenever nothing is left to do: no callback, no byte on the way."""

    def __init__(self, selector: Counting) -> None:
        super().__init__()
        self._selector = selector

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        ready = loop._ready  # type: ignore[attr-defined]
        quiet = 0
        while True:
            before = self._selector.found
            await asyncio.sleep(0)
            quiet = 0 if self._selector.found != before or ready else quiet + 1
            if quiet >= QUIET:
                quiet = 0
                while self._timers and self._timers[0][2].callback is None:
                    heapq.heappop(self._timers)
                if self._timers:
                    self.advance(max(0.0, self._timers[0][0] - self.time))


def on_idle_clock(live: Callable[[IdleClock], Coroutine[object, object, T]]) -> T:
    """What comes of `live`, in a loop and on a clock of its own that moves only when everybody waits."""
    selector = Counting()

    async def run() -> T:
        clock = IdleClock(selector)
        mover = asyncio.ensure_future(clock.run())
        running = asyncio.ensure_future(live(clock))
        await asyncio.wait([mover, running], return_when=asyncio.FIRST_COMPLETED)
        if mover.done():  # a timer's callback failed
            running.cancel()
            mover.result()
        mover.cancel()
        return running.result()

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        return runner.run(run())


AnyClock = ScaledClock | IdleClock


@dataclass
class Live:
    """What clients saw: (when the turn arrived, seconds to its first token), in scaled time."""

    ttft: list[tuple[float, float]] = field(default_factory=list)
    refused: int = 0
    """Attempts."""
    cut: int = 0
    lag: list[float] = field(default_factory=list)


def block(number: int) -> bytes:
    """The bytes of a cache block, by its hash."""
    seed = hashlib.blake2b(str(number).encode(), digest_size=32).hexdigest().encode()
    size = BLOCK_TOKENS * BYTES
    return (seed * (size // len(seed) + 1))[:size]


def prompts_of(turns: Sequence[Turn], name: str) -> Iterator[str]:
    """Each turn's prompt: exactly its tokens, the last of which say how long the answer is.

    Each begins with the whole of the one before, and what conversations share is the chain's. That the whole blocks
    go on is not enough: the gateway's links are longer and end within a block that only the next turn fills.
    """
    longest = max(turns, key=lambda turn: turn.prompt)
    size = longest.prompt * BYTES
    text = bytearray().join([block(number) for number in longest.chain[: longest.prompt // BLOCK_TOKENS]])
    filler = (name.encode() + b" ") * (BLOCK_TOKENS * BYTES // len(name) + 1)
    text += filler[: size - len(text)]
    for turn in turns:
        steer = f"\n#sim tokens={max(1, turn.output - 1)} calls=0\n".encode()
        end = turn.prompt * BYTES
        text[end - len(steer) : end] = steer
        yield text[:end].decode()


async def ask(
    app: App, session: aiohttp.ClientSession, clock: AnyClock, data: str, headers: dict[str, str]
) -> tuple[float | None, float | None]:
    """(when the first token of a whole answer came, None if there was none; Retry-After of a refusal, None if it was
    none)."""
    first, last = None, b""
    url = f"http://127.0.0.1:{app.port}/v1/completions"
    async with session.post(url, data=data, headers=headers) as response:
        if response.status != 200:
            return None, float(response.headers.get("retry-after", 0))
        async for piece in response.content.iter_any():
            if first is None and b'"text"' in piece:
                first = clock.now()
            last = piece
    return (first if b"[DONE]" in last else None), None


async def converse(
    app: App,
    session: aiohttp.ClientSession,
    clock: AnyClock,
    one: Conversation,
    number: int,
    found: Live,
    until: float,
) -> None:
    """One conversation, as the simulation's clients have it, up to the turns that come before `until`: who is refused
    comes again, and gives up after so many times."""
    zero, ended, client = 1000.0, 0.0, Client()
    headers = {"content-type": "application/json", "x-quality-tier": one.tier.name}
    if one.identity is not None:
        headers["x-session-id"] = one.identity
    prompts = prompts_of(one.turns, f"c{number}")
    for place, turn in enumerate(one.turns):
        due = max(zero + turn.at, ended + turn.gap) if place else zero + one.start
        if due > until:  # counts no more, and nothing that counts comes after it
            return
        await clock.sleep(max(0.0, due - clock.now()))
        body = {
            "model": "m",
            "prompt": next(prompts),
            "max_tokens": max(turn.allowed, turn.output),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body)
        arrived = sent = clock.now()
        found.lag.append(sent - due)
        first, after = await ask(app, session, clock, data, headers)
        for _ in range(client.retries):
            if after is None:
                break
            found.refused += 1
            await clock.sleep(max(after, client.backoff))
            sent = clock.now()
            first, after = await ask(app, session, clock, data, headers)
        if first is None:
            found.refused += after is not None
            found.cut += after is None
            return
        found.ttft.append((arrived - zero, first - sent))
        ended = clock.now()


@asynccontextmanager
async def fleet(
    clock: AnyClock,
    records: Path | None = None,
    *,
    fast: str = "",
    scripts: Mapping[str, tuple[Fault, ...]] = MappingProxyType({}),
) -> AsyncIterator[App]:
    """The gateway and its simulated servers, all on `clock`: their engines need not know. records: keep them there.
    fast: more of that tier's configuration. scripts: what goes wrong when, by server."""
    options = Options(profile="", model="m", bytes_per_token=BYTES, block_tokens=BLOCK_TOKENS)
    servers = {
        name: Simulator(replace(options, profile=profile, script=scripts.get(name, ())), clock)
        for name, profile in FLEET.items()
    }
    for server in servers.values():
        await server.start()
    text = CONFIG.format(
        **{name: server.url for name, server in servers.items()},
        records=f"file:{records}" if records is not None else "off",
        decisions="true" if records is not None else "false",
        fast=fast,
    )
    app = App(loads(text, {}), clock, Random(3))
    await app.start()
    yield app
    await app.close()
    for server in servers.values():
        await server.close()


def client_session() -> aiohttp.ClientSession:
    """As many connections as are wanted, and no time-out of its own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


async def run_live(traffic: Traffic, clock: AnyClock, records: Path | None) -> Live:
    found = Live()
    async with fleet(clock, records) as app, client_session() as session:
        shift = clock.now() - 1000.0 + 3.0  # the first polls are over
        tasks = [
            asyncio.ensure_future(
                converse(
                    app,
                    session,
                    clock,
                    replace(one, start=one.start + shift),
                    number,
                    found,
                    1000.0 + shift + traffic.seconds,
                )
            )
            for number, one in enumerate(traffic.conversations)
        ]
        await asyncio.gather(*tasks)
    found.ttft = [(at - shift, ttft) for at, ttft in found.ttft]
    return found


def run_simulated(traffic: Traffic) -> list[Served]:
    machines = [Machine(name, profile) for name, profile in FLEET.items()]
    return Simulation(machines, traffic, live(PolicyParams()), Random(3)).run()


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def traffic_of(shape: str, rate: float, requests: int, warm_up: float, seed: int) -> Traffic:
    """The shape's conversations from its beginning, cut after about so many requests; those before `warm_up` do not
    count. The simulated servers do not cache answers, so no turn finds one here either."""
    drawn = replace(SHAPES[shape], warm_up=warm_up).traffic(rate, Random(seed), seconds=requests / rate)
    conversations = [
        replace(one, turns=tuple(replace(t, chain=t.chain[: t.prompt // BLOCK_TOKENS]) for t in one.turns))
        for one in drawn.conversations
    ]
    return replace(drawn, conversations=tuple(conversations))


def measure(traffic: Traffic, scale: float | None, records: Path | None) -> Live:
    if scale is not None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

            async def on_the_worlds() -> Live:
                return await run_live(traffic, ScaledClock(scale), records)

            return runner.run(on_the_worlds())
    return on_idle_clock(lambda clock: run_live(traffic, clock, records))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--rate", type=float, required=True, help="requests a second")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--scale", type=float, help="seconds of traffic in a second of the world")
    parser.add_argument("--warm-up", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--records", type=Path)
    options = parser.parse_args()
    traffic = traffic_of(options.shape, options.rate, options.requests, options.warm_up, options.seed)
    served = [s for s in run_simulated(traffic) if s.arrived < traffic.seconds]
    simulated = [s.ttft for s in served if s.ttft is not None and traffic.warm_up <= s.arrived]
    found = measure(traffic, options.scale, options.records)
    measured = [ttft for at, ttft in found.ttft if traffic.warm_up <= at < traffic.seconds]
    worst = 0.0
    print(
        f"{options.shape} at {options.rate:g}/s: {len(simulated)} simulated, {len(measured)} live; refused "
        f"{sum(s.shed for s in served)} and {found.refused}; {found.cut} cut; clients late by "
        f"{quantile(found.lag, 0.95) * 1e3:.1f} ms (p95)"
    )
    for q in (0.5, 0.95):
        one, other = quantile([t for t in simulated if t is not None], q), quantile(measured, q)
        worst = max(worst, abs(other / one - 1))
        print(
            f"  p{q * 100:.0f}: simulated {one * 1e3:.1f} ms, live {other * 1e3:.1f} ms: {other / one - 1:+.1%}"
        )
    sys.exit(worst > 0.15)


if __name__ == "__main__":
    main()
