"""Limits on the request path: what a request is asked for when it comes in, and what it is charged when it has ended.

Rules
1. Asked for at entry, after the key and the estimate, before the gate: the estimated prompt, and of the answer `max_tokens`,
   at most the key's `reserve_tokens`. A page, a stored response and a count of tokens ask for none.
2. Charged at the end, once, however it ended: the usage that the backend reported. Nothing, if the client got nothing and
   did not leave by itself: shed, failed, refused by the backend. Where nobody reported, an estimate, marked as one: of a
   stream, the estimated prompt and the deltas seen, times the tokens that a delta holds of late; of any other answer,
   what was reserved.
3. Where nothing limits a request, it costs one look-up; where nothing is limited at all (`active`), nobody asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from functools import lru_cache

from policies.frozen import frozen
from policies.limits import BUDGETS, COSTS, NOTHING, Amount, LimitKind, Quota, Refusal, Standing
from proxy.access import Caller
from proxy.config import Config, Price
from proxy.endpoints import UNCOUNTED, Endpoint
from proxy.errors import ChargedBy, Outcome, ProxyError
from proxy.ledger import Ledger, LocalLedger, Names
from proxy.record import Record
from proxy.upstream import Headers
from proxy.wire.errors import Api

LEARN = 0.1
"""Weight of each stream in what a delta holds."""
ENOUGH_DELTAS = 8

_PER_TOKEN = 1000.0
"""A price of 1 a million tokens is so many billionths a token."""

_WORDS = {
    LimitKind.REQUESTS: "requests per minute",
    LimitKind.TOKENS: "tokens per minute",
    LimitKind.CONCURRENT: "concurrent requests",
    LimitKind.TOKENS_DAY: "tokens per day",
    LimitKind.TOKENS_MONTH: "tokens per month",
    LimitKind.COST_DAY: "money per day",
    LimitKind.COST_MONTH: "money per month",
}


Rate = tuple[float, float, float]
"""Billionths a token: of the prompt, of what of it was cached, of the answer."""


@frozen
class Grant:
    """A request was let in, and these accounts pay. prompt: of what was asked, the part before the answer. rate: None costs
    nothing."""

    names: Names
    ask: Amount
    prompt: int
    rate: Rate | None
    headers: Headers


class Limiter:
    """`configure` before use."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._names: Set[str] = frozenset()
        self.active = False
        """Something is limited."""
        self._paying: dict[tuple[str | None, str], Names] = {}
        self._rates: dict[str, Rate | None] = {}
        self._reserve = 0
        self._per_delta: dict[str, float] = {}
        self._refused: dict[tuple[str, str], int] = {}
        self._charged: dict[str, list[int]] = {}
        """By model: tokens by usage, and by estimate."""

    def configure(self, config: Config, quotas: Mapping[str, Quota]) -> None:
        """Limits, prices and reserve from now on. quotas: of `key:NAME`, `tenant:NAME` and `model:NAME`;
        who is not limited is not there."""
        self._ledger.configure(quotas)
        self._names = quotas.keys()
        self.active = bool(quotas)
        self._paying = {}
        self._rates = {name: rate(model.price) for name, model in config.models.items()}
        self._reserve = config.policy.output_reserve_tokens

    def _payers(self, caller: Caller, target: str) -> Names:
        """Which accounts pay for a request of this caller to this model."""
        every = (f"key:{caller.ident}", f"tenant:{caller.tenant}", f"model:{target}")
        names = self._paying[caller.ident, target] = tuple(name for name in every if name in self._names)
        return names

    async def enter(
        self, caller: Caller, target: str, endpoint: Endpoint, prompt: int, most: int | None, record: Record
    ) -> Grant | None:
        """Let in by every limit, or a ProxyError (429). None: nothing limits it. prompt: tokens, estimated. most: of the
        answer, as the client limits it."""
        names = self._paying.get((caller.ident, target))
        if names is None:
            names = self._payers(caller, target)
        if not names:
            return None
        rate, answer = self._rates[target], 0
        if endpoint.path in UNCOUNTED:
            prompt = 0
        elif endpoint.generates:
            answer = self._reserve if caller.reserve_tokens is None else caller.reserve_tokens
            answer = most if most is not None and most < answer else answer
        ask = Amount(prompt + answer, 0 if rate is None else cost(rate, prompt, 0, answer))
        ledger = self._ledger
        entry = (
            ledger.enter_now(names, ask) if type(ledger) is LocalLedger else await ledger.enter(names, ask)
        )
        refusal, requests, tokens = entry
        headers = _standing(requests, tokens)
        record.reserved_tokens = ask.tokens
        if refusal is None:
            return Grant(names, ask, prompt, rate, headers)
        scope = names[refusal.account].partition(":")[0]
        why = scope, refusal.kind.value
        self._refused[why] = self._refused.get(why, 0) + 1
        record.limit = ".".join(why)
        raise refused(names[refusal.account], refusal, headers)

    def settle(self, grant: Grant, record: Record) -> None:
        """The request has ended, and this is its record. To be called once."""
        ask = grant.ask
        used, by = self._used(grant, record) if ask.tokens else (NOTHING, ChargedBy.NOTHING)
        record.charged_tokens, record.charged_by = used.tokens, by
        self._ledger.settle(grant.names, ask, used)
        if used.tokens and record.target is not None:
            counts = self._charged.get(record.target)
            if counts is None:
                counts = self._charged[record.target] = [0, 0]
            counts[by is not ChargedBy.USAGE] += used.tokens

    def _used(self, grant: Grant, record: Record) -> tuple[Amount, ChargedBy]:
        outcome, deltas = record.outcome, 0
        ended = outcome is Outcome.OK
        if record.first_delta_at is not None:
            deltas = record.gaps.count + 1
        elif not ended and (record.dispatched_at is None or outcome not in _LEFT):
            return NOTHING, ChargedBy.NOTHING
        prompt, completion = record.prompt_tokens, record.completion_tokens
        # A message says at its beginning what it has used so far.
        if not (prompt is None and completion is None) and (ended or record.api != Api.MESSAGES):
            by, prompt, completion = ChargedBy.USAGE, prompt or 0, completion or 0
            if ended and deltas >= ENOUGH_DELTAS:
                self._learn(record.target or "", completion / deltas)
        elif record.stream:
            holds = self._per_delta.get(record.target or "", 1.0)
            by, prompt, completion = ChargedBy.ESTIMATE, grant.prompt, round(deltas * holds)
        else:
            return grant.ask, ChargedBy.ESTIMATE
        rate = grant.rate
        price = 0 if rate is None else cost(rate, prompt, record.cached_tokens or 0, completion)
        return Amount(prompt + completion, price), by

    def _learn(self, target: str, holds: float) -> None:
        """A stream ended, whose deltas held so many tokens each."""
        before = self._per_delta.get(target, 1.0)
        self._per_delta[target] = before + LEARN * (holds - before)

    # -- what the metrics show

    def counters(self) -> Iterator[tuple[str, str, tuple[str, ...], list[tuple[tuple[str, str], int]]]]:
        """(name, help, labels, values)."""
        yield (
            "tierline_limit_refusals",
            "Requests that a limit turned away, by whose and which.",
            ("scope", "limit"),
            [*self._refused.items()],
        )
        yield (
            "tierline_limit_charged_tokens",
            "Tokens that limits and budgets were charged, by how they are known.",
            ("model", "charged_by"),
            [
                ((model, by.value), count)
                for model, counts in self._charged.items()
                for by, count in zip((ChargedBy.USAGE, ChargedBy.ESTIMATE), counts, strict=True)
            ],
        )


_LEFT = frozenset({Outcome.CANCELLED, Outcome.CLIENT_TIMEOUT})


def rate(price: Price) -> Rate | None:
    if not (price.prompt or price.cached or price.completion):
        return None
    cached = price.prompt if price.cached is None else price.cached
    return price.prompt * _PER_TOKEN, cached * _PER_TOKEN, price.completion * _PER_TOKEN


def cost(rate: Rate, prompt: int, cached: int, completion: int) -> int:
    """In billionths of the unit of money. cached: part of the prompt, and no more than that."""
    if cached > prompt:
        cached = prompt
    return round((prompt - cached) * rate[0] + cached * rate[1] + completion * rate[2])


def refused(name: str, refusal: Refusal, headers: Headers) -> ProxyError:
    """What the client is told: which limit, how far it is used, and when there is room."""
    scope, _, whose = name.partition(":")
    kind = refusal.kind
    budget = kind in BUDGETS and not refusal.running
    limit, used, asked = (
        (f"{value / 1e9:g}" if kind in COSTS else str(value))
        for value in (refusal.limit, refusal.used, refusal.asked)
    )
    what = f"{scope} '{whose}' on {_WORDS[kind]}: limit {limit}, used {used}, requested {asked}."
    told = [(key.decode(), value.decode()) for key, value in headers]
    told.append(("x-tierline-limit", f"{scope}.{kind.value}"))
    if refusal.seconds is None:
        what = f"Request too large for {what} Shorten the prompt, or lower the limit of its answer."
        told.append(("x-should-retry", "false"))
    else:
        told.append(("retry-after", str(refusal.seconds)))
        if budget:
            what = f"You exceeded the budget of {what} It is renewed in {refusal.seconds} s."
            told.append(("x-should-retry", "false"))
        elif refusal.running:
            what = f"Rate limit reached for {what} There is room again when a request that runs has ended."
        else:
            what = f"Rate limit reached for {what} Please try again in {refusal.seconds} s."
    return ProxyError(
        Outcome.LIMITED,
        429,
        what,
        type="insufficient_quota" if budget else "rate_limit_error",
        code="insufficient_quota" if budget else "rate_limit_exceeded",
        headers=tuple(told),
        retry_after=refusal.seconds,
    )


def _standing(requests: Standing | None, tokens: Standing | None) -> Headers:
    """OpenAI's headers, of what is limited a minute. Written out: every request pays for it."""
    headers: Headers = []
    if requests is not None:
        limit, remaining, reset = requests
        headers += (
            (b"x-ratelimit-limit-requests", b"%d" % limit),
            (b"x-ratelimit-remaining-requests", b"%d" % remaining),
            (b"x-ratelimit-reset-requests", _reset(-(-reset // 1000))),
        )
    if tokens is not None:
        limit, remaining, reset = tokens
        headers += (
            (b"x-ratelimit-limit-tokens", b"%d" % limit),
            (b"x-ratelimit-remaining-tokens", b"%d" % remaining),
            (b"x-ratelimit-reset-tokens", _reset(-(-reset // 1000))),
        )
    return headers


@lru_cache(4096)
def _reset(millis: int) -> bytes:
    """Most are full again in no time, or ask as often as before."""
    return duration(millis * 1000)


def duration(micros: int) -> bytes:
    """As OpenAI writes one: `12ms`, `1s`, `8.64s`, `6m0s`, `1h0m0s`; rounded up to milliseconds."""
    millis = -(-micros // 1000)
    if 0 < millis < 1000:
        return b"%dms" % millis
    seconds, millis = divmod(millis, 1000)
    minutes, seconds = divmod(seconds, 60)
    text = b"%d" % seconds
    if millis:
        text += (b".%03d" % millis).rstrip(b"0")
    if minutes < 60:
        return b"%dm%bs" % (minutes, text) if minutes else text + b"s"
    return b"%dh%dm%bs" % (minutes // 60, minutes % 60, text)
