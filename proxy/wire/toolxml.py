"""One call in Qwen's XML, from behind its function tag: parameters in, the text of a JSON arguments object out.

Rules: values are literal: no XML library, no entities, no escapes. One newline on each side of a value is the
format's; where a value ends is `toolvalue`'s to say. A string streams, all but a trailing newline and what may be the
start of a tag; any other value waits for its end and is converted by the schema. A parameter given twice counts once,
the first time.
"""

from __future__ import annotations

import re
from json.encoder import encode_basestring

from proxy.wire.coerce import Tool, Toolset, quote
from proxy.wire.jsonfix import JsonRewriter, convert
from proxy.wire.jsonstring import End
from proxy.wire.toolvalue import (
    ANY_CLOSER,
    BLANK,
    END_TOKEN,
    FOREIGN,
    KEY_START,
    TEXT,
    VALUE_TAG,
    WAIT,
    ValueEnd,
    begins_tag,
    read_key,
)


class XmlCall(ValueEnd):
    """`step` reads from a buffer, `out` collects argument text; `done` with `complete` when the call's end was seen.

    `plain` is true while a string leaves as it comes: text without "<", newline or surrogate needs no `step`.
    """

    __slots__ = (
        "_buffered",
        "_first",
        "_fresh",
        "_from_json",
        "_json",
        "_key",
        "_members",
        "_muted",
        "_state",
        "_unclosed",
        "complete",
        "done",
        "duplicates",
        "failures",
        "newline",
        "out",
        "plain",
        "prev",
        "repairs",
        "suspected",
    )

    def __init__(self, tool: Tool, tools: Toolset) -> None:
        super().__init__(tool, tools)
        self._state = self._between
        self._members = 0
        self._fresh = True  # nothing but blanks came since the function tag
        self._key = ""
        self._buffered: list[str] | None = None  # a value that waits for its end
        self._muted = False  # a parameter given again
        self._first = False  # nothing of the value was read yet
        self.newline = ""  # the value's last newline, maybe the format's
        self.prev = "\n"  # the character before the buffer's next one
        self._json: JsonRewriter | None = None
        self.out: list[str] = []
        self.done = self.complete = self.plain = False
        self._from_json = False
        self.repairs = self.failures = self.duplicates = self.suspected = 0
        self._unclosed = False

    def step(self, buffer: str, index: int, end: End) -> int:
        while not self.done:
            state = self._state
            reached = state(buffer, index, end)
            if reached > index:
                self.prev = buffer[reached - 1]
            if reached == index and self._state == state:
                break
            index = reached
        self.plain = (
            self._state == self._value and self._buffered is None and not (self._muted or self._first)
        )
        return index

    def stop(self, end: End) -> None:
        """The stream ended inside the call. By itself: close it. Cut: leave it so that it cannot be run."""
        if self.done:
            return
        if end is End.CUT:
            if not self._members:
                self.out.append("{")
            self.done = True
            return
        if self._state == self._value:
            self.repairs += 1
            self._end_value()
        if self._json is not None:
            self._json.finish()
            self._take_json()
            if self._json.broken:
                self.done = True
                return
        self._close(True)

    # Between parameters

    def _between(self, buffer: str, index: int, end: End) -> int:
        index = BLANK.match(buffer, index).end()  # type: ignore[union-attr]
        if index >= len(buffer):
            return index
        fresh, self._fresh = self._fresh, False
        if buffer[index] == "{" and fresh:
            self._json = JsonRewriter(self.tool.spec, live=False)
            self._state = self._arguments
            self.repairs += 1
            return index
        if buffer[index] != "<":
            self.repairs += 1
            return self._skip(buffer, index)
        if buffer.startswith(("<parameter=", "<parameter "), index):
            return self._parameter(buffer, index, end)
        for opener in ("<tool_call>", "<function="):
            if buffer.startswith(opener, index):
                self.repairs += 1
                self._close(True)
                return index
        if buffer.startswith("</parameter>", index):
            self.repairs += not self._unclosed  # the one that ends a value is as it should be
            self._unclosed = False
            return index + len("</parameter>")
        if buffer.startswith("</function>", index):
            self._close(True)
            return index + len("</function>")
        closer = ANY_CLOSER.match(buffer, index)
        if closer or END_TOKEN.match(buffer, index):
            self.repairs += 1
            self._close(True)
            return index if closer is None or closer.group() == "</tool_call>" else closer.end()
        if end is End.MORE and begins_tag(buffer[index : index + 32]):
            return index
        self.repairs += 1
        return self._skip(buffer, index + 1)

    def _skip(self, buffer: str, index: int) -> int:
        tag = buffer.find("<", index)
        return len(buffer) if tag < 0 else tag

    def _parameter(self, buffer: str, index: int, end: End) -> int:
        found = read_key(buffer, index)
        if not found:
            if end is End.MORE and KEY_START.match(buffer, index):
                return index
            return self._skip(buffer, index + 1)
        self._attributes = buffer[index + len("<parameter")] != "="
        key = found.group(1).strip()
        if "=" in key and key not in self.tool.spec.keys:
            self.suspected += 1
            inner = key.rpartition("parameter=")[2]
            key = inner if inner in self.tool.spec.keys else key
        self._open_value(key)
        if found.group(2) == "\n":
            self.repairs += 1
            return found.end() - 1  # the newline is the value's first
        return found.end()

    def _open_value(self, key: str) -> None:
        self._key = key
        self._muted = key in self._used
        self.duplicates += self._muted
        self._used.add(key)
        self._begin_value(self.tool.spec.child(key))
        self._first, self.newline = True, ""
        self._buffered = None if self._spec.text and not self._muted else []
        if self._buffered is None:
            self._member('"')
        self._state = self._value

    def _member(self, text: str) -> None:
        self.out.append(f"{', ' if self._members else '{'}{quote(self._key)}: {text}")
        self._members += 1

    def more(self, text: str) -> str:
        """Argument text for more of a string while `plain`: text without "<", not empty."""
        self.prev = text[-1]
        if self.prev == "\n":
            piece = self.newline + text[:-1]
            self.newline = "\n"
            return encode_basestring(piece)[1:-1]
        if self.newline:
            text = self.newline + text
            self.newline = ""
        return encode_basestring(text)[1:-1]

    # A value

    def _value(self, buffer: str, index: int, end: End) -> int:
        if self._first and index < len(buffer):
            self._first = False
            self.prev = "\n"
            self._own_line = buffer[index] == "\n"
            if self._own_line:
                return index + 1
        start = index
        while True:
            found = VALUE_TAG.search(buffer, index)
            tag = found.start() if found else -1
            if tag < 0:
                self._text(buffer[start:])
                return len(buffer)
            line = buffer[tag - 1] == "\n" if tag > start else self.prev == "\n"
            verdict = self._judge(buffer, tag, line, end)
            if verdict == TEXT:
                index = tag + 1
                continue
            self._text(buffer[start:tag])
            if verdict == WAIT:
                return tag
            self._end_value()
            return tag

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._buffered is not None:
            self._buffered.append(text)
            if not self._spec.nullable_text or self._muted:
                return
            text = "".join(self._buffered)
            if len(text) < 64 and text.strip().lower() in _NULL_STARTS:
                return
            self._buffered = None
            self._member('"')
        if text[-1] == "\n":
            self._out_text(self.newline + text[:-1])
            self.newline = "\n"
        else:
            self._out_text(self.newline + text)
            self.newline = ""

    def _out_text(self, text: str) -> None:
        if text:
            self.out.append(quote(text)[1:-1])

    def _end_value(self) -> None:
        self._state = self._between
        self._unclosed = True
        if self._buffered is None:
            self.out.append('"')
            return
        text = "".join(self._buffered)
        if self._muted:
            return
        converted, fits = convert(self._spec, text[:-1] if text.endswith("\n") else text)
        self.failures += not fits
        self._member(converted)

    # Arguments as JSON behind the function tag

    def _arguments(self, buffer: str, index: int, end: End) -> int:
        json = self._json
        assert json is not None
        reached = json.step(buffer, index, End.MORE)
        self._take_json()
        if json.broken:
            self.done = True
        elif json.done:
            self._json = None
            self._from_json = True
            self._state = self._between
        return reached

    def _take_json(self) -> None:
        if self._json is not None:
            text = self._json.take()
            self._members += bool(text)
            self.out.append(text)
            self.repairs += self._json.repairs
            self.failures += self._json.failures
            self.duplicates += self._json.duplicates
            self.suspected += self._json.suspected
            self._json.repairs = self._json.failures = self._json.duplicates = self._json.suspected = 0

    def _close(self, complete: bool) -> None:
        if not self._members:
            self.out.append("{}")
        elif not self._from_json and self._json is None:
            self.out.append("}")
        self.done, self.complete = True, complete


_NULL_STARTS = frozenset(word[:size] for word in ("null", "none") for size in range(5))
LEFTOVERS = re.compile(rf"\s*(?:>(?=\n|<|\Z))?\s*(?:</(?:parameter|function|tool_call|{FOREIGN})\s*>\s*)*")


def leftovers(text: str) -> int:
    """Length of what a text begins with that is left over from a call before it."""
    found = LEFTOVERS.match(text)
    return found.end() if found and found.group().strip() else 0
