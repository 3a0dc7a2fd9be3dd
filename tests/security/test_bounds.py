"""What a client may make the gateway hold, with or without a key."""

from __future__ import annotations

import asyncio
import json

import pytest

from proxy.errors import Outcome
from proxy.explain import KEPT
from tests.proxy.conftest import CHAT, MakeGateway, chat
from tests.proxy.scenes import eventually
from tests.proxy.test_backpressure import held
from tests.scripted import ScriptedBackend, Stall

PAGE = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_who_asks_and_asks_and_reads_nothing_is_not_answered_on_and_on(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    """A page of kilobytes for thirty bytes, no key asked for: all of it waited in memory."""
    gateway = await make_gateway(backend)
    async with await gateway.connect() as client:
        client._writer.transport.pause_reading()
        for _ in range(100):
            client._writer.write(PAGE * 50)
            await asyncio.sleep(0)
        most = 0
        for _ in range(2000):
            await asyncio.sleep(0)
            most = max(most, held(gateway))
        assert 0 < most < 256 * 1024
        assert (await gateway.ask("/health")).status == 200
        client._writer.transport.abort()


async def test_requests_that_wait_behind_one_that_runs_are_few(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    backend.answer([Stall()])
    async with await gateway.connect() as client:
        client.send(CHAT, chat(stream=True))
        await backend.received()
        client._writer.write(PAGE * 10_000)
        server = gateway.app._server
        assert server is not None
        # Held without bound, or not read on: then nobody would notice that the client is gone.
        await eventually(lambda: not server.connections, "the end of the connection")
    assert await backend.closed() is not None
    await gateway.ended(Outcome.CANCELLED)


async def test_a_body_behind_a_request_that_runs_does_not_hide_that_the_client_is_gone(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    backend.answer([Stall()])
    first = json.dumps(chat(stream=True)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    async with await gateway.connect() as client:
        client.send_raw(head % len(first) + first + head % (8 << 20) + b" " * (4 << 20))
        await backend.received()
        client.reset()
        await gateway.ended(Outcome.CANCELLED)


async def test_what_is_remembered_of_clients_does_not_grow_with_what_they_make_up(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    config = "[policy.working_set]\nconversations = 50\n"
    gateway = await make_gateway(backend, config=config)
    app = gateway.app

    def sizes() -> dict[str, int]:
        return {
            "owners": len(app.gateway.owners._known),
            "stories": len(app.gateway.memory._stories),
            "payers": len(app.gateway.limiter._paying),
            "calibrations": len(app.gateway.classifier.calibrations),
            "outputs": len(app.pool.fleet._outputs),
            "tags": len(app.gate._admission._lines) if hasattr(app.gate, "_admission") else 0,
        }

    async with await gateway.connect() as client:
        for number in range(400):
            names = {"x-session-id": f"s{number}", "x-request-id": f"r{number}", "user-agent": f"u{number}"}
            client.send(
                CHAT, chat(f"text {number}", user=f"u{number}", prompt_cache_key=f"k{number}"), headers=names
            )
            assert (await client.read()).status == 200
            client.next()
            if number == 99:
                before = sizes()
    after = sizes()
    assert after.pop("stories") <= KEPT
    before.pop("stories")
    assert after == before


@pytest.mark.parametrize("size", [70 * 1024, 1024 * 1024])
async def test_tools_that_are_large_are_not_kept(
    make_gateway: MakeGateway, backend: ScriptedBackend, size: int
) -> None:
    from proxy.toolwork import _compiled

    gateway = await make_gateway(backend)
    before = _compiled.cache_info().currsize
    function = {"name": "f", "description": "x" * size, "parameters": {"type": "object", "properties": {}}}
    await gateway.ask(CHAT, chat(tools=[{"type": "function", "function": function}]))
    assert _compiled.cache_info().currsize == before
    assert _compiled.cache_info().maxsize == 32
