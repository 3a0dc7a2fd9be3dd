"""History that a backend would refuse comes out as one it takes, and sound history as the same object."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.coerce import Toolset
from proxy.wire.toolrequest import is_object, repair_arguments, repair_history

PLAY = {"type": "object", "properties": {"song": {"type": "string"}, "volume": {"type": "integer"}}}
TOOLS = Toolset([{"type": "function", "function": {"name": "play", "parameters": PLAY}}])


def call(arguments: object = '{"song": "A"}', **changes: object) -> dict:
    made = {"id": "c1", "type": "function", "function": {"name": "play", "arguments": arguments}}
    return {key: value for key, value in {**made, **changes}.items() if value != "absent"}


def asked(*calls: dict, **more: object) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def repair(*messages: object, reasoning: str | None = None):
    numbers = itertools.count()
    return repair_history(messages, TOOLS, lambda: f"new{next(numbers)}", reasoning=reasoning)


def test_sound_history_comes_back_as_the_very_same_objects():
    messages = [
        {"role": "user", "content": "hi"},
        asked(call(), call(id="c2")),
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "assistant", "content": "done", "reasoning": "hm"},
    ]
    out, repairs = repair_history(messages, TOOLS, lambda: "x")
    assert out is messages
    assert repairs.total() == 0


@pytest.mark.parametrize(
    ("broken", "right"),
    [
        ("", {}),
        (None, {}),
        ("null", {}),
        ({"song": "A"}, {"song": "A"}),
        ('"{\\"song\\": \\"A\\"}"', {"song": "A"}),
        ("{'song': 'A'}", {"song": "A"}),
        ('{"song": "A",}', {"song": "A"}),
        ('{"song": "A"', {"song": "A"}),
        (
            "<tool_call>\n<function=play>\n<parameter=volume>\n3\n</parameter>\n</function>\n</tool_call>",
            {"volume": 3},
        ),
        ('{"song": "A', {"arguments": '{"song": "A'}),
        ("hello", {"arguments": "hello"}),
        ("[1]", {"arguments": "[1]"}),
        (7, {"arguments": "7"}),
        ('{"volume": NaN}', {"volume": "NaN"}),
    ],
)
def test_broken_arguments_become_an_object(broken, right):
    (message,), repairs = repair(asked(call(broken)))
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == right
    assert repairs.arguments == 1


def test_big_integers_and_odd_but_sound_arguments_keep_their_characters():
    text = '{"volume": 123456789012345678901234567890, "x": 1.10}'
    assert repair_arguments(text, "play", TOOLS) == text


def test_missing_ids_are_made_and_given_to_the_results_by_order():
    calls = asked(call(id="absent"), call(id=None), call(id="c9", type="absent"))
    out, repairs = repair(
        calls,
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2", "tool_call_id": ""},
        {"role": "tool", "content": "9", "tool_call_id": "c9"},
    )
    assert [entry["id"] for entry in out[0]["tool_calls"]] == ["new0", "new1", "c9"]
    assert [message["tool_call_id"] for message in out[1:]] == ["new0", "new1", "c9"]
    assert (repairs.ids, repairs.types) == (4, 1)


def test_a_tool_message_without_a_call_is_what_the_user_says():
    out, repairs = repair(
        {"role": "user", "content": "hi"},
        {"role": "tool", "tool_call_id": "gone", "name": "play", "content": "42"},
    )
    assert out[1] == {"role": "user", "content": "42"}
    assert repairs.orphans == 1


@pytest.mark.parametrize(
    ("wanted", "other"), [("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")]
)
def test_thinking_is_spelled_as_the_backend_reads_it(wanted, other):
    out, repairs = repair({"role": "assistant", "content": "a", other: "hm"}, reasoning=wanted)
    assert out[0] == {"role": "assistant", "content": "a", wanted: "hm"}
    assert repairs.reasoning == 1
    both = {"role": "assistant", "content": "a", "reasoning": "x", "reasoning_content": "x"}
    assert repair(both, reasoning=wanted)[0][0] is both


def test_an_empty_list_of_calls_is_left_out():
    out, repairs = repair({"role": "assistant", "content": "a", "tool_calls": []})
    assert repairs.types == 1
    assert "tool_calls" not in out[0]


@settings(max_examples=100, derandomize=True, deadline=None)
@given(text=st.one_of(st.text(alphabet="{}[]\":,\\'<>a1 \n", max_size=60), st.text(max_size=20)))
def test_any_arguments_end_as_an_object(text):
    assert is_object(repair_arguments(text, "play", TOOLS))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    messages=st.lists(
        st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "reasoning"]),
            st.one_of(
                st.none(),
                st.integers(),
                st.sampled_from(["assistant", "tool", "user", "x", ""]),
                st.lists(
                    st.one_of(st.integers(), st.just({"function": {"name": "play"}}), st.just({"id": 3})),
                    max_size=2,
                ),
            ),
        ),
        max_size=5,
    )
)
def test_any_shape_of_messages_is_survived(messages):
    out, _ = repair_history(messages, TOOLS, lambda: "new")
    assert len(out) == len(messages)


def test_unsound_arguments_are_read_for_what_they_mean_up_to_a_limit_of_the_conversation() -> None:
    """Beyond it they are quoted: no conversation can keep the gateway busy."""
    flood = '"' * 1000
    calls = [asked(call(flood)) for _ in range(1000)]
    start = time.process_time()
    messages, repairs = repair(*calls, asked(call("{'song': 'B'}")))
    assert (
        time.process_time() - start < 10
    )  # some seconds for 128 KiB on a busy machine; all would take a minute
    assert repairs.arguments == 1001
    last = messages[-1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(last) == {"arguments": "{'song': 'B'}"}
    assert json.loads(
        repair(asked(call("{'song': 'B'}")))[0][0]["tool_calls"][0]["function"]["arguments"]
    ) == {"song": "B"}
