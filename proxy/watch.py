"""The clock's side of an attempt: what falls due when, and one timer for all of it.

Rules
1. Limits are looked at, not moved: an attempt that goes on only leaves marks, and a timer that fires early looks at
   them and sleeps on. It never sleeps longer than the shortest limit that an event or a comment may bring.
2. While the client does not read, only `client_idle` and `total` run: that silence is the client's.
3. Silence for comments counts from what was sent last, at first from accept.
4. What is not streamed may take its time until its head comes: whoever computes it sends nothing until it is done. What
   has begun has to go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from proxy.attempt import FaultKind, Limits
from proxy.clock import Clock, Timer
from proxy.errors import Outcome

END_GRACE = 1.0
"""Seconds a backend has to end its message after the stream's own end mark."""


class Watched(Protocol):
    """The attempt. heard_at: the last read. events_sent: something of the answer reached the client. streams: an event
    stream was asked for. answering: its head came. opened: an event came, if only one that opens the answer."""

    events_sent: bool
    streams: bool

    @property
    def heard_at(self) -> float: ...

    @property
    def over(self) -> bool: ...

    @property
    def answering(self) -> bool: ...

    @property
    def opened(self) -> bool: ...

    @property
    def takes_comments(self) -> bool: ...

    def fault(self, kind: FaultKind, outcome: Outcome, message: str) -> None: ...

    def comment(self) -> None: ...

    def end_overdue(self) -> None: ...


class Watch:
    """Watches one attempt from `start` to `close`."""

    __slots__ = (
        "_accepted_at",
        "_attempt",
        "_clock",
        "_comment_at",
        "_earliest",
        "_ended_at",
        "_limits",
        "_paused_at",
        "_resumed_at",
        "_shortest",
        "_soonest",
        "_timer",
        "dispatched_at",
    )

    def __init__(self, clock: Clock, limits: Limits, accepted_at: float, attempt: Watched) -> None:
        self._clock = clock
        self._limits = limits
        self._attempt = attempt
        self._accepted_at = accepted_at
        self._shortest = min(limits.gap, limits.keepalive_after or limits.gap)  # see rule 1
        # Before these nothing can fall due, of all that counts from dispatch and from accept.
        self._soonest = min(self._shortest, limits.first, limits.client_idle)
        self._earliest = min(limits.total, limits.keepalive_after or limits.total)
        self.dispatched_at = self._resumed_at = 0.0
        self._comment_at: float | None = None
        self._paused_at: float | None = None
        self._ended_at: float | None = None
        self._timer: Timer | None = None

    @property
    def ended(self) -> bool:
        """The stream's own end mark came."""
        return self._ended_at is not None

    @property
    def paused(self) -> bool:
        """The client does not read."""
        return self._paused_at is not None

    def start(self, now: float, *, commented: bool, paused: bool) -> None:
        """commented: comments of an earlier attempt went out. paused: the client does not read."""
        self.dispatched_at = now
        if commented:
            self._comment_at = now
        if paused:
            self._paused_at = now
        due = min(now + self._soonest, self._accepted_at + self._earliest)
        self._timer = self._clock.call_at(max(due, now), self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Stop for good, and let go of the attempt: the two would keep each other alive until the collector comes."""
        self.stop()
        del self._attempt

    def end(self, now: float) -> None:
        self._ended_at = now
        self._arm(now)

    def pause(self) -> None:
        self._paused_at = now = self._clock.now()
        self._arm(now)

    def resume(self) -> None:
        self._paused_at = None
        self._resumed_at = self._clock.now()  # the silence was the client's, not the backend's

    def _deadlines(self) -> list[tuple[float, Callable[[], None]]]:
        limits, attempt = self._limits, self._attempt
        out = [(self._accepted_at + limits.total, self._total_exceeded)]
        if self._ended_at is not None:
            out.append((self._ended_at + END_GRACE, attempt.end_overdue))
        elif self._paused_at is not None:
            out.append((self._paused_at + limits.client_idle, self._client_idle))
        elif attempt.events_sent or (attempt.answering and not attempt.streams):
            out.append((max(attempt.heard_at, self._resumed_at) + limits.gap, self._gap_exceeded))
        elif attempt.streams:
            due = self.dispatched_at + limits.first
            due = max(due, attempt.heard_at + limits.gap) if attempt.opened else due
            out.append((due, self._first_exceeded))
        if (
            self._paused_at is None
            and self._ended_at is None
            and limits.keepalive_after > 0
            and attempt.takes_comments
        ):
            out.append((self._comment_due(), self._comment))
        return out

    def _comment_due(self) -> float:
        attempt, limits = self._attempt, self._limits
        if self._comment_at is not None and not (attempt.events_sent and attempt.heard_at > self._comment_at):
            return self._comment_at + limits.keepalive_interval
        silent_since = attempt.heard_at if attempt.events_sent else self._accepted_at
        return silent_since + limits.keepalive_after

    def _arm(self, now: float) -> None:
        self.stop()
        due = min(when for when, _ in self._deadlines())
        self._timer = self._clock.call_at(max(min(due, now + self._shortest), now), self._tick)

    def _tick(self) -> None:
        self._timer = None
        now, attempt = self._clock.now(), self._attempt
        for when, action in self._deadlines():
            if when <= now and not attempt.over:
                action()
        if not attempt.over:
            self._arm(now)

    def _comment(self) -> None:
        self._attempt.comment()
        self._comment_at = self._clock.now()

    def _timed_out(self, message: str) -> None:
        self._attempt.fault(FaultKind.TIMEOUT, Outcome.UPSTREAM_TIMEOUT, message)

    def _total_exceeded(self) -> None:
        self._timed_out(f"the answer took longer than {self._limits.total:g} s")

    def _first_exceeded(self) -> None:
        self._timed_out(f"no token within {self._limits.first:g} s")

    def _gap_exceeded(self) -> None:
        self._timed_out(f"the answer was silent for {self._limits.gap:g} s")

    def _client_idle(self) -> None:
        message = f"the client did not read for {self._limits.client_idle:g} s"
        self._attempt.fault(FaultKind.CLIENT_IDLE, Outcome.CLIENT_TIMEOUT, message)
