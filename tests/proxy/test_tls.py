"""TLS on our own listener: what holds without it holds with it, and its files change while connections stand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trustme

from proxy.errors import Outcome
from tests.client import DEADLINE, Connection
from tests.fake_clock import FakeClock
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.proxy.scenes import QUIET, eventually, held_back, polled
from tests.proxy.test_backpressure import BOUND, MORE_THAN_KERNELS_HOLD, PIECE, PIECES, ask_speech, sound
from tests.scripted import Ending, ScriptedBackend, Stall, WaitFor, after, chat_json, chat_stream

LOOPS = "both"


@dataclass
class Authority:
    """Certificates of a test, and where the gateway looks for them."""

    folder: Path
    ca: trustme.CA = field(default_factory=trustme.CA)

    def __post_init__(self) -> None:
        self.write("server")

    def write(self, name: str, *hosts: str, by: trustme.CA | None = None) -> None:
        """Another certificate for a listener, in place of the one that was there."""
        made = (by or self.ca).issue_cert(*(hosts or ("localhost", "127.0.0.1")))
        chain = b"".join(part.bytes() for part in made.cert_chain_pems)
        replace(self.folder / f"{name}.pem", chain)
        replace(self.folder / f"{name}.key", made.private_key_pem.bytes())
        self.ca.cert_pem.write_to_path(self.folder / "ca.pem")

    def trust(self, *, present: bool = False, by: trustme.CA | None = None) -> ssl.SSLContext:
        """A client's context. present: it has a certificate of its own."""
        context = ssl.create_default_context(cadata=self.ca.cert_pem.bytes().decode())
        if present:
            (by or self.ca).issue_cert("client@example.org").configure_cert(context)
        return context

    @property
    def config(self) -> str:
        return '[server]\nport = 0\ntls.cert = "server.pem"\ntls.key = "server.key"\n'


def replace(path: Path, data: bytes) -> None:
    """As certificate managers do it."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    os.replace(new, path)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def connect(gateway: Gateway, context: ssl.SSLContext, **more: Any) -> Connection:
    return await Connection.open(gateway.port, ssl=context, server_hostname="localhost", **more)


async def health(port: int, context: ssl.SSLContext) -> int | None:
    """What a client with this context gets; None: nothing."""
    try:
        async with await Connection.open(port, ssl=context, server_hostname="localhost") as client:
            client.send("/health", headers={"host": "localhost"})
            return (await client.read()).status or None
    except (OSError, EOFError):
        return None


async def gone(client: Connection) -> None:
    """Until the gateway has cut the connection, without a word."""
    async with asyncio.timeout(DEADLINE):
        with contextlib.suppress(ConnectionResetError):
            assert await client._reader.read() == b""


def serial(connection: Connection) -> str:
    certificate = connection._writer.get_extra_info("peercert")
    return str(certificate["serialNumber"])


def refused(gateway: Gateway, why: str) -> int:
    return gateway.app._doors[0].refused[why]


# -- what holds without it


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_answers_are_the_same_bytes_as_without_it(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority, stream: bool
) -> None:
    plain = await make_gateway(backend)
    gateway = await make_gateway(backend, config=authority.config)
    expected = await plain.ask(CHAT, chat(stream=stream))
    async with await connect(gateway, authority.trust()) as client:
        for _ in range(2):
            client.send(CHAT, chat(stream=stream))
            response = await client.read()
            assert (response.status, response.body) == (200, expected.body)
            client.next()


async def test_alpn_says_http_1_1(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority
) -> None:
    gateway = await make_gateway(backend, config=authority.config)
    context = authority.trust()
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with await connect(gateway, context) as client:
        assert client._writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"


async def test_big_bodies_pass_both_ways(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority
) -> None:
    gateway = await make_gateway(backend, config=authority.config)
    backend.answer(sound(8))
    async with await connect(gateway, authority.trust()) as client:
        client.send("/v1/audio/speech", {"model": "tiny", "input": "x", "padding": "x" * (4 << 20)})
        response = await client.read(30.0)
    assert response.body == PIECE * 8
    assert len((await backend.received()).body) > 4 << 20


async def test_a_request_in_the_same_bytes_as_the_end_of_the_handshake_is_heard(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority
) -> None:
    gateway = await make_gateway(backend, config=authority.config)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = authority.trust().wrap_bio(incoming, outgoing, server_hostname="localhost")
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    async with asyncio.timeout(DEADLINE):
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(65536))
        tls.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        writer.write(outgoing.read())  # the client's last word of the handshake, and its first request
        answer = b""
        while b'{"status":"ok"}' not in answer:
            incoming.write(await reader.read(65536))
            try:
                answer += tls.read(65536)
            except ssl.SSLWantReadError:
                continue
    writer.transport.abort()


async def test_a_client_that_stops_reading_stops_the_backend_and_loses_nothing(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority
) -> None:
    gateway = await make_gateway(backend, config=authority.config)
    backend.answer(sound())
    async with await connect(gateway, authority.trust(), limit=1024) as client:
        ask_speech(client)
        await client.read_until(b"\x01\x02")
        await held_back(gateway)
        server = gateway.app._server
        assert server is not None
        (connection,) = server.connections
        assert connection._unsent(connection.transport) <= BOUND  # type: ignore[attr-defined]
        assert (await backend.received()).connection.sent < MORE_THAN_KERNELS_HOLD
        response = await client.read(60.0)
    assert response.body == PIECE * PIECES
    await gateway.ended(Outcome.OK)


def good_bye(client: Connection) -> None:
    client.close()


def fin(client: Connection) -> None:
    """Without a word of TLS."""
    sock = client._writer.get_extra_info("socket")
    duplicate = socket.socket(fileno=os.dup(sock.fileno()))
    duplicate.shutdown(socket.SHUT_RDWR)
    duplicate.close()


def rst(client: Connection) -> None:
    sock = client._writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client._writer.transport.abort()


@pytest.mark.parametrize("leave", [good_bye, fin, rst])
@pytest.mark.parametrize("begun", [False, True], ids=["before the first token", "in the stream"])
async def test_a_client_that_goes_away_stops_its_generation(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    authority: Authority,
    leave: Callable[[Connection], None],
    begun: bool,
) -> None:
    gateway = await make_gateway(backend, config=authority.config)
    backend.answer(after(chat_stream("Hello there"), 2, Stall()) if begun else [Stall()])
    client = await connect(gateway, authority.trust())
    client.send(CHAT, chat(stream=True))
    if begun:
        await client.read_until(b"Hello")
    else:
        await backend.received()
    leave(client)
    assert await backend.closed() in (Ending.PEER_CLOSED, Ending.PEER_RESET)
    await gateway.ended(Outcome.CANCELLED)
    client.close()


async def test_what_waits_for_a_slow_client_is_delivered_before_the_gateway_stops(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority
) -> None:
    gateway = await make_gateway(backend, config=authority.config)
    backend.answer(sound())
    async with await connect(gateway, authority.trust(), limit=1024) as client:
        ask_speech(client)
        await client.read_until(b"\x01\x02")
        await held_back(gateway)
        drained = asyncio.ensure_future(gateway.app.drain())
        await eventually(lambda: gateway.app.gateway.draining, "draining")
        assert not drained.done()
        response = await client.read(60.0)
        await drained
    assert response.body == PIECE * PIECES


async def test_a_client_that_takes_all_and_says_no_good_bye_is_cut_in_the_end(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(backend, config=QUIET + authority.config, clock=clock)
    await polled(gateway)
    client = await connect(gateway, authority.trust())
    client._writer.transport.pause_reading()  # it would answer the good-bye
    client.send("/health", headers={"connection": "close"})
    server = gateway.app._server
    assert server is not None

    def closing() -> bool:
        return any(one._unread is not None and one.transport.is_closing() for one in server.connections)  # type: ignore[attr-defined]

    await eventually(closing, "the answer's end")
    clock.advance(61.0)
    await eventually(lambda: not server.connections, "the end of the connection")
    client._writer.transport.abort()


# -- who does not get in


async def test_who_talks_without_it_is_cut_and_counted(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority
) -> None:
    gateway = await make_gateway(backend, config=authority.config)
    async with await gateway.connect() as client:
        client.send_raw(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(DEADLINE):
            data = await client._reader.read()
    assert b"HTTP" not in data
    assert refused(gateway, "handshake") == 1
    page = gateway.app.metrics.render()[0].decode()
    assert 'tierline_refused_connections_total{listener="server",reason="handshake"} 1.0' in page


async def test_a_handshake_that_does_not_end_is_cut_in_time(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(backend, config=QUIET + authority.config, clock=clock)
    await polled(gateway)
    async with await gateway.connect() as client:
        client.send_raw(b"\x16\x03\x01\x02\x00\x01")
        door = gateway.app._doors[0]
        await eventually(lambda: len(door._coming) == 1, "the connection")
        clock.advance(10.1)
        await gone(client)
    assert refused(gateway, "too_slow") == 1
    await eventually(lambda: not door._coming, "its end")


async def test_connections_on_their_way_in_count_among_those_that_are_open(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority
) -> None:
    gateway = await make_gateway(backend, config=authority.config + "max_connections = 2\n")
    door = gateway.app._doors[0]
    async with await gateway.connect(), await connect(gateway, authority.trust()) as inside:
        await eventually(lambda: len(door._coming) == 1, "the connection")
        with pytest.raises((OSError, EOFError)):
            await connect(gateway, authority.trust())
        assert refused(gateway, "full") == 1
        inside.send("/health")
        assert (await inside.read()).status == 200


async def test_an_older_version_than_the_least_is_refused(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority
) -> None:
    gateway = await make_gateway(backend, config=authority.config + 'tls.minimum_version = "1.3"\n')
    old = authority.trust()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert await health(gateway.port, old) is None
    async with await connect(gateway, authority.trust()) as client:
        client.send("/health")
        assert (await client.read()).status == 200


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_where_clients_must_show_a_certificate_nobody_else_gets_in(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority, version: ssl.TLSVersion
) -> None:
    gateway = await make_gateway(backend, config=authority.config + 'tls.client_ca = "ca.pem"\n')
    for context in (authority.trust(), authority.trust(present=True, by=trustme.CA())):
        context.maximum_version = version
        assert await health(gateway.port, context) is None
    context = authority.trust(present=True)
    context.maximum_version = version
    async with await connect(gateway, context) as client:
        client.send("/health")
        assert (await client.read()).status == 200
    assert refused(gateway, "handshake") == 2
    assert gateway.app.gateway.exchanges == set()


async def test_who_showed_a_certificate_of_an_authority_that_is_trusted_no_longer_cannot_come_back(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority
) -> None:
    """Not by resuming its session either."""
    clock = FakeClock()
    replace(authority.folder / "clients.pem", authority.ca.cert_pem.bytes())
    config = QUIET + authority.config + 'tls.client_ca = "clients.pem"\n'
    gateway = await make_gateway(backend, config=config, clock=clock)
    context = authority.trust(present=True)
    async with await connect(gateway, context) as client:
        client.send("/health")
        assert (await client.read()).status == 200
        session = client._writer.get_extra_info("ssl_object").session
    replace(authority.folder / "clients.pem", trustme.CA().cert_pem.bytes())
    clock.advance(1.1)
    assert session is None or not session.has_ticket
    assert await health(gateway.port, context) is None


# -- the files change


async def test_a_new_certificate_is_for_new_handshakes_and_a_stream_does_not_notice(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    authority: Authority,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(backend, config=QUIET + authority.config, clock=clock)
    await polled(gateway)
    gate = asyncio.Event()
    backend.answer(after(chat_stream("Hello there"), 3, WaitFor(gate)))
    async with await connect(gateway, authority.trust()) as client:
        client.send(CHAT, chat(stream=True))
        await client.read_until(b"Hello")
        authority.write("server")
        clock.advance(1.1)
        async with await connect(gateway, authority.trust()) as newer:
            assert serial(newer) != serial(client)
            newer.send("/health")
            assert (await newer.read()).status == 200
        gate.set()
        response = await client.read()
        assert (response.complete, response.text) == (True, "Hello there")
        client.send("/health")  # the old connection goes on
        assert (await client.read()).status == 200
    assert "TLS of server: files read again" in caplog.text
    page = gateway.app.metrics.render()[0].decode()
    assert 'tierline_tls_loads_total{of="server",outcome="loaded"} 1.0' in page


@pytest.mark.parametrize("broken", ["gone", "text", "another key", "half"])
async def test_broken_files_change_nothing_and_are_told_once_and_mended_ones_are_taken(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    authority: Authority,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(backend, config=QUIET + authority.config, clock=clock)
    cert, key = authority.folder / "server.pem", authority.folder / "server.key"
    async with await connect(gateway, authority.trust()) as client:
        before = serial(client)
    if broken == "gone":
        cert.unlink()
    elif broken == "text":
        replace(cert, b"hello")
    elif broken == "another key":
        replace(key, trustme.CA().issue_cert("localhost").private_key_pem.bytes())
    else:
        replace(cert, cert.read_bytes()[:300])
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            clock.advance(1.1)
            async with await connect(gateway, authority.trust()) as client:
                assert serial(client) == before
    assert caplog.text.count("the changed files cannot be used, the old ones stay") == 1
    assert "PRIVATE" not in caplog.text
    page = gateway.app.metrics.render()[0].decode()
    assert 'tierline_tls_loads_total{of="server",outcome="failed"} 1.0' in page
    authority.write("server")
    clock.advance(1.1)
    async with await connect(gateway, authority.trust()) as client:
        assert serial(client) != before


# -- the admin's listener


async def test_the_admin_listener_speaks_it_too(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority
) -> None:
    admin = '[admin]\nport = 0\ntls.cert = "server.pem"\ntls.key = "server.key"\ntls.client_ca = "ca.pem"\n'
    gateway = await make_gateway(backend, config=admin)
    port = gateway.app.admin_port
    assert await health(port, authority.trust()) is None
    context = authority.trust(present=True)
    async with await Connection.open(port, ssl=context, server_hostname="localhost") as client:
        client.send("/admin/backends", headers={"host": "localhost"})
        assert (await client.read()).status == 200
    assert (await gateway.ask(CHAT, chat())).status == 200  # the data side is as it was


async def test_a_gateway_that_stops_cuts_who_is_not_in_yet(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority
) -> None:
    gateway = await make_gateway(backend, config=authority.config)
    async with await gateway.connect() as client:
        client.send_raw(b"\x16")
        await eventually(lambda: len(gateway.app._doors[0]._coming) == 1, "the connection")
        await gateway.app.close()
        await gone(client)


# -- the backend's answers in the meantime


async def test_many_connections_at_once_all_get_in(
    make_gateway: MakeGateway, backend: ScriptedBackend, authority: Authority
) -> None:
    gateway = await make_gateway(backend, config=authority.config)
    backend.default = chat_json()

    async def one() -> int:
        async with await connect(gateway, authority.trust()) as client:
            client.send(CHAT, chat())
            return (await client.read()).status

    assert await asyncio.gather(*(one() for _ in range(40))) == [200] * 40
    assert not gateway.app._doors[0].refused
