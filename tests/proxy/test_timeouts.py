"""Every limit on time, told by a clock that moves when told."""

from __future__ import annotations

import asyncio

import pytest

from proxy.errors import Outcome
from tests.proxy.conftest import CHAT, MakeGateway, chat
from tests.proxy.dialects import DIALECTS, Dialect
from tests.proxy.scenes import COMMENTS, TIMES, eventually, held_back, scene
from tests.scripted import (
    Chunk,
    Head,
    LastChunk,
    Raw,
    ScriptedBackend,
    Stall,
    Step,
    WaitFor,
)

each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=str)


def error_code(dialect: Dialect, body: object) -> None:
    error = dialect.error_in(body)
    if "code" in error:
        assert error["code"] == "upstream_timeout"


# -- first token ----------------------------------------------------------------------------------------------------

SILENT: dict[str, list[Step]] = {
    "no head": [Stall()],
    "a head": [Head(200, [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]), Stall()],
    "a comment": [
        Head(200, [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]),
        Chunk(b": ping\n\n"),
        Stall(),
    ],
    "half an event": [
        Head(200, [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]),
        Chunk(b'data: {"id":'),
        Stall(),
    ],
}


@each_dialect
@pytest.mark.parametrize("steps", SILENT.values(), ids=SILENT.keys())
async def test_no_event_within_the_first_token_limit_is_a_504(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, steps: list[Step]
) -> None:
    backend.answer(steps)
    async with scene(make_gateway, backend) as at:
        at.client.send(dialect.path, dialect.request(stream=True))
        await backend.received()
        sent = sum(len(step.data) for step in steps if isinstance(step, Chunk))
        await backend.until(lambda: backend.requests[0].connection.sent >= sent, "the steps")
        at.clock.advance(59.9)
        assert not at.over()
        at.clock.advance(0.5)
        response = await at.client.read()
        assert (response.status, response.complete) == (504, True)
        error_code(dialect, response.json)
        assert (await backend.closed()).by_peer
        await at.ended(Outcome.UPSTREAM_TIMEOUT)
    assert at.gateway.app.pool.backends["a"].health.failures == 0


async def test_the_first_token_limit_grows_with_the_prompt(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    backend.answer([Stall()])
    async with scene(
        make_gateway, backend, per="limits.window_tokens = 100000\nlimits.kv_tokens = 1000000"
    ) as at:
        at.client.send(CHAT, chat("word " * 8000, stream=True))
        await backend.received()
        (exchange,) = at.gateway.app.gateway.exchanges
        tokens = exchange.record.prompt_tokens_estimate
        assert tokens is not None
        assert tokens > 5000
        limit = 60 + 10 * tokens / 1000
        at.clock.advance(limit - 0.1)
        assert not at.over()
        at.clock.advance(0.2)
        assert (await at.client.read()).status == 504
        await at.ended(Outcome.UPSTREAM_TIMEOUT)


async def test_a_backend_may_have_limits_of_its_own(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    backend.answer([Stall()])
    async with scene(make_gateway, backend, per="timeouts.first_token = 2") as at:
        at.client.send(CHAT, chat(stream=True))
        await backend.received()
        at.clock.advance(2.5)
        assert (await at.client.read()).status == 504
        await at.ended(Outcome.UPSTREAM_TIMEOUT)


@each_dialect
async def test_an_answer_that_is_not_streamed_may_take_its_whole_time_to_begin(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect
) -> None:
    backend.answer([Stall()])
    async with scene(make_gateway, backend, config=COMMENTS) as at:
        at.client.send(dialect.path, dialect.request(stream=False))
        await backend.received()
        at.clock.advance(299)
        assert not at.over()
        at.clock.advance(1.5)
        response = await at.client.read()
        assert response.status == 504
        error_code(dialect, response.json)
        await at.ended(Outcome.UPSTREAM_TIMEOUT)


HALF: dict[str, list[Step]] = {
    "a head": [Head(200, [("content-type", "application/json"), ("content-length", "100")])],
    "an error's head": [Head(500, [("content-type", "application/json"), ("content-length", "100")])],
    "half a body": [
        Head(200, [("content-type", "application/json"), ("content-length", "100")]),
        Raw(b"{" * 50),
    ],
    "a chunk": [
        Head(200, [("content-type", "application/json"), ("transfer-encoding", "chunked")]),
        Chunk(b"{"),
    ],
}


@each_dialect
@pytest.mark.parametrize("begun", HALF.values(), ids=HALF.keys())
async def test_an_answer_that_is_not_streamed_and_stops_in_the_middle_has_the_gap_limit(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, begun: list[Step]
) -> None:
    """Counted from its head or its last byte, however late that came."""
    gate = asyncio.Event()
    backend.answer([WaitFor(gate), *begun, Stall()])
    async with scene(make_gateway, backend, config=COMMENTS) as at:
        at.client.send(dialect.path, dialect.request(stream=False))
        await backend.received()
        at.clock.advance(200)
        (exchange,) = at.gateway.app.gateway.exchanges
        gate.set()
        sent = sum(len(step.data) for step in begun if isinstance(step, Chunk | Raw))
        relay = exchange._relay
        assert relay is not None
        await eventually(lambda: relay.answering and relay._buffered == sent, "what was sent of the answer")
        at.clock.advance(19.9)
        assert not at.over()
        at.clock.advance(0.2)
        response = await at.client.read()
        assert response.status == 504
        assert "silent for 20 s" in dialect.error_in(response.json)["message"]
        error_code(dialect, response.json)
        assert (await backend.closed()).by_peer
        await at.ended(Outcome.UPSTREAM_TIMEOUT)


async def test_a_body_that_comes_slowly_is_never_silent(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    body = b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}'
    gates = [asyncio.Event() for _ in body[:14]]
    steps: list[Step] = [
        Head(200, [("content-type", "application/json"), ("content-length", str(len(body)))])
    ]
    for number, gate in enumerate(gates):
        steps += [WaitFor(gate), Raw(body[number * 5 : number * 5 + 5])]
    backend.answer(steps)
    async with scene(make_gateway, backend) as at:
        at.client.send(CHAT, chat())
        await backend.received()
        (exchange,) = at.gateway.app.gateway.exchanges
        await eventually(lambda: exchange._relay is not None and exchange._relay.answering, "the head")
        relay = exchange._relay
        assert relay is not None
        for number, gate in enumerate(gates, 1):
            at.clock.advance(19.5)
            gate.set()
            await eventually(
                lambda number=number: relay._buffered == min(number * 5, len(body)),  # type: ignore[misc]
                "a few bytes",
            )
        assert (await at.client.read()).body == body
        await at.ended(Outcome.OK)


# -- gap, total -------------------------------------------------------------------------------------------------------


@each_dialect
@pytest.mark.parametrize("first_at", [0.0, 1.0, 19.0, 45.0])
async def test_a_silence_longer_than_the_gap_limit_ends_the_stream_in_band(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, first_at: float
) -> None:
    """Counted from the last read, whenever that was: the limits before the first event do not delay it."""
    gate = asyncio.Event()
    backend.answer([WaitFor(gate), *dialect.begin(), Stall()])
    async with scene(make_gateway, backend) as at:
        at.client.send(dialect.path, dialect.request(stream=True))
        await backend.received()
        at.clock.advance(first_at)
        gate.set()
        await at.client.read_until(dialect.begun_bytes)
        at.clock.advance(19.9)
        assert not at.over()
        at.clock.advance(0.2)
        error = dialect.error_at_end(await at.client.read())
        assert "silent for 20 s" in error["message"]
        assert (await backend.closed()).by_peer
        await at.ended(Outcome.UPSTREAM_TIMEOUT)


async def test_a_stream_that_moves_is_never_silent(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    dialect = DIALECTS[0]
    gates = [asyncio.Event() for _ in range(8)]
    steps: list[Step] = []
    for gate in gates:
        steps += [WaitFor(gate), Chunk(dialect.events[1])]
    backend.answer([*dialect.begin(), *steps, *map(Chunk, dialect.events[2:]), LastChunk()])
    async with scene(make_gateway, backend) as at:
        at.client.send(dialect.path, dialect.request(stream=True))
        await at.client.read_until(dialect.begun_bytes)
        for number, gate in enumerate(gates, 2):
            at.clock.advance(19.5)
            gate.set()
            await at.client.read_until(dialect.events[1] * number)
        assert (await at.client.read()).events[-1] == "[DONE]"
        await at.ended(Outcome.OK)


@each_dialect
async def test_a_stream_longer_than_the_total_limit_ends_in_band(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect
) -> None:
    gates = [asyncio.Event() for _ in range(20)]
    delta = dialect.events[0] if dialect.begun == 1 else b": still here\n\n"
    steps: list[Step] = []
    for gate in gates:
        steps += [WaitFor(gate), Chunk(delta)]
    backend.answer([*dialect.begin(), *steps, Stall()])
    async with scene(make_gateway, backend) as at:
        at.client.send(dialect.path, dialect.request(stream=True))
        await at.client.read_until(dialect.begun_bytes)
        for number, gate in enumerate(gates[:19], 1):
            at.clock.advance(15)
            gate.set()
            await at.client.read_until(dialect.begun_bytes + delta * number)
        at.clock.advance(14.9)
        assert not at.over()
        at.clock.advance(0.2)
        error = dialect.error_at_end(await at.client.read())
        assert "longer than 300 s" in error["message"]
        await at.ended(Outcome.UPSTREAM_TIMEOUT)


async def test_a_body_that_is_no_event_stream_is_cut_when_it_falls_silent(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    backend.answer(
        [Head(200, [("content-type", "audio/mpeg"), ("content-length", "100")]), Raw(b"x" * 10), Stall()]
    )
    async with scene(make_gateway, backend) as at:
        at.client.send("/v1/audio/speech", {"model": "tiny", "input": "hi"})
        await at.client.read_until(b"x" * 10)
        at.clock.advance(20.5)
        assert not (await at.client.read()).complete
        await at.ended(Outcome.UPSTREAM_TIMEOUT)


async def test_a_client_that_does_not_read_is_cut_after_its_limit(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    backend.answer([Head(200, [("content-type", "audio/mpeg")]), *[Raw(b"x" * (1 << 20))] * 64, Stall()])
    async with scene(make_gateway, backend) as at:
        at.client.send("/v1/audio/speech", {"model": "tiny", "input": "hi"})
        await backend.blocked()
        await held_back(at.gateway)
        at.clock.advance(29.9)
        assert not at.over()
        at.clock.advance(0.2)
        assert not (await at.client.read()).complete
        assert (await backend.closed()).by_peer
        await at.ended(Outcome.CLIENT_TIMEOUT)


async def test_a_request_body_that_does_not_come_is_a_408(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    async with scene(make_gateway, backend, config="[server]\nport = 0\nbody_timeout = 10\n" + TIMES) as at:
        at.client.send_raw(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{" % CHAT.encode())
        await eventually(lambda: not at.over(), "the request")
        at.clock.advance(10.5)
        assert (await at.client.read()).status == 408
        await at.ended(Outcome.CLIENT_TIMEOUT)
