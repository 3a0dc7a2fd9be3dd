"""What is said to a client that has no request which could be answered: whole responses, written by hand."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import cast

from proxy.wire.errors import Api, ErrorInfo, openai_type, render_body

STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


def refusal(status: int, message: str, code: str, *headers: bytes) -> bytes:
    """A whole response, the last of its connection."""
    body = render_body(Api.OTHER, ErrorInfo(status, message, openai_type(status), code))
    head = (STATUS_LINES[status], b"content-type: application/json\r\nconnection: close\r\n", *headers)
    return b"".join((*head, b"content-length: %d\r\n\r\n" % len(body), body))


class TooMany(asyncio.Protocol):
    """A connection too many: told so, and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        message = "Too many connections are open."
        text = refusal(503, message, "too_many_connections", b"retry-after: 1\r\n")
        cast(asyncio.Transport, transport).write(text)
        transport.close()
