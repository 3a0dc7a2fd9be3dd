"""The scripted backend sends what a test says, records what it gets and notices how a connection ends."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import aiohttp
import pytest

from tests import captures, scripted
from tests.scripted import (
    Call,
    Chunk,
    Close,
    Ending,
    Head,
    LastChunk,
    Raw,
    Received,
    Reset,
    ScriptedBackend,
    Stall,
    WaitFor,
    after,
    black_hole,
    chat_json,
    chat_stream,
    closed_port,
    cut,
    error_json,
    json_answer,
    metrics_page,
    replay,
    server_tls,
    sse,
    tool_stream,
    whole,
)

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture
async def backend() -> AsyncIterator[ScriptedBackend]:
    async with ScriptedBackend() as backend:
        yield backend


@pytest.fixture
async def dial(backend: ScriptedBackend) -> AsyncIterator[Callable[[], Awaitable[Client]]]:
    clients = []

    async def connect() -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", backend.port))
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.writer.close()
        with suppress(OSError):
            await client.writer.wait_closed()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def read_exactly(self, expected: bytes) -> None:
        assert await self.reader.readexactly(len(expected)) == expected

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Dial = Callable[[], Awaitable[Client]]


async def test_steps_reach_the_wire_as_they_are(backend: ScriptedBackend, dial: Dial) -> None:
    backend.answer(
        [
            Head(207, [("X-A", "1"), ("x-a", "2")], reason="Odd"),
            Raw(b"not chunked\r\n"),
            Chunk(b"twelve bytes"),
            Chunk(b"x" * 26),
            LastChunk(),
        ]
    )
    client = await dial()
    client.send(POST)
    await client.read_exactly(
        b"HTTP/1.1 207 Odd\r\nX-A: 1\r\nx-a: 2\r\n\r\nnot chunked\r\nc\r\ntwelve bytes\r\n1a\r\n"
        + b"x" * 26
        + b"\r\n0\r\n\r\n"
    )


async def test_a_request_is_recorded_byte_for_byte_however_it_arrives(
    backend: ScriptedBackend, dial: Dial
) -> None:
    client = await dial()
    head = b"POST /v1/x?a=b HTTP/1.1\r\nhOST: me\r\nX-Twice: 1\r\nX-Twice: 2\r\nContent-Length: 10\r\n\r\n"
    for byte in head + b'{"a": 1}\r\n':
        client.send(bytes([byte]))
        await client.writer.drain()
    request = await backend.received(0)
    assert (request.head, request.body) == (head, b'{"a": 1}\r\n')
    assert (request.method, request.target, request.path) == ("POST", "/v1/x?a=b", "/v1/x")
    assert request.headers[0] == ("hOST", "me")
    assert request.header("Host") == "me"
    assert request.header("absent") is None
    assert request.json == {"a": 1}
    with pytest.raises(AssertionError, match="X-Twice sent 2 times"):
        request.header("X-Twice")


async def test_a_chunked_request_body_is_recorded_without_its_framing(
    backend: ScriptedBackend, dial: Dial
) -> None:
    client = await dial()
    client.send(
        b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;ext=1\r\nhello\r\nA\r\n, there!!\n\r\n"
    )
    client.send(b"0\r\n\r\n")
    assert (await backend.received(0)).body == b"hello, there!!\n"


async def test_pipelined_requests_are_answered_in_order_on_one_connection(
    backend: ScriptedBackend, dial: Dial
) -> None:
    backend.answer(whole(b"first"), whole(b"second"))
    client = await dial()
    client.send(POST + POST)
    await backend.answered(1)
    assert [r.reused for r in backend.requests] == [False, True]
    assert (len(backend.connections), backend.open_connections) == (1, 1)
    assert (await client.reader.readuntil(b"first")).startswith(b"HTTP/1.1 200 OK\r\n")
    assert (await client.reader.readuntil(b"second")).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_gate_holds_the_rest_back_until_it_opens(backend: ScriptedBackend, dial: Dial) -> None:
    gate, reached = asyncio.Event(), asyncio.Event()
    backend.answer(
        [Head(200, [("content-length", "2")]), Raw(b"a"), Call(reached.set), WaitFor(gate), Raw(b"b")]
    )
    client = await dial()
    client.send(POST)
    await reached.wait()
    await client.read_exactly(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\na")
    assert not backend.requests[0].answered
    gate.set()
    await client.read_exactly(b"b")
    await backend.answered(0)


async def test_a_stall_ends_when_released(backend: ScriptedBackend, dial: Dial) -> None:
    backend.answer([Stall(), *whole(b"late")])
    client = await dial()
    client.send(POST)
    await backend.received(0)
    backend.release()
    assert (await client.reader.readuntil(b"late")).endswith(b"\r\n\r\nlate")


async def test_close_delivers_what_was_sent_then_ends(backend: ScriptedBackend, dial: Dial) -> None:
    backend.answer([Raw(b"half an ans"), Close(), Raw(b"wer")])
    client = await dial()
    client.send(POST)
    assert await client.reader.read() == b"half an ans"
    assert await backend.closed(0) is Ending.OURS


async def test_reset_is_seen_as_a_reset(backend: ScriptedBackend, dial: Dial) -> None:
    backend.answer([Reset()])
    client = await dial()
    client.send(POST)
    with pytest.raises(ConnectionResetError):
        await client.reader.read()
    assert await backend.closed(0) is Ending.OURS


@pytest.mark.parametrize("steps", [[Stall()], [Head(200), Raw(b"x"), Stall()], whole(b"done")])
async def test_the_other_sides_close_is_noticed_in_any_phase(
    backend: ScriptedBackend, dial: Dial, steps: scripted.Steps
) -> None:
    backend.answer(steps)
    client = await dial()
    client.send(POST)
    await backend.received(0)
    if isinstance(steps[0], Head):
        await client.reader.readuntil(b"\r\n\r\n")
        await client.reader.read(4)
    client.writer.close()
    ending = await backend.closed(0)
    assert ending is Ending.PEER_CLOSED
    assert ending.by_peer
    assert backend.open_connections == 0


async def test_the_other_sides_reset_is_told_from_a_close(backend: ScriptedBackend, dial: Dial) -> None:
    backend.answer([Stall()])
    client = await dial()
    client.send(POST)
    await backend.received(0)
    client.reset()
    assert await backend.closed(0) is Ending.PEER_RESET


async def test_a_reader_that_stops_blocks_the_script(backend: ScriptedBackend, dial: Dial) -> None:
    mebibyte, total = b"x" * 2**20, 64
    backend.answer([Head(200, [("content-length", str(total * 2**20))]), *[Raw(mebibyte)] * total])
    client = await dial()
    client.send(POST)
    assert await backend.blocked(0) < total * 2**20
    body = (await client.reader.readuntil(b"\r\n\r\n")) and await client.reader.readexactly(total * 2**20)
    assert len(body) == total * 2**20
    await backend.answered(0)


async def test_an_early_answer_does_not_wait_for_the_body(backend: ScriptedBackend, dial: Dial) -> None:
    backend.answer(whole(b"too big", 413), early=True)
    client = await dial()
    client.send(b"POST /x HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n{")
    assert (await client.reader.readuntil(b"too big")).startswith(b"HTTP/1.1 413 ")
    assert not backend.requests[0].whole


async def test_an_answer_can_depend_on_the_request(backend: ScriptedBackend, dial: Dial) -> None:
    def echo(request: Received) -> scripted.Steps:
        return whole(request.body[::-1])

    backend.answer(echo)
    client = await dial()
    client.send(POST)
    assert (await client.reader.readuntil(b"}{")).endswith(b"\r\n\r\n}{")


async def test_a_greeting_comes_before_any_request(backend: ScriptedBackend, dial: Dial) -> None:
    backend.greet([Reset()], [Raw(b"HTTP/1.1 408 Request Timeout\r\n\r\n"), Close()])
    with pytest.raises(ConnectionResetError):
        await (await dial()).reader.read()
    assert (await (await dial()).reader.read()).startswith(b"HTTP/1.1 408 ")
    assert backend.requests == []


async def test_idle_connections_can_be_closed_and_busy_ones_stay(
    backend: ScriptedBackend, dial: Dial
) -> None:
    backend.answer(whole(b"done"), [Stall()])
    idle, busy = await dial(), await dial()
    idle.send(POST)
    await backend.answered(0)
    busy.send(POST)
    await backend.received(1)
    assert backend.close_idle() == 1
    assert (await idle.reader.read()).endswith(b"done")
    assert backend.open_connections == 1


async def test_it_can_stop_listening_and_listen_again_on_its_port(
    backend: ScriptedBackend, dial: Dial
) -> None:
    port = backend.port
    backend.stop_listening()
    with pytest.raises(ConnectionRefusedError):
        await dial()
    await backend.listen()
    assert backend.port == port
    await dial()


async def test_polls_are_answered_apart_from_requests(backend: ScriptedBackend) -> None:
    backend.answer(chat_json("one"))
    async with aiohttp.ClientSession(backend.url) as session:
        async with session.get("/health") as health:
            assert (health.status, await health.read()) == (200, b"")
        async with session.get("/metrics") as metrics:
            assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0\n' in await metrics.text()
        async with session.get("/v1/models") as models:
            assert (await models.json())["data"][0]["max_model_len"] == 4096
        backend.pages["/health"] = error_json(503, "engine is dead")
        backend.pages["/metrics"] = metrics_page(running=3, waiting=2, kv_usage=0.5)
        async with session.get("/health") as health:
            assert health.status == 503
        async with session.get("/metrics") as metrics:
            assert "vllm:kv_cache_usage_perc" in await metrics.text()
        async with session.post("/v1/chat/completions", json={}) as answer:
            assert (await answer.json())["choices"][0]["message"]["content"] == "one"
    assert [r.path for r in backend.polls] == ["/health", "/metrics", "/v1/models", "/health", "/metrics"]
    assert [r.path for r in backend.requests] == ["/v1/chat/completions"]


async def test_without_a_script_it_answers_in_the_way_it_was_asked(backend: ScriptedBackend) -> None:
    async with aiohttp.ClientSession(backend.url) as session:
        async with session.post("/v1/chat/completions", json={"stream": False}) as plain:
            assert (await plain.json())["object"] == "chat.completion"
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        async with session.post("/v1/chat/completions", json=asked) as stream:
            *events, done = (await stream.read()).split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    assert json.loads(events[-1].removeprefix(b"data: "))["usage"]["completion_tokens"] == 5


async def test_it_speaks_tls() -> None:
    context, authority = server_tls()
    client_context = ssl.create_default_context(cadata=authority.decode())
    async with ScriptedBackend(tls=context) as backend, aiohttp.ClientSession() as session:
        backend.answer(json_answer({"ok": True}), cut(chat_stream(), 1, Reset()))
        async with session.post(f"{backend.url}/v1/x", json={}, ssl=client_context) as answer:
            assert await answer.json() == {"ok": True}
        with pytest.raises(aiohttp.ClientError):
            async with session.post(f"{backend.url}/v1/x", json={}, ssl=client_context) as answer:
                await answer.read()


async def test_a_wait_in_vain_says_what_was_awaited(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted, "DEADLINE", 0.01)
    with pytest.raises(AssertionError, match=r"waited 0.01 s for request 0 to arrive; so far <Scripted"):
        await backend.received(0)


async def test_a_script_that_raises_resets_its_connection_and_fails_the_test() -> None:
    def broken() -> None:
        raise ValueError("a mistake in the test")

    async def use() -> None:
        async with ScriptedBackend() as backend, aiohttp.ClientSession(backend.url) as session:
            backend.answer([Call(broken)])
            with pytest.raises(aiohttp.ClientError):
                await session.post("/x")

    with pytest.raises(ValueError, match="a mistake in the test"):
        await use()


@pytest.mark.parametrize("capture", captures.all_captures(), ids=str)
async def test_a_recorded_answer_is_replayed_as_it_was(capture: captures.Capture) -> None:
    async with ScriptedBackend() as backend, aiohttp.ClientSession(backend.url) as session:
        backend.pages.clear()
        backend.answer(replay(capture))
        async with session.request(capture.request_method, capture.path, data=capture.request_body) as answer:
            assert answer.status == capture.status
            assert await answer.read() == capture.body
        assert answer.headers.get("content-type", "") == capture.header("content-type")


async def test_a_replay_can_cut_the_body_elsewhere(backend: ScriptedBackend, dial: Dial) -> None:
    capture = captures.load(captures.VLLM, "chat_text_stream")
    steps = replay(capture, lambda body: [body[i : i + 1] for i in range(len(body))])
    assert [step for step in steps if isinstance(step, Chunk)] == [Chunk(bytes([b])) for b in capture.body]


def test_steps_are_spliced_behind_the_nth_chunk() -> None:
    steps = sse("a", "b", done=False)
    head, first, second, last = steps
    stall = Stall()
    assert after(steps, 0, stall) == [head, stall, first, second, last]
    assert after(steps, 1, stall) == [head, first, stall, second, last]
    assert after(steps, 2, stall) == [head, first, second, stall, last]
    assert cut(steps, 1) == [head, first, Close()]
    assert cut(steps, 0, Reset()) == [head, Reset()]
    with pytest.raises(IndexError):
        after(steps, 3, stall)


def deltas(steps: scripted.Steps) -> list[dict[str, object]]:
    events = [step.data.removeprefix(b"data: ") for step in steps if isinstance(step, Chunk)]
    return [json.loads(e)["choices"][0]["delta"] for e in events if e != b"[DONE]\n\n"]


def test_built_streams_have_the_shape_that_vllm_sends() -> None:
    built = [s.data for s in chat_stream("a b", usage=(3, 2), reasoning=["c"]) if isinstance(s, Chunk)]
    recorded = captures.load(captures.VLLM, "chat_text_stream").chunks

    def shapes(chunks: list[bytes]) -> set[tuple[tuple[str, ...], tuple[str, ...]]]:
        found = set()
        for chunk in chunks[:-1]:
            value = json.loads(chunk.removeprefix(b"data: "))
            deltas = [tuple(choice["delta"]) for choice in value["choices"]] or [()]
            found.add((tuple(sorted({"id", "object", "model", "choices", "usage"} & value.keys())), *deltas))
        return found

    assert shapes(built) == shapes(list(recorded))
    assert built[-1] == recorded[-1]


def test_a_built_tool_call_gives_its_name_then_its_arguments() -> None:
    first, name, *pieces, finish = deltas(tool_stream("f", ['{"a', '": 1}']))
    assert first == {"role": "assistant", "content": ""}
    assert name["tool_calls"][0]["function"] == {"name": "f"}  # type: ignore[index]
    assert [p["tool_calls"][0]["function"]["arguments"] for p in pieces] == ['{"a', '": 1}']  # type: ignore[index]
    assert finish == {}


async def test_a_black_hole_neither_accepts_nor_refuses() -> None:
    with black_hole() as port, pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await asyncio.open_connection("127.0.0.1", port)


async def test_a_closed_port_refuses() -> None:
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", closed_port())
