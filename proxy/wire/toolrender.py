"""Renders calls the way a client asked for: OpenAI's fields, the model's XML, or JSON in tags.

Rules: a renderer maps events to events. For "xml" and "json" calls become content, streamed as they are written,
one after the other (a call that comes while another is open waits), and a finish_reason of tool_calls becomes "stop".
XML has no escapes: a string that holds a closing tag goes out as it is and is counted in `unsafe`.
A call that was cut stays unterminated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum

from proxy.wire import patterns
from proxy.wire.toolevents import CallArguments, CallEnd, CallStart, Content, Event, Finish

STRUCTURE = re.compile(r"</(?:parameter|function|tool_call)>|\n<parameter=")
VALUE_MARK = re.compile(r'["{}\[\],]')
WHOLE = (
    patterns.compile(  # string content up to the closing quote or an escape (or pair) that is not all there
        r'(?:[^"\\]++|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
        r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u])))*+"
    )
)


class ToolFormat(StrEnum):
    """What a client wants calls to look like. Closed."""

    OPENAI = "openai"
    XML = "xml"
    JSON = "json"


class Renderer:
    """OpenAI's shape: events stay what they are."""

    unsafe = 0

    def render(self, events: Iterable[Event]) -> list[Event]:
        return list(events)


class TextRenderer(Renderer):
    """Calls as text in the content, one at a time."""

    def __init__(self) -> None:
        self.unsafe = 0
        self._open: int | None = None
        self._waiting: list[Event] = []
        self._spoke = False  # content that is not blank was sent
        self._calls = 0

    def render(self, events: Iterable[Event]) -> list[Event]:
        out: list[Event] = []
        queue = list(events)
        while queue:
            event = queue.pop(0)
            if self._open is not None and self._blocked(event):
                self._waiting.append(event)
                continue
            self._one(event, out)
            if isinstance(event, CallEnd):
                queue, self._waiting = self._waiting + queue, []
        return out

    def _blocked(self, event: Event) -> bool:
        if isinstance(event, CallStart):
            return True
        return isinstance(event, CallArguments | CallEnd) and event.call != self._open

    def _one(self, event: Event, out: list[Event]) -> None:
        if isinstance(event, CallStart):
            self._open = event.call
            self._say(out, ("\n" if self._calls else "\n\n" if self._spoke else "") + self._head(event.name))
            self._calls += 1
        elif isinstance(event, CallArguments):
            self._say(out, self._more(event.text))
        elif isinstance(event, CallEnd):
            self._open = None
            if event.complete:
                self._say(out, self._tail())
        elif isinstance(event, Finish):
            out.append(Finish("stop" if event.reason == "tool_calls" else event.reason))
        else:
            if isinstance(event, Content):
                self._spoke = self._spoke or not event.text.isspace()
            out.append(event)

    def _say(self, out: list[Event], text: str) -> None:
        if text:
            out.append(Content(text))

    def _head(self, name: str) -> str:
        raise NotImplementedError

    def _more(self, arguments: str) -> str:
        raise NotImplementedError

    def _tail(self) -> str:
        raise NotImplementedError


class JsonRenderer(TextRenderer):
    """{"name": …, "arguments": {…}} between tool_call tags."""

    def _head(self, name: str) -> str:
        return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '

    def _more(self, arguments: str) -> str:
        return arguments

    def _tail(self) -> str:
        return "}\n</tool_call>"


class XmlRenderer(TextRenderer):
    """Qwen's XML, as its chat template writes it."""

    def __init__(self) -> None:
        super().__init__()
        self._reader = _Members()

    def _head(self, name: str) -> str:
        self._reader = _Members()
        return f"<tool_call>\n<function={name}>\n"

    def _more(self, arguments: str) -> str:
        text = self._reader.feed(arguments)
        self.unsafe += self._reader.unsafe
        self._reader.unsafe = 0
        return text

    def _tail(self) -> str:
        return "</function>\n</tool_call>"


class _Members:
    """Valid JSON of one object in, in pieces; its members as parameter elements out."""

    def __init__(self) -> None:
        self._held = ""
        self._state = self._between
        self._depth = 0
        self._value: list[str] = []
        self._recent = ""  # the end of the string so far, for closers that come in pieces
        self.unsafe = 0

    def feed(self, text: str) -> str:
        buffer, index, out = self._held + text, 0, ""
        while index < len(buffer):
            reached, said = self._state(buffer, index)
            out += said
            if reached < 0:
                break
            index = reached
        self._held = buffer[index:]
        return out

    def _between(self, buffer: str, index: int) -> tuple[int, str]:
        """Outside of values: braces, commas, blanks, and the next key."""
        if buffer[index] != '"':
            return index + 1, ""
        key = re.compile(r'("(?:[^"\\]|\\.)*")\s*:\s*').match(buffer, index)
        if not key or key.end() == len(buffer):
            return -1, ""
        head = f"<parameter={json.loads(key.group(1))}>\n"
        if buffer[key.end()] == '"':
            self._state, self._recent = self._string, "\n"
            return key.end() + 1, head
        self._state, self._depth, self._value = self._raw, 0, []
        return key.end(), head

    def _string(self, buffer: str, index: int) -> tuple[int, str]:
        end = WHOLE.match(buffer, index).end()  # type: ignore[union-attr]
        text: str = json.loads(f'"{buffer[index:end]}"')
        self._check(text)
        if buffer[end : end + 1] == '"':
            self._state = self._between
            return end + 1, text + "\n</parameter>\n"
        return (end if end > index else -1), text

    def _check(self, text: str) -> None:
        recent = self._recent + text
        self.unsafe += len(STRUCTURE.findall(recent)) > len(STRUCTURE.findall(self._recent))
        self._recent = recent[-16:]

    def _raw(self, buffer: str, index: int) -> tuple[int, str]:
        """A value that is no string: JSON as it is, without ASCII escapes."""
        start = index
        while mark := VALUE_MARK.search(buffer, index):
            char, at = mark.group(), mark.start()
            if char == '"':
                string = re.compile(r'"(?:[^"\\]|\\.)*"').match(buffer, at)
                if not string:
                    if at > start:
                        self._value.append(buffer[start:at])
                    return (at, "") if at > start else (-1, "")
                index = string.end()
            elif self._depth == 0 and char in ",}":
                self._value.append(buffer[start:at])
                self._state = self._between
                return at, _plain("".join(self._value).strip()) + "\n</parameter>\n"
            else:
                self._depth += 1 if char in "{[" else -1 if char in "}]" else 0
                index = at + 1
        self._value.append(buffer[start:])
        return len(buffer), ""


def _plain(value: str) -> str:
    return json.dumps(json.loads(value), ensure_ascii=False) if "\\u" in value else value


def renderer(form: ToolFormat) -> Renderer:
    """The renderer for a format, one per choice."""
    return _RENDERERS[form]()


_RENDERERS: Mapping[ToolFormat, type[Renderer]] = {
    ToolFormat.OPENAI: Renderer,
    ToolFormat.XML: XmlRenderer,
    ToolFormat.JSON: JsonRenderer,
}
