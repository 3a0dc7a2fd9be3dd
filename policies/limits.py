"""What a key, a tenant or a model may use: requests and tokens a minute, requests at once, budgets a day and a month.

What users of OpenAI expect, and what happens here:

- Per minute is a bucket that refills all the time, not a window of the clock. A full minute's quota may be used at
  once; from then on it comes back evenly, a share of N ÷ 60 each second. Nothing happens at a full minute, so nobody gets
  twice the quota around one, and who has to wait, waits as little as can be. Within any T seconds at most
  N + N × T ÷ 60 are let in. "Reset" is, as in OpenAI's headers, when the bucket would be full again.
- Requests are counted when they are let in, and stay counted however they end. A refused one is not counted.
- Tokens are reserved when a request is let in, and settled when it ends: what it did not need is given back, and what it
  took beyond the reserve is taken too. A bucket may owe by that, and a budget may be overdrawn; the next minute, day or
  month begins with the debt. So over time nobody gets more than is allowed.
- Requests at once are those let in and not settled.
- Days and months are those of the calendar, in UTC. A request counts for the day in which it ends.

Rules: all or nothing: a request that one limit refuses takes nothing of another. Whole numbers only (microseconds, tokens,
billionths of the unit of money), so that "exactly" holds. `now` is monotonic seconds, `wall` seconds since the epoch;
either may stand still, and going back is standing still. An account's quota may change at any time: what was used
stays used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple

from policies.frozen import frozen

MICROS = 1_000_000
MINUTE = 60 * MICROS
DAY = 86_400
MOST_SPANS = 400
"""Days or months that a refusal looks ahead."""
BILLION = 1_000_000_000
"""Money is counted in billionths of its unit: a token at 0.001 a million is one."""


class LimitKind(StrEnum):
    """What can be limited, by the name of its key in the configuration. Closed."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENT = "concurrent_requests"
    TOKENS_DAY = "tokens_per_day"
    TOKENS_MONTH = "tokens_per_month"
    COST_DAY = "cost_per_day"
    COST_MONTH = "cost_per_month"


SCOPES = ("key", "tenant", "model")
"""Whose accounts there are."""
BUDGETS = (LimitKind.TOKENS_DAY, LimitKind.TOKENS_MONTH, LimitKind.COST_DAY, LimitKind.COST_MONTH)
COSTS = frozenset({LimitKind.COST_DAY, LimitKind.COST_MONTH})
_MONTHS = frozenset({LimitKind.TOKENS_MONTH, LimitKind.COST_MONTH})


@dataclass(frozen=True, slots=True)
class Quota:
    """What one key, tenant or model may use; None: no limit. Costs are in the unit of the prices."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    cost_per_day: float | None = None
    cost_per_month: float | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, kind) is not None for kind in LimitKind)


class Amount(NamedTuple):
    """tokens, and what they cost in billionths."""

    tokens: int
    cost: int = 0


NOTHING = Amount(0)


@frozen
class Refusal:
    """Which limit does not take the request. account: whose, as a place in the list. limit, used, asked: requests, tokens or
    billionths. seconds: until it would, if nobody else came, rounded up; None: never, it is larger than the limit.
    running: room comes when one that runs ends, nobody knows when; it is worth asking again after `seconds`."""

    kind: LimitKind
    account: int
    limit: int
    used: int
    asked: int
    seconds: int | None
    running: bool = False


Standing = tuple[int, int, int]
"""A bucket's state: its size, what is left of it, microseconds until it is full again."""


class Bucket:
    """So many a minute, refilled all the time. `used` is what has not come back, in units of a 60 millionth: then `limit`
    units come back each microsecond, and `full` units are all. It is as of `at`."""

    __slots__ = ("at", "full", "limit", "used")

    def __init__(self, limit: int) -> None:
        self.used = self.at = 0
        self.resize(limit)

    def resize(self, limit: int) -> None:
        self.limit = limit
        self.full = limit * MINUTE

    def refill(self, at: int) -> None:
        if at > self.at:
            used = self.used - (at - self.at) * self.limit
            self.used = used if used > 0 else 0
            self.at = at

    def wait(self, amount: int) -> int:
        """Microseconds until so much more fits; 0: it does."""
        over = self.used + amount * MINUTE - self.full
        return -(-over // self.limit) if over > 0 else 0


class Budget:
    """So much a day or a month. begins, ends: of the span that `spent` belongs to. costs: in money."""

    __slots__ = ("begins", "costs", "ends", "kind", "limit", "spent")

    def __init__(self, kind: LimitKind, limit: int) -> None:
        self.kind, self.limit = kind, limit
        self.costs = kind in COSTS
        self.begins = self.ends = self.spent = 0

    def resume(self, begins: int, spent: int) -> None:
        """Go on with what was spent in the span that began then."""
        self.begins, self.ends = span(self.kind, begins)
        self.spent = spent

    def roll(self, wall: float) -> None:
        """To the span of this moment; what was overdrawn goes along, less the limit of each span since."""
        while wall >= self.ends:
            if self.spent <= self.limit:
                self.spent = 0
                self.begins, self.ends = span(self.kind, wall)
            else:
                self.spent -= self.limit
                self.begins, self.ends = span(self.kind, self.ends)

    def fits(self, wall: float, held: int, amount: int) -> bool:
        """Who asks for nothing (a page, a count of tokens) does not fit either, once nothing is left."""
        if wall >= self.ends:
            self.roll(wall)
        used = self.spent + held
        return used + amount <= self.limit and used < self.limit

    def wait(self, wall: float, held: int, amount: int) -> int:
        """Seconds until the span in which so much fits, when all that is held is spent by then. `amount` is within the
        limit."""
        over = max(0, self.spent + held - self.limit)
        ends = self.ends
        for _ in range(min(MOST_SPANS, -(-(over + max(1, amount) - self.limit) // self.limit))):
            ends = span(self.kind, ends)[1]
        return max(1, -int((wall - ends) // 1))


def span(kind: LimitKind, wall: float) -> tuple[int, int]:
    """When the day or month of this moment begins and when it ends, in UTC."""
    if kind not in _MONTHS:
        begins = int(wall // DAY) * DAY
        return begins, begins + DAY
    first = datetime.fromtimestamp(wall, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    year, month = (first.year + 1, 1) if first.month == 12 else (first.year, first.month + 1)
    return int(first.timestamp()), int(first.replace(year=year, month=month).timestamp())


class Account:
    """What one key, tenant or model uses. changed: since somebody last looked, for budgets that are kept."""

    __slots__ = (
        "_most",
        "budgets",
        "changed",
        "held_cost",
        "held_tokens",
        "quota",
        "requests",
        "running",
        "tokens",
    )

    def __init__(self, quota: Quota) -> None:
        self.quota = Quota()
        self._most: int | None = None
        self.running = self.held_tokens = self.held_cost = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.budgets: list[Budget] = []
        self.changed = False
        self.configure(quota)

    def configure(self, quota: Quota) -> None:
        """Another quota from now on."""
        if quota == self.quota:
            return
        self.quota = quota
        self._most = quota.concurrent_requests
        self.requests = _resized(self.requests, quota.requests_per_minute)
        self.tokens = _resized(self.tokens, quota.tokens_per_minute)
        before = {budget.kind: budget for budget in self.budgets}
        self.budgets = []
        for kind in BUDGETS:
            value = getattr(quota, kind)
            if value is not None:
                limit = max(1, round(value * BILLION)) if kind in COSTS else value
                budget = before.get(kind) or Budget(kind, limit)
                budget.limit = limit
                self.budgets.append(budget)

    def refusals(self, wall: float, ask: Amount, place: int) -> Iterator[Refusal]:
        """Of each limit that the request does not fit into, as of the last `refill`."""
        most = self._most
        if most is not None and self.running >= most:
            yield Refusal(LimitKind.CONCURRENT, place, most, self.running, 1, 1, running=True)
        for kind, bucket, amount in (
            (LimitKind.REQUESTS, self.requests, 1),
            (LimitKind.TOKENS, self.tokens, ask.tokens),
        ):
            if bucket is not None and (wait := bucket.wait(amount)):
                seconds = -(-wait // MICROS) if amount <= bucket.limit else None
                yield Refusal(kind, place, bucket.limit, -(-bucket.used // MINUTE), amount, seconds)
        for budget in self.budgets:
            held, amount = (self.held_cost, ask.cost) if budget.costs else (self.held_tokens, ask.tokens)
            if not budget.fits(wall, held, amount):
                used = budget.spent + held
                running = budget.fits(wall, 0, amount)
                seconds = 1 if running else budget.wait(wall, held, amount)
                never = amount > budget.limit
                yield Refusal(
                    budget.kind, place, budget.limit, used, amount, None if never else seconds, running
                )

    def refill(self, at: int) -> None:
        if self.requests is not None:
            self.requests.refill(at)
        if self.tokens is not None:
            self.tokens.refill(at)

    def fits(self, at: int, wall: float, ask: Amount) -> bool:
        """As `refusals`, without saying why: most requests fit. Refills, too. Written out: every request pays for it."""
        most = self._most
        fits = most is None or self.running < most
        bucket = self.requests
        if bucket is not None:
            used, past = bucket.used, at - bucket.at
            if past > 0:
                used -= past * bucket.limit
                bucket.used = used = used if used > 0 else 0
                bucket.at = at
            if used + MINUTE > bucket.full:
                fits = False
        bucket = self.tokens
        if bucket is not None:
            used, past = bucket.used, at - bucket.at
            if past > 0:
                used -= past * bucket.limit
                bucket.used = used = used if used > 0 else 0
                bucket.at = at
            if used + ask[0] * MINUTE > bucket.full:
                fits = False
        if fits and self.budgets:
            for budget in self.budgets:
                held, amount = (self.held_cost, ask[1]) if budget.costs else (self.held_tokens, ask[0])
                if not budget.fits(wall, held, amount):
                    return False
        return fits

    def take(self, ask: Amount) -> None:
        """As of the last `refill`."""
        tokens, cost = ask
        self.running += 1
        self.held_tokens += tokens
        self.held_cost += cost
        if self.requests is not None:
            self.requests.used += MINUTE
        if self.tokens is not None:
            self.tokens.used += tokens * MINUTE

    def settle(self, at: int, wall: float, ask: Amount, used: Amount) -> None:
        tokens, cost = ask
        self.running -= 1
        self.held_tokens -= tokens
        self.held_cost -= cost
        bucket = self.tokens
        if bucket is not None and (beyond := used[0] - tokens):
            past, owed = at - bucket.at, bucket.used
            if past > 0:
                owed -= past * bucket.limit
                owed = owed if owed > 0 else 0
                bucket.at = at
            owed += beyond * MINUTE
            bucket.used = owed if owed > 0 else 0
        for budget in self.budgets:
            if wall >= budget.ends:
                budget.roll(wall)
            budget.spent += used.cost if budget.costs else used.tokens
            self.changed = True


def _resized(bucket: Bucket | None, limit: int | None) -> Bucket | None:
    if limit is None:
        return None
    if bucket is None:
        return Bucket(limit)
    bucket.resize(limit)
    return bucket


def micros(now: float) -> int:
    return round(now * MICROS)


def enter(accounts: Sequence[Account], now: float, wall: float, ask: Amount) -> Refusal | None:
    """Let a request in that all of these pay for, and take what it asks. A refusal names the limit that frees last."""
    at = round(now * MICROS)
    fits = True
    for account in accounts:
        if not account.fits(at, wall, ask):  # each is refilled
            fits = False
    if fits:
        for account in accounts:
            account.take(ask)
        return None
    return refusal(accounts, wall, ask)


def refusal(accounts: Sequence[Account], wall: float, ask: Amount) -> Refusal | None:
    """The limit that does not take the request, of several the one that frees last, as of the last `refill`."""
    found = [r for place, account in enumerate(accounts) for r in account.refusals(wall, ask, place)]
    return max(found, key=lambda r: (r.seconds is None, r.seconds or 0, not r.running), default=None)


def settle(accounts: Iterable[Account], now: float, wall: float, ask: Amount, used: Amount) -> None:
    """A request that was let in has ended: what it asked for then, and what it used in the end."""
    at = round(now * MICROS)
    for account in accounts:
        account.settle(at, wall, ask, used)


def usage(account: Account, now: float, wall: float) -> dict[str, float]:
    """How far each of its limits is used now, by its name: requests and tokens in the last minute, what runs, and of budgets
    what is spent and what is held for those that run. Money in its unit."""
    used: dict[str, float] = {}
    account.refill(micros(now))
    for kind, bucket in ((LimitKind.REQUESTS, account.requests), (LimitKind.TOKENS, account.tokens)):
        if bucket is not None:
            used[kind.value] = -(-bucket.used // MINUTE)
    if account.quota.concurrent_requests is not None:
        used[LimitKind.CONCURRENT.value] = account.running
    for budget in account.budgets:
        budget.roll(wall)
        if budget.costs:
            used[budget.kind.value] = (budget.spent + account.held_cost) / BILLION
        else:
            used[budget.kind.value] = budget.spent + account.held_tokens
    return used


def standings(accounts: Iterable[Account]) -> tuple[Standing | None, Standing | None]:
    """Of requests and of tokens a minute, where the least is left, as of the last `enter`. None: nobody limits that."""
    requests: Standing | None = None
    tokens: Standing | None = None
    for account in accounts:
        bucket = account.requests
        if bucket is not None and (requests is None or (bucket.full - bucket.used) // MINUTE < requests[1]):
            used = bucket.used
            left = bucket.full - used
            requests = bucket.limit, left // MINUTE if left > 0 else 0, -(-used // bucket.limit)
        bucket = account.tokens
        if bucket is not None and (tokens is None or (bucket.full - bucket.used) // MINUTE < tokens[1]):
            used = bucket.used
            left = bucket.full - used
            tokens = bucket.limit, left // MINUTE if left > 0 else 0, -(-used // bucket.limit)
    return requests, tokens
