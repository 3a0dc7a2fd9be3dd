"""An answer's bytes come back as the backend sent them; what the gateway asked for on its own account is taken out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from proxy.endpoints import RELAYED, Body
from proxy.errors import Outcome
from proxy.wire.errors import Api
from tests.captures import LLAMA_SERVER, SERVERS, VLLM, Capture, all_captures, load
from tests.proxy.conftest import CHAT, MakeGateway
from tests.scripted import (
    DONE,
    Chunk,
    Head,
    LastChunk,
    ScriptedBackend,
    chat_event,
    chat_events,
    chat_json,
    chat_stream,
    event,
    replay,
    sse,
    usage_event,
    whole,
)
from tests.wire.test_toolcalls_captures import is_wrong


def whole_body(body: bytes) -> Sequence[bytes]:
    return [body]


def random_cuts(body: bytes) -> Sequence[bytes]:
    rng = random.Random(len(body))
    pieces, at = [], 0
    while at < len(body):
        size = rng.choice((1, 2, 7, 40, 300, 2000))
        pieces.append(body[at : at + size])
        at += size
    return pieces


def by_bytes(body: bytes) -> Sequence[bytes]:
    return [body[i : i + 1] for i in range(len(body))]


def replayable(server: str, *, small: bool = False) -> list[Capture]:
    """Recorded answers of the paths that are relayed; small: the shortest stream of each path."""
    found = [c for c in all_captures() if c.server == server and c.status == 200 and c.path in RELAYED]
    found = [c for c in found if not c.name.startswith("error_")]
    # What is wrong in itself is put right (tests/wire), and a named call finishes with "tool_calls".
    found = [
        c for c in found if not (b'"tools"' in c.request_body and (is_wrong(c) or "tool_named" in c.name))
    ]
    if not small:
        return found
    streams = [c for c in found if c.is_stream]
    paths = sorted({c.path for c in streams})
    return [min((c for c in streams if c.path == path), key=lambda c: len(c.body)) for path in paths]


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(
    "cuts", [None, whole_body, random_cuts, by_bytes], ids=["as recorded", "whole", "random", "bytes"]
)
async def test_recorded_answers_come_back_byte_for_byte(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    server: str,
    cuts: Callable[[bytes], Sequence[bytes]] | None,
) -> None:
    gateway = await make_gateway(backend)
    captures = replayable(server, small=cuts is by_bytes)
    assert captures
    for capture in captures:
        backend.answer(replay(capture, cuts))
        response = await gateway.ask(capture.path, capture.request_body)
        assert response.status == capture.status, capture
        assert response.body == capture.body, capture
        assert response.complete
        assert response.headers["content-type"] == capture.header("content-type")
    await gateway.ended(*[Outcome.OK] * len(captures))


BIG = b'{"object":"list","data":"' + b"x" * (9 << 20) + b'"}'


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", BIG),
        ("application/json", b'{"a":NaN,"b":123456789012345678901234567890,"c":"\xff\xfe"} \n'),
        ("application/json; charset=utf-8", b'{"a" : 1.0}'),
        ("audio/mpeg", bytes(range(256)) * 4000),
        ("application/octet-stream", b"\0\x01\r\n0\r\n\r\n"),
        ("text/plain", b"no json"),
        ("text/event-stream", b"data: {}\n\n\xff\xfe: odd\n"),
    ],
    ids=["9 MiB", "odd json", "charset", "audio", "bytes like framing", "text", "events of nobody's shape"],
)
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_whatever_an_endpoint_answers_comes_back_as_it_is(
    make_gateway: MakeGateway, backend: ScriptedBackend, content_type: str, body: bytes, chunked: bool
) -> None:
    gateway = await make_gateway(backend)
    if chunked:
        pieces = [body[i : i + 200_000] for i in range(0, len(body), 200_000)]
        head = Head(200, [("content-type", content_type), ("transfer-encoding", "chunked")])
        backend.answer([head, *map(Chunk, pieces), LastChunk()])
    else:
        backend.answer(whole(body, content_type=content_type))
    response = await gateway.ask("/v1/audio/speech", {"model": "tiny", "input": "hi"})
    assert (response.status, response.complete) == (200, True)
    assert response.body == body
    assert response.headers["content-type"] == content_type
    await gateway.ended(Outcome.OK)
    assert backend.requests[0].connection.ending is None  # pooled


# -- usage ----------------------------------------------------------------------------------------------------

ASKED = [
    # (stream_options as sent, None: absent; as it goes upstream; the client sees usage)
    (None, b'{"include_usage":true}', False),
    (b"null", b'{"include_usage":true}', False),
    (b"{}", b'{"include_usage":true}', False),
    (b'{"include_usage":false}', b'{"include_usage":true}', False),
    (b'{"include_usage": null ,"x":NaN}', b'{"include_usage": true ,"x":NaN}', False),
    (b'{ "x": 1.50 }', b'{ "x": 1.50,"include_usage":true }', False),
    (b'{"include_usage": true, "x": 1}', b'{"include_usage": true, "x": 1}', True),
    (b'{"include_usage":"true"}', b'{"include_usage":"true"}', True),
    (b'{"include_usage":1}', b'{"include_usage":1}', True),
    (
        b'{"continuous_usage_stats":true}',
        b'{"continuous_usage_stats":false,"include_usage":true}',
        False,
    ),
    (
        b'{"include_usage":true,"continuous_usage_stats":true}',
        b'{"include_usage":true,"continuous_usage_stats":true}',
        True,
    ),
]
PATHS = [CHAT, "/v1/completions"]


def completions_events(usage: bool) -> list[bytes]:
    def of(choices: list[object], **more: object) -> bytes:
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny"}
        return event({**head, "choices": choices, **more})

    def text(piece: str, finish: str | None = None) -> bytes:
        return of([{"index": 0, "text": piece, "logprobs": None, "finish_reason": finish}])

    last = of([], usage={"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2})
    return [text("a"), text("b"), text("", "stop"), *([last] if usage else [])]


def events_of(path: str, usage: bool) -> list[bytes]:
    return chat_events("a b", usage=(3, 2) if usage else None) if path == CHAT else completions_events(usage)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("sent", "upstream", "seen"), ASKED, ids=[str(a[0]) for a in ASKED])
@pytest.mark.parametrize("joined", [False, True], ids=["event by event", "in one read"])
async def test_usage_asked_for_by_the_gateway_is_taken_out_and_by_the_client_is_kept(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    path: str,
    sent: bytes | None,
    upstream: bytes,
    seen: bool,
    joined: bool,
) -> None:
    gateway = await make_gateway(backend)
    events = events_of(path, usage=True)
    backend.answer(sse(b"".join([*events, DONE]), done=False) if joined else sse(*events))
    start = b'{"model":"tiny","stream":true'
    body = start + (b"}" if sent is None else b',"stream_options":' + sent + b"}")
    response = await gateway.ask(path, body)
    assert (await backend.received()).body == start + b',"stream_options":' + upstream + b"}"
    assert response.body == b"".join([*events_of(path, usage=seen), DONE])
    record = await gateway.record()
    assert (record.prompt_tokens, record.completion_tokens) == (3, 2)
    await gateway.ended(Outcome.OK)


@pytest.mark.parametrize("path", PATHS)
async def test_a_backend_that_does_not_know_stream_options_is_not_asked(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str
) -> None:
    gateway = await make_gateway(backend, per_backend={"a": "stream_usage = false"})
    backend.answer(sse(*events_of(path, usage=True)))
    body = b'{"model":"tiny","stream":true}'
    response = await gateway.ask(path, body)
    assert (await backend.received()).body == body
    # What nobody asked for and came all the same is the backend's own way, and the client's.
    assert response.body == b"".join([*events_of(path, usage=True), DONE])


@pytest.mark.parametrize("path", [p for p, e in RELAYED.items() if e.api not in (Api.CHAT, Api.COMPLETIONS)])
async def test_other_endpoints_are_never_asked_for_usage(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str
) -> None:
    if RELAYED[path].body is not Body.JSON:
        return
    gateway = await make_gateway(backend)
    body = b'{"model":"tiny","stream":true}'
    await gateway.ask(path, body)
    assert (await backend.received()).body == body


async def test_nor_is_usage_asked_for_without_a_stream(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    for body in (b'{"model":"tiny"}', b'{"model":"tiny","stream":false}', b'{"model":"tiny","stream":null}'):
        response = await gateway.ask(CHAT, body)
        assert backend.requests[-1].body == body
        assert response.json["usage"]["prompt_tokens"] == 10


# What the servers say in the last chunk only: with usage asked for that is the usage chunk.
LAST = frozenset({"timings", "system_fingerprint"})


def shape(event: dict[str, object]) -> dict[str, object]:
    """An event without what differs between two runs."""
    return {key: value for key, value in event.items() if key not in {"id", "created", *LAST}}


@pytest.mark.parametrize("server", [VLLM, LLAMA_SERVER])
async def test_a_client_that_did_not_ask_sees_what_the_server_sends_to_one_that_did_not(
    make_gateway: MakeGateway, backend: ScriptedBackend, server: str
) -> None:
    gateway = await make_gateway(backend)
    direct = load(server, "chat_stream_no_usage")
    backend.answer(replay(load(server, "chat_text_stream")))
    response = await gateway.ask(CHAT, direct.request_body)
    backend.answer(replay(direct))
    expected = await gateway.ask(CHAT, direct.request_body)
    assert expected.body == direct.body
    assert response.text == expected.text  # cut into chunks as the engine happened to
    assert shape(response.events[-2]) == shape(expected.events[-2])
    assert {frozenset(e) - LAST for e in response.events[:-1]} == {
        frozenset(e) - LAST for e in expected.events[:-1]
    }


async def test_chunks_without_choices_that_are_not_usage_are_kept(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    extra = event({"id": "x", "choices": [], "prompt_filter_results": [{"a": 1}]})
    events = [
        extra,
        chat_event({"content": "hi"}),
        chat_event({}, "stop"),
        event({"choices": [], "usage": None}),
    ]
    backend.answer(sse(*events, usage_event((3, 2))))
    response = await gateway.chat(stream=True)
    assert response.body == b"".join([*events, DONE])


# -- the model's name -----------------------------------------------------------------------------------------

PUBLIC = """
[models.tiny]
response_model = "public"
"""


def renamed(body: bytes, old: bytes, new: bytes) -> bytes:
    return body.replace(b'"model":"' + old, b'"model":"' + new).replace(
        b'"model": "' + old, b'"model": "' + new
    )


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("cuts", [None, random_cuts], ids=["as recorded", "random"])
async def test_the_public_name_is_shown_where_it_is_configured(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    server: str,
    cuts: Callable[[bytes], Sequence[bytes]] | None,
) -> None:
    gateway = await make_gateway(backend, config=PUBLIC, per_backend={"a": 'model = "org/Served-7B"'})
    for capture in replayable(server):
        served = replace(capture, chunks=tuple(renamed(c, b"tiny", b"org/Served-7B") for c in capture.chunks))
        backend.answer(replay(served, cuts))
        response = await gateway.ask(capture.path, renamed(capture.request_body, b"model", b"tiny"))
        assert response.body == capture.body, capture
        assert b"Served-7B" not in response.body


async def test_by_default_the_backends_name_is_shown(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, per_backend={"a": 'model = "served"'})
    backend.answer(chat_json(model="served"), chat_stream(model="served"))
    assert (await gateway.chat()).json["model"] == "served"
    assert {e["model"] for e in (await gateway.chat(stream=True)).events[:-1]} == {"served"}


async def test_a_model_name_in_the_text_is_left_alone(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=PUBLIC, per_backend={"a": 'model = "served"'})
    says = '{"model":"served"} and "model": "served"'
    backend.answer(chat_json(says, model="served"), chat_stream([says, "served"], model="served"))
    response = await gateway.chat()
    assert response.json["model"] == "tiny"
    assert response.json["choices"][0]["message"]["content"] == says
    assert (await gateway.chat(stream=True)).text == says + "served"
