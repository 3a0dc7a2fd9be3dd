"""Server-sent events as bytes: where one ends, what its fields hold.

Rules: the WHATWG framing (LF, CRLF or CR line ends, a blank line ends an event), on bytes, linear time. Text is
never decoded here: a cut inside a UTF-8 character is a cut inside an event and waits for the rest of it.
"""

from __future__ import annotations

import re

# Two line ends in a row. A lone CR counts as one only before another: "\r" at the end of a read may be half a CRLF.
_BLANK_LINE = re.compile(rb"\r?\n\r?\n|\r\r")
_LINE_END = re.compile(rb"\r\n|\n|\r")

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""An event longer than this is malformed: a tool call's arguments or an embedded file fit many times over."""


class EventTooLong(ValueError):
    """An event does not end within `MAX_EVENT_BYTES`."""


class Splitter:
    """`feed(data)` gives every event that `data` completes, each with its blank line; the rest is held."""

    __slots__ = ("_scanned", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._scanned = 0

    @property
    def pending(self) -> bytes:
        """Bytes of an event that has not ended."""
        return self._tail

    def feed(self, data: bytes) -> list[bytes]:
        if self._tail:
            data = self._tail + data
        events: list[bytes] = []
        start, look = 0, self._scanned
        if b"\r" not in data:
            while (end := data.find(b"\n\n", look)) >= 0:
                end += 2
                events.append(data[start:end])
                start = look = end
        else:
            while (match := _BLANK_LINE.search(data, look)) is not None:
                end = match.end()
                events.append(data[start:end])
                start = look = end
        self._tail = data[start:]
        # A blank line may straddle the cut by up to three bytes; all before that has been looked at.
        self._scanned = max(0, len(self._tail) - 3)
        if len(self._tail) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events


def fields(event: bytes) -> tuple[bytes, bytes | None]:
    """(event name, data) of one event; data is None for comments and empty events.

    Several `data` lines join with a newline. One leading blank of a value is dropped, as the standard says.
    """
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return b"", event[6:-2]
    name = b""
    data: list[bytes] = []
    for line in _LINE_END.split(event):
        if line.startswith(b"data:"):
            data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line.startswith(b"event:"):
            name = line[7:] if line[6:7] == b" " else line[6:]
        elif line == b"data":
            data.append(b"")
    return name, b"\n".join(data) if data else None
