"""Which paths are served, and what each one speaks.

A path that is not here is an OpenAI-shaped 404. `relayed` paths go to a backend; the others are answered here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from proxy.wire.errors import Api


class Body(Enum):
    JSON = auto()
    FORM = auto()  # multipart
    NONE = auto()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """api: shape of errors and streams. generates: output tokens count against the window."""

    path: str
    api: Api
    body: Body = Body.JSON
    generates: bool = False


_JSON = (
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/pooling",
    "/classify",
    "/tokenize",
    "/detokenize",
    "/v1/audio/speech",
)

RELAYED: dict[str, Endpoint] = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions", Api.CHAT, generates=True),
        Endpoint("/v1/completions", Api.COMPLETIONS, generates=True),
        Endpoint("/v1/responses", Api.RESPONSES, generates=True),
        Endpoint("/v1/messages", Api.MESSAGES, generates=True),
        Endpoint("/v1/messages/count_tokens", Api.MESSAGES),
        *(Endpoint(path, Api.OTHER) for path in _JSON),
        Endpoint("/v1/audio/transcriptions", Api.OTHER, body=Body.FORM),
        Endpoint("/v1/audio/translations", Api.OTHER, body=Body.FORM),
    )
}

UNCOUNTED = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
"""Their prompts are looked at and not run: they take no tokens of a limit."""

RESPONSES_PREFIX = "/v1/responses/"
# An id, not a path: what a backend might resolve to some other endpoint (dots, escapes, slashes) is no id.
_STORED = re.compile(r"/v1/responses/[A-Za-z0-9][A-Za-z0-9._:~-]*(/cancel|/input_items)?")
_STORED_METHODS = {None: ("GET", "DELETE"), "/cancel": ("POST",), "/input_items": ("GET",)}
MODELS = "/v1/models"
PUBLIC = ("/health", "/ready", "/version", "/metrics")
"""Answered by the gateway itself; keyless on the data side by default."""


def find(path: str) -> tuple[Endpoint, tuple[str, ...]] | None:
    """The endpoint that goes to a backend under this path, and the methods it takes."""
    endpoint = RELAYED.get(path)
    if endpoint is not None:
        return endpoint, ("POST",)
    stored = _STORED.fullmatch(path)
    if stored is None:
        return None
    return Endpoint(path, Api.RESPONSES, body=Body.NONE), _STORED_METHODS[stored[1]]


def meant(path: str) -> str | None:
    """The path that a client with a base URL a bit off meant: `/v1` missing or twice, a slash too many."""
    tail = path.rstrip("/")
    known = (*RELAYED, MODELS)
    return next((p for p in known if p != path and tail.endswith(p.removeprefix("/v1"))), None)


def api_of(path: str) -> Api:
    """The shape in which errors of `path` are written, known path or not."""
    endpoint = RELAYED.get(path)
    if endpoint is not None:
        return endpoint.api
    if path.startswith("/v1/messages"):
        return Api.MESSAGES
    return Api.RESPONSES if path.startswith(RESPONSES_PREFIX) else Api.OTHER
