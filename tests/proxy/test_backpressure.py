"""A client that does not read stops the backend being read: memory stays bounded, nothing is lost when it goes on."""

from __future__ import annotations

import asyncio
import gc
import hashlib

import pytest

from proxy.errors import Outcome
from proxy.exchange import Exchange
from proxy.front import Answer, ClientConnection
from proxy.relay import Relay
from tests.client import Connection
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.proxy.dialects import CHAT_DIALECT
from tests.proxy.scenes import COMMENTS, QUIET, TIMES, eventually, held_back, scene, settled
from tests.scripted import (
    DONE,
    Chunk,
    Head,
    LastChunk,
    Raw,
    ScriptedBackend,
    Step,
    WaitFor,
    chat_event,
    server_tls,
    sse,
)

LOOPS = "both"
MIB = 1 << 20
PIECE = bytes(range(256)) * 4096  # 1 MiB
PIECES = 32
MORE_THAN_KERNELS_HOLD = PIECES * MIB
BOUND = 2 * MIB  # one read of the backend, and what the transport takes before it says stop


def sound(count: int = PIECES) -> list[Step]:
    """A body that passes unseen."""
    return [
        Head(200, [("content-type", "audio/mpeg"), ("transfer-encoding", "chunked")]),
        *[Chunk(PIECE)] * count,
        LastChunk(),
    ]


def long_stream() -> tuple[list[Step], bytes]:
    """An event stream of as many bytes, and what the client must get."""
    delta = chat_event({"content": "word " * 10_000})
    count = MORE_THAN_KERNELS_HOLD // len(delta)
    steps = CHAT_DIALECT.stream(*CHAT_DIALECT.events[:2], *[delta] * count, *CHAT_DIALECT.events[3:])
    return steps, b"".join(step.data for step in steps if isinstance(step, Chunk))


def held(gateway: Gateway) -> int:
    """Bytes that the gateway holds for its clients."""
    server = gateway.app._server
    assert server is not None
    sizes = []
    for connection in server.connections:
        assert isinstance(connection, ClientConnection)
        if connection.transport is not None:
            sizes.append(connection.transport.get_write_buffer_size())
    return sum(sizes)


def ask_speech(client: Connection) -> None:
    client.send("/v1/audio/speech", {"model": "tiny", "input": "hi"})


@pytest.mark.parametrize("kind", ["event stream", "unseen"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_a_client_that_stops_reading_stops_the_backend_and_loses_nothing(
    make_gateway: MakeGateway, kind: str, tls: bool
) -> None:
    async with ScriptedBackend(tls=server_tls()[0] if tls else None) as backend:
        gateway = await make_gateway(
            backend, config=QUIET, per_backend={"a": "tls.insecure_any_certificate = true" if tls else ""}
        )
        async with await gateway.connect() as client:
            if kind == "unseen":
                backend.answer(sound())
                expected = PIECE * PIECES
                ask_speech(client)
            else:
                steps, expected = long_stream()
                backend.answer(steps)
                client.send(CHAT, chat(stream=True))
            await backend.blocked()
            await held_back(gateway)
            written = backend.requests[0].connection.sent
            assert written < len(expected)
            assert held(gateway) < BOUND
            response = await client.read()
            assert response.complete
            assert hashlib.sha256(response.body).digest() == hashlib.sha256(expected).digest()
        await gateway.ended(Outcome.OK)
        await settled(gateway, pooled=1)


async def test_a_client_that_reads_little_by_little_gets_everything(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    backend.answer(sound())
    async with await gateway.connect() as client:
        ask_speech(client)
        largest, got = 0, 0
        while got < len(PIECE) * PIECES:
            await client.read_some()
            got = sum(map(len, client.response.pieces))
            largest = max(largest, held(gateway))
        response = await client.read()
        assert (response.complete, len(response.body)) == (True, MORE_THAN_KERNELS_HOLD)
        assert largest < BOUND
    await gateway.ended(Outcome.OK)
    await settled(gateway, pooled=1)


async def test_one_that_does_not_read_holds_up_nobody_else(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    backend.answer(sound())
    async with await gateway.connect() as lazy:
        ask_speech(lazy)
        await backend.blocked()
        await held_back(gateway)
        for _ in range(3):
            assert (await gateway.chat(stream=True)).text == "Hello there."
        lazy.reset()
        await backend.closed()
    await gateway.ended(*[Outcome.OK] * 3, Outcome.CANCELLED)
    await settled(gateway, pooled=1)


async def test_an_unread_answer_holds_back_the_next_one_of_the_same_connection(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    """It is not even asked for: who asks and does not read would otherwise pile up answers here."""
    gateway = await make_gateway(backend, config=QUIET)
    # The first is small enough to be written at once and too large for the kernel.
    backend.answer(
        [
            Head(200, [("content-type", "application/json"), ("content-length", str(7 * MIB))]),
            Raw(b'{"a":"'),
            Raw(b"x" * (7 * MIB - 8)),
            Raw(b'"}'),
        ],
        sound(),
    )
    async with await gateway.connect() as client:
        client.send(CHAT, chat())
        ask_speech(client)
        await eventually(lambda: held(gateway) > 0, "the first answer")
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(backend.requests) == 1
        assert held(gateway) < 7 * MIB + BOUND
        first = await client.read()
        assert (first.complete, len(first.body)) == (True, 7 * MIB)
        client.next()
        second = await client.read()
        assert (second.complete, len(second.body)) == (True, MORE_THAN_KERNELS_HOLD)
    await gateway.ended(Outcome.OK, Outcome.OK)
    await settled(gateway, pooled=1)


@pytest.mark.parametrize("kind", ["events", "sound"])
async def test_a_client_whom_the_last_write_fills_does_not_stop_the_backends_connection_for_who_has_it_next(
    make_gateway: MakeGateway, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    finish = Answer.finish

    def fill(answer: Answer, last: bytes = b"") -> None:
        finish(answer, last)
        answer._connection.pause_writing()  # as the transport does when more waits than it likes

    async with await gateway.connect() as client:
        with monkeypatch.context() as patch:
            patch.setattr(Answer, "finish", fill)
            if kind == "events":
                client.send(CHAT, chat(stream=True))
            else:
                backend.answer(sound(1))
                ask_speech(client)
            assert (await client.read()).complete
    assert (await gateway.chat(stream=True)).text == "Hello there."
    assert backend.requests[1].reused
    await gateway.ended(Outcome.OK, Outcome.OK)
    await settled(gateway, pooled=1)


async def test_the_backends_silence_is_not_counted_while_the_client_does_not_read(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    steps, expected = long_stream()
    backend.answer(steps)
    config = TIMES.replace("client_idle = 30", "client_idle = 200")
    async with scene(make_gateway, backend, config=config) as at:
        at.client.send(CHAT, chat(stream=True))
        await backend.blocked()
        await held_back(at.gateway)
        at.clock.advance(190)  # gap is 20
        assert not at.over()
        response = await at.client.read()
        assert response.body == expected
        await at.ended(Outcome.OK)


async def test_no_comment_is_put_behind_what_a_client_does_not_read(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    steps, expected = long_stream()
    backend.answer(steps)
    config = COMMENTS.replace("client_idle = 30", "client_idle = 200")
    async with scene(make_gateway, backend, config=config) as at:
        at.client.send(CHAT, chat(stream=True))
        await backend.blocked()
        await held_back(at.gateway)
        at.clock.advance(190)
        assert (await at.client.read()).body == expected
        await at.ended(Outcome.OK)


async def test_an_error_reaches_a_client_that_reads_late(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    """The backend breaks while its bytes wait: they come first, then the error."""
    steps, _ = long_stream()
    cut = [step for step in steps if step not in (Chunk(DONE), LastChunk())][:-1]
    backend.answer([*cut, Chunk(CHAT_DIALECT.own_error)])
    gateway = await make_gateway(backend, config=QUIET)
    async with await gateway.connect() as client:
        client.send(CHAT, chat(stream=True))
        await backend.blocked()
        await held_back(gateway)
        response = await client.read()
        assert CHAT_DIALECT.error_at_end(response)["message"] == "engine died"
        sent = b"".join(step.data for step in cut if isinstance(step, Chunk))
        assert response.body.startswith(sent)
    await gateway.ended(Outcome.UPSTREAM_ERROR)
    await settled(gateway, pooled=0)


async def test_a_request_that_the_backend_does_not_read_is_held_once(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    """A large request goes out as the backend takes it."""
    gateway = await make_gateway(
        backend,
        config=QUIET,
        per_backend={"a": "limits.window_tokens = 100000000\nlimits.kv_tokens = 1000000000"},
    )
    text = "x" * (16 * MIB)
    async with await gateway.connect() as client:
        client.send(CHAT, chat(text))
        request = await backend.received()
        assert len(request.body) > 16 * MIB
        assert (await client.read()).status == 200
    await gateway.ended(Outcome.OK)
    await settled(gateway, pooled=1)


async def test_an_idle_connection_holds_nothing_of_the_stream_before(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway, gates = await make_gateway(backend), [asyncio.Event(), asyncio.Event()]
    words = [chat_event({"content": word}) for word in (" one", " two", " three")]
    head, first, *rest = sse(*words, chat_event({}, "stop"))
    backend.answer([head, first, WaitFor(gates[0]), rest[0], WaitFor(gates[1]), *rest[1:]])
    gc.collect()
    gc.disable()
    try:
        async with await gateway.connect() as client:
            client.send(CHAT, chat("x" * 1000, stream=True))
            await client.read_until(words[0])
            gates[0].set()
            await client.read_until(words[1])
            (upstream,) = gateway.app.pool.backends["a"].connections._all
            assert upstream.sent == len(words[1])  # by the lane
            gates[1].set()
            assert (await client.read()).body.endswith(DONE)
        await settled(gateway, pooled=1)
        alive = [found for found in gc.get_objects() if isinstance(found, Exchange | Relay)]
        assert alive == []
    finally:
        gc.enable()


async def test_a_request_leaves_no_circle_for_the_collector_to_find(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    """A long body in a circle would stay until the oldest generation is collected: hundreds of megabytes."""
    gateway = await make_gateway(backend)
    await gateway.chat()
    gc.collect()
    gc.disable()
    try:
        for stream in (False, True):
            await gateway.chat("x" * 1000, stream=stream)
        alive = [found for found in gc.get_objects() if isinstance(found, Exchange | Relay)]
        assert alive == []
    finally:
        gc.enable()
