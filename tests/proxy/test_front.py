"""Our `Answer` against aiohttp's own responses: the same requests, byte streams that mean the same.

Run on the installed aiohttp here and on the oldest and newest allowed by `make test-all` (tests/aiohttp_versions.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httptools
import pytest
import trustme
from aiohttp import web

from proxy.front import Answer, Server

LOOPS = "both"

BODY = b'{"hello":"world"}'
EVENTS = [b"data: %d\n\n" % i for i in range(5)]
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


async def plain_whole(request: web.BaseRequest) -> web.StreamResponse:
    await request.read()
    return web.Response(body=BODY, content_type="application/json")


async def ours_whole(request: web.BaseRequest) -> web.StreamResponse:
    await request.read()
    answer = Answer(request)
    answer.send(200, [(b"content-type", b"application/json")], BODY)
    return answer


async def plain_stream(request: web.BaseRequest) -> web.StreamResponse:
    await request.read()
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    if request.version >= (1, 1):
        response.enable_chunked_encoding()
    await response.prepare(request)
    for event in EVENTS:
        await response.write(event)
    await response.write_eof()
    return response


async def ours_stream(request: web.BaseRequest) -> web.StreamResponse:
    await request.read()
    answer = Answer(request)
    answer.start(200, [(b"content-type", b"text/event-stream")], None, EVENTS[0])
    for event in EVENTS[1:-1]:
        answer.push(event)
    answer.finish(EVENTS[-1])
    return answer


PAIRS = {"whole": (plain_whole, ours_whole, BODY), "stream": (plain_stream, ours_stream, b"".join(EVENTS))}


@asynccontextmanager
async def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    server = Server(handler, max_body_bytes=1 << 20, keepalive_timeout=30)
    runner = web.ServerRunner(server, handle_signals=False)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    assert site._server is not None
    try:
        yield site._server.sockets[0].getsockname()[1]
    finally:
        await runner.cleanup()


class Parsed:
    """Responses of one connection, as a strict client reads them."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.responses: list[dict[str, Any]] = []
        self.complete = 0

    def on_message_begin(self) -> None:
        self.responses.append({"headers": {}, "body": b""})

    def on_header(self, name: bytes, value: bytes) -> None:
        self.responses[-1]["headers"][name.lower().decode()] = value.decode()

    def on_headers_complete(self) -> None:
        self.responses[-1]["status"] = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.responses[-1]["body"] += body

    def on_message_complete(self) -> None:
        self.complete += 1


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def talk(
    port: int, data: bytes, responses: int, tls: ssl.SSLContext | None = None
) -> tuple[Parsed, bool]:
    """Send bytes, read until `responses` are complete or the server closes. Returns (parsed, closed by server)."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=tls, server_hostname="localhost" if tls else None
    )
    parsed = Parsed()
    writer.write(data)
    closed = False
    async with asyncio.timeout(10):
        while parsed.complete < responses:
            piece = await reader.read(65536)
            if not piece:
                closed = True
                break
            parsed.parser.feed_data(piece)
        if not closed:
            # Does the server keep the connection? A further request must be answered or refused by a close.
            closed = reader.at_eof()
    await hang_up(writer)
    return parsed, closed


def post(version: str = "1.1", *headers: str, body: bytes = b"{}") -> bytes:
    lines = [f"POST /x HTTP/{version}", "host: t", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("headers", [(), ("connection: close",), ("connection: keep-alive",)], ids=str)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_status_body_and_persistence_are_those_of_aiohttp(
    kind: str, headers: tuple[str, ...], version: str
) -> None:
    plain, ours, body = PAIRS[kind]
    if (kind, headers, version) == ("stream", ("connection: keep-alive",), "1.0"):
        plain = ours  # aiohttp promises to keep a connection whose end is the only end of the body; we do not
    seen = []
    for handler in (plain, ours):
        async with serving(handler) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            parsed = Parsed()
            writer.write(post(version, *headers))
            async with asyncio.timeout(10):
                while not parsed.complete and (piece := await reader.read(65536)):
                    parsed.parser.feed_data(piece)
                response = parsed.responses[0]
                persists = False
                if parsed.complete:
                    writer.write(post(version, "connection: close"))
                    with contextlib.suppress(ConnectionResetError):
                        persists = bool(await reader.read(65536))
            await hang_up(writer)
            framing = [
                name for name in ("content-length", "transfer-encoding") if name in response["headers"]
            ]
            seen.append((response["status"], response["body"], framing, persists))
    assert seen[0] == seen[1]
    assert seen[1][1] == body


@pytest.mark.parametrize("kind", PAIRS)
async def test_pipelined_requests_are_answered_in_order(kind: str) -> None:
    for handler in PAIRS[kind][:2]:
        async with serving(handler) as port:
            parsed, _ = await talk(port, post() * 3, 3)
            assert [r["body"] for r in parsed.responses] == [PAIRS[kind][2]] * 3


async def test_head_has_the_length_and_no_body() -> None:
    for handler in (plain_whole, ours_whole):
        async with serving(handler) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"HEAD /x HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
            async with asyncio.timeout(10):
                raw = await reader.read()
            await hang_up(writer)
            head, _, rest = raw.partition(b"\r\n\r\n")
            assert b"content-length: %d" % len(BODY) in head.lower()
            assert rest == b""


@pytest.mark.parametrize("kind", PAIRS)
async def test_tls(kind: str) -> None:
    authority = trustme.CA()
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(server_tls)
    client_tls = ssl.create_default_context()
    authority.configure_trust(client_tls)
    for handler in PAIRS[kind][:2]:
        async with serving(handler, server_tls) as port:
            parsed, _ = await talk(port, post() * 2, 2, client_tls)
            assert [r["body"] for r in parsed.responses] == [PAIRS[kind][2]] * 2


async def test_204_has_neither_length_nor_body_and_keeps_the_connection() -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        answer = Answer(request)
        answer.send(204, [], b"")
        return answer

    async with serving(handler) as port:
        parsed, _ = await talk(port, post() * 2, 2)
        assert [r["status"] for r in parsed.responses] == [204, 204]
        assert "content-length" not in parsed.responses[0]["headers"]


async def test_an_unfinished_answer_is_cut_and_never_ends() -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        answer = Answer(request)
        answer.start(200, [], None, b"half")
        return answer

    async with serving(handler) as port:
        parsed, closed = await talk(port, post(), 1)
        assert (parsed.complete, closed) == (0, True)


async def test_a_body_short_of_its_length_is_cut() -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        answer = Answer(request)
        answer.start(200, [], 10, b"half")
        answer.finish()
        return answer

    async with serving(handler) as port:
        parsed, closed = await talk(port, post(), 1)
        assert (parsed.complete, closed) == (0, True)


async def test_a_client_that_stops_reading_is_told_and_resumes_without_loss() -> None:
    paused, resumed = asyncio.Event(), asyncio.Event()
    piece = b"x" * 65536
    pieces = 0

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal pieces
        answer = Answer(request)
        answer.watch(paused.set, resumed.set)
        answer.start(200, [], None)
        while not answer.paused:
            answer.push(piece)
            pieces += 1
        await resumed.wait()
        answer.finish(b"end")
        return answer

    async with serving(handler) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(post())
        async with asyncio.timeout(10):
            await paused.wait()
            parsed = Parsed()
            while not parsed.complete:
                parsed.parser.feed_data(await reader.read(65536))
        await hang_up(writer)
    assert resumed.is_set()
    assert parsed.responses[0]["body"] == piece * pieces + b"end"


async def test_a_client_that_resets_cancels_the_handler() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        answer = Answer(request)
        answer.start(200, [], None, b"a")
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return answer

    async with serving(handler) as port:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(post())
        async with asyncio.timeout(10):
            await started.wait()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            await cancelled.wait()


@pytest.mark.parametrize(
    "data", [b"GARBAGE\r\n\r\n", b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: x\r\n\r\n"]
)
async def test_what_is_not_http_gets_an_error_in_the_apis_shape(data: bytes) -> None:
    async with serving(ours_whole) as port:
        parsed, _ = await talk(port, data, 1)
        response = parsed.responses[0]
        assert response["status"] == 400
        assert response["headers"]["content-type"].startswith("application/json")
        assert b'"error":{"message"' in response["body"]


def bomb(size: int) -> bytes:
    """`size` zeros, a thousandth of that when packed."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(size >> 20)) + packer.flush()


@pytest.mark.parametrize("reads", [True, False], ids=["read", "refused unread"])
async def test_a_small_body_that_unpacks_to_a_huge_one_costs_little_memory(reads: bool) -> None:
    limit, seen = 1 << 20, []

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        answer = Answer(request, close=True)
        try:
            if reads:
                await request.read()
            seen.append(200)
        except web.HTTPRequestEntityTooLarge:
            seen.append(413)
        answer.send(seen[-1], [], b"")
        return answer

    packed = bomb(48 * limit)
    tracemalloc.start()
    try:
        async with serving(handler) as port:
            await talk(port, post("1.1", "content-encoding: gzip", body=packed), 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen == [413 if reads else 200]
    assert peak < 16 * limit, f"{peak >> 20} MiB"


@pytest.mark.parametrize(("size", "status"), [((1 << 20) - 1, 200), (1 << 20, 200), ((1 << 20) + 1, 413)])
async def test_a_body_may_be_as_large_as_the_limit_and_no_larger(size: int, status: int) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        answer = Answer(request, close=True)
        try:
            answer.send(200, [], b"%d" % len(await request.read()))
        except web.HTTPRequestEntityTooLarge:
            answer.send(413, [], b"")
        return answer

    async with serving(handler) as port:
        parsed, _ = await talk(port, post(body=bytes(size)), 1)
    assert parsed.responses[0]["status"] == status
