"""W3C trace context of one request: what came with it, and what its attempts take along.

Rules
1. Only where spans are made (`telemetry.otlp`); else `record.trace` is None, and the client's headers pass on as they are.
2. A client that decided decides for us, too: its sampled flag is kept, its trace id, and its tracestate, unread. Headers
   that are not well-formed are as good as none, and do not go on. Baggage is nobody's business here: it passes.
3. Each attempt is a span of its own, and the backend hears of that one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

_PARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
SAMPLED = 1


class Attempt:
    """One backend asked. Monotonic seconds; ended: None while nobody said that it failed."""

    __slots__ = ("_trace", "backend", "ended", "failure", "span_id", "started")

    def __init__(self, trace: Trace, span_id: int, backend: str, started: float) -> None:
        self._trace = trace
        self.span_id, self.backend, self.started = span_id, backend, started
        self.ended: float | None = None
        self.failure: str | None = None

    def headers(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The client's, with this span in the place of the client's own."""
        trace = self._trace
        drop = (b"traceparent",) if trace.parent_id is not None else (b"traceparent", b"tracestate")
        value = b"00-%032x-%016x-%02x" % (trace.trace_id, self.span_id, trace.flags)
        return [*((name, v) for name, v in headers if name.lower() not in drop), (b"traceparent", value)]


class Trace:
    """parent_id: the client's span, None: the trace begins here. flags: of trace context; the lowest bit is "sampled"."""

    __slots__ = ("_rng", "attempts", "flags", "parent_id", "span_id", "trace_id", "tracestate")

    def __init__(
        self, trace_id: int, parent_id: int | None, flags: int, tracestate: str, rng: Random
    ) -> None:
        self.trace_id, self.parent_id, self.flags, self.tracestate = trace_id, parent_id, flags, tracestate
        self._rng = rng
        self.span_id = _ident(rng, 64)
        self.attempts: list[Attempt] = []

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def shown(self) -> str | None:
        """Its id, if it can be looked up."""
        return self.hex if self.sampled else None

    @property
    def hex(self) -> str:
        """The trace's id as others write it."""
        return f"{self.trace_id:032x}"

    def begins(self, backend: str, now: float) -> Attempt:
        attempt = Attempt(self, _ident(self._rng, 64), backend, now)
        self.attempts.append(attempt)
        return attempt

    def failed(self, backend: str, failure: str, now: float) -> None:
        """The attempt there that still runs, if one does, has failed."""
        for attempt in reversed(self.attempts):
            if attempt.backend == backend and attempt.ended is None:
                attempt.ended, attempt.failure = now, failure
                return


def begin(parents: Sequence[str], states: Sequence[str], ratio: float, rng: Random) -> Trace:
    """Of a request with these `traceparent` and `tracestate` headers. ratio: share of what comes without a trace that is
    sampled."""
    found = _PARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if found is None or (found[1] == "00" and found[5]):
        return Trace(_ident(rng, 128), None, SAMPLED if rng.random() < ratio else 0, "", rng)
    flags = int(found[4], 16)
    return Trace(int(found[2], 16), int(found[3], 16), flags & 3, ",".join(states), rng)


def _ident(rng: Random, bits: int) -> int:
    return rng.getrandbits(bits) or 1  # zero is no id
