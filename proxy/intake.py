"""What a request must be before anything is decided about it: from somebody known, for a path that there is, with a body
that can be read: as much as is allowed, in time, unpacked.

Rules: whatever is wrong with it is a `ProxyError` that says what to change.
"""

from __future__ import annotations

from aiohttp import web

from proxy.access import Caller
from proxy.clock import Clock
from proxy.endpoints import Endpoint, find, meant
from proxy.errors import Outcome, ProxyError
from proxy.front import Answer, ClientConnection
from proxy.headers import Cors
from proxy.origins import refused_by_data
from proxy.record import Record
from proxy.turnaway import send_continue
from proxy.wire.forwarded import Client, Networks, client_of

# What aiohttp unpacks while it reads; anything else would go on as it is, under a header that is gone.
_ENCODINGS = frozenset({"", "identity", "gzip", "deflate", "br", "zstd"})


class ClientsOf:
    """Who a request comes from. trusted: proxies that are believed."""

    def __init__(self, trusted: Networks) -> None:
        self._trusted = trusted

    def __call__(self, request: web.BaseRequest) -> Client:
        protocol = request.protocol
        named = protocol.client if isinstance(protocol, ClientConnection) else None
        return client_of(named or request.remote or "", request.secure, request.raw_headers, self._trusted)


ADMIN = Caller("admin", "admin")
"""Who came with the admin key alone."""


def known_caller(caller: Caller | None, *, admin: bool) -> Caller:
    """Whose key it is. admin: the admin key came with it, which is enough."""
    if caller is None and admin:
        return ADMIN
    if caller is None:
        message = "Incorrect or missing API key: send it as `Authorization: Bearer KEY`."
        headers = (("www-authenticate", "Bearer"),)
        raise ProxyError(Outcome.UNAUTHORIZED, 401, message, code="invalid_api_key", headers=headers)
    return caller


def known_page(origin: str, cors: Cors) -> None:
    """Where no key is asked for, a page that somebody looks at must not spend what is theirs."""
    if refused_by_data(origin) and not cors.allows(origin):
        message = (
            "Pages from this origin may not use this gateway without a key: add it to server.cors_origins."
        )
        raise ProxyError(
            Outcome.BAD_REQUEST, 403, message, code="origin_not_allowed", type="permission_error"
        )


def find_endpoint(method: str, path: str) -> Endpoint:
    found = find(path)
    if found is None:
        hint = meant(path)
        message = f"Unknown path: {method} {path[:200]}" + (f". Did you mean {hint}?" if hint else "")
        raise ProxyError(Outcome.BAD_REQUEST, 404, message, code="unknown_url")
    endpoint, methods = found
    if method not in methods:
        message = f"{path} takes {' or '.join(methods)}, not {method}."
        headers = (("allow", ", ".join(methods)),)
        raise ProxyError(Outcome.BAD_REQUEST, 405, message, code="method_not_allowed", headers=headers)
    return endpoint


async def read_body(
    request: web.BaseRequest, record: Record, answer: Answer, clock: Clock, seconds: float
) -> bytes:
    """The whole body; `seconds` from accept until it must be there."""
    encoding = ", ".join(request.headers.getall("content-encoding", ())).strip().lower()
    if encoding not in _ENCODINGS:
        message = f"The content-encoding '{encoding[:100]}' is not known; send gzip, deflate or none."
        headers = (("accept-encoding", "gzip, deflate"),)
        raise ProxyError(Outcome.BAD_REQUEST, 415, message, code="unsupported_encoding", headers=headers)
    if (request.content_length or 0) > request.client_max_size:
        raise _too_large(request)
    if request.headers.get("expect", "").lower() == "100-continue":
        send_continue(request)
    try:
        if request.content.is_eof():  # most bodies came with their head
            body = request.content.read_nowait()
            if len(body) > request.client_max_size:
                raise _too_large(request)
        else:
            async with clock.timeout_at(record.accepted_at + seconds):
                body = await request.read()
    except TimeoutError:
        message = f"The request body did not arrive within {seconds:g} s."
        raise ProxyError(Outcome.CLIENT_TIMEOUT, 408, message, code="request_timeout") from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(request) from None
    except (web.PayloadAccessError, web.RequestPayloadError):
        # Nothing of it will be read again: aiohttp would try, and log a fault of its own.
        answer.close_behind()
        request.content.feed_eof()
        raise ProxyError(Outcome.BAD_REQUEST, 400, "The request body cannot be read.") from None
    record.body_read_at = clock.now()
    record.bytes_in = len(body)
    return body


def _too_large(request: web.BaseRequest) -> ProxyError:
    message = f"The request body is larger than {request.client_max_size} bytes."
    return ProxyError(Outcome.BAD_REQUEST, 413, message, code="request_too_large")
