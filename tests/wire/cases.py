"""Tool-call cases: what a backend sent and what must leave. Loads them, runs them in any chunking, judges the result.

Format: one JSON object a line, see docs/tool-calls.md. `chunks` are stream deltas (or one message), `expect` the
result; `match` "exact" or "ws" (white space does not count in content; in reasoning it never does).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.wire.chatdelta import ChatShape, ChatStream, repair_choice
from proxy.wire.coerce import Toolset
from proxy.wire.toolcalls import ToolChoice, ToolEngine
from proxy.wire.toolevents import PASS

HERE = Path(__file__).parent
Case = dict[str, Any]
Delta = dict[str, Any]


def load(name: str) -> list[Case]:
    return [json.loads(line) for line in (HERE / name).read_text().splitlines() if line.strip()]


HANDED = load("toolcalls.jsonl")
OWN = load("toolcalls_own.jsonl") if (HERE / "toolcalls_own.jsonl").exists() else []
CASES = HANDED + OWN
SETTLED = [case for case in CASES if not case.get("debatable")]
DEBATABLE = [case for case in CASES if case.get("debatable")]


@dataclass
class Result:
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    timeline: list[tuple[str, str]] = field(default_factory=list)  # content and arguments after each chunk in


def engine(case: Case, exact: bool = True, **options: Any) -> ToolEngine:
    tools = Toolset(case["tools"])
    numbers = itertools.count()
    return ToolEngine(
        tools,
        ToolChoice.read(case["tool_choice"], tools),
        lambda: f"call_new{next(numbers)}",
        exact=exact,
        **options,
    )


def chunk_of(delta: Delta) -> dict[str, Any]:
    body = {key: value for key, value in delta.items() if key != "finish_reason"}
    choice = {"index": 0, "delta": body, "finish_reason": delta.get("finish_reason")}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}


def run_stream(case: Case, deltas: Iterable[Delta], shape: ChatShape | None = None) -> Result:
    """The deltas through the engine as a stream, every invariant of a stream asserted."""
    stream, result = ChatStream(lambda exact: engine(case, exact), shape), Result()
    for delta in deltas:
        chunk = chunk_of(delta)
        out = stream.feed(chunk, chunk)
        for sent in [chunk] if out is PASS else out:
            accumulate(result, sent)
        result.timeline.append((result.content, "".join(call["arguments"] for call in result.calls)))
    for sent in stream.close():
        accumulate(result, sent)
    assert result.finish is not None
    return result


def accumulate(result: Result, chunk: Any) -> None:
    """What a client makes of a chunk; a chunk that no client could take is an assertion."""
    (choice,) = chunk["choices"]
    assert result.finish is None, "a delta after the finish_reason"
    delta = choice["delta"]
    result.content += delta.get("content") or ""
    result.reasoning += delta.get("reasoning") or delta.get("reasoning_content") or ""
    for entry in delta.get("tool_calls") or ():
        index = entry["index"]
        function = entry.get("function", {})
        assert type(index) is int
        assert isinstance(function, dict)
        if index == len(result.calls):
            assert isinstance(entry["id"], str), "no id in a call's first delta"
            assert entry["id"], "an empty id"
            assert entry["type"] == "function"
            assert isinstance(function["name"], str), "no name in a call's first delta"
            assert function["name"]
            assert all(call["id"] != entry["id"] for call in result.calls), "an id used twice"
            result.calls.append({"id": entry["id"], "name": function["name"], "arguments": ""})
        else:
            assert index == len(result.calls) - 1 or index < len(result.calls), "an index out of order"
            assert "id" not in entry, "an id sent again"
            assert "name" not in function, "a name sent again"
        result.calls[index]["arguments"] += function.get("arguments", "")
    result.finish = choice["finish_reason"]


def run_whole(case: Case, message: Delta) -> Result:
    """The whole message through the same engine."""
    body = {key: value for key, value in message.items() if key != "finish_reason"}
    made = repair_choice(
        engine(case), {"index": 0, "message": body, "finish_reason": message.get("finish_reason")}
    )
    said, result = made["message"], Result()
    result.content = said.get("content") or ""
    result.reasoning = said.get("reasoning") or said.get("reasoning_content") or ""
    for entry in said.get("tool_calls") or ():
        function = entry["function"]
        result.calls.append({"id": entry["id"], "name": function["name"], "arguments": function["arguments"]})
    assert len({call["id"] for call in result.calls}) == len(result.calls)
    result.finish = made["finish_reason"]
    return result


# Chunkings


def as_stream(case: Case) -> list[Delta]:
    """The case's own deltas; a message as one delta."""
    return list(case["chunks"])


def recut(case: Case, cut: Callable[[str], Iterable[str]]) -> list[Delta]:
    """The same answer with its texts joined and cut anew."""
    out: list[Delta] = []
    for key, value in _joined(case["chunks"]):
        if key == "calls":
            out += _recut_call(value, cut)
        elif key == "other":
            out.append(value)
        else:
            out += [{key: piece} for piece in cut(value)]
    return out


def _joined(chunks: Iterable[Delta]) -> Iterator[tuple[str, Any]]:
    parts: list[tuple[str, Any]] = []
    for delta in chunks:
        for key in ("reasoning", "reasoning_content", "content"):
            if delta.get(key) and not (key == "reasoning_content" and delta.get("reasoning")):
                if parts and parts[-1][0] == key:
                    parts[-1] = (key, parts[-1][1] + delta[key])
                else:
                    parts.append((key, delta[key]))
        parts += [("calls", entry) for entry in delta.get("tool_calls") or ()]
        rest = {k: v for k, v in delta.items() if k in ("role", "finish_reason", "function_call")}
        if rest:
            parts.append(("other", rest))
    return iter(parts)


def _recut_call(entry: dict[str, Any], cut: Callable[[str], Iterable[str]]) -> list[Delta]:
    function = entry.get("function") if isinstance(entry, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str) or len(arguments) < 2:
        return [{"tool_calls": [entry]}]
    first, *more = cut(arguments)
    head = {**entry, "function": {**entry["function"], "arguments": first}}
    tail = [
        {**({"index": entry["index"]} if "index" in entry else {}), "function": {"arguments": piece}}
        for piece in more
    ]
    return [{"tool_calls": [piece]} for piece in [head, *tail]]


def every_character(text: str) -> list[str]:
    return list(text)


def has_message(case: Case) -> bool:
    """False where only a stream tells the order of text and parsed calls."""
    return case.get("order") != "stream"


def as_message(case: Case) -> Delta:
    """What the backend would have answered, had it not been asked to stream."""
    if not case["stream"]:
        return dict(case["chunks"][0])
    message: Delta = {"role": "assistant", "content": "", "reasoning": ""}
    calls: list[dict[str, Any]] = []
    for delta in case["chunks"]:
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or delta.get("reasoning_content") or ""
        message["finish_reason"] = delta.get("finish_reason") or message.get("finish_reason")
        for entry in delta.get("tool_calls") or ():
            _merge(calls, entry)
    if calls:
        message["tool_calls"] = calls
    return message


def _merge(calls: list[dict[str, Any]], entry: dict[str, Any]) -> None:
    known = next((c for c in calls if entry.get("id") and c["id"] == entry["id"]), None)
    if known is None and not (entry.get("id") and entry["function"].get("name")):
        known = next((c for c in reversed(calls) if c["index"] == entry.get("index", 0)), None)
    if known is None:
        calls.append({"index": entry.get("index", 0), "id": entry.get("id"), **json.loads(json.dumps(entry))})
    else:
        arguments = entry["function"].get("arguments")
        known["function"]["arguments"] = (known["function"].get("arguments") or "") + (arguments or "")


# Judging


def squeeze(text: str | None) -> str:
    return " ".join((text or "").split())


def problems(case: Case, result: Result) -> list[str]:
    """Why the result is not what the case expects; empty if it is."""
    wants = [case["expect"], *case.get("expect_alt", ())]
    tries = [_compare(case["match"], want, result) for want in wants]
    return [] if any(not tried for tried in tries) else tries[0]


def _compare(match: str, want: dict[str, Any], result: Result) -> list[str]:
    found: list[str] = []
    exact = match == "exact"
    content = result.content if exact else squeeze(result.content)
    if content != (want["content"] or "" if exact else squeeze(want["content"])):
        found.append(f"content {result.content!r}")
    if squeeze(result.reasoning) != squeeze(want["reasoning_content"]):
        found.append(f"reasoning {result.reasoning!r}")
    if result.finish not in want.get("finish_reason_any", [want["finish_reason"]]):
        found.append(f"finish_reason {result.finish!r}")
    if re.search(
        "[\ud800-\udfff\ufffd]",
        result.content + result.reasoning + json.dumps(result.calls, ensure_ascii=False),
    ):
        found.append("broken characters")
    return found + _compare_calls(want, result)


def _compare_calls(want: dict[str, Any], result: Result) -> list[str]:
    made, cut = [], []
    for call in result.calls:
        try:
            made.append((call["name"], freeze(json.loads(call["arguments"], object_pairs_hook=_unique))))
        except ValueError:
            cut.append(call["name"])
    wanted = [(call["name"], freeze(call["arguments"])) for call in want["tool_calls"]]
    found = [] if made == wanted else [f"calls {[(c['name'], c['arguments']) for c in result.calls]!r}"]
    allowed = list(want.get("incomplete", ()))
    for name in cut:
        if name in allowed or None in allowed:
            allowed.remove(name if name in allowed else None)
        else:
            found.append(f"a cut call {name!r} {result.calls!r}")
    return found


class DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise AssertionError(f"a key twice: {pairs!r}")
    return dict(pairs)


def freeze(value: Any) -> Any:
    """A value that compares by JSON's types: true is not 1, 5 is 5.0."""
    if isinstance(value, dict):
        return {key: freeze(item) for key, item in value.items()}
    if isinstance(value, list):
        return [freeze(item) for item in value]
    return ("bool", value) if isinstance(value, bool) else value
