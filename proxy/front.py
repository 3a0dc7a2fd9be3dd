"""The client's side of an exchange: aiohttp parses the request, we write the response's bytes ourselves.

Rules
1. `Answer` is what the handler returns to aiohttp and what the relay writes to. aiohttp calls `prepare` and `write_eof`
   on it, finds everything done, and goes on to the next request of the connection if `keep_alive` says so.
2. All writes are synchronous and go straight to the transport. Whoever produces must watch `paused`.
3. An answer that cannot be finished properly is broken off (`abort`): a client must never take a part for the whole.
4. A client's slowness is bounded, too: a head that has begun must end in time, and who has an answer and does not take
   it loses its connection. No timer runs for a client that is not slow.
5. `tests/proxy/test_front.py` runs this against plain aiohttp responses, on the oldest and newest aiohttp allowed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from proxy.clock import Timer
from proxy.patience import LINGER, SLOWEST, stopped
from proxy.patience import Patience as Patience
from proxy.turnaway import STATUS_LINES, TooMany, error_page, refusal

log = logging.getLogger("tierline.front")

_LAST_CHUNK = b"0\r\n\r\n"


class ClientConnection(web.RequestHandler):
    """aiohttp's protocol, plus a word to the answer in progress when the client stops or resumes reading."""

    __slots__ = (
        *("_flushed", "_head", "_patience", "_unread"),
        *("client", "on_lost", "on_pause", "on_resume", "raw", "taken"),
    )

    def __init__(self, manager: web.Server, patience: Patience | None = None, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._patience = patience
        self._head: Timer | None = None  # a head has begun and is not whole
        self._unread: Timer | None = None  # an answer waits for the client
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self.on_lost: Callable[[], None] | None = None
        self._flushed: asyncio.Future[None] | None = None
        self.client: str | None = None  # whom a PROXY header named
        self.raw: asyncio.Transport | None = None  # below TLS
        self.taken: asyncio.Future[None] | None = None  # done when the client reads again, or is gone

    def _unsent(self, transport: asyncio.WriteTransport) -> int:
        """Bytes that the client's kernel has not taken; the transport of TLS does not count what is below it."""
        raw = self.raw
        return transport.get_write_buffer_size() + (0 if raw is None else raw.get_write_buffer_size())

    async def flush(self) -> None:
        """Until the client's kernel has taken all that was written, or the connection is gone."""
        transport = self.transport
        if transport is None or self._unsent(transport) == 0:
            return
        if self.raw is not None and self._patience is not None:
            while self.transport is not None and self._unsent(transport):
                await self._patience.clock.sleep(0.01)
            return
        self._flushed = asyncio.get_running_loop().create_future()
        transport.set_write_buffer_limits(high=0)
        await self._flushed

    def _set_flushed(self) -> None:
        for waits in (self._flushed, self.taken):
            if waits is not None and not waits.done():
                waits.set_result(None)

    def eof_received(self) -> None:
        """The client is gone. What it left unread would otherwise hold the connection, and the generation with it."""
        if self.on_pause is not None and self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        requests = self._request_count
        super().data_received(data)
        if self.on_pause is not None:
            self.hear_on()
        if self._request_count != requests:
            self._head, self._unread = stopped(self._head), stopped(self._unread)
        elif self._head is None and self._awaits_head and self._patience is not None:
            patience = self._patience
            self._head = patience.clock.call_at(patience.clock.now() + patience.header, self._head_overdue)

    def hear_on(self) -> None:
        """Who sends more behind a request that runs than is held for it would not be heard going away."""
        transport = self.transport
        if transport is not None and not (transport.is_closing() or transport.is_reading()):
            transport.abort()

    @property
    def _awaits_head(self) -> bool:
        """Nothing is asked: what comes is a head. Else it is a body, also before its request is begun."""
        waiter = self._waiter
        return self._request_count == 0 or (waiter is not None and not waiter.done())

    def _head_overdue(self) -> None:
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.write(refusal(408, "The request's head did not arrive in time.", "request_timeout"))
            self.force_close()

    def force_close(self) -> None:
        transport = self.transport
        was_open = transport is not None and not transport.is_closing()
        super().force_close()
        if transport is None:
            return
        if was_open if self.raw is not None else transport.get_write_buffer_size():
            self._linger(transport)

    def answered(self, *, kept: bool) -> None:
        """An answer is written. What the client has not taken of it must not wait for ever; kept: the connection is."""
        transport = self.transport
        if transport is None:
            return
        waits = (
            transport.get_write_buffer_size() if self.raw is None else self._unsent(transport) + (not kept)
        )
        if waits > (LINGER if kept else 0):
            self._linger(transport)

    def _linger(self, transport: asyncio.WriteTransport) -> None:
        if self._patience is None or self._unread is not None:
            return
        clock, seconds = self._patience.clock, self._patience.idle
        before = self._unsent(transport)

        def look() -> None:
            nonlocal before
            self._unread = None
            now = self._unsent(transport)
            # With all taken and still there: its TLS says no good-bye.
            if now > max(0.0, before - SLOWEST * seconds) or (transport.is_closing() and not now):
                (self.raw or transport).abort()
            elif now:
                before = now
                self._unread = clock.call_at(clock.now() + seconds, look)

        self._unread = clock.call_at(clock.now() + seconds, look)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._head, self._unread = stopped(self._head), stopped(self._unread)
        self._set_flushed()
        if self.on_lost is not None:
            self.on_lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.on_pause is not None:
            self.on_pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.raw is None or (self.transport is not None and not self.transport.is_closing()):
            self._unread = stopped(self._unread)
        self._set_flushed()
        if self.on_resume is not None:
            self.on_resume()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp could not parse, or our handler let through: the API's shape instead of aiohttp's page."""
        if status >= 500:
            log.error("request failed inside the gateway", exc_info=exc)
        return error_page(status)


class Server(web.Server):
    """aiohttp's low-level server, building our connections and requests with our body limit.

    Handlers are cancelled when the client goes away: that is how a vanished client stops its generation.
    """

    def __init__(
        self,
        handler: Callable[[Any], Any],
        *,
        max_body_bytes: int,
        keepalive_timeout: float,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(handler, request_factory=self._request, handler_cancellation=True)
        self._open = 0
        self._left: asyncio.Event | None = None
        self.on_closed: Callable[[], None] | None = None
        # For connections and bodies that come from now on; may be set at any time.
        self.patience = patience
        self.max_body_bytes, self.keepalive_timeout = max_body_bytes, keepalive_timeout

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._open += 1

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._open -= 1
        if not self._open and self._left is not None:
            self._left.set()
        if self.on_closed is not None:
            self.on_closed()

    def __call__(self) -> ClientConnection | TooMany:  # type: ignore[override]
        if self.patience is not None and self._open >= self.patience.connections:
            return TooMany()
        return ClientConnection(
            self,
            self.patience,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=self.keepalive_timeout,
            access_log=None,
            max_line_size=16384,
            max_field_size=32768,
        )

    async def flush(self) -> None:
        """Until every client has what was written for it."""
        for connection in self.connections:
            if isinstance(connection, ClientConnection):
                await connection.flush()

    async def left(self) -> None:
        """Until no client is connected."""
        self._left = asyncio.Event()
        if self._open:
            await self._left.wait()

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        return web.BaseRequest(
            message, payload, protocol, writer, task, loop, client_max_size=self.max_body_bytes
        )


def _write(transport: asyncio.WriteTransport, head: bytes, body: bytes) -> None:
    """Both in one write; a large body is not copied for it."""
    if len(body) < 16384:
        transport.write(head + body)
    else:
        transport.writelines((head, body))


class Answer(web.StreamResponse):
    """One response, written by the relay."""

    def __init__(self, request: web.BaseRequest, *, close: bool = False) -> None:
        # Not StreamResponse.__init__: its header maps and cookie jar would be built for nothing.
        self._eof_sent = False
        self._payload_writer = None
        connection = request.protocol
        assert isinstance(connection, ClientConnection)
        self._connection = connection
        self._http11 = request.version >= (1, 1)
        self._persist = request.keep_alive and not close
        self._bodyless = request.method == "HEAD"
        self._framing: str | None = None  # None until started; "chunked", "length" or "close"
        self._left = 0
        self.bytes_out = 0
        self.started = False
        self.finished = False

    def __repr__(self) -> str:
        state = "finished" if self.finished else "started" if self.started else "new"
        return f"<Answer {state} {self.bytes_out} bytes>"

    # -- what the relay uses ------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """The client does not take what was written so far."""
        return self._connection.writing_paused

    @property
    def gone(self) -> bool:
        transport = self._connection.transport
        return transport is None or transport.is_closing()

    def close_behind(self) -> None:
        """Close the connection when this answer is finished; said to the client if its head is not sent yet."""
        self._persist = False

    def watch(
        self,
        on_pause: Callable[[], None] | None = None,
        on_resume: Callable[[], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """Be told when the client stops reading, when it goes on, and when it is gone."""
        connection = self._connection
        connection.on_pause, connection.on_resume, connection.on_lost = on_pause, on_resume, on_lost
        transport = connection.transport
        if on_pause is not None and transport is not None and not transport.is_reading():
            connection.hear_on()

    def send(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """A whole response in one write."""
        head = self._head(status, headers, None if status == 204 else len(body))
        transport = self._connection.transport
        if transport is not None:
            if self._bodyless or status == 204:
                transport.write(head)
            else:
                _write(transport, head, body)
        self.bytes_out += len(body)
        self.started = self.finished = True

    def start(
        self, status: int, headers: Sequence[tuple[bytes, bytes]], length: int | None, first: bytes = b""
    ) -> None:
        """Send the head, and with it the first piece of a body of `length` bytes (None: not known)."""
        head = self._head(status, headers, length)
        self.started = True
        piece = self._framed(first) if first else b""
        transport = self._connection.transport
        if transport is not None:
            _write(transport, head, piece)

    def push(self, data: bytes) -> None:
        """Send a piece of the body. Empty pieces are nothing (an empty chunk would end the body)."""
        if not data:
            return
        piece = self._framed(data)
        # aiohttp forgets the transport when the client goes; uvloop refuses a write to a closed one.
        transport = self._connection.transport
        if transport is not None:
            transport.write(piece)

    def _framed(self, data: bytes) -> bytes:
        """A piece of the body as it goes out; counted."""
        self.bytes_out += len(data)
        if self._framing == "chunked":
            return b"%x\r\n%b\r\n" % (len(data), data)
        self._left -= len(data)
        return data

    def chunk_writer(self) -> Callable[[bytes], object] | None:
        """Where whole HTTP chunks may be written as long as the client is there (`watch`). None: it takes none, or is
        gone."""
        transport = self._connection.transport
        return transport.write if self._framing == "chunked" and transport is not None else None

    def finish(self, last: bytes = b"") -> None:
        """End the body properly, in one write with its last piece. A body short of its length is broken off."""
        if self.finished:
            return
        self.finished = True
        transport = self._connection.transport
        if transport is None:
            return
        piece = self._framed(last) if last else b""
        if self._framing == "chunked":
            piece += _LAST_CHUNK
        if piece:
            transport.write(piece)
        if self._framing == "length" and self._left != 0:
            self.abort()

    def abort(self) -> None:
        """Break the connection off, so that the client sees a cut and not an end."""
        self._persist = False
        self.finished = True
        transport = self._connection.transport
        if transport is not None:
            transport.abort()

    # -- what aiohttp asks --------------------------------------------------------------------------------------

    @property
    def keep_alive(self) -> bool | None:
        return self._persist and self.finished and self._framing != "close"

    @property
    def prepared(self) -> bool:
        return self.started

    @property
    def status(self) -> int:
        return 200

    @property
    def body_length(self) -> int:
        return self.bytes_out

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        self.watch()
        if not self.finished:
            self.abort()
        connection = self._connection
        connection.answered(kept=bool(self.keep_alive))
        if (
            connection._paused and connection.transport is not None
        ):  # who asks on and reads nothing is not heard
            connection.taken = asyncio.get_running_loop().create_future()
            await connection.taken

    # -- inside -------------------------------------------------------------------------------------------------

    def _head(self, status: int, headers: Sequence[tuple[bytes, bytes]], length: int | None) -> bytes:
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status
        parts = [line]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if status == 204:
            self._framing = "length"
        elif length is not None:
            self._framing, self._left = "length", length
            parts.append(b"content-length: %d\r\n" % length)
        elif self._http11:
            self._framing = "chunked"
            parts.append(b"transfer-encoding: chunked\r\n")
        else:
            self._framing = "close"
            self._persist = False
        if not self._persist:
            parts.append(b"connection: close\r\n")
        elif not self._http11:
            parts.append(b"connection: keep-alive\r\n")
        parts.append(b"\r\n")
        return b"".join(parts)
