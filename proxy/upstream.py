"""Connections to backends: a raw protocol, a C parser, a small pool each.

Rules
1. Everything that happens to a chunk happens inside `data_received`, synchronously: by the sink's lane (see `lane`), or
   parser → sink. No task, future, queue or coroutine per chunk.
2. A connection serves one exchange at a time. The exchange's `Sink` hears head, body pieces (one call a read) and
   exactly one of `end` or `lost`. After `detach` it hears nothing more.
3. httptools leaves three gaps, closed here: 1xx arrive as whole messages (skipped), a body that ends with the
   connection has no callback (`_at_eof`), and a message that starts unasked is not refused (`_surplus`).
4. An idle connection is given up after `idle_seconds`: vLLM closes at 5 s, and a request sent into that close dies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol, cast

import httptools

from proxy.clock import Clock, Timer
from proxy.lane import Lane
from proxy.tls import Tls

MAX_HEAD_BYTES = 64 * 1024
Headers = list[tuple[bytes, bytes]]


class Sink(Protocol):
    """Who hears an exchange. Calls come from `data_received`; none may raise. between: the next chunk begins with the
    next read, and may take the lane if the sink opens it."""

    def head(self, status: int, headers: Headers) -> None: ...
    def data(self, piece: bytes) -> None: ...
    def between(self, lane: Lane) -> None: ...
    def end(self) -> None: ...
    def lost(self, what: str, malformed: bool) -> None: ...


class UpstreamConnection(Lane, asyncio.Protocol):
    """One TCP or TLS connection. `send` starts an exchange; the pool takes it back after `end`."""

    __slots__ = (
        "_at_eof",
        "_chunked",
        "_complete",
        "_head_bytes",
        "_head_ready",
        "_headers",
        "_in_chunk",
        "_interim",
        "_own_pieces",
        "_parser",
        "_pieces",
        "_pool",
        "_reusable",
        "_sink",
        "_status",
        "_surplus",
        "answered",
        "idle_since",
        "on_body",
        "reused",
        "transport",
    )

    def __init__(self, pool: ConnectionPool) -> None:
        super().__init__()
        self._pool = pool
        self._pieces: list[bytes] = []
        # The parser calls `on_body` for every piece: a list's own method, so that no Python runs for it.
        self.on_body = self._pieces.append
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._headers: Headers = []
        self._status = 0
        self._head_bytes = 0
        self._head_ready = self._complete = self._interim = self._surplus = False
        self._at_eof = self._reusable = False
        self._chunked = self._in_chunk = False
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self.reused = False
        """This exchange runs on a connection that served another before."""
        self.answered = False
        """A byte of this exchange's answer came."""

    # -- the exchange -------------------------------------------------------------------------------------------

    def send(self, head: bytes, body: bytes, sink: Sink) -> None:
        """Start an exchange. A body of any size goes to the kernel as it drains; nothing is copied here."""
        transport = self.transport
        assert transport is not None
        assert self._sink is None
        self._sink = sink
        self._headers = []
        self._head_bytes = self._status = 0
        self._head_ready = self._complete = self._at_eof = self._reusable = self.answered = False
        self._chunked = self._in_chunk = False
        if len(body) < 16384:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    @property
    def complete(self) -> bool:
        """The answer's last byte was read."""
        return self._complete

    def detach(self) -> None:
        """End the exchange from our side. Unless it was complete the connection is closed at once, so that the
        backend stops generating. Nothing to do after `release` or `lost`."""
        self.forget()  # the lane holds the sink, and with it the request: not while the connection is idle
        if self._sink is None:
            return
        if self._complete:  # the sink wants no more of a message that ended in this very read
            self.release()
        else:
            self._sink = None
            self.abort()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def pause(self) -> None:
        """Stop reading: the client does not."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def release(self) -> None:
        """Give a connection back after `end`: pooled if it can serve again, closed if not."""
        self._sink = None
        transport = self.transport
        if transport is None:
            return
        sent = transport.get_write_buffer_size() == 0
        if self._complete and self._reusable and sent and not self._surplus and not transport.is_closing():
            transport.resume_reading()
            self.reused = True
            self._pool.put(self)
        else:
            transport.abort()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._pool.opened(self)

    def received(self, data: bytes) -> None:
        """Whatever did not take the lane. The parser need not see what did: before and behind a whole chunk it expects
        the same."""
        sink = self._sink
        if sink is None or self._parser is None:
            self.abort()  # bytes that nobody asked for
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("switched protocols", malformed=True)
            return
        except httptools.HttpParserError as exc:
            self._deliver(sink)  # what came before the fault is part of the answer
            self._fail(f"not HTTP: {exc}", malformed=True)
            return
        if self._status:
            self._deliver(sink)
            between = self._chunked and not (self._in_chunk or self._complete) and data.endswith(b"\n")
            if between and self._sink is sink:
                sink.between(self)
        else:
            # The parser holds a header until it ends, so an endless one is counted here.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail("response head too large", malformed=True)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        sink, self._sink = self._sink, None
        parser, self._parser = self._parser, None
        self.transport = None
        self._pool.closed(self)
        if sink is None or parser is None:
            return
        if self._at_eof and exc is None and not self._complete:
            self._complete = True
            sink.end()
        elif not self._complete:
            sink.lost("connection reset" if exc is not None else "connection closed", False)

    # -- httptools ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete and not self._surplus:
            self._surplus = True
            self._own_pieces = len(self._pieces)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("response head too large")
        if not self._status:  # trailers and surplus messages are dropped
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._surplus:
            return
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 100:  # there is none; 0 is ours, for no head yet
            raise ValueError("no HTTP status")
        if status < 200:
            self._interim = True
            self._headers = []
            return
        self._status = status
        self._head_ready = True
        names = {name.lower() for name, _ in self._headers}
        bodyless = status in (204, 304)
        self._chunked = b"transfer-encoding" in names
        self._at_eof = not bodyless and b"content-length" not in names and b"transfer-encoding" not in names

    def on_chunk_header(self) -> None:
        self._in_chunk = True

    def on_chunk_complete(self) -> None:
        self._in_chunk = False

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
            return
        assert self._parser is not None
        if not self._complete:
            self._complete = True
            self._reusable = self._parser.should_keep_alive()

    # -- inside -------------------------------------------------------------------------------------------------

    def _deliver(self, sink: Sink) -> None:
        if self._head_ready:
            self._head_ready = False
            sink.head(self._status, self._headers)
        pieces = self._pieces
        if self._surplus:
            del pieces[self._own_pieces :]
        if pieces:
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            if self._sink is sink:
                sink.data(piece)
        if self._complete and self._sink is sink:
            sink.end()

    def _fail(self, what: str, *, malformed: bool) -> None:
        sink, self._sink = self._sink, None
        self.abort()
        if sink is not None:
            sink.lost(what, malformed)


class ConnectionPool:
    """The connections of one backend. LIFO, so that a quiet pool shrinks to what is in use."""

    def __init__(
        self,
        clock: Clock,
        host: str,
        port: int,
        tls: Tls | None = None,
        *,
        idle_seconds: float = 4.0,
        max_idle: int = 64,
        server_name: str | None = None,
    ) -> None:
        self._clock = clock
        self._host, self._port, self.tls = host, port, tls
        self.server_name = server_name or host
        self._idle_seconds = idle_seconds
        self._max_idle = max_idle
        self._idle: deque[UpstreamConnection] = deque()
        self._all: set[UpstreamConnection] = set()
        self._sweep: Timer | None = None
        self._emptied: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<pool {self._host}:{self._port} open={len(self._all)} idle={len(self._idle)}>"

    @property
    def open_connections(self) -> int:
        return len(self._all)

    def take(self) -> UpstreamConnection | None:
        """A live idle connection, or None: then `connect`."""
        oldest = self._clock.now() - self._idle_seconds
        while self._idle:
            connection = self._idle.pop()
            transport = connection.transport
            if transport is None or transport.is_closing():
                continue
            if connection.idle_since < oldest:
                transport.abort()
                continue
            return connection
        return None

    async def connect(self) -> UpstreamConnection:
        """A new connection. Raises OSError (ssl.SSLError included); the caller sets the deadline."""
        loop = asyncio.get_running_loop()
        made: list[UpstreamConnection] = []

        def make() -> UpstreamConnection:
            made.append(UpstreamConnection(self))
            return made[-1]

        try:
            _, protocol = await loop.create_connection(
                make,
                self._host,
                self._port,
                ssl=self.tls() if self.tls is not None else None,
                server_hostname=self.server_name if self.tls is not None else None,
            )
        except BaseException:
            # Given up in the moment it stood: uvloop closes it and never tells it, and `close` would wait for it.
            for connection in made:
                connection.connection_lost(None)
            raise
        return protocol

    def put(self, connection: UpstreamConnection) -> None:
        now = self._clock.now()
        connection.idle_since = now
        self._idle.append(connection)
        if len(self._idle) > self._max_idle:
            self._idle.popleft().abort()
        if self._sweep is None:
            self._sweep = self._clock.call_at(now + self._idle_seconds, self._retire)

    def configure(self, idle_seconds: float, max_idle: int) -> None:
        """Other bounds for those that are not in use."""
        self._idle_seconds, self._max_idle = idle_seconds, max_idle
        while len(self._idle) > max_idle:
            self._idle.popleft().abort()

    def retire(self) -> None:
        """Nobody takes a connection from here again: those in use end with their exchange."""
        self.configure(self._idle_seconds, 0)

    def opened(self, connection: UpstreamConnection) -> None:
        self._all.add(connection)

    def closed(self, connection: UpstreamConnection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._emptied is not None and not self._all and not self._emptied.done():
            self._emptied.set_result(None)

    async def close(self) -> None:
        """Close every connection, in use or not, and wait until they are."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        if self._all:
            self._emptied = asyncio.get_running_loop().create_future()
            for connection in tuple(self._all):
                connection.abort()
            await self._emptied

    def _retire(self) -> None:
        self._sweep = None
        now = self._clock.now()
        while self._idle and self._idle[0].idle_since + self._idle_seconds <= now:  # as the timer counts
            self._idle.popleft().abort()
        if self._idle:
            self._sweep = self._clock.call_at(self._idle[0].idle_since + self._idle_seconds, self._retire)


_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te")
    + (b"trailer", b"transfer-encoding", b"upgrade")
)
_NO_NAMES = _HOP_BY_HOP | {b"close"}
"""What Connection says that names no other header."""


def end_to_end(headers: Sequence[tuple[bytes, bytes]], drop: frozenset[bytes]) -> Headers:
    """Headers that may pass a proxy: not hop-by-hop, not named by Connection, not in `drop` (lower case)."""
    kept: Headers = []
    named: set[bytes] = set()
    for pair in headers:
        name = pair[0].lower()
        if name in _HOP_BY_HOP:
            if name == b"connection":
                named.update(token.strip().lower() for token in pair[1].split(b","))
        elif name not in drop:
            kept.append(pair)
    if named <= _NO_NAMES:
        return kept
    return [pair for pair in kept if pair[0].lower() not in named]
