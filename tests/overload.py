"""What becomes of chat at three times what the cards carry? Live: the gateway and two `tierline sim` servers, over sockets.

    python -m tests.overload                       # at capacity, then at three times that; a minute each, in some seconds
    python -m tests.overload --factor 1 --factor 3 --rate 6 --seconds 300

On a clock that moves only when everybody waits, so that it is the gateway that is measured and not what else the machine
does: times are those of decisions and waits, computing takes none (`tests.agreement` compares it with the simulation).
Requests come on their own, whether or not earlier ones were answered, and do not come again. Prints, for each load: those
answered and their time to first token, those turned away and how soon, and how many a second were within the SLO (first
token within 2 s, 50 ms a token). Exit code 1 when, at the highest load, the p95 of the first token is beyond 1.9 s, the
p99 of a refusal beyond 50 ms, or the SLO is met less often than 0.9 × at the lowest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
from dataclasses import dataclass, field
from functools import partial
from random import Random

import aiohttp

from policies.simulation import SHAPES, Turn
from tests.agreement import IdleClock, client_session, fleet, on_idle_clock, prompts_of, quantile

TTFT, TPOT, SHED = 2.0, 0.05, 0.05


@dataclass
class Seen:
    """By clients. shed: seconds to each refusal; silent: refusals without a true `Retry-After`."""

    ttft: list[float] = field(default_factory=list)
    shed: list[float] = field(default_factory=list)
    met: int = 0
    silent: int = 0
    other: list[str] = field(default_factory=list)


def turns(rate: float, seconds: float, seed: int = 1) -> list[Turn]:
    """As many first turns of conversations as come in this time, in order."""
    drawn = SHAPES["chat"].traffic(rate, Random(seed), seconds=seconds)
    found = [turn for conversation in drawn.conversations for turn in conversation.turns]
    Random(seed + 1).shuffle(found)
    return found


async def one(
    clock: IdleClock,
    session: aiohttp.ClientSession,
    url: str,
    turn: Turn,
    number: int,
    seen: Seen,
    tier: str = "balanced",
) -> None:
    body = {
        "model": "m",
        "prompt": next(prompts_of([turn], f"c{number}")),
        "stream": True,
        "max_tokens": turn.output,
    }
    data, sent = json.dumps(body), clock.now()
    headers = {"content-type": "application/json", "x-quality-tier": tier}
    try:
        async with session.post(url, data=data, headers=headers) as response:
            if response.status == 429:
                await response.read()
                seen.shed.append(clock.now() - sent)
                seen.silent += not 1 <= int(response.headers.get("retry-after", 0)) <= 60
                return
            if response.status != 200:
                seen.other.append(str(response.status))
                return
            first, last = None, b""
            async for piece in response.content.iter_any():
                if first is None and b'"text"' in piece:
                    first = clock.now()
                last = piece
    except aiohttp.ClientError as error:
        seen.other.append(type(error).__name__)
        return
    if first is None or b"[DONE]" not in last:
        seen.other.append("cut")
        return
    seen.ttft.append(first - sent)
    tpot = (clock.now() - first) / max(1, turn.output - 1)
    seen.met += first - sent <= TTFT and tpot <= TPOT


async def load(clock: IdleClock, rate: float, seconds: float, seed: int = 1) -> Seen:
    seen, rng = Seen(), Random(seed + 2)
    async with fleet(clock) as app:
        await clock.sleep(3.0)  # the first polls
        url = f"http://127.0.0.1:{app.port}/v1/completions"
        async with client_session() as session:
            due, tasks = clock.now(), []
            end = due + seconds
            for number, turn in enumerate(turns(rate * 3, seconds * 2, seed)):
                due += rng.expovariate(rate)
                if due > end:
                    break
                await clock.sleep(max(0.0, due - clock.now()))
                tasks.append(asyncio.ensure_future(one(clock, session, url, turn, number, seen)))
            await asyncio.gather(*tasks)
        left = {name: backend.in_flight for name, backend in app.pool.backends.items() if backend.in_flight}
        if left or app.gateway.exchanges or any(app.gate.waiting().values()):
            seen.other.append(f"left behind: {left}")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second that are capacity")
    parser.add_argument("--factor", type=float, action="append", help="of it; several times")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print("| load | answered | TTFT p50 | p95 | shed | p50 | p99 | met/s | peak RSS | else |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    runs = []
    for factor in options.factor or [1.0, 3.0]:
        seen = on_idle_clock(
            partial(load, rate=options.rate * factor, seconds=options.seconds, seed=options.seed)
        )
        runs.append(seen)
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(
            f"| {factor:g}× | {len(seen.ttft)} | {quantile(seen.ttft, 0.5):.2f} s | {quantile(seen.ttft, 0.95):.2f} s | "
            f"{len(seen.shed)} | {quantile(seen.shed, 0.5) * 1e3:.0f} ms | {quantile(seen.shed, 0.99) * 1e3:.0f} ms | "
            f"{seen.met / options.seconds:.1f} | {rss} MB | {seen.other or '–'} |",
            flush=True,
        )
    least, most = runs[0], runs[-1]
    late = quantile(most.ttft, 0.95) > 0.95 * TTFT
    slow = bool(most.shed) and quantile(most.shed, 0.99) > SHED
    fewer = most.met < 0.9 * least.met
    sys.exit(late or slow or fewer or bool(most.other) or most.silent > 0)


if __name__ == "__main__":
    main()
