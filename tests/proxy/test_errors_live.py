"""A backend's error keeps its status and its meaning and gets the endpoint's own shape, whoever wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.endpoints import RELAYED
from proxy.errors import Outcome
from tests.captures import Capture, errors, load
from tests.client import Response
from tests.proxy.conftest import CHAT, MakeGateway, chat
from tests.proxy.scenes import LEAST_LOAD
from tests.scripted import (
    ScriptedBackend,
    Steps,
    chat_stream,
    error_json,
    event,
    json_answer,
    replay,
    sse,
    whole,
)

PATHS = [
    CHAT,
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
]


def the_error(response: Response, path: str) -> dict[str, Any]:
    """The error, in the shape that its endpoint's SDK reads."""
    assert response.complete
    assert response.values("content-type") == ["application/json"]
    value = response.json
    if path.startswith("/v1/messages"):
        assert set(value) == {"type", "error", "request_id"}
        assert value["type"] == "error"
        assert value["request_id"] == response.headers["x-request-id"]
        assert set(value["error"]) == {"type", "message"}
    else:
        assert set(value) == {"error"}
        assert set(value["error"]) == {"message", "type", "param", "code"}
        assert value["error"]["code"] is None or isinstance(value["error"]["code"], str)
        assert value["error"]["param"] is None or isinstance(value["error"]["param"], str)
    assert isinstance(value["error"]["type"], str)
    assert value["error"]["message"]
    error: dict[str, Any] = value["error"]
    return error


def said(capture: Capture) -> str | None:
    """The backend's own words."""
    try:
        value = json.loads(capture.body)
    except ValueError:
        return capture.body.decode()
    error = value.get("error")
    return (error["message"] if isinstance(error, dict) else error) or value.get("detail")


def outcome_of(status: int) -> Outcome:
    return Outcome.UPSTREAM_ERROR if status >= 500 else Outcome.UPSTREAM_REJECTED


# -- recorded errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", [c for c in errors() if c.path in RELAYED], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_recorded_errors_keep_status_and_words(
    make_gateway: MakeGateway, backend: ScriptedBackend, capture: Capture, stream: bool
) -> None:
    gateway = await make_gateway(backend)
    backend.answer(replay(capture))
    response = await gateway.ask(capture.path, chat(stream=stream))
    error = the_error(response, capture.path)
    words = said(capture)
    assert words is not None
    assert response.status == capture.status
    assert words.split("\n\n  File")[0] in error["message"]
    assert "site-packages" not in error["message"]
    if "overflow" in capture.name:
        if capture.path == "/v1/messages":  # agents find an overflow by these words
            assert error["message"].startswith("prompt is too long: ")
        else:
            assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    elif capture.path != "/v1/messages":
        assert error["code"] == ("model_not_found" if "unknown_model" in capture.name else None)
    assert response.headers["x-tierline-backend"] == "a"
    assert (await gateway.record()).status == capture.status
    await gateway.ended(outcome_of(capture.status))
    assert backend.requests[0].connection.ending is None  # a whole answer: the connection serves again


async def test_llama_cpp_pythons_empty_stream_is_no_answer(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    backend.answer(replay(load("llama-cpp-python", "error_context_overflow_stream")))
    response = await gateway.chat(stream=True)
    assert response.status == 502
    assert "without an event" in the_error(response, CHAT)["message"]
    await gateway.ended(Outcome.UPSTREAM_CUT)


# -- every shape ----------------------------------------------------------------------------------------------

WORDS = "max_tokens is too small"
SHAPES: dict[str, object] = {
    "openai": {"error": {"message": WORDS, "type": "invalid_request_error", "param": None, "code": None}},
    "vllm": {"error": {"message": WORDS, "type": "BadRequestError", "param": None, "code": 400}},
    "old vllm": {"object": "error", "message": WORDS, "type": "BadRequestError", "param": None, "code": 400},
    "anthropic": {"type": "error", "error": {"type": "invalid_request_error", "message": WORDS}},
    "a string": {"error": WORDS},
    "fastapi": {"detail": WORDS},
    "fastapi's list": {
        "detail": [{"loc": ["body", "max_tokens"], "msg": WORDS, "type": "x", "input": "secret"}]
    },
    "in a list": [{"error": {"message": WORDS}}],
    "a bare string": WORDS,
}
STATUSES = [400, 404, 409, 422, 429, 500, 501, 503, 529]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
async def test_an_error_in_any_shape_comes_back_in_the_endpoints(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str, shape: object
) -> None:
    gateway = await make_gateway(backend)
    for status in STATUSES:
        backend.answer(json_answer(shape, status))
        response = await gateway.ask(path, chat(stream=status % 2 == 1))
        assert response.status == status
        error = the_error(response, path)
        assert WORDS in error["message"]
        assert "secret" not in error["message"]
    await gateway.ended(*map(outcome_of, STATUSES))
    assert len(backend.requests) == len(STATUSES)  # not tried again


UNREADABLE: dict[str, Steps] = {
    "no body": whole(b"", 500),
    "a page": whole(b"<html><h1>502 Bad Gateway</h1><hr>nginx/1.27 at /srv/x</html>", 500, "text/html"),
    "plain text": whole(b"Internal Server Error", 500, "text/plain"),
    "half a document": whole(b'{"error": {"mess', 500),
    "no object": whole(b"null", 500),
    "binary": whole(bytes(range(256)), 500, "application/octet-stream"),
    "gzip all the same": whole(b"\x1f\x8b\x08\x00xyz", 500, headers=[("content-encoding", "gzip")]),
    "a trace": whole(
        b'Traceback (most recent call last)\n  File "/srv/app.py"\nValueError: oops', 500, "text/plain"
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("answer", UNREADABLE.values(), ids=UNREADABLE.keys())
async def test_an_error_that_nobody_can_read_is_still_one(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str, answer: Steps
) -> None:
    gateway = await make_gateway(backend)
    backend.answer(answer)
    response = await gateway.ask(path, chat())
    assert response.status == 500
    message = the_error(response, path)["message"]
    assert not any(word in message for word in ("<", "/srv", "nginx", "\0", "Traceback"))
    assert "content-encoding" not in response.headers
    await gateway.ended(Outcome.UPSTREAM_ERROR)


# -- errors dressed as answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"message": "bad input", "type": "BadRequestError", "code": 400}, 400),
        ({"message": "out of memory", "type": "InternalServerError", "code": 500}, 500),
        ({"message": "no code"}, 502),
        ("just words", 502),
    ],
    ids=["400", "500", "no code", "a string"],
)
async def test_a_200_that_holds_an_error_is_one(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str, error: object, status: int
) -> None:
    gateway = await make_gateway(backend)
    backend.answer(json_answer({"error": error}))
    response = await gateway.ask(path, chat())
    assert response.status == status
    words = error["message"] if isinstance(error, dict) else error
    assert the_error(response, path)["message"] == words
    await gateway.ended(outcome_of(status))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("done", [False, True], ids=["", "DONE behind it"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"message": "bad input", "type": "BadRequestError", "param": None, "code": 400}, 400),
        ({"message": "EngineCore died", "type": "InternalServerError", "code": 500}, 500),
        ({"message": "slow down", "type": "x", "code": 429}, 429),
        ("just words", 500),
    ],
    ids=["400", "500", "429", "a string"],
)
async def test_an_error_as_the_first_event_has_its_own_status(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str, error: object, status: int, done: bool
) -> None:
    gateway = await make_gateway(backend)
    backend.answer(sse(event({"error": error}), done=done))
    response = await gateway.ask(path, chat(stream=True))
    assert response.status == status
    words = error["message"] if isinstance(error, dict) else error
    assert the_error(response, path)["message"] == words
    await gateway.ended(outcome_of(status))


async def test_an_overflow_as_the_first_event_is_a_400_like_any_other(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    words = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."
    backend.answer(sse(event({"error": {"message": words, "type": "BadRequestError", "code": 400}})))
    response = await gateway.chat(stream=True)
    assert (response.status, the_error(response, CHAT)["code"]) == (400, "context_length_exceeded")


async def test_and_is_tried_on_a_larger_window_too(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    limits = {"a": "limits.window_tokens = 4096", "b": "limits = { window_tokens = 8192, max_in_flight = 2 }"}
    gateway = await make_gateway(backend, other, config=LEAST_LOAD, per_backend=limits)
    words = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."
    backend.answer(sse(event({"error": {"message": words, "type": "BadRequestError", "code": 400}})))
    response = await gateway.chat(stream=True)
    assert (response.status, response.text) == (200, "Hello there.")
    assert response.headers["x-tierline-reason"] == "larger_window"
    await gateway.ended(Outcome.OK)


# -- afterwards -----------------------------------------------------------------------------------------------


async def test_a_client_connection_serves_on_after_every_kind_of_error(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    backend.answer(
        error_json(400, "no"), error_json(503, "no"), sse(), chat_stream(), sse(event({"error": "x"}))
    )
    seen = []
    async with await gateway.connect() as connection:
        for path, body in (
            (CHAT, chat()),
            (CHAT, chat(stream=True)),
            (CHAT, chat(stream=True, model="nope")),
            (CHAT, b"{"),
            ("/v1/nothing", chat()),
            (CHAT, None),
            (CHAT, chat(stream=True)),
            (CHAT, chat(stream=True)),
            (CHAT, chat(stream=True)),
            (CHAT, chat()),
        ):
            connection.send(path, body)
            seen.append((await connection.read()).status)
    # sse() is a `[DONE]` and nothing before it: no answer.
    assert seen == [400, 503, 404, 400, 404, 405, 502, 200, 500, 200]
    gateway.assert_idle()


@pytest.mark.parametrize(
    "text", ["lone \ud83d surrogate", "nul \0", 'quotes " and \\', "x" * 100_000, "日本"]
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_any_text_in_an_error_can_be_told(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str, text: str
) -> None:
    gateway = await make_gateway(backend)
    body = json.dumps({"error": {"message": text, "type": "x"}}).encode()
    backend.answer(whole(body, 400))
    response = await gateway.ask(path, chat())
    assert response.status == 400
    assert len(the_error(response, path)["message"]) <= 5000
    model = json.dumps({"model": text.replace("\ud83d", "\ud83d"), "messages": []}).encode()
    response = await gateway.ask(path, model)
    assert response.status in (400, 404)
    the_error(response, path)
