"""A connection before it is anybody's: the PROXY header is read, the TLS handshake done, then the server takes over.

Rules
1. Only where one of the two is configured; else a listener makes its own connections, and nothing here runs.
2. The header is read byte-exact, the handshake is the loop's own (`start_tls`), by the context that is in force now.
3. Whoever is not through in time, talks out of turn, or comes from an address that is not trusted is cut, and counted.
   Nothing is said to it: there is no language yet.
4. The transport that the server gets is a transport like any other: it pauses, tells who is gone, aborts. What only TLS
   knows (bytes that wait below it) is told by `raw`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, cast

from aiohttp import web

from proxy.clock import Clock, Timer
from proxy.front import ClientConnection
from proxy.tls import Counted, Tls
from proxy.wire.forwarded import Networks, trusts
from proxy.wire.proxyheader import More, ProxyHeaderError, read_proxy_header

log = logging.getLogger("tierline.front")

UNSENT = 64 * 1024
"""Bytes that may wait in a TLS connection before its writer pauses, as in one without; the loop's own figure is 512 KiB."""

WHY = ("full", "handshake", "not_trusted", "proxy_header", "too_slow")

_NEVER = 86400.0
"""For limits of the loop's that ours come before."""


class Door:
    """How connections come in at one listener: the factory that it gets in its server's place.

    trusted: who has to send a PROXY header; None: nobody. seconds: until a connection is through. most: connections at once,
    those of the server with them. good_bye: seconds for the end of TLS.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        *,
        tls: Tls | None,
        trusted: Networks | None,
        seconds: float,
        most: int,
        good_bye: float,
    ) -> None:
        self.name, self.tls, self.trusted, self.good_bye = name, tls, trusted, good_bye
        self._clock = clock
        self.seconds = seconds
        self.most = most
        self._coming: set[Coming] = set()
        self.server: web.Server | None = None
        self.refused: Counter[str] = Counter()

    def __call__(self) -> asyncio.BaseProtocol:
        coming = Coming(self)
        return _HeaderReader(coming) if self.trusted is not None else _Greeter(coming)

    def full(self) -> bool:
        assert self.server is not None
        return len(self._coming) + len(self.server.connections) >= self.most

    def entered(self, coming: Coming) -> Timer:
        self._coming.add(coming)
        return self._clock.call_at(self._clock.now() + self.seconds, coming.overdue)

    def left(self, coming: Coming) -> None:
        self._coming.discard(coming)

    def make(self, client: str | None, raw: asyncio.Transport | None) -> asyncio.Protocol:
        assert self.server is not None
        protocol: asyncio.BaseProtocol = self.server()
        if isinstance(protocol, ClientConnection):
            protocol.client, protocol.raw = client, raw
        return cast(asyncio.Protocol, protocol)

    def close(self) -> None:
        """Cut whoever is not through."""
        for coming in tuple(self._coming):
            coming.end()


class Coming:
    """One connection on its way in."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._timer: Timer | None = None
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self.client: str | None = None
        self.begun = bytearray()
        """Of the handshake: uvloop reads on in the turn that a connection is made in."""

    def arrive(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        full = self._door.full()
        self._timer = self._door.entered(self)
        trusted = self._door.trusted
        if full:
            self.refuse("full")
        elif trusted is not None and not trusts(trusted, _host(self._transport)):
            self.refuse("not_trusted")

    def through(self) -> None:
        """Nothing in plain text is left to read."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.pause_reading()  # what comes next is for another protocol
        if self._door.tls is not None:
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._shake_hands(transport))
            # In the next turn start_tls makes its protocol, in the one after that the protocol is ready: then, at once.
            loop.call_soon(loop.call_soon, self._feed, transport)
            return
        self._over()
        protocol = self._door.make(self.client, None)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if not transport.is_closing():
            transport.resume_reading()

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        tls = self._door.tls
        assert tls is not None
        loop, early = asyncio.get_running_loop(), _Early()
        try:
            made = await loop.start_tls(
                transport,
                early,
                tls(),
                server_side=True,
                ssl_handshake_timeout=_NEVER,
                ssl_shutdown_timeout=self._door.good_bye,
            )
        except (OSError, asyncio.CancelledError) as error:
            log.debug("TLS handshake with a client of %s failed: %r", self._door.name, error)
            self.refuse("handshake")
            return
        self._over()
        if made is None or early.lost or made.is_closing():
            return
        made.set_write_buffer_limits(high=UNSENT)
        protocol = self._door.make(self.client, transport)
        made.set_protocol(protocol)
        protocol.connection_made(made)
        if early.data:
            protocol.data_received(bytes(early.data))

    def _feed(self, transport: asyncio.Transport) -> None:
        reader = cast(asyncio.BufferedProtocol, transport.get_protocol())
        data, self.begun = self.begun, bytearray()
        while data and not transport.is_closing():
            room = cast(memoryview, reader.get_buffer(len(data)))
            size = min(len(room), len(data))
            room[:size] = data[:size]
            del data[:size]
            reader.buffer_updated(size)

    def overdue(self) -> None:
        self.refuse("too_slow")

    def refuse(self, why: str) -> None:
        if self._timer is not None:
            self._door.refused[why] += 1
        self.end()

    def end(self) -> None:
        self._over()
        if self._task is not None and not self._task.done():
            self._task.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _over(self) -> None:
        self._door.left(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Greeter(asyncio.Protocol):
    """Nothing is read: the handshake begins at once."""

    def __init__(self, coming: Coming) -> None:
        self._coming = coming

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._coming.arrive(transport)
        self._coming.through()

    def data_received(self, data: bytes) -> None:
        self._coming.begun += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._coming.end()


class _HeaderReader(asyncio.BufferedProtocol):
    """Takes no byte that is not of the header: the buffer is never longer than what is sure to come of it."""

    def __init__(self, coming: Coming) -> None:
        self._coming = coming
        self._data = b""
        self._room = bytearray(6)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._coming.arrive(transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self._data += self._room[:nbytes]
        try:
            found = read_proxy_header(self._data)
        except ProxyHeaderError as error:
            log.debug("not a PROXY header: %s", error)
            self._coming.refuse("proxy_header")
            return
        if isinstance(found, More):
            self._room = bytearray(found.least)
            return
        self._coming.client = found.address
        self._coming.through()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._coming.end()


class _Early(asyncio.Protocol):
    """What comes in the very read that ends the handshake: the server's connection is made a moment later."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.lost = False

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


def _host(transport: asyncio.BaseTransport) -> str:
    name: Any = transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) else ""


class _Doored(web.BaseRunner):
    """Connections come in by the door, if there is one."""

    door: Door | None = None

    @property
    def server(self) -> Any:
        server = super().server
        if self.door is None or server is None:
            return server
        self.door.server = server
        return self.door


class ServerRunner(_Doored, web.ServerRunner):
    pass


class AppRunner(_Doored, web.AppRunner):
    pass


def refused_counter(doors: Iterable[Door]) -> Iterator[Counted]:
    """For the metrics; nothing where there is no door."""
    rows: list[tuple[tuple[str, ...], int]]
    rows = [((door.name, why), door.refused[why]) for door in doors for why in WHY]
    if rows:
        text = "Connections that were cut before they could ask anything, by listener and why."
        yield "tierline_refused_connections", text, ("listener", "reason"), rows
