"""A client that goes away, in every phase and both ways: the backend stops at once, its slot is free, nobody is blamed."""

from __future__ import annotations

import asyncio
import time

import pytest

from proxy.errors import Outcome
from tests.client import Connection
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.proxy.dialects import DIALECTS, Dialect
from tests.proxy.scenes import QUIET, dispatching, eventually, settled
from tests.scripted import (
    Chunk,
    Close,
    Head,
    Raw,
    ScriptedBackend,
    Stall,
    WaitFor,
    black_hole,
    server_tls,
)

LOOPS = "both"
each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=str)
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
each_going = pytest.mark.parametrize("going", ["FIN", "RST"])
BIG = b"x" * (1 << 20)


def leave(client: Connection, going: str) -> None:
    if going == "FIN":
        client.close()
    else:
        client.reset()


async def left_alone(gateway: Gateway, *, attempts: int = 1) -> None:
    """What a cancelled request leaves: a record that says so, a backend that is not blamed, and nothing else."""
    record = await gateway.record()
    assert (record.outcome, record.error) == (Outcome.CANCELLED, "client went away")
    assert record.attempts == attempts
    for backend in gateway.app.pool.backends.values():
        assert backend.health.healthy
        assert backend.health.failures == 0
    await gateway.ended(Outcome.CANCELLED)
    await settled(gateway, pooled=0)


@each_going
@pytest.mark.parametrize("sent", [0, 10], ids=["no body", "half a body"])
async def test_while_the_request_is_sent(
    make_gateway: MakeGateway, backend: ScriptedBackend, going: str, sent: int
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    async with await gateway.connect() as client:
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n" % CHAT.encode()
        client.send_raw(head + b"{" * sent)
        await eventually(lambda: bool(gateway.app.gateway.exchanges), "the request")
        leave(client, going)
        await left_alone(gateway, attempts=0)
    assert not backend.requests


@each_going
async def test_while_connecting(make_gateway: MakeGateway, going: str) -> None:
    with black_hole() as port:
        gateway = await make_gateway(f"http://127.0.0.1:{port}", config=QUIET)
        async with await gateway.connect() as client:
            client.send(CHAT, chat())
            await dispatching(gateway)
            leave(client, going)
            await left_alone(gateway)


@each_going
async def test_while_the_backend_does_not_read_the_request(
    make_gateway: MakeGateway, backend: ScriptedBackend, going: str
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    backend.greet([Stall()])
    async with await gateway.connect() as client:
        client.send(CHAT, chat("x" * 200_000))
        await dispatching(gateway)
        leave(client, going)
        await left_alone(gateway)
    await backend.until(
        lambda: not any(not c.requests for c in backend.connections if c.ending is None), "FIN"
    )


@each_going
@each_way
@each_dialect
async def test_before_the_head_of_the_answer(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, stream: bool, going: str
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    backend.answer([Stall()])
    async with await gateway.connect() as client:
        client.send(dialect.path, dialect.request(stream=stream))
        await backend.received()
        leave(client, going)
        assert (await backend.closed()).by_peer
    await left_alone(gateway)


@each_going
@each_dialect
async def test_in_prefill_with_the_head_sent(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, going: str
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    backend.answer([dialect.stream()[0], Chunk(b": prefill\n\n"), Stall()])
    async with await gateway.connect() as client:
        client.send(dialect.path, dialect.request(stream=True))
        await backend.until(
            lambda: bool(backend.requests) and backend.requests[0].connection.sent > 100, "a head"
        )
        leave(client, going)
        assert (await backend.closed()).by_peer
    await left_alone(gateway)


@each_going
@each_dialect
async def test_in_the_middle_of_a_stream(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, going: str
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    backend.answer([*dialect.begin(), Stall()])
    async with await gateway.connect() as client:
        client.send(dialect.path, dialect.request(stream=True))
        await client.read_until(dialect.begun_bytes)
        leave(client, going)
        assert (await backend.closed()).by_peer
    await left_alone(gateway)
    record = await gateway.record()
    assert record.first_delta_at is not None
    assert record.bytes_out == len(dialect.begun_bytes)


@each_going
@each_dialect
async def test_in_the_middle_of_an_answer_that_is_not_streamed(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, going: str
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    backend.answer(
        [Head(200, [("content-type", "application/json"), ("content-length", "99")]), Raw(b"{"), Stall()]
    )
    async with await gateway.connect() as client:
        client.send(dialect.path, dialect.request(stream=False))
        await backend.until(
            lambda: bool(backend.requests) and backend.requests[0].connection.sent > 50, "a head"
        )
        leave(client, going)
        assert (await backend.closed()).by_peer
    await left_alone(gateway)


@pytest.mark.parametrize("going", ["FIN", "RST", "half-close"])
async def test_while_it_does_not_read(
    make_gateway: MakeGateway, backend: ScriptedBackend, going: str
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    backend.answer([Head(200, [("content-type", "audio/mpeg")]), *[Raw(BIG)] * 64, Stall()])
    async with await gateway.connect() as client:
        client.send("/v1/audio/speech", {"model": "tiny", "input": "hi"})
        await backend.blocked()
        if going == "half-close":
            client.half_close()
        else:
            leave(client, going)
        assert (await backend.closed()).by_peer
        await left_alone(gateway)


@each_going
async def test_with_a_backend_on_tls(make_gateway: MakeGateway, going: str) -> None:
    async with ScriptedBackend(tls=server_tls()[0]) as secure:
        gateway = await make_gateway(
            secure, config=QUIET, per_backend={"a": "tls.insecure_any_certificate = true"}
        )
        secure.answer([*DIALECTS[0].begin(), Stall()])
        async with await gateway.connect() as client:
            client.send(CHAT, chat(stream=True))
            await client.read_until(b"Hello")
            leave(client, going)
            assert (await secure.closed()).by_peer
        await left_alone(gateway)


@each_going
async def test_during_the_second_attempt(
    make_gateway: MakeGateway, backend: ScriptedBackend, going: str
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    backend.answer(DIALECTS[0].whole(), [Close()], [Stall()])
    assert (await gateway.chat()).status == 200
    async with await gateway.connect() as client:
        client.send(CHAT, chat())
        await backend.received(2)
        leave(client, going)
        assert (await backend.closed(2)).by_peer
    assert (await gateway.record(1)).attempts == 2
    await gateway.ended(Outcome.OK, Outcome.CANCELLED)
    await settled(gateway, pooled=0)


@pytest.mark.parametrize("phase", ["prefill", "stream"])
async def test_the_backend_sees_it_within_100_ms(
    make_gateway: MakeGateway, backend: ScriptedBackend, phase: str
) -> None:
    """The median of five: one may lose the processor to somebody else."""
    gateway = await make_gateway(backend, config=QUIET)
    seconds = []
    for number in range(5):
        backend.answer([Stall()] if phase == "prefill" else [*DIALECTS[0].begin(), Stall()])
        async with await gateway.connect() as client:
            client.send(CHAT, chat(stream=True))
            await backend.received(number)
            if phase == "stream":
                await client.read_until(b"Hello")
            started = time.monotonic()
            client.reset()
            await backend.closed(number)
            seconds.append(time.monotonic() - started)
    assert sorted(seconds)[2] < 0.1, seconds
    await settled(gateway, pooled=0)


async def test_a_hundred_at_once_leave_nothing(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    per_backend = {"a": "limits.max_in_flight = 200\nlimits.kv_tokens = 10_000_000"}
    gateway = await make_gateway(backend, config=QUIET, per_backend=per_backend)
    backend.default = [*DIALECTS[0].begin(), Stall()]
    clients = [await gateway.connect() for _ in range(100)]
    for client in clients:
        client.send(CHAT, chat(stream=True))
    for client in clients:
        await client.read_until(b"Hello")
    assert gateway.app.pool.backends["a"].in_flight == 100
    for number, client in enumerate(clients):
        leave(client, ("FIN", "RST")[number % 2])
    await gateway.records.get(99)
    await gateway.ended(*[Outcome.CANCELLED] * 100)
    await settled(gateway, pooled=0)
    for client in clients:
        async with client:
            pass


# -- what is not a client that goes away ----------------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_order_one_at_a_time(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    gate = asyncio.Event()
    dialect = DIALECTS[0]
    read = asyncio.Event()
    backend.answer([WaitFor(gate), *dialect.stream()], [WaitFor(read), *dialect.whole(id="second")])
    async with await gateway.connect() as client:
        client.send(dialect.path, dialect.request(stream=True))
        await backend.received(0)
        client.send(dialect.path, dialect.request(stream=False))
        assert gateway.app.pool.backends["a"].in_flight == 1
        gate.set()
        first = await client.read()
        assert first.body == b"".join(dialect.events)
        client.next()
        read.set()
        assert (await client.read()).json["id"] == "second"
    assert len(backend.requests) == 2
    await gateway.ended(Outcome.OK, Outcome.OK)
    await settled(gateway, pooled=1)


async def test_a_client_that_leaves_behind_pipelined_requests_cancels_the_one_that_runs(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    backend.answer([Stall()])
    async with await gateway.connect() as client:
        client.send(CHAT, chat())
        client.send(CHAT, chat())
        await backend.received()
        client.reset()
        assert (await backend.closed()).by_peer
    await left_alone(gateway)
    assert len(backend.requests) == 1


async def test_a_client_that_leaves_after_its_answer_is_not_cancelled(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    async with await gateway.connect() as client:
        client.send(CHAT, chat(stream=True))
        assert (await client.read()).complete
        client.reset()
    await gateway.ended(Outcome.OK)
    await settled(gateway, pooled=1)
