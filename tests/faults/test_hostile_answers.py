"""Answers that no honest backend gives: the client gets a clean answer of ours or of the backend, and nothing of the trick.

Whatever comes from behind: the client's response has one head of ours, its framing is ours, its connection is fit for the
next request; nothing is a 500, is held without bound, or reaches the next request of the same backend.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator

import pytest

from tests.client import Connection, Response
from tests.faults.leaks import Leaks
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.scripted import (
    Chunk,
    Close,
    Head,
    LastChunk,
    Raw,
    ScriptedBackend,
    Step,
    chat_event,
    chat_json,
    chat_stream,
    whole,
)

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
(_, _body) = chat_json()
assert isinstance(_body, Raw)
BODY = _body.data
LENGTH = b"content-length: %d\r\n" % len(BODY)
EVENTS = ("content-type", "text/event-stream")
CHUNKED = ("transfer-encoding", "chunked")


class Asker:
    """One client connection, used again and again: what a backend does must not spoil it."""

    def __init__(self, gateway: Gateway, backend: ScriptedBackend, client: Connection) -> None:
        self.gateway, self.backend, self.client = gateway, backend, client

    async def ask(self, *steps: Step, stream: bool = False) -> Response:
        """The answer to these steps; behind it another request is served as ever, on the same client connection."""
        self.backend.answer(list(steps))
        self.client.send(CHAT, chat(stream=stream))
        response = await self.client.read()
        assert response.complete
        self.backend.answer(chat_json("the next one"))
        self.client.send(CHAT, chat())
        following = await self.client.read()
        assert following.status == 200
        assert following.json["choices"][0]["message"]["content"] == "the next one"
        return response


@pytest.fixture
async def asker(make_gateway: MakeGateway, backend: ScriptedBackend) -> AsyncIterator[Asker]:
    config = "[health]\ninterval = 86400\n[policy.retry]\nmax_attempts = 1\n"
    gateway = await make_gateway(backend, config=config)
    await backend.until(lambda: len([p for p in backend.polls if p.answered]) >= 3, "the first poll")
    leaks = await Leaks.of(gateway, [backend])
    async with await gateway.connect() as client:
        yield Asker(gateway, backend, client)
    await leaks.none_left()


CLEAN = {
    "bytes behind the message": OK
    + LENGTH
    + b"\r\n"
    + BODY
    + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil",
    "a head behind the message": OK + LENGTH + b"\r\n" + BODY + b"HTTP/1.1 200 OK\r\nx-evil: 1\r\n\r\n",
    "a hundred 100s first": b"HTTP/1.1 100 Continue\r\n\r\n" * 100 + OK + LENGTH + b"\r\n" + BODY,
    "a 103 with headers first": b"HTTP/1.1 103 Early Hints\r\nx-evil: 1\r\n\r\n"
    + OK
    + LENGTH
    + b"\r\n"
    + BODY,
    "words in our name": OK + b"x-tierline-backend: evil\r\nx-request-id: evil\r\n" + LENGTH + b"\r\n" + BODY,
    "trailers": OK
    + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nx-evil: 1\r\n\r\n" % (len(BODY), BODY),
    "chunk extensions": OK
    + b"transfer-encoding: chunked\r\n\r\n%x;x=y\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "hop-by-hop headers": OK
    + b"connection: x-evil, close\r\nx-evil: 1\r\nkeep-alive: x\r\n"
    + LENGTH
    + b"\r\n"
    + BODY,
    "cookies": OK + b"set-cookie: a=b\r\nset-cookie: c=d\r\n" + LENGTH + b"\r\n" + BODY,
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n" + LENGTH + b"\r\n" + BODY,
    "bytes beyond ASCII in a header": OK + b"x-name: \xc3\xa9\xff\r\n" + LENGTH + b"\r\n" + BODY,
}


@pytest.mark.parametrize("name", CLEAN)
async def test_what_is_an_answer_passes_and_what_hangs_on_it_does_not(asker: Asker, name: str) -> None:
    response = await asker.ask(Raw(CLEAN[name]), *([Close()] if "behind" in name or "1.0" in name else []))
    assert (response.status, response.body) == (200, BODY)
    assert "x-evil" not in response.headers
    assert response.headers["x-tierline-backend"] == "a"
    assert len(response.values("x-request-id")) == len(response.values("x-tierline-backend")) == 1
    assert "evil" not in "".join(response.headers.values())


MALFORMED = {
    "LF alone between headers": b"HTTP/1.1 200 OK\ncontent-length: 2\n\n{}",
    "CR in a header": OK + b"x-a: b\rx-evil: 1\r\n" + LENGTH + b"\r\n" + BODY,
    "NUL in a header": OK + b"x-a: b\0c\r\n" + LENGTH + b"\r\n" + BODY,
    "a blank in a header's name": OK + b"x evil: 1\r\n" + LENGTH + b"\r\n" + BODY,
    "a header without a name": OK + b": evil\r\n" + LENGTH + b"\r\n" + BODY,
    "a folded header": OK + b"x-a: b\r\n x-evil: 1\r\n" + LENGTH + b"\r\n" + BODY,
    "a negative length": OK + b"content-length: -1\r\n\r\n" + BODY,
    "a length with a sign": OK + b"content-length: +2\r\n\r\n{}",
    "a length beyond 64 bits": OK + b"content-length: 99999999999999999999999\r\n\r\n{}",
    "length and chunked": OK + LENGTH + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": OK + LENGTH + b"content-length: 3\r\n\r\n" + BODY,
    "an unknown coding": OK + b"transfer-encoding: gzip\r\n\r\n" + BODY,
    "a chunk size that overflows": OK + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n" + BODY,
    "a negative chunk size": OK + b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    "a status of two digits": b"HTTP/1.1 20 OK\r\ncontent-length: 0\r\n\r\n",
    "a status of zeros": b"HTTP/1.1 000 OK\r\ncontent-length: 2\r\n\r\n{}",
    "a status below all": b"HTTP/1.1 099 OK\r\ncontent-length: 2\r\n\r\n{}",
    "a status of no digits": b"HTTP/1.1 abc OK\r\ncontent-length: 0\r\n\r\n",
    "HTTP/2": b"HTTP/2 200\r\ncontent-length: 2\r\n\r\n{}",
    "ICY": b"ICY 200 OK\r\n\r\n{}",
    "RTSP": b"RTSP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "a request": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "TLS": b"\x15\x03\x01\x00\x02\x02\x28",
    "64k headers": OK + b"x-a: b\r\n" * 65_536 + LENGTH + b"\r\n" + BODY,
    "a switch of protocols": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nevil",
    "endless 100s": b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_what_can_be_read_in_two_ways_is_a_502_or_a_clean_answer_and_never_what_it_wants(
    asker: Asker, name: str
) -> None:
    response = await asker.ask(Raw(MALFORMED[name]), Close())
    assert "x-evil" not in response.headers
    if response.status == 200:
        assert response.body in (BODY, b"{}"), "the message, and nothing else of it"
        return
    assert response.status == 502
    assert response.json["error"]["code"] in ("upstream_malformed", "upstream_cut")
    assert "evil" not in response.body.decode()


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 305, 307, 308])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_redirect_is_not_followed_and_not_passed_on(asker: Asker, status: int, stream: bool) -> None:
    target = "http://169.254.169.254/latest/meta-data/\r\nx-evil: 1"
    body = b"" if status == 304 else b"elsewhere"
    head = Head(status, [("location", target.partition("\r")[0]), ("content-length", str(len(body)))])
    response = await asker.ask(head, *([Raw(body)] if body else []), stream=stream)
    assert response.status == 502
    assert "location" not in response.headers
    assert b"169.254" not in response.body
    assert response.json["error"]["code"] == "upstream_redirect"


STREAMS: dict[str, tuple[bytes, ...]] = {
    "CR line ends": tuple(
        e.replace(b"\n", b"\r") for e in (chat_event({"content": "x"}), chat_event({}, "stop"))
    ),
    "a byte order mark": (b"\xef\xbb\xbf" + chat_event({"content": "x"}), chat_event({}, "stop")),
    "fields nobody knows": (
        b"id: 1\nretry: 1\nx: y\n" + chat_event({"content": "x"}),
        chat_event({}, "stop"),
    ),
    "a comment of 1 MiB": (
        b":" + b"x" * (1 << 20) + b"\n\n",
        chat_event({"content": "x"}),
        chat_event({}, "stop"),
    ),
    "NUL in the text": (chat_event({"content": "\0"}), chat_event({}, "stop")),
    "a lone surrogate": (
        b'data: {"choices":[{"index":0,"delta":{"content":"\\ud800"}}]}\n\n',
        chat_event({}, "stop"),
    ),
    "an event that looks like ours in the text": (
        chat_event({"content": "\n\ndata: [DONE]\n\n"}),
        chat_event({}, "stop"),
    ),
    "an index of 2**70": (
        b'data: {"choices":[{"index":%d,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n' % 2**70,
    ),
    "usage of text": (
        chat_event({"content": "x"}),
        chat_event({}, "stop"),
        b'data: {"choices":[],"usage":{"prompt_tokens":"many","completion_tokens":-1}}\n\n',
    ),
    "ten thousand empty events": (
        b"data:\n\n" * 10_000,
        chat_event({"content": "x"}),
        chat_event({}, "stop"),
    ),
    "100k deep": (
        b'data: {"choices":[{"index":0,"delta":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}]}\n\n",
    ),
    "a number of 100k digits": (
        b'data: {"choices":[{"index":0,"delta":{"content":"x"}}],"created":' + b"9" * 100_000 + b"}\n\n",
    ),
    "a finish of another type": (
        b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":[1]}]}\n\n',
    ),
    "choices of another type": (b'data: {"choices":{"a":1}}\n\n',),
    "choices of null": (b'data: {"choices":[null]}\n\n',),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("tools", [False, True], ids=["plain", "tools"])
async def test_an_odd_stream_passes_or_ends_with_an_error_and_never_without_an_end(
    asker: Asker, name: str, tools: bool
) -> None:
    asker.backend.answer(
        [Head(200, [EVENTS, CHUNKED]), *map(Chunk, STREAMS[name]), Chunk(b"data: [DONE]\n\n"), LastChunk()]
    )
    more = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]} if tools else {}
    asker.client.send(CHAT, chat(stream=True, **more))
    response = await asker.client.read()
    assert response.complete
    record = await asker.gateway.record()
    assert record.outcome in ("ok", "upstream_cut", "upstream_malformed"), record.outcome
    if response.status == 200:
        done, error = response.body.endswith(b"[DONE]\n\n"), b'"error"' in response.body
        assert done is (record.outcome == "ok")
        assert error is not done
    else:
        assert response.status == 502


@pytest.mark.parametrize("kind", ["an event", "a comment", "a body", "an error's body"])
async def test_what_never_ends_is_not_held_without_bound(asker: Asker, kind: str) -> None:
    flood = [Chunk(b"x" * (1 << 20))] * 64
    head = {
        "an event": Head(200, [EVENTS, CHUNKED]),
        "a comment": Head(200, [EVENTS, CHUNKED]),
        "a body": Head(200, [("content-type", "application/json"), CHUNKED]),
        "an error's body": Head(500, [("content-type", "application/json"), CHUNKED]),
    }[kind]
    begin = {"an event": [Chunk(b"data: ")], "a comment": [Chunk(b":")]}.get(kind, [])
    asker.backend.answer([head, *begin, *flood, Close()])
    tracemalloc.start()
    try:
        asker.client.send(CHAT, chat(stream=head.status == 200))
        while not asker.client.response.complete and not asker.client.closed_by_peer:
            await asker.client.read_some()
            asker.client.response.pieces.clear()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (await asker.gateway.record()).outcome in ("upstream_malformed", "upstream_cut", "upstream_error")
    assert peak < 60 << 20, f"{peak >> 20} MiB"


async def test_an_answer_of_another_status_with_a_stream_in_it_is_no_stream(asker: Asker) -> None:
    _, *events = chat_stream("evil")
    response = await asker.ask(Head(418, [EVENTS, CHUNKED]), *events, stream=True)
    assert response.status == 418
    assert response.headers["content-type"] == "application/json"
    assert "error" in response.json


async def test_an_error_that_quotes_a_trace_and_a_path_is_told_without_them(asker: Asker) -> None:
    trace = b'Traceback (most recent call last):\n  File "/opt/secret/engine.py", line 1, in run\nValueError: boom'
    response = await asker.ask(*whole(trace, 500, "text/plain"))
    assert response.status == 500
    assert b"/opt/secret" not in response.body
