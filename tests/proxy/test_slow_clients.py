"""Clients that are slow with their heads, bodies and reading, and too many of them: bounded; nobody else is kept waiting."""

from __future__ import annotations

import asyncio
import json

import pytest

from proxy.errors import Outcome
from tests.client import Connection
from tests.fake_clock import FakeClock
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.proxy.scenes import QUIET, eventually, polled
from tests.proxy.test_backpressure import held
from tests.scripted import ScriptedBackend, WaitFor, chat_json, event, sse, whole

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
REQUEST = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


async def made(
    make_gateway: MakeGateway, backend: ScriptedBackend, config: str = ""
) -> tuple[Gateway, FakeClock]:
    clock = FakeClock()
    gateway = await make_gateway(backend, config=QUIET + config, clock=clock)
    await polled(gateway)
    return gateway, clock


def connections(gateway: Gateway) -> int:
    server = gateway.app._server
    assert server is not None
    return len(server.connections)


async def trickled(gateway: Gateway, clock: FakeClock, client: Connection, data: bytes) -> None:
    """One byte a second."""
    for place in range(len(data)):
        client.send_more(data[place : place + 1])
        for _ in range(20):
            await asyncio.sleep(0)
        clock.advance(1.0)


# -- heads


async def test_a_head_that_trickles_in_is_cut_off_however_steadily(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway, clock = await made(make_gateway, backend)
    async with await gateway.connect() as client:
        client.send_raw(b"")
        await trickled(gateway, clock, client, HEAD[:10])
        response = await client.read()
    assert (response.status, response.json["error"]["code"]) == (408, "request_timeout")
    assert response.headers["connection"] == "close"
    await eventually(lambda: not connections(gateway), "the end of the connection")
    assert not gateway.records.closed


async def test_a_body_that_comes_behind_its_head_is_no_head_that_never_ends(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    """Read before the request is begun: the answer would have been cut ten seconds later."""
    gateway, clock = await made(make_gateway, backend)
    gate = asyncio.Event()
    backend.answer([WaitFor(gate), *chat_json()])
    async with await gateway.connect() as client:
        client.send(CHAT, chat(padding="x" * (1 << 20)))
        await backend.received(0)
        clock.advance(30.0)
        gate.set()
        assert (await client.read()).status == 200


async def test_a_head_in_pieces_within_its_time_is_as_good_as_any(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway, clock = await made(make_gateway, backend)
    async with await gateway.connect() as client:
        client.send_raw(b"")
        await trickled(gateway, clock, client, REQUEST[:9])
        client.send_more(REQUEST[9:])
        assert (await client.read()).status == 200
        clock.advance(30.0)  # its timer is gone
        client.send_raw(REQUEST)
        assert (await client.read()).status == 200


async def test_the_next_heads_of_a_connection_have_the_same_time(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway, clock = await made(make_gateway, backend)
    async with await gateway.connect() as client:
        client.send_raw(REQUEST)
        assert (await client.read()).status == 200
        clock.advance(60.0)  # idle: that is the keep-alive's
        client.send_raw(b"")
        await trickled(gateway, clock, client, HEAD[:10])
        assert (await client.read()).status == 408


async def test_a_body_that_trickles_in_is_no_head(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway, clock = await made(make_gateway, backend)
    body = json.dumps(chat("a word, and another one, and so on")).encode()
    async with await gateway.connect() as client:
        head = HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        client.send_raw(head)
        await trickled(gateway, clock, client, body[:30])
        client.send_more(body[30:])
        assert (await client.read()).status == 200
        client.send_raw(head)
        await trickled(gateway, clock, client, body[:60])  # longer than `server.body_timeout`
        response = await client.read()
    assert (response.status, response.json["error"]["code"]) == (408, "request_timeout")
    await gateway.ended(Outcome.OK, Outcome.CLIENT_TIMEOUT)


@pytest.mark.parametrize(
    "head",
    [b"x: " + b"y" * 40_000, b"\r\n".join(b"x-%d: y" % i for i in range(40_000)), b"y" * 70_000],
    ids=["one long field", "many fields", "no field at all"],
)
async def test_a_head_without_end_is_refused_before_it_fills_the_memory(
    make_gateway: MakeGateway, backend: ScriptedBackend, head: bytes
) -> None:
    gateway, _ = await made(make_gateway, backend)
    async with await gateway.connect() as client:
        client.send_raw(HEAD + head)
        response = await client.read()
    assert (response.status, response.json["error"]["code"]) == (400, "bad_http")


async def test_slow_heads_keep_nobody_else_waiting(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway, clock = await made(make_gateway, backend)
    slow = [await gateway.connect() for _ in range(200)]
    for client in slow:
        client.send_raw(HEAD[:20])
    await eventually(lambda: clock.pending >= 200, "the slow heads")
    assert (await gateway.chat()).status == 200
    clock.advance(10.1)
    await eventually(lambda: connections(gateway) <= 1, "the end of the slow ones")
    for client in slow:
        client.close()


# -- too many


async def test_a_connection_too_many_is_told_so_and_one_that_ends_makes_room(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway, _ = await made(make_gateway, backend, "[server]\nport = 0\nmax_connections = 2\n")
    async with await gateway.connect() as one:
        one.send_raw(REQUEST)
        assert (await one.read()).status == 200
        async with await gateway.connect() as two:
            two.send_raw(REQUEST)
            assert (await two.read()).status == 200
            async with await gateway.connect() as three:
                three.send_raw(b"")
                response = await three.read()
            assert (response.status, response.json["error"]["code"]) == (503, "too_many_connections")
            assert response.headers["retry-after"] == "1"
            one.send_raw(REQUEST)
            assert (await one.read()).status == 200
        await eventually(lambda: connections(gateway) == 1, "room")
        assert (await gateway.ask("/health")).status == 200


# -- answers that nobody takes

LARGE = b'{"id": "x", "object": "y", "text": "' + b"x" * (7 << 20) + b'"}'


async def unread(gateway: Gateway, client: Connection, *, stream: bool) -> None:
    """A whole answer that is written, and of which the client has taken nothing."""
    client.send(CHAT, chat(stream=stream))
    await gateway.records.get(0)


async def test_a_whole_answer_that_nobody_reads_does_not_stay(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway, clock = await made(make_gateway, backend)
    backend.answer(whole(LARGE, content_type="application/json"))
    async with await gateway.connect() as client:
        await unread(gateway, client, stream=False)
        clock.advance(59.0)
        await asyncio.sleep(0)
        assert connections(gateway) == 1
        clock.advance(2.0)
        await eventually(lambda: not connections(gateway), "the end of the connection")


async def test_a_byte_a_second_is_not_reading(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    gateway, clock = await made(make_gateway, backend)
    backend.answer(whole(LARGE, content_type="application/json"))
    async with await gateway.connect() as client:
        await unread(gateway, client, stream=False)
        for _ in range(61):
            await client._reader.read(1)
            clock.advance(1.0)
        await eventually(lambda: not connections(gateway), "the end of the connection")


async def test_who_reads_slowly_but_reads_gets_everything(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway, clock = await made(make_gateway, backend)
    backend.answer(whole(LARGE, content_type="application/json"))
    async with await gateway.connect() as client:
        await unread(gateway, client, stream=False)
        while before := held(gateway):
            while held(gateway) > max(0, before - 100_000):  # what is read makes room for as much
                assert await client._reader.read(1 << 16)
            clock.advance(59.0)
            await asyncio.sleep(0)
        clock.advance(120.0)
        await asyncio.sleep(0)
        assert connections(gateway) == 1  # nothing is left to wait for
        client.send(CHAT, chat())
        await gateway.records.get(1)


async def test_a_stream_that_nobody_reads_is_cut_and_the_generation_with_it(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway, clock = await made(make_gateway, backend, "[timeouts]\nkeepalive_after = 0\n")
    piece = event({"choices": [{"index": 0, "delta": {"content": "x" * 60_000}}]})
    backend.answer(sse(*[piece] * 200, done=True))
    async with await gateway.connect() as client:
        client.send(CHAT, chat(stream=True))
        await backend.blocked()
        (exchange,) = gateway.app.gateway.exchanges
        await eventually(lambda: exchange.answer.paused, "back-pressure")
        clock.advance(61.0)
        await gateway.ended(Outcome.CLIENT_TIMEOUT)
        assert (await backend.closed()).by_peer
        await eventually(lambda: not connections(gateway), "the end of the connection")


async def test_clients_that_are_not_slow_cost_no_timer(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway, clock = await made(make_gateway, backend)
    pending = []
    async with await gateway.connect() as client:
        for _ in range(3):
            client.send(CHAT, chat(stream=True))
            assert (await client.read()).complete
            pending.append(clock.pending)
    assert len(set(pending)) == 1
