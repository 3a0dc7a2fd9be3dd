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

from proxy.wire.coerce import Tool, Toolset
from proxy.wire.jsonstring import End
from proxy.wire.markdown import Markdown
from proxy.wire.toolevents import CallArguments, CallEnd, CallStart, Content, Counters, Event, Reasoning
from proxy.wire.tooljson import JsonCall
from proxy.wire.toolopen import WRAPPER, Opening, read_opening
from proxy.wire.toolxml import ANY_CLOSER, END_TOKEN, VARIANTS, XmlCall, begins_tag

BLANK = re.compile(r"\s*")
FUNCTIONS = ("<function=", "<function>", "<function ")
THINK, THINK_END = "<think>", "</think>"
AFTER = ("</parameter>", "</function>", "</tool_call>", *VARIANTS, WRAPPER, *FUNCTIONS)
GUIDED = re.compile(r"\s*(?:```\w*\s*)?(?=[\[{])")
GUIDED_START = re.compile(r"\s*(?:`{1,2}|```\w{0,10}\s*)?\Z")
MAYBE = re.compile(r"<(?=tool_call>|function[=> ]|/?think>|/tool_call>|[/a-z_]{0,11}\Z)")
OBJECT = re.compile(r"[\s,\[\]]*")
MAX_BLANK = 256  # blanks before guided JSON
MAX_HELD = 1 << 20  # characters of a JSON call whose name has not come yet

State = Callable[[str, int, End], int]


class TextMachine:
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
        self._tools = tools
        self._counters = counters
        self._allocate = allocate
        self._guided = guided
        self._named = named
        self._thinks = bool(think)
        self._thought = False  # thinking was read
        self._code = Markdown()
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
        self._begin: State = self._guided_start if guided else self._text
        self._state: State = self._think if think == "open" else self._begin
        self.idle = False  # plain text passes
        self.settled = False  # plain text without newlines does not even have to be accounted for

    # In and out

    def passes(self, text: str) -> bool:
        """True, and the text is accounted for, when it leaves as it came; the caller forwards it."""
        if self.idle and "<" not in text and "`" not in text and "~" not in text:
            if "\n" in text or not self.settled:
                self.skip(text)
            return True
        return False

    def skip(self, text: str) -> None:
        """Accounts for text without "<", backtick or tilde."""
        self._code.skip(text)
        self.settled = self._code.settled

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
        self.idle = (
            self._state == self._text and self.said and self._code.quiet and not (self._held or self._gap)
        )
        self.settled = self._code.settled

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
            leak = WRAPPER.startswith(held[:11]) and (len(held) > 5 or self._code.line_start)
            leak = leak or (self._code.line_start and begins_tag(held[:10]))
            if leak:
                self._counters.repaired_leaks += 1
            else:
                self._say(self._gap + held)
        self._held, self._gap, self._raw, self._raw_size, self._json = "", "", [], 0, None
        self._end_call(parsed=True)
        self.idle = False

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
        self._code.advance(text)
        self._say(self._gap + text)
        self._raw, self._raw_size, self._json = [], 0, None
        self._state = self._text

    # Text

    def _text(self, buffer: str, index: int, end: End) -> int:
        self._behind = False
        found = MAYBE.search(buffer, index)
        tag = found.start() if found else -1
        if tag < 0:
            self._code.advance(buffer[index:])
            self._say(self._gap + buffer[index:])
            return len(buffer)
        if tag > index:
            before = buffer[index:tag]
            self._code.advance(before)
            body = before.rstrip()
            if body:
                self._say(self._gap + body)
            self._gap += before[len(body) :]
        return self._tag(buffer, tag, end)

    def _tag(self, buffer: str, tag: int, end: End) -> int:
        """A "<" in text: an opener, maybe one, or just that."""
        rest = buffer[tag : tag + 12]
        if not self._code.literal:
            line = self._code.line_start or not self.said
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
        self._code.advance("<")
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

    def _commit(self, tool: Tool) -> None:
        self._gap = ""
        self._flush()
        self._start = self._allocate(tool.name)
        self._events.append(self._start)

    def _guided_start(self, buffer: str, index: int, end: End) -> int:
        """JSON that a tool_choice asked for, at the start of the text, maybe fenced."""
        found = GUIDED.match(buffer, index)
        if found:
            self._begin_json(buffer[index : found.end()])
            return found.end()
        if end is End.MORE and len(buffer) - index < MAX_BLANK and GUIDED_START.match(buffer, index):
            return index
        self._state = self._text
        return index

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
        self._code.advance("\n")
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
            if char in ",]" or (guided and char in "`}"):
                return index + 1
        if self._parsed and char == ">":
            rest = buffer[index + 1 : index + 64].lstrip()
            if not rest and end is End.MORE and len(buffer) - index < 64:
                return index
            if not rest or rest.startswith("<"):
                self._parsed = False
                self._counters.repaired_leaks += 1
                return index + 1
        self._gap = (self._gap or "\n") if self.said else ""
        self._guided = False
        self._state = self._text
        return index
