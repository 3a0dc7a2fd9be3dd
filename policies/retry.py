"""Whether a failed attempt is followed by another, where to, and how soon.

Rules: one table. Nothing is retried once an event has gone to the client. A further attempt passes the same filters as
the first: no tier is ever lowered by a failure. It goes to another backend at once; those that failed get it again only
when no other can take it, after a pause, and only if they answered (BUSY, ERROR). `Failure` is closed; it says what
happened to the attempt, never whose request it was. It is also what the breaker reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from random import Random
from types import MappingProxyType


class Failure(StrEnum):
    """How one attempt on one backend failed. Closed."""

    CONNECT = "connect"  # refused, no route, name, TLS or time-out: nothing of the request was sent
    REUSED = "reused"  # a reused keep-alive connection died before a byte of the answer
    OVERFLOW = "overflow"  # the backend says that the prompt exceeds its window
    REJECTED = "rejected"  # another 4xx: would be the same elsewhere
    BUSY = "busy"  # 429, or 503 with Retry-After: more than it can take
    ERROR = "error"  # 5xx, error event, "abort"
    TIMEOUT = "timeout"  # no first token, or too long a gap
    LATE = "late"  # the time for the whole request is over
    CUT = "cut"  # the connection ended before the answer was whole
    MALFORMED = "malformed"  # not HTTP, not SSE, or not the endpoint's shape
    NO_CALL = "no_call"  # a whole answer without the tool call that the request demands


class Retry(StrEnum):
    """What to do after a failed attempt. Closed."""

    NO = "no"
    SAME_BACKEND = "same_backend"  # on a fresh connection
    OTHER_BACKEND = "other_backend"  # choose again with the failed one in `tried`
    AGAIN = "again"  # choose again among all, saying more clearly what is wanted
    LARGER_WINDOW = "larger_window"  # choose again with `larger_than` the failed one's window


@dataclass(frozen=True, slots=True)
class Rule:
    """What follows a failure, how often per request (None: as often as max_attempts allows), and whether the backend
    may be asked again after a pause."""

    retry: Retry
    times: int | None = None
    back: bool = False


# Failures that are not listed end the request.
RULES: Mapping[Failure, Rule] = MappingProxyType(
    {
        Failure.CONNECT: Rule(Retry.OTHER_BACKEND),
        Failure.REUSED: Rule(Retry.SAME_BACKEND, times=1),
        Failure.OVERFLOW: Rule(Retry.LARGER_WINDOW, times=1),
        Failure.BUSY: Rule(Retry.OTHER_BACKEND, back=True),
        Failure.ERROR: Rule(Retry.OTHER_BACKEND, back=True),
        Failure.TIMEOUT: Rule(Retry.OTHER_BACKEND, times=1),
        Failure.CUT: Rule(Retry.OTHER_BACKEND),
        Failure.MALFORMED: Rule(Retry.OTHER_BACKEND),
        Failure.NO_CALL: Rule(Retry.AGAIN, times=1),
    }
)


@dataclass(frozen=True, slots=True)
class RetryParams:
    """max_attempts: attempts per request, the first included; 1 never retries. backoff_seconds: the first pause before
    backends that failed are asked again is drawn from 0 to this, the next from 0 to twice that; 0: they are not.
    max_backoff_seconds: no pause is longer; who asks for a longer one (Retry-After) is not asked again. budget_share,
    budget_floor: see `policies.budget`; of the requests, and retries per second.
    """

    max_attempts: int = 3
    backoff_seconds: float = 0.1
    max_backoff_seconds: float = 2.0
    budget_share: float = 0.2
    budget_floor: float = 3.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError("max_attempts must be 1 or more")
        for name in ("backoff_seconds", "max_backoff_seconds", "budget_share", "budget_floor"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more")


def may_retry(failures: Sequence[Failure], first_event_sent: bool, params: RetryParams) -> Retry:
    """What follows the last of `failures`, this request's attempts so far in order (all of them failed).

    In order: an event has reached the client → no; the failure is not in the table → no; it has been
    retried as often as its rule allows → no; attempts used up → no; otherwise the rule's answer. That a
    backend is left to go to is the router's to say.
    """
    if first_event_sent or not failures:
        return Retry.NO
    rule = RULES.get(failures[-1])
    if rule is None:
        return Retry.NO
    if rule.times is not None and failures.count(failures[-1]) > rule.times:
        return Retry.NO
    if len(failures) >= params.max_attempts:
        return Retry.NO
    return rule.retry


class Attempts:
    """The failed attempts of one request, and what they leave open.

    tried: not to be asked now. larger_than: tokens that the window must exceed.
    """

    __slots__ = ("_params", "_ready", "failures", "larger_than", "tried")

    def __init__(self, params: RetryParams) -> None:
        self._params = params
        self._ready: dict[str, float] = {}  # when it may be asked again
        self.failures: list[Failure] = []
        self.tried: frozenset[str] = frozenset()
        self.larger_than: int | None = None

    @property
    def repeated(self) -> bool:
        """Somebody was asked again, so that asking once more is not the client's to do."""
        return len(self.failures) - self.failures.count(Failure.REUSED) > 1

    def failed(
        self,
        now: float,
        name: str,
        failure: Failure,
        *,
        first_event_sent: bool = False,
        window: int = 0,
        retry_after: float | None = None,
    ) -> Retry:
        """One more failed. window: tokens that it can take. retry_after: seconds in which it wants no more."""
        self.failures.append(failure)
        retry = may_retry(self.failures, first_event_sent, self._params)
        if retry is Retry.LARGER_WINDOW:
            self.larger_than = window
        elif retry is Retry.OTHER_BACKEND:
            self.tried |= {name}
            self._ready[name] = now + (retry_after or 0.0) if RULES[failure].back else inf
        return retry

    def go_back(self, now: float, until: float, rng: Random) -> float | None:
        """No other backend is left: seconds to pause before those that answered are asked again, who are then no longer
        in `tried`. None: it is over, also when the pause would end after `until`.

        Full jitter: from 0 to backoff × 2 ** pauses so far, and until the first of them is ready.
        """
        params = self._params
        most = min(params.max_backoff_seconds, params.backoff_seconds * 2 ** (len(self.failures) - 1))
        if not most:
            return None
        pause = max(rng.uniform(0.0, most), min(self._ready.values(), default=inf) - now)
        if pause > params.max_backoff_seconds or now + pause >= until:
            return None
        self.tried = frozenset([name for name in self.tried if self._ready[name] > now + pause])
        return pause
