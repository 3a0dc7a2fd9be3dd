"""The reference: a policy that knows what no gateway can know.

Rules: it sees the true length of every answer, what each cache really holds, and the rest of every conversation; it does
not search. Each request goes, at once, where the sum of these is the least, all in seconds:

    own       queue + prefill + decode
    harm      own prefill × streams that decode there + their tokens left × what one more stream costs each
    risk      RISK × what it adds to the sum of over(time ÷ time the SLO allows) of all that run there, itself included;
              over(x) = max(0, x - 0.7)²
    crowding  of a first turn: prefill of what would no longer fit the cache, were every live conversation to go on

Decoding slows down by the share of its time that a backend lately spent on prefill. It never queues and never sheds. A
reference, not a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp
from random import Random

from policies.engine.rates import Rates
from policies.filters import speculation, tier
from policies.params import RouterParams
from policies.simulation.machines import Running, engine_request
from policies.simulation.players import Make, member
from policies.simulation.values import Served
from policies.types import (
    BackendView,
    ChooseReason,
    Decision,
    Go,
    Polled,
    RequestFacts,
    Result,
    Shed,
    ShedReason,
    Slo,
    Verdict,
)

_NONE: frozenset[str] = frozenset()
_PARAMS = RouterParams()
RISK = 400.0
"""Seconds that a whole unit of `over` is worth."""
MEMORY = 20.0
"""Seconds over which the share of prefill is averaged."""


class Site:
    """One machine as the reference follows it."""

    __slots__ = (
        "_busy",
        "_busy_at",
        "decoding",
        "healthy",
        "live",
        "machine",
        "pending",
        "progress",
        "rates",
        "seats",
        "view",
    )

    def __init__(self, machine: Running) -> None:
        own = member(machine.machine)
        config = machine.engine.config
        self.machine = machine
        self.seats = config.max_num_seqs
        self.rates = Rates(machine.profile, config.block_tokens, config.batched_tokens)
        self.view = BackendView(
            machine.name,
            reference=own.reference,
            kl_bits=own.kl_bits,
            kv_tokens=own.kv_tokens,
            speculates=bool(own.speculates),
        )
        self.healthy = True
        self._busy = self._busy_at = 0.0
        self.pending: dict[int, float] = {}
        """Without a first token, in order: seconds of prefill each will need."""
        self.progress = 0.0
        """When the first of `pending` began to be worked on."""
        self.decoding: dict[int, Served] = {}
        self.live: dict[int, int] = {}
        """Conversations whose last turn went here and that will go on: tokens they hold."""

    def backlog(self, now: float) -> float:
        """Seconds until a request that comes now begins its prefill."""
        return max(0.0, sum(self.pending.values()) - (now - self.progress)) if self.pending else 0.0

    def prefills(self, now: float, seconds: float) -> None:
        """So much prefill was sent there."""
        self._busy = self.busy(now) + seconds / MEMORY
        self._busy_at = now

    def busy(self, now: float) -> float:
        """Share of its time that lately went to prefill, during which nobody decodes; 0..0.9."""
        return min(0.9, self._busy * exp((self._busy_at - now) / MEMORY))

    def tpot(self, streams: int, context: float) -> float:
        return 1.0 / self.machine.profile.stream_rate(streams, context)


class Clairvoyant:
    """See above. `slo`: what it tries to meet."""

    def __init__(self, machines: Sequence[Running], slo: Slo) -> None:
        self._sites = {machine.name: Site(machine) for machine in machines}
        self._where: dict[int, Site] = {}
        self._served: dict[int, Served] = {}
        self._slo = slo

    def offer(
        self, now: float, id: int, served: Served, facts: RequestFacts, tried: frozenset[str] = _NONE
    ) -> Verdict:
        best: tuple[float, Site, float, float] | None = None
        for site in self._sites.values():
            if not site.healthy or site.view.name in tried or not _may(facts, site.view):
                continue
            cost, warm, cold = self._weigh(now, served, site)
            if best is None or cost < best[0]:
                best = cost, site, warm, cold
        if best is None:
            return Shed(ShedReason.NO_BACKEND, 1, Decision(None, None))
        _, site, warm, cold = best
        self._begin(now, id, served, site, warm, cold)
        return Go(Decision(site.view.name, ChooseReason.POLICY), site.view)

    def advance(self, now: float) -> Iterable[tuple[int, Verdict]]:
        return ()

    def next_event_at(self) -> float | None:
        return None

    def withdraw(self, now: float, id: int) -> None: ...

    def polled(self, now: float, name: str, numbers: Polled) -> None: ...

    def healthy(self, now: float, name: str, healthy: bool) -> None:
        self._sites[name].healthy = healthy

    def first_token(self, now: float, id: int) -> None:
        site = self._where[id]
        site.pending.pop(id, None)
        site.progress = now
        site.decoding[id] = self._served[id]

    def finish(self, now: float, id: int, result: Result) -> None:
        site, served = self._where.pop(id), self._served.pop(id)
        if site.pending.pop(id, None) is not None:
            site.progress = now
        site.decoding.pop(id, None)
        if not result.ok or served.place + 1 == len(served.conversation.turns):
            site.live.pop(served.order, None)

    # -- how

    def _begin(self, now: float, id: int, served: Served, site: Site, warm: float, cold: float) -> None:
        if not site.pending:
            site.progress = now
        site.prefills(now, cold)
        # Those that start together share most of the warm part.
        site.pending[id] = cold if site.pending else warm + cold
        self._where[id], self._served[id] = site, served
        for other in self._sites.values():
            other.live.pop(served.order, None)
        site.live[served.order] = served.turn.prompt + served.turn.output

    def _weigh(self, now: float, served: Served, site: Site) -> tuple[float, float, float]:
        """(sum, seconds of the warm part of its start, of the cold one)."""
        turn, slo = served.turn, self._slo
        cached = site.machine.engine.known_tokens(engine_request(turn, site.rates.block_tokens))
        cold = site.rates.cold_seconds(turn.prompt, cached)
        warm = site.rates.alone(turn.prompt, cached)
        others = len(site.decoding) + len(site.pending)
        held = sum([one.turn.prompt for one in site.decoding.values()])
        context = (held + turn.prompt) / (len(site.decoding) + 1)
        left_over = 1.0 - site.busy(now)
        before = site.tpot(max(1, others), context) / left_over
        after = site.tpot(others + 1, context) / left_over
        harm = risk = longest = 0.0
        for one in site.decoding.values():
            assert one.first is not None
            passed, tokens = now - one.first, max(1, one.turn.output - 1)
            left = max(0.0, tokens - passed / before)
            slower = left * (after - before) + (cold if left else 0.0)
            allowed, would = slo.tpot_seconds * tokens, passed + left * before
            risk += _over((would + slower) / allowed) - _over(would / allowed)
            harm += slower
            longest = max(longest, left * after)
        queue = site.backlog(now)
        if others >= site.seats:
            queue += longest * (others + 1 - site.seats) / site.seats
        limit = slo.ttft_seconds + slo.prefill_factor * site.machine.profile.cold_ttft(turn.new)
        risk += _over((queue + warm + cold) / limit) + _over(after / slo.tpot_seconds)
        cost = queue + warm + cold + turn.output * after + harm + RISK * risk
        if served.place == 0:
            cost += self._crowding(served, site)
        return cost, warm, cold

    def _crowding(self, served: Served, site: Site) -> float:
        """Seconds of prefill for the part of all live contexts that the cache would lose."""
        last = served.conversation.turns[-1]
        wanted = sum(site.live.values()) + last.prompt + last.output
        lost = min(wanted - site.view.kv_tokens, wanted)
        if lost <= 0 or len(served.conversation.turns) == 1:
            return 0.0
        return site.machine.profile.cold_ttft(min(lost, last.prompt))


def _over(ratio: float) -> float:
    return (ratio - 0.7) ** 2 if ratio > 0.7 else 0.0


def _may(facts: RequestFacts, view: BackendView) -> bool:
    return tier(facts, view, _PARAMS) is None and speculation(facts, view, _PARAMS) is None


def clairvoyant(slo: Slo) -> Make:
    """Players of the reference."""

    def make(machines: Sequence[Running], rng: Random) -> Clairvoyant:
        return Clairvoyant(machines, slo)

    return make
