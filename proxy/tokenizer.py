"""Asking a backend how many tokens a prompt has: only near a limit, for it costs what reading the prompt costs.

Rules: the request's own body goes to /tokenize, with the backend's name for the model. One short deadline; whatever does
not answer it is an estimate kept, never an error. A backend without the path is not asked again for a while.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import orjson

from proxy.classify import Classified
from proxy.clock import Clock
from proxy.lane import Lane
from proxy.pool import Backend
from proxy.upstream import Headers
from proxy.wire.errors import Api
from proxy.wire.request import RequestBody
from proxy.wire.splice import apply, override

PATH = b"/tokenize"
TIMEOUT = 2.0
ASK_AGAIN_SECONDS = 300.0


class Tokenizer:
    """`count` gives the tokens, or None where nobody can say."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._without: dict[str, float] = {}
        self.asked = 0

    async def count(self, backend: Backend, api: Api, asked: Classified) -> int | None:
        now = self._clock.now()
        body = asked.body
        if not isinstance(body, RequestBody) or now < self._without.get(backend.name, 0.0):
            return None
        if not backend.health.healthy:
            return None
        self.asked += 1
        model = backend.served_model or asked.route.target
        raw = apply(body.scan, [override(("model",), model)]) if body.model != model else asked.raw
        try:
            async with self._clock.timeout_at(now + TIMEOUT):
                status, answer = await _post(backend, raw)
        except (OSError, TimeoutError):
            status, answer = 0, b""
        tokens = _count(answer) if status == 200 else None
        if tokens is None:
            self._without[backend.name] = self._clock.now() + ASK_AGAIN_SECONDS
        return tokens


async def _post(backend: Backend, raw: bytes) -> tuple[int, bytes]:
    spec = backend.spec
    key = b"\r\nauthorization: Bearer " + spec.key.encode() if spec.key is not None else b""
    head = (
        b"POST %b HTTP/1.1\r\nhost: %b%b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % (
            spec.path_prefix + PATH,
            spec.host_header,
            key,
            len(raw),
        )
    )
    connection = backend.connections.take() or await backend.connections.connect()
    hearing = _Hearing()
    try:
        connection.send(head, raw, hearing)
        await hearing.done
    finally:
        connection.detach()
    return hearing.status, b"".join(hearing.parts) if hearing.whole else b""


@dataclass(slots=True, eq=False)
class _Hearing:
    """A `Sink` that keeps what it hears."""

    status: int = 0
    parts: list[bytes] = field(default_factory=list)
    whole: bool = False
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def head(self, status: int, headers: Headers) -> None:
        self.status = status

    def between(self, lane: Lane) -> None: ...

    def data(self, piece: bytes) -> None:
        self.parts.append(piece)

    def end(self) -> None:
        self.whole = True
        self._over()

    def lost(self, what: str, malformed: bool) -> None:
        self._over()

    def _over(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def _count(answer: bytes) -> int | None:
    try:
        value: object = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    count = value.get("count") if isinstance(value, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None
