"""A second attempt beside the first one, which has given no sign of an answer for long (`tiers.NAME.hedge`).

Rules
1. The first whose answer begins has won (`Leg.claim`, in the step in which its first bytes go out): the other is let go
   in the same step, its connection closed, its place free. It is no failure of its backend.
2. One that fails while the other runs is only noted: the other is its second attempt. When both have failed, the last one's
   failure is followed as any other's.
3. Both write to one client, one after the other: until one has won, or is alone, the first one sends the comments.
4. However it ends, nothing is left: `run` waits for both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from policies import Failure, Result
from policies.hedge import HedgeParams, delay
from policies.retry import RULES
from proxy.classify import Classified
from proxy.endpoints import Endpoint
from proxy.errors import Hedged, ProxyError
from proxy.gate import Pass
from proxy.pool import Backend
from proxy.record import Record
from proxy.relay import Relay
from proxy.wire.errors import Api

if TYPE_CHECKING:
    from proxy.handler import Gateway

Ended = tuple[ProxyError | None, Failure | None]
"""(None, None): answered for good. Else what to tell the client and what failed."""


def may_repeat(endpoint: Endpoint) -> bool:
    """Whether a request may be asked twice at once. A backend keeps the responses that it makes."""
    return endpoint.generates and endpoint.api is not Api.RESPONSES


class Leg:
    """One of the two attempts. kept: what it has noted for a continuation."""

    __slots__ = ("_race", "backend", "kept", "let_in", "over", "relay", "started", "task")

    def __init__(self, race: Race, backend: Backend, let_in: Pass, started: float) -> None:
        self._race = race
        self.backend, self.let_in, self.started = backend, let_in, started
        self.relay: Relay | None = None
        self.task: asyncio.Task[Ended] | None = None
        self.kept: tuple[object, ...] | None = None
        self.over = False

    def joins(self, relay: Relay) -> None:
        """Its request is about to be sent."""
        self.relay = relay
        relay.claim = self.claim
        if self._race.is_alone(self):
            self._race.leads(self)
        else:
            relay.quiet = self is not self._race.first

    def claim(self) -> None:
        """Its answer begins."""
        self._race.won(self)

    def let_go(self) -> None:
        """Without a word about its backend."""
        if self.relay is not None:
            self.relay.stop()
        if self.task is not None:
            self.task.cancel()
        self.let_in.finish(Result(ok=False))

    def forget(self) -> None:
        """Nothing of it is held, and what it raised is not wanted."""
        if self.task is not None and self.task.done() and not self.task.cancelled():
            self.task.exception()
        if self.relay is not None:
            self.relay.claim = None
        del self._race

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()


class Race:
    """The first attempt of one request, and the second one if there is one. `last`: the attempt that decided.

    attempt: makes one. lead: an attempt is the request's from here. chosen: what was decided for the second one. failed: one
    did, and the other goes on.
    """

    def __init__(
        self,
        gateway: Gateway,
        record: Record,
        asked: Classified,
        params: HedgeParams,
        let_in: Pass,
        attempt: Callable[[Leg], Coroutine[object, object, Ended]],
        lead: Callable[[Leg], None],
        chosen: Callable[[Pass], None],
        failed: Callable[[Leg, ProxyError, Failure], None],
    ) -> None:
        self._gateway, self._record, self._asked, self._params = gateway, record, asked, params
        self._attempt, self.leads, self._chosen, self._failed = attempt, lead, chosen, failed
        self._changed = asyncio.Event()
        self._winner: Leg | None = None
        self._over = False
        self.first = self.last = self._leg(let_in)
        self._legs = [self.first]
        gateway.allowance.asked(asked.facts.tier.name, params.share)

    async def run(self) -> Ended:
        """Until the request is answered, or there is nothing left to wait for."""
        clock, view = self._gateway.clock, self.first.let_in.go.view
        wait = delay(self._params, view.forecast, stream=self._asked.facts.stream)
        timer = clock.call_at(self.first.started + wait, self._due)
        self._start(self.first)
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                for leg in self._legs:
                    if not leg.over and not leg.running and (ended := self._end(leg)) is not None:
                        return ended
        finally:
            timer.cancel()
            self._over = True
            running = [leg.task for leg in self._legs if leg.task is not None and leg.running]
            for leg in self._legs:
                if leg is not self.last:
                    leg.let_go()
            if self.last.task is not None:
                self.last.task.cancel()
            if running:
                await asyncio.wait(running)
            for leg in self._legs:
                leg.forget()

    def won(self, leg: Leg) -> None:
        """Its answer begins: nobody waits for the other."""
        if self._winner is not None:
            return
        self._winner = self.last = leg
        for other in self._legs:
            if other is not leg and other.running:
                other.let_go()
        if len(self._legs) > 1:
            self._record.hedge = Hedged.LOST if leg is self.first else Hedged.WON
            self.lead(leg)

    def lead(self, leg: Leg) -> None:
        """From here it is the request's attempt, as if there were no other."""
        record, relay = self._record, leg.relay
        if leg is not self.first and record.backend != leg.backend.name:
            record.backend = leg.backend.name
            assert leg.let_in.go.decision.reason is not None
            record.reason = leg.let_in.go.decision.reason.value
            record.expect(leg.let_in.go.view)
            record.backoff_seconds += leg.started - self.first.started
        if relay is not None:
            record.dispatched_at = relay.dispatched_at
            relay.alone()
        self.leads(leg)

    def is_alone(self, leg: Leg) -> bool:
        return all(other is leg or other.over for other in self._legs)

    # -- inside

    def _leg(self, let_in: Pass) -> Leg:
        backend = self._gateway.pool.backends[let_in.go.view.name]
        return Leg(self, backend, let_in, self._gateway.clock.now())

    def _start(self, leg: Leg) -> None:
        leg.task = asyncio.ensure_future(self._attempt(leg))
        leg.task.add_done_callback(lambda _: self._changed.set())

    def _due(self) -> None:
        """The first one has had its time."""
        first, record = self.first, self._record
        begun = first.relay is not None and first.relay.answering and not first.relay.streams
        if self._winner is not None or not first.running or begun:
            return
        gateway, tier = self._gateway, self._asked.facts.tier.name
        if not gateway.allowance.allows(tier):
            record.hedge = Hedged.DENIED
            return
        names, tried = gateway.pool.names(self._asked.route), frozenset((first.backend.name,))
        gateway.gate.beside(self._asked.facts, names, self._beside, tried=tried, ident=record.request_id)

    def _beside(self, let_in: Pass | None) -> None:
        """Where a second one may go."""
        first, record, gateway = self.first, self._record, self._gateway
        if let_in is None:
            record.hedge = Hedged.NOWHERE
            return
        if self._over or self._winner is not None or not first.running:  # meanwhile
            let_in.finish(Result(ok=False))
            return
        gateway.allowance.took(self._asked.facts.tier.name)
        second = self._leg(let_in)
        record.hedge, record.hedged_to = Hedged.LEFT, second.backend.name
        record.hedged_after = second.started - first.started
        self._legs.append(second)
        self._chosen(let_in)
        self._start(second)

    def _end(self, leg: Leg) -> Ended | None:
        """One has ended: how the request has, or None while the other goes on."""
        assert leg.task is not None
        leg.over = True
        winner, others = self._winner, [other for other in self._legs if other.running]
        if winner is not None and leg is not winner and leg.task.cancelled():
            return None  # let go
        error, failure = leg.task.result()
        noted = error is not None and failure in RULES and (others or winner is not None)
        if leg is winner or not noted:
            self.last = leg
            if failure is not None and winner is None and len(self._legs) > 1:
                self._record.hedge = Hedged.FAILED
            return error, failure
        assert error is not None
        assert failure is not None
        leg.let_in.finish(Result(ok=False))
        self._failed(leg, error, failure)
        if winner is None:
            self.last = others[0]
            self.lead(others[0])
        return None
