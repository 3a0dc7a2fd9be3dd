"""Proxies in front: who a request comes from is their word if they are trusted, and nobody's else."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import pytest

from proxy.wire.proxyheader import SIGNATURE
from tests.client import Connection
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.proxy.test_tls import Authority, authority, gone, refused
from tests.scripted import ScriptedBackend

__all__ = ["authority"]

LOOPS = "both"
SHOWN = '[telemetry]\nrecords = "off"\nclient_addresses = true\n'
V1 = b"PROXY TCP4 203.0.113.9 192.0.2.1 4711 443\r\n"
V2 = SIGNATURE + b"\x21\x11\x00\x0c" + bytes((203, 0, 113, 9, 192, 0, 2, 1, 18, 103, 1, 187))
V2_MORE = SIGNATURE + b"\x21\x21\x00\x2a" + bytes(15) + b"\x01" + bytes(20) + b"\x04\x00\x03abc"
LOCAL = SIGNATURE + b"\x20\x00\x00\x00"
REQUEST = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def server(*lines: str, trusted: str = "127.0.0.1") -> str:
    return f'[server]\nport = 0\ntrusted_proxies = ["{trusted}"]\n' + "".join(f"{line}\n" for line in lines)


async def asked(gateway: Gateway, index: int = 0, **headers: str) -> str | None:
    """The address in the record of a request with these headers."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    assert (await gateway.ask(CHAT, chat(), headers=names)).status == 200
    return (await gateway.record(index)).client


# -- headers


async def test_records_hold_no_address_unless_the_operator_wants_it(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=server())
    assert await asked(gateway, x_forwarded_for="203.0.113.9") is None


async def test_forwarded_headers_are_believed_from_a_trusted_address_alone(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    trusting = await make_gateway(backend, config=server() + SHOWN)
    assert await asked(trusting, x_forwarded_for="1.1.1.1, 203.0.113.9") == "203.0.113.9"
    assert await asked(trusting, 1, forwarded='for="[2001:db8::1]:80"') == "2001:db8::1"
    other = await make_gateway(backend, config=server(trusted="192.0.2.0/24") + SHOWN)
    assert await asked(other, x_forwarded_for="203.0.113.9", forwarded="for=203.0.113.9") == "127.0.0.1"


async def test_no_backend_is_told_who_the_client_is(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=server())
    names = ("x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "x-real-ip", "forwarded")
    await gateway.ask(CHAT, chat(), headers=dict.fromkeys(names, "203.0.113.9"))
    head = (await backend.received()).head
    assert b"203.0.113.9" not in head
    assert b"127.0.0.1" not in head.replace(b"host: 127.0.0.1", b"")


# -- the PROXY protocol


async def through(gateway: Gateway, header: bytes, tls: ssl.SSLContext | None = None) -> Connection:
    """A connection with a header in front of everything, split where a proxy never would."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(header[:9])
    await asyncio.sleep(0)
    writer.write(header[9:])
    if tls is not None:
        await writer.start_tls(tls, server_hostname="localhost")
    return Connection(reader, writer)


HEADERS = {
    "v1": (V1, "203.0.113.9"),
    "v2": (V2, "203.0.113.9"),
    "v2 and more": (V2_MORE, "::1"),
    "v1 unknown": (b"PROXY UNKNOWN\r\n", "127.0.0.1"),
    "v2 local": (LOCAL, "127.0.0.1"),
}


@pytest.mark.parametrize(("header", "address"), HEADERS.values(), ids=HEADERS.keys())
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_the_header_says_who_the_client_is_and_the_request_follows(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    authority: Authority,
    header: bytes,
    address: str,
    tls: bool,
) -> None:
    lines = ("proxy_protocol = true",)
    if tls:
        lines += ('tls.cert = "server.pem"', 'tls.key = "server.key"')  # type: ignore[assignment]
    gateway = await make_gateway(backend, config=server(*lines) + SHOWN)
    async with await through(gateway, header, authority.trust() if tls else None) as client:
        for index in range(2):
            client.send(CHAT, chat(padding="x" * 100_000))
            assert (await client.read()).status == 200
            client.next()
            assert (await gateway.record(index)).client == address


async def test_the_header_and_the_request_may_come_in_one_read(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=server("proxy_protocol = true"))
    for header in (V1, V2, LOCAL):
        async with await gateway.connect() as client:
            client.send_raw(header + REQUEST + REQUEST)
            assert (await client.read()).status == 200
            client.next()
            assert (await client.read()).status == 200


async def test_a_proxy_behind_a_proxy_is_asked_for_the_client(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    """The connection's own address is trusted to send the header; who the header names is trusted, too."""
    config = server("proxy_protocol = true", trusted='127.0.0.1", "203.0.113.0/24') + SHOWN
    gateway = await make_gateway(backend, config=config)
    async with await through(gateway, V1) as client:
        client.send(CHAT, chat(), headers={"x-forwarded-for": "198.51.100.7"})
        assert (await client.read()).status == 200
    assert (await gateway.record()).client == "198.51.100.7"


@pytest.mark.parametrize(
    "data",
    [REQUEST, b"PROXY nonsense\r\n" + REQUEST, SIGNATURE + b"\x31\x11\x00\x00" + REQUEST, b"\x16\x03\x01"],
)
async def test_where_a_header_must_come_nothing_else_is_heard(
    make_gateway: MakeGateway, backend: ScriptedBackend, data: bytes
) -> None:
    gateway = await make_gateway(backend, config=server("proxy_protocol = true"))
    async with await gateway.connect() as client:
        client.send_raw(data)
        await gone(client)
    assert refused(gateway, "proxy_header") == 1
    assert not backend.requests


async def test_a_header_from_an_address_that_is_not_trusted_is_not_read(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=server("proxy_protocol = true", trusted="192.0.2.0/24"))
    async with await gateway.connect() as client:
        client.send_raw(V1 + REQUEST)
        await gone(client)
    assert refused(gateway, "not_trusted") == 1


async def test_without_the_setting_a_header_is_no_http(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=server())
    async with await gateway.connect() as client:
        client.send_raw(V1 + REQUEST)
        assert (await client.read()).status == 400


async def test_a_proxy_that_only_looks_whether_we_are_there_costs_nothing(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=server("proxy_protocol = true"))
    for _ in range(3):
        client: Any = await gateway.connect()
        client.close()
    async with await through(gateway, V1) as client:
        client.send("/health")
        assert (await client.read()).status == 200
    assert not gateway.app._doors[0]._coming
