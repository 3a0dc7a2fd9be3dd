"""Unmodified clients get through the gateway what they get from the server: SDKs of OpenAI and Anthropic, curl.

Each test runs on llama-server (real) and on vLLM (vllm). Temperature 0: where a grammar forbids the scripted model's
next token, it says something else, but the same each time.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from tests.real.alike import Clients, Pair, joined
from tests.real.gateway import GatewayProcess

HELLO = "Hello! I am a tiny scripted model."

WEATHER = {
    "type": "object",
    "required": ["city"],
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "list_files", "parameters": NOTHING}},
]
ANTHROPIC_TOOLS = [{"name": "get_weather", "input_schema": WEATHER}]

# script, with tools: what the model says, and what each server's parser makes of it.
CASES = [(script, False) for script in ("text", "long", "utf8", "json", "tool")]
CASES += [(script, True) for script in ("text", "tool", "text_tool", "no_args", "text_tag")]
IDS = [f"{script}{'-tools' * tools}" for script, tools in CASES]
asked = pytest.mark.parametrize(("script", "tools"), CASES, ids=IDS)
# Streamed, vLLM lets the last one's tag slip into the text, and the gateway mends that: test_tools_vllm.py.
streamed = pytest.mark.parametrize(("script", "tools"), CASES[:-1], ids=IDS[:-1])


@pytest.fixture(
    scope="module",
    params=[pytest.param("llama", marks=pytest.mark.real), pytest.param("vllm", marks=pytest.mark.vllm)],
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    server = request.getfixturevalue(request.param)
    with ExitStack() as stack:
        gateway = stack.enter_context(GatewayProcess({request.param: server}))
        yield stack.enter_context(Pair(server, gateway, tries=1 if request.param == "llama" else 4))
        assert gateway.running() == 0
        assert gateway.complaints == ""


def question(script: str, tools: bool = False, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"hi #script:{script}"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 80, "temperature": 0, **more}
    return body | {"tools": TOOLS} if tools else body


# -- openai: chat --------------------------------------------------------------------------------------------


@asked
def test_a_chat_is_the_same(pair: Pair, script: str, tools: bool) -> None:
    def ask(clients: Clients) -> Any:
        return clients.openai.chat.completions.create(**question(script, tools))

    answer = pair.same(ask)
    expected = "length" if script == "long" else "stop"
    if tools and script != "text":
        expected = "tool_calls"
        assert answer["choices"][0]["message"]["tool_calls"]
    assert answer["choices"][0]["finish_reason"] == expected
    assert answer["usage"]["completion_tokens"] > 0


@streamed
def test_a_streamed_chat_is_the_same(pair: Pair, script: str, tools: bool) -> None:
    def ask(clients: Clients) -> Any:
        return joined(clients.openai.chat.completions.create(stream=True, **question(script, tools)))

    answer = pair.same(ask)
    assert answer["choices"][0]["finish_reason"]
    assert not answer["usage"]  # the gateway asked for it, the client did not


@pytest.mark.parametrize("script", ["text", "tool"])
@pytest.mark.parametrize("usage", [True, False])
def test_usage_is_streamed_to_whom_asked_for_it(pair: Pair, script: str, usage: bool) -> None:
    def ask(clients: Clients) -> Any:
        asked = question(script, tools=True, stream_options={"include_usage": usage})
        return joined(clients.openai.chat.completions.create(stream=True, **asked))

    assert bool(pair.same(ask)["usage"]) is usage


@pytest.mark.parametrize(("script", "tools"), [("long", False), ("utf8", False), ("text_tool", True)])
async def test_an_async_chat_is_the_same(pair: Pair, script: str, tools: bool) -> None:
    async def ask(clients: Clients) -> Any:
        async with clients.async_openai() as client:
            whole = await client.chat.completions.create(**question(script, tools))
            stream = await client.chat.completions.create(stream=True, **question(script, tools))
            return [whole, joined([chunk async for chunk in stream])]

    await pair.same_async(ask)


@streamed
def test_the_stream_helper_gives_the_same(pair: Pair, script: str, tools: bool) -> None:
    """It puts the answer together itself, and stumbles over deltas that do not fit."""

    def ask(clients: Clients) -> Any:
        options = {"stream_options": {"include_usage": True}}
        with clients.openai.chat.completions.stream(**question(script, tools), **options) as stream:
            kinds = {event.type for event in stream}
            return [sorted(kinds), stream.current_completion_snapshot]

    kinds, answer = pair.same(ask)
    assert "chunk" in kinds
    assert answer["choices"][0]["finish_reason"]


async def test_the_async_stream_helper_gives_the_same(pair: Pair) -> None:
    async def ask(clients: Clients) -> Any:
        async with (
            clients.async_openai() as client,
            client.chat.completions.stream(**question("tool", tools=True)) as stream,
        ):
            return await stream.get_final_completion()

    answer = await pair.same_async(ask)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris", "days": 3}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tools_over_several_turns_are_the_same(pair: Pair, stream: bool) -> None:
    """An agent's loop: calls, results, calls, results, until the model only says something."""

    def ask(clients: Clients) -> Any:
        messages: list[Any] = [{"role": "user", "content": "What is the weather? #script:text_tool"}]
        turns: list[Any] = []
        for follow in ("And the files? #script:no_args", "Thank you. #script:tool", None):
            calls = _turn(clients.openai, messages, turns, stream)
            assert calls
            messages += [{"role": "tool", "tool_call_id": call, "content": "sunny"} for call in calls]
            assert not _turn(clients.openai, messages, turns, stream)
            messages += [{"role": "user", "content": follow}] if follow else []
        return turns

    turns = pair.same(ask)
    assert [bool(turn["tool_calls"]) for turn in turns] == [True, False] * 3
    assert HELLO in turns[-1]["content"]


def _turn(client: openai.OpenAI, messages: list[Any], turns: list[Any], stream: bool) -> list[str]:
    """Ask once, put the answer into both lists; the ids of its tool calls."""
    body = question("", tools=True) | {"messages": messages}
    if stream:
        with client.chat.completions.stream(**body) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**body).choices[0].message
    turns.append(message.model_dump() | {"tool_calls": [c.model_dump() for c in message.tool_calls or []]})
    messages.append(message.model_dump(exclude_none=True, exclude={"tool_calls": {"__all__": {"index"}}}))
    return [call.id for call in message.tool_calls or []]


def test_a_structured_answer_is_the_same(pair: Pair) -> None:
    schema = {"name": "place", "schema": WEATHER | {"additionalProperties": False}}
    form = {"type": "json_schema", "json_schema": schema}

    def ask(clients: Clients) -> Any:
        body = question("json", response_format=form, extra_body=WITHOUT_THINKING)
        return clients.openai.chat.completions.create(**body)

    content = pair.same(ask)["choices"][0]["message"]["content"]
    assert json.loads(content) == {"city": "Paris", "days": 3}


WITHOUT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


async def test_answers_at_once_do_not_mix(pair: Pair) -> None:
    async def one(client: openai.AsyncOpenAI, script: str) -> dict[str, Any]:
        stream = await client.chat.completions.create(stream=True, **question(script))
        return joined([chunk async for chunk in stream])["choices"]

    async def ask(clients: Clients) -> Any:
        async with clients.async_openai() as client:
            scripts = ["text", "utf8", "json", "tool"] * 2
            return await asyncio.gather(*(one(client, script) for script in scripts))

    await pair.same_async(ask)


# -- openai: the rest ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "more", [{}, {"n": 2, "temperature": 1}, {"logprobs": 2}, {"stop": [" seven"]}], ids=str
)
def test_a_completion_is_the_same(pair: Pair, stream: bool, more: dict[str, Any]) -> None:
    def ask(clients: Clients) -> Any:
        asked = {"model": "tiny", "prompt": "count:", "max_tokens": 12, "temperature": 0, **more}
        answer = clients.openai.completions.create(stream=stream, **asked)
        return joined(answer) if stream else answer

    assert pair.same(ask)["choices"][0]["text"].startswith(" one two three")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_response_is_the_same(pair: Pair, stream: bool) -> None:
    def ask(clients: Clients) -> Any:
        asked = {"model": "tiny", "input": "hi", "max_output_tokens": 60, "temperature": 0}
        answer = clients.openai.responses.create(stream=stream, **asked)
        return list(answer) if stream else [answer.output_text, answer]

    answer = pair.same(ask)
    if stream:
        assert answer[-1]["type"] == "response.completed"
    else:
        assert answer[0].strip() == HELLO


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": "not a list"},
        {"messages": [{"role": "user", "content": "x" * 8000}]},
    ],
    ids=["messages", "overflow"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_refusal_is_the_same(pair: Pair, stream: bool, wrong: dict[str, Any]) -> None:
    def ask(clients: Clients) -> Any:
        return clients.openai.chat.completions.create(stream=stream, **(question("text") | wrong))

    assert pair.same(ask)["error"]


# -- anthropic -----------------------------------------------------------------------------------------------


def message(script: str, tools: bool = False) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "max_tokens": 80,
        "extra_body": {"temperature": 0},  # no longer an argument of the SDK
        "messages": [{"role": "user", "content": f"hi #script:{script}"}],
    }
    return body | {"tools": ANTHROPIC_TOOLS} if tools else body


MESSAGES = [("text", False), ("utf8", False), ("long", False), ("tool", True), ("text_tool", True)]
told = pytest.mark.parametrize(("script", "tools"), MESSAGES, ids=[script for script, _ in MESSAGES])


@told
def test_a_message_is_the_same(pair: Pair, script: str, tools: bool) -> None:
    def ask(clients: Clients) -> Any:
        return clients.claude.messages.create(**message(script, tools))

    answer = pair.same(ask)
    assert answer["stop_reason"] == (
        "tool_use" if tools else "max_tokens" if script == "long" else "end_turn"
    )


@told
def test_a_streamed_message_is_the_same(pair: Pair, script: str, tools: bool) -> None:
    def ask(clients: Clients) -> Any:
        with clients.claude.messages.stream(**message(script, tools)) as stream:
            kinds = {event.type for event in stream}
            return [sorted(kinds), stream.get_final_message()]

    kinds, answer = pair.same(ask)
    assert "message_stop" in kinds
    assert answer["stop_reason"]


async def test_an_async_message_is_the_same(pair: Pair) -> None:
    async def ask(clients: Clients) -> Any:
        async with clients.async_claude() as client:
            whole = await client.messages.create(**message("text"))
            async with client.messages.stream(**message("tool", tools=True)) as stream:
                return [whole, await stream.get_final_message()]

    whole, streamed = await pair.same_async(ask)
    assert whole["content"][-1]["text"].strip() == HELLO
    assert streamed["content"][-1]["input"] == {"city": "Paris", "days": 3}


def test_tools_over_several_turns_of_messages_are_the_same(pair: Pair) -> None:
    def ask(clients: Clients) -> Any:
        body = message("text_tool", tools=True)
        first = clients.claude.messages.create(**body)
        used = next(block for block in first.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}
        body["messages"] += [
            {
                "role": "assistant",
                "content": [block.model_dump(exclude_none=True) for block in first.content],
            },
            {"role": "user", "content": [result]},
        ]
        return [first, clients.claude.messages.create(**body)]

    first, second = pair.same(ask)
    assert first["stop_reason"] == "tool_use"
    assert second["content"][-1]["text"].strip() == HELLO


@pytest.mark.parametrize("tools", [False, True])
def test_counted_tokens_are_the_same(pair: Pair, tools: bool) -> None:
    def ask(clients: Clients) -> Any:
        body = message("text", tools)
        del body["max_tokens"], body["extra_body"]
        return clients.claude.messages.count_tokens(**body)

    assert pair.same(ask)["input_tokens"] > 10


# -- curl ----------------------------------------------------------------------------------------------------

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(url: str, path: str, body: object, *more: str) -> list[str]:
    """The command as the README has it."""
    command = ["curl", "-sN", "--max-time", "60", *more, url + path]
    return [*command, "-H", "content-type: application/json", "-d", json.dumps(body)]


@needs_curl
@pytest.mark.parametrize("script", ["text", "utf8", "tool"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_curl_sees_the_same_bytes(pair: Pair, path: str, script: str) -> None:
    """But for what no two answers share."""
    body = question(script, tools=True) if "chat" in path else message(script, tools=True)
    body |= body.pop("extra_body", {})
    own = re.compile(
        rb'"(?:id|signature)":"[^"]*"|"created":\d+|,"timings":\{[^}]*\}|,"system_fingerprint":"[^"]*"'
    )

    def ask(clients: Clients) -> bytes:
        command = curl(clients.url, path, body | {"stream": True})
        return own.sub(b"", subprocess.run(command, capture_output=True, check=True).stdout)

    assert pair.same(ask).startswith(b"event: " if path == "/v1/messages" else b"data: ")


@needs_curl
def test_curl_sees_the_same_head(pair: Pair) -> None:
    def ask(url: str) -> dict[str, str]:
        body = question("text", stream=True)
        done = subprocess.run(
            curl(url, "/v1/chat/completions", body, "-D", "-", "-o", "/dev/null"),
            capture_output=True,
            check=True,
            text=True,
        )
        status, *lines = done.stdout.splitlines()
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
        }
        return {"status": status.split()[1], "content-type": headers["content-type"]} | {
            name: value for name, value in headers.items() if name.startswith("x-tierline")
        }

    direct, through = ask(pair.server.url), ask(pair.gateway.url)
    assert through | direct == through
    assert {"x-tierline-backend", "x-tierline-tier", "x-tierline-reason"} <= through.keys()


@needs_curl
async def test_curl_sees_each_token_when_it_comes_and_may_leave(pair: Pair) -> None:
    body = question("long", stream=True, max_tokens=3500)
    command = curl(pair.gateway.url, "/v1/chat/completions", body, "-H", "x-request-id: curl-leaves")
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert (await process.stdout.readline()).startswith(b"data: {")
    await pair.server.until_running(1)  # that line came while the rest is still being made
    process.kill()
    await process.communicate()
    await pair.server.until_running(0)
    record = await pair.gateway.record("curl-leaves")
    assert (record["outcome"], record["finish_reason"]) == ("cancelled", None)
