"""Between chat.completions' JSON and the tool-call engine: stream chunks and whole messages.

Rules: a chunk that need not change is answered PASS, and the caller forwards the bytes that came. A chunk with a
finish_reason waits for the next one that says something, for only the last reason of a choice counts; where nothing was
to be repaired it then leaves as it came too. Fields that are not about text, thinking or calls stay what they were. A
stream and a whole message of the same answer give the same result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from proxy.wire.toolcalls import ToolEngine
from proxy.wire.toolevents import (
    PASS,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Finish,
    Pass,
    Reasoning,
)
from proxy.wire.toolparsed import CallDelta
from proxy.wire.toolrender import Renderer, ToolFormat, renderer
from proxy.wire.toolxml import leftovers

VOID = frozenset({"", "null", "none", "None"})
THOUGHTS = ("reasoning", "reasoning_content")
OURS = frozenset({"content", "tool_calls", *THOUGHTS})


@dataclass(frozen=True, slots=True)
class ChatShape:
    """How answers leave. reasoning: () as the backend spells it, else the field names to fill."""

    form: ToolFormat = ToolFormat.OPENAI
    reasoning: tuple[str, ...] = ()


class _Choice:
    """One choice of a stream: its engine, its renderer, and a chunk whose reason may not be the last."""

    __slots__ = ("engine", "fields", "held", "listed", "over", "renderer")

    def __init__(self, engine: ToolEngine, form: ToolFormat) -> None:
        self.engine = engine
        self.renderer: Renderer = renderer(form)
        self.fields: tuple[str, ...] = ()  # how the backend spells reasoning
        self.held: _Held | None = None
        self.listed = False  # calls came in tool_calls
        self.over = False


@dataclass(slots=True)
class _Held:
    """A chunk with a finish_reason: what it says, whether that is all as it came, and the chunk itself."""

    events: list[Event]
    same: bool
    chunk: dict[str, Any]
    choice: dict[str, Any]
    raw: object


class ChatStream:
    """`feed` each chunk with what it was read from; `close` before `[DONE]`. Both return what to send, in order:

    PASS for the chunk's own raw form, else a list of raw forms and of new chunks (dicts). `cut` when the stream
    ended without its end: what is held is sent, no call is completed, no reason is made up.
    """

    def __init__(self, new_engine: Callable[[bool], ToolEngine], shape: ChatShape | None = None) -> None:
        self._new_engine = new_engine
        self.shape = shape or ChatShape()
        self.choices: dict[int, _Choice] = {}
        self._last: dict[str, Any] = {}
        self.waiting = False
        """A chunk with a finish_reason waits for what follows."""

    def feed(self, chunk: dict[str, Any], raw: object) -> list[object] | Pass:
        choices = chunk.get("choices")
        out: list[object] = []
        if not isinstance(choices, list) or not choices:
            if self.waiting:
                self._finish_held(out)
            return [*out, raw] if out else PASS
        self._last = chunk
        if len(choices) == 1 and isinstance(choices[0], dict):
            same = self._choice(chunk, choices[0], raw, out)
            return PASS if same and not out else [*out, raw] if same else out
        for choice in choices:
            if isinstance(choice, dict):
                one = {**chunk, "choices": [choice]}
                if self._choice(one, choice, one, out):
                    out.append(one)
        return out

    def short_way(
        self, index: int, leaf: str, slot: int
    ) -> Callable[[str], list[Event] | Pass | None] | None:
        """What takes the text of a delta that holds nothing but `leaf` of choice `index`: the engine itself, where
        nothing else has to be looked at. Its events go to `said`; None from it means that it took nothing."""
        state = self.choices.get(index)
        if state is None or self.shape.form is not ToolFormat.OPENAI:
            return None
        if leaf == "content":
            return state.engine.content
        if leaf == "arguments":
            return partial(state.engine.argument, slot)
        return state.engine.reasoning if self.shape.reasoning in ((), (leaf,)) else None

    def said(self, index: int, events: Sequence[Event]) -> list[object]:
        """The chunk that says `events`, the last one but for its delta."""
        out: list[object] = []
        choice = {key: value for key, value in self._last["choices"][0].items() if key != "logprobs"}
        self._send(self._last, choice, {}, events, None, self.choices[index], out)
        return out

    def close(self) -> list[object]:
        """The stream ended by itself: reasons that wait are final; choices without one are cut."""
        out: list[object] = []
        self._finish_held(out)
        return out + self.cut()

    def cut(self) -> list[object]:
        """The stream ended in the middle: held text leaves, calls stay open."""
        out: list[object] = []
        for index, state in self.choices.items():
            if not state.over:
                state.over = True
                events = state.held.events if state.held else []
                events += state.renderer.render(state.engine.finish(None))
                template = {**self._last, "choices": []}
                self._send(template, {"index": index}, {}, events, None, state, out)
        return out

    def _choice(self, chunk: dict[str, Any], choice: dict[str, Any], raw: object, out: list[object]) -> bool:
        """True when the chunk may leave as it came, behind `out`."""
        index = choice.get("index")
        key = index if type(index) is int else 0
        state = self.choices.get(key)
        if state is None:
            state = self.choices[key] = _Choice(
                self._new_engine(self.shape.form is ToolFormat.OPENAI), self.shape.form
            )
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        if state.held is not None:
            if not choice.get("finish_reason") and not any(delta[key] for key in delta if key != "role"):
                if chunk.get("usage"):
                    state.held.chunk = {**state.held.chunk, "usage": chunk["usage"]}
                    state.held.same = False
                return False
            self._unhold(state, out)
        events, same = read_delta(state, delta, self.shape)
        if choice.get("finish_reason") == "":
            same = False
        elif choice.get("finish_reason"):
            state.held = _Held(events, same, chunk, choice, raw)
            self.waiting = True
            return False
        if same:
            return True
        self._send(chunk, choice, delta, events, None, state, out)
        return False

    def _unhold(self, state: _Choice, out: list[object]) -> None:
        """More came: the reason was none. What the chunk said is sent without it."""
        held, state.held = state.held, None
        if held is not None:
            self._send(held.chunk, held.choice, held.choice.get("delta") or {}, held.events, None, state, out)

    def _finish_held(self, out: list[object]) -> None:
        self.waiting = False
        for state in self.choices.values():
            held, state.held = state.held, None
            if held is None or state.over:
                continue
            state.over = True
            given = held.choice["finish_reason"]
            found = state.engine.finish(given)
            if held.same and _quiet(found, given) and type(state.renderer) is Renderer:
                out.append(held.raw)
                continue
            events = held.events + state.renderer.render(found)
            reason = _pop_reason(events, given)
            self._send(held.chunk, held.choice, held.choice.get("delta") or {}, events, reason, state, out)

    def _send(
        self,
        chunk: dict[str, Any],
        choice: dict[str, Any],
        delta: dict[str, Any],
        events: Sequence[Event],
        reason: str | None,
        state: _Choice,
        out: list[object],
    ) -> None:
        fields = self.shape.reasoning or state.fields or ("reasoning_content",)
        gone = {*OURS, "function_call"} if state.engine.armed else OURS
        built = {key: value for key, value in delta.items() if key not in gone and value is not None}
        built.update(write_delta(events, fields))
        if built or reason is not None:
            out.append({**chunk, "choices": [{**choice, "delta": built, "finish_reason": reason}]})


def read_delta(state: _Choice, delta: dict[str, Any], shape: ChatShape) -> tuple[list[Event], bool]:
    """What a delta says once it is put right, and whether it may leave as it came."""
    engine, same = state.engine, shape.form is ToolFormat.OPENAI
    events: list[Event] = []
    for key, value in delta.items():
        if (value and key != "role") or key == "function_call":
            break
    else:  # the first and the last delta say nothing
        return events, same or not shape.reasoning
    thought, fields = _thought(delta)
    if thought:
        state.fields = fields
        found = engine.reasoning(thought)
        same = same and found is PASS and (not shape.reasoning or shape.reasoning == fields)
        events += [Reasoning(thought)] if isinstance(found, Pass) else found
    text = delta.get("content")
    if isinstance(text, str) and text:
        found = engine.content(text)
        same = same and found is PASS
        events += [Content(text)] if isinstance(found, Pass) else found
    calls, legacy = _calls(state, delta)
    same = same and not legacy
    for entry in calls:
        call, clean = read_call(entry)
        found = engine.call(call)
        same = same and clean and found is PASS
        events += _as_events(call) if isinstance(found, Pass) else found
    if shape.form is not ToolFormat.OPENAI:
        rendered = state.renderer.render(events)
        return rendered, not calls and _same(rendered, _text_events(thought, text)) and not shape.reasoning
    return events, same


def _calls(state: _Choice, said: dict[str, Any]) -> tuple[list[Any], bool]:
    """The entries of tool_calls, and whether the deprecated function_call stands beside them or in their place: some
    backends tell a call in both, some only there."""
    if "tool_calls" not in said and "function_call" not in said:
        return [], False
    calls, legacy = said.get("tool_calls"), said.get("function_call")
    calls = calls if isinstance(calls, list) else []
    state.listed = state.listed or bool(calls)
    if not state.engine.armed or not isinstance(legacy, dict):
        return calls, False
    return calls if state.listed else [{"index": 0, "function": legacy}], True


def _pop_reason(events: list[Event], given: str | None) -> str | None:
    last = events[-1] if events else None
    if isinstance(last, Finish):
        events.pop()
        return last.reason
    return given


def _same(some: Sequence[Event], others: Sequence[Event]) -> bool:
    """Equal and of the same kinds (tuples of different kinds compare equal)."""
    return list(some) == list(others) and list(map(type, some)) == list(map(type, others))


def _quiet(ending: Sequence[Event], given: str | None) -> bool:
    """Nothing comes of the end but what is said already: calls are closed, the reason is the backend's."""
    if not ending or type(ending[-1]) is not Finish or ending[-1].reason != given:
        return False
    return len(ending) == 1 or all(isinstance(event, CallEnd) for event in ending[:-1])


def _text_events(thought: str, text: Any) -> list[Event]:
    events: list[Event] = [Reasoning(thought)] if thought else []
    return events + [Content(text)] if isinstance(text, str) and text else events


def _thought(delta: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Text of the thinking in a delta or message, and the fields it stood in."""
    if "reasoning" not in delta and "reasoning_content" not in delta:
        return "", ()
    fields = tuple(key for key in THOUGHTS if isinstance(delta.get(key), str) and delta[key])
    return (delta[fields[0]] if fields else ""), fields


def read_call(entry: Any, *, fresh: bool = False) -> tuple[CallDelta, bool]:
    """An entry of tool_calls, void values gone, and whether it is spelled as it should be."""
    entry = entry if isinstance(entry, dict) else {}
    function = entry.get("function")
    clean = isinstance(function, dict)
    function = function if isinstance(function, dict) else entry  # name and arguments stand beside it then
    arguments = function.get("arguments")
    clean = clean and (isinstance(arguments, str) or "arguments" not in function)
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    values = []
    for value, present in ((entry.get("id"), "id" in entry), (function.get("name"), "name" in function)):
        void = not isinstance(value, str) or value.strip() in VOID
        clean = clean and not (present and void)
        values.append(None if void else value)
    clean = clean and entry.get("type", "function") == "function" and ("type" in entry or values[0] is None)
    index = entry.get("index")
    clean = clean and (index is None or type(index) is int)
    return CallDelta(_position(index), values[0], values[1], arguments, fresh), clean


def _position(index: Any) -> int | None:
    """An index, also one that was written as text or as a decimal."""
    if isinstance(index, str) and index.isdecimal() and len(index) < 10:
        return int(index)
    if isinstance(index, float) and index.is_integer():
        return int(index)
    return index if isinstance(index, int) and not isinstance(index, bool) else None


def _as_events(call: CallDelta) -> list[Event]:
    """What a parsed delta that passes says."""
    index = call.slot or 0
    events: list[Event] = []
    if call.name is not None:
        events.append(CallStart(index, call.id or "", call.name))
    if call.arguments:
        events.append(CallArguments(index, call.arguments))
    return events


def write_delta(events: Sequence[Event], fields: Sequence[str]) -> dict[str, Any]:
    """One delta that says what the events say."""
    content, thought = "", ""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, Reasoning):
            thought += event.text
        elif isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            calls[event.call] = {
                "index": event.call,
                "id": event.id,
                "type": "function",
                "function": function,
            }
        elif isinstance(event, CallArguments):
            entry = calls.setdefault(event.call, {"index": event.call, "function": {"arguments": ""}})
            entry["function"]["arguments"] += event.text
    delta: dict[str, Any] = dict.fromkeys(fields, thought) if thought else {}
    if content:
        delta["content"] = content
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def repair_choice(
    engine: ToolEngine, choice: dict[str, Any], shape: ChatShape | None = None
) -> dict[str, Any]:
    """A whole choice (`message`, `finish_reason`) put right; the same object when nothing changes."""
    shape = shape or ChatShape()
    message = choice.get("message")
    if not isinstance(message, dict) or not isinstance(choice.get("finish_reason") or "", str):
        return choice
    state = _Choice(engine, shape.form)
    calls, legacy = _calls(state, message)
    text = message.get("content")
    leaked = leftovers(text) if calls and engine.armed and isinstance(text, str) and text else 0
    source = {key: message.get(key) for key in (*THOUGHTS, "content")}
    if leaked:
        source["content"] = str(text)[leaked:]
        engine.counters.repaired_leaks += 1
    events, same = read_delta(state, source, shape)
    same = same and not legacy
    for entry in calls:
        call, clean = read_call(entry, fresh=True)
        found = engine.call(call._replace(slot=engine.next_index))
        same = same and clean and found is PASS and shape.form is ToolFormat.OPENAI
        events += state.renderer.render(_as_events(call) if isinstance(found, Pass) else found)
    given = choice.get("finish_reason") or None
    ending = engine.finish(given)
    if same and not leaked and _quiet(ending, given):
        return choice
    events += state.renderer.render(ending)
    reason = _pop_reason(events, given)
    gone = {*OURS, "function_call"} if legacy else OURS
    built = {key: value for key, value in message.items() if key not in gone}
    said = write_delta(events, shape.reasoning or state.fields or ("reasoning_content",))
    found_calls = said.pop("tool_calls", None)
    for entry in found_calls or ():
        entry.pop("index")
    built["content"] = said.pop("content", None if found_calls or text is None else "")
    built.update(said)
    if found_calls:
        built["tool_calls"] = found_calls
    return {**choice, "message": built, "finish_reason": reason}
