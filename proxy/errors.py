"""Everything that can go wrong with a request, as one exception, and how a request can end, as one enum.

Only `handler` turns a `ProxyError` into a response, and only `wire.errors` renders it into bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How a request ended: in the record, the metric and the log. Closed; one per request."""

    OK = "ok"
    BAD_REQUEST = "bad_request"  # the client's fault, found here (4xx made by us)
    UNAUTHORIZED = "unauthorized"  # no key, wrong key
    LIMITED = "limited"  # a limit of its key, tenant or model: 429
    SHED = "shed"  # every fitting backend is full: 429 with Retry-After
    NO_BACKEND = "no_backend"  # none fits: 503 with each backend's reason
    CANCELLED = "cancelled"  # the client went away
    CLIENT_TIMEOUT = "client_timeout"  # the client stopped reading or sending
    UPSTREAM_REJECTED = "upstream_rejected"  # the backend answered 4xx; passed on
    UPSTREAM_ERROR = "upstream_error"  # the backend answered 5xx, an error event, or "abort"
    UPSTREAM_CONNECT = "upstream_connect"  # could not be reached
    UPSTREAM_TIMEOUT = "upstream_timeout"  # connect, first token, gap or total time exceeded
    UPSTREAM_CUT = "upstream_cut"  # the answer ended before it was whole
    UPSTREAM_MALFORMED = "upstream_malformed"  # bytes that are not HTTP, SSE or the endpoint's shape
    SHUTDOWN = "shutdown"  # the gateway stopped before the answer was whole
    INTERNAL = "internal"  # our own fault


class Ending(StrEnum):
    """How it went with a broken stream whose tier lets it go on. Closed."""

    WHOLE = "whole"  # the client has the whole answer
    UNSAFE = "unsafe"  # the request, or where it broke, does not allow it
    NOBODY = "nobody"  # no backend is left that could
    BROKEN = "broken"  # those that went on with it broke, too
    LEFT = "left"  # the client went away before that was known


class ChargedBy(StrEnum):
    """How it is known what a request used. Closed."""

    USAGE = "usage"  # the backend said
    ESTIMATE = "estimate"  # nobody said: from the prompt's size and what was seen of the answer, else what was reserved
    NOTHING = "nothing"  # it was given back


class Hedged(StrEnum):
    """What came of a second attempt beside the first one. Closed."""

    WON = "won"  # the second one answered
    LOST = "lost"  # the first one did, after all
    FAILED = "failed"  # neither
    LEFT = "left"  # the client went away, or the gateway stopped, before either
    DENIED = "denied"  # it was due, and its tier's share was spent
    NOWHERE = "nowhere"  # it was due, and no other backend would have started it at once


class ProxyError(Exception):
    """A request that ends in an error of ours.

    status: HTTP status while none has been sent. message: for the client: says what to change, names no secret.
    type, code, param: OpenAI's fields (code a string or None). headers: extra response headers (Retry-After).
    upstream_headers: the backend's, when the error is its answer. retry_after: seconds until the client should come
    back, as one of these headers says; None: none does.
    """

    def __init__(
        self,
        outcome: Outcome,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        upstream_headers: tuple[tuple[bytes, bytes], ...] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = headers
        self.upstream_headers = upstream_headers
        self.retry_after = retry_after

    @classmethod
    def made_of(cls, told: Mapping[str, Any]) -> ProxyError:
        """The same, of its `vars`: raised in another process."""
        return cls(**told)
