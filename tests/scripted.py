"""A backend that does exactly what a test says, on a real socket.

    async with ScriptedBackend() as backend:
        gate = asyncio.Event()
        backend.answer(after(chat_stream("Hello there"), 1, WaitFor(gate)))
        ...                                        # a request through the gateway to backend.url
        request = await backend.received(0)        # what arrived, byte for byte
        gate.set()
        assert await backend.closed(0) is Ending.PEER_CLOSED

Rules
1. An answer is a sequence of steps (tests/answers.py), run in order once the request is whole. Nothing is
   sent that no step says.
2. No time passes here: a step waits for a gate that the test opens. Every wait of the test has a deadline, so
   that a mistake fails and does not hang.
3. What engines are polled for (`pages`: /health, /metrics, /v1/models) is answered apart and recorded in
   `polls`; everything else takes the next answer and is recorded in `requests`.
4. Leaving the block ends every script and connection; a script that raised makes the test fail.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

from tests.answers import (
    DONE,
    Call,
    Chunk,
    Close,
    Gate,
    Head,
    Headers,
    LastChunk,
    Raw,
    Reset,
    Stall,
    Step,
    Steps,
    WaitFor,
    after,
    chat_event,
    chat_events,
    chat_json,
    chat_stream,
    cut,
    error_json,
    event,
    head_bytes,
    json_answer,
    metrics_page,
    models_page,
    replay,
    sse,
    tool_stream,
    usage_event,
    whole,
)

DEADLINE = 20.0  # seconds that a test waits for something before it fails

__all__ = [
    "DONE",
    "Call",
    "Chunk",
    "Close",
    "Connection",
    "Ending",
    "Gate",
    "Head",
    "Headers",
    "LastChunk",
    "Raw",
    "Received",
    "Reset",
    "ScriptedBackend",
    "Stall",
    "Step",
    "Steps",
    "WaitFor",
    "after",
    "black_hole",
    "chat_event",
    "chat_events",
    "chat_json",
    "chat_stream",
    "closed_port",
    "cut",
    "error_json",
    "event",
    "head_bytes",
    "json_answer",
    "metrics_page",
    "models_page",
    "replay",
    "server_tls",
    "sse",
    "tool_stream",
    "usage_event",
    "whole",
]


class Ending(StrEnum):
    """How a connection ended."""

    PEER_CLOSED = "peer_closed"  # FIN from the other side
    PEER_RESET = "peer_reset"  # RST from the other side
    OURS = "ours"  # a Close or Reset step, or the end of the test

    @property
    def by_peer(self) -> bool:
        """The other side ended it: FIN, or RST as the kernel makes of a close with unread bytes."""
        return self is not Ending.OURS


@dataclass(slots=True, eq=False)
class Received:
    """One request. head: its bytes up to and with the empty line. body: without chunked framing."""

    index: int
    connection: Connection
    head: bytes
    body: bytes = b""
    whole: bool = False
    answered: bool = False  # the script has run to its end
    method: str = field(init=False)
    target: str = field(init=False)
    headers: list[tuple[str, str]] = field(init=False)
    reused: bool = field(init=False)  # not the first request of its connection

    def __post_init__(self) -> None:
        request_line, *lines = self.head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        self.method, self.target, _ = request_line.split(" ")
        self.headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        self.reused = self.connection.requests > 1

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def header(self, name: str) -> str | None:
        """The only value; a header sent twice is a mistake of the sender and raises."""
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        if len(values) > 1:
            raise AssertionError(f"{name} sent {len(values)} times: {values}")
        return values[0] if values else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Connection(asyncio.Protocol):
    """The server's end of one connection: takes requests apart, runs scripts, notices the end."""

    def __init__(self, backend: ScriptedBackend) -> None:
        self.backend = backend
        self.requests = 0
        self.sent = 0  # bytes that scripts have written
        self.blocked = False  # the other side takes no more
        self.ending: Ending | None = None
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._more = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self.script: asyncio.Task[None] | None = None
        self._ended_by_us = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert hasattr(transport, "write")  # uvloop's is no asyncio.Transport by class
        self.transport = transport
        # `blocked` then means that the kernel took no more. (Not 0: under TLS that pauses and never resumes.)
        transport.set_write_buffer_limits(high=1)
        self.backend._opened(self)
        self.script = asyncio.get_running_loop().create_task(self._serve())
        self.script.add_done_callback(self._script_done)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._more.set()

    def pause_writing(self) -> None:
        self.blocked = True
        self._writable.clear()
        self.backend._changed()

    def resume_writing(self) -> None:
        self.blocked = False
        self._writable.set()
        self.backend._changed()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended_by_us:
            self.ending = Ending.OURS
        else:
            self.ending = Ending.PEER_RESET if isinstance(exc, ConnectionError) else Ending.PEER_CLOSED
        if self.script is not None:
            self.script.cancel()
        self.backend._changed()

    def _script_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (fault := task.exception()) is not None:
            self.backend._faults.append(fault)
            self.reset()

    # requests and answers

    async def _serve(self) -> None:
        if self.backend._greetings:
            await self._run(self.backend._greetings.popleft())
        while not self._closing:
            head = await self._take_head()
            self.requests += 1
            request, answer = self.backend._arrived(self, head)
            if answer.early:
                await self._run(answer.steps(request))
            request.body = await self._take_body(request)
            request.whole = True
            self.backend._changed()
            if not answer.early:
                await self._run(answer.steps(request))
            request.answered = True
            self.backend._changed()

    @property
    def _closing(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    async def _take_head(self) -> bytes:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            await self._read_more()
        return self._take(end + 4)

    async def _take_body(self, request: Received) -> bytes:
        if (request.header("transfer-encoding") or "").lower() == "chunked":
            return await self._take_chunks()
        length = int(request.header("content-length") or 0)
        while len(self._buffer) < length:
            await self._read_more()
        return self._take(length)

    async def _take_chunks(self) -> bytes:
        body = b""
        while True:
            while (end := self._buffer.find(b"\r\n")) < 0:
                await self._read_more()
            size = int(self._take(end + 2).partition(b";")[0], 16)
            while len(self._buffer) < size + 2:
                await self._read_more()
            body += self._take(size + 2)[:-2]
            if size == 0:
                return body

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    async def _read_more(self) -> None:
        self._more.clear()
        await self._more.wait()

    async def _run(self, steps: Steps) -> None:
        for step in steps:
            match step:
                case Head():
                    await self._write(head_bytes(step))
                case Chunk(data):
                    await self._write(b"%x\r\n%s\r\n" % (len(data), data))
                case LastChunk():
                    await self._write(b"0\r\n\r\n")
                case Raw(data):
                    await self._write(data)
                case WaitFor(gate):
                    await gate.wait()
                case Call(function):
                    function()
                case Stall():
                    await self.backend._released.wait()
                case Close():
                    self.close()
                case Reset():
                    self.reset()
            if self._closing:
                return

    async def _write(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)
        self.sent += len(data)
        self.backend._changed()
        await self._writable.wait()

    def close(self) -> None:
        """FIN, after what is unsent."""
        self._ended_by_us = True
        if self.transport is not None:
            self.transport.close()

    def reset(self) -> None:
        """RST."""
        self._ended_by_us = True
        if self.transport is not None:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()


@dataclass(frozen=True, slots=True)
class _Answer:
    source: Steps | Callable[[Received], Steps]
    early: bool = False

    def steps(self, request: Received) -> Steps:
        return self.source(request) if callable(self.source) else self.source


class ScriptedBackend:
    """The server. `requests`, `polls` and `connections` are in order of arrival."""

    def __init__(
        self, *, model: str = "tiny", window_tokens: int = 4096, tls: ssl.SSLContext | None = None
    ) -> None:
        self.requests: list[Received] = []
        self.polls: list[Received] = []
        self.connections: list[Connection] = []
        self.pages: dict[str, Steps | Callable[[Received], Steps]] = {
            "/health": whole(b"", content_type=None),
            "/metrics": metrics_page(),
            "/v1/models": models_page(model, window_tokens),
        }
        self.default: Steps | Callable[[Received], Steps] = _answer_in_kind
        self.port = 0
        self._tls = tls
        self._answers: deque[_Answer] = deque()
        self._greetings: deque[Steps] = deque()
        self._released = asyncio.Event()
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._faults: list[BaseException] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_listening()
        for connection in self.connections:
            if connection.ending is None:
                connection.reset()
        await self.until(lambda: not self.open_connections, "the last connection's end")
        await asyncio.gather(*(c.script for c in self.connections if c.script), return_exceptions=True)
        if exc is None and self._faults:
            raise self._faults[0]

    @property
    def url(self) -> str:
        """Base URL without a path, as a backend's `url` in the config."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def open_connections(self) -> int:
        return sum(connection.ending is None for connection in self.connections)

    async def listen(self) -> None:
        """Accept connections; after `stop_listening`, on the same port again."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), "127.0.0.1", self.port, ssl=self._tls, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def stop_listening(self) -> None:
        """Refuse new connections; open ones go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    # what to answer

    def answer(self, *answers: Steps | Callable[[Received], Steps], early: bool = False) -> None:
        """Queue answers, one a request; with none queued, `default` answers. early: do not await the body."""
        self._answers.extend(_Answer(answer, early) for answer in answers)

    def greet(self, *greetings: Steps) -> None:
        """Steps to run on the next connections before any request is read: a reset, words out of turn."""
        self._greetings.extend(greetings)

    def release(self) -> None:
        """End every Stall, also those to come."""
        self._released.set()

    def close_idle(self) -> int:
        """Close what waits for a request, as servers do after their keep-alive time; how many."""
        idle = [c for c in self.connections if c.ending is None and c.requests and not self._busy(c)]
        for connection in idle:
            connection.close()
        return len(idle)

    def _busy(self, connection: Connection) -> bool:
        return any(r.connection is connection and not r.answered for r in (*self.requests, *self.polls))

    # what the test waits for

    async def received(self, index: int = 0) -> Received:
        """The request, once it is whole."""
        await self.until(
            lambda: len(self.requests) > index and self.requests[index].whole, f"request {index} to arrive"
        )
        return self.requests[index]

    async def answered(self, index: int = 0) -> Received:
        """The request, once its script has run to the end."""
        await self.until(
            lambda: len(self.requests) > index and self.requests[index].answered, f"the end of answer {index}"
        )
        return self.requests[index]

    async def closed(self, index: int = 0) -> Ending:
        """How the connection of a request ended, once it has."""
        await self.until(
            lambda: len(self.requests) > index and self.requests[index].connection.ending is not None,
            f"the connection of request {index} to be closed",
        )
        ending = self.requests[index].connection.ending
        assert ending is not None
        return ending

    async def blocked(self, index: int = 0) -> int:
        """Wait until the other side stops taking bytes of an answer; how many were written until then."""
        await self.until(
            lambda: len(self.requests) > index and self.requests[index].connection.blocked,
            f"back-pressure on answer {index}",
        )
        return self.requests[index].connection.sent

    async def until(self, condition: Callable[[], bool], what: str = "a condition") -> None:
        """Wait for anything that follows from connections, requests and steps; AssertionError after 5 s."""
        if condition():
            return
        changed = asyncio.get_running_loop().create_future()
        self._waiters.append((condition, changed))
        try:
            async with asyncio.timeout(DEADLINE):
                await changed
        except TimeoutError:
            raise AssertionError(f"waited {DEADLINE:g} s for {what}; so far {self!r}") from None

    def __repr__(self) -> str:
        seen = [f"{r.method} {r.target}{'' if r.whole else ' (not whole)'}" for r in self.requests]
        return (
            f"<ScriptedBackend {seen}, {self.open_connections} of {len(self.connections)} connections open>"
        )

    # called by connections

    def _opened(self, connection: Connection) -> None:
        self.connections.append(connection)
        self._changed()

    def _arrived(self, connection: Connection, head: bytes) -> tuple[Received, _Answer]:
        request = Received(0, connection, head)
        page = self.pages.get(request.path) if request.method == "GET" else None
        kind = self.requests if page is None else self.polls
        request.index = len(kind)
        kind.append(request)
        self._changed()
        if page is not None:
            return request, _Answer(page)
        return request, self._answers.popleft() if self._answers else _Answer(self.default)

    def _changed(self) -> None:
        waiting = []
        for condition, changed in self._waiters:
            if changed.done():
                continue
            if condition():
                changed.set_result(None)
            else:
                waiting.append((condition, changed))
        self._waiters = waiting


def _answer_in_kind(request: Received) -> Steps:
    """Whatever was asked for, a chat answer: streamed if the body says so, with usage if that is asked."""
    try:
        asked = request.json
    except ValueError:
        asked = {}
    if not asked.get("stream"):
        return chat_json()
    wants_usage = (asked.get("stream_options") or {}).get("include_usage")
    return chat_stream(usage=(10, 5) if wants_usage else None)


def server_tls() -> tuple[ssl.SSLContext, bytes]:
    """A TLS context for 127.0.0.1 and localhost, and the PEM of the authority that a client must trust."""
    import trustme

    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    return context, authority.cert_pem.bytes()


@contextmanager
def black_hole() -> Iterator[int]:
    """A port on which connecting never ends, neither accepted nor refused (Linux: the backlog is full)."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = []
        try:
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(address)
                fillers.append(filler)
            yield address[1]
        finally:
            for filler in fillers:
                filler.close()


def closed_port() -> int:
    """A port on which nothing listens: connecting is refused."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port
