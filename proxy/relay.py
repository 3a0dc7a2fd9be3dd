"""The pump: what the backend sends becomes what the client gets, and every mark on the way is taken.

Rules
1. A `Relay` is one attempt at one backend. It hears the upstream connection (`Sink`) and writes to the `Answer`; the
   handler awaits `done`, once. Per chunk there is one clock read, one look at the bytes, one write.
2. The relay never writes an error and never decides about a retry. It ends in a `Result`: whole, a `Reply` that
   nobody has sent yet, or a `Fault`. The handler turns these into what the client sees.
3. Nothing of a stream goes out before the first event that says something of the answer (a role alone does not): until
   then another backend can still answer.
4. One timer watches all limits. It is not moved per chunk: when it fires early it looks at the marks and sleeps on,
   never for longer than the shortest limit that a chunk may set going.
5. While the client does not read, the upstream is not read. Nothing piles up but one transport buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.attempt import BREAKS, Fault, FaultKind, Plan, Reply, Result
from proxy.clock import Clock
from proxy.errors import Outcome
from proxy.front import Answer
from proxy.kinds import Kind, kind_of
from proxy.lane import MARKS, Lane
from proxy.record import Record
from proxy.tap import Tap
from proxy.upstream import Headers, UpstreamConnection
from proxy.watch import Watch
from proxy.wire.answers import read_usage
from proxy.wire.errors import Api
from proxy.wire.streams import MalformedStream, StreamReader
from proxy.wire.typedstreams import ResponsesStream

MAX_BUFFERED_BYTES = 8 * 1024 * 1024
"""An unstreamed answer up to this size is looked at before it is sent; a larger one passes unseen."""

KEEPALIVE = b": keep-alive\n\n"


class Relay:
    """One attempt. `headers_for(status, headers)` gives the client's response headers. `began`: called once, when a stream's
    first event goes out."""

    __slots__ = (
        "_answer",
        "_began",
        "_buffer",
        "_buffered",
        "_connection",
        "_headers",
        "_headers_for",
        "_heard_at",
        "_length",
        "_marks",
        "_mode",
        "_now",
        "_plan",
        "_reader",
        "_record",
        "_status",
        "_stopped",
        "_watch",
        "claim",
        "done",
        "events_sent",
        "quiet",
        "streams",
    )

    def __init__(
        self,
        clock: Clock,
        connection: UpstreamConnection,
        answer: Answer,
        record: Record,
        plan: Plan,
        headers_for: Callable[[int, Headers], Headers],
        began: Callable[[], None],
    ) -> None:
        self._now = clock.now
        self._began = began
        self._connection = connection
        self._answer = answer
        self._record = record
        self._plan = plan
        self._watch = Watch(clock, plan.limits, record.accepted_at, self)
        self.streams = plan.stream
        self._headers_for = headers_for
        self._mode = Kind.WAITING
        self._reader: StreamReader | None = None
        self._status = 0
        self._headers: Headers = []
        self._length: int | None = None
        self._buffer: list[bytes] = []
        self._buffered = 0
        before = record.last_delta_at  # of a stream that this one goes on with
        self._marks: list[float] = [] if before is None else [before]
        self._heard_at = 0.0
        self._stopped = False
        self.claim: Callable[[], None] | None = None
        """Called before the first bytes of the answer go out, where another attempt might answer, too."""
        self.quiet = False
        """Another attempt is the one that the client waits for: no comments."""
        self.events_sent = False
        """Something of the answer itself reached the client: no retry from here."""
        self.done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    def start(self, head: bytes, body: bytes) -> None:
        """Send the request and begin to watch."""
        now = self._now()
        self._heard_at = now
        if self._record.first_delta_at is None:  # else it goes on with what another began
            self._record.dispatched_at = now
        self._answer.watch(self._client_paused, self._client_resumed, self._connection.close)
        transcript = self._plan.transcript
        self._connection.send(head, body, self if transcript is None else Tap(transcript, self))
        paused = self._answer.paused  # an earlier answer on this connection is not read yet
        self._watch.start(now, commented=self._answer.started, paused=paused)
        if paused:
            self._connection.pause()

    def stop(self) -> None:
        """Let go of both sides. Safe at any time; an unfinished exchange is cancelled at the backend."""
        if self._stopped:
            return  # the connection may serve somebody else by now
        self._stopped = True
        self._watch.close()
        self._answer.watch()
        self._answer.bytes_out += self._connection.sent
        self._connection.detach()
        self._note()

    def interrupt(self, message: str) -> None:
        """The gateway stops: end the attempt with a fault."""
        self._finish(Result(fault=Fault(FaultKind.SHUTDOWN, Outcome.SHUTDOWN, message)))

    # -- Sink: called from data_received ------------------------------------------------------------------------

    def head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers
        self._mode, self._reader, self._length = kind_of(self._plan, status, headers)
        if not self.streams:  # a stream's says nothing of its engine
            self._heard_at = self._now()

    def between(self, lane: Lane) -> None:
        """In a stream that has begun, what is like the delta last learned may take the lane."""
        reader = self._reader
        shape = reader.passing if reader is not None and self.events_sent and not self._stopped else None
        if shape is not None and self._plan.transcript is not None:
            shape = self._plan.transcript.shape(shape)
        write = self._answer.chunk_writer()
        if shape is not None and write is not None:
            lane.open(shape, write, self._now, self._marks, self._fold)

    def data(self, piece: bytes) -> None:
        if self._reader is not None:
            self._read(self._reader, piece)
        else:
            self._unread(piece)

    def _read(self, reader: StreamReader, piece: bytes) -> None:
        """A piece of an event stream that has to be looked at."""
        self._heard_at = now = self._now()
        try:
            out = reader.feed(piece)
        except MalformedStream as exc:
            if not self._watch.ended:  # what follows the end mark is not part of the answer
                self.fault(FaultKind.MALFORMED, Outcome.UPSTREAM_MALFORMED, str(exc))
            return
        if not self.events_sent:
            self._begin(reader, out)
        elif out:
            self._answer.push(out)
            if self._plan.transcript is not None:
                self._plan.transcript.sent(out)
        if reader.content:
            reader.content = False
            if out:  # else it is held, and nobody has seen it yet
                self._marks.append(now)
            if len(self._marks) >= MARKS:
                self._fold()
        if reader.notable:
            self._act(reader, now)

    def _act(self, reader: StreamReader, now: float) -> None:
        """An error, an abort or the end mark came."""
        reader.notable = False
        if self._watch.ended:
            return
        if reader.error is not None:
            message = "the backend reported an error"
            fault = Fault(FaultKind.ERROR_EVENT, Outcome.UPSTREAM_ERROR, message, reader.error)
            self._finish(Result(fault=fault))
        else:
            self._ended(now)

    def _fold(self) -> None:
        """Times of content deltas into the record: the first, the last, the gaps between."""
        marks, record = self._marks, self._record
        if marks:
            if record.first_delta_at is None:
                record.first_delta_at = marks[0]
            record.last_delta_at = marks[-1]
            record.gaps.add_between(marks)
            del marks[:-1]  # where the next gap starts
        if self._plan.transcript is not None:
            self._plan.transcript.fold()

    def _unread(self, piece: bytes) -> None:
        """A piece of an answer that is no event stream of ours."""
        self._heard_at = self._now()
        if self._mode is Kind.BUFFER:
            self._buffer.append(piece)
            self._buffered += len(piece)
            if self._buffered > MAX_BUFFERED_BYTES:
                if self._status >= 300:  # never passed on unseen: its status says enough
                    self._finish(Result(reply=Reply(self._status, self._headers, b"")))
                else:
                    self._pipe()
        elif self.events_sent or self._pipe():
            self._answer.push(piece)

    def end(self) -> None:
        # `stop` gives the connection back, behind the last write: that may fill the client's buffer, and a connection
        # that is given back before would be paused for good, under whoever has it next.
        self._heard_at = self._now()
        if self._mode is Kind.BUFFER:
            body = self._buffer[0] if len(self._buffer) == 1 else b"".join(self._buffer)
            self._finish(Result(reply=Reply(self._status, self._headers, body)))
            return
        if self._mode is Kind.PIPE:
            if not self.events_sent and not self._pipe():
                return
            self._answer.finish()
            self._finish(Result())
            return
        reader = self._reader
        assert reader is not None
        if not reader.events:
            self.fault(FaultKind.EMPTY, Outcome.UPSTREAM_CUT, "the backend ended the stream without an event")
        elif reader.complete() and not reader.pending.strip():
            self._close(reader)
        else:
            self._fault_of(reader)

    def lost(self, what: str, malformed: bool) -> None:
        if malformed:
            self.fault(FaultKind.MALFORMED, Outcome.UPSTREAM_MALFORMED, what)
        elif self._connection.reused and not self._connection.answered:
            self.fault(FaultKind.STALE, Outcome.UPSTREAM_CUT, what)
        elif self._watch.ended and self._reader is not None and self._reader.complete():
            self._close(self._reader)
        else:
            self.fault(FaultKind.CUT, Outcome.UPSTREAM_CUT, f"{what} before the answer was whole")

    # -- inside -------------------------------------------------------------------------------------------------

    def _begin(self, reader: StreamReader, out: bytes) -> None:
        """Before the first event: what says nothing of the answer (comments, its opening) is held, and goes out with it."""
        if out and (reader.opening or not reader.events):
            self._buffer.append(out)
        elif not reader.opening and (out or (reader.content and self._buffer)):
            self._commit(out)

    def _commit(self, out: bytes) -> None:
        if self.claim is not None:
            self.claim()
        self.events_sent = True
        first = b"".join((*self._buffer, out))
        self._buffer.clear()
        if self._plan.transcript is not None:
            self._plan.transcript.sent(first)
        if self._answer.started:  # a keep-alive comment went first
            self._answer.push(first)
        else:
            self._answer.start(200, self._headers_for(200, self._headers), None, first)
        self._began()

    def _pipe(self) -> bool:
        """Pass the answer on unseen from here. False: comments went out, so the client reads an event stream."""
        if self._answer.started:
            message = "the backend answered without a readable event stream"
            self.fault(FaultKind.MALFORMED, Outcome.UPSTREAM_MALFORMED, message)
            return False
        if self.claim is not None:
            self.claim()
        self._mode = Kind.PIPE
        self.events_sent = True
        first = b"".join(self._buffer)
        self._buffer.clear()
        self._answer.start(self._status, self._headers_for(self._status, self._headers), self._length, first)
        return True

    def _ended(self, now: float) -> None:
        """The stream's own end mark came. The backend's message normally ends in the same read."""
        reader = self._reader
        assert reader is not None
        if not reader.complete():
            self._fault_of(reader)
        elif not self._connection.complete:  # else `end` follows at once
            self._watch.end(now)

    def _close(self, reader: StreamReader) -> None:
        """The answer is whole: send what it still lacks, and its end."""
        last = reader.closing()
        transcript = self._plan.transcript
        if transcript is not None and transcript.usable and reader.usage is None:
            reader.usage = transcript.usage()
            last = transcript.closing(last)
        if not self.events_sent and last:
            self._commit(last)
            last = b""
        if reader.content:
            self._marks.append(self.heard_at)
        self._answer.finish(last)
        self._finish(Result())

    def _fault_of(self, reader: StreamReader) -> None:
        """The stream ended and is not whole: in which way."""
        if reader.aborted:
            message = "the backend gave the answer up (finish_reason abort)"
            self.fault(FaultKind.ABORTED, Outcome.UPSTREAM_ERROR, message)
        elif reader.lacks_call and reader.finish_reason is not None:
            message = "the model called no tool although tool_choice asked for it"
            self.fault(FaultKind.NO_CALL, Outcome.UPSTREAM_ERROR, message)
        else:
            message = "the backend ended the stream before the answer was whole"
            self.fault(FaultKind.CUT, Outcome.UPSTREAM_CUT, message)

    def fault(self, kind: FaultKind, outcome: Outcome, message: str) -> None:
        self._finish(Result(fault=Fault(kind, outcome, message)))

    def _finish(self, result: Result) -> None:
        if self.done.done():
            return
        fault, reader = result.fault, self._reader
        if fault is not None and self.events_sent and reader is not None:
            plan = self._plan
            # The count that the client is owed, where it asked for it.
            kept = plan.transcript is not None and plan.transcript.usable
            counted = kept or plan.hide_usage or reader.usage is not None
            if fault.kind in BREAKS and counted and reader.complete():
                self._close(reader)  # all of it came; what broke is the connection
                return
            if plan.transcript is None:
                self._answer.push(reader.flush())  # held text is never lost
        self.stop()
        self.done.set_result(result)

    def _note(self) -> None:
        """Put into the record what was seen, however the attempt ended."""
        record, reader = self._record, self._reader
        if self._mode is not Kind.WAITING:
            record.last_upstream_at = self.heard_at
        self._fold()
        if reader is None:
            return
        usage = read_usage(reader.usage)
        record.prompt_tokens, record.completion_tokens = usage.prompt, usage.completion
        record.cached_tokens, record.finish_reason = usage.cached, reader.finish_reason

    def held(self) -> bytes:
        """Text of a stream that broke and could have gone on, held for what would have followed."""
        reader = self._reader if self._plan.transcript is not None else None
        return reader.flush() if reader is not None else b""

    @property
    def in_band(self) -> bool:
        """An error can be told as an event: the client reads an event stream, or comments that began one."""
        return self._mode is Kind.STREAM or not self.events_sent

    @property
    def reader(self) -> StreamReader | None:
        """What read the stream, if it was one."""
        return self._reader

    @property
    def next_sequence(self) -> int:
        """The sequence_number after the last one of a Responses stream."""
        return self._reader.sequence + 1 if isinstance(self._reader, ResponsesStream) else 0

    @property
    def response_id(self) -> str | None:
        """The id the backend gave a streamed answer."""
        return self._reader.response_id if self._reader is not None else None

    # -- time and back-pressure ---------------------------------------------------------------------------------

    def _client_paused(self) -> None:
        self._watch.pause()
        self._connection.pause()

    def _client_resumed(self) -> None:
        self._watch.resume()
        self._connection.resume()

    @property
    def heard_at(self) -> float:
        """When the backend was heard last."""
        marks = self._marks
        return max(self._heard_at, marks[-1]) if marks else self._heard_at

    def alone(self) -> None:
        """The other attempt is gone: from here the client is this one's."""
        self.quiet = False
        if self._stopped:
            return
        self._answer.watch(self._client_paused, self._client_resumed, self._connection.close)
        if self._answer.paused != self._watch.paused:
            (self._client_paused if self._answer.paused else self._client_resumed)()

    @property
    def dispatched_at(self) -> float:
        """When the request was sent."""
        return self._watch.dispatched_at

    @property
    def over(self) -> bool:
        return self.done.done()

    @property
    def answering(self) -> bool:
        """The head of the answer is there."""
        return self._mode is not Kind.WAITING

    @property
    def opened(self) -> bool:
        """An event came, if only one that opens the answer."""
        return self._reader is not None and self._reader.events > 0

    @property
    def takes_comments(self) -> bool:
        """The client reads an event stream of ours, or will."""
        asked = self.streams and self._plan.api is not Api.OTHER and not self.quiet
        return asked and (self._mode is Kind.WAITING or self._mode is Kind.STREAM)

    def comment(self) -> None:
        """Tell the client that the answer is still to come."""
        if not self._answer.started:
            kind = [(b"content-type", b"text/event-stream; charset=utf-8")] * (self._mode is Kind.WAITING)
            self._answer.start(200, [*self._headers_for(200, self._headers), *kind], None, KEEPALIVE)
        else:
            self._answer.push(KEEPALIVE)

    def end_overdue(self) -> None:
        """The answer is whole; the backend does not end its message. The client need not wait for that."""
        assert self._reader is not None
        self._close(self._reader)
