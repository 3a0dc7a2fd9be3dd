"""What a chunk and a request cost, in calls of our own functions: a count, not a time, so that it is the same everywhere.

A ceiling that is in the way is raised in the commit that needs it, where everybody sees it. Times: docs/performance.md.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from types import FrameType
from typing import Any

import pytest

import policies
import proxy
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.scripted import ScriptedBackend, WaitFor, chat_event, chat_stream, sse

OURS = tuple(path for package in (proxy, policies) for path in package.__path__)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
WARM_UP, COUNTED = 20, 10

CALLS_A_REQUEST = 380
CALLS_A_STREAM = 480
CALLS_A_STREAM_WITH_TOOLS = 552
CALLS_OF_A_KEY = 5
CALLS_OF_LIMITS = 17

KEY = "[server]\nport = 0\n[[server.keys]]\nname = 'k'\nkey = 'env:K'\n"
LIMITS = "limits = { requests_per_minute = 100000, tokens_per_minute = 100000000, concurrent_requests = 9 }\n"


class Count:
    calls = 0


@contextmanager
def counted() -> Iterator[Count]:
    """Calls of functions in proxy/ and policies/ on this thread."""
    count = Count()

    def seen(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            count.calls += 1

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield count
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}], ids=["plain", "tools armed"])
async def test_a_delta_like_the_last_one_costs_one_call_at_most(
    make_gateway: MakeGateway, backend: ScriptedBackend, more: dict[str, Any]
) -> None:
    gateway, gate = await make_gateway(backend), asyncio.Event()
    first, later = (chat_event({"content": text}) for text in ("Once", " upon"))
    head, *events = sse(first, chat_event({}, "stop"))
    backend.answer([head, events[0], WaitFor(gate), *events[1:]])
    connection = await gateway.connect()
    connection.send(CHAT, chat(stream=True, **more))
    await connection.read_until(first)
    (upstream,) = gateway.app.pool.backends["a"].connections._all
    with counted() as count:
        for _ in range(100):
            upstream.data_received(b"%x\r\n%b\r\n" % (len(later), later))
    gate.set()
    response = await connection.read()
    connection.close()
    assert response.body.count(later) == 100
    assert count.calls <= 100
    assert (await gateway.record()).gaps.count == 100


async def calls_each(gateway: Gateway, **body: Any) -> float:
    """The median: a poll of a backend that falls into a request's time is not the request's."""
    headers = {"authorization": "Bearer sk-k"}
    for _ in range(WARM_UP):
        await gateway.chat(headers=headers, **body)
    calls = []
    for done in range(COUNTED):
        with counted() as count:
            await gateway.chat(headers=headers, **body)
            await gateway.records.get(WARM_UP + done)
        calls.append(count.calls)
    return median(calls)


async def test_a_request_stays_below_its_ceiling(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    gateway = await make_gateway(backend)
    assert 100 < await calls_each(gateway) <= CALLS_A_REQUEST


async def test_a_key_and_its_limits_cost_a_few_calls(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    calls = [
        await calls_each(await make_gateway(backend, config=config, env={"K": "sk-k"}))
        for config in ("", KEY, KEY + LIMITS)
    ]
    assert calls[0] < calls[1] <= calls[0] + CALLS_OF_A_KEY
    assert calls[1] < calls[2] <= calls[1] + CALLS_OF_LIMITS


async def test_a_streamed_request_stays_below_its_ceiling(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    backend.answer(*[chat_stream("one two three")] * (WARM_UP + COUNTED))
    assert 100 < await calls_each(gateway, stream=True) <= CALLS_A_STREAM


async def test_a_streamed_request_with_tools_stays_below_its_ceiling(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    backend.answer(*[chat_stream("one two three")] * (WARM_UP + COUNTED))
    assert 100 < await calls_each(gateway, stream=True, tools=TOOLS) <= CALLS_A_STREAM_WITH_TOOLS


async def longest_step(gateway: Gateway, **body: Any) -> float:
    """The most calls between two looks at the sockets, in a request from its first byte to its last."""
    await gateway.chat(**body)
    steps = []
    for _ in range(COUNTED):
        with counted() as count:
            asked, longest, before = asyncio.ensure_future(gateway.chat(**body)), 0, 0
            while not asked.done():
                await asyncio.sleep(0)
                longest, before = max(longest, count.calls - before), count.calls
        steps.append(longest)
    return median(steps)


async def test_a_request_with_tools_begins_in_two_steps_so_that_chunks_pass_between(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    backend.answer(*[chat_stream("one two three")] * 2 * (1 + COUNTED))
    plain = await longest_step(gateway, stream=True)
    assert await longest_step(gateway, stream=True, tools=TOOLS) <= plain
