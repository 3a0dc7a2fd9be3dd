"""A client that sees bytes: what came, in which pieces, and how it ended.

No SDK's kindness hides anything here: a cut body is a cut body. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from dataclasses import dataclass, field
from typing import Any, Self

import httptools

DEADLINE = 5.0


@dataclass(slots=True)
class Response:
    """One response. complete: the HTTP message ended properly."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

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
        self.response = Response()
        self.closed_by_peer = False

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
        lines = {"host": "gateway", **(headers or {})}
        if data or body is not None:
            lines.setdefault("content-type", "application/json")
        if "transfer-encoding" not in lines:
            lines.setdefault("content-length", str(len(data)))
        verb = method or ("GET" if body is None else "POST")
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._writer.write(f"{verb} {path} HTTP/{version}\r\n{head}\r\n".encode() + data)
        self.response = Response()
        self._parser = httptools.HttpResponseParser(self)

    def send_raw(self, data: bytes) -> None:
        self._writer.write(data)
        self.response = Response()
        self._parser = httptools.HttpResponseParser(self)

    async def read(self) -> Response:
        """Until the response is complete or the connection ends."""
        async with asyncio.timeout(DEADLINE):
            while not self.response.complete and await self._more():
                pass
        return self.response

    async def read_until(self, needle: bytes) -> Response:
        """Until the body holds `needle`."""
        async with asyncio.timeout(DEADLINE):
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

    def close(self) -> None:
        """FIN."""
        self._writer.close()

    def reset(self) -> None:
        """RST: what a killed client's kernel sends."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self.response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.response.status = self._parser.get_status_code()
        if self.response.status == 100:
            self.response.headers.clear()

    def on_body(self, body: bytes) -> None:
        self.response.body += body

    def on_message_complete(self) -> None:
        if self.response.status != 100:
            self.response.complete = True


async def ask(port: int, path: str, body: object = None, **kwargs: Any) -> Response:
    """One request on a connection of its own."""
    async with await Connection.open(port) as connection:
        connection.send(path, body, **kwargs)
        return await connection.read()
