"""What opens a stream says nothing of the answer (a role, a name): what breaks behind it is answered by another backend."""

from __future__ import annotations

import asyncio

import pytest

from policies import Failure
from proxy.errors import Outcome
from proxy.relay import KEEPALIVE
from proxy.wire.errors import Api
from tests.fake_clock import FakeClock
from tests.proxy.conftest import Gateway, MakeGateway
from tests.proxy.dialects import CHAT_DIALECT, DIALECTS, Dialect
from tests.proxy.scenes import LEAST_LOAD, QUIET, eventually, polled, scene, settled
from tests.scripted import (
    DONE,
    Chunk,
    Close,
    LastChunk,
    Reset,
    ScriptedBackend,
    Stall,
    Step,
    WaitFor,
    chat_event,
    event,
)

A_FIRST = {"b": "limits.max_in_flight = 2"}
CONFIG = QUIET + LEAST_LOAD
OPENED = [dialect for dialect in DIALECTS if dialect.api in (Api.CHAT, Api.MESSAGES)]
"""Those that open an answer before they say something of it, and keep nothing of it."""
each_dialect = pytest.mark.parametrize("dialect", OPENED, ids=str)
_COMPLETION = {"id": "cmpl-1", "choices": [{"index": 0, "text": "", "finish_reason": None}]}
OPENINGS: dict[str, tuple[str, bytes]] = {
    "a role": ("/v1/chat/completions", chat_event({"role": "assistant", "content": ""})),
    "a role with nulls": (
        "/v1/chat/completions",
        chat_event({"role": "assistant", "content": None, "tool_calls": [], "reasoning": ""}),
    ),
    "an empty delta": ("/v1/chat/completions", chat_event({})),
    "no choice": ("/v1/chat/completions", event({"id": "c", "choices": [], "usage": {"prompt_tokens": 3}})),
    "no text": ("/v1/completions", event(_COMPLETION)),
}


def opening(dialect: Dialect) -> list[bytes]:
    """All before the first content."""
    return list(dialect.events[: dialect.begun - 1])


def breaks(dialect: Dialect) -> dict[str, tuple[list[Step], Failure]]:
    """What may follow the opening: the steps, and what it is called."""
    own = [Chunk(dialect.own_error), LastChunk()]
    abort = [Chunk(e) for e in dialect.aborted[dialect.begun :]] + [LastChunk()]
    return {
        "reset": ([Reset()], Failure.CUT),
        "closed": ([Close()], Failure.CUT),
        "ended": ([LastChunk()], Failure.CUT),
        "an error event": (own, Failure.ERROR),
        "given up": (abort, Failure.ERROR),
        "no JSON": ([Chunk(b"data: {oops\n\n"), Stall()], Failure.MALFORMED),
    }


@each_dialect
@pytest.mark.parametrize("together", [False, True], ids=["event by event", "in one read"])
@pytest.mark.parametrize("broken", breaks(CHAT_DIALECT))
async def test_another_backend_answers_what_breaks_behind_the_opening(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    other: ScriptedBackend,
    dialect: Dialect,
    broken: str,
    together: bool,
) -> None:
    steps, failure = breaks(dialect)[broken]
    if dialect.api is Api.MESSAGES and broken == "given up":
        failure = Failure.ERROR
    opened = opening(dialect)
    if together and isinstance(steps[0], Chunk):
        opened, steps = [], [Chunk(b"".join(opened) + steps[0].data), *steps[1:]]
    gateway = await make_gateway(backend, other, config=CONFIG, per_backend=A_FIRST)
    backend.answer([*dialect.stream(*opened)[: 1 + len(opened)], *steps])
    other.answer(dialect.stream())
    response = await gateway.ask(dialect.path, dialect.request(stream=True))
    assert (response.status, response.headers["x-tierline-backend"]) == (200, "b")
    assert response.body == b"".join(dialect.events), "the bytes of one answer, all of it and nothing else"
    assert (await gateway.record()).failures == (("a", failure),)
    await gateway.ended(Outcome.OK)


@pytest.mark.parametrize("opened", OPENINGS)
async def test_whatever_says_nothing_is_held(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, opened: str
) -> None:
    path, first = OPENINGS[opened]
    dialect = next(d for d in DIALECTS if d.path == path)
    gateway = await make_gateway(backend, other, config=CONFIG, per_backend=A_FIRST)
    backend.answer([*dialect.stream(first)[:2], Reset()])
    other.answer(dialect.stream())
    response = await gateway.ask(path, dialect.request(stream=True))
    assert (response.status, response.body) == (200, b"".join(dialect.events))
    await gateway.ended(Outcome.OK)


SAYING = {
    "content": {"content": "x"},
    "reasoning": {"reasoning": "x"},
    "a call": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]},
    "what nobody knows": {"images": ["x"]},
    "role and content": {"role": "assistant", "content": "x"},
}


@pytest.mark.parametrize("delta", SAYING)
async def test_whatever_says_something_goes_out_at_once_and_is_not_begun_again(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, delta: str
) -> None:
    dialect, gate = CHAT_DIALECT, asyncio.Event()
    said = chat_event(SAYING[delta])
    gateway = await make_gateway(backend, other, config=CONFIG, per_backend=A_FIRST)
    backend.answer([*dialect.stream(*opening(dialect), said)[:-1], WaitFor(gate), Reset()])
    async with await gateway.connect() as client:
        client.send(dialect.path, dialect.request(stream=True))
        await client.read_until(b"".join(opening(dialect)) + said)
        gate.set()
        dialect.error_at_end(await client.read())
    assert not other.requests
    await gateway.ended(Outcome.UPSTREAM_CUT)


async def test_a_response_that_was_named_is_not_begun_again(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    """Its backend keeps it under that name."""
    dialect = DIALECTS[3]
    gateway = await make_gateway(backend, other, config=CONFIG, per_backend=A_FIRST)
    backend.answer([*dialect.stream(dialect.events[0])[:-1], Reset()])
    response = await gateway.ask(dialect.path, dialect.request(stream=True))
    dialect.error_at_end(response)
    assert not other.requests
    await gateway.ended(Outcome.UPSTREAM_CUT)


# -- time -----------------------------------------------------------------------------------------------------------

LIMITS = "[timeouts]\nfirst_token = 30\nfirst_token_per_1k_tokens = 0\ngap = 20\ntotal = 300\n"


async def opened(backend: ScriptedBackend, gateway: Gateway) -> None:
    """The opening came, and is held."""

    def held() -> bool:
        found = [exchange._relay for exchange in gateway.app.gateway.exchanges]
        return any(relay is not None and relay.opened for relay in found)

    await backend.received()
    await eventually(held, "the opening")


@each_dialect
async def test_comments_go_on_while_the_opening_is_held_and_a_second_attempt_brings_its_own(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, dialect: Dialect
) -> None:
    clock, gate = FakeClock(), asyncio.Event()
    config = CONFIG + LIMITS + "keepalive_after = 15\nkeepalive_interval = 5\n"
    gateway = await make_gateway(backend, other, config=config, per_backend=A_FIRST, clock=clock)
    await polled(gateway)
    backend.answer([*dialect.stream(*opening(dialect))[:-1], WaitFor(gate), Reset()])
    other.answer(dialect.stream())
    async with await gateway.connect() as client:
        client.send(dialect.path, dialect.request(stream=True))
        await opened(backend, gateway)
        (exchange,) = gateway.app.gateway.exchanges
        assert not exchange.answer.started
        clock.advance(15.1)
        await client.read_until(KEEPALIVE)
        gate.set()
        response = await client.read()
    assert (response.status, response.complete) == (200, True)
    assert response.body == KEEPALIVE + b"".join(dialect.events)
    record = await gateway.record()
    assert (record.backend, record.failures) == ("b", (("a", Failure.CUT),))
    await settled(gateway)


@each_dialect
@pytest.mark.parametrize(("opened_at", "over_at"), [(0, 30), (5, 30), (25, 45)])
async def test_behind_the_opening_the_first_token_has_its_limit_and_at_least_a_gap(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, opened_at: float, over_at: float
) -> None:
    gate = asyncio.Event()
    head, *rest = dialect.stream(*opening(dialect))[:-1]
    backend.answer([WaitFor(gate), head, *rest, Stall()])
    async with scene(make_gateway, backend, config=LIMITS + "keepalive_after = 0\n") as at:
        at.client.send(dialect.path, dialect.request(stream=True))
        await backend.received()
        at.clock.advance(opened_at)
        gate.set()
        await opened(backend, at.gateway)
        at.clock.advance(over_at - opened_at - 0.1)
        assert not at.over()
        at.clock.advance(0.2)
        assert (await at.client.read()).status == 504
        await at.ended(Outcome.UPSTREAM_TIMEOUT)


async def test_thinking_that_the_engine_holds_lets_the_opening_go(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    """The answer has begun, whatever the tool engine waits for: from here the gap counts, as in any stream."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    role, gate = chat_event({"role": "assistant", "content": ""}), asyncio.Event()
    held = chat_event({"content": "<tool_call>"})
    rest = [
        chat_event({"content": '{"name": "look", "arguments": {}}</tool_call>'}),
        chat_event({}, "stop"),
        DONE,
    ]
    backend.answer([*CHAT_DIALECT.stream(role, held)[:-1], WaitFor(gate), *map(Chunk, rest), LastChunk()])
    async with scene(make_gateway, backend) as at:
        at.client.send(CHAT_DIALECT.path, CHAT_DIALECT.request(stream=True, tools=tools))
        await at.client.read_until(role)
        gate.set()
        response = await at.client.read()
        assert b"look" in response.body
        assert b"<tool_call>" not in response.body
        await at.ended(Outcome.OK)
