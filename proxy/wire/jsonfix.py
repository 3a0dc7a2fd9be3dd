"""Loose JSON in, in pieces; the same value as valid JSON out, typed by a schema.

Rules: valid JSON of the right types leaves as the characters that came, at once; only a comma (with its blanks) waits
for the member it announces, so that neither a trailing comma nor a repeated key can be sent. Strings stream.
A value waits for its end only where its text may have to become something else (a string where the schema has
none). Mended: Python literals and quotes, raw control characters, bad escapes, trailing and missing commas,
unquoted words, numbers no JSON reader takes, missing and surplus closers, repeated keys (the first one counts).
What cannot be mended makes `broken` true and nothing more comes out: an unterminated text runs nothing.

`live` text comes from a backend that serialised it: a closing quote is one. Otherwise a model wrote it, and a quote
closes only where JSON may go on behind it. Every state takes (buffer, index, end) and returns the index it got to,
or -1 to wait for more from where it was; what waits is bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.encoder import encode_basestring

from proxy.wire import patterns
from proxy.wire.coerce import ANY, MAX_DIGITS, NUMBER, Spec, quote, scalar
from proxy.wire.jsonstring import BLANK, End, StringReader, is_literal, plain_literal, read_word

ODD = re.compile(r'["\\\x00-\x1f]')  # what a stream of string content must not hold to pass as it is
SOUND = patterns.compile(r'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt])*+\Z')  # whole string content that passes
BARE = re.compile(r"[^,}\]\n\r]*")
WORD_KEY = re.compile(r"([A-Za-z_$][\w$.-]{0,63})\s*(:)?")
MAX_DEPTH = 256  # more nesting than JSON readers take is no call
MAX_WORD = 8192  # characters of a value without quotes

State = Callable[[str, int, End], int]


class _Frame:
    """An open object or array: its spec, the keys or the number of elements so far."""

    __slots__ = ("array", "count", "key", "keys", "spec")

    def __init__(self, array: bool, spec: Spec) -> None:
        self.array = array
        self.spec = spec
        self.keys: set[str] = set()
        self.key = ""
        self.count = 0


class JsonRewriter(StringReader):
    """One JSON value. `step` reads from a buffer up to the value's end, `take` hands out what is ready.

    repairs: how many things were mended; failures: values kept although they do not fit; duplicates: repeated keys.
    """

    __slots__ = (
        "_as_text",
        "_frames",
        "_mute",
        "_out",
        "_sent",
        "_separator",
        "_spec",
        "_state",
        "_token",
        "broken",
        "done",
        "duplicates",
        "failures",
        "held",
        "plain",
        "suspected",
    )

    def __init__(self, spec: Spec, *, live: bool) -> None:
        super().__init__(live)
        self._spec = spec
        self._state: State = self._value
        self._frames: list[_Frame] = []
        self._out: list[str] = []
        self._separator = ""  # a comma and its blanks, waiting for a member
        self._mute = 0  # depth of frames at which a repeated member ends; 0: nothing is muted
        self._as_text = 0  # depth at which a composite that the schema calls a string ends
        self._token = ""
        self._sent = 0
        self.held = ""
        self.plain = False  # inside a string that leaves as it comes
        self.done = self.broken = False
        self.failures = self.duplicates = self.suspected = 0

    def feed(self, text: str) -> str:
        """The valid JSON that `text` completes; what follows the value stays in `held`."""
        if self.plain and not ODD.search(text):
            return text
        buffer = self.held + text
        index = self.step(buffer, 0, End.MORE)
        self.held = "" if self.broken else buffer[index:]
        self.plain = (
            self._state == self._string
            and self._quote == '"'
            and self._capture is None
            and not (self.held or self._mute or self._as_text)
        )
        return self.take()

    def take(self) -> str:
        out = "".join(self._out)
        self._out.clear()
        return out

    def step(self, buffer: str, index: int, end: End) -> int:
        size = len(buffer)
        while index < size and not self.done and not self.broken:
            reached = self._state(buffer, index, end)
            if reached < 0:
                return index
            index = reached
        return index

    def finish(self) -> None:
        """The text ended by itself: close what is open, unless a string is or a key has no value."""
        if self.held:
            self.held = self.held[self.step(self.held, 0, End.STOP) :]
        if self._state == self._bare and not self.broken:
            self._end_bare()
        if self.done or self.broken:
            return
        if self._state in (self._key, self._next, self._element) and self._frames:
            self.repairs += 1
            while self._frames:
                self._pop()
        else:
            self.broken = True

    # Output

    def _put(self, text: str) -> None:
        if self._mute or not text:
            return
        self._out.append(encode_basestring(text)[1:-1] if self._as_text else text)

    def _put_separator(self) -> None:
        frame = self._frames[-1] if self._frames else None
        if frame is not None and frame.count:
            self._put(self._separator or ", ")
        self._separator = ""

    # Values

    def _value(self, buffer: str, index: int, end: End) -> int:
        start = BLANK.match(buffer, index).end()  # type: ignore[union-attr]
        if start > index:
            self._put(buffer[index:start])
            return start
        char, spec = buffer[index], self._spec
        if char in "\"'":
            self._open_string(char, spec)
            return index + 1
        if char in "{[":
            self._open_frame(char, spec)
            return index + 1
        if char in ",}]:":
            self.broken = True  # a key without a value
            return index
        self._token, self._sent = "", 0
        self._state = self._bare
        return index

    def _open_string(self, char: str, spec: Spec) -> None:
        self._quote = char
        self.repairs += char == "'"
        self._state = self._string
        self._string_end = self._end_string_value
        self._waiting = spec.nullable_text
        if spec.accepts("string") and not self._waiting:
            self._capture = None
            self._put('"')
        else:
            self._capture = []

    def _open_frame(self, char: str, spec: Spec) -> None:
        array = char == "["
        if len(self._frames) >= MAX_DEPTH:
            self.broken = True
            return
        if spec.types == {"string"} and not self._as_text:
            self.repairs += 1
            self._put('"')
            if not self._mute:
                self._as_text = len(self._frames) + 1
            spec = ANY
        elif not spec.accepts("array" if array else "object"):
            self.failures += 1
        self._frames.append(_Frame(array, spec))
        self._put(char)
        self._state = self._element if array else self._key

    def _end_value(self) -> None:
        depth = len(self._frames)
        if self._mute and depth <= self._mute:
            self._mute = 0
        elif depth:
            self._frames[-1].count += 1
        self._state = self._next
        self.done = not depth

    def _bare(self, buffer: str, index: int, end: End) -> int:
        stop = BARE.match(buffer, index).end()  # type: ignore[union-attr]
        if not self._live and (tag := buffer.find("<", index, stop)) >= 0:
            stop = tag
        self._token += buffer[index:stop]
        if len(self._token) > MAX_WORD:
            self.broken = True
            return stop
        if stop < len(buffer):
            self._end_bare()
            return stop
        if self._live and self._token not in ("0", "-0") and NUMBER.match(self._token):
            kind = "integer" if self._token.lstrip("-").isdigit() else "number"
            if self._spec.accepts(kind) and len(self._token) < MAX_DIGITS:
                self._put(self._token[self._sent :])
                self._sent = len(self._token)
        return stop

    def _end_bare(self) -> None:
        word = self._token.strip()
        if not word:
            self.broken = True
            return
        text, mended, failed = read_word(self._spec, word)
        if self._sent:
            if text != word or not NUMBER.match(word):
                self.broken = True
                return
            text = self._token[self._sent :]
        elif text == word:
            text = self._token.lstrip()
        self.repairs += mended
        self.failures += failed
        self._put(text)
        self._end_value()

    # Strings that were read whole

    def _end_string_value(self) -> None:
        if self._capture is None:
            self._put('"')
        else:
            self._put(self._converted("".join(self._capture)))
            self._capture = None
        self._end_value()

    def _converted(self, escaped: str) -> str:
        """A whole string that the schema wants as something else, or as null."""
        if self._spec.nullable_text:
            is_null = escaped.strip().lower() in ("null", "none")
            self.repairs += is_null
            return "null" if is_null else f'"{escaped}"'
        text: str = json.loads(f'"{escaped}"')
        converted, fits = convert(self._spec, text)
        self.repairs += fits
        self.failures += not fits
        return converted if fits else f'"{escaped}"'

    # Objects and arrays

    def _key(self, buffer: str, index: int, end: End) -> int:
        start = BLANK.match(buffer, index).end()  # type: ignore[union-attr]
        if start > index:
            self._blank(buffer[index:start])
            return start
        char, frame = buffer[index], self._frames[-1]
        if char in "\"'":
            self._quote, self._capture, self._waiting = char, [], False
            self._state, self._string_end = self._string, self._end_key
            self.repairs += char == "'"
            return index + 1
        if char in "}]":
            self._close(char)
            return index + 1
        if char == "," or (char == "{" and not frame.count and len(self._frames) == 1):
            self.repairs += 1
            return index + 1
        word = WORD_KEY.match(buffer, index)
        if word and word.end() == len(buffer) and not word.group(2) and end is End.MORE:
            return -1
        if not word or not word.group(2):
            self.broken = True
            return index
        self.repairs += 1
        self._quote, self._capture = '"', [word.group(1)]
        self._end_key()
        return word.end(1)

    def _end_key(self) -> None:
        frame, escaped = self._frames[-1], "".join(self._capture or ())
        self._capture = None
        key: str = json.loads(f'"{escaped}"')
        frame.key = key
        if key in frame.keys and not self._mute:
            self.duplicates += 1
            self._mute = len(self._frames)
        elif frame.spec.keys and key not in frame.spec.keys and "=" in key:
            self.suspected += 1
        frame.keys.add(key)
        if not self._mute:
            self._put_separator()
        self._put(f'"{escaped}"')
        self._state = self._colon

    def _colon(self, buffer: str, index: int, end: End) -> int:
        start = BLANK.match(buffer, index).end()  # type: ignore[union-attr]
        self._put(buffer[index:start])
        if start < len(buffer):
            if buffer[start] != ":":
                self.broken = True
                return start
            self._put(":")
            self._spec = self._frames[-1].spec.child(self._frames[-1].key)
            self._state = self._value
            start += 1
        return start

    def _element(self, buffer: str, index: int, end: End) -> int:
        start = BLANK.match(buffer, index).end()  # type: ignore[union-attr]
        if start > index:
            self._blank(buffer[index:start])
            return start
        char, frame = buffer[index], self._frames[-1]
        if char in "}]":
            self._close(char)
            return index + 1
        if char == ",":
            self.repairs += 1
            return index + 1
        self._put_separator()
        self._spec = frame.spec.item(frame.count)
        self._state = self._value
        return index

    def _blank(self, blank: str) -> None:
        if self._separator:
            self._separator += blank
        elif not self._frames[-1].count:
            self._put(blank)

    def _next(self, buffer: str, index: int, end: End) -> int:
        start = BLANK.match(buffer, index).end()  # type: ignore[union-attr]
        if start > index:
            self._put(buffer[index:start])
            return start
        char, frame = buffer[index], self._frames[-1]
        if char in "}]":
            self._close(char)
        elif char == ",":
            self._separator = ","
            self._state = self._element if frame.array else self._key
        elif char in "\"'{[" and (frame.array or char in "\"'"):
            self.repairs += 1  # a comma is missing
            self._state = self._element if frame.array else self._key
            return index
        else:
            self.broken = True
        return index + 1

    def _close(self, char: str) -> None:
        kinds = ["]" if frame.array else "}" for frame in self._frames]
        self.repairs += bool(self._separator)
        self._separator = ""
        if char not in kinds:
            self.repairs += 1
            return
        while ("]" if self._frames[-1].array else "}") != char:
            self.repairs += 1
            self._pop()
        self._pop()

    def _pop(self) -> None:
        frame = self._frames.pop()
        self._put("]" if frame.array else "}")
        if self._as_text > len(self._frames):
            self._as_text = 0
            self._put('"')
        self._separator = ""
        self._end_value()


def convert(spec: Spec, text: str, *, nested: int = 0) -> tuple[str, bool]:
    """Text as JSON of a type that `spec` allows, and whether it could be; if not, the text as a JSON string."""
    if spec.text:
        return quote(text), True
    found = scalar(spec, text)
    if found is not None:
        return found, True
    if spec.types & {"object", "array"}:
        composite = _composite(spec, text.strip(), nested)
        if composite is not None:
            return composite, True
    return quote(text), "string" in spec.types


def _composite(spec: Spec, text: str, nested: int) -> str | None:
    """An object or array, written as JSON, as a Python literal, or as a string that holds one."""
    if text[:1] in "\"'" and text[:1] and nested < 3:
        inner = decode_string(text)
        return None if inner is None else _accept(convert(spec, inner, nested=nested + 1))
    if "string" in spec.types and not is_literal(text):
        return None  # where text will do, nothing is guessed
    opener = text[:1]
    if opener not in ("{", "[", "(") or not spec.accepts("object" if opener == "{" else "array"):
        return None
    rewriter = JsonRewriter(spec, live=False)
    end = rewriter.step(text, 0, End.STOP)
    rewriter.held = text[end:] if not rewriter.done else ""
    if not rewriter.done:
        rewriter.finish()
    rest = text[end:].strip() if rewriter.done else ""
    if not rewriter.broken and not rest.strip("}]") and opener != "(":
        return rewriter.take()
    plain = plain_literal(text) if "string" not in spec.types else None
    return None if plain is None else _composite(spec, plain, nested)


def _accept(result: tuple[str, bool]) -> str | None:
    return result[0] if result[1] else None


def decode_string(text: str) -> str | None:
    """The content of a whole quoted string, None if it is not one."""
    rewriter = JsonRewriter(_STRING, live=False)
    end = rewriter.step(text, 0, End.STOP)
    if not rewriter.done or text[end:].strip():
        return None
    found: str = json.loads(rewriter.take())
    return found


_STRING = Spec({}, ({"type": "string"},))
