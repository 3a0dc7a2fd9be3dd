"""Reading streamed answers: recorded streams whole, byte by byte and at random cuts; what is forwarded, what is seen."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.answers import Usage, read_answer, read_usage
from proxy.wire.sse import Splitter, fields
from proxy.wire.streams import (
    ChatStream,
    CompletionsStream,
    MalformedStream,
    StreamReader,
)
from proxy.wire.typedstreams import MessagesStream, ResponsesStream
from tests import captures

READERS: dict[str, type[StreamReader]] = {
    "/v1/chat/completions": ChatStream,
    "/v1/completions": CompletionsStream,
    "/v1/messages": MessagesStream,
    "/v1/responses": ResponsesStream,
}
RECORDED = [capture for capture in captures.streams() if capture.path in READERS]


def run(reader: StreamReader, chunks: list[bytes]) -> bytes:
    return b"".join(reader.feed(chunk) for chunk in chunks)


def state(reader: StreamReader) -> tuple[object, ...]:
    finish = dict(reader.finish) if isinstance(reader, ChatStream) else None
    return (
        reader.ended,
        reader.finish_reason,
        reader.usage,
        reader.error,
        reader.content,
        finish,
        reader.response_id,
    )


@pytest.mark.parametrize("capture", RECORDED, ids=str)
def test_recorded_streams_pass_unchanged_however_they_are_cut(capture: captures.Capture) -> None:
    whole = READERS[capture.path]()
    assert run(whole, [capture.body]) == capture.body
    as_sent = READERS[capture.path]()
    assert run(as_sent, list(capture.chunks)) == capture.body
    bytewise = READERS[capture.path]()
    assert run(bytewise, [capture.body[i : i + 1] for i in range(len(capture.body))]) == capture.body
    rng = random.Random(str(capture))
    cuts = sorted(rng.randrange(len(capture.body) + 1) for _ in range(20)) if capture.body else []
    pieces = [capture.body[a:b] for a, b in zip([0, *cuts], [*cuts, len(capture.body)], strict=True)]
    random_cuts = READERS[capture.path]()
    assert run(random_cuts, pieces) == capture.body
    assert state(whole) == state(as_sent) == state(bytewise) == state(random_cuts)


@pytest.mark.parametrize("capture", RECORDED, ids=str)
def test_recorded_streams_are_seen_to_be_whole_or_empty(capture: captures.Capture) -> None:
    reader = READERS[capture.path]()
    run(reader, list(capture.chunks))
    if capture.name == "error_context_overflow_stream":
        assert reader.events == 0  # llama-cpp-python: 200 and nothing
        return
    assert reader.complete()
    assert reader.closing() == b""
    assert reader.finish_reason


@pytest.mark.parametrize("capture", RECORDED, ids=str)
def test_the_learned_shape_sees_the_same_content_as_parsing_every_event(capture: captures.Capture) -> None:
    fast = READERS[capture.path]()
    for chunk in capture.chunks:
        events = Splitter().feed(chunk)
        slow = [READERS[capture.path]() for _ in events]
        expected = False
        for reader, event in zip(slow, events, strict=True):
            reader.feed(event)
            expected = expected or reader.content
        fast.content = False
        fast.feed(chunk)
        assert fast.content is expected, chunk


def chunk(delta: dict[str, object], finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    body = {
        "id": "c1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
        **more,
    }
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
USAGE = (
    b'data: {"id":"c1","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'
)


@settings(max_examples=300, derandomize=True)
@given(st.lists(st.text(), max_size=8))
def test_any_text_passes_unchanged_and_is_content_exactly_when_not_empty(texts: list[str]) -> None:
    reader = ChatStream()
    reader.feed(chunk({"content": "learn this shape"}))
    for text in texts:
        event = chunk({"content": text})
        reader.content = False
        assert reader.feed(event) == event
        assert reader.content is bool(text)


def test_a_quote_in_the_text_cannot_smuggle_members_past_the_learned_shape() -> None:
    reader = ChatStream()
    reader.feed(chunk({"content": "a"}))
    head, tail = chunk({"content": "MARK"}).split(b"MARK")
    # An event that starts and ends as learned but finishes the choice in between.
    reader.feed(head + b'x"},"finish_reason":"stop","logprobs":{"content":"' + tail)
    reader.content = False
    event = head + b'","reasoning":"' + tail
    assert reader.feed(event) == event  # parsed: content is empty here
    assert reader.content is False


def test_an_error_behind_content_in_one_read_is_seen() -> None:
    reader = ChatStream()
    first = chunk({"content": "a"})
    reader.feed(first)
    error = b'data: {"error":{"message":"dead","code":500}}\n\n'
    assert reader.feed(first + error + DONE) == first
    assert reader.error == {"error": {"message": "dead", "code": 500}}
    assert not reader.ended


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error":{"message":"x"}}\n\n',
        b'data: {"error":"just text"}\n\n',
        b'data: {"object":"error","message":"x","code":400}\n\n',
        b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"x"}}\n\n',
        b'event: error\ndata: {"type":"error","code":"server_error","message":"x","sequence_number":3}\n\n',
        b'data: {"type":"error","message":"x"}\n\n',
    ],
)
@pytest.mark.parametrize("reader", READERS.values())
def test_error_events_of_every_dialect_are_kept_from_the_client(
    event: bytes, reader: type[StreamReader]
) -> None:
    stream = reader()
    assert stream.feed(event) == b""
    assert stream.error is not None


def test_abort_is_not_an_end() -> None:
    reader = ChatStream()
    out = run(reader, [chunk({"content": "a"}), chunk({"content": " b"}, "abort"), DONE])
    assert out == chunk({"content": "a"})
    assert reader.aborted
    assert not reader.complete()


def test_done_without_finish_reason_is_held_back_and_not_whole() -> None:
    reader = ChatStream()
    assert run(reader, [chunk({"content": "a"}), DONE]) == chunk({"content": "a"})
    assert reader.ended
    assert not reader.complete()


@pytest.mark.parametrize("delta", [{"stop_reason": None, "stop_sequence": None}, {}, None])
def test_a_message_that_stops_without_a_stop_reason_was_given_up(delta: object) -> None:
    """vLLM's SIGTERM as Anthropic's messages: no "abort" there, but message_stop all the same."""
    events = [
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","usage":{}}}\n\n',
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n',
        b'event: message_delta\ndata: {"type":"message_delta","delta":%b}\n\n' % json.dumps(delta).encode(),
    ]
    reader = MessagesStream()
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    assert run(reader, [*events, stop]) == b"".join(events)
    assert reader.ended
    assert reader.notable
    assert not reader.complete()


def test_a_missing_done_is_mended_after_a_finish_reason() -> None:
    reader = ChatStream()
    run(reader, [chunk({"content": "a"}), chunk({}, "stop")])
    assert reader.complete()
    assert reader.closing() == DONE


def test_every_choice_must_finish() -> None:
    two = [
        b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":1,"delta":{"content":"b"},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    ]
    reader = ChatStream()
    run(reader, two)
    assert not reader.complete()
    reader.feed(b'data: {"choices":[{"index":1,"delta":{},"finish_reason":"length"}]}\n\n')
    assert reader.complete()


def test_usage_the_client_did_not_ask_for_is_taken_out_and_still_counted() -> None:
    reader = ChatStream(hide_usage=True)
    out = run(reader, [chunk({"content": "a"}), chunk({}, "stop"), USAGE, DONE])
    assert out == chunk({"content": "a"}) + chunk({}, "stop") + DONE
    assert read_usage(reader.usage) == Usage(3, 2, None)


def test_the_public_name_replaces_the_backends_in_every_event() -> None:
    events = [chunk({"content": text}) for text in ("a", "b", 'c "model":"m"', "d")] + [
        chunk({}, "stop"),
        DONE,
    ]
    reader = ChatStream((b"m", b"public/name"))
    out = run(reader, events)
    for event in Splitter().feed(out):
        data = fields(event)[1]
        assert data is not None
        assert data == b"[DONE]" or json.loads(data)["model"] == "public/name"
    assert b'c \\"model\\":\\"m\\"' in out


@pytest.mark.parametrize(
    "data", [b"data: {\n\n", b"data: 7\n\n", b"data: []\n\n", b'data: {"choices":[7]}\n\n', b"data: {}\n\n"]
)
def test_what_is_not_a_chunk_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedStream):
        ChatStream().feed(data)


ODD: tuple[object, ...] = (None, True, 0, -1, 1.5, "", "x", [], [1], [[1]], [None], [{}], {}, {"a": 1}, 2**70)
SPOKEN: dict[type[StreamReader], list[dict]] = {
    ChatStream: [
        {
            "id": "c",
            "choices": [{"index": 0, "delta": {"content": "x", "tool_calls": None}, "finish_reason": None}],
            "usage": None,
        },
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ],
    CompletionsStream: [{"id": "c", "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}],
    MessagesStream: [
        {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 1}}},
        {"type": "content_block_start", "content_block": {"type": "text"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ],
    ResponsesStream: [
        {"type": "response.created", "sequence_number": 0, "response": {"id": "r"}},
        {"type": "response.output_text.delta", "delta": "x", "sequence_number": 1},
        {"type": "response.completed", "response": {"id": "r", "status": "completed", "usage": {}}},
    ],
}


def with_odd_members(value: object) -> list[object]:
    """`value` with one member, at any depth, replaced by each of ODD."""
    out: list[object] = list(ODD)
    if isinstance(value, dict):
        out += [{**value, key: odd} for key in value for odd in with_odd_members(value[key])]
    elif isinstance(value, list):
        out += [[odd] for odd in with_odd_members(value[0])]
    return out


@pytest.mark.parametrize("kind", SPOKEN)
def test_a_member_of_any_type_is_read_or_malformed(kind: type[StreamReader]) -> None:
    """Nothing else is raised, and what is kept of the answer can be recorded."""
    events = SPOKEN[kind]
    for place, event in enumerate(events):
        for odd in with_odd_members(event):
            reader = kind()
            try:
                for said in (*events[:place], odd, *events[place:]):
                    reader.feed(b"data: %b\n\n" % json.dumps(said).encode())
            except MalformedStream:
                continue
            assert reader.finish_reason is None or isinstance(reader.finish_reason, str)
            assert reader.response_id is None or isinstance(reader.response_id, str)
            read_usage(reader.usage)
            reader.complete()


def test_lone_surrogates_and_huge_numbers_are_not_malformed() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83d"},"finish_reason":null}],"x":NaN}\n\n'
    reader = ChatStream()
    assert reader.feed(event) == event
    assert reader.content


def test_comments_pass_and_are_no_events() -> None:
    reader = ChatStream()
    assert reader.feed(b": ping\n\n") == b": ping\n\n"
    assert reader.events == 0


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}, Usage(9, 4, None)),
        (
            {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}},
            Usage(9, 4, 8),
        ),
        ({"prompt_tokens": 9, "total_tokens": 9}, Usage(9, None, None)),
        ({"input_tokens": 9, "output_tokens": 4, "cache_read_input_tokens": 5}, Usage(14, 4, 5)),
        (
            {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 5}},
            Usage(9, 4, 5),
        ),
        ({"prompt_tokens": True, "completion_tokens": -1, "total_tokens": 1}, Usage()),
        (None, Usage()),
        ("many", Usage()),
    ],
)
def test_usage_of_every_dialect(usage: object, expected: Usage) -> None:
    assert read_usage(usage) == expected


def test_whole_answers_say_how_they_ended() -> None:
    body = b'{"id":"c","choices":[{"finish_reason":"stop"},{"finish_reason":"abort"}],"usage":{"prompt_tokens":1}}'
    answer = read_answer(body)
    assert (answer.finish_reason, answer.id, answer.aborted) == ("stop", "c", True)
    assert read_answer(b"not json").finish_reason is None
    assert read_answer(b'{"object":"response","status":"incomplete","id":"r"}').finish_reason == "incomplete"
    assert read_answer(b'{"type":"message","stop_reason":"end_turn"}').finish_reason == "end_turn"


@pytest.mark.parametrize(
    ("body", "aborted"),
    [
        (b'{"type":"message","stop_reason":null}', True),
        (b'{"type":"message","content":[]}', True),
        (b'{"type":"message","stop_reason":"max_tokens"}', False),
        (b'{"input_tokens":24}', False),  # counted tokens are no message
        (b'{"object":"response","status":"completed"}', False),
        (b'{"object":"list","data":[]}', False),
    ],
)
def test_a_whole_message_without_a_stop_reason_was_given_up(body: bytes, aborted: bool) -> None:
    assert read_answer(body).aborted is aborted
