"""A worker's side of what the owner has: gate, pool, ledger, stored responses, metrics of all (`channel`).

Rules
1. Nothing is decided here. What the owner decides is exact, since it is the only one that decides.
2. A request whose client left says so (GONE), whether or not the answer was on its way: the owner frees what it was given.
3. What a request tells goes out with the other words of its turn of the loop; nobody waits for it.
4. When the owner is gone, whoever waits for it is told that the gateway stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any

from policies import PolicyParams, RequestFacts, Result, RetryParams, Wait
from policies.admission import Names as Renamed
from policies.limits import Amount, Quota
from policies.retry import Failure
from policies.trace import TracingRouter
from policies.types import ShedReason
from proxy.channel import Channel, Kind, Message, unpack
from proxy.clock import Clock
from proxy.errors import Outcome, ProxyError
from proxy.explain import Memory, Story
from proxy.gate import Gate, Pass, Refused
from proxy.keystore import Spent
from proxy.ledger import Entry, LocalLedger, Names
from proxy.messages import entry_in, facts_out, go_in, shed_in, trace_in
from proxy.owners import Owners
from proxy.pool import Backend, Pool

_NONE: frozenset[str] = frozenset()


class Link:
    """The channel to the owner, and who waits for what. gone: called when the owner is."""

    def __init__(self, clock: Clock, gone: Callable[[], None]) -> None:
        self._gone = gone
        self.crowded = False
        """Somebody waited for a place when the owner last said so."""
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._queued: dict[int, Callable[[Wait], None]] = {}
        self.lost = False
        self.handlers: dict[int, Callable[..., None]] = {
            Kind.GO: self._go,
            Kind.SHED: self._shed,
            Kind.WAIT: self._wait,
            Kind.NOTHING: self._nothing,
            Kind.ENTRY: self._entry,
            Kind.PAGES: self._pages,
            Kind.ERROR: self._error,
        }
        self.channel = Channel(clock, self.handlers, self._lost)
        self.say, self.mention = self.channel.say, self.channel.mention

    def ask(self, then: Callable[[int, Any], None], kind: int, *words: Any) -> None:
        """`then` is called with number and answer; None: there is none to be had."""
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda future: then(number, future.result()))
        self.say(kind, number, *words)
        if self.lost:
            self._tell(number, None)

    async def answer(
        self, kind: int, *words: Any, queued: Callable[[Wait], None] | None = None
    ) -> tuple[int, Any]:
        """(number, answer). Raises ProxyError when the owner is gone."""
        if self.lost:
            raise _stopping()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        self._asked[number] = future
        self.say(kind, number, *words)
        if queued is not None:
            self._queued[number] = queued
        try:
            said = await future
        except asyncio.CancelledError:
            self._asked.pop(number, None)
            self.say(Kind.GONE, number)
            raise
        finally:
            if queued is not None:
                self._queued.pop(number, None)
        if self.lost:
            raise _stopping()
        if isinstance(said, ProxyError):
            raise said
        return number, said

    def _lost(self) -> None:
        self.lost = True
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_result(None)
        self._gone()

    def _tell(self, number: int, said: Any) -> None:
        future = self._asked.pop(number, None)
        if future is not None and not future.done():  # done: cancelled, and its task has not run since
            future.set_result(said)

    def _go(self, number: int, *words: Any) -> None:
        self.crowded = words[7]
        future = self._asked.pop(number, None)
        if future is not None and not future.done():
            future.set_result(words)

    def _shed(self, number: int, reason: str, after: int, drops: Any, trace: bytes | None) -> None:
        self._tell(number, Refused(shed_in(reason, after, drops), trace_in(trace)))

    def _wait(self, number: int, seconds: float, reason: str) -> None:
        self.crowded = True
        queued = self._queued.get(number)
        if queued is not None:
            queued(Wait(seconds, ShedReason(reason)))

    def _nothing(self, number: int) -> None:
        self._tell(number, None)

    def _entry(self, number: int, *words: Any) -> None:
        self._tell(number, entry_in(*words))

    def _error(self, number: int, packed: bytes) -> None:
        self._tell(number, ProxyError.made_of(unpack(packed)))

    def _pages(self, number: int, *words: Any) -> None:
        self._tell(number, words)


def _stopping() -> ProxyError:
    message = "The gateway is shutting down; please send the request again."
    return ProxyError(Outcome.SHUTDOWN, 503, message, type="server_error", code="shutdown")


class RemoteGate(Gate):
    """The owner's gate. What it was made with is the owner's business."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def configure(
        self, router: TracingRouter, params: PolicyParams, retry: RetryParams, names: Renamed | None = None
    ) -> None:
        """The owner's is."""

    def waiting(self) -> dict[tuple[str, int], int]:
        return {}

    def pump(self) -> None:
        """The owner's is called there."""

    def close(self) -> None:
        """Nothing is held here."""

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
        words = ident, traced, facts_out(facts), pinned
        number, said = await self._link.answer(Kind.ENTER, *words, queued=queued)
        if isinstance(said, Refused):
            return said
        trace = said[6]
        return Pass(self, number, go_in(*said[:6]), None, None if trace is None else trace_in(trace))

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
        words = ident, facts_out(facts), tuple(tried), pinned, larger_than, pays
        return self._made(*await self._link.answer(Kind.AGAIN, *words))

    def beside(
        self,
        facts: RequestFacts,
        names: Iterable[str],
        then: Callable[[Pass | None], None],
        *,
        tried: frozenset[str],
        ident: str = "",
    ) -> None:
        def answered(number: int, said: Any) -> None:
            made = self._made(number, said)
            then(made if isinstance(made, Pass) else None)

        self._link.ask(answered, Kind.BESIDE, ident, facts_out(facts), tuple(tried))

    def _made(self, number: int, said: Any) -> Pass | Refused | None:
        if isinstance(said, ProxyError):  # of a second attempt beside the first
            return None
        if isinstance(said, tuple):
            return Pass(self, number, go_in(*said[:6]), None, trace_in(said[6]))
        assert said is None or isinstance(said, Refused)
        return said

    def first_token(self, id: int) -> None:
        link = self._link
        (link.say if link.crowded else link.mention)(Kind.FIRST, id)

    def finish(self, id: int, result: Result) -> None:
        r, link = result, self._link
        (link.say if link.crowded else link.mention)(
            Kind.FINISH, id, r.ok, r.prompt_tokens, r.completion_tokens, r.cached_tokens, r.calls_ok
        )


class MirrorPool(Pool):
    """The backends as the owner knows them, with connections of our own. What requests tell goes to the owner."""

    link: Link

    def answered(self, by: Backend) -> None:
        self.link.mention(Kind.ANSWERED, by.name, by.spec.url)

    def failed(self, by: Backend, failure: Failure) -> None:
        self.link.say(Kind.FAILED, by.name, by.spec.url, str(failure.value))

    def full(self, by: Backend, seconds: float) -> None:
        self.link.say(Kind.FULL, by.name, by.spec.url, seconds)

    def judge(self, name: str, sound: bool) -> None:
        self.link.say(Kind.JUDGED, name, sound)

    def snapshot(self) -> list[dict[str, object]]:
        """The owner's is shown."""
        return []

    def mirror(self, packed: bytes) -> None:
        """The owner says how they are."""
        now = self._clock.now()
        for name, health, draining, window, model in unpack(packed):
            backend = self.backends.get(name)
            if backend is None:
                continue
            backend.health, backend.draining = health, draining
            backend.window_tokens, backend.served_model = window, model
            usable = health.healthy or health.last_resort
            self.fleet.set_state(
                now,
                name,
                healthy=usable,
                suspect=health.last_resort,
                draining=draining or backend.leaving,
            )
        self._found(now)


def mirrored(pool: Pool) -> list[Message]:
    """What `MirrorPool.mirror` takes."""
    return [
        (name, backend.health, backend.draining, backend.window_tokens, backend.served_model)
        for name, backend in pool.backends.items()
    ]


class RemoteLedger(LocalLedger):
    """The owner's ledger. Budgets are loaded and kept there."""

    def __init__(self, link: Link, clock: Clock) -> None:
        super().__init__(clock)
        self._link = link
        self._numbers: dict[tuple[Names, Amount], list[int]] = {}

    def configure(self, quotas: Mapping[str, Quota]) -> None:
        """The owner's is."""

    async def enter(self, names: Names, ask: Amount) -> Entry:
        number, said = await self._link.answer(Kind.LIMIT, names, ask.tokens, ask.cost)
        entry: Entry = said
        if entry[0] is None:
            # Grants of the same accounts and amount are all the same to the owner, too: any of their numbers will do.
            self._numbers.setdefault((names, ask), []).append(number)
        return entry

    def settle(self, names: Names, ask: Amount, used: Amount) -> None:
        held = self._numbers[names, ask]
        self._link.say(Kind.SETTLE, held.pop(), used.tokens, used.cost)
        if not held:
            del self._numbers[names, ask]

    def load(self, rows: Iterable[Spent]) -> None:
        """The owner's is."""

    def changed(self) -> list[Spent]:
        return []

    def unsaved(self, rows: Iterable[Spent]) -> None:
        """Nothing was to be saved."""


class SharedOwners(Owners):
    """Every worker knows what each of them learns."""

    __slots__ = ("_link",)

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def learn(self, *what: Any) -> None:
        super().learn(*what)
        self._link.say(Kind.LEARNT, *what)
        self._link.channel.flush()  # the client may ask another worker with it as soon as it has it

    async def catch_up(self) -> bool:
        await self._link.answer(Kind.SYNC)
        return True


class NoMemory(Memory):
    """The owner remembers."""

    def keep(self, request_id: str, story: Story) -> None:
        """What it decided it knows."""
