"""What the owner and a worker say to each other: messages over a socket pair, many in one write.

Rules
1. A message is a tuple: its kind (a number of `Kind`), then plain values (None, bool, int, float, str, bytes, tuples of
   them). What is more than that travels as bytes (`pack`): both ends run the same code, and nobody else can write here.
2. A frame is its length (4 bytes) and the messages of one turn of the event loop: all that is said in a turn goes out
   together, in the order in which it was said. Nothing is said of a chunk. What nobody waits for (an end, while no request
   waits for a place) goes out with what is said next, or a millisecond later.
3. Whoever finds the other end gone is told once (`lost`); what is said from then on is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import marshal
import pickle
import socket
from collections.abc import Callable
from struct import Struct
from typing import Any, cast

from proxy.clock import Clock

log = logging.getLogger("tierline.workers")

Message = tuple[Any, ...]
_LENGTH = Struct("<I")
LATER_SECONDS = 0.001


class Kind:
    """Who says what; plain numbers, for `marshal` takes no others. Closed."""

    # A worker asks, and is answered under the same number.
    ENTER = 0  # number, request id, whether its trace is wanted, facts (`facts_out`), pinned
    AGAIN = 1  # number, request id, facts, tried, pinned, larger_than, pays
    BESIDE = 2  # number, request id, facts, tried
    LIMIT = 3  # number, accounts, tokens, cost
    PAGE = 4  # number, accept: the metrics of all
    SYNC = 5  # number: whatever others said before this is said to us before the answer
    # A worker tells.
    FIRST = 10  # number
    FINISH = 11  # number, ok, prompt tokens, completion tokens, cached tokens, calls_ok
    GONE = 12  # number: whoever waited for the answer does not any more
    SETTLE = 13  # number, tokens, cost
    ANSWERED = 14  # backend, its URL
    FAILED = 15  # backend, its URL, failure
    FULL = 16  # backend, its URL, seconds
    JUDGED = 17  # backend, sound
    LEARNT = 18  # what `Owners.learn` was told
    REPORT = 19  # connections of clients; of each backend: name, open connections, seconds since its newest stream was heard
    TEXT = 20  # metrics
    READY = 21
    CLOSED = 23  # a client's connection
    LEAVING = 22  # it takes no more connections
    # The owner answers.
    GO = 30  # number, backend, reason, cached tokens, forecast, drops, trace, whether others wait
    WAIT = 31  # number, seconds, reason
    SHED = 32  # number, reason, retry_after, drops, trace
    NOTHING = 33  # number
    ENTRY = 34  # number, refusal, standing of requests, standing of tokens
    PAGES = 35  # number, exposition, content type
    ERROR = 36  # number, what a ProxyError is made of
    # The owner tells.
    CONFIG = 40  # Config
    STATES = 41  # of backends: see `MirrorPool`
    GIVE_UP = 42  # backend, since
    DRAIN = 43  # whether another process is in our place
    SCRAPE = 44  # accept
    DROPPED = 45  # backend that is configured no more: nothing runs there


ASKS = frozenset({Kind.ENTER, Kind.AGAIN, Kind.BESIDE, Kind.LIMIT, Kind.PAGE, Kind.SYNC})


class Frames:
    """Frames out of a stream of bytes, however it is cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages of what is whole."""
        if self._rest:
            data = self._rest + data
        found: list[Message] = []
        at, end = 0, len(data)
        while end - at >= 4:
            (length,) = _LENGTH.unpack_from(data, at)
            if end - at - 4 < length:
                break
            found += marshal.loads(memoryview(data)[at + 4 : at + 4 + length])
            at += 4 + length
        self._rest = data[at:]
        return found


def frame(messages: list[Message]) -> bytes:
    body = marshal.dumps(messages)
    return _LENGTH.pack(len(body)) + body


def receive(channel: socket.socket) -> list[Message]:
    """The next frame, before there is a loop; none when the other end is gone."""
    head = _exactly(channel, 4)
    body = _exactly(channel, _LENGTH.unpack(head)[0]) if head else b""
    found: list[Message] = marshal.loads(body) if body else []
    return found


def _exactly(channel: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = channel.recv(length - len(data))
        if not more:
            return b""
        data += more
    return data


class Channel(asyncio.Protocol):
    """One end. `handlers`: by kind, called with the rest of the message. failed: told of a message that one raised at."""

    def __init__(
        self,
        clock: Clock,
        handlers: dict[int, Callable[..., None]],
        lost: Callable[[], None],
        failed: Callable[[Message], None] = lambda message: None,
    ) -> None:
        self._clock = clock
        self._handlers = handlers
        self._lost = lost
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._frames = Frames()
        self._out: list[Message] = []
        self._due = self._later = False
        """A flush is coming: in this turn; within LATER_SECONDS."""

    def say(self, *message: Any) -> None:
        """With everything else that is said in this turn of the loop."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self.flush)
        self._out.append(message)

    def mention(self, *message: Any) -> None:
        """With whatever is said next, and within LATER_SECONDS at the latest: a write less where much is said."""
        if not self._later:
            self._later = True
            self._clock.call_at(self._clock.now() + LATER_SECONDS, self._flush_later)
        self._out.append(message)

    def _flush_later(self) -> None:
        self._later = False
        self.flush()

    def flush(self) -> None:
        """Now."""
        self._due = False
        out, self._out = self._out, []
        if out and self._transport is not None:
            body = marshal.dumps(out)
            self._transport.write(_LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        self.flush()
        if self._transport is not None:
            self._transport.close()

    # -- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        handlers = self._handlers
        for message in self._frames.feed(data):
            try:
                handlers[message[0]](*message[1:])
            except Exception:
                log.exception("a message of kind %s failed inside the gateway", message[0])
                self._failed(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._transport = None
            self._lost()


def pack(value: object) -> bytes:
    """For what is no plain value, and said seldom."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """Of the other end, which is our own code."""
    return pickle.loads(data)
