"""The inside of a loose JSON string, in pieces, as valid JSON string content; words without quotes, and literals.

Rules: plain text and valid escapes leave as they came. Raw control characters, escapes that no reader knows, and
quotes inside are escaped; half a surrogate pair that stays alone is left out. `live` text was serialised by a backend:
its closing quote is one. In a model's own writing a quote closes only where JSON may go on behind it.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from enum import IntEnum
from json.encoder import encode_basestring

from proxy.wire.coerce import LOOSE_NUMBER, MAX_DIGITS, NUMBER, Spec, quote, scalar


class End(IntEnum):
    """Whether more text may come: MORE, or the text ended by itself (STOP) or was cut (CUT)."""

    MORE = 0
    STOP = 1
    CUT = 2


BLANK = re.compile(r"[ \t\r\n\f\v]*")
PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}
HEX4 = re.compile(r"u([0-9a-fA-F]{4})")
HEX2 = re.compile(r"x([0-9a-fA-F]{2})")
LOW_HALF = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
LOOKAHEAD = 256  # blanks looked over behind a closing quote
TAG = "</tool_call>"
_NUMBER = Spec({}, ({"type": "number"},))


class StringReader:
    """The string state of a reader: content goes to `_put`, or to `_capture` until the string ends."""

    __slots__ = ("_capture", "_live", "_quote", "_string_end", "_waiting", "repairs")

    def __init__(self, live: bool) -> None:
        self._live = live
        self._quote = '"'
        self._capture: list[str] | None = None
        self._waiting = False  # a captured string that streams as soon as it cannot be null
        self._string_end: Callable[[], None]
        self.repairs = 0

    def _put(self, text: str) -> None:
        raise NotImplementedError

    def _string(self, buffer: str, index: int, end: End) -> int:
        plain = PLAIN[self._quote].match(buffer, index)
        if plain:
            self._text(plain.group())
            return plain.end()
        char = buffer[index]
        if char == "\\":
            return self._escape(buffer, index, end)
        if char == self._quote:
            closes = self._closes(buffer, index, end)
            if closes is None:
                return -1
            if closes:
                self._string_end()
                return index + 1
            self.repairs += 1
        self.repairs += char < " "
        self._text(encode_basestring(char)[1:-1])
        return index + 1

    def _text(self, text: str) -> None:
        if self._capture is None:
            self._put(text)
            return
        self._capture.append(text)
        if self._waiting:
            so_far = "".join(self._capture)
            if not may_be_null(so_far):
                self._waiting, self._capture = False, None
                self._put('"' + so_far)

    def _escape(self, buffer: str, index: int, end: End) -> int:
        size = len(buffer)
        if index + 1 >= size:
            return -1
        char = buffer[index + 1]
        if char in '"\\/bfnrt':
            self._text(buffer[index : index + 2])
            return index + 2
        if char == "u" or (char == "x" and self._quote == "'"):
            return self._code_point(buffer, index, end)
        self.repairs += 1
        self._text("'" if char == "'" else "\\\\")
        return index + (2 if char == "'" else 1)

    def _code_point(self, buffer: str, index: int, end: End) -> int:
        """An escaped character; halves of a pair only together, one alone is left out."""
        found = (HEX4 if buffer[index + 1] == "u" else HEX2).match(buffer, index + 1)
        if not found:
            if len(buffer) - index < 6 and end is End.MORE:
                return -1
            self.repairs += 1
            self._text("\\\\")
            return index + 1
        code = int(found.group(1), 16)
        if not 0xD800 <= code <= 0xDFFF:
            self._text(buffer[index : found.end()] if buffer[index + 1] == "u" else quote(chr(code))[1:-1])
            return found.end()
        rest = buffer[found.end() : found.end() + 6]
        if code < 0xDC00 and len(rest) < 6 and "\\u".startswith(rest[:2]) and end is End.MORE:
            return -1
        if code < 0xDC00 and LOW_HALF.match(rest):
            self._text(buffer[index : found.end() + 6])
            return found.end() + 6
        self.repairs += 1
        return found.end()

    def _closes(self, buffer: str, index: int, end: End) -> bool | None:
        """Whether the quote at `index` ends the string; None: not to be known yet."""
        if self._live and self._quote == '"':
            return True
        after = BLANK.match(buffer, index + 1).end()  # type: ignore[union-attr]
        if after == len(buffer):
            return None if end is End.MORE and after - index < LOOKAHEAD else True
        if buffer[after] == "<" and not self._live:
            rest = buffer[after : after + len(TAG)]
            if rest == TAG:
                return True
            return None if TAG.startswith(rest) and end is End.MORE else False
        return buffer[after] in ",:}]"


def may_be_null(text: str) -> bool:
    """Whether a string may still turn out to be a spelling of null."""
    word = text.strip().lower()
    return "null".startswith(word) or "none".startswith(word)


def read_word(spec: Spec, word: str) -> tuple[str, bool, bool]:
    """A word without quotes as JSON of the type the schema wants; whether it was changed, and whether it does not fit."""
    known = WORDS.get(word)
    if known is not None:
        if known == "null" or spec.accepts("boolean"):
            return known, known != word, False
    elif NUMBER.match(word) and len(word) < MAX_DIGITS and math.isfinite(float(word)):
        known = word
        whole = word.lstrip("-").isdigit()
        if spec.accepts("integer" if whole else "number") or (
            "integer" in spec.types and float(word).is_integer()
        ):
            return word, False, False  # 25.0 is an integer to JSON Schema
    converted = scalar(spec, word)
    if converted is not None:
        return converted, True, False
    if known is None and not spec.types and LOOSE_NUMBER.match(word):
        return scalar(_NUMBER, word) or quote(word), True, False
    if spec.types and "string" not in spec.types:
        return known or quote(word), True, True
    return quote(word), True, False


def plain_literal(text: str) -> str | None:
    """A Python literal that JSON has no like of (tuples, joined strings) as JSON; None if that is not what it is."""
    try:
        value = ast.literal_eval(text)
        plain = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | tuple) else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return None if plain == text else plain


def is_literal(text: str) -> bool:
    """Whether a text is sound JSON or a sound Python literal."""
    try:
        json.loads(text, strict=False)
        return True
    except (ValueError, RecursionError):
        pass
    try:
        ast.literal_eval(text)
        return True
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
