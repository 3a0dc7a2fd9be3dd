"""The rest of a broken answer by its text: the request that asks for it, and that the client has every character once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.body import scan_object
from proxy.wire.coerce import Toolset
from proxy.wire.continuation import Said
from proxy.wire.continuationtext import Seam, TextLeg, TextLegCompletion, not_text, reach_blanks, text_body
from proxy.wire.errors import Api
from proxy.wire.streams import MalformedStream
from proxy.wire.toolcalls import ToolChoice, ToolEngine
from tests.wire.test_continuation import CALL, HEAD, WEATHER, chunk, heard, payloads, told

GO_ON: dict[str, object] = {"continue_final_message": True}
DONE = b"data: [DONE]\n\n"


def engine(exact: bool) -> ToolEngine:
    ids = iter(f"call_{number}" for number in range(99))
    return ToolEngine(Toolset([WEATHER]), ToolChoice(), lambda: next(ids), exact=exact)


def leg(said: Said, *, echoes: bool = False, shows_usage: bool = False) -> TextLeg:
    return TextLeg(Seam(said, 20, echoes=echoes, shows_usage=shows_usage), engine, ("reasoning",))


def other(delta: dict[str, Any], finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({"id": "second", "choices": [choice], **more}).encode()


def pieces(text: str, step: int) -> Iterator[str]:
    return (text[at : at + step] for at in range(0, len(text), step))


WORDS = st.text(st.sampled_from('ab \n"é🙂\\'), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(WORDS, st.data(), st.booleans(), st.sampled_from(["content", "reasoning", "reasoning_content"]))
def test_whatever_the_text_and_the_cut_every_character_is_there_once(
    text: str, data: st.DataObject, echoes: bool, key: str
) -> None:
    cut = data.draw(st.integers(0, len(text)))
    step = data.draw(st.integers(1, 7))
    before = heard(chunk({"content": text[:cut]}))
    if not before.content.strip():
        return
    key = "content" if echoes else key
    reader = leg(before, echoes=echoes)
    begin = 0 if echoes else len(text[:cut].rstrip())
    out = b"".join(reader.feed(other({key: piece})) for piece in pieces(text[begin:], step))
    out += reader.feed(other({}, "stop")) + reader.feed(DONE)
    assert heard(chunk({"content": text[:cut]}), out).content == text
    assert {payload["id"] for payload in payloads(out)} <= {HEAD["id"]}
    assert reader.complete()
    assert out.endswith(DONE)


@pytest.mark.parametrize("key", ["content", "reasoning"])
@pytest.mark.parametrize("step", [1, 5, 1000])
def test_a_call_behind_the_cut_is_a_call_whoever_reads_it(key: str, step: int) -> None:
    before = heard(chunk({"reasoning": "hm"}), chunk({"content": "I look."}))
    reader = leg(before)
    raw = "\n\n" + CALL.format("Oslo")
    out = b"".join(reader.feed(other({key: piece})) for piece in pieces(raw, step))
    out += reader.feed(other({}, "stop")) + reader.feed(DONE)
    said = heard(chunk({"reasoning": "hm"}), chunk({"content": "I look."}), out)
    assert told(said) == ("hm", "I look.", [("weather", {"city": "Oslo", "days": 3})])
    assert [payload["choices"][0]["finish_reason"] for payload in payloads(out)][-1] == "tool_calls"


def test_a_call_that_the_backend_parsed_passes() -> None:
    reader = leg(heard(chunk({"content": "I look."})))
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    call = {"index": 0, "id": "x", "type": "function", "function": function}
    out = (
        reader.feed(other({"tool_calls": [call]})) + reader.feed(other({}, "tool_calls")) + reader.feed(DONE)
    )
    assert told(heard(out))[2] == [("weather", {"city": "Oslo"})]


def test_usage_is_the_prompts_and_all_legs_and_told_once() -> None:
    before = heard(chunk({"content": "Hello"}))
    usage = {"prompt_tokens": 120, "completion_tokens": 5, "total_tokens": 125, "prompt_tokens_details": None}
    counted = {"prompt_tokens": 100, "completion_tokens": 25, "total_tokens": 125}
    for shows in (True, False):
        reader = leg(before, shows_usage=shows)
        out = reader.feed(other({"content": " you"}, "stop", usage=usage))
        last = {"id": "second", "choices": [], "usage": usage}
        out += reader.feed(b"data: %b\n\n" % json.dumps(last).encode()) + reader.feed(DONE)
        assert reader.usage == counted
        assert [p["usage"] for p in payloads(out) if p.get("usage")] == ([counted] if shows else [])
        assert out.count(b"second") == 0


@pytest.mark.parametrize("rest", [[{"content": "Good"}], [{"content": "Hel"}, {}], [{"reasoning": "anew"}]])
def test_a_backend_that_was_to_repeat_the_beginning_and_says_something_else_is_no_continuation(
    rest: list[dict[str, Any]],
) -> None:
    reader = leg(heard(chunk({"content": "Hello"})), echoes=True)
    with pytest.raises(MalformedStream):
        reader.feed(b"".join(other(delta, None if delta else "stop") for delta in rest))


def test_a_completion_goes_on() -> None:
    def text(what: str, finish: str | None = None) -> bytes:
        choice = {"index": 0, "text": what, "finish_reason": finish}
        return b"data: %b\n\n" % json.dumps({"id": "second", "choices": [choice]}).encode()

    before = Said()
    before.add({"id": "first", "choices": [{"index": 0, "text": "one two "}]})
    reader = TextLegCompletion(Seam(before, 2, echoes=False, shows_usage=False))
    out = reader.feed(text(" three")) + reader.feed(text(" four", "stop")) + reader.feed(DONE)
    assert "".join(p["choices"][0]["text"] for p in payloads(out)) == "three four"
    assert {p["id"] for p in payloads(out)} == {"first"}
    assert reader.complete()


@settings(deadline=None)
@given(st.text(" \n", max_size=5), st.text(" \nx", max_size=7))
def test_blanks_that_come_again_are_skipped_and_nothing_else(had: str, again: str) -> None:
    at = reach_blanks(had, again)
    if at is None:
        assert had.startswith(again)
        assert len(again) < len(had)
    else:
        assert had[:at] == again[:at]
        assert at == min(len(had), len(again)) or had[at] != again[at]


# -- the request ---------------------------------------------------------------------------------------------------


def scan(**more: object) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "é\\ 1e400"}], "stream": True, **more}
    return scan_object(json.dumps(body).encode())


def test_the_continuing_request_is_the_clients_own_with_the_beginning_of_its_answer() -> None:
    said = heard(chunk({"reasoning": "hm\n"}), chunk({"content": "\n\nHello \n"}))
    asked = scan(max_tokens=50, top_k=20, x={"unknown": [1]})
    body = json.loads(text_body(Api.CHAT, asked, said, 30, GO_ON))
    last = {"role": "assistant", "content": "\n\nHello", "reasoning": "hm\n", "reasoning_content": "hm\n"}
    assert body == {
        **json.loads(asked.data),
        "messages": [{"role": "user", "content": "é\\ 1e400"}, last],
        "max_tokens": 30,
        "continue_final_message": True,
    }
    assert "max_tokens" not in json.loads(text_body(Api.CHAT, scan(), said, None, GO_ON))
    prompt = json.dumps({"prompt": "once ", "stream": True}).encode()
    body = json.loads(text_body(Api.COMPLETIONS, scan_object(prompt), heard_text("upon a "), 9, GO_ON))
    assert body == {"prompt": "once upon a", "stream": True, "max_tokens": 9}


def heard_text(text: str) -> Said:
    said = Said()
    said.add({"choices": [{"index": 0, "text": text}]})
    return said


@pytest.mark.parametrize(
    ("more", "deltas", "why"),
    [
        ({}, [{"content": "Hello"}], None),
        ({"add_generation_prompt": True}, [{"content": "Hello"}], None),
        ({}, [{"reasoning": "hm"}], "thinking"),
        ({}, [{"reasoning": "hm"}, {"content": "\n\n"}], "thinking"),
        ({}, [{"content": "a <think> b"}], "tags"),
        ({}, [{"content": "a </think> b"}], "tags"),
        ({}, [{"content": "a <tool_call"}], "tags"),
        ({}, [{"content": "a\ufffd"}], "torn"),
        ({}, [{"content": "a"}, {"tool_calls": [{"index": 0, "function": {"name": "x"}}]}], "call"),
        ({"chat_template": "x"}, [{"content": "a"}], "chat_template"),
        ({"add_generation_prompt": False}, [{"content": "a"}], "add_generation_prompt"),
        ({"messages": [{"role": "assistant", "content": "Hel"}]}, [{"content": "lo"}], "messages"),
        ({"messages": "hi"}, [{"content": "lo"}], "messages"),
    ],
)
def test_text_does_not_always_do(more: dict[str, Any], deltas: list[dict[str, Any]], why: str | None) -> None:
    assert not_text(Api.CHAT, scan(**more), heard(*map(chunk, deltas))) == why


def test_an_answer_that_is_over_does_not_go_on() -> None:
    assert not_text(Api.CHAT, scan(), heard(chunk({"content": "a"}, "stop"))) == "finished"


@pytest.mark.parametrize(("prompt", "why"), [("a", None), ([1, 2], "prompt"), (["a"], "prompt")])
def test_a_prompt_that_is_no_text_does_not_go_on_by_text(prompt: object, why: str | None) -> None:
    asked = scan_object(json.dumps({"prompt": prompt}).encode())
    assert not_text(Api.COMPLETIONS, asked, heard_text("b")) == why
