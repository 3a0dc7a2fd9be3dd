"""Small requests of the gateway's own to a backend, beside those of clients: how many tokens, what ids say, what it can do.

Rules: over the backend's own connections, with its key, under one deadline. Nothing raises: what does not answer in time,
or not with JSON or events of it, is None.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from proxy.clock import Clock
from proxy.pool import Backend
from proxy.upstream import Headers
from proxy.wire.sse import EventTooLong, Splitter, fields
from proxy.wire.toolstream import dumps

if TYPE_CHECKING:
    from proxy.lane import Lane

MAX_BYTES = 8 * 1024 * 1024
"""Of an answer; a longer one is none."""


async def ask(clock: Clock, backend: Backend, path: bytes, body: dict[str, object], seconds: float) -> Any:
    """The same of a body that is to name the model as the backend does."""
    if backend.served_model is not None:
        body = {**body, "model": backend.served_model}
    return await post(clock, backend, path, dumps(body), seconds)


async def post(clock: Clock, backend: Backend, path: bytes, body: bytes, seconds: float) -> Any:
    """The decoded answer of a 200; else None."""
    try:
        async with clock.timeout_at(clock.now() + seconds):
            status, answer = await _post(backend, path, body)
    except (OSError, TimeoutError):
        return None
    return decoded(answer) if status == 200 else None


def decoded(body: bytes) -> Any:
    """What an answer says: its JSON; of an event stream a list of what its events say. None: neither."""
    try:
        if not body.startswith(b"data:"):
            return orjson.loads(body)
        told = [fields(event)[1] for event in Splitter().feed(body)]
        return [orjson.loads(data) for data in told if data and data != b"[DONE]"]
    except (ValueError, EventTooLong):
        return None


async def _post(backend: Backend, path: bytes, body: bytes) -> tuple[int, bytes]:
    spec = backend.spec
    key = b"\r\nauthorization: Bearer " + spec.key.encode() if spec.key is not None else b""
    head = (
        b"POST %b HTTP/1.1\r\nhost: %b%b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % (spec.path_prefix + path, spec.host_header, key, len(body))
    )
    connection = backend.connections.take() or await backend.connections.connect()
    hearing = _Hearing()
    try:
        connection.send(head, body, hearing)
        await hearing.done
    finally:
        connection.detach()
    return hearing.status, b"".join(hearing.parts) if hearing.whole else b""


@dataclass(slots=True, eq=False)
class _Hearing:
    """A `Sink` that keeps what it hears."""

    status: int = 0
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    whole: bool = False
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def head(self, status: int, headers: Headers) -> None:
        self.status = status

    def between(self, lane: Lane) -> None: ...

    def data(self, piece: bytes) -> None:
        self.size += len(piece)
        if self.size > MAX_BYTES:
            self._over()
        else:
            self.parts.append(piece)

    def end(self) -> None:
        self.whole = self.size <= MAX_BYTES
        self._over()

    def lost(self, what: str, malformed: bool) -> None:
        self._over()

    def _over(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
