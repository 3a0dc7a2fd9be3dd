"""A client that sees bytes: what came, in which pieces, and how it ended.

No SDK's kindness hides anything here: a cut body is a cut body. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Self

import httptools

DEADLINE = 20.0


@dataclass(slots=True)
class Response:
    """One response. complete: the HTTP message ended properly. header_list: as they came, repeated ones too.
    continued: a `100 Continue` came first."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    header_list: list[tuple[str, str]] = field(default_factory=list)
    continued: bool = False
    complete: bool = False
    pieces: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        if len(self.pieces) > 1:
            self.pieces = [b"".join(self.pieces)]
        return self.pieces[0] if self.pieces else b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def values(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.header_list if key.lower() == name]

    @property
    def events(self) -> list[Any]:
        """Decoded data of every event; `[DONE]` stays a string; comments are left out."""
        found: list[Any] = []
        for event in self.body.replace(b"\r\n", b"\n").split(b"\n\n"):
            data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if data:
                found.append(data.decode() if data == b"[DONE]" else json.loads(data))
        return found

    @property
    def text(self) -> str:
        """Content of a chat stream's first choice."""
        return "".join(
            event["choices"][0]["delta"].get("content") or ""
            for event in self.events
            if isinstance(event, dict) and event.get("choices")
        )


class Connection:
    """One connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._parser: httptools.HttpResponseParser | None = None
        self._await_response()
        self.closed_by_peer = False

    def _await_response(self) -> None:
        """What the next read gives belongs to a new response."""
        self.response = self._current = Response()
        self._following: deque[Response] = deque()

    @classmethod
    async def open(cls, port: int, **kwargs: Any) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port, **kwargs))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def send(
        self,
        path: str,
        body: object = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
        version: str = "1.1",
    ) -> None:
        """Send a request; dicts are encoded as JSON."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = {"host": "localhost", **(headers or {})}
        if data or body is not None:
            lines.setdefault("content-type", "application/json")
        if "transfer-encoding" not in lines:
            lines.setdefault("content-length", str(len(data)))
        verb = method or ("GET" if body is None else "POST")
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._writer.write(f"{verb} {path} HTTP/{version}\r\n{head}\r\n".encode() + data)
        self._await_response()
        self._parser = httptools.HttpResponseParser(self)

    def send_raw(self, data: bytes) -> None:
        self._writer.write(data)
        self._await_response()
        self._parser = httptools.HttpResponseParser(self)

    async def read(self, within: float = DEADLINE) -> Response:
        """Until the response is complete or the connection ends. within: seconds."""
        async with asyncio.timeout(within):
            while not self.response.complete and await self._more():
                pass
        return self.response

    async def read_continue(self) -> None:
        """Until the `100 Continue` that was asked for."""
        async with asyncio.timeout(DEADLINE):
            while not self.response.continued and await self._more():
                pass

    async def read_end(self) -> None:
        """Until the gateway closes the connection; nothing may come before that."""
        async with asyncio.timeout(DEADLINE):
            assert await self._reader.read() == b""
        self.closed_by_peer = True

    def send_more(self, data: bytes) -> None:
        """More of the request that was begun."""
        self._writer.write(data)

    async def read_some(self) -> None:
        """One read."""
        async with asyncio.timeout(DEADLINE):
            await self._more()

    async def read_until(self, needle: bytes, within: float = DEADLINE) -> Response:
        """Until the body holds `needle`. within: seconds."""
        async with asyncio.timeout(within):
            while needle not in self.response.body:
                if self.response.complete or not await self._more():
                    raise AssertionError(f"{needle!r} did not come: {self.response}")
        return self.response

    async def _more(self) -> bool:
        assert self._parser is not None
        try:
            data = await self._reader.read(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            self.closed_by_peer = True
            return False
        self._parser.feed_data(data)
        return True

    def next(self) -> None:
        """Turn to the response behind the one that was read: of requests sent in one go."""
        if self._following:
            self.response = self._following.popleft()
        else:
            self.response = self._current = Response()

    def close(self) -> None:
        """FIN."""
        self._writer.close()

    def half_close(self) -> None:
        """FIN, and go on reading."""
        self._writer.write_eof()

    def reset(self) -> None:
        """RST: what a killed client's kernel sends."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    # httptools

    def on_message_begin(self) -> None:
        if self._current.complete:
            self._current = Response()
            self._following.append(self._current)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._current.headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        self._current.header_list.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        response = self._current
        response.status = self._parser.get_status_code()
        if response.status == 100:
            response.headers.clear()
            response.header_list.clear()
            response.continued = True

    def on_body(self, body: bytes) -> None:
        self._current.pieces.append(body)

    def on_message_complete(self) -> None:
        if self._current.status != 100:
            self._current.complete = True


async def ask(port: int, path: str, body: object = None, **kwargs: Any) -> Response:
    """One request on a connection of its own."""
    async with await Connection.open(port) as connection:
        connection.send(path, body, **kwargs)
        return await connection.read()
