"""Whether a failed attempt is followed by another, and where to.

Rules: one table, one pure function with early returns. Nothing is retried once an event has gone to the
client. `Failure` is closed; it says what happened to the attempt, never whose request it was. It is also
what the breaker reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Failure(StrEnum):
    """How one attempt on one backend failed. Closed."""

    CONNECT = "connect"  # refused, no route, name, TLS or time-out: nothing of the request was sent
    REUSED = "reused"  # a reused keep-alive connection died before a byte of the answer
    OVERFLOW = "overflow"  # the backend says that the prompt exceeds its window
    REJECTED = "rejected"  # another 4xx: would be the same elsewhere
    ERROR = "error"  # 5xx, error event, "abort"
    TIMEOUT = "timeout"  # no first token, too long a gap, or too long in all
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
    """What follows a failure, and how often per request (None: as often as max_attempts allows)."""

    retry: Retry
    times: int | None = None


# Failures that are not listed end the request.
RULES: Mapping[Failure, Rule] = MappingProxyType(
    {
        Failure.CONNECT: Rule(Retry.OTHER_BACKEND),
        Failure.REUSED: Rule(Retry.SAME_BACKEND, times=1),
        Failure.OVERFLOW: Rule(Retry.LARGER_WINDOW, times=1),
        Failure.NO_CALL: Rule(Retry.AGAIN, times=1),
    }
)


@dataclass(frozen=True, slots=True)
class RetryParams:
    """max_attempts: attempts per request, the first included; 1 never retries."""

    max_attempts: int = 3

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError("max_attempts must be 1 or more")


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
