"""Error dialects: what every server says is understood, and what clients get is one of two shapes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    MAX_MESSAGE_CHARS,
    MAX_PLAIN_CHARS,
    Api,
    ErrorInfo,
    anthropic_type,
    is_context_overflow,
    read_error,
    read_event_error,
    render_body,
    render_event,
)
from tests.captures import LLAMA_CPP_PYTHON, LLAMA_SERVER, VLLM, all_captures, load, notes

VLLM_OVERFLOW = (
    "This model's maximum context length is 4096 tokens. However, your prompt contains at least 4097 input "
    "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
    "prompt. (parameter=input_tokens, value=4097)"
)
LLAMA_OVERFLOW = "request (5118 tokens) exceeds the available context size (4096 tokens), try increasing it"
PYTHON_OVERFLOW = (
    "This model's maximum context length is 4096 tokens. However, you requested 5128 tokens (5118 in the "
    "messages, 10 in the completion). Please reduce the length of the messages or completion."
)


def read(server: str, name: str) -> ErrorInfo:
    capture = load(server, name)
    return read_error(capture.status, capture.header("content-type"), capture.body)


# --- reading: whole answers ------------------------------------------------------------------------------

OVERFLOWS = [
    (VLLM, "error_context_overflow", VLLM_OVERFLOW, "input_tokens"),
    (VLLM, "error_context_overflow_stream", VLLM_OVERFLOW, "input_tokens"),
    (VLLM, "error_completions_overflow", VLLM_OVERFLOW, "input_tokens"),
    (VLLM, "error_responses_overflow", VLLM_OVERFLOW, "input_tokens"),
    (VLLM, "error_messages_overflow", VLLM_OVERFLOW, None),
    (LLAMA_SERVER, "error_context_overflow", LLAMA_OVERFLOW, None),
    (LLAMA_SERVER, "error_context_overflow_stream", LLAMA_OVERFLOW, None),
    (LLAMA_SERVER, "error_completions_overflow", LLAMA_OVERFLOW.replace("5118", "5096"), None),
    (LLAMA_SERVER, "error_responses_overflow", LLAMA_OVERFLOW, None),
    (LLAMA_SERVER, "error_messages_overflow", LLAMA_OVERFLOW, None),
    (LLAMA_CPP_PYTHON, "error_context_overflow", PYTHON_OVERFLOW, "messages"),
]


@pytest.mark.parametrize(("server", "name", "message", "param"), OVERFLOWS)
def test_an_overflow_has_one_name_whichever_server_says_it(server, name, message, param):
    info = read(server, name)
    assert info == ErrorInfo(400, message, "invalid_request_error", CONTEXT_LENGTH_EXCEEDED, param)
    assert is_context_overflow(info)


CAPTURED = [
    (
        VLLM,
        "error_unknown_model",
        ErrorInfo(
            404,
            "The model `nope` does not exist. Valid aliases: tiny.",
            "NotFoundError",
            "model_not_found",
            "model",
        ),
    ),
    (
        VLLM,
        "error_messages_unknown_model",
        ErrorInfo(404, "The model `nope` does not exist. Valid aliases: tiny.", "NotFoundError"),
    ),
    (
        VLLM,
        "error_max_tokens_too_big",
        ErrorInfo(
            400,
            "max_tokens=4097 cannot be greater than max_model_len=4096. Please request fewer output tokens. "
            "(parameter=max_tokens, value=4097)",
            "BadRequestError",
            None,
            "max_tokens",
        ),
    ),
    (VLLM, "error_image_on_text_model", ErrorInfo(400, "tiny is not a multimodal model", "BadRequestError")),
    (VLLM, "error_not_found", ErrorInfo(404, "Not Found", "not_found_error")),
    (VLLM, "error_wrong_method", ErrorInfo(405, "Method Not Allowed", "invalid_request_error")),
    (VLLM, "auth_missing_key", ErrorInfo(401, "Unauthorized", "authentication_error")),
    (
        LLAMA_SERVER,
        "error_no_messages",
        ErrorInfo(400, "'messages' is required", "invalid_request_error"),
    ),
    (LLAMA_SERVER, "error_not_found", ErrorInfo(404, "File Not Found", "not_found_error")),
    (
        LLAMA_SERVER,
        "error_image_on_text_model",
        ErrorInfo(
            500,
            "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
            "server_error",
        ),
    ),
    (LLAMA_CPP_PYTHON, "error_bad_json", ErrorInfo(500, "Internal Server Error", "server_error")),
]


@pytest.mark.parametrize(
    ("server", "name", "expected"), CAPTURED, ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_recorded_error_keeps_its_status_and_meaning(server, name, expected):
    assert read(server, name) == expected


def test_a_validation_error_does_not_carry_the_path_of_the_file_that_refused():
    info = read(LLAMA_CPP_PYTHON, "error_bad_type")
    assert info.status == 500
    assert info.message.startswith("1 validation error:")
    assert "Input should be a valid number" in info.message
    assert "site-packages" not in info.message


def test_every_recorded_error_is_read_with_a_message_a_string_type_and_a_code_that_is_no_number():
    failed = [c for c in all_captures() if c.status >= 400]
    assert len(failed) > 30
    for capture in failed:
        info = read_error(capture.status, capture.header("content-type"), capture.body)
        assert info.status == capture.status, str(capture)
        assert info.message.strip(), str(capture)
        assert "without a readable message" not in info.message, str(capture)
        assert info.code is None or not info.code.isdigit(), str(capture)


def test_a_server_without_parsers_says_so():
    text = notes(VLLM, "no_parsers")
    body = next(line for line in text.splitlines() if line.startswith('{"error"'))
    info = read_error(400, "application/json", body.encode())
    assert info.type == "BadRequestError"
    assert info.message.startswith('"auto" tool choice requires')


OTHER_WORDS_FOR_OVERFLOW = [
    "The decoder prompt (length 12324) is longer than the maximum model length of 8192.",
    "ValueError: The decoder prompt (length 9) is longer than the maximum model length of 8. Make sure",
    "The decoder prompt (length 5118) plus the number of requested output tokens (at least 1) is longer than "
    "the maximum model length of 4096.",
    "'max_tokens' or 'max_completion_tokens' is too large: 5000. This model's maximum context length is 4096 "
    "tokens and your request has 37 input tokens (5000 > 4096 - 37).",
    "You passed 5118 input tokens and requested 10 output tokens. However, the model's context length is "
    "only 4096 tokens",
    "The engine prompt length 5118 exceeds the max_model_len 4096. Please reduce prompt.",
    "the request exceeds the available context size, try increasing it",
    "Requested tokens (5128) exceed context window of 4096",
    "The input (5118 tokens) is longer than the model's context length (4096 tokens).",
]


@pytest.mark.parametrize("message", OTHER_WORDS_FOR_OVERFLOW)
@pytest.mark.parametrize("status", [400, 413, 422, 500])
def test_older_and_other_servers_words_for_an_overflow_are_known(message, status):
    body = json.dumps({"error": {"message": message, "type": "BadRequestError", "code": status}}).encode()
    info = read_error(status, "application/json", body)
    assert is_context_overflow(info)
    assert (info.status, info.message, info.type) == (400, message, "invalid_request_error")


NOT_OVERFLOWS = [
    (
        400,
        "1 validation error: {'input': \"This model's maximum context length is 4096 tokens\"}",
        "a quoted prompt",
    ),
    (429, "This model's maximum context length is 4096 tokens", "a refusal for load"),
    (401, "This model's maximum context length is 4096 tokens", "a refusal for the key"),
    (500, "Context size has been exceeded.", "slots together out of cache: not this request's fault"),
    (400, "max_tokens=9 cannot be greater than max_model_len=8", "a shorter prompt would not help"),
    (400, "prompt too short", ""),
]


@pytest.mark.parametrize(("status", "message", "why"), NOT_OVERFLOWS)
def test_what_is_no_overflow_keeps_its_own_status(status, message, why):
    body = json.dumps({"error": {"message": message, "type": "x", "code": status}}).encode()
    info = read_error(status, "application/json", body)
    assert not is_context_overflow(info), why
    assert info == ErrorInfo(status, message, "x"), why


INVALID, SERVER = "invalid_request_error", "server_error"
NONE_READABLE = "the backend answered {} without a readable message"
SHAPES = [
    (400, b'{"object":"error","message":"m","type":"BadRequestError","param":null,"code":400}',
     ("m", "BadRequestError", None, None)),
    (400, b'{"object":"error","message":"m","type":"T","param":"p","code":40303}', ("m", "T", "40303", "p")),
    (400, b'{"error":{"message":"m","type":"t","param":"p","code":"c"}}', ("m", "t", "c", "p")),
    (400, b'{"error":{"message":"m","code":"400"}}', ("m", INVALID, None, None)),
    (403, b'{"error":"no"}', ("no", "permission_error", None, None)),
    (500, b'{"error":"internal","message":"disk full"}', ("disk full", SERVER, None, None)),
    (503, b'{"message":"loading"}', ("loading", SERVER, None, None)),
    (429, b'{"detail":"slow down"}', ("slow down", "rate_limit_error", None, None)),
    (400, b'{"detail":{"message":"m","code":"c"}}', ("m", "invalid_request_error", "c", None)),
    (400, b'"just text"', ("just text", INVALID, None, None)),
    (400, b'[{"error":{"message":"m","type":"t"}}]', ("m", "t", None, None)),
    (400, b'{"type":"error","error":{"type":"invalid_request_error","message":"m"}}',
     ("m", INVALID, None, None)),
    (400, b'{"error":{"message":"","type":"OnlyType"}}', ("OnlyType", "OnlyType", None, None)),
    (400, b'{"error":{"message":5,"type":null,"param":["x"],"code":true}}',
     (NONE_READABLE.format("400 Bad Request"), INVALID, None, None)),
    (502, b"upstream connect error", ("upstream connect error", SERVER, None, None)),
    (502, b"", (NONE_READABLE.format("502 Bad Gateway"), SERVER, None, None)),
    (599, b"", (NONE_READABLE.format("599"), SERVER, None, None)),
    (400, b"{broken", (NONE_READABLE.format("400 Bad Request"), INVALID, None, None)),
    (400, b"\x00\x01\x02", (NONE_READABLE.format("400 Bad Request"), INVALID, None, None)),
    (500, b"Traceback (most recent call last):\n  File \"/srv/x.py\", line 1\nKeyError: 'x'",
     ("KeyError: 'x'", SERVER, None, None)),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body", "expected"), SHAPES)
def test_each_shape_of_error_is_understood(status, body, expected):
    info = read_error(status, "application/json", body)
    assert (info.status, info.message, info.type, info.code, info.param) == (status, *expected)


def test_fastapi_validation_lists_become_one_line_that_names_the_fields():
    details = [
        {"loc": ["body", "messages", i, "role"], "msg": "Field required", "input": "secret"} for i in range(7)
    ]
    info = read_error(422, "application/json", json.dumps({"detail": details}).encode())
    assert info.message.startswith("messages.0.role: Field required; messages.1.role: Field required;")
    assert info.message.endswith("; and 2 more")
    assert info.param == "messages.0.role"
    assert "secret" not in info.message


@pytest.mark.parametrize("content_type", ["text/html; charset=utf-8", "text/plain", None])
def test_html_never_reaches_a_client(content_type):
    info = read_error(502, content_type, b"\n<!doctype html><h1>nginx at 10.0.0.7</h1>")
    assert info.message == "the backend answered 502 Bad Gateway without a readable message"


def test_text_of_any_length_is_bounded():
    assert len(read_error(500, "text/plain", b"x" * 10_000).message) == MAX_PLAIN_CHARS
    long = json.dumps({"error": {"message": "x" * 50_000, "type": "t" * 999, "param": "p" * 999}}).encode()
    info = read_error(400, "application/json", long)
    assert len(info.message) == MAX_MESSAGE_CHARS
    assert len(info.type) == len(info.param) == 200
    huge = b'{"error":{"message":"' + b"x" * (1 << 20) + b'"}}'
    assert "without a readable message" in read_error(400, "application/json", huge).message


def test_an_error_dressed_as_an_answer_gets_the_status_it_names_or_502():
    assert read_error(200, "application/json", b'{"error":{"message":"m","code":503}}').status == 503
    assert read_error(200, "application/json", b'{"error":{"message":"m","code":"429"}}').status == 429
    assert read_error(200, "application/json", b'{"error":"m"}').status == 502
    assert read_error(200, None, b"").status == 502


# --- reading: events -------------------------------------------------------------------------------------


def test_the_event_of_a_dead_engine_is_an_error():
    text = notes(VLLM, "server_dies_mid_stream")
    line = next(line for line in text.splitlines() if line.startswith('data: {"error"'))
    assert read_event_error(json.loads(line[6:])) == ErrorInfo(
        500,
        "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "InternalServerError",
    )


EVENTS = [
    ({"error": "some text"}, ErrorInfo(500, "some text", "server_error")),
    ({"error": {"message": "m", "code": 400, "type": "BadRequest"}}, ErrorInfo(400, "m", "BadRequest")),
    ({"object": "error", "message": "m", "type": "T", "code": 503}, ErrorInfo(503, "m", "T")),
    (
        {"type": "error", "error": {"type": "overloaded_error", "message": "m"}},
        ErrorInfo(500, "m", "overloaded_error"),
    ),
    (
        {"type": "error", "code": "ERR", "message": "m", "param": None, "sequence_number": 3},
        ErrorInfo(500, "m", "server_error", "ERR"),
    ),
    (
        {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "m"}}},
        ErrorInfo(500, "m", "server_error", "server_error"),
    ),
    ({"type": "response.failed", "response": {}}, ErrorInfo(500, "the response failed", "server_error")),
    ({"type": "error"}, ErrorInfo(500, "the backend reported an error without a message", "server_error")),
    ({"error": True}, ErrorInfo(500, "the backend reported an error without a message", "server_error")),
    ({"error": {"message": LLAMA_OVERFLOW, "type": "exceed_context_size_error", "code": 400}},
     ErrorInfo(400, LLAMA_OVERFLOW, "invalid_request_error", CONTEXT_LENGTH_EXCEEDED)),
]  # fmt: skip


@pytest.mark.parametrize(("value", "expected"), EVENTS)
def test_each_shape_of_error_event_is_understood(value, expected):
    assert read_event_error(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "error",
        {},
        {"error": None, "choices": []},
        {"error": {}},
        {"type": "response.created", "response": {"error": None}},
        {"object": "chat.completion.chunk", "choices": [{"delta": {"content": "error"}}]},
        {"type": "content_block_delta", "delta": {"text": "x"}},
    ],
)
def test_an_ordinary_event_is_no_error(value):
    assert read_event_error(value) is None


def test_no_event_of_a_recorded_answer_is_taken_for_an_error():
    seen = 0
    for capture in all_captures():
        if capture.status == 200 and capture.is_stream:
            for line in capture.body.splitlines():
                if line.startswith(b"data: {"):
                    seen += 1
                    assert read_event_error(json.loads(line[6:])) is None, str(capture)
    assert seen > 500


# --- writing ---------------------------------------------------------------------------------------------

INFO = ErrorInfo(503, 'no "backend"\nfits', "server_error", "no_backend", "model")
OVERFLOW = ErrorInfo(400, LLAMA_OVERFLOW, "invalid_request_error", CONTEXT_LENGTH_EXCEEDED)


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.OTHER])
def test_bodies_are_openai_shaped(api):
    fields = {"message": 'no "backend"\nfits', "type": "server_error", "param": "model", "code": "no_backend"}
    assert json.loads(render_body(api, INFO, "req-1")) == {"error": fields}


def test_messages_bodies_are_anthropic_shaped():
    assert json.loads(render_body(Api.MESSAGES, INFO, "req-1")) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": 'no "backend"\nfits'},
        "request_id": "req-1",
    }


def test_an_overflow_on_messages_says_so_in_the_words_that_agents_look_for():
    error = json.loads(render_body(Api.MESSAGES, OVERFLOW, "r"))["error"]
    assert error == {"type": "invalid_request_error", "message": f"prompt is too long: {LLAMA_OVERFLOW}"}
    again = read_error(400, "application/json", render_body(Api.MESSAGES, OVERFLOW, "r"))
    assert is_context_overflow(again)
    assert json.loads(render_body(Api.MESSAGES, again, "r"))["error"] == error


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_anthropic_types_follow_the_status(status, expected):
    assert anthropic_type(status) == expected


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.OTHER])
def test_an_openai_stream_ends_with_an_error_and_no_done(api):
    event = render_event(api, INFO)
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event[6:]) == json.loads(render_body(api, INFO, None))


def test_a_messages_stream_ends_with_an_error_event():
    event = render_event(Api.MESSAGES, INFO)
    assert event.startswith(b"event: error\ndata: {")
    assert json.loads(event.split(b"data: ")[1]) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": 'no "backend"\nfits'},
    }


def test_a_responses_stream_ends_with_its_own_error_event():
    event = render_event(Api.RESPONSES, INFO, 17)
    assert event.startswith(b"event: error\ndata: {")
    assert json.loads(event.split(b"data: ")[1]) == {
        "type": "error",
        "code": "no_backend",
        "message": 'no "backend"\nfits',
        "param": "model",
        "sequence_number": 17,
    }


@pytest.mark.parametrize("api", list(Api))
def test_the_sdks_own_models_accept_what_is_written(api):
    from anthropic.types import ErrorResponse
    from openai.types.responses import ResponseErrorEvent

    data = render_event(api, INFO).split(b"data: ")[1]
    if api is Api.MESSAGES:
        ErrorResponse.model_validate_json(render_body(api, INFO, "r"))
        ErrorResponse.model_validate_json(data)
    elif api is Api.RESPONSES:
        ResponseErrorEvent.model_validate_json(data)


@pytest.mark.parametrize("api", list(Api))
def test_text_with_lone_surrogates_is_written(api):
    info = ErrorInfo(404, "the model 'a\ud800' is not known", "not_found_error", None, "\udfff")
    assert b"is not known" in render_body(api, info, "r")
    assert b"is not known" in render_event(api, info)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["error", "message", "type", "code", "param", "detail", "loc", "msg", "object", "response"]
            )
            | st.text(max_size=5),
            inner,
            max_size=5,
        )
    ),
    max_leaves=15,
)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(100, 999), st.none() | st.text(max_size=20), st.binary(max_size=200) | JSON)
def test_reading_never_raises_and_what_is_read_can_be_written(status, content_type, body):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    info = read_error(status, content_type, raw)
    for api in Api:
        json.loads(render_body(api, info, None))
        assert render_event(api, info).endswith(b"\n\n")
    assert (
        read_error(info.status, "application/json", render_body(Api.CHAT, info)) == info or info.status < 400
    )


@settings(max_examples=200, derandomize=True, deadline=None)
@given(JSON)
def test_reading_events_never_raises(value):
    info = read_event_error(value)
    assert info is None or info.message
