"""What is said to a client out of turn, written by hand: to who has no request to be answered, and `100 Continue`."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import cast

from aiohttp import web

from proxy.wire.errors import Api, ErrorInfo, openai_type, render_body

STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def send_continue(request: web.BaseRequest) -> None:
    """Answer `Expect: 100-continue`: the low-level server leaves that to us."""
    if request.transport is not None and request.version >= (1, 1):
        request.transport.write(_CONTINUE)


def refusal(status: int, message: str, code: str, *headers: bytes) -> bytes:
    """A whole response, the last of its connection."""
    body = render_body(Api.OTHER, ErrorInfo(status, message, openai_type(status), code))
    head = (STATUS_LINES[status], b"content-type: application/json\r\nconnection: close\r\n", *headers)
    return b"".join((*head, b"content-length: %d\r\n\r\n" % len(body), body))


def error_page(status: int) -> web.Response:
    """What aiohttp could not parse, or our handler let through: the API's shape instead of aiohttp's page."""
    if status >= 500:
        info = ErrorInfo(status, "internal error", "server_error", None)
    else:
        info = ErrorInfo(status, "The request is not valid HTTP.", "invalid_request_error", "bad_http")
    body = render_body(Api.OTHER, info)
    response = web.Response(status=status, body=body, content_type="application/json")
    response.force_close()
    return response


class TooMany(asyncio.Protocol):
    """A connection too many: told so, and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        message = "Too many connections are open."
        text = refusal(503, message, "too_many_connections", b"retry-after: 1\r\n")
        cast(asyncio.Transport, transport).write(text)
        transport.close()
