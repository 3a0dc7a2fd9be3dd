"""Requests and answers that no honest side would write: each gets an answer of its own, never a fault of ours."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from tests.proxy.conftest import CHAT, MakeGateway, chat
from tests.scripted import ScriptedBackend, chat_json, json_answer

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{'a': 1}"}}


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [1, 20, 400])
async def test_history_is_repaired_behind_messages_that_nest_deep(
    make_gateway: MakeGateway, backend: ScriptedBackend, depth: int
) -> None:
    gateway = await make_gateway(backend)
    backend.answer(chat_json("hi"))
    deep = {"role": "user", "content": 'é\\"', "extra": nested(depth)}
    last = {"role": "tool", "tool_call_id": "c", "content": "x"}
    body = chat(tools=[TOOL], messages=[deep, {"role": "assistant", "tool_calls": [CALL]}, deep, last])
    response = await gateway.ask(CHAT, body)
    assert response.status == 200
    sent = (await backend.received(0)).json["messages"]
    assert sent[0] == sent[2] == deep
    assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


async def test_a_request_that_ends_in_a_fault_of_ours_is_not_counted_as_running(
    make_gateway: MakeGateway, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever closing a record may raise: a gateway that stops must not wait for it."""
    gateway = await make_gateway(backend)
    backend.answer(chat_json("hi"))

    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(gateway.app.metrics, "observe", broken)
    assert (await gateway.chat()).status == 200
    gateway.assert_idle()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    "number", [10**30, "9" * 4000, 10**4000, 1e308, 2**64], ids=lambda n: f"{str(n)[:9]}"
)
async def test_no_number_of_tokens_is_too_large_to_be_routed(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str, number: object
) -> None:
    """The backend judges the limit; for the load it is a large one."""
    gateway = await make_gateway(backend, "http://127.0.0.1:9")
    fields = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    backend.answer(chat_json("hi"))
    response = await gateway.ask(path, chat(**dict.fromkeys(fields, number), n=number, prompt="a", input="a"))
    assert response.status == 200


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ("content-encoding: gzip\r\ncontent-length: 4\r\n", b"junk"),
        ("content-encoding: gzip\r\ncontent-length: 40\r\n", b"junk" * 5),
        (
            "content-encoding: gzip\r\ncontent-length: 35\r\n",
            gzip.compress(b"{}", mtime=0) + b"not gzip, too",
        ),
        ("content-encoding: deflate\r\ncontent-length: 9\r\n", b"\xff" * 9),
        ("content-encoding: gzip\r\ntransfer-encoding: chunked\r\n", b"4\r\njunk\r\n0\r\n\r\n"),
    ],
)
async def test_a_body_that_cannot_be_read_is_a_400_and_nothing_for_the_log(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    caplog: pytest.LogCaptureFixture,
    headers: str,
    body: bytes,
) -> None:
    gateway = await make_gateway(backend)
    async with await gateway.connect() as connection:
        connection.send_raw(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode())
        await asyncio.sleep(0.02)  # so that the head is read alone
        connection.send_more(body)
        response = await connection.read()
    assert response.status == 400
    await gateway.record()
    assert not [entry for entry in caplog.records if entry.levelname in ("ERROR", "WARNING")]


ODD: tuple[object, ...] = (None, True, 0, -1, 1.5, "", "x", [], [1], [[1]], [None], [{}], {}, {"a": 1}, 2**70)
WHOLE = {
    "id": "c",
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "<tool_call>",
                "reasoning": "r",
                "tool_calls": [CALL],
            },
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}


def with_odd_members(value: object) -> list[object]:
    """`value` with one member, at any depth, replaced by each of ODD."""
    out: list[object] = list(ODD)
    if isinstance(value, dict):
        out += [{**value, key: odd} for key in value for odd in with_odd_members(value[key])]
    elif isinstance(value, list):
        out += [[odd] for odd in with_odd_members(value[0])]
    return out


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
async def test_a_whole_answer_with_a_member_of_any_type_is_passed_on_or_the_backends_fault(
    make_gateway: MakeGateway, backend: ScriptedBackend, choice: str
) -> None:
    gateway = await make_gateway(backend, config="[policy.retry]\nmax_attempts = 1\n")
    async with await gateway.connect() as connection:
        for odd in with_odd_members(WHOLE):
            backend.answer(json_answer(odd))
            connection.send(CHAT, chat(tools=[TOOL], tool_choice=choice))
            response = await connection.read()
            assert response.status in (200, 400, 502), (odd, response.text)
            connection.next()
