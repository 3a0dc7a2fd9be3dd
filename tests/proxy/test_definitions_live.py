"""DESIGN's words, each fixed by a timeline that a whole gateway lives through, on a clock that moves when told.

Every stretch of time has a length of its own, so that no sum can be right by accident.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from proxy.errors import Outcome
from proxy.record import Measures, Record, line
from proxy.relay import KEEPALIVE
from proxy.upstream import UpstreamConnection
from proxy.wire.errors import Api
from tests.fake_clock import FakeClock
from tests.proxy.conftest import CHAT, MakeGateway, chat
from tests.proxy.dialects import CHAT_DIALECT, DIALECTS, Dialect
from tests.proxy.scenes import COMMENTS, LEAST_LOAD, QUIET, TIMES, Scene, eventually, scene
from tests.scripted import (
    DONE,
    Chunk,
    Close,
    LastChunk,
    ScriptedBackend,
    Step,
    WaitFor,
    black_hole,
    chat_event,
    usage_event,
)

ROLE = chat_event({"role": "assistant", "content": ""})
USAGE = {"stream_options": {"include_usage": True}}


def word(text: str) -> bytes:
    return chat_event({"content": text})


def close_to(seconds: float) -> Any:
    return pytest.approx(seconds, abs=1e-9)


class Timeline:
    """A backend that sends each piece when the clock has moved by its wait: (seconds, piece), the end last."""

    def __init__(
        self, backend: ScriptedBackend, pieces: Sequence[tuple[float, bytes]], end: float = 0.0
    ) -> None:
        self.pieces = [*pieces, (end, b"")]
        self.gates = [asyncio.Event() for _ in self.pieces]
        steps: list[Step] = [CHAT_DIALECT.stream()[0]]
        for gate, (_, piece) in zip(self.gates, self.pieces, strict=True):
            steps += [WaitFor(gate), Chunk(piece) if piece else LastChunk()]
        backend.answer(steps)

    async def play(self, at: Scene) -> None:
        """From the request's arrival at the backend until the client has it all; what only opens the answer comes with
        the first that says something."""
        seen = at.client.response.body
        (exchange,) = at.gateway.app.gateway.exchanges
        relay = exchange._relay
        assert relay is not None
        for gate, (seconds, piece) in zip(self.gates, self.pieces, strict=True):
            at.clock.advance(seconds)
            gate.set()
            seen += piece
            if piece:
                await eventually(lambda: relay.over or relay.heard_at >= at.clock.now(), "the piece")
                if relay.events_sent:
                    await at.client.read_until(seen)
        assert (await at.client.read()).complete


async def closed(at: Scene, outcome: Outcome = Outcome.OK) -> tuple[Record, Measures]:
    record, measures = await at.gateway.records.get(0)
    await at.ended(outcome)
    return record, measures


async def test_a_streamed_chat(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    timeline = Timeline(
        backend,
        [
            (0.5, ROLE),  # no content: not the first delta
            (0.25, word("Hello")),
            (0.1, word(" you") + word(" there")),  # one read, one gap
            (0.02, b": ping\n\n"),  # no delta at all
            (0.18, word("!")),
            (0.4, word("?")),
            (0.03, chat_event({}, "stop")),
            (0.01, usage_event((10, 8), cached=4)),
            (0.005, DONE),
        ],
        end=0.002,
    )
    async with scene(make_gateway, backend) as at:
        body = json.dumps(chat(stream=True, **USAGE)).encode()
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body))
        at.client.send_raw(head + body[:10])
        await eventually(lambda: not at.over(), "the request")
        at.clock.advance(0.07)
        at.client.send_more(body[10:])
        await backend.received()
        await timeline.play(at)
        record, found = await closed(at)
    assert found.queue_wait == close_to(0.07)
    assert found.ttft == close_to(0.07 + 0.5 + 0.25)
    assert found.upstream_ttft == close_to(0.5 + 0.25)
    assert record.gaps.count == 3
    assert found.gap_p50 is not None
    assert 0.2 - 1e-9 <= found.gap_p50 <= 0.2 * 1.08
    assert (found.gap_p99, found.gap_max) == (close_to(0.4), close_to(0.4))
    assert found.tpot == close_to((0.1 + 0.02 + 0.18 + 0.4) / 7)
    assert found.e2e == close_to(0.07 + 0.5 + 0.25 + 0.1 + 0.02 + 0.18 + 0.4 + 0.03 + 0.01 + 0.005 + 0.002)
    assert found.overhead == close_to(0.0)
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (10, 8, 4)
    assert (record.finish_reason, record.stream, record.status) == ("stop", True, 200)
    written = json.loads(line(record, found))
    assert written["ttft_seconds"] == close_to(0.82)
    assert written["chunk_gap_max_seconds"] == close_to(0.4)


@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
async def test_every_endpoint_is_timed_alike(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect
) -> None:
    waits = [0.1 * 2**number for number in range(len(dialect.events))]
    timeline = Timeline(backend, list(zip(waits, dialect.events, strict=True)), end=0.01)
    async with scene(make_gateway, backend) as at:
        at.client.send(
            dialect.path, dialect.request(stream=True, **(USAGE if dialect.ends_with_done else {}))
        )
        await backend.received()
        await timeline.play(at)
        record, found = await closed(at)
    first, gap = sum(waits[: dialect.begun]), waits[dialect.begun]
    assert found.ttft == found.upstream_ttft == close_to(first)
    assert (record.gaps.count, found.gap_max) == (1, close_to(gap))
    assert found.e2e == close_to(sum(waits) + 0.01)
    # Anthropic's stream reports usage by itself; the others' here do not, and then there is no time per token.
    assert found.tpot == (close_to(gap) if dialect.api is Api.MESSAGES else None)


CONTENT = {
    "text": {"content": "x"},
    "reasoning": {"reasoning": "x"},
    "reasoning_content": {"reasoning_content": "x"},
    "a tool call": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]},
    "a refusal": {"refusal": "no"},
}
NO_CONTENT = {
    "a role": {"role": "assistant"},
    "a role with empty text": {"role": "assistant", "content": ""},
    "null": {"content": None},
    "nothing": {},
    "no tool calls": {"tool_calls": []},
}


@pytest.mark.parametrize("delta", CONTENT.values(), ids=CONTENT.keys())
@pytest.mark.parametrize("before", NO_CONTENT.values(), ids=NO_CONTENT.keys())
async def test_the_first_token_is_the_first_content_of_any_kind_and_nothing_else(
    make_gateway: MakeGateway, backend: ScriptedBackend, delta: dict[str, Any], before: dict[str, Any]
) -> None:
    timeline = Timeline(
        backend, [(1.0, chat_event(before)), (2.0, chat_event(delta)), (4.0, chat_event({}, "stop"))]
    )
    async with scene(make_gateway, backend) as at:
        at.client.send(CHAT, chat(stream=True))
        await backend.received()
        await timeline.play(at)
        _, found = await closed(at)
    assert found.ttft == close_to(3.0)
    assert (found.gap_p50, found.gap_p99, found.gap_max) == (None, None, None)


@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
async def test_what_is_not_streamed_has_no_ttft_gap_or_tpot(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect
) -> None:
    gate = asyncio.Event()
    usage = {"usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}}
    backend.answer([WaitFor(gate), *dialect.whole(**usage)])
    async with scene(make_gateway, backend) as at:
        at.client.send(dialect.path, dialect.request(stream=False))
        await backend.received()
        at.clock.advance(1.5)
        gate.set()
        await at.client.read()
        record, found = await closed(at)
    assert (found.ttft, found.upstream_ttft, found.tpot) == (None, None, None)
    assert (found.gap_p50, found.gap_p99, found.gap_max) == (None, None, None)
    assert (found.e2e, found.queue_wait, found.overhead) == (close_to(1.5), close_to(0), close_to(0))
    assert (record.prompt_tokens, record.completion_tokens) == (10, 5)


async def test_overhead_is_the_way_in_and_not_the_body_nor_the_backend(
    make_gateway: MakeGateway, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    backend.answer([WaitFor(gate), *CHAT_DIALECT.whole()])
    async with scene(make_gateway, backend) as at:
        connections = at.gateway.app.pool.backends["a"].connections
        connect = connections.connect

        async def slow() -> UpstreamConnection:
            at.clock.advance(0.003)
            return await connect()

        monkeypatch.setattr(connections, "connect", slow)
        at.client.send_raw(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 33\r\n\r\n{" % CHAT.encode())
        await eventually(lambda: not at.over(), "the request")
        at.clock.advance(0.6)
        at.client.send_more(b'"model": "tiny", "messages": []} ')
        await backend.received()
        at.clock.advance(5)
        gate.set()
        await at.client.read()
        _, found = await closed(at)
    assert found.overhead == close_to(0.003)
    assert found.e2e == close_to(5.603)


async def test_an_earlier_attempt_counts_for_the_client_not_for_the_backend_nor_as_overhead(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    """The first backend does not accept a connection: TTFT waits for it, upstream TTFT begins with the second."""
    clock = FakeClock()
    with black_hole() as port:
        gateway = await make_gateway(
            f"http://127.0.0.1:{port}",
            backend,
            config=QUIET + TIMES + "connect = 1.25\n" + LEAST_LOAD,
            per_backend={"a": "limits.max_in_flight = 100", "b": "limits.max_in_flight = 1"},
            clock=clock,
        )
        async with await gateway.connect() as client:
            at = Scene(gateway, clock, client)
            timeline = Timeline(backend, [(0.5, word("Hello")), (0.2, chat_event({}, "stop"))])
            client.send(CHAT, chat(stream=True))
            await eventually(
                lambda: any(e.record.attempts for e in gateway.app.gateway.exchanges), "an attempt"
            )
            (exchange,) = gateway.app.gateway.exchanges
            waited = 0.0
            if exchange.record.backend == "a":
                waited = 1.25
                clock.advance(waited)
            await backend.received()
            await timeline.play(at)
            record, found = await gateway.records.get(0)
        assert waited
        assert (record.attempts, record.backend, record.outcome) == (2, "b", Outcome.OK)
        assert record.backoff_seconds == close_to(1.25)
        assert found.ttft == close_to(1.25 + 0.5)
        assert found.upstream_ttft == close_to(0.5)
        assert found.overhead == close_to(0.0)


async def test_a_stale_connection_counts_the_same_way(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gate = asyncio.Event()
    backend.answer(CHAT_DIALECT.whole(), [WaitFor(gate), Close()])
    timeline = Timeline(backend, [(0.5, word("Hello")), (0.2, chat_event({}, "stop"))])
    async with scene(make_gateway, backend) as at:
        at.client.send(CHAT, chat())
        await at.client.read()
        at.client.send(CHAT, chat(stream=True))
        await backend.received(1)
        at.clock.advance(0.3)
        gate.set()
        await backend.received(2)
        await timeline.play(at)
        record, found = await at.gateway.records.get(1)
        await at.ended(Outcome.OK, Outcome.OK)
    assert (record.attempts, record.backoff_seconds) == (2, close_to(0.3))
    assert (found.ttft, found.upstream_ttft) == (close_to(0.8), close_to(0.5))
    assert found.overhead == close_to(0.0)


async def test_a_comment_is_no_token(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    timeline = Timeline(backend, [(2.0, word("Hello")), (0.5, chat_event({}, "stop"))])
    async with scene(make_gateway, backend, config=COMMENTS) as at:
        at.client.send(CHAT, chat(stream=True))
        await backend.received()
        at.clock.advance(15.0)
        await at.client.read_until(KEEPALIVE)
        await timeline.play(at)
        _, found = await closed(at)
    assert found.ttft == close_to(17.0)


async def test_a_stream_that_breaks_keeps_the_times_it_had_and_has_no_overhead(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    timeline = Timeline(backend, [(0.5, word("a")), (0.25, word("b"))], end=3.0)
    async with scene(make_gateway, backend) as at:
        at.client.send(CHAT, chat(stream=True))
        await backend.received()
        await timeline.play(at)
        record, found = await closed(at, Outcome.UPSTREAM_CUT)
    assert (found.ttft, found.gap_max, found.e2e) == (close_to(0.5), close_to(0.25), close_to(3.75))
    assert (found.overhead, found.tpot, record.finish_reason) == (None, None, None)


async def test_one_that_never_reached_a_backend_has_an_end_and_nothing_else(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    async with scene(make_gateway, backend) as at:
        at.client.send(CHAT, chat(model="other"))
        assert (await at.client.read()).status == 404
        record, found = await closed(at, Outcome.BAD_REQUEST)
    assert found == Measures(None, None, None, None, None, None, found.e2e, None, None)
    assert (found.e2e, record.dispatched_at) == (close_to(0), None)


async def test_gaps_of_a_long_stream_are_all_counted(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    """More deltas than are kept before they are folded together."""
    count = 600
    pieces = [(0.001 * (1 + number % 3), word("x")) for number in range(count)]
    timeline = Timeline(backend, [*pieces, (0.5, chat_event({}, "stop")), (0.0, usage_event((1, count)))])
    async with scene(make_gateway, backend) as at:
        at.client.send(CHAT, chat(stream=True, **USAGE))
        await backend.received()
        for gate, (seconds, piece) in zip(timeline.gates, timeline.pieces, strict=True):
            before = len(at.client.response.body)
            at.clock.advance(seconds)
            gate.set()
            while piece and len(at.client.response.body) < before + len(piece):
                await at.client.read_some()
        assert (await at.client.read()).complete
        record, found = await closed(at)
    total = sum(seconds for seconds, _ in pieces[1:])
    assert record.gaps.count == count - 1
    assert record.gaps.total == pytest.approx(total)
    assert found.tpot == pytest.approx(total / (count - 1))
    assert found.gap_max == close_to(0.003)
