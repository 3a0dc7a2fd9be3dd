"""Chunks in, chunks out: what passes as it came, what is rebuilt, and when a reason is the last one."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from proxy.wire.chatdelta import ChatShape, ChatStream, repair_choice
from proxy.wire.coerce import Toolset
from proxy.wire.toolcalls import ToolChoice, ToolEngine
from proxy.wire.toolevents import PASS
from proxy.wire.toolrender import ToolFormat

PLAY = {"type": "object", "properties": {"song": {"type": "string"}, "volume": {"type": "integer"}}}
TOOLS = Toolset([{"type": "function", "function": {"name": "play", "parameters": PLAY}}])
XML = "<tool_call>\n<function=play>\n<parameter=song>\nA\n</parameter>\n</function>\n</tool_call>"


def engine(exact: bool = True, tools: Toolset = TOOLS, mode: str = "auto", **options: Any) -> ToolEngine:
    numbers = itertools.count()
    return ToolEngine(tools, ToolChoice(mode), lambda: f"new{next(numbers)}", exact=exact, **options)


def stream(shape: ChatShape | None = None, **options: Any) -> ChatStream:
    return ChatStream(lambda exact: engine(exact, **options), shape)


def chunk(delta: dict, reason: str | None = None, index: int = 0, **more: Any) -> dict:
    return {"id": "x", **more, "choices": [{"index": index, "delta": delta, "finish_reason": reason}]}


def call(arguments: str, **head: Any) -> dict:
    entry = {"index": 0, **head, "function": {"arguments": arguments}}
    if "id" in head:
        entry = {
            "index": 0,
            "id": head["id"],
            "type": "function",
            "function": {"name": "play", "arguments": arguments},
        }
    return {"tool_calls": [entry]}


def send(made: ChatStream, *chunks: dict) -> list[Any]:
    """Everything sent: the chunk's number where it leaves as it came, else the new chunk."""
    sent: list[Any] = []
    for number, one in enumerate(chunks):
        out = made.feed(one, number)
        sent += [number] if out is PASS else out
    return sent + made.close()


def test_usage_that_rides_on_an_empty_delta_behind_the_reason_leaves_with_the_reason():
    usage = {"total_tokens": 3}
    empty = chunk({"role": "assistant", "content": ""}, usage=usage)
    (first, last) = send(stream(), chunk({"content": "Hi"}), chunk({}, "stop"), empty)
    assert first == 0
    assert last == chunk({}, "stop", usage=usage)


def test_an_empty_delta_behind_the_reason_of_one_choice_does_not_end_another():
    made = stream()
    out = send(
        made,
        chunk({"content": "A"}),
        chunk({"content": "B"}, index=1),
        chunk({}, "stop"),
        chunk({}),
        chunk({"content": "C"}, index=1),
        chunk({}, "length", index=1),
    )
    assert out == [0, 1, 4, 2, 5]


def test_a_function_call_stays_where_no_tools_were_declared():
    legacy = [chunk({"function_call": {"name": "play", "arguments": "{}"}}), chunk({}, "function_call")]
    assert send(stream(tools=Toolset(None)), *legacy) == [0, 1]


RIGHT = [
    [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Hello"}),
        chunk({"content": " you."}, "stop"),
    ],
    [
        chunk({"content": "Use <b>"}),
        chunk({"content": " `x` < 3 and\n\n```\ncode\n```"}),
        chunk({}, "length"),
    ],
    [
        chunk({"reasoning": "Hm."}),
        chunk({"reasoning_content": " So."}),
        chunk({"content": "A"}),
        chunk({}, "stop"),
    ],
    [
        chunk({"role": "assistant", "content": None, **call("", id="c1")}),
        chunk(call('{"song": "')),
        chunk(call("A <tool_call> b")),
        chunk(call('", "volume": ')),
        chunk(call("3}")),
        chunk({}, "tool_calls"),
        {"id": "x", "choices": [], "usage": {"total_tokens": 3}},
    ],
    [chunk(call("{", id="c1")), chunk(call('"song":"A"')), chunk(call("}"), "tool_calls")],
    [
        chunk({"content": "Ok."}),
        chunk(call('{"song":"A","volume":-1.5e3}', id="c1")),
        chunk({"content": ""}, "tool_calls"),
    ],
]


@pytest.mark.parametrize("chunks", RIGHT)
def test_a_right_stream_leaves_as_the_chunks_that_came(chunks):
    assert send(stream(), *chunks) == list(range(len(chunks)))


@pytest.mark.parametrize("chunks", RIGHT[:3])
def test_without_tools_every_chunk_leaves_as_it_came(chunks):
    assert send(stream(tools=Toolset(None)), *chunks) == list(range(len(chunks)))


def test_without_tools_markup_is_text_and_a_reason_of_tool_calls_becomes_stop():
    sent = send(stream(tools=Toolset(None)), chunk({"content": XML}), chunk({}, "tool_calls"))
    assert sent[0] == 0
    assert sent[1]["choices"][0]["finish_reason"] == "stop"


def test_fields_of_a_rebuilt_chunk_that_are_not_ours_stay():
    (sent, _) = send(
        stream(), chunk({"content": XML, "refusal": "r"}, model="m", usage={"n": 1}), chunk({}, "stop")
    )
    delta = sent["choices"][0]["delta"]
    assert (sent["id"], sent["model"], sent["usage"], delta["refusal"]) == ("x", "m", {"n": 1}, "r")
    assert "content" not in delta
    assert delta["tool_calls"][0]["function"] == {"name": "play", "arguments": '{"song": "A"}'}


def test_a_chunk_that_says_nothing_any_more_is_not_sent():
    assert stream().feed(chunk({"content": "<tool_call>\n<func"}), 0) == []


def test_a_reason_counts_only_when_nothing_follows():
    sent = send(stream(), chunk({"content": "a"}, "stop"), chunk({"content": "b"}, "stop"), chunk({}, "stop"))
    assert sent[0]["choices"][0] == {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
    assert sent[1]["choices"][0] == {"index": 0, "delta": {"content": "b"}, "finish_reason": None}
    assert sent[2] == 2


def test_a_reason_waits_for_the_next_event_and_goes_before_it():
    made, usage = stream(), {"id": "x", "choices": [], "usage": {}}
    assert made.feed(chunk({"content": "a"}), 0) is PASS
    assert made.feed(chunk({}, "stop"), 1) == []
    assert made.feed(usage, 2) == [1, 2]
    assert made.close() == []


def test_choices_do_not_mix():
    made = stream()
    sent = send(
        made,
        chunk({"content": "<tool_call>\n<function=play>\n<parameter=song>\nA"}, index=0),
        chunk({"content": "text"}, index=1),
        chunk({"content": "\n</parameter>\n</function>\n</tool_call>"}, index=0),
        chunk({}, "stop", index=1),
        chunk({}, "stop", index=0),
    )
    reasons = {
        c["choices"][0]["index"]: c["choices"][0]["finish_reason"] for c in sent if isinstance(c, dict)
    }
    assert reasons[0] == "tool_calls"
    assert 1 in sent
    assert 3 in sent


def test_two_choices_in_one_chunk_are_each_put_right():
    both = {
        "id": "x",
        "choices": [chunk({"content": "hi"})["choices"][0], chunk({"content": XML}, index=1)["choices"][0]],
    }
    sent = send(stream(), both, chunk({}, "stop"), chunk({}, "stop", index=1))
    firsts = [c["choices"][0] for c in sent if isinstance(c, dict)]
    assert [c["index"] for c in firsts][:2] == [0, 1]
    assert firsts[0]["delta"] == {"content": "hi"}
    assert firsts[1]["delta"]["tool_calls"][0]["function"]["name"] == "play"


def test_a_stream_that_breaks_sends_what_is_held_and_makes_up_no_reason():
    made = stream()
    made.feed(chunk({"content": "a <tool"}), 0)
    (sent,) = made.cut()
    assert sent["choices"] == [{"index": 0, "delta": {"content": " <tool"}, "finish_reason": None}]
    made = stream()
    made.feed(chunk({"content": XML[:60]}), 0)
    made.cut()
    assert not made.choices[0].engine.calls[0].complete


@pytest.mark.parametrize(
    ("fields", "delta"),
    [
        ((), {"reasoning": "Hm."}),
        (("reasoning_content",), {"reasoning_content": "Hm."}),
        (("reasoning", "reasoning_content"), {"reasoning": "Hm.", "reasoning_content": "Hm."}),
    ],
)
def test_reasoning_leaves_under_the_names_that_are_wanted(fields, delta):
    made = stream(ChatShape(reasoning=fields))
    out = made.feed(chunk({"reasoning": "Hm."}), 0)
    assert out is PASS if not fields else out[0]["choices"][0]["delta"] == delta
    choice = {"message": {"role": "assistant", "reasoning": "Hm.", "content": "a"}, "finish_reason": "stop"}
    message = repair_choice(engine(), choice, ChatShape(reasoning=fields))["message"]
    assert {key: message.get(key) for key in delta} == delta


def test_a_right_message_is_the_very_same_object():
    entry = {"id": "c", "type": "function", "function": {"name": "play", "arguments": '{"song":"A"}'}}
    for message, reason in (
        ({"role": "assistant", "content": "Hi <b>.", "tool_calls": []}, "stop"),
        ({"role": "assistant", "content": None, "tool_calls": [entry], "reasoning": "x"}, "tool_calls"),
    ):
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        assert repair_choice(engine(), choice) is choice


def test_a_message_with_calls_in_its_text_has_null_for_content():
    made = repair_choice(
        engine(), {"message": {"role": "assistant", "content": XML}, "finish_reason": "stop"}
    )
    assert made["message"]["content"] is None
    assert made["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_thinking_without_a_reasoning_parser_is_told_from_the_answer(cut):
    text = f"I could {XML}, or not.\n</think>\n\nFine.\n\n{XML}"
    made = stream(starts_thinking=True)
    pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
    sent = send(made, *(chunk({"content": piece}) for piece in pieces), chunk({}, "stop"))
    deltas = [c["choices"][0]["delta"] if isinstance(c, dict) else {"content": pieces[c]} for c in sent]
    assert "".join(d.get("reasoning_content", "") for d in deltas).strip() == f"I could {XML}, or not."
    assert "".join(d.get("content", "") for d in deltas).strip() == "Fine."
    assert [call.arguments for call in made.choices[0].engine.calls] == ['{"song": "A"}']


def test_an_answer_that_came_as_thinking_is_content_when_thinking_was_off():
    made = stream(reasoning_is_content=True)
    sent = send(made, chunk({"reasoning": "Hello "}), chunk({"reasoning": XML}), chunk({}, "stop"))
    assert sent[0]["choices"][0]["delta"] == {"content": "Hello "}
    assert sent[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (ToolFormat.XML, f"Ok.\n\n{XML}\n{XML}"),
        (
            ToolFormat.JSON,
            'Ok.\n\n<tool_call>\n{"name": "play", "arguments": {"song": "A"}}\n</tool_call>'
            '\n<tool_call>\n{"name": "play", "arguments": {"song": "A"}}\n</tool_call>',
        ),
    ],
)
def test_a_client_gets_its_format_from_any_backend(form, text):
    entries = [
        {
            "index": n,
            "id": f"c{n}",
            "type": "function",
            "function": {"name": "play", "arguments": '{"song": "A"}'},
        }
        for n in range(2)
    ]
    interleaved = [chunk({"tool_calls": [e]}) for e in entries]
    xml = [chunk({"content": piece}) for piece in (XML, "\n" + XML)]
    for middle in (interleaved, xml):
        sent = send(stream(ChatShape(form)), chunk({"content": "Ok."}), *middle, chunk({}, "tool_calls"))
        deltas = [c["choices"][0] for c in sent if isinstance(c, dict)]
        assert "Ok." + "".join(c["delta"].get("content", "") for c in deltas) == text
        assert deltas[-1]["finish_reason"] == "stop"
        assert "tool_calls" not in json.dumps([c["delta"] for c in deltas])
    message = {"role": "assistant", "content": "Ok.", "tool_calls": entries}
    made = repair_choice(engine(False), {"message": message, "finish_reason": "tool_calls"}, ChatShape(form))
    assert (made["message"]["content"], made["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in made["message"]


def test_a_string_argument_is_rendered_while_it_is_written():
    made = stream(ChatShape(ToolFormat.XML))
    made.feed(chunk(call('{"song": "', id="c1")), 0)
    (sent,) = made.feed(chunk(call("long and ")), 1)
    assert sent["choices"][0]["delta"]["content"] == "long and "


@pytest.mark.parametrize(
    "odd", [None, 3, "x", [], {"choices": 3}, {"choices": [3]}, {"choices": [{"delta": 3}]}]
)
def test_odd_chunks_pass_and_do_no_harm(odd):
    made = stream()
    out = made.feed(odd if isinstance(odd, dict) else {"choices": odd}, 0)
    assert out is PASS or out in ([], [0])
