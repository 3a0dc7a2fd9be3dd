"""The tool-call engine: what one choice of a backend's answer says, in pieces, as events in one correct shape.

Rules: one engine per choice, fed in the order of the answer: `reasoning` and `content` text, `call` for parsed
tool deltas, `finish` with the backend's reason. The same for streams and whole messages. An answer is PASS when what
came may be forwarded as it is, else the events that replace it. A call's id is the backend's or `new_id()`'s.
Calls found in reasoning count only if the answer ends by itself with nothing after them. A cut answer completes
nothing. With no tools, or tool_choice "none", text passes and nothing is a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proxy.wire.coerce import SURROGATE, Joiner, Tool, Toolset
from proxy.wire.jsonfix import SOUND, JsonRewriter
from proxy.wire.jsonstring import End
from proxy.wire.streams import Inside
from proxy.wire.toolevents import (
    PASS,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Counters,
    Event,
    Finish,
    Pass,
    Reasoning,
)
from proxy.wire.toolparsed import CallDelta, ParsedCalls
from proxy.wire.tooltext import TextMachine
from proxy.wire.toolthink import Thinking
from proxy.wire.toolxml import XmlCall

new_event = tuple.__new__  # what the event classes do, without their argument handling
NATURAL = frozenset({"stop", "tool_calls", "function_call"})


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The request's tool_choice: "auto", "none", "required", or "named" with the tool."""

    mode: str = "auto"
    named: Tool | None = None

    @classmethod
    def read(cls, value: object, tools: Toolset) -> ToolChoice:
        """From the request's field, absent or odd values being "auto"."""
        if isinstance(value, dict):
            if value.get("type") == "allowed_tools":
                allowed = value.get("allowed_tools", value)
                return cls.read(allowed.get("mode") if isinstance(allowed, dict) else None, tools)
            function = value.get("function", value)
            name = function.get("name") if isinstance(function, dict) else None
            tool = tools.by_name.get(name) if isinstance(name, str) else None
            return cls("named", tool) if tool else cls()
        return cls(value) if value in ("none", "required") and isinstance(value, str) else cls()


@dataclass(slots=True)
class FinishedCall:
    """A call as it left: for a validator, and for whoever wants to see the whole."""

    index: int
    id: str
    name: str
    parts: list[str]
    complete: bool = False

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


class ToolEngine:
    """See the module's rules. `calls`: every call so far; `counters`: what was done.

    starts_thinking: the backend has no reasoning parser and the content begins inside thinking.
    reasoning_is_content: the request switched thinking off, what comes as reasoning is the answer.
    exact: parsed deltas that need no change may PASS (false when calls are rendered anew).
    """

    def __init__(
        self,
        tools: Toolset,
        choice: ToolChoice,
        new_id: Callable[[], str],
        *,
        starts_thinking: bool = False,
        reasoning_is_content: bool = False,
        exact: bool = True,
    ) -> None:
        self.counters = Counters()
        self.calls: list[FinishedCall] = []
        self.choice = choice
        self.armed = bool(tools.by_name) and choice.mode != "none"
        self._new_id = new_id
        self._reasoning_is_content = reasoning_is_content
        self._exact = exact
        self._joiner = Joiner()
        guided = choice.mode in ("required", "named")
        self._text = TextMachine(
            tools,
            self.counters,
            self._allocate,
            guided=guided,
            named=choice.named,
            think="open" if starts_thinking else "tags",
        )
        self._code = self._text.code
        self._thinking = Thinking(tools, unclosed=starts_thinking)
        self._parsed = ParsedCalls(tools, choice.named, self._take_id, self.counters, exact=exact)
        self._ids: set[str] = set()
        self._quick = False  # the three ways of `content`, see `_aim`
        self._stream: XmlCall | None = None
        self._place = 0
        self._slot = -1  # the short way of `call`: more of a parsed string argument
        self._reader: JsonRewriter | None = None
        self._slot_parts: list[str] = []
        self._parts: list[str] = []
        self.finished = False

    @property
    def next_index(self) -> int:
        """The index the next call gets."""
        return self._parsed.next_index

    # In

    def content(self, text: str) -> list[Event] | Pass:
        """More of the answer's text."""
        stream = self._stream
        if stream is not None:
            if "<" not in text and text:
                # printable text without quotes and backslashes is its own JSON
                if text.isprintable() and not (stream.newline or '"' in text or "\\" in text):
                    stream.prev = "."
                elif text.isascii() or not SURROGATE.search(text):
                    text = stream.more(text)
                    if not text:
                        return []
                else:
                    return self._steer(text)
                self._parts.append(text)
                return [new_event(CallArguments, (self._place, text))]
        elif (self._quick and "<" not in text and "`" not in text and "~" not in text) and (
            text.isascii() or not SURROGATE.search(text)
        ):
            if "\n" in text or not self._code.settled:
                self._code.skip(text)
            return PASS
        return self._steer(text) if self.armed and text else PASS

    def _steer(self, text: str) -> list[Event] | Pass:
        """Content that needs a look; then chooses the shortest way for the next."""
        found = self._slow_content(text)
        self._aim()
        return found

    def _slow_content(self, text: str) -> list[Event] | Pass:
        whole = self._joiner.join(text)
        events: list[Event] = []
        self._reader = None
        if whole is text and self._text.passes(text):
            if self._thinking.held and not text.isspace():
                events = self._release_thinking()
            return [*events, Content(text)] if events else PASS
        self._text.feed(whole)
        self._collect(self._text.take(), events)
        if len(events) == 1 and isinstance(events[0], Content) and events[0].text == text:
            return PASS
        return events

    def _aim(self) -> None:
        """Chooses the shortest way for the next content: text that passes, a string that streams, or neither."""
        clear = not (self._joiner.half or self._thinking.held)
        self._quick = clear and self._text.idle
        streaming = self._text.streaming() if clear else None
        self._stream = streaming[0] if streaming else None
        if streaming:
            self._place = streaming[1].call
            self._parts = self.calls[self._place].parts

    def reasoning(self, text: str) -> list[Event] | Pass:
        """More of the answer's thinking."""
        if self._reasoning_is_content:
            found = self.content(text)
            return [Content(text)] if isinstance(found, Pass) else found
        if not self.armed or not text:
            return PASS
        whole = self._joiner.join(text)
        self._reader = None
        said = self._thinking.feed(whole)
        if self._thinking.held:
            self._aim()
        if said == text:
            return PASS
        return [Reasoning(said)] if said else []

    def argument(self, slot: int, text: str) -> Pass | None:
        """PASS if `text` is more of the string that streams in the arguments of parsed call `slot` and may leave as
        it is. None, and nothing was taken: it is for `call`."""
        reader = self._reader
        if reader is None or slot != self._slot or not reader.plain:
            return None
        if (text.isprintable() and not ('"' in text or "\\" in text)) or (
            text.isascii() and SOUND.match(text)
        ):
            self._slot_parts.append(text)
            return PASS
        return None

    def unseen(self, leaf: str, slot: int) -> tuple[Inside, list[str] | None] | None:
        """What strings of `leaf` ("content", "reasoning…", "arguments" of call `slot`) the engine need not see, until it
        sees something, and the list that gets them all the same. None: it must see every one."""
        if leaf == "arguments":
            reader = self._reader
            if reader is None or slot != self._slot or not reader.plain:
                return None
            return Inside.ASCII, self._slot_parts
        if leaf == "content":
            free = self._stream is None and self._quick and self._code.settled
        else:
            free = (
                not (self._reasoning_is_content or self._reader or self._joiner.half) and self._thinking.free
            )
        if not self.armed:
            return Inside.ANY, None
        return (Inside.TEXT, None) if free else None

    def call(self, delta: CallDelta) -> list[Event] | Pass:
        """A parsed tool delta."""
        slot, identifier, name, text, _ = delta
        if name is None is identifier and slot is not None and self.argument(slot, text):
            return PASS
        if not self.armed:
            self.counters.dropped += delta.id is not None or delta.name is not None
            return []
        events: list[Event] = []
        if self._thinking.held:
            events += self._release_thinking()
        if not self._parsed.follows_parsed:
            self._text.parsed_call()
            self._collect(self._text.take(), events)
            self._parsed.follows_parsed = True
        found, same = self._parsed.feed(delta)
        self._note(found)
        self._aim()
        self._slot = -1
        self._reader = self._parsed.streaming(slot)
        if self._reader is not None and slot is not None:
            self._slot, self._slot_parts = slot, self.calls[slot].parts
        return PASS if same and not events else events + found

    def finish(self, reason: str | None) -> list[Event]:
        """The end, with the backend's reason; None if it never gave one (then no Finish comes)."""
        reason = reason or None
        self.finished = True
        if not self.armed:
            given = "stop" if reason == "tool_calls" else reason
            self.counters.repaired_reasons += given != reason
            return [Finish(given)] if given else []
        end = End.STOP if reason in NATURAL else End.CUT
        events: list[Event] = []
        if self._text.idle and not (self.calls or self._parsed.any or self._thinking.begun):
            return self._finished(reason, events)  # words, and nothing else
        self._text.finish(end)
        self._collect(self._text.take(), events)
        parsed = self._parsed.finish(end)
        self._note(parsed)
        events += parsed
        events += self._end_thinking(end)
        return self._finished(reason, events)

    def _finished(self, reason: str | None, events: list[Event]) -> list[Event]:
        if reason is None:
            return events
        given = self._reason(reason)
        self.counters.repaired_reasons += given != reason
        events.append(Finish(given))
        return events

    def _reason(self, reason: str) -> str:
        if reason not in NATURAL:
            return reason
        if not self.calls:
            return "stop"
        return "tool_calls" if all(call.complete for call in self.calls) else "length"

    # Between the parts

    def _collect(self, found: list[Event], events: list[Event]) -> None:
        """Events of the text machine; thinking inside it goes the way of all thinking."""
        for event in found:
            if isinstance(event, Reasoning):
                said = self._thinking.feed(event.text)
                if said:
                    events.append(Reasoning(said))
                continue
            if isinstance(event, Content | CallStart):
                if self._thinking.held and not (isinstance(event, Content) and event.text.isspace()):
                    events += self._release_thinking()
                self._parsed.follows_parsed = False
            events.append(event)
            self._note((event,))

    def _note(self, events: list[Event] | tuple[Event, ...]) -> None:
        for event in events:
            if isinstance(event, CallStart):
                self.calls.append(FinishedCall(event.call, event.id, event.name, []))
            elif isinstance(event, CallArguments):
                self.calls[event.call].parts.append(event.text)
            elif isinstance(event, CallEnd):
                self.calls[event.call].complete = event.complete

    def _allocate(self, name: str) -> CallStart:
        start = CallStart(self._parsed.next_index, self._take_id(None), name)
        self._parsed.next_index += 1
        return start

    def _take_id(self, given: str | None) -> str:
        """The backend's id if it is there and new, else one of ours."""
        identifier = given if given and given not in self._ids else self._new_id()
        self._ids.add(identifier)
        return identifier

    def _release_thinking(self) -> list[Event]:
        said = self._thinking.release()
        self.counters.released += bool(said)
        return [Reasoning(said)] if said else []

    def _end_thinking(self, end: End) -> list[Event]:
        """Calls held at the end of thinking are the answer if it ended by itself and there is no other."""
        alone = end is End.STOP and not self.calls and not self._text.said
        found = self._thinking.finish(alone)
        if isinstance(found, str):
            self.counters.released += bool(self._thinking.had_calls)
            return [Reasoning(found)] if found else []
        self.counters.add(self._thinking.counters)
        events: list[Event] = [Reasoning(found.text)] if found.text else []
        index = 0
        for event in found.events:
            if isinstance(event, CallStart):
                start = self._allocate(event.name)
                index = start.call
                self.counters.promoted += 1
                events.append(start)
            elif isinstance(event, CallArguments):
                events.append(CallArguments(index, event.text))
            elif isinstance(event, CallEnd):
                events.append(CallEnd(index, event.complete))
        self._note(events)
        return events
