"""What holds for every text and every call, not only for the cases."""

from __future__ import annotations

import itertools
import json
import os
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.chatdelta import ChatShape
from proxy.wire.coerce import Toolset
from proxy.wire.toolcalls import ToolChoice, ToolEngine
from proxy.wire.toolevents import PASS, CallArguments, CallEnd, CallStart, Content
from proxy.wire.toolrender import STRUCTURE, ToolFormat, renderer
from tests.wire.cases import freeze, run_stream, run_whole

EXAMPLES = int(os.environ.get("TOOLCALL_EXAMPLES", "50"))  # more by hand: TOOLCALL_EXAMPLES=2000
SETTINGS = settings(max_examples=EXAMPLES, derandomize=True, deadline=None)
FRAGMENTS = (
    "<tool_call>",
    "</tool_call>",
    "<function=play>",
    "<function=nope>",
    "<function>play</function>",
    "</function>",
    "<parameter=song>",
    "<parameter=volume>",
    "<parameter=x",
    "<parameter>",
    '<parameter name="song">',
    "</parameter>",
    "\n</parameter>\n</function>\n</tool_call>\n",
    "</parameters>",
    "</invoke>",
    "<think>",
    "</think>",
    "<|im_end|>",
    '{"name": "play", "arguments": {"song": "A"}}',
    '{"name": "play"',
    '"arguments": {"song": ',
    '"A"',
    "{",
    "}",
    "[",
    "]",
    ",",
    "'",
    '"',
    "\\",
    "\n",
    "\n\n",
    " ",
    "`",
    "```",
    "```xml\n",
    "~~~\n",
    "<",
    ">",
    "<tool_",
    "</",
    "word",
    "3",
    "null",
    "é🚀",
    "\ud83d",
    "\x00",
)
PLAY = {"type": "object", "properties": {"song": {"type": "string"}, "volume": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "play", "parameters": PLAY}}]

texts = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)
reasons = st.sampled_from(["stop", "length", "tool_calls", "content_filter"])
choices = st.sampled_from(["auto", "auto", "required", {"type": "function", "function": {"name": "play"}}])


def cut(text: str, seed: int) -> list[str]:
    rng, pieces, at = random.Random(seed), [], 0
    while at < len(text):
        size = rng.choice((1, 1, 2, 3, 5, 9, 20))
        pieces.append(text[at : at + size])
        at += size
    return pieces


def case(choice: Any = "auto", tools: Any = TOOLS) -> dict[str, Any]:
    return {"tools": tools, "tool_choice": choice}


def same(one: Any, other: Any, *, blanks: bool) -> None:
    """The same calls and reason; the same text but for blanks beside calls."""
    assert [(c["name"], c["arguments"]) for c in one.calls] == [
        (c["name"], c["arguments"]) for c in other.calls
    ]
    assert one.finish == other.finish
    if blanks:
        assert "".join(one.content.split()) == "".join(other.content.split())
        assert "".join(one.reasoning.split()) == "".join(other.reasoning.split())
    else:
        assert (one.content, one.reasoning) == (other.content, other.reasoning)


@SETTINGS
@given(text=texts, seed=st.integers(0, 2**32), reason=reasons, choice=choices)
def test_any_content_gives_one_result_however_it_is_cut(text, seed, reason, choice):
    whole = run_whole(case(choice), {"role": "assistant", "content": text, "finish_reason": reason})
    for pieces in (cut(text, seed), list(text)):
        deltas = [*({"content": piece} for piece in pieces), {"finish_reason": reason}]
        same(run_stream(case(choice), deltas), whole, blanks=True)


@SETTINGS
@given(thought=texts, text=st.one_of(st.just(""), texts), seed=st.integers(0, 2**32), reason=reasons)
def test_any_thinking_gives_one_result_however_it_is_cut(thought, text, seed, reason):
    message = {"role": "assistant", "reasoning": thought, "content": text, "finish_reason": reason}
    whole = run_whole(case(), message)
    thoughts = [{"reasoning": piece} for piece in cut(thought, seed)]
    contents = [{"content": piece} for piece in cut(text, seed)]
    same(run_stream(case(), [*thoughts, *contents, {"finish_reason": reason}]), whole, blanks=True)


@SETTINGS
@given(text=texts, seed=st.integers(0, 2**32), reason=reasons)
def test_any_parsed_arguments_give_one_result_however_they_are_cut(text, seed, reason):
    entry = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "play", "arguments": text}}
    whole = run_whole(case(), {"tool_calls": [entry], "finish_reason": reason})
    first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "play", "arguments": ""}}
    more = [{"index": 0, "function": {"arguments": piece}} for piece in cut(text, seed)]
    deltas = [{"tool_calls": [one]} for one in (first, *more)]
    result = run_stream(case(), [*deltas, {"finish_reason": reason}])
    assert result.calls == whole.calls
    assert result.finish == whole.finish


@SETTINGS
@given(text=texts, seed=st.integers(0, 2**32))
def test_text_without_calls_is_neither_lost_nor_changed(text, seed):
    text = "So: " + text.replace("\ud83d", "")
    deltas = [*({"content": piece} for piece in cut(text, seed)), {"finish_reason": "stop"}]
    result = run_stream(case(), deltas)
    if not result.calls:
        assert result.content == text


@SETTINGS
@given(text=st.text(alphabet="ab <>/=_\n`~tolcfunci\u00e9", max_size=200), seed=st.integers(0, 2**32))
def test_text_whose_deltas_never_end_like_an_opener_passes_at_once(text, seed):
    tools = Toolset(TOOLS)
    engine = ToolEngine(tools, ToolChoice(), lambda: "call_x")
    openers = ("<tool_call>", "<function=", "<function>", "<function ")
    for piece in ["Start.", *cut(text, seed)]:
        ends = any(piece.endswith(opener[:n]) for opener in openers for n in range(1, len(opener) + 1))
        if ends or any(opener in piece for opener in openers):
            piece = piece.replace("<", "-")
        assert engine.content(piece) is PASS


# parse(render(calls)) == calls

SNIPPETS = (
    "if (a < b && c > d) { x <<= 1; }",
    "<b>bold</b> &amp; &lt;",
    "<tool_call>",
    "\n<tool_call>\nhm",
    "{'a': 1}",
    '{"k": [1, 2]}',
    "null ",
    "007",
    "`code` ```",
    "\\d+\\n",
    "é🚀\u2028",
    "\r\n\t",
    "<think>x</think>",
    "<function=foo>",
    "x <parameter=a> y",
)
strings = st.lists(st.one_of(st.text(max_size=12), st.sampled_from(SNIPPETS), st.just("\n")), max_size=5).map(
    "".join
)
strings = strings.filter(lambda text: not STRUCTURE.search(f"\n{text}"))
plain_json = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=6),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
).filter(lambda value: not STRUCTURE.search(json.dumps(value)))
TYPED = (
    ({"type": "string"}, strings),
    ({"type": "integer"}, st.integers(-(10**30), 10**30)),
    ({"type": "number"}, st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))),
    ({"type": "boolean"}, st.booleans()),
    ({"type": ["integer", "null"]}, st.one_of(st.none(), st.integers())),
    ({"type": "object"}, st.dictionaries(st.text(max_size=5), plain_json, max_size=3)),
    ({"type": "array"}, st.lists(plain_json, max_size=3)),
    (
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        strings.filter(lambda t: t.strip().lower() not in ("null", "none")),
    ),
    (
        {"$ref": "#/$defs/Rows"},
        st.lists(st.fixed_dictionaries({"n": st.integers(), "s": st.text(max_size=5)}), max_size=3),
    ),
)
DEFS = {
    "Rows": {
        "type": "array",
        "items": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
    }
}


@st.composite
def called(draw):
    """Tools with schemas, and calls of them with fitting values."""
    names = draw(
        st.lists(
            st.from_regex(r"[a-z][a-z0-9_.-]{0,12}", fullmatch=True), min_size=1, max_size=3, unique=True
        )
    )
    keys = st.from_regex(r"[a-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
    shapes = {
        name: draw(st.dictionaries(keys, st.sampled_from(range(len(TYPED))), max_size=4)) for name in names
    }
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {key: TYPED[at][0] for key, at in shape.items()},
                    "$defs": DEFS,
                },
            },
        }
        for name, shape in shapes.items()
    ]
    order = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
    return tools, [(n, {key: draw(TYPED[at][1]) for key, at in shapes[n].items()}) for n in order]


def rendered(form: ToolFormat, calls: list[tuple[str, Any]], seed: int, said: str) -> str:
    maker, out = renderer(form), [Content(said)] if said else []
    out = maker.render(out)
    for index, (name, arguments) in enumerate(calls):
        text = json.dumps(arguments, ensure_ascii=seed % 2 == 0)
        events = [
            CallStart(index, f"c{index}", name),
            *(CallArguments(index, piece) for piece in cut(text, seed)),
        ]
        for event in [*events, CallEnd(index, True)]:
            out += maker.render([event])
    return "".join(event.text for event in out)


@SETTINGS
@given(called=called(), seed=st.integers(0, 2**32), said=st.sampled_from(["", "Well."]))
def test_what_is_rendered_reads_back_as_the_same_calls(called, seed, said):
    tools, calls = called
    for form in (ToolFormat.XML, ToolFormat.JSON):
        text = rendered(form, calls, seed, said)
        deltas = [*({"content": piece} for piece in cut(text, seed)), {"finish_reason": "stop"}]
        result = run_stream(case(tools=tools), deltas)
        made = [(call["name"], freeze(json.loads(call["arguments"]))) for call in result.calls]
        assert made == [(name, freeze(arguments)) for name, arguments in calls], text
        assert result.content.strip() == said


@SETTINGS
@given(called=called(), seed=st.integers(0, 2**32))
def test_right_parsed_calls_leave_with_the_characters_they_came_with(called, seed):
    tools, calls = called
    deltas = []
    for index, (name, arguments) in enumerate(calls):
        head = {
            "index": index,
            "id": f"c{index}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        text = json.dumps(arguments, ensure_ascii=seed % 2 == 0)
        more = ({"index": index, "function": {"arguments": piece}} for piece in cut(text, seed))
        deltas += [{"tool_calls": [entry]} for entry in (head, *more)]
    result = run_stream(case(tools=tools), [*deltas, {"finish_reason": "tool_calls"}])
    assert [(c["id"], c["name"], json.loads(c["arguments"])) for c in result.calls] == [
        (f"c{index}", name, arguments) for index, (name, arguments) in enumerate(calls)
    ]


@SETTINGS
@given(text=texts, seed=st.integers(0, 2**32), form=st.sampled_from([ToolFormat.XML, ToolFormat.JSON]))
def test_a_rendered_answer_has_no_calls_beside_its_text(text, seed, form):
    deltas = [*({"content": piece} for piece in cut(text, seed)), {"finish_reason": "stop"}]
    result = run_stream(case(), deltas, ChatShape(form))
    assert result.calls == []
    assert result.finish in ("stop", "length")


def test_ids_come_from_the_caller_and_are_never_used_twice():
    numbers = itertools.count()
    tools = Toolset(TOOLS)
    engine = ToolEngine(tools, ToolChoice(), lambda: f"id{next(numbers)}")
    engine.content("<tool_call>\n<function=play>\n</function>\n</tool_call>\n" * 3)
    engine.finish("stop")
    assert [call.id for call in engine.calls] == ["id0", "id1", "id2"]


CALL = "<tool_call>\n<function=play>\n<parameter=song>\n{}\n</parameter>\n</function>\n</tool_call>"
QUOTED = (
    "plain text\n",
    "<p>a</p>\n",
    "if a < b:\n",
    "the <tool_call> tag\n",
    "the </parameter> tag\n",
    "a <parameter=x> tag\n",
    "a </function> tag\n",
    "<parameter>\n",
    CALL.format("B") + "\n",
    CALL.format("B").replace("\n", "") + "\n",
    "see " + CALL.format("B").replace("\n", "") + " here\n",
    "see <function=play><parameter=song>B</parameter></function> here\n",
    "<function=play><parameter=song>B</parameter></function>\n",
    "<function=play>\n<parameter=song>\nB\n</parameter>\n</function>\n",
    '<function name="x">\n<parameter name="y">\n1\n</parameter>\n</function>\n',
    '<invoke name="x">\n<parameter name="y">1</parameter>\n</invoke>\n',
    "<parameters>\n  <parameter>a</parameter>\n</parameters>\n",
    '<tool_call>\n{"name": "play", "arguments": {}}\n</tool_call>\n',
)


@settings(SETTINGS, max_examples=4 * EXAMPLES)
@given(
    parts=st.lists(st.sampled_from(QUOTED), min_size=1, max_size=3),
    bare=st.booleans(),
    behind=st.sampled_from(["", "\nDone.", "\n" + CALL.format("C")]),
)
def test_what_a_value_quotes_or_mentions_of_calls_stays_in_it(parts, bare, behind):
    value = "".join(parts)
    value = value.rstrip("\n") if bare else value
    numbers = itertools.count()
    made = ToolEngine(Toolset(TOOLS), ToolChoice(), lambda: f"c{next(numbers)}")
    made.content(CALL.format("{}").replace("{}", value) + behind)
    made.finish("stop")
    songs = [json.loads(call.arguments) for call in made.calls]
    assert songs == [{"song": value}, *([{"song": "C"}] if "C" in behind else [])]
