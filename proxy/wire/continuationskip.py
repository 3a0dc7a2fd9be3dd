"""What a client already has of an answer that is told again from its beginning: skipped, and nothing else.

Rules
1. An answer that is read again by another parser is the same answer, not the same bytes: blanks between words, and in
   JSON blanks between tokens and the spelling of escapes, may differ. Everything else must agree, or `Differs`.
2. A `Skip` is one channel: the text, the thinking, the arguments of one call. What came again and is not yet as long as
   what the client has says nothing; the first character behind it is the first that leaves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

Reach = Callable[[str, str], int | None]
"""(what the client has, what came again) → where in the latter the news begin; None: not yet. Raises Differs."""

_ESCAPE = re.compile(r'\\(?:u([0-9a-fA-F]{4})|(["\\/bfnrt]))')
_TORN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_ESCAPED = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_BLANK = " \t\n\r"


class Differs(ValueError):
    """What came again is another answer than the one that the client has the beginning of."""


class Skip:
    """`feed` gives what the client lacks of the text that came again."""

    __slots__ = ("_again", "_had", "_reach", "over")

    def __init__(self, had: str, reach: Reach) -> None:
        self._had, self._reach = had, reach
        self._again = ""
        self.over = not had
        """All that the client has came again."""

    def feed(self, text: str) -> str:
        if self.over:
            return text
        self._again += text
        at = self._reach(self._had, self._again)
        if at is None:
            return ""
        self.over = True
        news, self._again = self._again[at:], ""
        return news

    @property
    def lacks(self) -> bool:
        """Something that is no blank has not come again."""
        return not self.over and self._reach(self._had.rstrip(), self._again) is None


def reach_text(had: str, again: str) -> int | None:
    """Blanks may differ wherever both have some, or one has some and the other none."""
    if had.startswith(again):
        return len(again) if len(again) == len(had) else None
    if again.startswith(had):
        return len(had)
    at = 0
    have = iter(enumerate(had))
    for place, char in have:
        while at < len(again) and again[at] != char and again[at].isspace() and not char.isspace():
            at += 1
        if at == len(again):
            return at if not had[place:].strip() else None
        if again[at] == char:
            at += 1
        elif not char.isspace():
            raise Differs(f"text differs at character {place}")
    return at


def reach_json(had: str, again: str) -> int | None:
    """Blanks outside strings count for nothing, and a character in a string is the same however it is written."""
    if had.startswith(again):
        return len(again) if len(again) == len(had) else None
    if again.startswith(had):
        return len(had)
    rest = ""
    others = _units(again)
    at = 0
    for unit, _, torn in _units(had):
        if torn:  # the client has the beginning of an escape
            rest = torn
            break
        found = next(others, None)
        if found is None or found[2]:
            return None
        if found[0] != unit:
            raise Differs("arguments differ")
        at = found[1]
    if at < 0:
        raise Differs("arguments are torn inside a character")
    if rest and not again.startswith(rest, at):
        if rest.startswith(again[at:]):
            return None
        raise Differs("arguments differ")
    return at + len(rest)


def _units(text: str) -> Iterator[tuple[str, int, str]]:
    """What JSON text is made of: (unit, where it ends, ""), for a torn escape at the end ("", 0, the escape).

    In strings units are UTF-16's, marked by a leading quote: escapes write them one by one. The first half of a character
    that stands there as itself ends nowhere (-1).
    """
    at, inside = 0, False
    while at < len(text):
        char = text[at]
        at += 1
        if not inside:
            if char not in _BLANK:
                inside = char == '"'
                yield char, at, ""
        elif char == '"':
            inside = False
            yield char, at, ""
        elif char == "\\":
            escape = _ESCAPE.match(text, at - 1)
            if escape is None:
                if not _TORN.fullmatch(text, at - 1):
                    raise Differs("arguments hold an escape that is none")
                yield "", 0, text[at - 1 :]
                return
            at = escape.end()
            yield '"' + (chr(int(escape[1], 16)) if escape[1] else _ESCAPED[escape[2]]), at, ""
        elif char > "\uffff":
            code = ord(char) - 0x10000
            yield '"' + chr(0xD800 + (code >> 10)), -1, ""
            yield '"' + chr(0xDC00 + (code & 0x3FF)), at, ""
        else:
            yield '"' + char, at, ""
