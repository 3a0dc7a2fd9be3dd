"""What clients see of a server that breaks off: every endpoint at once, in each of the ways one can read it.

`await broken_off(gateway, break_it)` opens, for each endpoint, a stream that an SDK reads and one whose bytes are
kept, and one plain request; when all of them run, it breaks the server and reads on to the end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
from openai.types.responses import ResponseErrorEvent

from tests.client import Connection, Response
from tests.real.alike import Clients
from tests.real.gateway import GatewayProcess

MANY = 3500  # tokens: seconds of them

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "#script:long"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"max_tokens": MANY},
    "/v1/completions": {"model": "tiny", "prompt": "count", "max_tokens": MANY},
    "/v1/messages": CHAT | {"max_tokens": MANY},
    "/v1/responses": {"model": "tiny", "input": "#script:long", "max_output_tokens": MANY},
}
AT_ONCE = 2 * len(BODIES) + 1  # requests of broken_off

Stream = AsyncIterator[object]


@dataclass(frozen=True)
class Ends:
    """By endpoint. told: what the SDK's stream raised, or the last event that it gave. seen: the bytes.
    unstreamed: of the plain chat request."""

    told: dict[str, object]
    seen: dict[str, Response]
    unstreamed: object


async def broken_off(gateway: GatewayProcess, break_it: Callable[[], Awaitable[object]]) -> Ends:
    clients = Clients(gateway.url)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(clients.async_openai())
        claude = await stack.enter_async_context(clients.async_claude())
        streams = {path: await _stream(client, claude, path) for path in BODIES}
        raw = {path: await stack.enter_async_context(await Connection.open(gateway.port)) for path in BODIES}
        for path, connection in raw.items():
            connection.send(path, BODIES[path] | {"stream": True}, headers={"x-request-id": f"raw{path}"})
        for stream in streams.values():
            await _begun(stream)
        for connection in raw.values():
            await connection.read_until(b" two")
        plain = asyncio.create_task(_ending(client.chat.completions.create(**BODIES["/v1/chat/completions"])))
        await gateway.until_running(AT_ONCE)
        await break_it()
        told = {path: await _ending(_last(stream)) for path, stream in streams.items()}
        seen = {path: await connection.read() for path, connection in raw.items()}
        return Ends(told, seen, await plain)


async def _stream(client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, path: str) -> Stream:
    body = BODIES[path] | {"stream": True}
    if path == "/v1/messages":
        return aiter(await claude.messages.create(**body))
    make = {
        "/v1/chat/completions": client.chat.completions.create,
        "/v1/completions": client.completions.create,
        "/v1/responses": client.responses.create,
    }[path]
    return aiter(await make(**body))


async def _begun(stream: Stream) -> None:
    """Until the stream has said something."""
    for _ in range(10):
        await anext(stream)


async def _last(stream: Stream) -> object:
    last = None
    async for event in stream:
        last = event
    return last


async def _ending(answer: Awaitable[object]) -> object:
    try:
        return await answer
    except (openai.APIError, anthropic.APIError) as error:
        return error


def assert_honest(ends: Ends, paths: Iterable[str] = BODIES) -> None:
    """No end looks like a clean one: the SDKs raise (for Responses the error is an event to them, the last one),
    and the bytes say why in the endpoint's own shape."""
    expected = {"/v1/messages": anthropic.APIError, "/v1/responses": ResponseErrorEvent}
    for path in paths:
        told, response = ends.told[path], ends.seen[path]
        assert isinstance(told, expected.get(path, openai.APIError)), (path, told)
        assert response.complete, path  # the HTTP message ends properly, so that every client reads the error
        assert b"[DONE]" not in response.body, path
        *answer, last = response.events
        assert not any(map(_is_end, answer)), path
        if path in ("/v1/messages", "/v1/responses"):
            assert last["type"] == "error", path
            assert response.body.count(b"event: error\n") == 1, path
        else:
            assert list(last) == ["error"], path
            assert isinstance(last["error"]["code"], str | None), path
    assert isinstance(ends.unstreamed, openai.InternalServerError)


def _is_end(event: Any) -> bool:
    """Whether a client would take this event for the end of a whole answer."""
    if event.get("type") in ("message_stop", "response.completed", "response.incomplete"):
        return True
    stopped = (event.get("delta") or {}) if isinstance(event.get("delta"), dict) else {}
    reasons = [choice.get("finish_reason") for choice in event.get("choices") or []]
    return any(reasons) or bool(stopped.get("stop_reason"))


def message_of(response: Response) -> str:
    """What the last event tells of the error."""
    last = response.events[-1]
    error = last.get("error", last)
    assert isinstance(error["message"], str), json.dumps(last)
    return str(error["message"])
