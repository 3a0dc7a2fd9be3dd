"""Bytes that nobody wrote, for everything that reads bytes: each target takes any and may refuse it in its own words only.

    python -m tests.faults.fuzz --minutes 60                 # all targets in turn, new seeds
    python -m tests.faults.fuzz --target request --seed 12   # one of them, again

A case is a document that is well, cut about: tokens put in, stretches taken out, doubled, moved, bytes flipped; and then cut
into pieces, for those that read piece by piece. What must hold is in each target: the exceptions that it may raise, the same
answer for the same bytes however they are cut, no byte of a request or an answer lost. A failure names the target, the seed
and the case; `test_fuzz.py` plays a bounded number of cases of fixed seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, cast

import orjson

from proxy.headers import origin_form, request_id, retry_after
from proxy.upstream import ConnectionPool, Headers, UpstreamConnection
from proxy.wire.answers import read_answer, read_usage
from proxy.wire.body import BodyError, scan_object
from proxy.wire.chatdelta import ChatShape
from proxy.wire.coerce import Toolset
from proxy.wire.errors import Api, read_error, read_event_error, render_body, render_event
from proxy.wire.mix import count_mix
from proxy.wire.multipart import read_form
from proxy.wire.prefix import read_prefix
from proxy.wire.promtext import read_metrics
from proxy.wire.request import read_request
from proxy.wire.sse import EventTooLong, Splitter, fields
from proxy.wire.streams import (
    ChatStream,
    CompletionsStream,
    MalformedStream,
    StreamReader,
)
from proxy.wire.toolcalls import ToolChoice, ToolEngine
from proxy.wire.toolstream import ToolChatStream
from proxy.wire.typedstreams import MessagesStream, ResponsesStream
from tests.answers import Chunk, Head, Raw, chat_events, head_bytes, metrics_page, tool_stream
from tests.fake_clock import FakeClock
from tests.proxy.dialects import DIALECTS

TOKENS = (
    [
        b"\0",
        b"\xff",
        b"\xed\xa0\x80",
        b"\xc3",
        b"\xef\xbb\xbf",
        b'"',
        b'\\"',
        b"\\",
        b"\\u00",
        b"\\ud800",
        b"{",
        b"}",
        b"[",
        b"]",
    ]
    + [
        b",",
        b":",
        b" ",
        b"\t",
        b"\r",
        b"\n",
        b"\r\n",
        b"\n\n",
        b"\r\n\r\n",
        b"data: ",
        b"event: ",
        b"[DONE]",
        b"null",
        b"true",
    ]
    + [
        b"-1",
        b"0",
        b"1e999",
        b"NaN",
        b"9" * 400,
        b"[" * 300,
        b'{"a":' * 300,
        b'"error":{',
        b'"finish_reason":"stop"',
        b'"model":"x",',
    ]
    + [
        b"<tool_call>",
        b"</tool_call>",
        b"<function=f>",
        b"<parameter=a>",
        b"<think>",
        b"</think>",
        b'"index":70,',
        b"0\r\n\r\n",
    ]
    + [
        b"5\r\n",
        b"content-length: 3\r\n",
        b"transfer-encoding: chunked\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"--b",
        b"--b--\r\n",
        b"e",
    ]
)


def mutate(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """One of the documents, cut about; now and then as it is, now and then with a piece of another."""
    data = rng.choice(seeds)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 6))):
        at, end = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
        end = min(end, at + rng.choice((1, 2, 8, 64, 4096)))
        match rng.randrange(7):
            case 0:
                data = data[:at] + rng.choice(TOKENS) + data[at:]
            case 1:
                data = data[:at] + rng.choice(TOKENS) + data[end:]
            case 2:
                data = data[:at] + data[end:]
            case 3:
                data = data[:end] + data[at:]
            case 4:
                data = data[:at] + rng.randbytes(rng.choice((1, 2, 5))) + data[end:]
            case 5:
                other = rng.choice(seeds)
                data = data[:at] + other[rng.randint(0, len(other)) :]
            case 6 if data:
                place = rng.randrange(len(data))
                data = data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
    return data


def pieces(rng: Random, data: bytes) -> list[bytes]:
    """The same bytes, as reads give them."""
    cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.choice((0, 1, 2, 5, len(data) // 7))))
    edges = [0, *cuts, len(data)]
    return [data[a:b] for a, b in pairwise(edges) if a < b]


# -- requests ---------------------------------------------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
REQUESTS = [
    json.dumps(body, ensure_ascii=ascii).encode()
    for ascii in (True, False)
    for body in (
        *(dialect.request(stream=True, max_tokens=7) for dialect in DIALECTS),
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "né 😀"}],
            "tools": TOOLS,
            "stream_options": {"include_usage": True},
        },
        {
            "model": "tiny",
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:x," + "A" * 3000}}],
                }
            ],
        },
        {"model": "tiny", "prompt": ["a", "b"], "n": 2, "session_id": "s", "prompt_cache_key": "k"},
        {"model": "tiny", "input": [[1, 2], [3]], "metadata": {"user_id": "u"}, "truncate_prompt_tokens": -1},
    )
]


def request(rng: Random, data: bytes) -> None:
    """A body is taken or refused; what is taken, Python's own parser takes, with the same fields."""
    api = rng.choice(list(Api))
    try:
        body = read_request(api, data)
    except BodyError as refused:
        _short(refused)
        return
    assert body.n >= 0
    assert body.sizes.text_bytes <= len(data) + 1
    read_prefix(body, "tiny")
    count_mix(body)
    body.words()
    if body.model is not None:
        try:
            decoded = json.loads(data.decode("utf-8-sig"), strict=False)
        except (ValueError, RecursionError):
            return  # the backend will say so
        assert decoded["model"] == body.model


def scan(rng: Random, data: bytes) -> None:
    try:
        scan_object(data)
    except BodyError:
        return


FORMS = [
    b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\ntiny\r\n--b\r\n'
    b'content-disposition: form-data; name="file"; filename="a.wav"\r\ncontent-type: audio/wav\r\n\r\n\0\1\r\n--b--\r\n'
]


def form(rng: Random, data: bytes) -> None:
    kind = rng.choice(
        ("multipart/form-data; boundary=b", 'multipart/form-data; boundary="b"; x=y', "multipart/form-data")
    )
    try:
        read_form(kind, data)
    except BodyError as refused:
        _short(refused)


def _short(refused: BodyError) -> None:
    """It says what is wrong, not all that was sent."""
    assert len(str(refused)) < 1000


HEADERS = [
    b"12",
    b"Wed, 21 Oct 2026 07:28:00 GMT",
    b"http://host/v1/chat/completions?a=b",
    b"/v1/models",
    b"abc-DEF_1",
]


def headers(rng: Random, data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    assert request_id(text).isascii()
    assert "\n" not in request_id(text)
    origin_form(text)
    seconds = retry_after([(b"Retry-After", data), (b"date", rng.choice(HEADERS))])
    assert seconds is None or seconds >= 0


# -- answers ----------------------------------------------------------------------------------------------------------

_tools = [step.data for step in tool_stream(usage=(3, 4)) if isinstance(step, Chunk)]
STREAMS = [
    *(b"".join(dialect.events) for dialect in DIALECTS),
    *(b"".join(dialect.events[:2]) + dialect.own_error for dialect in DIALECTS),
    b"".join(_tools),
    b"".join(
        chat_events(
            "a b <tool_call><function=f><parameter=a>\n1\n</parameter></function></tool_call>",
            reasoning=["x"],
            usage=(1, 2),
        )
    ),
    b": comment\n\n" + b"".join(chat_events(["a"] * 9)) + b"data: [DONE]\n\n",
]


def events(rng: Random, data: bytes) -> None:
    """However it is cut, the same events, and no byte lost."""
    try:
        whole = Splitter()
        expected = whole.feed(data)
        cut = Splitter()
        found = [event for piece in pieces(rng, data) for event in cut.feed(piece)]
    except EventTooLong:
        return
    assert b"".join(expected) + whole.pending == data
    assert b"".join(found) + cut.pending == data
    if b"\r" not in data:  # half a CRLF is taken for no end until the next read
        assert found == expected
    for event in expected:
        fields(event)


def _readers() -> Iterator[Callable[[], StreamReader]]:
    yield ChatStream
    yield lambda: ChatStream((b"other", b"tiny"), hide_usage=True)
    yield CompletionsStream
    yield MessagesStream
    yield ResponsesStream
    yield lambda: ToolChatStream(_engine, ChatShape())
    yield lambda: ToolChatStream(_engine, ChatShape(), demanded=lambda call: True)


def _engine(exact: bool) -> ToolEngine:
    return ToolEngine(Toolset(TOOLS), ToolChoice("auto"), lambda: "call_new", exact=exact)


READERS = tuple(_readers())


def _read(make: Callable[[], StreamReader], parts: Sequence[bytes]) -> tuple[bytes, bool, str]:
    """What the client gets, whether the answer is whole, how it broke."""
    reader, out = make(), b""
    try:
        for part in parts:
            out += reader.feed(part)
            if reader.error is not None:
                break  # as the relay does: the first one is told, and nothing behind it
    except MalformedStream as broken:
        return out + reader.flush(), False, type(broken).__name__
    whole = reader.complete() and not reader.pending.strip()
    read_usage(reader.usage)
    if reader.error is not None:
        read_event_error(reader.error)
    return out + (reader.closing() if whole else reader.flush()), whole, str(reader.error)


def stream(rng: Random, data: bytes) -> None:
    """An event stream is read or refused as malformed; how it was cut does not change what it says."""
    chat = b"chat.completion.chunk" in data and rng.random() < 0.8
    make = rng.choice([READERS[0], READERS[1], READERS[5], READERS[6]] if chat else READERS)
    at_once = _read(make, [data])
    in_parts = _read(make, pieces(rng, data))
    if b"\r" not in data and not at_once[2].startswith("Malformed"):
        assert in_parts[1:] == at_once[1:]
        assert _said(in_parts[0]) == _said(at_once[0])


def _said(out: bytes) -> list[Any]:
    """What a client joins: deltas of a kind together, whatever their borders."""
    found: list[Any] = []
    for event in Splitter().feed(out):
        _, data = fields(event)
        if data is None or data == b"[DONE]":
            continue
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            found.append(data)
            continue
        choices = value.get("choices") if isinstance(value, dict) else None
        for choice in choices if isinstance(choices, list) else ():
            delta = choice.get("delta") if isinstance(choice, dict) else None
            for key in ("content", "reasoning"):
                text = delta.get(key) if isinstance(delta, dict) else None
                if isinstance(text, str) and text:
                    place = (str(choice.get("index")), key)
                    if found and isinstance(found[-1], list) and found[-1][0] == place:
                        found[-1][1] += text
                    else:
                        found.append([place, text])
    return found


BODIES = [orjson.dumps(dialect.answer) for dialect in DIALECTS] + [
    b'{"error":{"message":"no","type":"x","param":null,"code":400}}',
    b'{"object":"error","message":"maximum context length is 5 tokens","code":400}',
    b'{"detail":[{"loc":["body","a"],"msg":"bad","type":"x"}]}',
    b"<html><title>502</title></html>",
    b'Traceback (most recent call last):\n  File "/a/b.py", line 1\nValueError: x',
]


def body(rng: Random, data: bytes) -> None:
    """A whole answer or an error of any kind is told in a shape of ours."""
    read_answer(data)
    info = read_error(
        rng.choice((400, 401, 404, 429, 500, 503, 599)),
        rng.choice((None, "application/json", "text/html", "")),
        data,
    )
    assert 400 <= info.status <= 599
    api = rng.choice(list(Api))
    told = json.loads(render_body(api, info, "id"))
    assert told["error"]["message"]
    assert b"\n\n" not in render_event(api, info, 3)[:-2]


def metrics(rng: Random, data: bytes) -> None:
    found = read_metrics(data)
    assert found.running is None or found.running == found.running, "never NaN"


METRICS = [step.data for step in metrics_page(running=3, waiting=2, kv_usage=0.5) if isinstance(step, Raw)]

# -- HTTP from a backend ------------------------------------------------------------------------------------------------

_KIND, _CHUNKED = ("content-type", "text/event-stream"), ("transfer-encoding", "chunked")
HTTP = [
    head_bytes(Head(200, [_KIND, _CHUNKED]))
    + b"".join(b"%x\r\n%b\r\n" % (len(e), e) for e in DIALECTS[0].events)
    + b"0\r\n\r\n",
    head_bytes(Head(200, [("content-length", "2")])) + b"{}",
    head_bytes(Head(200, [("connection", "close")])) + b"{} until the end",
    b"HTTP/1.1 100 Continue\r\n\r\n" + head_bytes(Head(503, [("content-length", "0"), ("retry-after", "3")])),
    head_bytes(Head(204)) + head_bytes(Head(200, [("content-length", "1")])) + b"x",
]


class _Transport:
    """As much of one as a connection needs."""

    closed = False

    def write(self, data: bytes) -> None: ...

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


@dataclass
class _Sink:
    connection: UpstreamConnection
    heads: list[tuple[int, Headers]] = field(default_factory=list)
    body: bytes = b""
    ends: list[str] = field(default_factory=list)

    def head(self, status: int, headers: Headers) -> None:
        assert not self.ends
        self.heads.append((status, headers))

    def data(self, piece: bytes) -> None:
        assert self.heads
        assert not self.ends
        self.body += piece

    def between(self, lane: object) -> None: ...

    def end(self) -> None:
        self.ends.append("end")
        self.connection.release()

    def lost(self, what: str, malformed: bool) -> None:
        self.ends.append("malformed" if malformed else "lost")


def _exchange(parts: Sequence[bytes]) -> tuple[list[tuple[int, Headers]], bytes, list[str]]:
    connection = UpstreamConnection(ConnectionPool(FakeClock(), "h", 1))
    transport = _Transport()
    connection.connection_made(cast(Any, transport))
    sink = _Sink(connection)
    connection.send(b"x", b"", sink)
    for part in parts:
        if transport.closed:
            break
        connection.data_received(part)
    connection.connection_lost(None)
    return sink.heads, sink.body, sink.ends


def http(rng: Random, data: bytes) -> None:
    """One head at most, one end exactly; however it was cut, the same message."""
    at_once, in_parts = _exchange([data]), _exchange(pieces(rng, data))
    for heads, _, ends in (at_once, in_parts):
        assert len(heads) <= 1
        assert len(ends) == 1
        for _, pairs in heads:
            assert not any(b"\n" in name + value or b"\r" in name + value for name, value in pairs)
    if at_once[2] == in_parts[2] == ["end"]:
        assert at_once == in_parts
    assert at_once[2] == in_parts[2]


@dataclass(frozen=True)
class Target:
    run: Callable[[Random, bytes], None]
    seeds: Sequence[bytes]


TARGETS = {
    "request": Target(request, REQUESTS),
    "scan": Target(scan, REQUESTS),
    "form": Target(form, FORMS),
    "headers": Target(headers, HEADERS),
    "events": Target(events, STREAMS),
    "stream": Target(stream, STREAMS),
    "body": Target(body, BODIES),
    "metrics": Target(metrics, METRICS),
    "http": Target(http, HTTP),
}


def play(name: str, seed: int) -> None:
    """One case; AssertionError or whatever the target must not raise, with the case in its notes."""
    target, rng = TARGETS[name], Random(f"{name} {seed}")
    data = mutate(rng, target.seeds)
    try:
        target.run(rng, data)
    except Exception as fault:
        fault.add_note(f"target {name}, seed {seed}, {len(data)} bytes: {data[:2000]!r}")
        raise


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.fuzz", description="Bytes that nobody wrote."
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--seed", type=int, help="play this one and no other")
    options = parser.parse_args()
    names = options.target or list(TARGETS)
    if options.seed is not None:
        for name in names:
            play(name, options.seed)
        return
    seed, end, cases = int(time.time() * 1000) << 20, time.monotonic() + options.minutes * 60, 0
    while time.monotonic() < end:
        for name in names:
            for _ in range(100):
                seed, cases = seed + 1, cases + 1
                play(name, seed)
    print(f"{cases} cases of {', '.join(names)}: none failed", file=sys.stderr)


if __name__ == "__main__":
    main()
