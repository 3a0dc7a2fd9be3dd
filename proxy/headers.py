"""Which headers pass, in both directions, and which are ours.

Rules
1. Hop-by-hop headers and those that Connection names never pass.
2. A client's credentials reach a backend only when neither side has keys configured: then Tierline is transparent.
3. Who the client is stays here: X-Forwarded-For and its kin do not pass, whoever sent them.
4. Headers about the bytes (length, encoding) are ours, because the framing is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from math import inf

from proxy.pool import BackendSpec
from proxy.record import Record
from proxy.upstream import Headers, end_to_end

_REQUEST_DROP = frozenset(
    (b"host", b"content-length", b"content-encoding", b"accept-encoding", b"expect", b"x-request-id")
    + (
        b"x-quality-tier",
        b"x-tool-format",
        b"x-tierline-explain",
        b"x-tierline-admin-key",
        b"forwarded",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-port",
        b"x-forwarded-proto",
        b"x-real-ip",
        b"via",
    )
    + (b"x-tierline-deadline", b"x-tierline-priority")
)
_CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"api-key", b"cookie"))
_REQUEST_DROP_ALL = _REQUEST_DROP | _CREDENTIALS
# Another Tierline behind this one says these of itself.
_TIERLINE = (
    b"x-tierline-backend",
    b"x-tierline-tier",
    b"x-tierline-reason",
    b"x-tierline-attempts",
    b"x-tierline-explain",
)
_RESPONSE_DROP = frozenset(
    _TIERLINE
    + (b"content-length", b"x-request-id", b"alt-svc", b"strict-transport-security")
    + (b"access-control-allow-origin", b"access-control-allow-credentials", b"access-control-allow-headers")
    + (b"access-control-allow-methods", b"access-control-expose-headers", b"access-control-max-age")
)
# What is left of a limit of ours, not of what some backend has for the gateway.
_LIMITS = frozenset(
    b"x-ratelimit-" + what + unit
    for what in (b"limit-", b"remaining-", b"reset-")
    for unit in (b"requests", b"tokens")
)
_RESPONSE_DROP_LIMITS = _RESPONSE_DROP | _LIMITS
_ERROR_DROP = _RESPONSE_DROP | {b"content-type", b"content-encoding", b"etag", b"set-cookie"}
_ABSOLUTE = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


_ids: list[str] = []


def _new_id() -> str:
    """32 random hexadecimal digits; the kernel is asked once for a hundred."""
    if not _ids:
        digits = os.urandom(1600).hex()
        _ids.extend(digits[at : at + 32] for at in range(0, len(digits), 32))
    return _ids.pop()


def request_id(asked: str | None) -> str:
    """The client's own id if it is fit for headers and logs, else a new one."""
    if asked is not None and _REQUEST_ID.fullmatch(asked):
        return asked
    return _new_id()


def origin_form(target: str) -> str:
    """Path and query of a request target. Clients that take us for their HTTP proxy send a whole URL."""
    if target.startswith("/") or (url := _ABSOLUTE.match(target)) is None:
        return target
    rest = target[url.end() :]
    return rest if rest.startswith("/") else f"/{rest}"


def request_head(
    request_line: tuple[str, str],
    headers: Sequence[tuple[bytes, bytes]],
    ident: str,
    backend: BackendSpec,
    length: int,
    *,
    credentials: bool,
) -> bytes:
    """The head a backend gets. request_line: method, path and query as the client wrote them. credentials: the
    client's may pass."""
    drop = _REQUEST_DROP if credentials else _REQUEST_DROP_ALL
    method, target = request_line
    parts = [
        method.encode(),
        b" ",
        backend.path_prefix,
        target.encode("utf-8", "surrogateescape"),
        b" HTTP/1.1\r\nhost: ",
        backend.host_header,
    ]
    for name, value in end_to_end(headers, drop):
        parts += (b"\r\n", name, b": ", value)
    if backend.key is not None:
        parts += (b"\r\nauthorization: Bearer ", backend.key.encode())
    tail = b"\r\naccept-encoding: identity\r\nx-request-id: %b\r\ncontent-length: %d\r\n\r\n"
    parts.append(tail % (ident.encode(), length))
    return b"".join(parts)


def own_headers(record: Record, first: Headers) -> Headers:
    """What an answer says of the choices that were made for it, behind `first`."""
    out = first.copy()
    if record.backend is not None:
        out.append((b"x-tierline-backend", record.backend.encode()))
    if record.tier is not None:
        out.append((b"x-tierline-tier", record.tier.encode()))
    if record.reason is not None:
        out.append((b"x-tierline-reason", record.reason.encode()))
    if record.attempts:
        out.append((b"x-tierline-attempts", b"%d" % record.attempts))
    return out


def response_headers(upstream: Headers, ours: Headers, *, limited: bool = False) -> Headers:
    """What the client gets of a backend's answer, ours behind it. limited: ours say what is left of a limit."""
    return end_to_end(upstream, _RESPONSE_DROP_LIMITS if limited else _RESPONSE_DROP) + ours


def error_headers(upstream: Sequence[tuple[bytes, bytes]], ours: Headers) -> Headers:
    """The same for an error whose body is written anew: what describes the old body goes, Retry-After stays."""
    return end_to_end(upstream, _ERROR_DROP) + ours


def retry_after(headers: Sequence[tuple[bytes, bytes]]) -> float | None:
    """Seconds until a backend wants to be asked again: `retry-after-ms`, else `retry-after` in seconds or as a date (by
    the backend's own clock, which its `date` tells). None: it does not say, or not readably."""
    said = {name.lower(): value.strip().decode("latin-1") for name, value in headers}
    try:
        if (milliseconds := said.get(b"retry-after-ms")) is not None:
            seconds = float(milliseconds) / 1000
        elif (text := said.get(b"retry-after", "")).endswith("GMT"):
            there = parsedate_to_datetime(said.get(b"date", ""))
            seconds = max(0.0, (parsedate_to_datetime(text) - there).total_seconds())
        else:
            seconds = float(text)
    except (ValueError, TypeError, OverflowError):
        return None
    return seconds if 0 <= seconds < inf else None


class Cors:
    """Browsers' preflights and answers, for configured origins only. Off when there are none."""

    __slots__ = ("_any", "_origins")

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)
        self._any = "*" in self._origins

    def allows(self, origin: str | None) -> bool:
        return origin is not None and (self._any or origin in self._origins)

    def headers(self, origin: str | None) -> Headers:
        if origin is None or not self.allows(origin):
            return []
        return [
            (b"access-control-allow-origin", b"*" if self._any else origin.encode()),
            (b"access-control-expose-headers", b"*"),
            (b"vary", b"origin"),
        ]

    def preflight(self, origin: str, asked: str | None) -> Headers:
        return [
            *self.headers(origin),
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (
                b"access-control-allow-headers",
                (asked or "authorization, content-type").encode("utf-8", "surrogateescape"),
            ),
            (b"access-control-max-age", b"600"),
        ]
