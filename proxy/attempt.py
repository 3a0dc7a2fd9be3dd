"""An attempt at a backend, as values: what it is told before it starts, and how it can end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto

from policies import Failure
from policies.frozen import frozen
from proxy.errors import Outcome
from proxy.upstream import Headers
from proxy.wire.continuation import Transcript
from proxy.wire.errors import Api
from proxy.wire.streams import StreamReader


class FaultKind(Enum):
    """What broke an attempt; `policies.retry` and the handler map it."""

    STALE = auto()  # a reused connection died before any byte came
    CUT = auto()
    EMPTY = auto()  # 200 and an event stream without an event
    ERROR_EVENT = auto()
    ABORTED = auto()  # finish_reason "abort"
    MALFORMED = auto()
    TIMEOUT = auto()
    CLIENT_IDLE = auto()
    SHUTDOWN = auto()
    NO_CALL = auto()  # tool_choice asked for a call, and the answer has none


@frozen
class Fault:
    kind: FaultKind
    outcome: Outcome
    message: str
    payload: object = None
    """The decoded error event, if one came."""


@frozen
class Reply:
    """A whole answer, not sent yet."""

    status: int
    headers: Headers
    body: bytes


@frozen
class Result:
    """How an attempt ended. `reply`: to be sent. `fault`: to be told or retried. Neither: sent, and whole."""

    reply: Reply | None = None
    fault: Fault | None = None


@frozen
class Limits:
    """Seconds. `first`: dispatch → first event. `gap`: between reads. `total`: accept → end. `client_idle`: no
    reading by the client. `keepalive_after`/`interval`: of silence, before and between SSE comments (0: never)."""

    first: float
    gap: float
    total: float
    client_idle: float
    keepalive_after: float
    keepalive_interval: float


@frozen
class Plan:
    """What the handler knows before the answer: which shape to read, what to hide or rename."""

    api: Api
    stream: bool
    hide_usage: bool
    model_swap: tuple[bytes, bytes] | None
    limits: Limits
    reader: Callable[[], StreamReader] | None = None
    """Reads the stream in place of the endpoint's plain reader."""
    transcript: Transcript | None = None
    """Keeps what another backend needs to go on with the answer, where it may."""

    def with_reader(self, reader: Callable[[], StreamReader], *, hide_usage: bool = False) -> Plan:
        """Of an attempt that goes on with what another began: what it forwards is as the client has it."""
        return replace(self, reader=reader, hide_usage=hide_usage, model_swap=None)


@frozen
class Step:
    """What an attempt sends and how it hears the answer."""

    target: str
    body: bytes
    plan: Plan


class Stuck(Exception):
    """An answer cannot go on; `why` in a word."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


BREAKS = frozenset(
    {FaultKind.CUT, FaultKind.ERROR_EVENT, FaultKind.ABORTED, FaultKind.MALFORMED, FaultKind.TIMEOUT}
)
"""Faults of a stream's backend: what came before them is as good as ever."""

FAILURES = {
    FaultKind.STALE: Failure.REUSED,
    FaultKind.CUT: Failure.CUT,
    FaultKind.EMPTY: Failure.CUT,
    FaultKind.ABORTED: Failure.ERROR,
    FaultKind.MALFORMED: Failure.MALFORMED,
    FaultKind.TIMEOUT: Failure.TIMEOUT,
    FaultKind.NO_CALL: Failure.NO_CALL,
}
"""What a fault means for a retry; one that is not here ends the request."""
