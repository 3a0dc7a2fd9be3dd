"""Long stretches of a JSON text without a quote: found at memory speed, and left out before a slower look.

Rules
1. A body of hundreds of kilobytes is mostly the inside of a few strings. Keys, and where strings begin and end, are
   where quotes are: what looks for them reads only `quoted` parts.
2. `shorten` leaves out only what is surely the inside of a string; then a scan of the rest finds the same members.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

STRETCH = 4096
"""Bytes without a quote that make a stretch: shorter ones cost more to leave out than to read."""

_KEPT = 64
"""Bytes kept at both ends of what is left out: whether a quote is escaped depends on the backslashes before it."""

Part = tuple[int, int]


def quoted(data: bytes, begin: int, end: int) -> list[Part]:
    """The parts of `data[begin:end]`, from a quote to behind a quote, that hold all its quotes; longer than STRETCH is
    what lies between two of them."""
    parts = []
    at = data.find(b'"', begin, end)
    while at >= 0:
        start, at = at, at + 1
        while (last := data.rfind(b'"', at, min(at + STRETCH, end))) >= 0:
            at = last + 1
        parts.append((start, at))
        at = data.find(b'"', at, end)
    return parts


def mask(data: bytes) -> bytes:
    """`data` with escaped backslashes and quotes overwritten by NULs: every quote left is a real one."""
    if b"\\" not in data:
        return data
    return data.replace(b"\\\\", b"\0\0").replace(b'\\"', b"\0\0")


class Shortened:
    """A text with stretches left out. `data`: what is left; `offset` gives the place in the original."""

    __slots__ = ("_added", "_starts", "data")

    def __init__(self, data: bytes, starts: Sequence[int], added: Sequence[int]) -> None:
        self.data = data
        self._starts = starts  # where each piece begins in `data`
        self._added = added  # what has to be added there

    def offset(self, at: int) -> int:
        """Of a byte that is not inside a string, or of its quotes."""
        return at + self._added[bisect_right(self._starts, at) - 1]


def shorten(data: bytes, parts: Sequence[Part]) -> Shortened | None:
    """`data` without the inside of its long strings; parts: all its `quoted` ones. None where too little can be spared."""
    if 4 * sum(stop - start for start, stop in parts) > len(data):
        return None  # telling strings from what is between them costs more than a byte that is only read
    pieces: list[bytes] = []
    starts, added = [0], [0]
    at = size = 0
    inside = False
    for place, (start, stop) in enumerate(parts):
        # A backslash before the part may belong to its first quote.
        before = max(start - _KEPT, parts[place - 1][1] if place else 0)
        if mask(data[before:stop]).count(b'"') % 2:
            inside = not inside
        resume = parts[place + 1][0] - _KEPT if place + 1 < len(parts) else len(data)
        if not inside or resume <= stop + _KEPT or not data[resume : resume + _KEPT].strip(b"\\"):
            continue  # to the last quote also belongs what nobody can tell
        pieces.append(data[at : stop + _KEPT])
        size += stop + _KEPT - at
        at = resume
        starts.append(size)
        added.append(resume - size)
    if not pieces:
        return None
    pieces.append(data[at:])
    return Shortened(b"".join(pieces), starts, added)
