"""The ledger of several gateways: one account each, kept by the server that they share, and what happens while it is away.

Rules
1. What comes within one turn of the loop is one call; what comes while a call is under way is the next one. So a request
   waits for one round trip, two at most. `settle` waits for nothing.
2. Decisions are the server's. Beside it stands a `LocalLedger`: what the server said last. From it refusals are worded,
   budgets are kept in the store, and on it this gateway stands while it is alone.
3. The places that this gateway holds are a member's, with a lease of LEASE_SECONDS, renewed by every call and by a beat. A
   gateway that is killed gives them back when the lease is over. After a lost connection it joins as a new member and states
   what it holds; what the old one held, known or not, counts for nothing.
4. What ended is sent with a number. Whether a call arrived whose answer was lost, the next one asks: it is charged once.
   While the gateway is alone it is summed up, and sent when the server is back. Budgets are then those of both; of the
   buckets the fuller one counts.
5. Alone (`on_failure`): "local" by its own limits, from where the shared ones stood; "open" without any; "closed" lets
   nobody in whom a limit concerns. It is tried again every TRY_SECONDS; said is it once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping

import orjson

from policies import limits
from policies.limits import BUDGETS, MICROS, NOTHING, Account, Amount, LimitKind, Quota, Refusal
from proxy.clock import Clock
from proxy.config import SharedLimits
from proxy.errors import Outcome, ProxyError
from proxy.ledger import Entry, LocalLedger, Names
from proxy.sharedlink import Link, Lost

log = logging.getLogger("tierline.limits")

LEASE_SECONDS = 15.0
BEAT_SECONDS = 5.0
TRY_SECONDS = 0.5
MOST_ASKS = 256
"""In one call: it holds up everybody else's."""
STATE = 5 + 2 * len(BUDGETS)
"""Numbers of an account in an answer."""
NOT_ROOM = Refusal(LimitKind.CONCURRENT, 0, 0, 0, 1, 1, running=True)
"""Said where numbers beyond 2^53 hide which limit it is."""

Row = tuple[int, ...]


class _Ask:
    __slots__ = ("amount", "done", "names")

    def __init__(self, names: Names, amount: Amount, done: asyncio.Future[Entry | None]) -> None:
        self.names, self.amount, self.done = names, amount, done


class _Ended:
    """known: those of the accounts where the server knows of the place."""

    __slots__ = ("ask", "known", "names", "used")

    def __init__(self, names: Names, ask: Amount, used: Amount, known: set[str]) -> None:
        self.names, self.ask, self.used, self.known = names, ask, used, known

    def rows(self, place: Callable[[str], int]) -> Iterator[Row]:
        for name in self.names:
            if name in self.known:
                yield place(name), 1, *self.ask, self.used.tokens - self.ask.tokens, *self.used
            else:
                yield place(name), 0, 0, 0, 0, *self.used


class SharedLedger:
    """local: the ledger beside it. `start` before, `close` after use."""

    def __init__(self, settings: SharedLimits, clock: Clock, local: LocalLedger) -> None:
        self._how = settings.on_failure
        self._clock = clock
        self._local = local
        self._link = Link(settings, clock)
        self._process = secrets.token_hex(8)
        self._epoch = 0
        self._old: list[str] = []
        """Members that this gateway was, and the server may still believe in."""
        self.up = False
        """The server decides."""
        self._joined = False
        """It knows this member."""
        self._changed_at = clock.now()
        self._called_at = 0.0
        self._beating: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._beat_due = False
        self._asks: list[_Ask] = []
        self._ended: list[_Ended] = []
        self._held: dict[str, tuple[int, int, int]] = {}
        """Of each account what this gateway holds: places, tokens, cost."""
        self._stated: set[str] = set()
        """Accounts of which the server knows what this member holds."""
        self._unstated: set[str] = set()
        """Those of the others to be stated with the next call, whether it needs them or not."""
        self._owed: dict[str, Amount] = {}
        """By account, what was used and not sent."""
        self._unsure: dict[str, Amount] = {}
        """What was sent as `_seq`, and not answered."""
        self._seq = 0
        self._terms: dict[str, list[object]] = {}
        self._losses = 0
        self._away = 0.0
        self._alone = 0

    def configure(self, quotas: Mapping[str, Quota]) -> None:
        self._local.configure(quotas)
        self._terms = {}

    # -- a request ---------------------------------------------------------------------------------------------

    async def enter(self, names: Names, ask: Amount) -> Entry:
        """Raises ProxyError (503) where the server is away and nobody may come in without it."""
        if self.up:
            done: asyncio.Future[Entry | None] = asyncio.get_running_loop().create_future()
            self._asks.append(_Ask(names, ask, done))
            self._send()
            try:
                entry = await done
            except asyncio.CancelledError:
                if done.done() and not done.cancelled():
                    came = done.result()
                    if came is not None and came[0] is None:
                        self.settle(names, ask, NOTHING)  # it had come in already
                raise
            if entry is not None:
                return entry
        return await self._enter_alone(names, ask)

    async def _enter_alone(self, names: Names, ask: Amount) -> Entry:
        self._alone += 1
        if self._how == "closed":
            raise _closed()
        entry: Entry = None, None, None
        if self._how == "open":
            self._local.take(names, ask)
        else:
            entry = await self._local.enter(names, ask)
        if entry[0] is None:
            self._hold(names, 1, ask)
            self._changed_alone(names)
        return entry

    def settle(self, names: Names, ask: Amount, used: Amount) -> None:
        self._local.settle(names, ask, used)
        self._hold(names, -1, ask)
        if not self._joined:
            self._owe(names, used)
            self._changed_alone(names)
            return
        self._unstated.update([name for name in names if name not in self._stated])
        self._ended.append(_Ended(names, ask, used, self._stated.intersection(names)))
        self._send()

    def _hold(self, names: Names, count: int, ask: Amount) -> None:
        for name in names:
            running, tokens, cost = self._held.get(name, (0, 0, 0))
            if running + count:
                self._held[name] = running + count, tokens + count * ask.tokens, cost + count * ask.cost
            else:
                self._held.pop(name, None)

    def _changed_alone(self, names: Names) -> None:
        """What this member holds is not what it stated, if it did."""
        self._stated.difference_update(names)
        self._unstated.update(names)

    def _owe(self, names: Iterable[str], used: Amount) -> None:
        for name in names:
            before = self._owed.get(name, NOTHING)
            self._owed[name] = Amount(before.tokens + used.tokens, before.cost + used.cost)

    # -- calls -------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """With all that this turn of the loop still brings."""
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send_all(), name="shared limits")

    async def _send_all(self) -> None:
        failed = False
        try:
            while self.up and (self._asks or self._ended or self._unstated or self._owed or self._beat_due):
                asks, self._asks = self._asks[:MOST_ASKS], self._asks[MOST_ASKS:]
                try:
                    await self._call(asks)
                    failed = False
                except Lost as error:
                    self._asks = asks + self._asks
                    # Once more at once: a server that was started again, a connection that idled too long.
                    if failed or error.slow or not await self._join():
                        self._fall(error)
                    failed = True
        finally:
            self._sending = None

    async def _call(self, asks: list[_Ask], *, hello: bool = False, bye: bool = False) -> None:
        """One round trip. Raises Lost."""
        self._beat_due = False
        call: dict[str, object] = {"member": self._member, "lease": round(LEASE_SECONDS * MICROS)}
        if hello:
            call |= {"hello": True, "old": self._old[-100:]}
        if bye:
            call["bye"] = True
        try:
            answer = await self._link.call(self._body(asks, call, charge=not hello))
            if answer == b"lapsed":
                raise Lost("the lease was over, or the server has forgotten it")
        except Lost:
            self._part()
            raise
        self._called_at = self._clock.now()
        numbers = [int(word) for word in answer.split()]
        unsure, self._unsure = self._unsure, {}
        if hello:
            self._old = []
            if numbers[2] < self._seq:  # it had not arrived
                for name, used in unsure.items():
                    self._owe((name,), used)
        self._answer(asks, numbers)

    @property
    def _member(self) -> str:
        return f"{self._process}.{self._epoch}"

    def _body(self, asks: list[_Ask], call: dict[str, object], *, charge: bool) -> bytes:
        places: dict[str, int] = {}
        accounts: list[list[object]] = []

        def place(name: str) -> int:
            found = places.get(name)
            if found is None:
                found = places[name] = len(places) + 1
                accounts.append(self._account(name))
            return found

        if charge:
            ended, owed = self._ended, self._owed.copy()
            self._take_ended()
            self._unsure, self._owed = self._owed, {}
            rows = [row for one in ended for row in one.rows(place)]
            rows += [(place(name), 0, 0, 0, 0, *used) for name, used in owed.items()]
            if rows:
                self._seq += 1
                call["rows"] = rows
        for name in self._unstated:
            place(name)
        self._unstated.clear()
        wanted = [[[place(name) for name in ask.names], *ask.amount] for ask in asks]
        call |= {"accounts": accounts, "process": self._process, "seq": self._seq, "asks": wanted}
        return orjson.dumps(call)

    def _take_ended(self) -> None:
        """What ended is from now on what it used."""
        ended, self._ended = self._ended, []
        for one in ended:
            self._owe(one.names, one.used)

    def _account(self, name: str) -> list[object]:
        """Its limits, and if the server does not know it, what this gateway knows."""
        (account,) = self._local.accounts((name,))
        terms = self._terms.get(name)
        if terms is None:
            terms = self._terms[name] = _terms(name, account)
        if name in self._stated:
            return terms
        self._stated.add(name)
        return [*terms, self._state(name, account)]

    def _state(self, name: str, account: Account) -> list[int]:
        account.refill(limits.micros(self._clock.now()))
        buckets = [0 if one is None else one.used for one in (account.requests, account.tokens)]
        state = [*self._held.get(name, (0, 0, 0)), *buckets]
        budgets = {budget.kind: budget for budget in account.budgets}
        for kind in BUDGETS:
            budget = budgets.get(kind)
            if budget is None:
                state += [0, 0]
                continue
            budget.roll(self._clock.wall())
            unsent = [one.get(name, NOTHING) for one in (self._owed, self._unsure)]
            spent = budget.spent - sum(one.cost if budget.costs else one.tokens for one in unsent)
            state += [budget.begins, max(0, spent)]
        return state

    def _answer(self, asks: list[_Ask], numbers: list[int]) -> None:
        at, wall, place = limits.micros(self._clock.now()), numbers[0] + numbers[1] / MICROS, 3
        for ask in asks:
            let_in, place = numbers[place], place + 1
            accounts = self._local.accounts(ask.names)
            for account in accounts:
                _put(account, at, numbers[place : place + STATE])
                place += STATE
            if let_in:
                self._hold(ask.names, 1, ask.amount)
            if not ask.done.cancelled():
                refusal = None if let_in else limits.refusal(accounts, wall, ask.amount) or NOT_ROOM
                ask.done.set_result((refusal, *limits.standings(accounts)))
            elif let_in:  # whoever asked has left
                self.settle(ask.names, ask.amount, NOTHING)

    # -- the server comes and goes -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Join. A server that is away does not keep the gateway from starting."""
        if not await self._join():
            self._fall(self._why)
        self._beating = asyncio.get_running_loop().create_task(self._beat(), name="shared limits beat")

    async def _beat(self) -> None:
        while True:
            await self._clock.sleep(TRY_SECONDS)
            if not self.up:
                await self._join()
            elif self._sending is None and self._clock.now() - self._called_at >= BEAT_SECONDS:
                self._beat_due = True
                self._send()

    async def _join(self) -> bool:
        """As a new member, with what is held."""
        self._old.append(self._member)
        self._epoch += 1
        self._unstated |= self._held.keys()
        try:
            await self._call([], hello=True)
        except Lost as error:
            self._why = error
            return False
        self._joined = True
        if not self.up:
            if self._losses:
                away = self._clock.now() - self._changed_at
                self._away += away
                log.warning("limits are shared again, after %.1f s", away)
            self.up = True
        if self._owed or self._unstated:
            self._send()
        return True

    def _part(self) -> None:
        """The server may have forgotten this member."""
        self._joined = False
        self._stated.clear()
        self._take_ended()

    def _fall(self, error: Lost) -> None:
        """Alone from now on."""
        self.up = False
        self._losses += 1
        self._changed_at = self._clock.now()
        log.error("limits are not shared, each gateway is %s meanwhile: %s", _ALONE[self._how], error)
        for name, account in self._local.every():
            account.running, account.held_tokens, account.held_cost = self._held.get(name, (0, 0, 0))
        asks, self._asks = self._asks, []
        for ask in asks:
            if not ask.done.cancelled():
                ask.done.set_result(None)

    async def close(self) -> None:
        """Send what is left, and give everything back."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        if self._sending is not None:
            await asyncio.gather(self._sending, return_exceptions=True)
        if self.up:
            try:
                await self._call([], bye=True)
            except Lost as error:
                log.error("what was used of late could not be written: %s", error)
            self.up = self._joined = False
        await self._link.close()

    # -- what the metrics show

    def counters(self) -> Iterator[tuple[str, str, tuple[str, ...], list[tuple[tuple[str, ...], float]]]]:
        """(name, help, labels, values)."""
        yield (
            "tierline_shared_limits_losses",
            "Times that the server of shared limits was lost.",
            (),
            [((), self._losses)],
        )
        away = self._away + (0.0 if self.up else self._clock.now() - self._changed_at)
        text = "Seconds for which the server of shared limits was away."
        yield "tierline_shared_limits_away_seconds", text, (), [((), away)]
        text = "Requests that were let in or not without the server of shared limits."
        yield "tierline_shared_limits_alone", text, ("on_failure",), [((self._how,), self._alone)]


_ALONE = {
    "local": "on its own limits",
    "open": "without limits",
    "closed": "closed for whom a limit concerns",
}


def _closed() -> ProxyError:
    message = "Limits cannot be checked at present, so nobody is let in; please try again."
    return ProxyError(
        Outcome.LIMITED,
        503,
        message,
        type="server_error",
        code="limits_unavailable",
        headers=(("retry-after", "1"),),
        retry_after=1,
    )


def _terms(name: str, account: Account) -> list[object]:
    """As the script reads them."""
    quota = account.quota
    kept = {budget.kind: budget.limit for budget in account.budgets}
    first = quota.requests_per_minute, quota.tokens_per_minute, quota.concurrent_requests
    return [name, *(value or 0 for value in first), *(kept.get(kind, 0) for kind in BUDGETS)]


def _put(account: Account, at: int, state: list[int]) -> None:
    """What the server says of it."""
    account.running, account.held_tokens, account.held_cost = state[:3]
    for bucket, used in ((account.requests, state[3]), (account.tokens, state[4])):
        if bucket is not None:
            bucket.used, bucket.at = used, at
    for budget in account.budgets:
        place = 5 + 2 * BUDGETS.index(budget.kind)
        if state[place] != budget.begins:
            budget.resume(state[place], state[place + 1])
        else:
            budget.spent = state[place + 1]
