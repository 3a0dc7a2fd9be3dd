"""The comments that keep a silent stream alive: when they come, what they commit to, what they do not."""

from __future__ import annotations

import asyncio

import pytest

from proxy.errors import Outcome
from proxy.relay import KEEPALIVE
from tests.fake_clock import FakeClock
from tests.proxy.conftest import CHAT, MakeGateway, chat
from tests.proxy.dialects import DIALECTS, Dialect
from tests.proxy.scenes import COMMENTS, LEAST_LOAD, QUIET, polled, scene, settled
from tests.scripted import (
    Chunk,
    Close,
    Head,
    LastChunk,
    Raw,
    ScriptedBackend,
    Stall,
    Step,
    WaitFor,
    error_json,
    whole,
)

each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=str)
# -- comments -------------------------------------------------------------------------------------------------------


@each_dialect
@pytest.mark.parametrize("head_sent", [False, True], ids=["no head", "a head"])
async def test_a_silent_stream_gets_a_comment_after_a_while_then_one_an_interval_and_is_whole(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, head_sent: bool
) -> None:
    gate, again = asyncio.Event(), asyncio.Event()
    head, *chunks = dialect.stream()
    first = [head, WaitFor(gate)] if head_sent else [WaitFor(gate), head]
    begun = dialect.begun
    backend.answer([*first, *chunks[:begun], WaitFor(again), *chunks[begun:]])
    async with scene(make_gateway, backend, config=COMMENTS) as at:
        at.client.send(dialect.path, dialect.request(stream=True))
        await backend.received()
        if head_sent:
            await backend.until(lambda: backend.requests[0].connection.sent > 50, "the head")
        at.clock.advance(14.9)
        (exchange,) = at.gateway.app.gateway.exchanges
        assert not exchange.answer.started
        at.clock.advance(0.2)
        await at.client.read_until(KEEPALIVE)
        assert at.client.response.status == 200
        assert at.client.response.headers["content-type"].startswith("text/event-stream")
        at.clock.advance(4.8)
        assert exchange.answer.bytes_out == len(KEEPALIVE)
        at.clock.advance(0.2)
        await at.client.read_until(KEEPALIVE * 2)
        gate.set()
        await at.client.read_until(dialect.begun_bytes)
        # An event ends the silence: the next comment waits its time again.
        at.clock.advance(14.9)
        assert exchange.answer.bytes_out == len(KEEPALIVE * 2 + dialect.begun_bytes)
        at.clock.advance(0.2)
        await at.client.read_until(dialect.begun_bytes + KEEPALIVE)
        again.set()
        response = await at.client.read()
        assert response.complete
        assert response.body.replace(KEEPALIVE, b"") == b"".join(dialect.events)
        await at.ended(Outcome.OK)


async def test_a_fast_stream_gets_no_comment_and_one_not_streamed_never_does(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gate = asyncio.Event()
    backend.answer(DIALECTS[0].stream(), [WaitFor(gate), *DIALECTS[0].whole()])
    async with scene(make_gateway, backend, config=COMMENTS) as at:
        at.client.send(CHAT, chat(stream=True))
        assert KEEPALIVE not in (await at.client.read()).body
        at.client.send(CHAT, chat())
        await backend.received(1)
        at.clock.advance(100)
        gate.set()
        assert (await at.client.read()).json["id"] == "c"
        await at.ended(Outcome.OK, Outcome.OK)


async def test_a_comment_is_never_put_into_an_event(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    dialect = DIALECTS[0]
    gate = asyncio.Event()
    third = dialect.events[2]
    backend.answer(
        [
            *dialect.begin(),
            Chunk(third[:40]),
            WaitFor(gate),
            Chunk(third[40:] + b"".join(dialect.events[3:])),
            LastChunk(),
        ]
    )
    async with scene(make_gateway, backend, config=COMMENTS) as at:
        at.client.send(CHAT, chat(stream=True))
        await at.client.read_until(dialect.begun_bytes)
        at.clock.advance(16)
        await at.client.read_until(KEEPALIVE)
        gate.set()
        response = await at.client.read()
        assert response.body == dialect.begun_bytes + KEEPALIVE + b"".join(dialect.events[2:])
        await at.ended(Outcome.OK)


async def test_an_answer_to_a_stream_of_another_kind_gets_no_comment(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    """What is asked for as a stream of sound must not begin with text."""
    gate = asyncio.Event()
    backend.answer([WaitFor(gate), *whole(b"RIFF", content_type="audio/wav")])
    async with scene(make_gateway, backend, config=COMMENTS) as at:
        at.client.send("/v1/audio/speech", {"model": "tiny", "input": "hi", "stream": True})
        await backend.received()
        at.clock.advance(40)
        gate.set()
        response = await at.client.read()
        assert (response.headers["content-type"], response.body) == ("audio/wav", b"RIFF")
        await at.ended(Outcome.OK)


AFTER_COMMENT: dict[str, tuple[list[Step], Outcome]] = {
    "FIN": ([Close()], Outcome.UPSTREAM_CUT),
    "5xx": (error_json(500, "engine is dead"), Outcome.UPSTREAM_ERROR),
    "4xx": (error_json(422, "no such grammar"), Outcome.UPSTREAM_REJECTED),
    "not HTTP": ([Raw(b"SSH-2.0\r\n")], Outcome.UPSTREAM_MALFORMED),
    "an answer that is no stream": (whole(b'{"choices": []}'), Outcome.UPSTREAM_MALFORMED),
    "a large answer that is no stream": (whole(b"x" * (9 << 20)), Outcome.UPSTREAM_MALFORMED),
    "a packed stream": (
        whole(b"\x1f\x8b", content_type="text/event-stream", headers=[("content-encoding", "gzip")]),
        Outcome.UPSTREAM_MALFORMED,
    ),
    "an event stream without an event": (
        [Head(200, [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]), LastChunk()],
        Outcome.UPSTREAM_CUT,
    ),
    "nothing": ([Stall()], Outcome.UPSTREAM_TIMEOUT),
}


@each_dialect
@pytest.mark.parametrize("failure", AFTER_COMMENT)
async def test_after_a_comment_every_error_is_told_in_band(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, failure: str
) -> None:
    steps, outcome = AFTER_COMMENT[failure]
    gate = asyncio.Event()
    backend.answer([WaitFor(gate), *steps])
    async with scene(make_gateway, backend, config=COMMENTS) as at:
        at.client.send(dialect.path, dialect.request(stream=True))
        await backend.received()
        at.clock.advance(15.5)
        await at.client.read_until(KEEPALIVE)
        gate.set()
        if failure == "nothing":
            at.clock.advance(50)
        dialect.error_at_end(await at.client.read())
        record = await at.gateway.record()
        assert (record.outcome, record.status, record.first_delta_at) == (outcome, 200, None)
        await at.ended(outcome)


@pytest.mark.parametrize("failure", ["stale", "overflow"])
async def test_a_retry_is_still_possible_after_a_comment(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, failure: str
) -> None:
    dialect = DIALECTS[0]
    gate = asyncio.Event()
    overflow = error_json(
        400, "This model's maximum context length is 4096 tokens. However, you requested 5000."
    )
    if failure == "stale":
        backend.answer(dialect.whole(), [WaitFor(gate), Close()], dialect.stream())
    else:
        backend.answer(dialect.whole(), [WaitFor(gate), *overflow])
        other.answer(dialect.stream())
    backends = (backend,) if failure == "stale" else (backend, other)
    per = {"a": "limits.window_tokens = 4096", "b": "limits.window_tokens = 8192\nlimits.max_in_flight = 1"}
    clock = FakeClock()
    gateway = await make_gateway(
        *backends, config=QUIET + COMMENTS + LEAST_LOAD, clock=clock, per_backend=per
    )
    await polled(gateway)
    session = {"x-session-id": "s"}
    while not backend.requests:  # the session's home is a or b by its hash
        session = {"x-session-id": session["x-session-id"] + "s"}
        await gateway.ask(CHAT, chat(), headers=session)
    primed = len(gateway.records.closed)
    asked = len(other.requests)
    async with await gateway.connect() as client:
        client.send(CHAT, chat(stream=True), headers=session)
        await backend.received(1)
        clock.advance(15.5)
        await client.read_until(KEEPALIVE)
        gate.set()
        response = await client.read()
    assert response.complete
    assert response.body == KEEPALIVE + b"".join(dialect.events)
    record = await gateway.record(primed)
    assert (record.outcome, record.attempts) == (Outcome.OK, 2)
    assert len(other.requests) - asked == (failure == "overflow")
    await settled(gateway)
