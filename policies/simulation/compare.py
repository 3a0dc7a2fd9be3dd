"""Policies side by side on the same traffic at shares of what the fleet can take.

Rules: everything follows from the seed. A `Contest` is one fleet under one source of traffic; at one rate all policies
get the same conversations, the same faults and the same chances. Rates are requests a second, times seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from policies import profile as profiles
from policies.simulation.capacity import GOAL, capacity
from policies.simulation.clairvoyant import clairvoyant
from policies.simulation.loop import CLIENT, Simulation
from policies.simulation.players import Make
from policies.simulation.score import SLO, Score, judge, score, timeline
from policies.simulation.values import Client, Fault, Machine, Served, Traffic
from policies.types import Slo

REFERENCE = "clairvoyant"
BACK_SECONDS = 10.0
"""After a fault's end everything should be as before within so long."""
LOOK_SECONDS = 120.0
"""How long before and after a fault goodput is counted."""


class Source(Protocol):
    """A shape or a trace."""

    @property
    def name(self) -> str: ...

    def traffic(self, rate: float, rng: Random, *, seconds: float | None = None) -> Traffic: ...


@dataclass(frozen=True, slots=True)
class FaultScore:
    """Goodput of turns that came in the LOOK_SECONDS before a fault, during it, and in as many seconds that begin
    BACK_SECONDS after it; `calm`: of the latter, had there been no fault."""

    before: float
    during: float
    after: float
    calm: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy at one rate. `load`: share of capacity, None if it was not sought. `steps`: see `timeline`."""

    source: str
    policy: str
    rate: float
    load: float | None
    requests: int
    score: Score
    steps: tuple[tuple[float, int, int, float], ...]
    fault: FaultScore | None = None


@dataclass(frozen=True, slots=True)
class Contest:
    """`seconds`: counted after the warm-up, None: as long as the source is. `fault`: begins in the middle of them; its
    `at` is ignored."""

    machines: tuple[Machine, ...]
    source: Source
    seed: int = 0
    seconds: float | None = None
    fault: Fault | None = None
    slo: Slo = SLO
    client: Client = CLIENT

    def traffic(self, rate: float) -> Traffic:
        return self.source.traffic(rate, Random(self.seed), seconds=self.seconds)

    def capacity(self, told: Callable[[float, Score], None] = lambda rate, score: None) -> float:
        """What the fleet can take of this source. `told`: of each rate that was tried."""

        def goodput(rate: float) -> float:
            result = self.run(REFERENCE, None, rate, calm=True).score
            told(rate, result)
            return result.goodput

        return capacity(goodput, self.guess(), goal=GOAL)

    def guess(self) -> float:
        """Requests a second at which prefill of new tokens fills a quarter of the machines' time, or decoding nearly all
        of it: where to begin the search."""
        traffic = self.source.traffic(1.0, Random(self.seed), seconds=1000.0)
        turns = [turn for conversation in traffic.conversations for turn in conversation.turns]
        total = 0.0
        for machine in self.machines:
            p = profiles.get(machine.profile)
            prefill = sum(p.cold_ttft(turn.prompt) - p.cold_ttft(turn.prompt - turn.new) for turn in turns)
            context = sum(turn.prompt for turn in turns) / len(turns)
            decode = sum(turn.output for turn in turns) / p.aggregate_rate(32, context)
            total += len(turns) / max(4.0 * prefill, 1.1 * decode)
        return total

    def run(
        self, policy: str, make: Make | None, rate: float, load: float | None = None, *, calm: bool = False
    ) -> Outcome:
        """One simulation; two with a fault, for its `calm` figure. `make` None: the reference. `calm`: leave out the
        fault."""
        if make is None:
            make = clairvoyant(self.slo)
        traffic = self.traffic(rate)
        fault = None if calm or self.fault is None else self._placed(traffic)
        served = self.simulate(make, traffic, fault)
        met = judge(self.machines, self.slo)
        seen = None
        if fault is not None:
            quiet = self.simulate(make, traffic, None)
            end = fault.at + fault.seconds

            def share(turns: Sequence[Served], since: float, until: float) -> float:
                return score(turns, self.machines, met, since, until).goodput

            after = end + BACK_SECONDS
            seen = FaultScore(
                share(served, max(traffic.warm_up, fault.at - LOOK_SECONDS), fault.at),
                share(served, fault.at, end),
                share(served, after, after + LOOK_SECONDS),
                share(quiet, after, after + LOOK_SECONDS),
            )
        width = max(5.0, traffic.seconds / 120)
        return Outcome(
            self.source.name,
            policy,
            rate,
            load,
            len(served),
            score(served, self.machines, met, traffic.warm_up, traffic.seconds),
            timeline(served, met, width, traffic.seconds),
            seen,
        )

    def simulate(self, make: Make, traffic: Traffic, fault: Fault | None) -> list[Served]:
        faults = () if fault is None else (fault,)
        return Simulation(
            self.machines, traffic, make, Random(self.seed + 1), faults=faults, client=self.client
        ).run()

    def _placed(self, traffic: Traffic) -> Fault:
        assert self.fault is not None
        middle = (traffic.warm_up + traffic.seconds - self.fault.seconds) / 2
        return replace(self.fault, at=middle)
