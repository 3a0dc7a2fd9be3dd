"""A broken answer goes on elsewhere: what is kept of it, what may go on, and that the client has every character once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.body import scan_object
from proxy.wire.chatdelta import write_delta
from proxy.wire.coerce import Toolset
from proxy.wire.continuation import DONE, MAX_KEPT, Said, Transcript
from proxy.wire.continuationskip import Differs, Skip, reach_json, reach_text
from proxy.wire.continuationstream import ContinuedStream, ContinuedText, Legs
from proxy.wire.continuationterms import Terms, read_terms
from proxy.wire.errors import Api
from proxy.wire.streams import MalformedStream
from proxy.wire.toolcalls import ToolChoice, ToolEngine
from proxy.wire.toolevents import Content, Event, Pass

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
HEAD = {"id": "first", "object": "chat.completion.chunk", "created": 7, "model": "public"}


def new_engine(thinks: bool, tools: Sequence[object] = (WEATHER,)) -> ToolEngine:
    ids = iter(f"call_{number}" for number in range(99))
    engine = ToolEngine(Toolset(list(tools)), ToolChoice(), lambda: next(ids), starts_thinking=thinks)
    engine.armed = True
    return engine


def no_tools(thinks: bool) -> ToolEngine:
    return new_engine(thinks, ())


def events_of(engine: ToolEngine, text: str) -> list[Event]:
    found = engine.content(text)
    return [Content(text)] if isinstance(found, Pass) else found


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({**HEAD, "choices": [choice]}, ensure_ascii=False).encode()


def payloads(out: bytes) -> Iterator[dict[str, Any]]:
    for event in out.split(b"\n\n"):
        if event.startswith(b"data: {"):
            yield json.loads(event[6:])


def heard(*outs: bytes) -> Said:
    said = Said()
    for payload in payloads(b"".join(outs)):
        said.add(payload)
    return said


def told(said: Said) -> tuple[str, str, list[tuple[str, Any]]]:
    """What a client makes of it."""
    calls = [(call.name, json.loads(call.arguments)) for _, call in sorted(said.calls.items())]
    return said.reasoning.strip(), said.content.strip(), calls


def completion(text: str, finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({"id": "second", "choices": [choice], **more}).encode()


def legs(said: Said, raw: str, *, thinks: bool = True, shows_usage: bool = False) -> Legs:
    return Legs(said, raw, 100, 20, thinks, shows_usage)


# -- skipping ------------------------------------------------------------------------------------------------


@given(st.text(), st.data())
def test_what_came_again_is_skipped_and_the_rest_is_not(text: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    step = data.draw(st.integers(1, 7))
    for reach in (reach_text, reach_json):
        skip = Skip(text[:cut], reach)
        out = "".join(skip.feed(text[at : at + step]) for at in range(0, len(text), step))
        assert out == text[cut:]
        assert skip.over


@given(st.lists(st.sampled_from(["a", "b", " ", "\n"]), max_size=12), st.data())
def test_blanks_of_another_parser_are_no_other_text(parts: list[str], data: st.DataObject) -> None:
    words = "".join(parts)
    had = words.replace(" ", data.draw(st.sampled_from(["", "\n\n", "\t"])))
    assert Skip(had, reach_text).feed(words + "END") == "END" or words.endswith((" ", "\n"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(JSON, st.data())
def test_json_goes_on_behind_a_prefix_that_was_spelled_otherwise(value: object, data: st.DataObject) -> None:
    spelled = data.draw(
        st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])
    )
    had, again = json.dumps(value, **spelled), json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    cut = data.draw(st.integers(0, len(had)))
    skip = Skip(had[:cut], reach_json)
    step = data.draw(st.integers(1, 9))
    try:
        rest = "".join(skip.feed(again[at : at + step]) for at in range(0, len(again), step))
    except Differs:  # torn inside an escape, or inside a character that the other spells in one piece
        assert "\\" in had[:cut]
    else:
        assert json.loads(had[:cut] + rest) == value


@pytest.mark.parametrize(
    ("had", "again"),
    [('{"a": 1', '{"a": 2}'), ('{"a": "x', '{"a": "y"}'), ('{"a"', '{"b": 1}'), (r'"\ud83d', '"😀"')],
)
def test_other_arguments_are_not_gone_on_with(had: str, again: str) -> None:
    with pytest.raises(Differs):
        Skip(had, reach_json).feed(again)


def test_a_torn_escape_is_gone_on_with() -> None:
    assert Skip(r'{"a": "\u00', reach_json).feed(r'{"a":"\u00e4"}') == 'e4"}'
    assert Skip('{"a": "\\', reach_json).feed(r'{"a":"\n"}') == 'n"}'


# -- the transcript ------------------------------------------------------------------------------------------


def test_ids_are_kept_and_nobody_else_sees_them() -> None:
    transcript = Transcript(shows_usage=True)
    role = (
        b'data: {"id":"a","choices":[{"index":0,"delta":{"role":"assistant"},"finish_reason":null}],%b}\n\n'
    )
    asked = role % b'"prompt_token_ids":[1,22,3],"prompt_text":null'
    assert transcript.strip(asked) == role % b'"prompt_token_ids":null,"prompt_text":null'
    text = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":null,"token_ids":%b}]}\n\n'
    assert transcript.strip(text % b"[7, 8]") == text % b"null"
    assert (transcript.prompt_ids.tolist(), transcript.ids.tolist()) == ([1, 22, 3], [7, 8])
    assert transcript.usable
    assert transcript.strip(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"
    assert transcript.usable


@given(st.lists(st.integers(0, 200_000), max_size=4), st.sampled_from([(",", ":"), (", ", ": ")]), st.data())
def test_ids_are_taken_however_they_are_spelled(
    ids: list[int], separators: tuple[str, str], data: st.DataObject
) -> None:
    finish = data.draw(st.sampled_from([None, "stop"]))
    choice = {"delta": {"content": "x"}, "finish_reason": finish, "token_ids": ids}
    event = b"data: %b\n\n" % json.dumps({"choices": [choice]}, separators=separators).encode()
    transcript = Transcript(shows_usage=False)
    transcript.prompt_ids.append(1)
    stripped = transcript.strip(event)
    assert json.loads(stripped[6:]) == {"choices": [{**choice, "token_ids": None}]}
    assert (transcript.ids.tolist(), transcript.finish, transcript.usable) == (ids, finish, True)


@pytest.mark.parametrize("odd", [b"[1.5]", b'["x"]', b"[1", b"{}", b"[1,,2]", b"[-1]"])
def test_ids_that_are_none_make_no_noise(odd: bytes) -> None:
    transcript = Transcript(shows_usage=False)
    event = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":null,"token_ids":%b}]}\n\n' % odd
    transcript.strip(event)
    assert not transcript.usable


@given(st.text())
def test_what_a_model_writes_about_ids_is_left_alone(text: str) -> None:
    said = json.dumps(
        {"choices": [{"delta": {"content": f',"token_ids":[1]{text},"prompt_token_ids":[2],'}}]}
    )
    event = b"data: %b\n\n" % said.encode()
    transcript = Transcript(shows_usage=True)
    assert transcript.strip(event) == event
    assert not transcript.ids
    assert not transcript.prompt_ids


def test_the_prompts_ids_may_come_with_the_first_tokens() -> None:
    """As /v1/completions does."""
    transcript = Transcript(shows_usage=True)
    event = (
        b'data: {"choices":[{"text":"x","finish_reason":null,"prompt_token_ids":[4,5],"token_ids":[6]}]}\n\n'
    )
    transcript.strip(event)
    assert (transcript.prompt_ids.tolist(), transcript.ids.tolist()) == ([4, 5], [6])


@pytest.mark.parametrize(
    "refused", [b'data: {"choices":[{"del\n\n', b'data: {"error":{"message":"x"}}\n\n', b"data: 7\n\n"]
)
def test_what_comes_behind_an_event_that_is_refused_is_not_part_of_the_answer(refused: bytes) -> None:
    transcript = Transcript(shows_usage=True)
    transcript.prompt_ids.append(1)
    text = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":%b,"token_ids":[%d]}]}\n\n'
    transcript.strip(text % (b"null", 5))
    transcript.strip(refused)
    transcript.strip(text % (b"null", 6))
    transcript.strip(text % (b'"stop"', 7))
    assert (transcript.ids.tolist(), transcript.finish, transcript.usable) == ([5], None, True)


def test_behind_an_abort_nothing_reaches_anybody() -> None:
    """vLLM goes on with usage, of the part that it generated, and the end mark."""
    transcript = Transcript(shows_usage=True)
    abort = b'data: {"choices":[{"delta":{},"finish_reason":"abort","token_ids":[5]}]}\n\n'
    assert b"abort" in transcript.strip(abort)
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
    assert [transcript.strip(event) for event in (usage, DONE)] == [b"", b""]
    transcript.next_leg([5])
    assert transcript.strip(usage) == usage


def test_text_without_ids_makes_an_answer_that_cannot_go_on() -> None:
    transcript = Transcript(shows_usage=True)
    transcript.prompt_ids.append(1)
    transcript.strip(b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n')
    transcript.strip(b": comment\n\n")
    assert transcript.usable
    transcript.strip(b'data: {"choices":[{"delta":{"content":"x"},"token_ids":null}]}\n\n')
    assert not transcript.usable


def test_what_was_sent_is_read_in_batches_however_it_is_cut() -> None:
    transcript = Transcript(shows_usage=True)
    words = [f"w{number} " for number in range(3000)]
    data = b"".join(chunk({"content": word}) for word in words) + b": keep-alive\n\n" + DONE
    assert len(data) > 2 * MAX_KEPT
    for at in range(0, len(data), 1000):
        transcript.sent(data[at : at + 1000])
    assert transcript.said.content == "".join(words)
    assert transcript.said.template == HEAD


# -- terms ---------------------------------------------------------------------------------------------------


def terms(more: dict[str, Any] | None = None, api: Api = Api.CHAT) -> Terms | str:
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}], **(more or {})}
    return read_terms(api, scan_object(json.dumps(body).encode()), shows_usage=False)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"seed": 0}, "seed"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools"),
        ({"tools": [WEATHER], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"some_new_knob": 1}, "some_new_knob"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "media"),
    ],
)
def test_what_cannot_be_continued_is_named(more: dict[str, Any], reason: str) -> None:
    assert terms(more) == reason


@pytest.mark.parametrize(
    "more",
    [
        {"n": 1, "seed": None, "presence_penalty": 0, "frequency_penalty": 0.0},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": False}}], "tool_choice": "auto"},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": False}},
        {"response_format": {"type": "text"}},
        {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
    ],
)
def test_what_says_nothing_special_can_be_continued(more: dict[str, Any]) -> None:
    assert isinstance(terms(more), Terms)


def test_the_continuing_request_repeats_how_tokens_are_chosen() -> None:
    read = terms({"temperature": 0.7, "stop": ["END"], "max_tokens": 50, "max_completion_tokens": 40})
    assert isinstance(read, Terms)
    body = json.loads(read.body("served", [1, 2], [3]))
    assert body == {
        "model": "served",
        "prompt": [1, 2, 3],
        "max_tokens": 39,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "skip_special_tokens": False,
        "temperature": 0.7,
        "stop": ["END"],
    }
    unlimited = terms()
    assert isinstance(unlimited, Terms)
    assert json.loads(unlimited.body(None, [1], []))["max_tokens"] is None


def test_the_defaults_and_batches_of_completions() -> None:
    read = terms({"prompt": [1, 2]}, Api.COMPLETIONS)
    assert isinstance(read, Terms)
    assert read.left(10) == 6
    assert terms({"prompt": ["a", "b"]}, Api.COMPLETIONS) == "prompt"
    assert terms(api=Api.RESPONSES) == "endpoint"


def test_a_stop_string_may_span_the_cut() -> None:
    read = terms({"stop": ["END", "\n\n"]})
    assert isinstance(read, Terms)
    assert read.cut_by_stop("the E")
    assert read.cut_by_stop("a\n")
    assert not read.cut_by_stop("the end")
    assert not read.cut_by_stop("")


# -- telling the rest ----------------------------------------------------------------------------------------

WORDS = st.text(st.sampled_from("ab é😀\n.<{\"'\\`"), max_size=12)
ANSWERS = st.builds(
    lambda thought, lead, text, calls, tail: (
        f"{thought}\n</think>\n\n{lead}{text}" + "".join(f"\n{CALL.format(call)}" for call in calls) + tail
    ),
    st.text(st.sampled_from("ab é😀\n."), max_size=12),
    st.sampled_from(["", "So: "]),
    st.text(st.sampled_from("ab é😀\n."), max_size=12),
    st.lists(WORDS.filter(lambda text: "<" not in text), max_size=2),
    st.sampled_from(["", "\n"]),
)


def whole(raw: str) -> Said:
    engine = new_engine(True)
    out = [chunk(write_delta(events_of(engine, raw), ("reasoning",)))]
    return heard(*out, chunk(write_delta(engine.finish("stop"), ("reasoning",))))


@settings(max_examples=300, deadline=None)
@given(ANSWERS, st.data())
def test_an_answer_cut_anywhere_any_number_of_times_arrives_whole_and_once(
    raw: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), min_size=1, max_size=3)))
    step = data.draw(st.integers(1, 9))
    engine = new_engine(True)
    out = [chunk({"role": "assistant", "content": ""})]
    for at in range(0, cuts[0], step):
        said = events_of(engine, raw[at : min(at + step, cuts[0])])
        out.append(chunk(write_delta(said, ("reasoning",))))
    for cut, end in zip(cuts, [*cuts[1:], len(raw)], strict=True):
        reader = ContinuedStream(legs(heard(*out), raw[:cut]), new_engine)
        out += [reader.feed(completion(raw[at : min(at + step, end)])) for at in range(cut, end, step)]
    out.append(reader.feed(completion("", "stop")))
    out.append(reader.feed(DONE))
    assert reader.complete()
    assert told(heard(*out)) == told(whole(raw))
    assert {payload["id"] for payload in payloads(b"".join(out))} == {"first"}
    assert b"".join(out).endswith(DONE)


@pytest.mark.parametrize("arguments", ['{"city": "Par', '{"city":"Par', '{ "city" : "\\u0050ar', "{", ""])
def test_a_call_whose_beginning_another_parser_spelled_goes_on(arguments: str) -> None:
    raw = CALL.format("Paris")
    call = {"index": 0, "id": "call_x", "type": "function", "function": {"name": "weather"}}
    first = chunk({"tool_calls": [call]})
    first += chunk({"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]})
    cut = raw.index("ris")
    reader = ContinuedStream(legs(heard(first), raw[:cut], thinks=False), new_engine)
    out = reader.feed(completion(raw[cut:], "stop"))
    assert told(heard(first, out)) == ("", "", [("weather", {"city": "Paris", "days": 3})])
    assert b'"name"' not in out, "the call began once"
    assert reader.finish_reason == "tool_calls"
    assert [call.complete for call in reader.calls] == [True]


def test_thinking_goes_on_as_thinking_under_the_name_it_had() -> None:
    first = chunk({"reasoning_content": "Let me "})
    reader = ContinuedStream(legs(heard(first), "Let me "), no_tools)
    out = reader.feed(completion("see.\n</think>\n\nDone")) + reader.feed(completion(".", "stop"))
    deltas = [payload["choices"][0]["delta"] for payload in payloads(out)]
    assert deltas[0]["reasoning_content"] == "see.\n"
    assert "".join(delta.get("content", "") for delta in deltas).strip() == "Done."


@pytest.mark.parametrize("lead", ["\n\n", "", "Hello "])
def test_an_answer_without_thinking_is_not_taken_for_thinking(lead: str) -> None:
    first = chunk({"content": lead})
    reader = ContinuedStream(legs(heard(first), lead, thinks=False), no_tools)
    out = reader.feed(completion("you", "stop"))
    assert told(heard(first, out)) == ("", (lead + "you").strip(), [])


def test_tags_that_the_client_got_as_text_stay_text() -> None:
    first = chunk({"content": "<think>hm</think> well"})
    reader = ContinuedStream(legs(heard(first), "<think>hm</think> well", thinks=False), no_tools)
    out = reader.feed(completion(", yes", "stop"))
    assert heard(first, out).content == "<think>hm</think> well, yes"


def test_where_the_clients_part_tells_nothing_the_prompt_does() -> None:
    first = chunk({"role": "assistant", "content": ""})
    for thinks in (True, False):
        reader = ContinuedStream(legs(heard(first), "", thinks=thinks), no_tools)
        out = heard(first, reader.feed(completion("word")))
        assert (out.reasoning, out.content) == (("word", "") if thinks else ("", "word"))


def test_another_answer_is_refused_before_anything_is_asked_for() -> None:
    for first in (chunk({"content": "Hello"}), chunk({"reasoning": "Hello"})):
        with pytest.raises(Differs):
            ContinuedStream(legs(heard(first), "Goodbye"), no_tools)


def test_an_answer_that_ends_before_the_clients_part_is_no_answer() -> None:
    first = chunk({"reasoning": "Hello"})
    reader = ContinuedStream(legs(heard(first), ""), no_tools)
    with pytest.raises(MalformedStream):
        reader.feed(completion("Hel", "stop"))


def test_usage_is_the_prompt_and_all_legs() -> None:
    first = chunk({"content": "a"})
    last = completion(
        "", choices=[], usage={"prompt_tokens": 120, "completion_tokens": 5, "total_tokens": 125}
    )
    total = {"prompt_tokens": 100, "completion_tokens": 25, "total_tokens": 125}
    for shows in (True, False):
        reader = ContinuedStream(legs(heard(first), "a", thinks=False, shows_usage=shows), no_tools)
        reader.feed(completion("b", "length"))
        out = list(payloads(reader.feed(last)))
        assert out == ([{**HEAD, "choices": [], "usage": total}] if shows else [])
        assert reader.usage == total
        assert reader.finish_reason == "length"


def test_usage_that_a_backend_owes_is_counted() -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    for shows in (True, False):
        transcript = Transcript(shows_usage=shows)
        transcript.prompt_ids.extend([1, 2])
        transcript.ids.extend([3, 4, 5])
        transcript.sent(chunk({"content": "a"}, "stop"))
        out = transcript.closing(b"held" + DONE)
        assert out.startswith(b"held")
        assert out.endswith(DONE)
        assert list(payloads(out.removeprefix(b"held"))) == (
            [{**HEAD, "choices": [], "usage": usage}] if shows else []
        )
        told = b'data: {"choices":[],"usage":{"prompt_tokens":2}}\n\n'
        transcript.sent(told)
        assert transcript.closing(DONE) == DONE


def test_a_leg_that_is_given_up_is_a_break_again() -> None:
    first = chunk({"content": "a"})
    reader = ContinuedStream(legs(heard(first), "a", thinks=False), no_tools)
    assert reader.feed(completion("", "abort")) == b""
    assert reader.aborted
    assert not reader.complete()


def test_a_completion_goes_on_as_text() -> None:
    event = {"id": "first", "object": "text_completion", "choices": [{"index": 0, "text": "one "}]}
    first = b"data: %b\n\n" % json.dumps(event).encode()
    reader = ContinuedText(legs(heard(first), "one t", thinks=False), no_tools)
    out = reader.feed(completion("wo", "stop"))
    (payload,) = payloads(out)
    assert payload["id"] == "first"
    assert payload["choices"] == [{"index": 0, "text": "two", "logprobs": None, "finish_reason": "stop"}]
