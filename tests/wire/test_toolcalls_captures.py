"""Recorded answers of real servers through the engine: right ones leave as they came, streamed and whole agree."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from proxy.wire.chatdelta import ChatStream, repair_choice
from proxy.wire.coerce import Toolset
from proxy.wire.toolcalls import ToolChoice, ToolEngine
from proxy.wire.toolevents import PASS
from tests import captures

CHATS = [
    capture
    for server in captures.SERVERS
    for path in sorted((captures.FOLDER / server).glob("chat_*.txt"))
    for capture in [captures.load(server, path.stem)]
    if capture.path.endswith("/chat/completions") and capture.status == 200 and not capture.request_cut
]
STREAMS = [c for c in CHATS if c.is_stream]
# What these streams say is wrong, and how: calls that were cut, markup that leaked, tools that the request does not
# declare, a backend without a parser.
REPAIRED = {"cut_tool", "text_tag", "length_in_tool", "no_args", "two_tools"}
UNPARSED = {(captures.LLAMA_SERVER, "bare_function")}


def name(capture: captures.Capture) -> str:
    return f"{capture.server}/{capture.name}"


def is_wrong(capture: captures.Capture) -> bool:
    script = capture.name.removeprefix("chat_").removesuffix("_stream")
    unparsed = capture.server == captures.LLAMA_CPP_PYTHON or (capture.server, script) in UNPARSED
    return unparsed or script in REPAIRED


def engine_of(capture: captures.Capture, exact: bool = True) -> ToolEngine:
    request, numbers = json.loads(capture.request_body), itertools.count()
    tools = Toolset(request.get("tools"))
    choice = ToolChoice.read(request.get("tool_choice"), tools)
    return ToolEngine(tools, choice, lambda: f"new{next(numbers)}", exact=exact)


def chunks_of(capture: captures.Capture) -> list[dict[str, Any]]:
    lines = [line.strip() for line in capture.body.splitlines()]
    return [json.loads(line[5:]) for line in lines if line.startswith(b"data:") and b"[DONE]" not in line]


def through(capture: captures.Capture) -> tuple[ChatStream, list[Any]]:
    """The stream, and what was sent: numbers of chunks that left as they came, and new chunks."""
    made, sent = ChatStream(lambda exact: engine_of(capture, exact)), []
    for number, chunk in enumerate(chunks_of(capture)):
        out = made.feed(chunk, number)
        sent += [number] if out is PASS else out
    return made, sent + made.close()


@pytest.mark.parametrize("capture", STREAMS, ids=name)
def test_a_recorded_stream_leaves_right(capture):
    made, sent = through(capture)
    total = len(chunks_of(capture))
    if is_wrong(capture):
        for state in made.choices.values():
            for call in state.engine.calls:
                if call.complete:
                    assert isinstance(json.loads(call.arguments), dict)
    elif any(state.engine.choice.mode == "named" for state in made.choices.values()):
        assert [one for one in sent if isinstance(one, int)] == [n for n in range(total) if n in sent]
        assert sum(isinstance(one, dict) for one in sent) <= 1  # the reason: tool_calls for every call
    else:
        assert sent == list(range(total))


@pytest.mark.parametrize("capture", [c for c in CHATS if not c.is_stream], ids=name)
def test_a_recorded_message_leaves_right(capture):
    for choice in json.loads(capture.body)["choices"]:
        engine = engine_of(capture)
        made = repair_choice(engine, choice)
        if is_wrong(capture) or engine.choice.mode == "named":
            continue
        assert made is choice, engine.counters


def test_enough_was_recorded():
    assert len(STREAMS) > 20
