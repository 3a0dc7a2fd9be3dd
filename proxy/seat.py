"""The owner's side of one worker: what it was given, and what it said last (`channel`).

Rules
1. What a worker was given (places, turns in line, grants) is held under the number under which it asked. Whatever is held
   when its channel ends is given back at once, however it ended.
2. What it asks is answered in the same step, unless it has to wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from policies import Decision, RequestFacts, Result, Shed, ShedReason, Tier
from policies.limits import NOTHING, Amount
from policies.retry import Failure
from proxy.channel import ASKS, Channel, Kind, Message, pack
from proxy.clock import Clock
from proxy.config import Config
from proxy.errors import Outcome, ProxyError
from proxy.explain import Memory, Story
from proxy.gate import Gate, InLine, Pass, Refused
from proxy.ledger import Entry, Ledger, LocalLedger, Names
from proxy.merge import Page, read
from proxy.messages import Plain, entry_out, facts_in, go_out, shed_out, trace_out
from proxy.pool import Backend, Pool

log = logging.getLogger("tierline.workers")

HEARD_SECONDS = 5.0
"""A worker that has not reported for so long says nothing of its streams."""
_NOBODY = Refused(Shed(ShedReason.NO_BACKEND, 0, Decision(None, None)), None)
_LEFT = Result(ok=False)
_INTERNAL = ProxyError(Outcome.INTERNAL, 500, "internal error", type="server_error")


@dataclass(slots=True, eq=False)
class Shared:
    """What workers ask for. told: (who, what) a stored response is of, for all. page: the metrics of all."""

    config: Config
    clock: Clock
    gate: Gate
    pool: Pool
    ledger: Ledger
    memory: Memory
    told: Callable[[Seat, Plain], None]
    page: Callable[[str], Awaitable[tuple[bytes, str]]]
    tiers: dict[str, Tier] = field(init=False)

    def __post_init__(self) -> None:
        self.configure(self.config)

    def configure(self, config: Config) -> None:
        self.config = config
        self.tiers = {name: tier.tier(name) for name, tier in config.tiers.items()}


@dataclass(frozen=True, slots=True)
class Grant:
    names: Names
    ask: Amount


class Seat:
    """ready: it takes connections. left: it was told to end, by somebody else. connections: that its clients hold, as far as
    is known. lost: called when the channel has ended, after everything was given back."""

    def __init__(self, shared: Shared, lost: Callable[[], None]) -> None:
        self._shared = shared
        self._lost = lost
        self.ready = self.left = False
        self.started = asyncio.Event()
        self.connections = 0
        self.page: Page = {}
        self._text: asyncio.Future[None] | None = None
        self._held: dict[int, Pass | InLine | Grant | asyncio.Task[None]] = {}
        self._reported_at = 0.0
        self._backends: dict[str, tuple[int, float | None]] = {}
        handlers: dict[int, Callable[..., None]] = {
            Kind.ENTER: self._enter,
            Kind.AGAIN: self._again,
            Kind.BESIDE: self._beside,
            Kind.LIMIT: self._limit,
            Kind.PAGE: self._page,
            Kind.SYNC: self._sync,
            Kind.FIRST: self._first,
            Kind.FINISH: self._finish,
            Kind.GONE: self._gone,
            Kind.SETTLE: self._settle,
            Kind.ANSWERED: self._answered,
            Kind.FAILED: self._failed,
            Kind.FULL: self._full,
            Kind.JUDGED: shared.pool.judge,
            Kind.LEARNT: self._learnt,
            Kind.REPORT: self._report,
            Kind.TEXT: self._said,
            Kind.READY: self._ready,
            Kind.LEAVING: self._leaving,
            Kind.CLOSED: self._closed,
        }
        self.channel = Channel(shared.clock, handlers, self._ended, self._failed_at)
        self.say = self.channel.say

    @property
    def held(self) -> int:
        """How much it was given."""
        return len(self._held)

    # -- requests

    def _facts(self, plain: Plain) -> tuple[RequestFacts, tuple[str, ...]] | None:
        """None: what it asks for is configured no more."""
        shared = self._shared
        facts, names = facts_in(plain, shared.tiers), shared.pool.places.get(plain[0])
        return None if facts is None or names is None else (facts, names)

    def _enter(self, number: int, ident: str, traced: bool, plain: Plain, pinned: str | None) -> None:
        found = self._facts(plain)
        made = self._shared.gate.offer(*found, pinned) if found is not None else _NOBODY
        if isinstance(made, InLine):
            self._held[number] = made
            self.say(Kind.WAIT, number, made.wait.seconds, str(made.wait.reason.value))
            since = self._shared.clock.now()
            made.answer.add_done_callback(partial(self._called, number, ident, traced, made, since))
        else:
            self._entered(number, ident, traced, made, 0.0)

    def _called(
        self, number: int, ident: str, traced: bool, one: InLine, since: float, _: asyncio.Future[Any]
    ) -> None:
        if self._held.get(number) is one:  # else it has left
            del self._held[number]
            waited = self._shared.clock.now() - since
            self._entered(number, ident, traced, self._shared.gate.called(one), waited)

    def _entered(self, number: int, ident: str, traced: bool, made: Pass | Refused, waited: float) -> None:
        if made.trace is not None:
            self._shared.memory.keep(ident, Story(self._shared.config.policy_digest, waited, (made.trace,)))
        if isinstance(made, Pass):
            self._held[number] = made
            trace = trace_out(made.trace) if traced else None
            self.say(Kind.GO, number, *go_out(made.go), trace, bool(self._shared.gate.waiters))
        else:
            self._answer(number, made, traced)

    def _answer(self, number: int, made: Pass | Refused | None, traced: bool) -> None:
        if isinstance(made, Pass):
            self._held[number] = made
            trace = trace_out(made.trace) if traced else None
            self.say(Kind.GO, number, *go_out(made.go), trace, bool(self._shared.gate.waiters))
        elif made is not None:
            self.say(Kind.SHED, number, *shed_out(made.shed), trace_out(made.trace) if traced else None)
        else:
            self.say(Kind.NOTHING, number)

    def _again(
        self,
        number: int,
        ident: str,
        plain: Plain,
        tried: tuple[str, ...],
        pinned: str | None,
        larger_than: int | None,
        pays: str | None,
    ) -> None:
        found = self._facts(plain)
        made: Pass | Refused | None = _NOBODY
        if found is not None:
            gate = self._shared.gate
            made = gate.another(
                *found, tried=frozenset(tried), pinned=pinned, larger_than=larger_than, pays=pays
            )
        self._also(ident, made)
        self._answer(number, made, True)

    def _beside(self, number: int, ident: str, plain: Plain, tried: tuple[str, ...]) -> None:
        def then(made: Pass | None) -> None:
            self._also(ident, made)
            self._answer(number, made, True)

        found = self._facts(plain)
        if found is None:
            then(None)
        else:
            self._shared.gate.beside(*found, then, tried=frozenset(tried))

    def _also(self, ident: str, made: Pass | Refused | None) -> None:
        if made is not None and made.trace is not None:
            self._shared.memory.add(ident, made.trace)

    def _first(self, number: int) -> None:
        held = self._held.get(number)
        if isinstance(held, Pass):
            held.first_token()

    def _finish(self, number: int, *words: Any) -> None:
        held = self._held.pop(number, None)
        if isinstance(held, Pass):
            held.finish(Result(*words))

    def _gone(self, number: int) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            self._give_back(held)

    def _give_back(self, held: Pass | InLine | Grant | asyncio.Task[None]) -> None:
        if isinstance(held, Pass):
            held.finish(_LEFT)
        elif isinstance(held, InLine):
            self._shared.gate.leave(held)
        elif isinstance(held, Grant):
            self._shared.ledger.settle(held.names, held.ask, NOTHING)
        else:
            held.cancel()

    # -- limits

    def _limit(self, number: int, names: Names, tokens: int, cost: int) -> None:
        ask, ledger = Amount(tokens, cost), self._shared.ledger
        entering = ledger.enter(names, ask)
        if type(ledger) is LocalLedger:  # it never waits: no task is needed
            try:
                entering.send(None)
            except StopIteration as done:
                self._limited(number, Grant(names, ask), done.value)
            return
        self._held[number] = asyncio.ensure_future(self._limiting(number, Grant(names, ask), entering))

    async def _limiting(self, number: int, grant: Grant, entering: Awaitable[Entry]) -> None:
        try:
            entry = await entering
        except Exception as error:
            self._held.pop(number, None)
            self._raised(number, error)
            return
        self._held.pop(number, None)
        self._limited(number, grant, entry)

    def _raised(self, number: int, error: Exception) -> None:
        """Raised at the worker, too."""
        if not isinstance(error, ProxyError):
            log.error("what a worker asked failed inside the gateway", exc_info=error)
            error = _INTERNAL
        self.say(Kind.ERROR, number, pack(vars(error)))

    def _failed_at(self, message: Message) -> None:
        if message[0] in ASKS:
            self.say(Kind.ERROR, message[1], pack(vars(_INTERNAL)))

    def _limited(self, number: int, grant: Grant, entry: Entry) -> None:
        if entry[0] is None:
            self._held[number] = grant
        self.say(Kind.ENTRY, number, *entry_out(entry))

    def _settle(self, number: int, tokens: int, cost: int) -> None:
        held = self._held.pop(number, None)
        if isinstance(held, Grant):
            self._shared.ledger.settle(held.names, held.ask, Amount(tokens, cost))

    # -- what else it says

    def _backend(self, name: str, url: str) -> Backend | None:
        """None: it is another server by now, or none."""
        backend = self._shared.pool.backends.get(name)
        return backend if backend is not None and backend.spec.url == url else None

    def _answered(self, name: str, url: str) -> None:
        if (backend := self._backend(name, url)) is not None:
            self._shared.pool.answered(backend)

    def _failed(self, name: str, url: str, failure: str) -> None:
        if (backend := self._backend(name, url)) is not None:
            self._shared.pool.failed(backend, Failure(failure))

    def _full(self, name: str, url: str, seconds: float) -> None:
        if (backend := self._backend(name, url)) is not None:
            self._shared.pool.full(backend, seconds)

    def _learnt(self, *what: Any) -> None:
        self._shared.told(self, what)

    def _sync(self, number: int) -> None:
        self.say(Kind.NOTHING, number)

    def _page(self, number: int, accept: str) -> None:
        self._held[number] = asyncio.ensure_future(self._paged(number, accept))

    async def _paged(self, number: int, accept: str) -> None:
        try:
            text, content_type = await self._shared.page(accept)
        except Exception as error:
            self._held.pop(number, None)
            self._raised(number, error)
            return
        self._held.pop(number, None)
        self.say(Kind.PAGES, number, text, content_type)

    def _report(self, connections: int, backends: tuple[tuple[str, int, float | None], ...]) -> None:
        self.connections = connections
        self._reported_at = self._shared.clock.now()
        self._backends = {name: (opened, silent) for name, opened, silent in backends}

    def _closed(self) -> None:
        self.connections -= 1

    def opened(self, backend: str) -> int:
        """Connections that it holds to a backend."""
        return self._backends.get(backend, (0, None))[0]

    def heard(self, backend: str) -> float | None:
        """When the newest of its streams there was heard, as of its last report: it may have been heard since."""
        now = self._shared.clock.now()
        silent = self._backends.get(backend, (0, None))[1]
        if silent is None or now - self._reported_at > HEARD_SECONDS:
            return None
        return now - silent

    async def scrape(self, accept: str) -> None:
        """Its metrics as of now, in `page`."""
        if self._text is None:
            self._text = asyncio.get_running_loop().create_future()
            self.say(Kind.SCRAPE, accept)
        await asyncio.shield(self._text)

    def _said(self, text: bytes) -> None:
        self.page = read(text.decode())
        self._done()

    def _done(self) -> None:
        text, self._text = self._text, None
        if text is not None and not text.done():
            text.set_result(None)

    def _ready(self) -> None:
        self.ready = True
        self.started.set()

    def _leaving(self) -> None:
        self.ready, self.left = False, True

    def _ended(self) -> None:
        self.ready = False
        self.started.set()
        held, self._held = self._held, {}
        for one in held.values():
            self._give_back(one)
        self._backends = {}
        self._done()
        self._lost()


def newest(seats: list[Seat], backend: str) -> Iterator[float]:
    """When streams of a backend were last heard, worker by worker."""
    for seat in seats:
        if (heard := seat.heard(backend)) is not None:
            yield heard
