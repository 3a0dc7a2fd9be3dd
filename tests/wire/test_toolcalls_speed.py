"""The engine's floors: linear in the length of a value, and fast where nothing is to be done.

Loose on purpose (a busy machine is several times slower); tests/bench/test_bench_toolcalls.py has the figures.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

from proxy.wire.coerce import Toolset
from proxy.wire.toolcalls import ToolChoice, ToolEngine
from proxy.wire.toolparsed import CallDelta

PROPERTIES = {
    "s": {"type": "string"},
    "a": {"type": "array"},
    "i": {"type": "integer"},
    "n": {"type": ["string", "null"]},
}
TOOLS = Toolset([{"type": "function", "function": {"name": "f", "parameters": {"properties": PROPERTIES}}}])


def engine(mode: str = "auto") -> ToolEngine:
    numbers = itertools.count()
    return ToolEngine(TOOLS, ToolChoice(mode), lambda: f"c{next(numbers)}")


def content(head: str, unit: str, size: int, mode: str = "auto", step: int = 4) -> float:
    """CPU seconds for `size` characters of `unit`s in deltas of `step`."""
    made = engine(mode)
    made.content(head)
    text = (unit * (size // len(unit) + 1))[:size]
    start = time.process_time()
    for at in range(0, size, step):
        made.content(text[at : at + step])
    made.finish("stop")
    return time.process_time() - start


def demanded(head: str, unit: str, size: int) -> float:
    """`content`, where tool_choice is "required"."""
    return content(head, unit, size, mode="required")


def whole(head: str, unit: str, size: int) -> float:
    """`demanded`, in one piece."""
    return content(head, unit, size, mode="required", step=size)


def parsed(head: str, unit: str, size: int) -> float:
    made = engine()
    made.call(CallDelta(0, "c", "f", head))
    text = (unit * (size // len(unit) + 1))[:size]
    start = time.process_time()
    for at in range(0, size, 4):
        made.call(CallDelta(0, None, None, text[at : at + 4]))
    made.finish("stop")
    return time.process_time() - start


def thought(head: str, unit: str, size: int) -> float:
    made = engine()
    made.reasoning(head)
    text = (unit * (size // len(unit) + 1))[:size]
    start = time.process_time()
    for at in range(0, size, 4):
        made.reasoning(text[at : at + 4])
    made.finish("stop")
    return time.process_time() - start


XML = "<tool_call>\n<function=f>\n<parameter={}>\n"
FLOODS: list[tuple[Callable[[str, str, int], float], str, str]] = [
    (content, "", "plain text, "),
    (content, "", "<"),
    (content, "", "<tool_call>"),
    (content, "", "\n<function="),
    (content, "", " "),
    (content, "a", "`"),
    (content, "", "<tool_call> \n"),
    (content, "<tool_call>", " "),
    (content, "<tool_call>\n", "[,"),
    (content, '<tool_call>\n{"id": "', "x"),
    (content, "<tool_call>\n{", " "),
    (content, '<tool_call>\n{"arguments": {"s": "', "x"),
    (content, '<tool_call>\n{"name": "f", "arguments": {"s": "', 'a\\n" b'),
    (content, '<tool_call>\n{"name": "f", "arguments": {"s": ', "x"),
    (content, '<tool_call>\n{"name": "f", "arguments": {"i": ', "1"),
    (content, '<tool_call>\n{"name": "f", "arguments": {"s": "a"', " "),
    (content, XML.format("s"), "text of a line\n"),
    (content, XML.format("s"), "</parameter>"),
    (content, XML.format("s"), "</parameter>\n"),
    (content, XML.format("s"), "</function>\n "),
    (content, XML.format("s") + "</function>", " "),
    (content, XML.format("s"), "\n<tool_call>\n<function=f>\n<parameter=i>"),
    (content, XML.format("s"), "<"),
    (content, XML.format("s"), "<parameter>x</parameter></function> "),
    (content, XML.format("s"), "<parameter>"),
    (content, XML.format("s"), "<parameter      "),
    (content, XML.format("s"), "<tool_call><function=f><parameter=i>x</parameter></function></tool_call> "),
    (content, XML.format("s") + "<parameter>", "</invoke>\n"),
    (content, XML.format("s") + "<parameter>", "</parameter>\n"),
    (content, "<tool_call>\n<function=f>\n", "<parameter" + " " * 300),
    (content, "<tool_call>\n<function=f>\n", '<parameter=s a="b" c="d"'),
    (content, '<tool_call>\n{"name": "f"', ', "s": "x"'),
    (content, XML.format("a"), "('x' "),
    (content, XML.format("n"), " "),
    (content, XML.format("n"), "n"),
    (content, XML.format("a"), "[1, "),
    (content, XML.format("a"), "'[\""),
    (content, XML.format("i"), "1"),
    (content, "<tool_call>\n<function=f>\n<parameter=", "x"),
    (content, "<tool_call>\n<function=f>\n</function>\n", " "),
    (content, "<tool_call>\n<function=f>\n</function>\n", "</function>"),
    (content, "```", "\n```x\n```"),
    (content, '<tool_call>\n{"name": "f", "arguments":', " "),
    (content, '<tool_call>\n{"arguments":', "\n"),
    (content, "<tool_call>\n<function=f>\n", "<parameter=" + " " * 300),
    (demanded, "", "\n"),
    (demanded, "", "```\n"),
    (demanded, "<tool_call>\n", "```\n"),
    (demanded, "", "` \n"),
    (whole, "", "\n"),
    (whole, "", "```\n"),
    (whole, "<tool_call>\n", "\n "),
    (whole, '<tool_call>{"arguments":', "```\n"),
    (parsed, '{"s": "', "text \\n"),
    (parsed, '{"a": ', "["),
    (parsed, '{"i": ', "1"),
    (parsed, '{"i": "', "1"),
    (parsed, '{"s": "a"', " "),
    (parsed, '{"s": "a"', ","),
    (parsed, '"', '{\\"s'),
    (parsed, "<tool_call>", "<parameter=s>"),
    (parsed, "", "prose "),
    (parsed, '{"', "k"),
    (parsed, "{", "x"),
    (parsed, "", " "),
    (thought, "", "plain text, "),
    (thought, "<tool_call>\n<function=f>\n<parameter=s>\n", "a <b> "),
    (thought, "", "<tool_call>\n"),
    (thought, "", " <"),
]


@pytest.mark.parametrize(
    ("way", "head", "unit"), FLOODS, ids=lambda value: repr(value)[:40] if isinstance(value, str) else ""
)
def test_no_text_costs_more_than_its_length(way, head, unit):
    small, large = 1 << 12, 1 << 15  # 8 times as long; a quadratic way takes 64 times as long
    ratios = []
    for _ in range(4):  # a busy machine may spoil a measurement, not four
        base = min(way(head, unit, small) for _ in range(2))
        ratios.append(way(head, unit, large) / max(base, 0.004))
        if ratios[-1] < 24:
            return
    raise AssertionError(f"times the cost for 8 times the length: {ratios}")
