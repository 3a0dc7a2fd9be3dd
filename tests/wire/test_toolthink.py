"""Calls in thinking that nobody closed: the backend has no reasoning parser, and no `</think>` came."""

from __future__ import annotations

import json

import pytest

from proxy.wire.chatdelta import ChatStream, repair_choice
from tests.wire.cases import Case, Result, accumulate, chunk_of, engine

CALL = "<tool_call>\n<function=play>\n<parameter=song>\nA\n</parameter>\n</function>\n</tool_call>"
PLAY = {"type": "object", "properties": {"song": {"type": "string"}}}
CASE: Case = {
    "tools": [{"type": "function", "function": {"name": "play", "parameters": PLAY}}],
    "tool_choice": "auto",
}


def streamed(text: str, size: int, reason: str = "stop") -> Result:
    stream = ChatStream(lambda exact: engine(CASE, exact, starts_thinking=True))
    result = Result()
    pieces = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    for delta in [*({"content": piece} for piece in pieces), {"finish_reason": reason}]:
        chunk = chunk_of(delta)
        out = stream.feed(chunk, chunk)
        for sent in out if isinstance(out, list) else [chunk]:
            accumulate(result, sent)
    for sent in stream.close():
        accumulate(result, sent)
    return result


@pytest.mark.parametrize("size", [1, 3, 7, 0], ids="by {}".format)
@pytest.mark.parametrize(
    ("behind", "called"),
    [
        ("", True),
        ("\n", True),
        ("END", True),
        ("END\n", True),
        (" and wait.", False),
        (".", False),
        ("\nDone", False),
        (" END", False),
        ("END of it", False),
        ("x" * 17, False),
        ("END.", False),
        (f"END{CALL}", True),
    ],
)
def test_a_call_counts_when_at_most_a_word_sticks_to_it(behind: str, called: bool, size: int) -> None:
    text = f"I think so.\n{CALL}{behind}"
    result = streamed(text, size)
    calls = [(call["name"], json.loads(call["arguments"])) for call in result.calls]
    assert calls == [("play", {"song": "A"})] * (1 + behind.count(CALL)) * called
    assert result.finish == ("tool_calls" if called else "stop")
    assert result.content == ""
    if not called:
        assert result.reasoning == text
    whole = repair_choice(
        engine(CASE, starts_thinking=True),
        {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"},
    )
    assert whole["finish_reason"] == result.finish
    assert len(whole["message"].get("tool_calls", ())) == len(calls)


def test_a_cut_answer_completes_no_call_in_thinking() -> None:
    assert streamed(f"{CALL}END", 3, "length").calls == []


def test_thinking_that_the_backend_told_apart_ends_with_the_call_itself() -> None:
    made = repair_choice(
        engine(CASE),
        {"index": 0, "message": {"role": "assistant", "reasoning": f"{CALL}END"}, "finish_reason": "stop"},
    )
    assert "tool_calls" not in made["message"]
