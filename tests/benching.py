"""`tierline bench` against simulated servers on a clock that moves only when everybody waits: minutes of it in seconds."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

from policies import profile as profiles
from policies.measured import Measured
from proxy.app import App
from proxy.bench.matrix import Found, Plan, measured, run
from proxy.bench.stream import Client
from proxy.config import backend_at, loads
from proxy.probe import Asker, session
from proxy.sim.server import Options, Simulator
from tests.agreement import IdleClock, on_idle_clock

OPTIONS = Options(profile="", model="tiny")
GATEWAY = """
[server]
port = 0
max_body_bytes = 8388608
[admin]
enabled = false
[telemetry]
records = "off"
[timeouts]
keepalive_after = 0
[[backends]]
name = "a"
url = "{}"
[models.tiny]
"""


def bench(name: str, plan: Plan, *, through: bool = False, options: Options = OPTIONS) -> Found:
    """What is found of the simulated server of a profile, asked itself or through a gateway that knows nothing of it."""

    async def live(clock: IdleClock) -> Found:
        async with AsyncExitStack() as stack:
            server = Simulator(replace(options, profile=name), clock)
            await server.start()
            stack.push_async_callback(server.close)
            url = server.url
            if through:
                app = App(loads(GATEWAY.format(url), {}), clock)
                await app.start()
                stack.push_async_callback(app.close)
                url = f"http://127.0.0.1:{app.port}"
            asking = await stack.enter_async_context(session())
            return await run(Client(Asker(backend_at(url), asking), clock, "tiny"), plan, 1)

    return on_idle_clock(live)


def bench_all(name: str, *, through: bool = False) -> Found:
    """Every point that the profile itself has, and no other."""
    own, all_found = profiles.get(name), Found()
    for context in sorted({x for _, x, _ in own.measured.decode}):
        concurrency = tuple(c for c, x, _ in own.measured.decode if x == context)
        prompts = tuple(n for n, _ in own.prefill if n) if not context else ()
        found = bench(name, Plan(concurrency, (context,), prompts, tokens=300, rounds=1), through=through)
        all_found.cells += found.cells
        all_found.prefill += found.prefill
        all_found.notes += found.notes
        all_found.window, all_found.kv_tokens = found.window, found.kv_tokens
    return all_found


def found_again(found: Found, name: str) -> Measured:
    return measured(found, "again", "measured here", profiles.get(name))


def errors(found: Found, name: str) -> dict[str, float]:
    """How far each figure is from the profile's, as a share of it."""
    own = profiles.get(name)
    off = {}
    for cell in found.cells:
        point = cell.streams, cell.context
        off[f"decode {point}"] = cell.rate / own.aggregate_rate(*point) - 1.0
        off[f"warm {point}"] = cell.ttft / own.warm_ttft(*point) - 1.0
    for tokens, seconds in found.prefill:
        off[f"cold {tokens}"] = seconds / own.cold_ttft(tokens) - 1.0
    return off
