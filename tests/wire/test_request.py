"""What routing reads of a request, and what it leaves to the backend."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.body import BodyError
from proxy.wire.errors import Api
from proxy.wire.request import RequestBody, read_request
from tests.wire.documents import bodies


def read(api: Api, **fields: object) -> RequestBody:
    return read_request(api, json.dumps(fields).encode())


def chat(*contents: object, **fields: object) -> RequestBody:
    return read(Api.CHAT, messages=[{"role": "user", "content": content} for content in contents], **fields)


def base64_of(size: int) -> str:
    return base64.b64encode(bytes(n * 7 % 256 for n in range(size))).decode()


def test_an_empty_object_is_a_request_without_anything() -> None:
    body = read_request(Api.CHAT, b"{}")
    assert (body.model, body.stream, body.include_usage, body.max_output_tokens) == (None, False, False, None)
    assert (body.n, body.tools, body.session, body.previous_response_id) == (1, False, None, None)
    assert body.sizes == (0, 0, 0, 0, 0, 1, False)
    assert body.words() == 0


def test_a_whole_chat_request_is_read() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the time?"}]
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    body = read(
        Api.CHAT,
        model="qwen",
        messages=messages,
        tools=tools,
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=5,
        max_completion_tokens=7,
        n=2,
        prompt_cache_key="abc",
        user="everybody",
    )
    assert (body.model, body.stream, body.include_usage, body.max_output_tokens) == ("qwen", True, True, 7)
    assert (body.n, body.tools, body.session) == (2, True, "abc")
    assert body.sizes.text_bytes == len(json.dumps(messages))
    assert body.sizes.tools_bytes == len(json.dumps(tools))
    assert body.sizes.messages == 2
    assert body.words() == 6


@pytest.mark.parametrize(
    ("api", "field", "value", "message"),
    [
        (Api.CHAT, "model", 1, "model must be a string, not a number"),
        (Api.CHAT, "model", ["a"], "model must be a string, not an array"),
        (Api.CHAT, "stream", "maybe", "stream must be a boolean, not a string"),
        (Api.CHAT, "stream", {}, "stream must be a boolean, not an object"),
        (Api.CHAT, "stream_options", [], "stream_options must be an object, not an array"),
        (Api.CHAT, "max_tokens", "many", "max_tokens must be an integer, not a string"),
        (Api.CHAT, "max_completion_tokens", 1.5, "max_completion_tokens must be an integer, not a number"),
        (Api.MESSAGES, "max_tokens", [], "max_tokens must be an integer, not an array"),
        (Api.RESPONSES, "max_output_tokens", True, "max_output_tokens must be an integer, not true"),
        (Api.RESPONSES, "previous_response_id", 1, "previous_response_id must be a string, not a number"),
        (Api.COMPLETIONS, "n", "x", "n must be an integer, not a string"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(api: Api, field: str, value: object, message: str) -> None:
    with pytest.raises(BodyError) as caught:
        read(api, **{field: value})
    assert (caught.value.message, caught.value.param) == (message, field)


@pytest.mark.parametrize(
    "field", ["model", "stream", "stream_options", "max_tokens", "n", "messages", "tools", "prompt_cache_key"]
)
@pytest.mark.parametrize("first", ["null", '"x"', "{}"])
def test_a_field_that_is_read_must_not_be_there_twice(field: str, first: str) -> None:
    escaped = "".join(f"\\u{ord(char):04x}" for char in field)
    for second in (field, escaped):
        with pytest.raises(BodyError) as caught:
            read_request(Api.CHAT, f'{{"{field}":{first},"{second}":null}}'.encode())
        assert caught.value.param == field


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "not a list", "tools": {}, "temperature": "hot", "top_p": [], "unknown": {"a": 1}},
        {"prompt_cache_key": 7, "metadata": "none", "response_format": 1, "tool_choice": 5, "user": []},
        {"messages": [1, None, [], {}], "tools": [None], "functions": "none", "truncation": {}},
        {"previous_response_id": 5, "max_output_tokens": "x", "input": 5},
    ],
)
def test_everything_else_is_for_the_backend_to_judge(fields: dict[str, object]) -> None:
    assert read(Api.CHAT, **fields).session is None


@pytest.mark.parametrize(
    ("value", "stream"),
    [(None, False), (False, False), (True, True), ("true", True), (1, True), ("no", False)],
)
def test_stream_is_what_vllm_takes_for_it(value: object, stream: bool) -> None:
    assert chat("x", stream=value).stream is stream


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": None}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
    ],
)
def test_usage_is_asked_for_only_by_a_true(options: object, asked: bool) -> None:
    assert chat("x", stream=True, stream_options=options).include_usage is asked
    assert read(Api.COMPLETIONS, stream_options=options).include_usage is asked


@pytest.mark.parametrize(
    ("api", "fields", "limit"),
    [
        (Api.CHAT, {"max_tokens": 5}, 5),
        (Api.CHAT, {"max_tokens": 5, "max_completion_tokens": None}, 5),
        (Api.CHAT, {"max_tokens": -1}, None),
        (Api.CHAT, {"max_tokens": "12"}, 12),
        (Api.CHAT, {"max_output_tokens": 5}, None),
        (Api.COMPLETIONS, {"max_tokens": 0}, 0),
        (Api.RESPONSES, {"max_output_tokens": 6, "max_tokens": 5}, 6),
        (Api.MESSAGES, {"max_tokens": 8}, 8),
        (Api.OTHER, {"max_tokens": 8}, None),
    ],
)
def test_the_output_limit_is_the_endpoints_own(
    api: Api, fields: dict[str, object], limit: int | None
) -> None:
    assert read(api, **fields).max_output_tokens == limit


@pytest.mark.parametrize(
    ("api", "fields", "session"),
    [
        (Api.CHAT, {"prompt_cache_key": "k"}, "k"),
        (Api.RESPONSES, {"prompt_cache_key": "é\n"}, "é\n"),
        (Api.CHAT, {"prompt_cache_key": ""}, None),
        (Api.CHAT, {"prompt_cache_key": None}, None),
        (Api.CHAT, {"prompt_cache_key": ["k"]}, None),
        (Api.CHAT, {"prompt_cache_key": "\ud800"}, None),
        (Api.CHAT, {"user": "u", "safety_identifier": "s"}, None),
        (Api.CHAT, {"metadata": {"user_id": "u"}}, None),
        (Api.MESSAGES, {"metadata": {"user_id": "u"}}, "u"),
        (Api.MESSAGES, {"metadata": {"user_id": 5}}, None),
        (Api.MESSAGES, {"metadata": {"user_id": "\ud800"}}, None),
        (Api.MESSAGES, {"metadata": {}}, None),
        (Api.MESSAGES, {"metadata": None}, None),
        (Api.MESSAGES, {"metadata": [{"user_id": "u"}]}, None),
        (Api.MESSAGES, {"metadata": {"user_id": "u"}, "prompt_cache_key": "k"}, "k"),
    ],
)
def test_a_session_is_a_key_that_clients_choose_for_one(
    api: Api, fields: dict[str, object], session: str | None
) -> None:
    assert read(api, **fields).session == session


def test_a_malformed_hint_is_no_hint() -> None:
    for metadata in (b'{"user_id":"u" "x"}', b'{"user_id":"u","user_id":"v"}', b"{]"):
        assert read_request(Api.MESSAGES, b'{"metadata":' + metadata + b"}").session is None


@pytest.mark.parametrize(
    ("fields", "tools"),
    [
        ({"tools": []}, False),
        ({"tools": [{}]}, True),
        ({"functions": [{}]}, True),
        ({"tools": None}, False),
        ({"tools": {}}, False),
    ],
)
def test_tools_are_there_when_one_is(fields: dict[str, object], tools: bool) -> None:
    assert chat("x", **fields).tools is tools


@pytest.mark.parametrize(
    ("api", "fields", "counted"),
    [
        (Api.CHAT, {"messages": [], "input": "x" * 99, "prompt": "x", "system": "x"}, ["messages"]),
        (Api.COMPLETIONS, {"prompt": "x y", "suffix": "z", "messages": []}, ["prompt", "suffix"]),
        (
            Api.RESPONSES,
            {"instructions": "a", "input": [{"role": "user", "content": "b"}], "messages": []},
            ["instructions", "input"],
        ),
        (
            Api.MESSAGES,
            {"system": [{"type": "text", "text": "a"}], "messages": [], "prompt": "x"},
            ["system", "messages"],
        ),
        (Api.OTHER, {"query": "a", "documents": ["b", "c"], "top_n": 5}, ["query", "documents"]),
    ],
)
def test_text_is_what_the_endpoint_gives_to_the_model(
    api: Api, fields: dict[str, object], counted: list[str]
) -> None:
    assert read(api, **fields).sizes.text_bytes == sum(len(json.dumps(fields[key])) for key in counted)


@pytest.mark.parametrize(
    ("api", "fields", "sequences"),
    [
        (Api.COMPLETIONS, {"prompt": "one"}, 1),
        (Api.COMPLETIONS, {"prompt": ["one", 'tw"o', "\\"]}, 3),
        (Api.COMPLETIONS, {"prompt": [[1, 2], [3]]}, 2),
        (Api.COMPLETIONS, {"prompt": [1, 2, 3]}, 1),
        (Api.COMPLETIONS, {"prompt": []}, 1),
        (Api.RESPONSES, {"input": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, 1),
        (Api.OTHER, {"input": ["a", "b"]}, 2),
        (Api.OTHER, {"query": "q", "documents": [{"text": "a"}, {"text": "b"}, {"text": "c"}]}, 3),
        (Api.CHAT, {"messages": [{"role": "user", "content": ["a", "b"]}]}, 1),
    ],
)
def test_a_batch_is_so_many_prompts(api: Api, fields: dict[str, object], sequences: int) -> None:
    assert read(api, **fields).sizes.sequences == sequences


@pytest.mark.parametrize(
    ("fields", "truncates"),
    [
        ({"truncate_prompt_tokens": 100}, True),
        ({"truncate_prompt_tokens": -1}, True),
        ({"truncation": "auto"}, True),
        ({"truncate_prompt_tokens": None, "truncation": "disabled"}, False),
    ],
)
def test_a_prompt_that_may_be_cut_is_marked(fields: dict[str, object], truncates: bool) -> None:
    assert chat("x", **fields).sizes.truncates is truncates


# -- pictures and other media -----------------------------------------------------------------------------------


def openai_image(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_an_image_by_address_is_counted_once() -> None:
    body = chat(
        [
            openai_image("https://example.com/a.png"),
            openai_image("https://example.com/b.png"),
            {"type": "text", "text": "?"},
        ]
    )
    assert (body.sizes.images, body.sizes.media_bytes) == (2, 0)
    compact = json.dumps(
        {"messages": [{"role": "user", "content": [openai_image("u")]}]}, separators=(",", ":")
    )
    assert read_request(Api.CHAT, compact.encode()).sizes.images == 1


@pytest.mark.parametrize("size", [5_000, 300_000])
@pytest.mark.parametrize("slash", ["/", "\\/"])
@pytest.mark.parametrize("shape", ["chat", "responses", "messages", "audio", "file"])
def test_base64_is_told_from_text(shape: str, slash: str, size: int) -> None:
    payload = base64_of(size)
    url = "data:image/png;base64," + payload
    api, part, text = {
        "chat": (Api.CHAT, openai_image(url), url),
        "responses": (Api.RESPONSES, {"type": "input_image", "image_url": url}, url),
        "messages": (
            Api.MESSAGES,
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": payload}},
            payload,
        ),
        "audio": (
            Api.CHAT,
            {"type": "input_audio", "input_audio": {"data": payload, "format": "wav"}},
            payload,
        ),
        "file": (Api.RESPONSES, {"type": "input_file", "file_data": url}, url),
    }[shape]
    words = 'Some words before it, and "quoted" ones. ' * 100
    content = [{"type": "text", "text": words}, part, {"type": "text", "text": words}, part]
    field = "input" if api is Api.RESPONSES else "messages"
    data = json.dumps({field: [{"role": "user", "content": content}]}).encode()
    data = data.replace(b"/", slash.encode())
    sizes = read_request(api, data).sizes
    assert sizes.media_bytes == 2 * len(text.replace("/", slash))
    assert sizes.images == (0 if shape in ("audio", "file") else 2)
    assert sizes.messages == 1
    assert sizes.text_bytes - sizes.media_bytes < 2 * len(words) + 1000


@pytest.mark.parametrize(
    "content",
    [
        base64_of(20_000),  # somebody's text, shown to the model
        "Decode this: " + base64_of(20_000),
        json.dumps({"data": base64_of(20_000)}),  # JSON in a string
        "x" * 20_000,
        [{"type": "image_url", "image_url": {"url": "x y" + "x" * 20_000}}],
    ],
)
def test_text_that_looks_like_base64_stays_text(content: object) -> None:
    assert chat(content, "and then").sizes.media_bytes == 0


def test_a_body_of_hostile_near_media_is_read_in_linear_time() -> None:
    near = '{"data":"' + ("x" * 3000 + " ") * 400 + '"}'
    unclosed = b'{"messages":[{"a":"b\\"' + b"x" * 100_000 + b'"}]}'
    assert read_request(Api.CHAT, b'{"messages":[' + near.encode() + b"]}").sizes.media_bytes == 0
    assert read_request(Api.CHAT, unclosed).sizes.media_bytes == 0
    assert read_request(Api.CHAT, b'{"messages":' + b"1" * 100_000 + b"}").sizes.media_bytes == 0


# -- words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "fields", "words"),
    [
        (Api.CHAT, {"messages": [{"role": "user", "content": "one two\nthree", "name": "not this"}]}, 3),
        (Api.CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b"}, openai_image("u v")]}]}, 2),
        (Api.CHAT, {"messages": [{"role": "assistant", "content": "<think>a b</think> d", "reasoning": "e f"}]}, 1),
        (Api.CHAT, {"messages": [{"role": "assistant", "content": None}, 5, {"type": ["x"], "content": "a"}]}, 1),
        (Api.COMPLETIONS, {"prompt": ["a b", "c"]}, 3),
        (Api.COMPLETIONS, {"prompt": [1, 2, 3]}, 0),
        (Api.RESPONSES, {"instructions": "a", "input": [{"type": "function_call_output", "output": "b c"}]}, 3),
        (Api.RESPONSES, {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a b"}]}]}, 0),
        (Api.MESSAGES, {"system": "a b", "messages": [{"role": "assistant", "content": [
            {"type": "thinking", "thinking": "x y", "text": "z"},
            {"type": "tool_result", "content": [{"type": "text", "text": "c d"}]}]}]}, 4),
        (Api.OTHER, {"query": "a", "documents": ["b c", {"text": "d"}]}, 4),
    ],
)  # fmt: skip
def test_words_are_counted_where_the_text_is_surely_rendered(
    api: Api, fields: dict[str, object], words: int
) -> None:
    assert read(api, **fields).words() == words


def test_text_that_cannot_be_parsed_has_no_words() -> None:
    for value in (b"[" * 100_000 + b"]" * 100_000, b"[1}", b'["a b" "c"]', b'["\xff"]'):
        assert read_request(Api.CHAT, b'{"messages":' + value + b"}").words() == 0


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    bodies(),
    st.sampled_from(list(Api)),
    st.sampled_from([b"messages", b"input", b"metadata", b"tools", b"prompt"]),
)
def test_any_object_is_read_or_a_field_is_named(data: bytes, api: Api, field: bytes) -> None:
    try:
        body = read_request(api, data.replace(b'"a"', b'"' + field + b'"'))
    except BodyError as error:
        if not error.param:
            raise
        return
    assert body.words() >= 0
    for text in (body.model, body.session, body.previous_response_id):
        assert text is None or text.encode().decode() == text
