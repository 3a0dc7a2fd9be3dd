"""Connections to backends: kept, reused, retired, replaced; and the odd answers that a C parser leaves to us."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from pathlib import Path

import pytest

from proxy.errors import Outcome
from proxy.tls import Tls
from proxy.upstream import ConnectionPool, UpstreamConnection
from tests.fake_clock import FakeClock
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.proxy.dialects import CHAT_DIALECT, DIALECTS, Dialect
from tests.proxy.scenes import QUIET, polled, settled
from tests.scripted import (
    DEADLINE,
    Chunk,
    Close,
    Ending,
    Head,
    Raw,
    Reset,
    ScriptedBackend,
    Stall,
    Step,
    WaitFor,
    chat_json,
    server_tls,
    whole,
)

LOOPS = "both"
EVENTS = ("content-type", "text/event-stream")
JSON = ("content-type", "application/json")
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
BODY = b'{"id":"c","choices":[{"index":0,"message":{"content":"Hello"},"finish_reason":"stop"}]}'


def pool_of(gateway: Gateway, name: str = "a") -> ConnectionPool:
    return gateway.app.pool.backends[name].connections


# -- kept and reused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_a_connection_serves_one_request_after_the_other(
    make_gateway: MakeGateway, tmp_path: Path, tls: bool
) -> None:
    context, authority = server_tls()
    (tmp_path / "ca.pem").write_bytes(authority)
    async with ScriptedBackend(tls=context if tls else None) as backend:
        gateway = await make_gateway(
            backend, config=QUIET, per_backend={"a": 'tls.ca = "ca.pem"' if tls else ""}
        )
        for number in range(6):
            response = await gateway.chat(stream=number % 2 == 0)
            assert (response.status, response.complete) == (200, True)
        assert [request.reused for request in backend.requests] == [False] + [True] * 5
        await gateway.ended(*[Outcome.OK] * 6)
        await settled(gateway, pooled=1)


async def test_requests_at_the_same_time_have_a_connection_each_and_the_newest_is_used_first(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    gates = [asyncio.Event() for _ in range(3)]
    backend.answer(*[[WaitFor(gate), *chat_json()] for gate in gates])
    asked = []
    for number in range(3):
        asked.append(asyncio.create_task(gateway.chat()))
        await backend.received(number)
    for gate, task in zip(gates, asked, strict=True):
        gate.set()
        await task
    assert pool_of(gateway).open_connections == 3
    newest = backend.requests[2].connection
    for _ in range(3):  # a quiet pool goes on with one: the others may retire
        await gateway.chat()
    assert {id(request.connection) for request in backend.requests[3:]} == {id(newest)}
    await settled(gateway, pooled=3)


async def test_no_more_connections_are_kept_than_configured(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET + "[pool]\nmax_idle = 2\n")
    gate = asyncio.Event()
    backend.answer(*[[WaitFor(gate), *chat_json()]] * 5)
    asked = [asyncio.create_task(gateway.chat()) for _ in range(5)]
    await backend.received(4)
    assert pool_of(gateway).open_connections == 5
    gate.set()
    await asyncio.gather(*asked)
    await settled(gateway, pooled=2)


async def test_no_connection_is_kept_where_the_limit_is_none(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET, per_backend={"a": "max_idle = 0"})
    for _ in range(2):
        assert (await gateway.chat()).status == 200
    assert [request.reused for request in backend.requests] == [False, False]
    await settled(gateway, pooled=0)


async def test_an_idle_connection_is_retired_before_the_backend_would_close_it(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(backend, config=QUIET, clock=clock)
    await polled(gateway)
    await gateway.chat()
    clock.advance(3.9)
    await gateway.chat()
    assert backend.requests[1].reused
    clock.advance(3.9)
    assert pool_of(gateway).open_connections == 1
    clock.advance(0.2)
    assert (await backend.closed()).by_peer
    await settled(gateway, pooled=0)
    await gateway.chat()
    assert not backend.requests[2].reused
    await gateway.ended(*[Outcome.OK] * 3)
    await settled(gateway, pooled=1)


async def test_connections_retire_one_by_one_as_each_gets_old(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(backend, config=QUIET, clock=clock)
    await polled(gateway)
    first, second = asyncio.Event(), asyncio.Event()
    backend.answer([WaitFor(first), *chat_json()], [WaitFor(second), *chat_json()])
    asked = [asyncio.create_task(gateway.chat()) for _ in range(2)]
    await backend.received(1)
    first.set()
    await gateway.records.get(0)
    clock.advance(2)
    second.set()
    await asyncio.gather(*asked)
    clock.advance(2.1)
    await settled(gateway, pooled=1)
    clock.advance(2)
    await settled(gateway, pooled=0)


# -- a reused connection that is dead ----------------------------------------------------------------------------------


@each_way
@pytest.mark.parametrize("end", [Close(), Reset()], ids=["FIN", "RST"])
@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
async def test_a_reused_connection_that_dies_before_a_byte_is_replaced_once(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, stream: bool, end: Step
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    good = dialect.stream() if stream else dialect.whole()
    backend.answer(good, [end], good)
    for _ in range(2):
        response = await gateway.ask(dialect.path, dialect.request(stream=stream))
        assert (response.status, response.complete) == (200, True)
    assert [request.reused for request in backend.requests] == [False, True, False]
    assert backend.requests[1].body == backend.requests[2].body
    assert (await gateway.record(1)).attempts == 2
    assert gateway.app.pool.backends["a"].health.failures == 0
    await gateway.ended(Outcome.OK, Outcome.OK)
    await settled(gateway, pooled=1)


@each_way
async def test_one_that_dies_again_is_not_tried_a_third_time(
    make_gateway: MakeGateway, backend: ScriptedBackend, stream: bool
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    backend.answer(chat_json(), [Close()], [Close()], chat_json())
    assert (await gateway.chat()).status == 200
    assert (await gateway.chat(stream=stream)).status == 502
    assert len(backend.requests) == 3
    await gateway.ended(Outcome.OK, Outcome.UPSTREAM_CUT)
    await settled(gateway, pooled=0)


@pytest.mark.parametrize("first_byte", [b"H", b"HTTP/1.1 200 OK\r\n"], ids=["a byte", "a line"])
async def test_one_that_dies_after_a_byte_is_not_replaced(
    make_gateway: MakeGateway, backend: ScriptedBackend, first_byte: bytes
) -> None:
    """The backend has begun to work on it."""
    gateway = await make_gateway(backend, config=QUIET)
    backend.answer(chat_json(), [Raw(first_byte), Close()], chat_json())
    assert (await gateway.chat()).status == 200
    assert (await gateway.chat()).status == 502
    assert len(backend.requests) == 2
    await gateway.ended(Outcome.OK, Outcome.UPSTREAM_CUT)


async def test_a_backend_that_restarted_is_asked_on_a_fresh_connection_though_several_are_stale(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    gate = asyncio.Event()
    backend.answer(*[[WaitFor(gate), *chat_json()]] * 3, [Close()], chat_json())
    asked = [asyncio.create_task(gateway.chat()) for _ in range(3)]
    await backend.received(2)
    gate.set()
    await asyncio.gather(*asked)
    assert (await gateway.chat()).status == 200
    assert [request.reused for request in backend.requests[3:]] == [True, False]
    await settled(gateway, pooled=3)


async def test_a_connection_that_the_backend_closed_while_idle_is_not_used(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    await gateway.chat()
    assert backend.close_idle() >= 1  # the poller has one, too
    assert await backend.closed() is Ending.OURS
    await settled(gateway, pooled=0)
    assert (await gateway.chat()).status == 200
    assert (await gateway.record(1)).attempts == 1
    await settled(gateway, pooled=1)


# -- what may not be reused ---------------------------------------------------------------------------------------------

LENGTH = ("content-length", str(len(BODY)))
NOT_REUSABLE: dict[str, list[Step]] = {
    "connection: close": [Head(200, [JSON, LENGTH, ("connection", "close")]), Raw(BODY)],
    "HTTP/1.0": [
        Raw(
            b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY)
            + BODY
        )
    ],
    "until the connection closes": [Head(200, [JSON]), Raw(BODY), Close()],
    "surplus bytes": [
        Raw(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY) + b"surplus")
    ],
    "a second answer": [Raw((b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)) * 2)],
}


@pytest.mark.parametrize("kind", NOT_REUSABLE)
async def test_an_answer_passes_and_its_connection_is_not_used_again(
    make_gateway: MakeGateway, backend: ScriptedBackend, kind: str
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    backend.answer(NOT_REUSABLE[kind], chat_json())
    response = await gateway.chat()
    assert (response.status, response.body) == (200, BODY)
    assert (await gateway.chat()).status == 200
    assert [request.reused for request in backend.requests] == [False, False]
    await gateway.ended(Outcome.OK, Outcome.OK)
    await settled(gateway, pooled=1)


async def test_bytes_out_of_turn_end_an_idle_connection_and_reach_nobody(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    gate = asyncio.Event()
    injected = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nfalse"
    backend.answer([*chat_json(), WaitFor(gate), Raw(injected), Stall()], whole(BODY))
    await gateway.chat()
    gate.set()
    assert (await backend.closed()).by_peer
    response = await gateway.chat()
    assert response.body == BODY
    await settled(gateway, pooled=1)


async def test_an_answer_before_the_request_is_read_passes_and_ends_the_connection(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    """A backend may refuse a body that it has not read; what is unsent of it is not sent."""
    gateway = await make_gateway(
        backend,
        config=QUIET,
        per_backend={"a": "limits.window_tokens = 100000000\nlimits.kv_tokens = 1000000000"},
    )
    error = b'{"error": {"message": "too large", "type": "x", "code": 413}}'
    backend.answer([*whole(error, 413), Stall()], early=True)
    response = await gateway.chat("x" * (32 << 20))
    assert response.status == 413
    assert response.json["error"]["message"] == "too large"
    assert (await backend.closed()).by_peer
    await gateway.ended(Outcome.UPSTREAM_REJECTED)
    await settled(gateway, pooled=0)


async def test_a_connection_whose_answer_ended_in_the_read_that_broke_it_serves_again(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    error = CHAT_DIALECT.own_error
    backend.answer(
        [CHAT_DIALECT.stream()[0], Raw(b"%x\r\n%b\r\n0\r\n\r\n" % (len(error), error))], chat_json()
    )
    assert (await gateway.chat(stream=True)).status == 500
    await settled(gateway, pooled=1)
    assert (await gateway.chat()).status == 200
    assert backend.requests[1].reused


# -- odd answers --------------------------------------------------------------------------------------------------------


@each_way
@pytest.mark.parametrize("statuses", [(103,), (100, 102, 103)], ids=str)
@pytest.mark.parametrize("one_read", [True, False], ids=["one read", "apart"])
async def test_interim_answers_are_skipped(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    stream: bool,
    statuses: tuple[int, ...],
    one_read: bool,
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    interim = [Raw(b"HTTP/1.1 %d Wait\r\nlink: </x>\r\n\r\n" % status) for status in statuses]
    final = CHAT_DIALECT.stream() if stream else CHAT_DIALECT.whole()
    gate = asyncio.Event()
    if one_read:
        gate.set()
    backend.answer([*interim, WaitFor(gate), *final])
    async with await gateway.connect() as client:
        client.send(CHAT, chat(stream=stream))
        await backend.until(lambda: bool(backend.requests) and backend.requests[0].connection.sent > 0, "1xx")
        gate.set()
        response = await client.read()
    assert (response.status, response.complete) == (200, True)
    assert "link" not in response.headers
    assert (await gateway.chat()).status == 200
    assert backend.requests[1].reused
    await gateway.ended(Outcome.OK, Outcome.OK)
    await settled(gateway, pooled=1)


@each_way
async def test_a_body_that_ends_with_the_connection_is_whole(
    make_gateway: MakeGateway, backend: ScriptedBackend, stream: bool
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    pieces = list(CHAT_DIALECT.events) if stream else [BODY[:20], BODY[20:]]
    backend.answer([Head(200, [EVENTS if stream else JSON]), *map(Raw, pieces), Close()])
    response = await gateway.chat(stream=stream)
    assert (response.complete, response.body) == (True, b"".join(pieces))
    await gateway.ended(Outcome.OK)
    await settled(gateway, pooled=0)


@each_way
async def test_a_packed_answer_passes_unseen(
    make_gateway: MakeGateway, backend: ScriptedBackend, stream: bool
) -> None:
    """Asked for as identity; a backend that packs nevertheless is believed."""
    gateway = await make_gateway(backend, config=QUIET)
    packed = gzip.compress(b"".join(CHAT_DIALECT.events) if stream else BODY)
    kind = "text/event-stream" if stream else "application/json"
    backend.answer(whole(packed, content_type=kind, headers=[("content-encoding", "gzip")]))
    response = await gateway.chat(stream=stream)
    assert (response.headers["content-encoding"], response.body) == ("gzip", packed)
    assert backend.requests[0].header("accept-encoding") == "identity"
    record = await gateway.record()
    assert (record.outcome, record.completion_tokens) == (Outcome.OK, None)
    await settled(gateway, pooled=1)


async def test_trailers_are_dropped(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    head, *chunks = CHAT_DIALECT.stream()
    backend.answer([head, *chunks[:-1], Raw(b"0\r\nx-late: 1\r\n\r\n")])
    response = await gateway.chat(stream=True)
    assert response.complete
    assert "x-late" not in response.headers
    await settled(gateway, pooled=1)


async def test_chunks_cut_anywhere_by_the_network_are_the_same_stream(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    head, *steps = CHAT_DIALECT.stream()
    framed = (
        b"".join(b"%x\r\n%b\r\n" % (len(s.data), s.data) for s in steps if isinstance(s, Chunk))
        + b"0\r\n\r\n"
    )
    gates = [asyncio.Event() for _ in range(0, len(framed), 7)]
    script: list[Step] = [head]
    for number, gate in enumerate(gates):
        script += [WaitFor(gate), Raw(framed[number * 7 : number * 7 + 7])]
    backend.answer(script)
    async with await gateway.connect() as client:
        client.send(CHAT, chat(stream=True))
        await backend.received()
        for number, gate in enumerate(gates):
            gate.set()
            at = len(framed[: (number + 1) * 7])
            await backend.until(lambda at=at: backend.requests[0].connection.sent >= at, "a piece")  # type: ignore[misc]
        response = await client.read()
    assert (response.complete, response.body) == (True, b"".join(CHAT_DIALECT.events))
    await settled(gateway, pooled=1)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_who_gives_up_in_the_moment_the_connection_stands_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    """uvloop closes such a connection without a word to it; the pool waited for that word for ever."""
    context, authority = server_tls()
    trust = ssl.create_default_context(cadata=authority.decode())
    async with ScriptedBackend(tls=context if tls else None) as backend:
        pool = ConnectionPool(
            FakeClock(), "127.0.0.1", backend.port, Tls("it", (), lambda: trust, FakeClock()) if tls else None
        )
        opened = pool.opened

        def give_up(connection: UpstreamConnection) -> None:
            opened(connection)
            connecting.cancel()

        monkeypatch.setattr(pool, "opened", give_up)
        connecting = asyncio.create_task(pool.connect())
        with pytest.raises(asyncio.CancelledError):
            await connecting
        assert pool.open_connections == 0
        async with asyncio.timeout(DEADLINE):
            await pool.close()
        await backend.until(lambda: not backend.open_connections, "the connection's end")


async def test_closing_the_gateway_closes_its_connections(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    await gateway.chat()
    await gateway.app.pool.close()
    assert (await backend.closed()).by_peer
    assert pool_of(gateway).open_connections == 0
