"""The engine model on a running clock.

Rules: one timer for all requests, set to the engine's next event; no task and no timer per stream. Engine time
is clock time × scale. What the engine says is handed to each request's sink in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from policies.engine import Engine, EngineStats, Event, Finished, FirstToken, Request, Started, Tokens
from proxy.clock import Clock, Timer


class Sink(Protocol):
    """Who is told about one engine request. Times are engine seconds."""

    def started(self, at: float, cached: int) -> None: ...

    def tokens(self, at: float, n: int) -> None:
        """`n` more tokens; for requests that are not streamed only the first."""
        ...

    def finished(self, at: float) -> None: ...


class Drive:
    def __init__(self, clock: Clock, engine: Engine, scale: float = 1.0) -> None:
        self._clock = clock
        self._engine = engine
        self._scale = scale
        self._origin = clock.now()
        self._sinks: dict[int, Sink] = {}
        self._timer: Timer | None = None
        self._armed_for: float | None = None

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._sinks)

    def now(self) -> float:
        """Engine seconds."""
        return (self._clock.now() - self._origin) * self._scale

    def submit(self, request: Request, sink: Sink) -> int:
        id = self._engine.submit(self.now(), request)
        self._sinks[id] = sink
        self._arm()
        return id

    def cancel(self, id: int) -> None:
        if self._sinks.pop(id, None) is not None:
            self._engine.cancel(id, self.now())
            self._arm()

    def change(self, do: Callable[[Engine, float], None]) -> None:
        """Do something to the engine at the present time."""
        do(self._engine, self.now())
        self._arm()

    def stats(self) -> EngineStats:
        stats = self._engine.stats(self.now())
        self._arm()
        return stats

    def close(self) -> None:
        self._sinks.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        due = self._engine.next_event_at()
        if due is None or (self._armed_for is not None and self._armed_for <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for = due
        self._timer = self._clock.call_at(self._origin + due / self._scale, self._tick)

    def _tick(self) -> None:
        self._timer = self._armed_for = None
        due, now = self._engine.next_event_at(), self.now()
        # A loop's timers may fire a tick early; the event is due all the same.
        for event in self._engine.advance(
            now if due is None or due - now > 1e-3 * self._scale else max(now, due)
        ):
            self._tell(event)
        self._arm()

    def _tell(self, event: Event) -> None:
        sink = self._sinks.get(event.id)
        if sink is None:
            return
        match event:
            case Tokens():
                sink.tokens(event.at, event.n)
            case FirstToken():
                sink.tokens(event.at, 1)
            case Started():
                sink.started(event.at, event.cached)
            case Finished():
                del self._sinks[event.id]
                sink.finished(event.at)
