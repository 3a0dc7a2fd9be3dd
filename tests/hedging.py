"""What does hedging do to the first token where a server has slow starts? Live: the gateway and two `tierline sim` servers.

    python -m tests.hedging                      # with and without; some seconds each
    python -m tests.hedging --seconds 1200 --stall 3

Time moves only when everybody waits (`tests.overload` says why). Chat at a third of what the two can carry; the engine of
one of them stands still every now and then, so that what begins there then is late. Prints the time to the first token of
all requests, how many were sent twice, and what came of that. Exit code 1 when hedging does not take a third off the p99, or
sends more than its share twice.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random

from proxy.errors import Hedged
from proxy.record import Measures, Record
from proxy.sim.faults import Fault, FaultKind
from tests.agreement import IdleClock, client_session, fleet, on_idle_clock, quantile
from tests.overload import Seen, one, turns

SHARE = 0.05
HEDGE = f"hedge = {{ after = 0.3, factor = 2.0, share = {SHARE} }}"
SENT = (Hedged.WON, Hedged.LOST, Hedged.FAILED, Hedged.LEFT)
"""What came of second attempts that were made."""


@dataclass
class Kept:
    """Takes the recorder's place."""

    hedges: Counter[str] = field(default_factory=Counter)
    dropped: int = 0

    def add(self, record: Record, derived: Measures) -> None:
        if record.hedge is not None:
            self.hedges[record.hedge] += 1

    async def close(self) -> None: ...


async def load(
    clock: IdleClock, fast: str, rate: float, seconds: float, stall: float, every: float, seed: int
) -> tuple[Seen, Kept]:
    seen, kept, rng = Seen(), Kept(), Random(seed)
    times = [3.0 + every * (number + rng.random()) for number in range(int(seconds / every))]
    slow = tuple(Fault(FaultKind.STALL, seconds=stall, at=at) for at in times)
    async with fleet(clock, fast=fast, scripts={"bf16": slow}) as app:
        app.gateway.recorder = kept  # type: ignore[assignment]
        await clock.sleep(3.0)
        url = f"http://127.0.0.1:{app.port}/v1/completions"
        async with client_session() as session:
            due, tasks = clock.now(), []
            end = due + seconds
            for number, turn in enumerate(turns(rate * 3, seconds * 2)):
                due += rng.expovariate(rate)
                if due > end:
                    break
                await clock.sleep(max(0.0, due - clock.now()))
                tasks.append(asyncio.ensure_future(one(clock, session, url, turn, number, seen, tier="fast")))
            await asyncio.gather(*tasks)
        if app.gateway.exchanges or any(backend.in_flight for backend in app.pool.backends.values()):
            seen.other.append("left behind")
    return seen, kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--stall", type=float, default=2.0, help="seconds that the engine stands still")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between these, on average")
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args()
    print(
        "| hedging | answered | TTFT p50 | p95 | p99 | longest | sent twice | of these won | denied | nowhere | else |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    last, bad = [], False
    for name, fast in (("off", ""), ("on", HEDGE)):
        run = partial(load, fast=fast, **vars(options))
        seen, kept = on_idle_clock(run)
        hedges, sent = kept.hedges, sum(kept.hedges[what] for what in SENT)
        times = [quantile(seen.ttft, q) for q in (0.5, 0.95, 0.99, 1.0)]
        cells = [name, len(seen.ttft), *(f"{t:.2f} s" for t in times), sent, hedges[Hedged.WON]]
        cells += [hedges[Hedged.DENIED], hedges[Hedged.NOWHERE], seen.other or "–"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        last.append(times[2])
        bad = bad or bool(seen.other) or sent > 1 + SHARE * len(seen.ttft)
    sys.exit(bad or last[1] > 0.67 * last[0])


if __name__ == "__main__":
    main()
