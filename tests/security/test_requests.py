"""What a request may make the gateway do beside answering it: talk to nobody else, and to its backends as itself."""

from __future__ import annotations

import socket

import pytest

from proxy.toolcheck import violations
from proxy.wire.coerce import Toolset
from proxy.wire.toolcalls import FinishedCall
from tests.proxy.conftest import CHAT, MakeGateway, chat
from tests.scripted import ScriptedBackend


async def test_no_url_in_a_request_is_fetched_here(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    """It goes on to the engine, as it would without the gateway."""
    gateway = await make_gateway(backend)
    url = f"{other.url}/latest/meta-data"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "file", "file": {"file_url": url}}]
    schema = {"type": "object", "properties": {"x": {"$ref": url}}, "$schema": url, "$id": url}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = chat(tools=tools) | {
        "messages": [{"role": "user", "content": content}],
        "webhook": url,
        "base_url": url,
    }
    headers = {
        "x-forwarded-host": other.url,
        "forwarded": f"host={other.url}",
        "host": f"127.0.0.1:{other.port}",
    }
    assert (await gateway.ask(f"{CHAT}?url={url}", body, headers=headers)).status == 200
    assert url.encode() in (await backend.received()).body
    assert other.connections == []


def test_no_schema_is_fetched_to_judge_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(socket, "create_connection", lambda *args, **more: asked.append(args))
    monkeypatch.setattr(socket.socket, "connect", lambda *args: asked.append(args))
    for schema in (
        {"$ref": "http://127.0.0.1:9/s"},
        {"$schema": "http://127.0.0.1:9/s", "properties": {"x": {"$ref": "file:///etc/passwd"}}},
        {"$id": "http://127.0.0.1:9/s", "$ref": "other"},
    ):
        tools = Toolset([{"type": "function", "function": {"name": "f", "parameters": schema}}])
        violations(tools, [FinishedCall(0, "c", "f", ['{"x": 1}'], True)])
    assert asked == []


@pytest.mark.parametrize(
    "target", ["http://127.0.0.1:{port}" + CHAT, "http://user@127.0.0.1:{port}" + CHAT, CHAT]
)
async def test_neither_host_nor_target_chooses_whom_the_gateway_talks_to(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, target: str
) -> None:
    gateway = await make_gateway(backend)
    body = b'{"model":"tiny","messages":[]}'
    async with await gateway.connect() as client:
        line = f"POST {target.format(port=other.port)} HTTP/1.1\r\nhost: 127.0.0.1:{other.port}\r\n"
        client.send_raw(f"{line}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert (await client.read()).status == 200
    request = await backend.received()
    assert (request.target, request.header("host")) == (CHAT, f"127.0.0.1:{backend.port}")
    assert other.connections == []


ENGINE = """
    /sleep /wake_up /is_sleeping /collective_rpc /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /server_info
    /v1/load_lora_adapter /v1/unload_lora_adapter /start_profile /stop_profile /scale_elastic_ep /is_scaling_elastic_ep
    /load /ping /invocations /inference/v1/generate /abort_requests /pause /resume /docs /openapi.json /tokenizer_info
    /slots /props /lora-adapters /infill /apply-template /v1/files /v1/batches /v1/messages/batches /v1/conversations
"""


@pytest.mark.parametrize("path", ENGINE.split())
async def test_what_an_engine_has_for_its_operator_is_not_for_clients(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str
) -> None:
    gateway = await make_gateway(backend)
    for way in (
        path,
        f"{path}/",
        f"{path}?x=1",
        f"{path}%3f",
        f"/v1/..{path}",
        f"/v1/chat/completions/../..{path}",
    ):
        for method in ("GET", "POST"):
            assert (await gateway.ask(way, {"model": "tiny"}, method=method)).status == 404
    assert not backend.requests
