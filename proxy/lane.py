"""The hot path of a streamed answer, all of it: one content delta in one HTTP chunk, from socket to socket.

Rules
1. A chunk takes the short way only if it is, but for the text of its delta, what the chunks before it were: a size line
   as everybody spells it, the same head, the same tail, and a text that nobody has to look at. Then it is written as
   it came and its time is marked. Anything else goes the long way, `received`: parser, relay, reader. That way is
   always right; this one only saves it.
2. Where ids of tokens come along, for another backend to go on from (`wire.continuation`), they are taken out and kept.
3. The short way is open until a chunk went the long way: only there can change what text may pass (see `Shape`).
4. At a few thousand chunks a second most of what runs has left the CPU's caches in between, so what counts is how
   little is touched. `PythonLane` says all of it; `_lane.c` is the same compiled, and used where it was built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from proxy.wire.streams import FITS, IDS_FIT, Shape

MARKS = 256
"""Times of deltas kept before they are folded into the histogram: cheaper together, and bounded."""


def _size_lines(longest: int) -> list[bytes]:
    """By the length of a whole chunk, size line and both line ends: the size line it must begin with."""
    lines = [b"\0"] * (longest + 1)  # no chunk begins with it
    for size in range(1, longest):
        line = b"%x\r\n" % size
        length = len(line) + size + 2
        if length <= longest:
            lines[length] = line
    return lines


LONGEST = 4096
SIZE_LINES = _size_lines(LONGEST)


def _nowhere(data: bytes) -> None: ...


def _nothing() -> None: ...


class PythonLane:
    """A protocol whose chunks may take the short way, once it is opened; `received` is the long one.

    sent: bytes of this exchange's body that took the short way.
    """

    __slots__ = ("_fold", "_head", "_marks", "_now", "_open", "_shape", "_tail", "_write", "sent")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The exchange is over: nothing of it is held."""
        self._open = False
        self._shape: Shape | None = None
        self._write: Callable[[bytes], object] = _nowhere
        self._fold: Callable[[], None] = _nothing
        self._marks: list[float] = []
        self.sent = 0

    def open(
        self,
        shape: Shape,
        write: Callable[[bytes], object],
        now: Callable[[], float],
        marks: list[float],
        fold: Callable[[], None],
    ) -> None:
        """For deltas of `shape`. write: to a client that takes chunks. marks: gets the time of each delta; `fold` is to
        empty it at MARKS. All but the shape stays the same for the exchange."""
        self._open = True
        if shape is self._shape:
            return
        self._shape = shape
        self._head, self._tail = shape.head, shape.tail + b"\r\n"
        self._write, self._now, self._marks, self._fold = write, now, marks, fold

    def close(self) -> None:
        """Until it is opened again everything goes the long way."""
        self._open = False

    def received(self, data: bytes) -> None:
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        """A read: by the lane, or `received`."""
        if self._open and (length := len(data)) <= LONGEST:
            shape, line, head, tail = self._shape, SIZE_LINES[length], self._head, self._tail
            assert shape is not None
            kept = shape.kept
            start = len(line)
            begin, end = start + len(head), length - len(tail)
            stop = end if kept is None or not kept.between else data.rfind(kept.between, begin, end)
            if (
                begin < stop
                and data.startswith(line)
                and data.startswith(head, start)
                and data.endswith(tail)
                and FITS[shape.inside](data, begin, stop) is not None
                and (stop == end or kept is None or IDS_FIT(data, stop + len(kept.between), end) is not None)
            ):
                if kept is not None:
                    kept.texts.append(data[begin:stop])
                    if stop < end:
                        kept.ids.append(data[stop + len(kept.between) : end])
                end = stop
                if shape.parts is not None:
                    shape.parts.append(data[begin:end].decode())
                if shape.renamed is not None:
                    event = b"%b%b%b" % (shape.renamed[0], data[begin:end], shape.renamed[1])
                    data, start = b"%x\r\n%b\r\n" % (len(event), event), len(b"%x\r\n" % len(event))
                self.sent += len(data) - start - 2
                self._write(data)
                marks = self._marks
                marks.append(self._now())
                if len(marks) >= MARKS:
                    self._fold()
                return
        self._open = False
        self.received(data)


def _compiled() -> type[PythonLane] | None:
    try:
        from proxy import _lane  # type: ignore[attr-defined]
    except ImportError:
        return None  # built without a compiler: works the same, and a chunk costs some ten microseconds more
    return cast("type[PythonLane]", _lane.Lane)


CompiledLane = _compiled()

if TYPE_CHECKING:
    Lane = PythonLane
else:
    Lane = CompiledLane or PythonLane
