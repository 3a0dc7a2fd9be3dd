"""The reference: a policy that knows what no gateway can know.

Rules: it sees the true length of every answer, what each cache really holds, and the rest of every conversation; it does
not search: each request goes, at once, where the fewest turns would miss the SLO because of it (its own and those that
run there), and among equals where the most seconds are saved. It never queues and never sheds. A reference, not a bound.

    misses = own TTFT or TPOT too long + running turns that would become too slow
    cost   = queue + prefill + decode + harm + crowding                          all in seconds
    harm   = own prefill × streams that decode there + their tokens left × what one more stream costs each
    crowding, of a first turn: prefill of what would no longer fit the cache, were every live conversation to go on
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class Site:
    """One machine as the reference follows it."""

    __slots__ = ("decoding", "healthy", "live", "machine", "pending", "progress", "rates", "view")

    def __init__(self, machine: Running) -> None:
        own = member(machine.machine)
        config = machine.engine.config
        self.machine = machine
        self.rates = Rates(machine.profile, config.block_tokens, config.batched_tokens)
        self.view = BackendView(
            machine.name,
            reference=own.reference,
            kl_bits=own.kl_bits,
            kv_tokens=own.kv_tokens,
            speculates=bool(own.speculates),
        )
        self.healthy = True
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
        best: tuple[tuple[float, float], Site, float] | None = None
        for site in self._sites.values():
            if not site.healthy or site.view.name in tried or not _may(facts, site.view):
                continue
            key, prefill = self._weigh(now, served, site)
            if best is None or key < best[0]:
                best = key, site, prefill
        if best is None:
            return Shed(ShedReason.NO_BACKEND, 1, Decision(None, None))
        _, site, prefill = best
        self._begin(now, id, served, site, prefill)
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

    def _begin(self, now: float, id: int, served: Served, site: Site, prefill: float) -> None:
        if not site.pending:
            site.progress = now
        site.pending[id] = prefill
        self._where[id], self._served[id] = site, served
        for other in self._sites.values():
            other.live.pop(served.order, None)
        site.live[served.order] = served.turn.prompt + served.turn.output

    def _weigh(self, now: float, served: Served, site: Site) -> tuple[tuple[float, float], float]:
        """((misses, cost in seconds), seconds of prefill)."""
        turn, slo = served.turn, self._slo
        cached = site.machine.engine.known_tokens(engine_request(turn, site.rates.block_tokens))
        cold = site.rates.cold_seconds(turn.prompt, cached)
        prefill = site.rates.alone(turn.prompt, cached) + cold
        backlog = site.backlog(now)
        others = len(site.decoding) + len(site.pending)
        held = sum([one.turn.prompt for one in site.decoding.values()])
        context = (held + turn.prompt) / (len(site.decoding) + 1)
        before, after = site.tpot(max(1, others), context), site.tpot(others + 1, context)
        limit = slo.ttft_seconds + slo.prefill_factor * site.machine.profile.cold_ttft(turn.new)
        misses = (backlog + prefill > limit) + (after > slo.tpot_seconds)
        harm = 0.0
        for one in site.decoding.values():
            assert one.first is not None
            passed, tokens = now - one.first, max(1, one.turn.output - 1)
            left = max(0.0, tokens - passed / before)
            slower = left * (after - before) + (cold if left else 0.0)
            would = passed + left * before
            misses += would <= slo.tpot_seconds * tokens < would + slower
            harm += slower
        cost = backlog + prefill + turn.output * after + harm
        if served.place == 0:
            cost += self._crowding(served, site)
        return (float(misses), cost), prefill

    def _crowding(self, served: Served, site: Site) -> float:
        """Seconds of prefill for the part of all live contexts that the cache would lose."""
        last = served.conversation.turns[-1]
        wanted = sum(site.live.values()) + last.prompt + last.output
        lost = min(wanted - site.view.kv_tokens, wanted)
        if lost <= 0 or len(served.conversation.turns) == 1:
            return 0.0
        return site.machine.profile.cold_ttft(min(lost, last.prompt))


def _may(facts: RequestFacts, view: BackendView) -> bool:
    return tier(facts, view, _PARAMS) is None and speculation(facts, view, _PARAMS) is None


def clairvoyant(slo: Slo) -> Make:
    """Players of the reference."""

    def make(machines: Sequence[Running], rng: Random) -> Clairvoyant:
        return Clairvoyant(machines, slo)

    return make
