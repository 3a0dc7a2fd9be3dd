"""The part of a text machine that runs calls: from the opener's end to where the answer goes on.

Rules: a JSON call's text is kept until its name is known and declared, else it is released as it came. Behind a call
its closers and blanks are taken out, another call may follow at once, and text that goes on is kept apart from
the text before by white space.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from proxy.wire.coerce import Tool, Toolset
from proxy.wire.jsonstring import End
from proxy.wire.markdown import Markdown
from proxy.wire.toolevents import CallArguments, CallEnd, CallStart, Content, Counters, Event
from proxy.wire.tooljson import JsonCall
from proxy.wire.toolopen import WRAPPER
from proxy.wire.toolvalue import ANY_CLOSER, END_TOKEN, VARIANTS, begins_tag
from proxy.wire.toolxml import XmlCall

BLANK = re.compile(r"\s*")
FUNCTIONS = ("<function=", "<function>", "<function ")
THINK_END = "</think>"
AFTER = ("</parameter>", "</function>", "</tool_call>", *VARIANTS, THINK_END, WRAPPER, *FUNCTIONS)
OBJECT = re.compile(r"[\s,\[\]]*")
MAX_BLANK = 256  # blanks before guided JSON
MAX_HELD = 1 << 20  # characters of a JSON call whose name has not come yet

State = Callable[[str, int, End], int]


class CallRunner:
    """State and states of the calls in a text; `_text` and `_candidate` are the text machine's."""

    def __init__(
        self,
        tools: Toolset,
        counters: Counters,
        allocate: Callable[[str], CallStart],
        guided: bool,
        named: Tool | None,
    ) -> None:
        self._tools = tools
        self._counters = counters
        self._allocate = allocate
        self._guided = guided
        self._named = named
        self.code = Markdown()
        self._events: list[Event] = []
        self._saying: list[str] = []
        self._held = ""
        self._gap = ""  # blanks before what is held, or behind a call
        self._raw: list[str] = []  # text of a JSON call until its name is known
        self._raw_size = 0
        self._block = False  # a <tool_call> is open
        self._objects = False  # the last call was JSON: more objects may follow
        self._behind = False  # nothing but structure came since the last call
        self._parsed = False  # the last call came parsed: a lone ">" may follow
        self._xml: XmlCall | None = None
        self._json: JsonCall | None = None
        self._start: CallStart | None = None
        self.said = False  # content that is not blank was sent
        self.forced = False  # a call was closed because the text ended
        self.idle = False  # plain text passes
        self._state: State = self._text

    def _text(self, buffer: str, index: int, end: End) -> int:
        raise NotImplementedError

    def _candidate(self, buffer: str, index: int, end: End) -> int:
        raise NotImplementedError

    # What is said

    def _say(self, text: str) -> None:
        self._gap = ""
        if text:
            self._saying.append(text)
            self.said = self.said or not text.isspace()

    def _flush(self) -> None:
        if self._saying:
            self._events.append(Content("".join(self._saying)))
            self._saying.clear()

    def _release(self, text: str) -> None:
        """What looked like a call is content, unchanged."""
        self._counters.released += 1
        if self._raw and WRAPPER in self._raw[0]:
            self._block = False
        self.code.advance(text)
        apart = self._behind and self.said and not text[:1].isspace()
        self._say((self._gap or ("\n" if apart else "")) + text)
        self._raw, self._raw_size, self._json = [], 0, None
        self._state = self._text

    def _commit(self, tool: Tool) -> None:
        self._gap = ""
        self._flush()
        self._start = self._allocate(tool.name)
        self._events.append(self._start)

    # Calls

    def _in_xml(self, buffer: str, index: int, end: End) -> int:
        assert self._xml is not None
        index = self._xml.step(buffer, index, end)
        self._progress()
        return index

    def _begin_json(self, raw: str) -> None:
        self._raw, self._raw_size = [raw], len(raw)
        self._state = self._json_open

    def _json_open(self, buffer: str, index: int, end: End) -> int:
        """Between the opener, or the object before, and a JSON object."""
        at = OBJECT.match(buffer, index).end()  # type: ignore[union-attr]
        if at >= len(buffer) and end is End.MORE and at - index < MAX_BLANK:
            return index
        self._remember(buffer[index:at])
        if buffer[at : at + 1] == "{":
            self._json = JsonCall(self._tools, self._named if self._guided and not self._block else None)
            self._state = self._in_json
        elif at < len(buffer):
            self._release("".join(self._raw))
        return at

    def _remember(self, text: str) -> None:
        self._raw.append(text)
        self._raw_size += len(text)

    def _in_json(self, buffer: str, index: int, end: End) -> int:
        call = self._json
        assert call is not None
        reached = call.step(buffer, index, End.MORE)
        if call.tool is None:
            self._remember(buffer[index:reached])
            if call.rejected or self._raw_size > MAX_HELD:
                self._release("".join(self._raw))
            return reached
        if self._raw:
            self._raw, self._raw_size = [], 0
            guided = self._guided and not self._block
            self._counters.guided += guided
            self._counters.json += not guided
            self._commit(call.tool)
        self._progress()
        return reached

    def _progress(self) -> None:
        """Send what the open call has, and end it if it is over."""
        call = self._xml or self._json
        if call is None or self._start is None:
            return
        text = "".join(call.out)
        call.out.clear()
        if text:
            self._events.append(CallArguments(self._start.call, text))
        if call.done:
            count = self._counters
            count.repaired_syntax += call.repairs > 0
            count.failures += call.failures
            count.duplicates += call.duplicates
            count.suspected += call.suspected
            count.cut += not call.complete
            self._events.append(CallEnd(self._start.call, call.complete))
            self._objects = self._json is not None
            self._xml = self._json = self._start = None
            self._end_call()
            if not call.complete:
                self._state = self._discard

    def _end_call(self, *, parsed: bool = False) -> None:
        self._parsed = parsed
        self._behind = True
        self._gap = ""
        self.code.advance("\n")
        self._state = self._after

    def _discard(self, buffer: str, index: int, end: End) -> int:
        """The rest of a call that cannot be read."""
        stop = buffer.find("</tool_call>", index)
        if stop >= 0:
            self._state = self._after
            return stop
        return max(index, len(buffer) - len("</tool_call>"))

    def _after(self, buffer: str, index: int, end: End) -> int:
        """Behind a call: closers and blanks are its own, another call may follow, else text goes on."""
        start = BLANK.match(buffer, index).end()  # type: ignore[union-attr]
        if start > index:
            self._gap += buffer[index:start]
            return start
        if index >= len(buffer):
            return index
        closer = ANY_CLOSER.match(buffer, index) or END_TOKEN.match(buffer, index)
        if closer:
            self._block = self._block and closer.group() != "</tool_call>"
            self._gap = ""
            self._counters.repaired_leaks += self._parsed
            return closer.end()
        if buffer.startswith((WRAPPER, *FUNCTIONS), index):
            self._state = self._candidate
            return index
        if buffer.startswith(THINK_END, index):
            self._counters.repaired_leaks += 1
            self._gap = ""
            return index + len(THINK_END)
        if begins_tag(buffer[index : index + 32], AFTER):
            return index if end is End.MORE else len(buffer)
        return self._after_mark(buffer, index, end)

    def _after_mark(self, buffer: str, index: int, end: End) -> int:
        """A character behind a call that is neither blank nor the start of a tag we know."""
        char = buffer[index]
        guided = self._guided and not self._block
        if self._objects and (self._block or guided):
            if char == "{":
                self._begin_json("")
                return index
            if char in ",]}" or (guided and char == "`"):
                return index + 1
        if self._parsed and char == ">":
            rest = buffer[index + 1 : index + 2]
            if not rest and end is End.MORE:
                return index
            if rest in ("", "\n", "<"):  # else it may be a quotation
                self._parsed = False
                self._counters.repaired_leaks += 1
                return index + 1
        self._gap = (self._gap or "\n") if self.said else ""
        self._guided = False
        self._state = self._text
        return index
