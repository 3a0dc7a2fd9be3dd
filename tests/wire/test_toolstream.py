"""The tool engine behind real bytes: every case as an event stream, cut anywhere, with and without the learned shape."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.chatdelta import ChatShape
from proxy.wire.streams import ChatStream
from proxy.wire.toolstream import ToolChatStream
from tests.wire import cases
from tests.wire.cases import Result, accumulate, as_stream, chunk_of, engine, every_character, problems, recut

CASES = [case for name in ("toolcalls.jsonl", "toolcalls_own.jsonl") for case in cases.load(name)]
SETTLED = [case for case in CASES if not case.get("debatable")]
DONE = b"data: [DONE]\n\n"


def encode(deltas: list[dict[str, Any]]) -> list[bytes]:
    events = []
    for delta in deltas:
        chunk = {"id": "c", "object": "chat.completion.chunk", "model": "m", **chunk_of(delta)}
        events.append(b"data: %b\n\n" % json.dumps(chunk, separators=(",", ":")).encode())
    return [*events, DONE]


def through(case: dict[str, Any], pieces: list[bytes], swap: tuple[bytes, bytes] | None = None) -> bytes:
    reader = ToolChatStream(lambda exact: engine(case, exact), ChatShape(), swap)
    out = b"".join([reader.feed(piece) for piece in pieces])
    if not reader.ended:
        out += reader.closing() if reader.complete() else reader.flush()
    return out


def read(out: bytes) -> Result:
    result = Result()
    for event in out.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if data and data != b"[DONE]":
            accumulate(result, json.loads(data))
    return result


@pytest.mark.parametrize("case", SETTLED, ids=lambda case: case["id"])
def test_a_case_comes_out_right_as_an_event_stream(case: dict[str, Any]) -> None:
    given = as_stream(case)
    for deltas in (given, recut(case, every_character)):
        events = encode(deltas)
        whole = b"".join(events)
        out = through(case, events)
        assert problems(case, read(out)) == []
        assert read(through(case, [whole])) == read(out)
        rng = random.Random(case["id"])
        cuts = sorted(rng.randrange(len(whole) + 1) for _ in range(9))
        pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        assert through(case, pieces) == through(case, [whole]) or read(through(case, pieces)) == read(out)


@pytest.mark.parametrize("case", SETTLED[::7], ids=lambda case: case["id"])
def test_a_case_comes_out_right_under_its_public_name(case: dict[str, Any]) -> None:
    out = through(case, encode(recut(case, every_character)), (b"m", b"public"))
    assert problems(case, read(out)) == []
    models = [json.loads(e[6:])["model"] for e in out.split(b"\n\n") if e and b"[DONE]" not in e]
    assert set(models) <= {"public"}


def test_plain_text_with_tools_armed_leaves_as_the_bytes_that_came() -> None:
    case = next(case for case in SETTLED if case["id"])
    events = encode(
        [
            {"role": "assistant", "content": ""},
            *({"content": w} for w in ["a", "b", "c", "d", "é", "你", "e"]),
        ]
    )[:-1]
    reader = ToolChatStream(lambda exact: engine(case, exact), ChatShape())
    for event in events:
        assert reader.feed(event) is event


def test_a_finish_waits_for_what_follows_and_leaves_as_it_came() -> None:
    case = next(case for case in SETTLED if case["id"])
    events = encode([{"role": "assistant", "content": "hi"}, {"finish_reason": "stop"}])
    reader = ToolChatStream(lambda exact: engine(case, exact), ChatShape(), hide_usage=True)
    assert reader.feed(events[0]) == events[0]
    assert reader.feed(events[1]) == b""
    usage = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}\n\n'
    assert reader.feed(usage) == events[1]
    assert reader.feed(DONE) == DONE
    assert reader.finish_reason == "stop"


def test_without_tools_the_plain_reader_and_this_one_agree() -> None:
    case: dict[str, Any] = {**next(iter(SETTLED)), "tools": [], "tool_choice": None}
    ended = [
        other for other in SETTLED if other["chunks"][-1].get("finish_reason")
    ]  # the plain reader adds no rule
    for other in ended[::5]:
        events = encode([d for d in as_stream(other) if not d.get("tool_calls")])
        plain = ChatStream()
        expected = read(b"".join(plain.feed(event) for event in events))
        assert read(through(case, events)).content == expected.content


class Unlearned(ToolChatStream):
    """Every event is parsed: what the learned shape saves must not be seen in what leaves."""

    __slots__ = ()

    def known(self, event: bytes) -> bytes | None:
        return None


PIECES = st.sampled_from(
    (
        *(
            "a",
            " b",
            "c d",
            "\n",
            "x\n y",
            'say "hi"',
            "\\",
            "\\n",
            "é",
            "你好",
            "\x7f",
            "\x00",
            "\t",
            "`",
            "~",
            "\ud83d",
        ),
        *(
            "<",
            "<tool_call>",
            "\n<function=write_file>\n",
            "<parameter=content>\n",
            "</parameter>",
            "</function>",
        ),
        *("\n</tool_call>", "<think>", "</think>", "```", "\u2028", "{", '"}', "\ud83d\ude00", "\ufeff"),
    )
)
WRITER: dict[str, Any] = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "write_file",
                "parameters": {
                    "type": "object",
                    "properties": {"content": {"type": "string"}},
                    "required": ["content"],
                },
            },
        }
    ]
}
BEGINNINGS = ("content", "reasoning", "reasoning_content", "arguments")


def delta_of(leaf: str, text: str) -> dict[str, Any]:
    return (
        {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        if leaf == "arguments"
        else {leaf: text}
    )


@given(st.lists(st.tuples(st.sampled_from(BEGINNINGS), st.lists(PIECES, min_size=1, max_size=9)), max_size=4))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_learned_shape_changes_nothing_of_what_leaves(runs: list[tuple[str, list[str]]]) -> None:
    deltas: list[dict[str, Any]] = []
    head = {"name": "write_file", "arguments": '{"content": "'}
    for leaf, texts in runs:
        if leaf == "arguments" and not any("tool_calls" in delta for delta in deltas):
            deltas.append(
                {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": head}]}
            )
        deltas += [delta_of(leaf, text) for text in texts]
    deltas.append({"finish_reason": "stop"})
    case = {**SETTLED[0], **WRITER}
    learned, unlearned = (
        kind(lambda exact: engine(case, exact), ChatShape()) for kind in (ToolChatStream, Unlearned)
    )
    for event in encode(deltas):
        assert learned.feed(event) == unlearned.feed(event)
    assert [call.arguments for call in learned.calls] == [call.arguments for call in unlearned.calls]
    assert learned.counters() == unlearned.counters()
