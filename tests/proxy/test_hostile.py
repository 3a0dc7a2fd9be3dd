"""Requests and answers that no honest side would write: each gets an answer of its own, never a fault of ours."""

from __future__ import annotations

import json

import pytest

from tests.proxy.conftest import CHAT, MakeGateway, chat
from tests.scripted import ScriptedBackend, chat_json

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
