"""What kind of answer comes, told by its head, and who reads it.

Rules: an event stream of an endpoint that is known is read; an answer that may be an error, or JSON, is held until it is
whole; anything else passes unseen.
"""

from __future__ import annotations

from enum import Enum, auto

from proxy.attempt import Plan
from proxy.upstream import Headers
from proxy.wire.errors import Api
from proxy.wire.streams import ChatStream, CompletionsStream, StreamReader
from proxy.wire.typedstreams import MessagesStream, ResponsesStream

JSON = b"application/json"


class Kind(Enum):
    """Of an answer; WAITING: its head has not come."""

    WAITING = auto()
    STREAM = auto()
    BUFFER = auto()
    PIPE = auto()


def kind_of(plan: Plan, status: int, headers: Headers) -> tuple[Kind, StreamReader | None, int | None]:
    """The kind, who reads it if it is an event stream, and the length that it says it has."""
    content_type, encoded, length = b"", False, None
    for name, value in headers:
        lower = name.lower()
        if lower == b"content-type":
            content_type = value.lower()
        elif lower == b"content-length":
            length = int(value) if value.isdigit() else None
        elif lower == b"content-encoding":
            encoded = value.strip().lower() not in (b"", b"identity")
    known = plan.api is not Api.OTHER  # these answer in JSON or events, whatever they call it
    if status == 200 and content_type.startswith(b"text/event-stream") and not encoded:
        return (Kind.STREAM if known else Kind.PIPE), _reader(plan), length
    if status != 200 or length == 0 or ((known or content_type.startswith(JSON)) and not encoded):
        return Kind.BUFFER, None, length
    return Kind.PIPE, None, length


def _reader(plan: Plan) -> StreamReader | None:
    if plan.reader is not None:
        return plan.reader()
    if plan.api is Api.CHAT:
        return ChatStream(plan.model_swap, hide_usage=plan.hide_usage)
    if plan.api is Api.COMPLETIONS:
        return CompletionsStream(plan.model_swap, hide_usage=plan.hide_usage)
    if plan.api is Api.MESSAGES:
        return MessagesStream(plan.model_swap)
    if plan.api is Api.RESPONSES:
        return ResponsesStream(plan.model_swap)
    return None
