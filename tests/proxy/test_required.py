"""Demanded tool calls where the backend's own `required` is broken: upstream vLLM with MTP and thinking.

The simulated server is that configuration: its `required` gives calls that nobody parses, and left to choose, the
model would often rather talk. Through the gateway every demanded call must be there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proxy.errors import Outcome
from proxy.sim.faults import Fault, FaultKind
from proxy.sim.plan import Dialect
from tests.client import Response
from tests.proxy.conftest import CHAT, Gateway, MakeGateway
from tests.scripted import ScriptedBackend, chat_json, chat_stream
from tests.sim.running import Running, running
from tests.wire.cases import Result, accumulate

BROKEN = "fp8-mtp3-upstream-v0.20.1"
ASKED = 100
AT_ONCE = 10


def tool(name: str, key: str) -> dict[str, Any]:
    schema = {"type": "object", "required": [key], "properties": {key: {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("get_weather", "city"), tool("get_time", "zone")]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
demanded = pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture
async def broken() -> AsyncIterator[Running]:
    fault = Fault(FaultKind.REQUIRED, value=0.6)
    async with running(profile=BROKEN, dialect=Dialect.XML, time_scale=500.0, script=(fault,)) as sim:
        yield sim


def question(number: int, choice: Any, *, stream: bool) -> dict[str, Any]:
    """Every other prompt is one at which the model only talks, until it is told to call."""
    steer = "calls=0 tokens=8 think=4" if number % 2 else "think=4"
    messages = [{"role": "user", "content": f"request {number} #sim {steer}"}]
    body = {"model": "tiny", "messages": messages, "tools": TOOLS, "tool_choice": choice}
    return body | {"stream": True} if stream else body


def calls_of(response: Response) -> tuple[str, str | None, list[tuple[str, Any]]]:
    """(content, finish_reason, calls): a stream is taken as a client takes it."""
    assert response.status == 200, response.body
    if response.headers["content-type"].startswith("text/event-stream"):
        result = Result()
        for event in response.events:
            if isinstance(event, dict) and event.get("choices"):
                accumulate(result, event)
        calls = [(call["name"], json.loads(call["arguments"])) for call in result.calls]
        return result.content.strip(), result.finish, calls
    choice = response.json["choices"][0]
    functions = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    return (choice["message"]["content"] or "").strip(), choice["finish_reason"], calls


async def ask_all(gateway: Gateway, choice: Any, *, stream: bool) -> list[Response]:
    free = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Response:
        async with free:
            return await gateway.ask(CHAT, question(number, choice, stream=stream))

    return await asyncio.gather(*map(one, range(ASKED)))


@demanded
@both_ways
async def test_every_demanded_call_is_there_although_the_backends_own_way_is_broken(
    make_gateway: MakeGateway, broken: Running, choice: Any, stream: bool
) -> None:
    gateway = await make_gateway(broken.url, per_backend={"a": f'profile = "{BROKEN}"'})
    right = 0
    for response in await ask_all(gateway, choice, stream=stream):
        content, finish, calls = calls_of(response)
        ((name, arguments),) = calls
        assert (content, finish, name) == ("", "tool_calls", "get_weather")
        assert arguments.keys() == {"city"}
        right += 1
    assert right == ASKED
    records = [(await gateway.records.get(number))[0] for number in range(ASKED)]
    assert {record.outcome for record in records} == {Outcome.OK}
    assert sorted(record.attempts for record in records) == [1] * (ASKED // 2) + [2] * (ASKED // 2)


@demanded
async def test_asked_directly_that_backend_loses_them(broken: Running, choice: Any) -> None:
    """Else the test above shows nothing."""
    for number in range(4):
        got = await broken.ask("POST", CHAT, question(number, choice, stream=False))
        assert not got.json["choices"][0]["message"].get("tool_calls")


# -- the named one, and no other ---------------------------------------------------------------------------------

ENFORCED = {"a": 'tool_choice = "auto_enforced"'}


def xml(name: str, key: str, value: str) -> str:
    inner = f"<parameter={key}>\n{value}\n</parameter>"
    return f"<tool_call>\n<function={name}>\n{inner}\n</function>\n</tool_call>"


@both_ways
async def test_a_call_of_another_tool_is_not_the_named_one(
    make_gateway: MakeGateway, backend: ScriptedBackend, stream: bool
) -> None:
    gateway = await make_gateway(backend, per_backend=ENFORCED)
    say = (lambda text: chat_stream([*text], usage=(5, 7))) if stream else chat_json
    backend.answer(say(xml("get_time", "zone", "UTC")), say(xml("get_weather", "city", "Oslo")))
    response = await gateway.ask(CHAT, question(0, NAMED, stream=stream))
    assert calls_of(response) == ("", "tool_calls", [("get_weather", {"city": "Oslo"})])
    assert len(backend.requests) == 2
