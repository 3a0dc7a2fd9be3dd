"""Waiting to be let in. Who goes, waits or is turned away is decided in `policies.admission`; here it is only waited for.

Rules
1. Every request that was let in has begun in the fleet, and `finish` is called for it exactly once: also when its client
   left in the very moment in which it was let in.
2. Whoever changes the fleet calls `pump` afterwards: those whose wait ended are woken in the same step. One timer stands
   for what ends by itself.
3. A request that leaves the line (its client went, the gateway stops) is withdrawn at once.
4. Retries are paid for here (`policies.budget`): who may try again and where it goes is one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from random import Random
from typing import TypeVar

from policies import (
    Admission,
    Fleet,
    Go,
    PolicyParams,
    RequestFacts,
    Result,
    RetryParams,
    Shed,
    Verdict,
    Wait,
)
from policies.admission import Names
from policies.budget import Budget
from policies.frozen import frozen
from policies.trace import Trace, TracingRouter
from proxy.clock import Clock, Timer

_NONE: frozenset[str] = frozenset()


SOONEST = 0.001
"""Seconds until the next look at those who wait, at least."""


class Pass:
    """A request that has been let in: what was decided, and the duty to say how it ended.

    Nobody sees the first token of an answer that is not streamed: it is taken to come when it was predicted, or its
    backend would look as if it were still reading the prompt.
    """

    __slots__ = ("_first", "_gate", "_id", "_over", "go", "trace")

    def __init__(self, gate: Gate, id: int, go: Go, first: Timer | None, trace: Trace | None) -> None:
        self._gate, self._id, self.go, self.trace = gate, id, go, trace
        self._first = first
        self._over = False

    def first_token(self) -> None:
        if not self._over:
            self._gate.first_token(self._id)

    def finish(self, result: Result) -> None:
        """May be called any number of times; the first one counts."""
        if not self._over:
            self._over = True
            if self._first is not None:
                self._first.cancel()
            self._gate.finish(self._id, result)


@frozen
class Refused:
    """Turned away, and what that was decided from."""

    shed: Shed
    trace: Trace | None


Answer = tuple[Go | Shed, Trace | None]


@frozen
class InLine:
    """A request that waits. wait: what it was told. answer: done when its wait is over."""

    id: int
    facts: RequestFacts
    wait: Wait
    answer: asyncio.Future[Answer]


V = TypeVar("V", Go, Shed, Go | Shed)


class Gate:
    """The one way in."""

    def __init__(
        self,
        clock: Clock,
        fleet: Fleet,
        router: TracingRouter,
        params: PolicyParams,
        rng: Random,
        retry: RetryParams | None = None,
    ) -> None:
        self._clock = clock
        self._fleet = fleet
        self._router = router
        self._admission = Admission(fleet, router, params, rng)
        self._budget = Budget(retry or RetryParams())
        self._ids = count(1)
        self.waiters: dict[int, asyncio.Future[Answer]] = {}
        self._timer: Timer | None = None
        self._timer_at: float | None = None

    def configure(
        self, router: TracingRouter, params: PolicyParams, retry: RetryParams, names: Names | None = None
    ) -> None:
        """Another policy from now on, also for those who wait; and other backends that may serve them."""
        self._router = router
        self._budget.params = retry
        self._admission.configure(self._clock.now(), router, params, names)
        self.pump()

    def waiting(self) -> dict[tuple[str, int], int]:
        """(tier, priority) → how many are in line."""
        return self._admission.waiting()

    # -- requests

    async def enter(
        self,
        facts: RequestFacts,
        names: Iterable[str],
        pinned: str | None,
        queued: Callable[[Wait], None],
        ident: str = "",
        *,
        traced: bool = True,
    ) -> Pass | Refused:
        """Until the request is let in or turned away. `queued`: told, at once, that it has to wait. ident: its id, and
        traced: whether its trace is wanted here: for a gate that is elsewhere (`remote`)."""
        made = self.offer(facts, names, pinned)
        if not isinstance(made, InLine):
            return made
        queued(made.wait)
        return await self.wait(made)

    def offer(self, facts: RequestFacts, names: Iterable[str], pinned: str | None) -> Pass | Refused | InLine:
        """`enter`, for who does not wait here: who is in line is given to `wait`."""
        id = next(self._ids)
        now = self._clock.now()
        verdict: Verdict = self._admission.offer(now, id, facts, names, pinned=pinned)
        if isinstance(verdict, Wait):
            self._router.forget()
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            self.waiters[id] = answer
            self._arm()
            return InLine(id, facts, verdict, answer)
        if isinstance(verdict, Go):
            self._budget.sent(now, verdict.view.name)
        return self._answer(id, facts, *self._traced(verdict))

    async def wait(self, one: InLine) -> Pass | Refused:
        """Until its wait is over."""
        try:
            await one.answer
        except asyncio.CancelledError:
            self.leave(one)
            raise
        return self.called(one)

    def called(self, one: InLine) -> Pass | Refused:
        """Its wait is over (`answer` is done): what came of it."""
        self.waiters.pop(one.id, None)
        verdict, trace = one.answer.result()
        if isinstance(verdict, Go):
            self._budget.sent(self._clock.now(), verdict.view.name)
        return self._answer(one.id, one.facts, verdict, trace)

    def leave(self, one: InLine) -> None:
        """It does not wait any more, in place of `called`."""
        self.waiters.pop(one.id, None)
        if one.answer.done() and not one.answer.cancelled():
            if isinstance(one.answer.result()[0], Go):  # let in, and gone in the same moment
                self.finish(one.id, Result(ok=False))
        else:
            one.answer.cancel()
            self._admission.withdraw(self._clock.now(), one.id)
            self.pump()

    async def again(
        self,
        facts: RequestFacts,
        names: Iterable[str],
        *,
        tried: frozenset[str] = _NONE,
        pinned: str | None = None,
        larger_than: int | None = None,
        pays: str | None = None,
        ident: str = "",
    ) -> Pass | Refused | None:
        """`another`, where it may have to be asked for."""
        return self.another(facts, names, tried=tried, pinned=pinned, larger_than=larger_than, pays=pays)

    def another(
        self,
        facts: RequestFacts,
        names: Iterable[str],
        *,
        tried: frozenset[str] = _NONE,
        pinned: str | None = None,
        larger_than: int | None = None,
        pays: str | None = None,
    ) -> Pass | Refused | None:
        """A further attempt of a request that was let in before. pays: the backend that failed, where the attempt has to be
        paid for; None is returned when it cannot be."""
        now = self._clock.now()
        if pays is not None and not self._budget.allows(now, pays):
            return None
        id = next(self._ids)
        verdict = self._admission.again(
            now, id, facts, names, tried=tried, pinned=pinned, larger_than=larger_than
        )
        if pays is not None and isinstance(verdict, Go):
            self._budget.retried(now, pays)
        return self._answer(id, facts, *self._traced(verdict))

    def beside(
        self,
        facts: RequestFacts,
        names: Iterable[str],
        then: Callable[[Pass | None], None],
        *,
        tried: frozenset[str],
        ident: str = "",
    ) -> None:
        """A second attempt of a request beside one that runs: `then` is called with it, with None if nobody would start it
        at once."""
        id = next(self._ids)
        go = self._admission.beside(self._clock.now(), id, facts, names, tried=tried)
        then(None if go is None else self._pass(id, facts, *self._traced(go)))

    def _traced(self, verdict: V) -> tuple[V, Trace | None]:
        trace = self._router.take(verdict.decision)
        self._router.forget()
        return verdict, trace

    def _answer(
        self, id: int, facts: RequestFacts, verdict: Go | Shed, trace: Trace | None
    ) -> Pass | Refused:
        return Refused(verdict, trace) if isinstance(verdict, Shed) else self._pass(id, facts, verdict, trace)

    def _pass(self, id: int, facts: RequestFacts, verdict: Go, trace: Trace | None) -> Pass:
        timer, forecast = None, verdict.view.forecast
        if not facts.stream and forecast is not None:
            timer = self._clock.call_at(self._clock.now() + forecast.ttft, partial(self.first_token, id))
        return Pass(self, id, verdict, timer, trace)

    # -- what happens on the backends

    def first_token(self, id: int) -> None:
        self._fleet.first_token(self._clock.now(), id)
        self.pump()

    def finish(self, id: int, result: Result) -> None:
        self._fleet.finish(self._clock.now(), id, result)
        self.pump()

    def pump(self) -> None:
        """Wake those whose wait is over. Cheap when nobody waits."""
        if not self.waiters:
            return
        for id, verdict in self._admission.advance(self._clock.now()):
            answer = self.waiters.get(id)
            assert not isinstance(verdict, Wait)
            if answer is not None and not answer.done():
                answer.set_result((verdict, self._router.take(verdict.decision)))
            elif isinstance(verdict, Go):  # its task is being cancelled, and has not run since
                self._fleet.finish(self._clock.now(), id, Result(ok=False))
        self._router.forget()
        self._arm()

    def _arm(self) -> None:
        """One timer, for the next wait that ends by itself."""
        at = self._admission.next_event_at() if self.waiters else None
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        if at is not None:
            # Never at once: whatever admission expects, a wait must not turn into a spin.
            self._timer = self._clock.call_at(max(at, self._clock.now() + SOONEST), self._fire)
        else:
            self._timer = None

    def _fire(self) -> None:
        self._timer = self._timer_at = None
        self.pump()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timer_at = None
