"""Tool calls through the gateway: whatever the backend's parser made of them, streamed or not, one correct shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.errors import Outcome
from tests.client import Response
from tests.proxy.conftest import CHAT, MakeGateway
from tests.scripted import (
    ScriptedBackend,
    chat_event,
    chat_json,
    chat_stream,
    json_answer,
    sse,
    tool_stream,
    usage_event,
)
from tests.wire.cases import Result, accumulate, as_stream, chunk_of, problems
from tests.wire.test_toolstream import SETTLED

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
WORDS = "I would rather talk about it."


def asking(*, stream: bool, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "weather in Paris?"}]
    body = {"model": "tiny", "messages": messages, "tools": [WEATHER], **more}
    return {**body, "stream": True} if stream else body


def answer(text: str, *, stream: bool) -> Any:
    return chat_stream([*text], usage=(5, 7)) if stream else chat_json(text)


def said(response: Response) -> tuple[str, list[tuple[str, Any]], str | None]:
    """(content, calls as name and decoded arguments, finish_reason), streamed or not."""
    result = Result()
    if response.headers["content-type"].startswith("text/event-stream"):
        for event in response.events:
            if isinstance(event, dict) and event.get("choices"):
                accumulate(result, event)
        calls = [(call["name"], json.loads(call["arguments"])) for call in result.calls]
        return result.content, calls, result.finish
    choice = response.json["choices"][0]
    found = choice["message"].get("tool_calls") or []
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found]
    return choice["message"]["content"] or "", calls, choice["finish_reason"]


PARIS = [("get_weather", {"city": "Paris"})]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_call_that_the_backend_left_as_text_is_a_call(
    make_gateway: MakeGateway, backend: ScriptedBackend, stream: bool
) -> None:
    gateway = await make_gateway(backend)
    backend.answer(answer(f"Let me see.\n\n{XML}", stream=stream))
    response = await gateway.ask(CHAT, asking(stream=stream))
    assert said(response)[1:] == (PARIS, "tool_calls")
    assert said(response)[0].strip() == "Let me see."
    record = await gateway.record()
    assert (record.outcome, record.finish_reason) == (Outcome.OK, "tool_calls" if stream else "stop")
    assert record.tool_counts is not None
    assert record.tool_counts.xml == 1
    assert gateway.app.pool.backends["a"].integrity == 1.0
    metrics = (await gateway.ask("/metrics")).body.decode()
    assert 'tierline_tool_calls_total{backend="a",dialect="xml"} 1.0' in metrics


async def test_parsed_calls_of_a_right_stream_pass_as_the_bytes_that_came(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    steps = tool_stream(usage=(5, 7))
    backend.answer(steps)
    response = await gateway.ask(CHAT, asking(stream=True, stream_options={"include_usage": True}))
    assert response.body == b"".join(step.data for step in steps if hasattr(step, "data"))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("form", ["openai", "xml", "json"])
async def test_a_client_gets_the_format_it_asks_for(
    make_gateway: MakeGateway, backend: ScriptedBackend, stream: bool, form: str
) -> None:
    gateway = await make_gateway(backend)
    backend.answer(answer(XML, stream=stream))
    response = await gateway.ask(CHAT, asking(stream=stream), headers={"x-tool-format": form})
    content, calls, finish = said(response)
    if form == "openai":
        assert (content, calls, finish) == ("", PARIS, "tool_calls")
    elif form == "xml":
        assert (content, calls, finish) == (XML, [], "stop")
    else:
        assert (calls, finish) == ([], "stop")
        inner = content.removeprefix("<tool_call>").removesuffix("</tool_call>")
        assert json.loads(inner) == {"name": "get_weather", "arguments": {"city": "Paris"}}


async def test_an_unknown_format_is_refused(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    gateway = await make_gateway(backend)
    response = await gateway.ask(CHAT, asking(stream=False), headers={"x-tool-format": "yaml"})
    assert response.status == 400
    assert response.json["error"]["code"] == "unknown_tool_format"


ENFORCED = {"a": 'tool_choice = "auto_enforced"'}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_demanded_call_is_asked_for_again_and_nothing_of_the_words_is_seen(
    make_gateway: MakeGateway, backend: ScriptedBackend, stream: bool, choice: Any
) -> None:
    gateway = await make_gateway(backend, per_backend=ENFORCED)
    backend.answer(answer(WORDS, stream=stream), answer(XML, stream=stream))
    response = await gateway.ask(CHAT, asking(stream=stream, tool_choice=choice))
    assert said(response) == ("", PARIS, "tool_calls")
    first, second = backend.requests
    assert (first.json["tool_choice"], second.json["tool_choice"]) == ("auto", "auto")
    assert second.json["messages"][:-1] == first.json["messages"]
    assert second.json["messages"][-1]["role"] == "user"
    record = await gateway.record()
    assert (record.attempts, record.outcome) == (2, Outcome.OK)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_model_that_will_not_call_is_a_clear_error(
    make_gateway: MakeGateway, backend: ScriptedBackend, stream: bool
) -> None:
    gateway = await make_gateway(backend, per_backend=ENFORCED)
    backend.answer(answer(WORDS, stream=stream), answer(WORDS, stream=stream))
    response = await gateway.ask(CHAT, asking(stream=stream, tool_choice="required"))
    assert response.status == 502
    assert response.json["error"]["code"] == "tool_call_missing"
    assert len(backend.requests) == 2


async def test_a_backend_without_parser_is_sent_the_tools_and_told_to_read_none(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    per_backend = {"a": 'parser = "none"\nreasoning_parser = "none"'}
    gateway = await make_gateway(backend, per_backend=per_backend)
    backend.answer(answer(f"I think so.\n</think>\n\nHere:\n\n{XML}", stream=True))
    response = await gateway.ask(CHAT, asking(stream=True))
    assert said(response)[1:] == (PARIS, "tool_calls")
    assert "".join(
        e["choices"][0]["delta"].get("reasoning_content") or "" for e in response.events[:-1] if e["choices"]
    )
    sent = backend.requests[0].json
    assert (sent["tool_choice"], sent["tools"]) == ("none", [WEATHER])


async def test_broken_history_is_repaired_for_the_backend_and_the_rest_stays_as_it_came(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Par'}}
    ]
    messages = [
        {"role": "user", "content": "\u00e9 1e400"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    body = json.dumps({"model": "tiny", "messages": messages, "tools": [WEATHER], "seed": 2**70}).encode()
    await gateway.ask(CHAT, body)
    sent = backend.requests[0]
    mended = sent.json["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert isinstance(json.loads(mended), dict)
    assert sent.json["messages"][0] == messages[0]
    assert sent.json["messages"][2] == messages[2]
    assert b"\\u00e9 1e400" in sent.body
    assert sent.json["seed"] == 2**70
    record = await gateway.record()
    assert record.history_repairs is not None
    assert record.history_repairs.arguments == 1


@pytest.mark.parametrize(
    ("switch", "thinking"),
    [
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"enable_thinking": False}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
async def test_thinking_switches_of_every_dialect_become_the_templates(
    make_gateway: MakeGateway, backend: ScriptedBackend, switch: dict[str, Any], thinking: bool
) -> None:
    gateway = await make_gateway(backend)
    await gateway.chat(**switch)
    assert backend.requests[0].json["chat_template_kwargs"] == {"enable_thinking": thinking}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_put_into_reasoning_with_thinking_off_is_the_answer(
    make_gateway: MakeGateway, backend: ScriptedBackend, stream: bool
) -> None:
    gateway = await make_gateway(backend)
    if stream:
        events = [chat_event({"role": "assistant", "content": ""}), chat_event({"reasoning": "Hi."})]
        backend.answer(sse(*events, chat_event({}, "stop"), usage_event((1, 2))))
    else:
        message = {"role": "assistant", "content": None, "reasoning": "Hi."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        backend.answer(json_answer({"id": "c", "object": "chat.completion", "choices": [choice]}))
    response = await gateway.chat(stream=stream, chat_template_kwargs={"enable_thinking": False})
    assert said(response)[0] == "Hi."


@pytest.mark.parametrize("reasoning", ["reasoning", "reasoning_content", "both"])
async def test_thinking_leaves_in_the_configured_field(
    make_gateway: MakeGateway, backend: ScriptedBackend, reasoning: str
) -> None:
    gateway = await make_gateway(backend, config=f'[models.tiny]\nreasoning = "{reasoning}"\n')
    backend.answer(chat_stream("Hi.", reasoning=["Well", "."]))
    response = await gateway.chat(stream=True)
    fields = {"reasoning": "", "reasoning_content": ""}
    for event in response.events[:-1]:
        for name in fields:
            fields[name] += event["choices"][0]["delta"].get(name) or ""
    wanted = {name: "Well." if reasoning in (name, "both") else "" for name in fields}
    assert fields == wanted


async def test_a_call_that_breaks_its_schema_is_counted_and_passed(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    backend.answer(chat_json(None, finish="tool_calls", tool_calls=[("get_weather", '{"days": 2}')]))
    response = await gateway.ask(CHAT, asking(stream=False))
    assert said(response)[1] == [("get_weather", {"days": 2})]
    assert (await gateway.record()).schema_violations == 1
    assert gateway.app.pool.backends["a"].integrity < 1


async def test_every_settled_case_is_right_over_http(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    for case in SETTLED:
        deltas = as_stream(case)
        events = [
            {"id": "c", "object": "chat.completion.chunk", "model": "tiny", **chunk_of(d)} for d in deltas
        ]
        finished = any(delta.get("finish_reason") for delta in deltas)
        backend.answer(
            sse(*[b"data: %b\n\n" % json.dumps(event).encode() for event in events], done=finished)
        )
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
        for key in ("tools", "tool_choice"):
            if case.get(key):
                body[key] = case[key]
        response = await gateway.ask(CHAT, body)
        result = Result()
        if response.status == 200:
            for event in response.events:
                if isinstance(event, dict) and event.get("choices"):
                    accumulate(result, event)
        if finished:
            assert problems(case, result) == [], case["id"]
        else:
            assert "error" in (response.json if response.status != 200 else response.events[-1]), case["id"]
