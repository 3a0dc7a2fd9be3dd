"""Free text of one channel in, content and calls out: finds the calls that a model wrote into its answer.

Rules: everything goes out at once but what may be the beginning of an opener and the blanks before it. A call is
begun only by `<tool_call>`, or by `<function=` at a line start, with a declared name complete and structure behind
it; else the text is released as it came. Shown code is text. Behind a call its closers and blanks are taken out.
Held text never gets lost: it is released when the text ends, unless the text was cut inside an opener.
States take (buffer, index, end) and return the index they got to; what they leave is held for the next delta.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from proxy.wire import patterns
from proxy.wire.coerce import Tool, Toolset
from proxy.wire.jsonstring import End
from proxy.wire.toolevents import CallStart, Counters, Event, Reasoning
from proxy.wire.toolopen import WRAPPER, Opening, read_opening
from proxy.wire.toolrun import FUNCTIONS, MAX_BLANK, THINK_END, CallRunner, State
from proxy.wire.toolvalue import begins_tag
from proxy.wire.toolxml import XmlCall

THINK = "<think>"
GUIDED = patterns.compile(r"\s*+(?:```\w*+\s*+)?+(?=[\[{])")
GUIDED_START = re.compile(r"\s*(?:`{1,2}|```\w{0,10}\s*)?\Z")
MAYBE = re.compile(r"<(?=tool_call>|function[=> ]|/?think>|/tool_call>|[/a-z_]{0,11}\Z)")


class TextMachine(CallRunner):
    """`feed`, then `take` the events; `finish` at the end. `allocate` names a call's index and id.

    guided: JSON without tags at the start is a call (tool_choice "required" or a name, then `named` is its tool).
    think: thinking tags at the start are understood (content), or "open": the text begins inside thinking.
    """

    def __init__(
        self,
        tools: Toolset,
        counters: Counters,
        allocate: Callable[[str], CallStart],
        *,
        guided: bool = False,
        named: Tool | None = None,
        think: str = "",
    ) -> None:
        super().__init__(tools, counters, allocate, guided, named)
        self._thinks = bool(think)
        self._thought = False  # thinking was read
        self._begin: State = self._guided_start if guided else self._text
        self._state = self._think if think == "open" else self._begin

    # In and out

    def passes(self, text: str) -> bool:
        """True, and the text is accounted for, when it leaves as it came; the caller forwards it."""
        if "<" in text or "`" in text or "~" in text:
            return False
        if not self.idle:
            if self.said or self._held or self._gap or self._guided or self._state != self._text:
                return False
            self.said = self.idle = not text.isspace()  # the first words of an answer
        self.code.skip(text)
        return True

    def feed(self, text: str) -> None:
        if self._held:
            text = self._held + text
        self._run(text, End.MORE)

    def take(self) -> list[Event]:
        self._flush()
        events, self._events = self._events, []
        return events

    def streaming(self) -> tuple[XmlCall, CallStart] | None:
        """The call and its start while a string argument leaves as it comes."""
        if self._xml is None or self._start is None or self._held or not self._xml.plain:
            return None
        return self._xml, self._start

    @property
    def unsaid(self) -> int:
        """Number of characters that were read and neither said nor taken for a call."""
        return self._raw_size + len(self._gap) + len(self._held)

    @property
    def thinking(self) -> bool:
        """What comes next is still thinking."""
        return self._state == self._think

    @property
    def waiting(self) -> bool:
        """True inside a call or while text is held."""
        return bool(self._held or self._xml or self._json)

    def _run(self, buffer: str, end: End) -> None:
        index = 0
        while True:
            state = self._state
            reached = state(buffer, index, end)
            if reached == index and self._state == state:
                break
            index = reached
        self._held = buffer[index:]
        free = self.said and not (self._held or self._gap or (self._guided and self._named is None))
        self.idle = free and self._state == self._text and self.code.quiet

    def finish(self, end: End) -> None:
        """The text ended, by itself or cut: everything held becomes something."""
        self._run(self._held, end)
        rest, self._held = self._held, ""
        if self._xml is not None or (self._json is not None and self._json.tool is not None):
            self._stop_call(end)
        elif self._json is not None or self._raw:
            self._give_up("".join(self._raw) + rest, end, lost=WRAPPER in self._raw[0] or self._guided)
        elif self._state == self._candidate:
            if not self._behind or end is End.CUT:
                self._give_up(rest, end, lost=True)
        elif self._state == self._think and rest:
            self._events.append(Reasoning(rest))
        elif self._state == self._text or self._state == self._guided_start:
            self._say(self._gap + rest)
        self._gap, self._raw, self._raw_size = "", [], 0
        self._flush()

    def _stop_call(self, end: End) -> None:
        self.forced = True
        call = self._xml or self._json
        assert call is not None
        call.stop(end)
        self._progress()

    def _give_up(self, text: str, end: End, *, lost: bool) -> None:
        """Held text at the end: the beginning of a call that was cut is markup, anything else is content."""
        if end is End.CUT and lost:
            self._counters.cut += 1
        else:
            self._release(text)

    def parsed_call(self) -> None:
        """The backend sends a call it parsed: bits of its opener before it are leaked markup."""
        if self._xml is not None or self._state == self._think:
            return
        held = "".join(self._raw) + self._held
        if held:
            leak = WRAPPER.startswith(held[:11]) and (len(held) > 5 or self.code.line_start)
            leak = leak or (self.code.line_start and begins_tag(held[:10]))
            if leak:
                self._counters.repaired_leaks += 1
            else:
                self._say(self._gap + held)
        self._held, self._gap, self._raw, self._raw_size, self._json = "", "", [], 0, None
        self._end_call(parsed=True)
        self.idle = False

    # Text

    def _text(self, buffer: str, index: int, end: End) -> int:
        self._behind = False
        lines = self._guided and self._named is None
        # A look at all the rest for every line would be quadratic.
        stop = buffer.find("\n", index) + 1 if lines else 0
        found = MAYBE.search(buffer, index, stop or len(buffer))
        tag = found.start() if found else -1
        if lines:
            line = buffer.find("\n", index, tag if tag >= 0 else len(buffer)) + 1
            if line:
                self.code.advance(buffer[index:line])
                self._say(self._gap + buffer[index:line])
                self._state = self._guided_start
                return line
        if tag < 0:
            self.code.advance(buffer[index:])
            self._say(self._gap + buffer[index:])
            return len(buffer)
        if tag > index:
            before = buffer[index:tag]
            self.code.advance(before)
            body = before.rstrip()
            if body:
                self._say(self._gap + body)
            self._gap += before[len(body) :]
        return self._tag(buffer, tag, end)

    def _tag(self, buffer: str, tag: int, end: End) -> int:
        """A "<" in text: an opener, maybe one, or just that."""
        rest = buffer[tag : tag + 12]
        if not self.code.literal:
            line = self.code.line_start or not self.said
            openers = (WRAPPER, *FUNCTIONS) if line else (WRAPPER,)
            if rest.startswith(openers):
                self._state = self._candidate
                return tag
            if self._thinks and not self.said:
                openers = (*openers, THINK, THINK_END)
                if rest.startswith(THINK):
                    self._state = self._think
                    return tag + len(THINK)
                if rest.startswith(THINK_END):
                    self._counters.repaired_leaks += 1
                    self._gap = ""
                    self._state = self._begin
                    return tag + len(THINK_END)
            if self._block:
                openers = (*openers, "</tool_call>")
                if rest == "</tool_call>":
                    self._counters.repaired_leaks += 1
                    self._end_call()
                    self._block = False
                    return tag + len(rest)
            if begins_tag(rest, openers):
                if end is End.MORE:
                    return tag
                if end is End.CUT and line and len(rest) > 5:
                    self._counters.cut += 1
                    self._gap = ""
                    return len(buffer)
        self.code.advance("<")
        self._say(self._gap + "<")
        return tag + 1

    def _think(self, buffer: str, index: int, end: End) -> int:
        """Thinking inside content, up to its closing tag."""
        if not self._thought and end is End.MORE and THINK.startswith(buffer[index:]):
            return index
        stop = buffer.find(THINK_END, index)
        if stop < 0:
            keep = next(
                (n for n in range(min(7, len(buffer) - index), 0, -1) if THINK_END[:n] == buffer[-n:]), 0
            )
            stop, after = len(buffer) - keep, len(buffer) - keep
        else:
            after = stop + len(THINK_END)
            self._state = self._begin
        thought = buffer[index:stop]
        if not self._thought and thought.startswith(THINK):
            thought = thought[len(THINK) :]
        self._thought = True
        if thought:
            self._flush()
            self._events.append(Reasoning(thought))
        return after

    # Openers

    def _candidate(self, buffer: str, index: int, end: End) -> int:
        opening = read_opening(buffer, index, self._tools)
        if opening.kind is Opening.WAIT and end is End.STOP and opening.tool is not None:
            opening = opening.at_end()
        if opening.kind is Opening.WAIT:
            return index
        if opening.kind is Opening.TEXT:
            self._release("<")
            return index + 1
        self._block = opening.wrapped
        self._counters.suspected += opening.suspected
        if opening.kind is Opening.JSON:
            self._begin_json(self._gap + buffer[index : opening.end])
            self._gap = ""
            return opening.end
        assert opening.tool is not None
        self._counters.repaired_syntax += opening.repaired
        self._xml = XmlCall(opening.tool, self._tools)
        self._counters.xml += 1
        self._commit(opening.tool)
        self._state = self._in_xml
        return opening.end

    def _guided_start(self, buffer: str, index: int, end: End) -> int:
        """JSON that a tool_choice asked for, at the start of the text (required: of any line), maybe fenced."""
        found = GUIDED.match(buffer, index, index + MAX_BLANK)
        if found:
            self._begin_json(buffer[index : found.end()])
            return found.end()
        if end is End.MORE and len(buffer) - index < MAX_BLANK and GUIDED_START.match(buffer, index):
            return index
        self._state = self._text
        return index
