"""Every row of docs/behavior.md, "When a backend fails": what the client sees, what the record says, what is left behind."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path

import pytest

from proxy.errors import Outcome
from proxy.upstream import MAX_HEAD_BYTES
from proxy.wire.errors import Api
from tests.fake_clock import FakeClock
from tests.proxy.conftest import MakeGateway
from tests.proxy.dialects import CHAT_DIALECT, DIALECTS, Dialect
from tests.proxy.scenes import LEAST_LOAD, QUIET, dispatching, settled
from tests.scripted import (
    DONE,
    Chunk,
    Close,
    Head,
    Headers,
    LastChunk,
    Raw,
    Reset,
    ScriptedBackend,
    Step,
    WaitFor,
    black_hole,
    chat_event,
    closed_port,
    event,
    json_answer,
    server_tls,
    whole,
)


def headers(value: object) -> Headers:
    return [("content-type", "application/json"), ("content-length", str(len(json.dumps(value))))]


each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=str)
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])

CUT, MALFORMED, ERROR = Outcome.UPSTREAM_CUT, Outcome.UPSTREAM_MALFORMED, Outcome.UPSTREAM_ERROR
EVENTS = ("content-type", "text/event-stream")
CHUNKED = ("transfer-encoding", "chunked")
STREAM_HEAD = Head(200, [EVENTS, CHUNKED])

# -- no connection ------------------------------------------------------------------------------------------------


@each_way
@each_dialect
async def test_a_backend_that_refuses_is_a_502_when_there_is_no_other(
    make_gateway: MakeGateway, dialect: Dialect, stream: bool
) -> None:
    gateway = await make_gateway(f"http://127.0.0.1:{closed_port()}", config=QUIET)
    response = await gateway.ask(dialect.path, dialect.request(stream=stream))
    assert response.status == 502
    assert "'a' refused the connection" in dialect.error_in(response.json)["message"]
    await gateway.ended(Outcome.UPSTREAM_CONNECT)
    await settled(gateway)


@each_way
@each_dialect
async def test_another_backend_answers_when_one_refuses(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, stream: bool
) -> None:
    refuses = f"http://127.0.0.1:{closed_port()}"
    gateway = await make_gateway(
        refuses, backend, config=QUIET + LEAST_LOAD, per_backend={"b": "limits.max_in_flight = 1"}
    )
    backend.answer(*[dialect.stream() if stream else dialect.whole()] * 4)
    for number in range(4):
        response = await gateway.ask(dialect.path, dialect.request(stream=stream))
        assert (response.status, response.headers["x-tierline-backend"]) == (200, "b")
        await gateway.records.get(number)
    assert max(record.attempts for record, _ in gateway.records.closed) == 2
    await gateway.ended(*[Outcome.OK] * 4)
    await settled(gateway, pooled=1)


@each_way
@each_dialect
async def test_no_connection_within_the_limit_is_a_504(
    make_gateway: MakeGateway, dialect: Dialect, stream: bool
) -> None:
    clock = FakeClock()
    with black_hole() as port:
        gateway = await make_gateway(
            f"http://127.0.0.1:{port}", config=QUIET + "timeout = 2.0\n[timeouts]\nconnect = 5\n", clock=clock
        )
        async with await gateway.connect() as client:
            client.send(dialect.path, dialect.request(stream=stream))
            await dispatching(gateway)
            clock.advance(4.9)
            assert not gateway.records.closed
            clock.advance(0.2)
            response = await client.read()
        assert response.status == 504
        assert "did not accept a connection in time" in dialect.error_in(response.json)["message"]
        await gateway.ended(Outcome.UPSTREAM_TIMEOUT)
        await settled(gateway)


@each_way
async def test_a_failed_tls_handshake_is_a_502_and_nothing_of_the_request_was_said(
    make_gateway: MakeGateway, stream: bool
) -> None:
    async with ScriptedBackend(tls=server_tls()[0]) as untrusted:
        gateway = await make_gateway(untrusted, config=QUIET)
        response = await gateway.chat(stream=stream)
        assert response.status == 502
        assert "TLS" in CHAT_DIALECT.error_in(response.json)["message"]
        await gateway.ended(Outcome.UPSTREAM_CONNECT)
        assert not untrusted.requests
        await settled(gateway)


async def test_plain_http_spoken_to_a_tls_backend_is_a_502(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend.url.replace("http:", "https:"), config=QUIET)
    backend.greet(*[[Raw(b"HTTP/1.1 400 Bad Request\r\n\r\n"), Close()]] * 3)
    response = await gateway.chat()
    assert response.status == 502
    await gateway.ended(Outcome.UPSTREAM_CONNECT)


# -- before the first event -----------------------------------------------------------------------------------------

BEFORE: dict[str, tuple[list[Step], Outcome]] = {
    "FIN before the head": ([Close()], CUT),
    "RST before the head": ([Reset()], CUT),
    "FIN in the head": ([Raw(b"HTTP/1.1 200 OK\r\ncontent-ty"), Close()], CUT),
    "RST in the head": ([Raw(b"HTTP/1.1 200 OK\r\ncontent-ty"), Reset()], CUT),
    "FIN in a body with a length": ([Head(200, [("content-length", "100")]), Raw(b'{"id'), Close()], CUT),
    "RST in a body with a length": ([Head(200, [("content-length", "100")]), Raw(b'{"id'), Reset()], CUT),
    "FIN in an error's body": ([Head(500, [("content-length", "100")]), Raw(b'{"err'), Close()], CUT),
    "not HTTP": ([Raw(b"SSH-2.0-OpenSSH_9.6\r\n")], MALFORMED),
    "a second head in the first": ([Raw(b"HTTP/1.1 200 OK\r\nHTTP/1.1 200 OK\r\n\r\n")], MALFORMED),
    "a length that is no number": ([Head(200, [("content-length", "many")])], MALFORMED),
    "two lengths": ([Head(200, [("content-length", "1"), ("content-length", "2")])], MALFORMED),
    "length and chunked": ([Head(200, [EVENTS, CHUNKED, ("content-length", "5")]), Raw(b"x")], MALFORMED),
    "a head too large": ([Head(200, [(f"x-{i}", "y" * 1000) for i in range(80)])], MALFORMED),
    "a header that never ends": ([Raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * (MAX_HEAD_BYTES + 1))], MALFORMED),
    "a status line that never ends": ([Raw(b"HTTP/1.1 200 " + b"y" * (MAX_HEAD_BYTES + 1))], MALFORMED),
    "another protocol": ([Head(101, [("upgrade", "h2c"), ("connection", "upgrade")])], MALFORMED),
    "FIN behind a 1xx": ([Head(100), Close()], CUT),
    "a chunk that is none": ([Head(200, [EVENTS, CHUNKED]), Raw(b"zz\r\n")], MALFORMED),
    "an answer that is not JSON": (whole(b"<html>busy</html>"), MALFORMED),
    "HTML": (whole(b"<html>busy</html>", content_type="text/html"), MALFORMED),
    "JSON that is no object": (whole(b"[1, 2]"), MALFORMED),
    "half a JSON object, whole as HTTP": (whole(b'{"id": "c", "choi'), MALFORMED),
    "an empty answer": (whole(b""), MALFORMED),
    "an empty answer without a type": (whole(b"", content_type=None), MALFORMED),
    "an event stream without an event": ([STREAM_HEAD, LastChunk()], CUT),
    "comments and no event": ([STREAM_HEAD, Chunk(b": ping\n\n"), LastChunk()], CUT),
    "FIN in an event stream without an event": ([STREAM_HEAD, Close()], CUT),
    "RST in the first event": ([STREAM_HEAD, Chunk(b'data: {"id"'), Reset()], CUT),
    "FIN in a chunk's frame": ([STREAM_HEAD, Raw(b"40\r\ndata: {"), Close()], CUT),
    "FIN in a close-delimited stream": ([Head(200, [EVENTS]), Raw(b'data: {"id"'), Close()], CUT),
    "an event that is not JSON": ([STREAM_HEAD, Chunk(b"data: hello\n\n")], MALFORMED),
    "an event that is no object": ([STREAM_HEAD, Chunk(b"data: [1]\n\n")], MALFORMED),
    "an event of another shape": ([STREAM_HEAD, Chunk(b'data: {"x": 1}\n\n')], MALFORMED),
    "[DONE] alone": ([STREAM_HEAD, Chunk(DONE), LastChunk()], CUT),
}


WAYS = [(dialect, True) for dialect in DIALECTS] + [(CHAT_DIALECT, False)]


@pytest.mark.parametrize(
    ("dialect", "stream"), WAYS, ids=[f"{d}-{'streamed' if s else 'whole'}" for d, s in WAYS]
)
@pytest.mark.parametrize("failure", BEFORE)
async def test_what_breaks_before_the_first_event_is_a_502_in_the_endpoints_shape(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, stream: bool, failure: str
) -> None:
    steps, outcome = BEFORE[failure]
    gateway = await make_gateway(backend, config=QUIET)
    backend.answer(steps)
    response = await gateway.ask(dialect.path, dialect.request(stream=stream))
    assert (response.status, response.complete) == (502, True)
    error = dialect.error_in(response.json)
    assert error["message"].startswith("Backend 'a': ")
    if dialect.api is not Api.MESSAGES:
        assert (error["type"], error["code"]) == ("server_error", outcome.value)
    record = await gateway.record()
    assert (record.outcome, record.status, record.attempts) == (outcome, 502, 1)
    assert (record.first_delta_at, record.finish_reason) == (None, None)
    assert gateway.app.pool.backends["a"].health.failures == 0  # one bad answer ejects nobody
    await gateway.ended(outcome)
    pooled = await settled(gateway)
    # The next request is served; what was whole as HTTP left a connection that serves it.
    backend.answer(dialect.stream() if stream else dialect.whole())
    again = await gateway.ask(dialect.path, dialect.request(stream=stream))
    assert again.status == 200
    assert (await backend.received(1)).reused == bool(pooled)


@each_dialect
@pytest.mark.parametrize("status", [500, 503])
async def test_an_error_as_the_first_event_is_an_error_of_its_own_status(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, status: int
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    error = {"message": "no room", "type": "ServerError", "code": status}
    backend.answer(dialect.stream(event({"error": error}, "error"), DONE))
    response = await gateway.ask(dialect.path, dialect.request(stream=True))
    assert response.status == status
    assert "no room" in dialect.error_in(response.json)["message"]
    await gateway.ended(ERROR)
    await settled(gateway)


@each_dialect
async def test_an_error_event_about_the_request_is_rejected_like_any_4xx(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    backend.answer(dialect.stream(event({"error": {"message": "bad grammar", "code": 400}}, "error")))
    response = await gateway.ask(dialect.path, dialect.request(stream=True))
    assert response.status == 400
    assert "bad grammar" in dialect.error_in(response.json)["message"]
    await gateway.ended(Outcome.UPSTREAM_REJECTED)


@each_way
@each_dialect
@pytest.mark.parametrize("status", [500, 529])
async def test_a_5xx_passes_with_its_status_and_message(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, stream: bool, status: int
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    error = {"error": {"message": "engine is dead", "type": "InternalServerError", "code": status}}
    backend.answer([Head(status, headers(error), "Whatever"), Raw(json.dumps(error).encode())])
    response = await gateway.ask(dialect.path, dialect.request(stream=stream))
    assert response.status == status
    assert dialect.error_in(response.json)["message"] == "engine is dead"
    await gateway.ended(ERROR)
    await settled(gateway, pooled=1)


@pytest.mark.parametrize("status", [302, 500])
async def test_an_error_too_large_to_keep_is_told_by_its_status_not_passed_on_unseen(
    make_gateway: MakeGateway, backend: ScriptedBackend, status: int
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    backend.answer(whole(b"x" * (9 << 20), status, headers=[("location", "http://elsewhere/")]))
    response = await gateway.chat()
    assert response.status == (500 if status == 500 else 502)
    assert response.status != 302
    assert len(response.body) < 1000
    await gateway.ended(ERROR)
    await settled(gateway)


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d.aborted], ids=str)
async def test_an_answer_given_up_by_the_backend_is_a_502(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    assert dialect.aborted_answer is not None
    backend.answer(json_answer(dialect.aborted_answer))
    response = await gateway.ask(dialect.path, dialect.request(stream=False))
    assert response.status == 502
    assert "abort" in dialect.error_in(response.json)["message"]
    assert (await gateway.record()).finish_reason == "abort"
    await gateway.ended(ERROR)
    await settled(gateway, pooled=1)


# -- after the first event ------------------------------------------------------------------------------------------


def _after(dialect: Dialect) -> dict[str, tuple[list[Step], Outcome]]:
    """What follows the first content. Each: steps, outcome."""
    half = dialect.events[dialect.begun][:30]
    ends: dict[str, tuple[list[Step], Outcome]] = {
        "FIN": ([Close()], CUT),
        "RST": ([Reset()], CUT),
        "FIN in an event": ([Chunk(half), Close()], CUT),
        "RST in an event": ([Chunk(half), Reset()], CUT),
        "end in an event, whole as HTTP": ([Chunk(half), LastChunk()], CUT),
        "FIN in a chunk's frame": ([Raw(b"40\r\n" + half), Close()], CUT),
        "FIN in a chunk's size": ([Raw(b"4"), Close()], CUT),
        "end without a finish, whole as HTTP": ([LastChunk()], CUT),
        "an error event": ([Chunk(dialect.own_error), LastChunk()], ERROR),
        "an error event and [DONE], in one read": ([Chunk(dialect.own_error + DONE), LastChunk()], ERROR),
        "an error that is a string": ([Chunk(event({"error": "engine died"})), LastChunk()], ERROR),
        "an old error object": (
            [Chunk(event({"object": "error", "message": "engine died", "code": 500}))],
            ERROR,
        ),
        "an error behind content, in one read": (
            [Chunk(dialect.events[dialect.begun] + dialect.own_error)],
            ERROR,
        ),
        "an event that is not JSON": ([Chunk(b"data: {oops\n\n")], MALFORMED),
        "an event that is no object": ([Chunk(b"data: 17\n\n")], MALFORMED),
        "a chunk that is none": ([Raw(b"zz\r\n")], MALFORMED),
    }
    if dialect.ends_with_done:
        ends["[DONE] without a finish"] = ([Chunk(DONE), LastChunk()], CUT)
        ends["[DONE] without a finish, never ended"] = ([Chunk(DONE)], CUT)
    if dialect.aborted:
        rest = dialect.aborted[dialect.begun :]
        ends["abort"] = ([*map(Chunk, rest), LastChunk()], ERROR)
        ends["abort, in one read"] = ([Chunk(b"".join(rest)), LastChunk()], ERROR)
    return ends


AFTER = [(dialect, name) for dialect in DIALECTS for name in _after(dialect)]


@pytest.mark.parametrize(("dialect", "failure"), AFTER, ids=[f"{d}-{name}" for d, name in AFTER])
async def test_what_breaks_in_a_stream_ends_it_with_an_error_in_the_endpoints_shape(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, failure: str
) -> None:
    steps, outcome = _after(dialect)[failure]
    gateway = await make_gateway(backend, config=QUIET)
    seen = asyncio.Event()
    backend.answer([*dialect.begin(), WaitFor(seen), *steps])
    async with await gateway.connect() as client:
        client.send(dialect.path, dialect.request(stream=True))
        await client.read_until(dialect.begun_bytes)
        seen.set()
        response = await client.read()
        assert response.body.startswith(dialect.begun_bytes)
        error = dialect.error_at_end(response)
        if outcome is ERROR and "abort" not in failure:
            assert error["message"] == "engine died"
        if "behind content" in failure:
            assert dialect.events[dialect.begun] in response.body
        assert b"abort" not in response.body.removesuffix(response.body.split(b"\n\n")[-2] + b"\n\n")
        record = await gateway.record()
        assert (record.outcome, record.status) == (outcome, 200)
        assert record.first_delta_at is not None
        # The HTTP message ended properly, so the client's connection goes on.
        backend.answer(dialect.whole())
        client.send(dialect.path, dialect.request(stream=False))
        assert (await client.read()).status == 200
    if steps[-1] != LastChunk():
        assert not (await backend.received(1)).reused
    await gateway.ended(outcome, Outcome.OK)
    await settled(gateway, pooled=1)


@pytest.mark.parametrize("end", [Close(), Reset()], ids=["FIN", "RST"])
async def test_an_answer_that_is_no_event_stream_is_cut_where_it_broke(
    make_gateway: MakeGateway, backend: ScriptedBackend, end: Step
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    head = Head(200, [("content-type", "audio/mpeg"), ("content-length", "1000")])
    backend.answer([head, Raw(b"x" * 10), end])
    response = await gateway.ask("/v1/audio/speech", {"model": "tiny", "input": "hi"})
    assert not response.complete
    await gateway.ended(CUT)
    await settled(gateway)


# -- ends that are mended, or nothing at all ---------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d.ends_with_done], ids=str)
@pytest.mark.parametrize("framing", ["chunked", "until the connection closes"])
async def test_a_finish_without_done_gets_its_done(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, framing: str
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    if framing == "chunked":
        backend.answer(dialect.stream(*dialect.events[:-1]))
    else:
        backend.answer([Head(200, [EVENTS]), *map(Raw, dialect.events[:-1]), Close()])
    response = await gateway.ask(dialect.path, dialect.request(stream=True))
    assert response.complete
    assert response.body == b"".join(dialect.events)
    await gateway.ended(Outcome.OK)
    await settled(gateway, pooled=1 if framing == "chunked" else 0)


@each_dialect
@pytest.mark.parametrize("end", ["FIN", "RST", "nothing"])
async def test_after_the_end_mark_the_answer_is_whole_whatever_becomes_of_the_connection(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, end: str
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(backend, config=QUIET, clock=clock)
    steps: dict[str, list[Step]] = {"FIN": [Close()], "RST": [Reset()], "nothing": []}
    backend.answer([*dialect.stream()[:-1], *steps[end]])
    async with await gateway.connect() as client:
        client.send(dialect.path, dialect.request(stream=True))
        await client.read_until(dialect.events[-1])
        if end == "nothing":
            clock.advance(1.1)
        response = await client.read()
        assert (response.complete, response.body) == (True, b"".join(dialect.events))
    await gateway.ended(Outcome.OK)
    await settled(gateway)


@each_dialect
@pytest.mark.parametrize(
    "noise", [b"data: {oops\n\n", b'data: {"error": "late"}\n\n'], ids=["noise", "error"]
)
@pytest.mark.parametrize("one_read", [True, False], ids=["one read", "two reads"])
async def test_what_follows_the_end_mark_does_not_undo_the_answer(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, noise: bytes, one_read: bool
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    seen = asyncio.Event()
    if one_read:
        seen.set()
    backend.answer([*dialect.stream()[:-1], WaitFor(seen), Chunk(noise), LastChunk()])
    async with await gateway.connect() as client:
        client.send(dialect.path, dialect.request(stream=True))
        await client.read_until(dialect.events[-1])
        seen.set()
        response = await client.read()
    assert response.complete
    assert response.body.removesuffix(noise) == b"".join(dialect.events)
    await gateway.ended(Outcome.OK)


async def test_one_choice_that_never_finished_makes_the_answer_broken(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    both = [chat_event({"content": "x"}, index=index) for index in (0, 1)]
    backend.answer(CHAT_DIALECT.stream(*both, chat_event({}, "stop", index=0), DONE))
    response = await gateway.chat(stream=True, n=2)
    CHAT_DIALECT.error_at_end(response)
    await gateway.ended(CUT)


async def test_one_choice_given_up_makes_the_answer_broken_though_the_other_finished_last(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    begun = [chat_event({"content": "x"}, index=index) for index in (0, 1)]
    ends = chat_event({}, "abort", index=0) + chat_event({}, "stop", index=1)
    backend.answer(CHAT_DIALECT.stream(*begun, ends, DONE))
    response = await gateway.chat(stream=True, n=2)
    assert "abort" in CHAT_DIALECT.error_at_end(response)["message"]
    await gateway.ended(ERROR)


@each_way
async def test_tls_failures_in_the_middle_are_cuts(
    make_gateway: MakeGateway, tmp_path: Path, stream: bool
) -> None:
    context, authority = server_tls()
    (tmp_path / "ca.pem").write_bytes(authority)
    assert isinstance(context, ssl.SSLContext)
    async with ScriptedBackend(tls=context) as secure:
        gateway = await make_gateway(secure, config=QUIET, per_backend={"a": 'tls.ca = "ca.pem"'})
        secure.answer([*CHAT_DIALECT.begin(), Reset()] if stream else [Head(200), Reset()])
        response = await gateway.chat(stream=stream)
        if stream:
            CHAT_DIALECT.error_at_end(response)
        else:
            assert response.status == 502
        await gateway.ended(CUT)
        await settled(gateway)
