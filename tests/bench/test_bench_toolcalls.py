"""What the tool-call engine costs: plain text with tools armed, a long string argument, parsed deltas.

Run with `make bench`. The floors are asserted by tests/wire/test_toolcalls_speed.py with room for a busy machine.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable

import pytest

from proxy.wire.coerce import Toolset
from proxy.wire.toolcalls import ToolChoice, ToolEngine
from proxy.wire.toolevents import PASS
from proxy.wire.toolparsed import CallDelta

pytest.importorskip("pytest_benchmark")

STRINGS = {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "write_file", "parameters": STRINGS}}]
LINE = "The quick brown fox jumps over 13 lazy dogs, and then some.\n"
OPEN = "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n<parameter=content>\n"


def new_engine() -> ToolEngine:
    numbers = itertools.count()
    return ToolEngine(Toolset(TOOLS), ToolChoice(), lambda: f"call_{next(numbers)}")


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def plain(pieces: list[str]) -> None:
    engine = new_engine()
    engine.content("Start. ")
    for piece in pieces:
        assert engine.content(piece) is PASS


def argument(pieces: list[str]) -> int:
    engine = new_engine()
    engine.content(OPEN)
    for piece in pieces:
        engine.content(piece)
    engine.content("\n</parameter>\n</function>\n</tool_call>")
    engine.finish("stop")
    return len(engine.calls[0].arguments)


def parsed(pieces: list[str]) -> None:
    engine = new_engine()
    engine.call(CallDelta(0, "call_1", "write_file", '{"path": "a", "content": "'))
    for piece in pieces:
        engine.call(CallDelta(0, None, None, piece))
    engine.call(CallDelta(0, None, None, '"}'))
    engine.finish("tool_calls")


def seconds(job: Callable[[list[str]], object], pieces: list[str], rounds: int = 5) -> float:
    """The best of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        job(pieces)
        best = min(best, time.process_time() - start)
    return best


def test_plain_text_in_tokens(benchmark):
    benchmark(plain, cut(LINE * 200, 4))


def test_plain_text_in_large_deltas(benchmark):
    benchmark(plain, cut(LINE * 20_000, 4096))


def test_a_string_argument_of_64_kib_in_deltas_of_four(benchmark):
    benchmark(argument, cut((LINE * 1100)[: 1 << 16], 4))


def test_parsed_argument_deltas(benchmark):
    escaped = json.dumps(LINE * 200)[1:-1]
    benchmark(parsed, cut(escaped, 4))
