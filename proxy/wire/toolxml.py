"""One call in Qwen's XML, from behind its function tag: parameters in, the text of a JSON arguments object out.

Rules: values are literal: no XML library, no entities, no escapes. One newline on each side of a value is the
format's. A closer ends a value only when what follows it is structure (or the end); a whole quoted call inside a
value is counted over. A string streams, all but a trailing newline and what may be the start of a tag; any other
value waits for its end and is converted by the schema. A parameter given twice counts once, the first time.
"""

from __future__ import annotations

import re
from json.encoder import encode_basestring

from proxy.wire.coerce import Spec, Tool, Toolset, quote
from proxy.wire.jsonfix import JsonRewriter, convert
from proxy.wire.jsonstring import End

BLANK = re.compile(r"\s*")
KEY = re.compile(r"<parameter(?:=|\s+name\s*=)\s*[\"']?([^>\n<\"']{0,256}+)[\"']?[^\S\n]*+(>|\n)")
KEY_START = re.compile(r"<parameter(?:=|\s+name\s*=|\s+n?a?m?e?\Z)[^>\n<]{0,260}\Z")
FOREIGN = r"function_invocation|function_calls?|function_call|tool_calls|invoke|parameters|arguments"
CLOSERS = ("</parameter>", "</function>", "</tool_call>")
ANY_CLOSER = re.compile(rf"</(?:parameter|function|tool_call|{FOREIGN})\s*>")
END_TOKEN = re.compile(r"<\|(?:im_end|endoftext)\|>")
VARIANTS = tuple(f"</{name}>" for name in FOREIGN.replace("?", "").split("|")) + (
    "<|im_end|>",
    "<|endoftext|>",
)
TAGS = (*CLOSERS, "<parameter=", "<parameter ", "<tool_call>", "<function=", *VARIANTS)
VALUE_TAG = re.compile(  # in a value: a tag that matters, or what may become one
    r"<(?:/(?:parameter|function|tool_call)>|parameter[= ]|tool_call>|function="
    r"|\|(?:im_end|endoftext)\|>|[/a-z_|= ]{0,14}\Z)"
)
FOLLOWERS = ("<parameter=", "<parameter ", "</function>", "</tool_call>", *VARIANTS)
NEXT_CALL = re.compile(r"<tool_call>\s*(?:<function=([^>\n<]*)[>\n]|[{\[])|<function=([^>\n<]*)[>\n]")
NEXT_CALL_START = re.compile(
    r"<tool_call>\s*(?:<f?u?n?c?t?i?o?n?\Z|<function=[^>\n<]{0,128}\Z|\Z)|<function=[^>\n<]{0,128}\Z"
)
LOOKAHEAD = 512  # characters looked over behind a closer before it counts as one

TEXT, CLOSE, WAIT = 0, 1, -1  # what a tag inside a value is: literal, the value's end, not to be known yet


def begins_tag(text: str, tags: tuple[str, ...] = TAGS) -> bool:
    """Whether `text` is a beginning of one of `tags`, so that more of it may come."""
    return any(tag.startswith(text) for tag in tags)


class XmlCall:
    """`step` reads from a buffer, `out` collects argument text; `done` with `complete` when the call's end was seen.

    `plain` is true while a string leaves as it comes: text without "<", newline or surrogate needs no `step`.
    """

    __slots__ = (
        "_buffered",
        "_first",
        "_fresh",
        "_from_json",
        "_functions",
        "_json",
        "_key",
        "_members",
        "_muted",
        "_quoted",
        "_spec",
        "_state",
        "_tools",
        "_unclosed",
        "_used",
        "_wrappers",
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
        "tool",
    )

    def __init__(self, tool: Tool, tools: Toolset) -> None:
        self.tool = tool
        self._tools = tools
        self._state = self._between
        self._members = 0
        self._fresh = True  # nothing but blanks came since the function tag
        self._used: set[str] = set()
        self._key = ""
        self._spec: Spec = tool.spec
        self._buffered: list[str] | None = None  # a value that waits for its end
        self._muted = False  # a parameter given again
        self._first = False  # nothing of the value was read yet
        self.newline = ""  # the value's last newline, maybe the format's
        self.prev = "\n"  # the character before the buffer's next one
        self._functions = self._wrappers = 0  # quoted openers inside the value, not closed yet
        self._quoted = False  # a parameter of the quoted call is open
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
        found = KEY.match(buffer, index)
        if not found:
            if end is End.MORE and KEY_START.match(buffer, index):
                return index
            return self._skip(buffer, index + 1)
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
        self._spec = self.tool.spec.child(key)
        self._first, self.newline = True, ""
        self._functions = self._wrappers = 0
        self._quoted = False
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
            if buffer[index] == "\n":
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

    def _judge(self, buffer: str, tag: int, line: bool, end: End) -> int:
        """What the tag at `tag` is: TEXT, CLOSE or WAIT. `line`: it begins a line."""
        if self._spec.scalar and buffer.startswith(
            (*CLOSERS, "<parameter=", "<tool_call>", "<function="), tag
        ):
            return CLOSE
        if buffer.startswith("</parameter>", tag):
            return self._judge_parameter_end(buffer, tag, end)
        if buffer.startswith("</function>", tag):
            return self._judge_function_end(buffer, tag, end)
        if buffer.startswith("</tool_call>", tag):
            if self._wrappers:
                self._wrappers -= 1
                return TEXT
            return self._followed(buffer, tag + len("</tool_call>"), end, ("<tool_call>",))
        if buffer.startswith(("<parameter=", "<parameter "), tag):
            self._quoted = self._quoted or (self._functions > 0 and line)
            return self._judge_parameter(buffer, tag, end) if line and not self._functions else TEXT
        if buffer.startswith("<tool_call>", tag):
            self._wrappers += line
            return TEXT
        if buffer.startswith("<function=", tag):
            self._functions += line
            return TEXT
        token = END_TOKEN.match(buffer, tag)
        if token:
            return self._followed(buffer, token.end(), end, ())
        rest = buffer[tag : tag + 32]
        if not begins_tag(rest):
            return TEXT
        if end is End.MORE:
            return WAIT
        return CLOSE if len(rest) > 1 and begins_tag(rest, CLOSERS) else TEXT

    def _judge_parameter_end(self, buffer: str, tag: int, end: End) -> int:
        """Structure if only closers lead from here to a next parameter, the call's end, a next call or the end."""
        at = tag
        while buffer.startswith("</parameter>", at):
            at = BLANK.match(buffer, at + len("</parameter>")).end()  # type: ignore[union-attr]
        if self._functions and self._quoted:
            verdict = self._judge_quoted_end(buffer, at, end)
            self._quoted = verdict != TEXT
            return verdict
        rest = buffer[at : at + LOOKAHEAD]
        if not rest or at - tag > LOOKAHEAD:
            return CLOSE if end is not End.MORE or at - tag > LOOKAHEAD else WAIT
        if rest.startswith(FOLLOWERS):
            return CLOSE
        if self._next_call(rest):
            return CLOSE
        waits = begins_tag(rest, (*FOLLOWERS, "</parameter>", "<tool_call>", "<function="))
        if end is End.MORE and (waits or NEXT_CALL_START.match(rest)):
            return WAIT
        return CLOSE if waits else TEXT

    def _judge_quoted_end(self, buffer: str, at: int, end: End) -> int:
        """Inside a quoted call a closer is text, unless nothing but closers is left of the whole answer."""
        ended, start = False, at
        while closer := ANY_CLOSER.match(buffer, at):
            if ended and closer.group() == "</parameter>":
                return TEXT  # the outer call's own closers follow
            ended = ended or closer.group() == "</function>"
            at = BLANK.match(buffer, closer.end()).end()  # type: ignore[union-attr]
        rest = buffer[at : at + 32]
        if not rest and at - start <= 2 * LOOKAHEAD:
            return WAIT if end is End.MORE else CLOSE if end is End.STOP else TEXT
        return WAIT if end is End.MORE and begins_tag(rest, CLOSERS) else TEXT

    def _judge_function_end(self, buffer: str, tag: int, end: End) -> int:
        if self._functions:
            self._functions -= 1
            return TEXT
        return self._followed(buffer, tag + len("</function>"), end, ("</tool_call>", "<tool_call>"))

    def _judge_parameter(self, buffer: str, tag: int, end: End) -> int:
        """A parameter that opens at a line start: the next one if it is declared and was not used."""
        found = KEY.match(buffer, tag)
        if found:
            key = found.group(1).strip()
            return CLOSE if key in self.tool.spec.keys and key not in self._used else TEXT
        return WAIT if end is End.MORE and KEY_START.match(buffer, tag) else TEXT

    def _followed(self, buffer: str, at: int, end: End, tags: tuple[str, ...]) -> int:
        """CLOSE if one of `tags`, or nothing, follows; at a cut nobody knows what would have followed."""
        after = BLANK.match(buffer, at).end()  # type: ignore[union-attr]
        if after - at > LOOKAHEAD:
            return TEXT
        rest = buffer[after : after + 32]
        if not rest:
            return CLOSE if end is End.STOP else WAIT
        if rest.startswith(tags) or END_TOKEN.match(rest):
            return CLOSE
        waiting = begins_tag(rest, (*tags, "<|im_end|>", "<|endoftext|>"))
        return WAIT if waiting and end is not End.STOP else TEXT

    def _next_call(self, rest: str) -> bool:
        found = NEXT_CALL.match(rest)
        name = found and (found.group(1) or found.group(2))
        return bool(found) and (name is None or self._tools.find(name) is not None)

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
