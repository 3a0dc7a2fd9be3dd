"""Regular expressions with possessive groups, also on Pythons that match those wrongly.

Rules: write the possessive form, `(…)*+`; it is what is fastest where it works. Before 3.11.5 a possessive repeat of a
group that has to backtrack inside fails where it should match (CPython issue 106052; Debian 12 ships 3.11.2). There each is
compiled as an atomic group round the greedy repeat, `(?>(…)*)`, which by definition matches the same.
"""

from __future__ import annotations

import re
import sys
from typing import overload

SOUND = sys.version_info >= (3, 11, 5)

_QUANTIFIER = re.compile(r"(\*|\+|\?|\{[0-9,]+\})\+")


@overload
def compile(pattern: str, flags: int = 0, *, sound: bool = SOUND) -> re.Pattern[str]: ...
@overload
def compile(pattern: bytes, flags: int = 0, *, sound: bool = SOUND) -> re.Pattern[bytes]: ...
def compile(
    pattern: str | bytes, flags: int = 0, *, sound: bool = SOUND
) -> re.Pattern[str] | re.Pattern[bytes]:
    """As `re.compile`. sound: the interpreter gets possessive groups right."""
    if isinstance(pattern, bytes):
        text = pattern.decode("latin-1")
        return re.compile((text if sound else atomic(text)).encode("latin-1"), flags)
    return re.compile(pattern if sound else atomic(pattern), flags)


def atomic(pattern: str) -> str:
    """The pattern with every possessive repeat of a group as an atomic group."""
    out: list[str] = []
    opened: list[int] = []  # places in `out` where the groups that are open begin
    at = 0
    while at < len(pattern):
        char = pattern[at]
        end = at + 1
        if char == "\\":
            end += 1
        elif char == "[":
            end = _class_end(pattern, at)
        elif char == "(":
            opened.append(len(out))
        out.append(pattern[at:end])
        at = end
        if char == ")":
            begin = opened.pop()
            quantifier = _QUANTIFIER.match(pattern, at)
            if quantifier is not None:
                out[begin] = "(?>" + out[begin]
                out.append(quantifier[1] + ")")
                at = quantifier.end()
    return "".join(out)


def _class_end(pattern: str, at: int) -> int:
    """Where the set `[…]` that begins at `at` has ended. A bracket that comes first in it is one of its characters."""
    at += 1
    at += pattern.startswith("^", at)
    at += pattern.startswith("]", at)
    while pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1
