"""What follows a failed attempt of a request: to whom it is told, whether there is another, and where that goes.

Rules
1. Made when a request's first attempt has failed; most requests never have one.
2. `policies.retry` says what may follow, the gate whether it can be paid for and where it goes. What is left
   for here is to ask them in this order, and to wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies import Failure, Retry
from policies.retry import Attempts
from proxy.classify import Classified
from proxy.errors import ProxyError
from proxy.gate import Pass, Refused
from proxy.pool import Backend
from proxy.record import Record
from proxy.refusals import rather

if TYPE_CHECKING:
    from proxy.handler import Gateway


class Failover:
    """Of one request. error: what the client is told if nothing follows. unfit: backends that cannot take it now. moves:
    what failed had given tokens that count, so that its work goes elsewhere and does not come twice: nobody pays for it."""

    __slots__ = ("_asked", "_attempts", "_gateway", "_record", "error", "moves", "unfit")

    def __init__(self, gateway: Gateway, record: Record, asked: Classified) -> None:
        self._gateway = gateway
        self._record = record
        self._asked = asked
        self._attempts = Attempts(gateway.retry)
        self.error: ProxyError | None = None
        self.unfit: frozenset[str] = frozenset()
        self.moves = False

    @property
    def failures(self) -> list[Failure]:
        """Of the attempts so far, in order."""
        return self._attempts.failures

    @property
    def tried(self) -> frozenset[str]:
        """Backends that failed, and are not asked again."""
        return self._attempts.tried

    @property
    def final(self) -> bool:
        """Other attempts were made before the one that the client is told of, and no header says when to come back."""
        return self._attempts.repeated and self.error is not None and self.error.retry_after is None

    async def after(
        self, backend: Backend, error: ProxyError, failure: Failure, *, events_sent: bool, shared: bool
    ) -> Pass | Refused | None:
        """One more attempt failed: where the next goes, at once or after a pause. None: there is none.

        shared: the backend was asked with a key that other requests use, too.
        """
        retry = self.failed(backend, error, failure, events_sent=events_sent, shared=shared)
        if retry is Retry.NO:
            return None
        now = self._gateway.clock.now()
        if retry is not Retry.OTHER_BACKEND:
            return await self._choose()
        return await self._elsewhere(now, None if self.moves else backend.name)

    def failed(
        self, backend: Backend, error: ProxyError, failure: Failure, *, events_sent: bool, shared: bool
    ) -> Retry:
        """One more attempt failed: noted, and what may follow."""
        gateway, now = self._gateway, self._gateway.clock.now()
        if failure is Failure.TIMEOUT and now >= self._over_at(backend.name):
            failure = Failure.LATE
        self._record.failures += ((backend.name, failure),)
        if self._record.trace is not None:
            self._record.trace.failed(backend.name, failure.value, now)
        self.error = rather(self.error, error)
        gateway.metrics.failed(backend.name, failure)
        gateway.pool.failed(backend, failure)
        if failure is Failure.BUSY and error.retry_after and shared:
            gateway.pool.full(backend, error.retry_after)
        return self._attempts.failed(
            now,
            backend.name,
            failure,
            first_event_sent=events_sent,
            window=backend.window_tokens or self._asked.facts.prompt.tokens,
            retry_after=error.retry_after,
        )

    async def _elsewhere(self, now: float, pays: str | None) -> Pass | Refused | None:
        gateway, asked = self._gateway, self._asked
        again = await self._choose(pays)
        if isinstance(again, Refused):
            until = min(map(self._over_at, self._names()), default=now)
            if asked.facts.deadline is not None:
                until = min(until, asked.facts.deadline)
            pause = self._attempts.go_back(now, until, gateway.rng)
            if pause is None:
                return again
            await gateway.clock.sleep(pause)
            again = await self._choose(pays)
        if again is None:
            gateway.metrics.retries_denied += 1
        return again

    async def _choose(self, pays: str | None = None) -> Pass | Refused | None:
        asked, attempts = self._asked, self._attempts
        return await self._gateway.gate.again(
            asked.facts,
            self._names(),
            tried=attempts.tried | self.unfit,
            pinned=asked.pinned,
            larger_than=attempts.larger_than,
            pays=pays,
            ident=self._record.request_id,
        )

    def _names(self) -> tuple[str, ...]:
        return self._gateway.pool.names(self._asked.route)

    def _over_at(self, backend: str) -> float:
        """When the time for the whole request is over."""
        return self._record.accepted_at + self._gateway.timeouts[backend].total
