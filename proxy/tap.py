"""Between a backend's connection and the relay: the ids of a stream's tokens are taken out on the way.

Rules: whatever is no event stream passes. What the relay gets is what would have come had nobody asked for ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.upstream import Headers, Sink
from proxy.wire.continuation import Transcript
from proxy.wire.sse import EventTooLong, Splitter

if TYPE_CHECKING:
    from proxy.lane import Lane


class Tap:
    """A `Sink` before another: takes the ids out of an event stream. Whatever is no event stream passes."""

    __slots__ = ("_events", "_sink", "_transcript")

    def __init__(self, transcript: Transcript, sink: Sink) -> None:
        self._transcript = transcript
        self._sink = sink
        self._events: Splitter | None = None

    def head(self, status: int, headers: Headers) -> None:
        if status == 200 and any(
            name.lower() == b"content-type" and value.lower().startswith(b"text/event-stream")
            for name, value in headers
        ):
            self._events = Splitter()
        self._sink.head(status, headers)

    def between(self, lane: Lane) -> None:
        if self._events is not None and not self._events.pending:
            self._sink.between(lane)

    def data(self, piece: bytes) -> None:
        if self._events is not None:
            held = self._events.pending
            try:
                piece = b"".join(map(self._transcript.strip, self._events.feed(piece)))
            except EventTooLong:  # the reader's to refuse
                self._events = None
                piece = held + piece
        if piece:
            self._sink.data(piece)

    def end(self) -> None:
        self._rest()
        self._sink.end()

    def lost(self, what: str, malformed: bool) -> None:
        self._rest()
        self._sink.lost(what, malformed)

    def _rest(self) -> None:
        """The beginning of an event that never ended, for whoever judges it."""
        if self._events is not None and (rest := self._events.pending):
            self._sink.data(rest)
