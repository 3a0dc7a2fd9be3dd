"""Are limits exact when everybody comes at once? 200 clients of five keys, live, against an account of fractions.

    python -m tests.limits                    # two minutes of time that moves only when everybody waits
    python -m tests.limits --clients 500 --seconds 300
    python -m tests.limits --workers 2        # processes, in real time: see `limits_live`; also --gateways 2

Clients ask again as soon as they may, streamed or not; one in ten leaves in the middle. Every decision of the gateway, in
the order in which they were made, is made again by plain sums of fractions: who was let in had to fit, who was refused had
not to. The backend counts, too, how many of a key's requests it has at once. Exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from random import Random

import aiohttp
from aiohttp import web

from policies.limits import Amount, Refusal, Standing
from proxy.app import App
from proxy.clock import Clock
from proxy.config import loads
from proxy.ledger import Entry, LocalLedger, Names
from tests.agreement import IdleClock, client_session, on_idle_clock

STEP = 1 / 64
"""Seconds, whole microseconds: nothing is lost by rounding."""
LIMITS: dict[str, dict[str, int]] = {
    "key:requests": {"requests_per_minute": 30},
    "key:at-once": {"concurrent_requests": 7},
    "key:tokens": {"tokens_per_minute": 6000},
    "key:all": {"requests_per_minute": 90, "tokens_per_minute": 20_000, "concurrent_requests": 12},
    "key:free": {},
    "tenant:crowd": {"concurrent_requests": 48, "requests_per_minute": 900},
    "model:m": {"concurrent_requests": 60},
}
KEYS = [name.partition(":")[2] for name in LIMITS if name.startswith("key:")]


def table(limits: dict[str, int]) -> str:
    return "{ " + ", ".join(f"{name} = {value}" for name, value in limits.items()) + " }"


def config(url: str) -> str:
    text = f"""
[admin]
enabled = false
[telemetry]
records = "off"
[health]
interval = 86400
[[backends]]
name = "a"
url = "{url}"
limits.max_in_flight = 1000
[models.m]
limits = {table(LIMITS["model:m"])}
[tenants.crowd]
limits = {table(LIMITS["tenant:crowd"])}
[policy]
name = "least_load"
[server]
port = 0
"""
    for key in KEYS:
        limits = table(LIMITS[f"key:{key}"])
        text += f'[[server.keys]]\nname = "{key}"\nkey = "env:K_{key}"\ntenant = "crowd"\n'
        text += f"reserve_tokens = 200\nlimits = {limits}\n"
    return text


@dataclass
class Plain:
    """One account, in fractions of a whole."""

    limits: dict[str, int]
    running: int = 0
    used: dict[str, Fraction] = field(
        default_factory=lambda: {"requests": Fraction(0), "tokens": Fraction(0)}
    )
    at: Fraction = Fraction(0)

    def refill(self, at: Fraction) -> None:
        for unit in self.used:
            back = Fraction(self.limits.get(f"{unit}_per_minute", 0)) * (at - self.at) / 60
            self.used[unit] = max(Fraction(0), self.used[unit] - back)
        self.at = at

    def refuses(self, tokens: int) -> Iterator[str]:
        if self.running >= self.limits.get("concurrent_requests", 10**9):
            yield "concurrent_requests"
        for unit, amount in (("requests", 1), ("tokens", tokens)):
            name = f"{unit}_per_minute"
            if self.used[unit] + amount > self.limits.get(name, 10**12):
                yield name


class Watched(LocalLedger):
    """The gateway's own, and beside it the plain accounts, asked the same in the same order."""

    def __init__(self, clock: IdleClock) -> None:
        super().__init__(clock)
        self._time = clock
        self.plain = {name: Plain(limits) for name, limits in LIMITS.items()}
        self.wrong: list[str] = []
        self.let_in: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.beyond = 0
        self.charged: Counter[str] = Counter()

    def _accounts_of(self, names: Names) -> list[Plain]:
        at = Fraction(round(self._time.now() * 1e6), 10**6)
        found = [self.plain[name] for name in names]
        for account in found:
            account.refill(at)
        return found

    async def enter(self, names: Names, ask: Amount) -> Entry:
        accounts = self._accounts_of(names)
        against = {(name, why) for name in names for why in self.plain[name].refuses(ask.tokens)}
        refusal, requests, tokens = await super().enter(names, ask)
        if refusal is None:
            self.let_in[names[0]] += 1
            if against:
                self.wrong.append(f"let in, and did not fit: {names[0]}, {against}")
            for account in accounts:
                account.running += 1
                account.used["requests"] += 1
                account.used["tokens"] += ask.tokens
        else:
            self._judge_refusal(names, refusal, against)
        self._judge_standing(accounts, requests, tokens)
        return refusal, requests, tokens

    def _judge_refusal(self, names: Names, refusal: Refusal, against: set[tuple[str, str]]) -> None:
        told = (names[refusal.account], refusal.kind.value)
        self.refused[f"{names[0]} by {told[0]} {told[1]}"] += 1
        if told not in against:
            self.wrong.append(f"refused, and it fitted: {told}, not {against}")

    def _judge_standing(
        self, accounts: list[Plain], requests: Standing | None, tokens: Standing | None
    ) -> None:
        for unit, standing in (("requests", requests), ("tokens", tokens)):
            name = f"{unit}_per_minute"
            left = [max(0, one.limits[name] - one.used[unit]) // 1 for one in accounts if name in one.limits]
            if (min(left) if left else None) != (None if standing is None else standing[1]):
                self.wrong.append(f"{standing} are left of {unit}, and in truth {left}")

    def settle(self, names: Names, ask: Amount, used: Amount) -> None:
        for account in self._accounts_of(names):
            account.running -= 1
            account.used["tokens"] = max(Fraction(0), account.used["tokens"] + used.tokens - ask.tokens)
        self.beyond += used.tokens > ask.tokens
        self.charged[names[0]] += used.tokens
        super().settle(names, ask, used)


@dataclass
class Backend:
    """Takes its time, and counts whose requests it has at once."""

    clock: Clock
    now: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        key = request.headers["x-request-id"].partition(".")[0]
        tokens, seconds = body["seed"] % 500, (16 + body["seed"] % 200) * STEP
        usage = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": tokens + 10}
        self.now[key] += 1
        self.most[key] = max(self.most[key], self.now[key])
        try:
            if not body.get("stream"):
                await self.clock.sleep(seconds)
                choice = {
                    "index": 0,
                    "message": {"role": "assistant", "content": "x"},
                    "finish_reason": "stop",
                }
                return web.json_response({"id": "x", "choices": [choice], "usage": usage})
            return await self._stream(request, seconds, usage)
        finally:
            self.now[key] -= 1

    async def _stream(
        self, request: web.Request, seconds: float, usage: dict[str, int]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for finish in (None, None, "stop"):
            await self.clock.sleep(seconds / 3 // STEP * STEP)
            choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": finish}
            await response.write(b"data: %b\n\n" % json.dumps({"id": "x", "choices": [choice]}).encode())
        last = json.dumps({"id": "x", "choices": [], "usage": usage}).encode()
        await response.write(b"data: %b\n\ndata: [DONE]\n\n" % last)
        return response


async def client(
    number: int,
    clock: Clock,
    session: aiohttp.ClientSession,
    url: str,
    until: float,
    seen: Counter[str],
    leaves: float = 0.1,
) -> None:
    """Asks as soon as it may, until time is over. leaves: how often."""
    rng, key, count = Random(number), KEYS[number % len(KEYS)], 0
    while clock.now() < until:
        count += 1
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * rng.randrange(400)}]}
        body |= {"seed": rng.randrange(10**6), "stream": rng.random() < 0.5}
        if rng.random() < 0.5:
            body["max_tokens"] = rng.randrange(1, 400)
        headers = {"authorization": f"Bearer sk-{key}", "x-request-id": f"{key}.{number}.{count}"}
        wait = STEP
        asking = asyncio.ensure_future(ask(session, url, body, headers))
        if rng.random() < leaves:  # in the middle
            await clock.sleep(rng.randrange(1, 64) * STEP)
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                seen["left"] += 1
                continue
        status, retry, limit = await asking
        seen[f"{key} {status}"] += 1
        if status == 429:
            wait = float(retry)
            if wait < 1 or not limit:
                seen["not told"] += 1
        elif status != 200:
            seen["failed"] += 1
        await clock.sleep(wait)


async def ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], headers: dict[str, str]
) -> tuple[int, str, str]:
    async with session.post(url, json=body, headers=headers) as response:
        await response.read()
        told = response.headers
        return response.status, told.get("retry-after", "0"), told.get("x-tierline-limit", "")


@dataclass
class Found:
    seen: Counter[str]
    ledger: Watched
    most: Counter[str]
    left_over: dict[str, tuple[int, int]]
    seconds: float


async def load(clock: IdleClock, *, clients: int, seconds: float) -> Found:
    backend = Backend(clock)
    site = web.Application()
    site.router.add_post("/v1/chat/completions", backend.answer)
    site.router.add_get("/v1/models", models)
    runner = web.AppRunner(site, access_log=None, handler_cancellation=True)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await listener.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    app = App(loads(config(url), {f"K_{key}": f"sk-{key}" for key in KEYS}), clock, Random(1))
    ledger = app.gateway.limiter._ledger = Watched(clock)
    app.keys.configure(app.config)  # the accounts, in this ledger
    await app.start()
    seen: Counter[str] = Counter()
    clock.time = float(int(clock.time) + 8)  # a whole second, so that every step is whole microseconds
    until = clock.now() + seconds
    async with client_session() as session:
        where = f"http://127.0.0.1:{app.port}/v1/chat/completions"
        await asyncio.gather(
            *(client(n, clock, session, where, until, seen) for n in range(clients)),
        )
        while app.gateway.exchanges:
            await clock.sleep(STEP)
    left = {name: (one.running, one.held_tokens) for name, one in ledger._accounts.items()}
    await app.close()
    await runner.cleanup()
    return Found(seen, ledger, backend.most, left, seconds)


async def models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m", "max_model_len": 100_000}]})


def problems(found: Found) -> list[str]:
    """What should not be."""
    ledger, out = found.ledger, list(found.ledger.wrong)
    minutes = found.seconds / 60
    for name, limits in LIMITS.items():
        kind, _, key = name.partition(":")
        most = limits.get("requests_per_minute")
        if kind != "key":
            continue
        if most is not None and ledger.let_in[name] > most + int(most * minutes):
            out.append(f"{name}: {ledger.let_in[name]} let in, {most} a minute")
        at_once = limits.get("concurrent_requests")
        if at_once is not None and found.most[key] != at_once:
            out.append(f"{name}: {found.most[key]} at once, and {at_once} may")
    out += [f"{name}: {held} is left over" for name, held in found.left_over.items() if any(held)]
    out += [f"{word}: {count}" for word, count in found.seen.items() if word in ("failed", "not told")]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, help="120, of processes 20")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="of real processes")
    parser.add_argument("--gateways", type=int, default=0, metavar="N", help="that share limits")
    options = parser.parse_args()
    if options.workers or options.gateways:
        from tests.limits_live import run

        workers, gateways = options.workers or 1, options.gateways or 1
        seconds = options.seconds or 20.0
        said, wrong = asyncio.run(
            run(clients=options.clients, seconds=seconds, workers=workers, gateways=gateways)
        )
        print("\n".join(said), *(wrong[:20] or ["within every limit at every moment"]), sep="\n")
        sys.exit(bool(wrong))
    found = on_idle_clock(partial(load, clients=options.clients, seconds=options.seconds or 120.0))
    ledger = found.ledger
    for name in LIMITS:
        if name.startswith("key:"):
            key = name[4:]
            print(
                f"{key}: {ledger.let_in[name]} let in, at most {found.most[key]} at once, "
                f"{ledger.charged[name]} tokens; limits {LIMITS[name]}"
            )
    for why, count in sorted(ledger.refused.items()):
        print(f"refused {count}: {why}")
    print(f"{found.seen['left']} left in the middle, {ledger.beyond} took more than was reserved")
    wrong = problems(found)
    print("\n".join(wrong[:20]) or "every decision is that of the plain sums")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
