"""What is read of a request's tools, and what of it is kept from one request to the next."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.config import ModelRoute, loads
from proxy.toolwork import MAX_KEPT_BYTES, ToolWork
from proxy.wire.body import BodyError
from proxy.wire.errors import Api
from proxy.wire.request import read_request

CONFIG = '[[backends]]\nname = "a"\nurl = "http://127.0.0.1:9"\n[models.tiny]\n'


def tool(name: str, *, kind: str = "string", description: str = "") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"value": {"type": kind}}}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def route() -> ModelRoute:
    found = loads(CONFIG).resolve("tiny")
    assert found is not None
    return found


def read(raw_tools: bytes) -> ToolWork | None:
    body = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"tools":%b}' % raw_tools
    return ToolWork.read(read_request(Api.CHAT, body), route(), None)


def names(work: ToolWork | None) -> list[str]:
    assert work is not None
    return list(work.tools.by_name)


def test_the_same_tools_are_read_once() -> None:
    raw = json.dumps([tool("look"), tool("go")]).encode()
    first, again = read(raw), read(raw)
    assert first is not None
    assert again is not None
    assert names(first) == ["look", "go"]
    assert again.tools is first.tools


def test_tools_that_differ_in_anything_are_others() -> None:
    text, number = (read(json.dumps([tool("look", kind=kind)]).encode()) for kind in ("string", "integer"))
    assert text is not None
    assert number is not None
    assert text.tools is not number.tools
    assert number.tools.by_name["look"].schema["properties"]["value"]["type"] == "integer"


def test_tools_too_long_to_keep_are_read_each_time() -> None:
    raw = json.dumps([tool("look", description="x" * MAX_KEPT_BYTES)]).encode()
    first, again = read(raw), read(raw)
    assert first is not None
    assert again is not None
    assert again.tools is not first.tools
    assert names(again) == ["look"]


def test_tools_that_no_backend_could_read_are_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(BodyError):
            read(b'[{"type":"function","function":{"name":"look","n":01}}]')
