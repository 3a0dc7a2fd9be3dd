"""What a run was worth: the SLO, goodput, and the figures beside it.

Rules: a turn counts where its first attempt arrived, in `[since, until)`. Each attempt of a client is a request, as it
is for the gateway: offered, and met if it was answered in whole, its first token in time and the rest fast enough. One that
was shed or cut was offered and missed, whatever came of the next. Goodput = met ÷ offered; turns that never came, because
the one before them was not answered, were offered, too. Seconds; seconds per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf

from policies import profile as profiles
from policies.filters import speculation, tier
from policies.params import RouterParams
from policies.simulation.facts import facts_of
from policies.simulation.players import member
from policies.simulation.values import End, Machine, Served
from policies.types import BackendView, Slo, Tier

Judge = Callable[[Served], bool]
SLO = Slo()


def judge(machines: Iterable[Machine], slo: Slo = SLO) -> Judge:
    """Whether a turn's last attempt met the SLO. Its prefill is that of the fastest backend that may serve its tier:
    the strictest reading."""
    profile_of = {machine.name: profiles.get(machine.profile) for machine in machines}
    views = [
        (BackendView(name, reference=p.quality.reference, kl_bits=p.quality.kl_bits), p)
        for name, p in profile_of.items()
    ]
    fast: dict[str, list[profiles.Profile]] = {}

    def cold(served: Served) -> float:
        wanted = served.conversation.tier
        if wanted.name not in fast:
            facts = facts_of(served.conversation, served.turn, 1)
            fast[wanted.name] = [p for v, p in views if tier(facts, v, RouterParams()) is None]
        return min([p.cold_ttft(served.turn.new) for p in fast[wanted.name]], default=0.0)

    def met(served: Served) -> bool:
        if served.end is not End.ANSWERED:
            return False
        ttft, tpot = served.ttft, served.tpot
        if tpot is not None and tpot > slo.tpot_seconds:
            return False
        assert ttft is not None
        return ttft <= slo.ttft_seconds or ttft <= slo.ttft_seconds + slo.prefill_factor * cold(served)

    return met


def violations(served: Iterable[Served], machines: Mapping[str, Machine]) -> int:
    """Turns that ran on a backend that their tier excludes."""
    wrong: dict[tuple[str, Tier], bool] = {}
    count = 0
    for one in served:
        if one.machine is None:
            continue
        key = one.machine, one.conversation.tier
        if key not in wrong:
            own = member(machines[one.machine])
            view = BackendView(
                own.name, reference=own.reference, kl_bits=own.kl_bits, speculates=bool(own.speculates)
            )
            facts = facts_of(one.conversation, one.turn, 1)
            wrong[key] = any(f(facts, view, RouterParams()) is not None for f in (tier, speculation))
        count += wrong[key]
    return count


def quantile(values: Sequence[float], q: float) -> float:
    """Of sorted values, the one that at least a share `q` do not exceed; nan of none."""
    return values[max(0, ceil(q * len(values)) - 1)] if values else float("nan")


@dataclass(frozen=True, slots=True)
class Score:
    """Figures of one policy on one traffic. offered: attempts, and turns that never came. met_per_second: in the counted
    time. answered, shed, failed, gave_up: turns that ended so; lost: turns that never came; shed_once: turns that were
    shed at least once. ttft50 …: of answered turns, from their last attempt on. waited95: seconds until a backend got
    it. cached: share of prompt tokens found in a cache. longest: from the first attempt to a first token or any other
    end. shares: of answered turns, by backend."""

    offered: int
    met: int
    seconds: float
    answered: int
    shed: int
    failed: int
    gave_up: int
    lost: int
    shed_once: int
    ttft50: float
    ttft95: float
    ttft99: float
    tpot50: float
    tpot95: float
    waited95: float
    cached: float
    longest: float
    preempted: int
    violations: int
    shares: tuple[tuple[str, float], ...]

    @property
    def goodput(self) -> float:
        return self.met / self.offered if self.offered else float("nan")

    @property
    def met_per_second(self) -> float:
        return self.met / self.seconds if self.seconds > 0 else float("nan")


def score(
    served: Sequence[Served],
    machines: Sequence[Machine],
    met: Judge,
    since: float = 0.0,
    until: float = inf,
) -> Score:
    """The figures of turns whose first attempt arrived in `[since, until)`."""
    mine = [one for one in served if since <= one.arrived < until]
    answered = [one for one in mine if one.end is End.ANSWERED]
    ends = Counter(one.end for one in mine)
    ttft = sorted([one.ttft for one in answered if one.ttft is not None])
    first = [one.first - one.arrived for one in answered if one.first is not None]
    tpot = sorted([one.tpot for one in answered if one.tpot is not None])
    waited = sorted([one.sent - one.asked for one in answered if one.sent is not None])
    others = [
        one.ended - one.arrived for one in mine if one.end is not End.ANSWERED and one.ended is not None
    ]
    prompts = sum(one.turn.prompt for one in answered)
    where = Counter(one.machine for one in answered)
    lost = sum(one.missed_turns for one in mine)
    last = max([one.arrived for one in mine], default=since)
    return Score(
        offered=sum([max(1, one.attempts) for one in mine]) + lost,
        met=sum(map(met, mine)),
        seconds=(last if until == inf else until) - since,
        answered=len(answered),
        shed=ends[End.SHED],
        failed=ends[End.FAILED],
        gave_up=ends[End.GAVE_UP],
        lost=lost,
        shed_once=sum(one.shed > 0 for one in mine),
        ttft50=quantile(ttft, 0.5),
        ttft95=quantile(ttft, 0.95),
        ttft99=quantile(ttft, 0.99),
        tpot50=quantile(tpot, 0.5),
        tpot95=quantile(tpot, 0.95),
        waited95=quantile(waited, 0.95),
        cached=sum(one.cached or 0 for one in answered) / prompts if prompts else float("nan"),
        longest=max([*first, *others], default=float("nan")),
        preempted=sum(one.preempted > 0 for one in mine),
        violations=violations(mine, {machine.name: machine for machine in machines}),
        shares=tuple([(m.name, where[m.name] / len(answered) if answered else 0.0) for m in machines]),
    )


def timeline(
    served: Iterable[Served], met: Judge, width: float, until: float
) -> tuple[tuple[float, int, int, float], ...]:
    """By arrival, in steps of `width` seconds: (step's beginning, offered, met, p95 TTFT in seconds)."""
    steps: list[list[Served]] = [[] for _ in range(max(1, ceil(until / width)))]
    for one in served:
        if one.arrived < until:
            steps[int(one.arrived / width)].append(one)
    rows = []
    for place, ones in enumerate(steps):
        ttft = sorted([one.ttft for one in ones if one.ttft is not None])
        rows.append((place * width, len(ones), sum(map(met, ones)), quantile(ttft, 0.95)))
    return tuple(rows)
