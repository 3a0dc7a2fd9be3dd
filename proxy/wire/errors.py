"""Errors as clients and servers write them: every known dialect is read, two dialects are written.

Rules: reading never raises, whatever the bytes; what is read keeps its status and its meaning. Writing never
raises either, whatever text is in the error. OpenAI's `code` is a string or null, so a number there is a
status, not a code. Text from a backend is bounded; its HTML, tracebacks and file paths do not reach a client.
In-band errors end a stream: no `[DONE]` follows them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from http import HTTPStatus

import orjson

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
MAX_BODY_BYTES = 1 << 20  # a longer "error" is read as its status only
MAX_MESSAGE_CHARS = 4000
MAX_PLAIN_CHARS = 500
MAX_WORD_CHARS = 200  # type, code, param
MAX_DETAILS = 5  # validation problems named in one message


class Api(StrEnum):
    """What an endpoint speaks; decides the shape of errors and how a stream is read. Closed."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """One error in OpenAI's fields. `status` is the HTTP status it has or, in a stream, would have had."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None


# --- writing ---------------------------------------------------------------------------------------------

# Anthropic's error types by status; others fall back to the class of the status.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def anthropic_type(status: int) -> str:
    return _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def openai_type(status: int) -> str:
    """The type for an error whose author named none."""
    return _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def render_body(api: Api, info: ErrorInfo, request_id: str | None = None) -> bytes:
    """The JSON body of an error response, in the endpoint's own shape."""
    if api is Api.MESSAGES:
        return _dumps({"type": "error", "error": _anthropic_error(info), "request_id": request_id})
    return _dumps({"error": _openai_error(info)})


def render_event(api: Api, info: ErrorInfo, sequence_number: int = 0) -> bytes:
    """The last event of a stream that failed after it began. `sequence_number`: of the Responses stream."""
    if api is Api.MESSAGES:
        return b"event: error\ndata: %b\n\n" % _dumps({"type": "error", "error": _anthropic_error(info)})
    if api is Api.RESPONSES:
        event = {
            "type": "error",
            "code": info.code or info.type,
            "message": info.message,
            "param": info.param,
            "sequence_number": sequence_number,
        }
        return b"event: error\ndata: %b\n\n" % _dumps(event)
    return b"data: %b\n\n" % _dumps({"error": _openai_error(info)})


def _openai_error(info: ErrorInfo) -> dict[str, str | None]:
    return {"message": info.message, "type": info.type, "param": info.param, "code": info.code}


def _anthropic_error(info: ErrorInfo) -> dict[str, str]:
    message = info.message
    # This envelope has no code. Agents find an overflow, and compact their context, by these words.
    if is_context_overflow(info) and "prompt is too long" not in message.lower():
        message = f"prompt is too long: {message}"
    return {"type": anthropic_type(info.status), "message": message}


def _dumps(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # a lone surrogate, from a client's JSON escapes
        return orjson.dumps(_clean(value))


def _clean(value: object) -> object:
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


# --- context overflow ------------------------------------------------------------------------------------

# Anchored at the start: messages quote requests, and a prompt that quotes an overflow is not one.
_OVERFLOW = re.compile(
    r"(?:\w+Error: )?(?:"
    # vLLM, and llama-cpp-python which copies OpenAI's words
    r"this model's maximum context length is \d+ tokens"
    r"|'max_tokens' or 'max_completion_tokens' is too large: \d+\. this model's maximum context length is"
    r"|you passed \d+ input (?:tokens|characters) and requested \d+ output tokens\. however, the model's"
    r" context"
    r"|(?:the )?(?:decoder |encoder )?prompt \(length \d+\).{0,80} is longer than the maximum model length"
    r"|the engine prompt length \d+ exceeds the max_model_len"
    # llama.cpp, new and old
    r"|(?:the )?request(?: \(\d+ tokens\))? exceeds the available context size"
    # llama-cpp-python, below its own translation
    r"|requested tokens \(\d+\) exceed context window of \d+"
    # SGLang
    r"|the input \(\d+ tokens\) is longer than the model's context length"
    r"|requested token count exceeds the model's maximum context length"
    # ours and Anthropic's
    r"|prompt is too long: )",
    re.IGNORECASE,
)
_OVERFLOW_TYPES = frozenset({"exceed_context_size_error", CONTEXT_LENGTH_EXCEEDED})
# The statuses that servers give an overflow; 200 is an error event's stream. Others mean what they say.
_OVERFLOW_STATUSES = frozenset({200, 400, 413, 422, 500})


def is_context_overflow(info: ErrorInfo) -> bool:
    """The prompt, alone or with the output asked for, does not fit the window: a larger one may hold it.

    Not among them: max_tokens alone above the window (a shorter prompt would not help), and llama.cpp's
    "context size has been exceeded", which says that its slots together ran out of cache.
    """
    return info.code == CONTEXT_LENGTH_EXCEEDED


def _classify(info: ErrorInfo) -> ErrorInfo:
    """Give an overflow the one name it has for every client; anything else stays as it is."""
    if info.status not in _OVERFLOW_STATUSES:
        return info
    named = info.type in _OVERFLOW_TYPES or info.code in _OVERFLOW_TYPES
    if named or _OVERFLOW.match(info.message):
        return replace(info, status=400, type="invalid_request_error", code=CONTEXT_LENGTH_EXCEEDED)
    return info


_STATUS = re.compile("[45][0-9][0-9]")


# --- reading ---------------------------------------------------------------------------------------------


def read_error(status: int, content_type: str | None, body: bytes) -> ErrorInfo:
    """What a backend's error response says. `status` below 400 (an error dressed as an answer) becomes the
    one its body names, or 502."""
    value: object = None
    if len(body) <= MAX_BODY_BYTES:
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            pass
    info = _read_value(value, status if status >= 400 else 502, trust_code=status < 400)
    if info is not None:
        return _classify(info)
    final = status if status >= 400 else 502
    message = _plain_message(content_type, body) or _status_message(final)
    return _classify(ErrorInfo(final, message, openai_type(final)))


def read_event_error(value: object) -> ErrorInfo | None:
    """The error in one parsed event of a stream, or None if it is an ordinary one.

    Knows `{"error": {…}}`, `{"error": "text"}`, vLLM's old `object: "error"`, Anthropic's and Responses'
    `type: "error"`, and `response.failed`. A null `error` is no error.
    """
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind == "response.failed" and isinstance(response := value.get("response"), dict):
        error = response.get("error")
        value = {"error": error if error else "the response failed"}
    elif not value.get("error") and kind != "error" and value.get("object") != "error":
        return None
    info = _read_value(value, 500, trust_code=True)
    return _classify(
        info or ErrorInfo(500, "the backend reported an error without a message", "server_error")
    )


def _read_value(value: object, status: int, *, trust_code: bool) -> ErrorInfo | None:
    """The error in a parsed body. `trust_code`: a number in `code` or `status_code` is the status."""
    if isinstance(value, str) and value.strip():
        return _made(status, value, None, None, None)
    if isinstance(value, list) and value:  # some servers wrap the error in a list
        value = value[0]
    if not isinstance(value, dict):
        return None
    error = value.get("error")
    if isinstance(error, dict):
        return _read_fields(error, status, trust_code)
    if isinstance(error, str) and error.strip():
        # Beside a string some servers put the text in `message` and a bare reason in `error`.
        message = value.get("message")
        text = message if isinstance(message, str) and message.strip() else error
        return _made(status, text, None, None, None)
    detail = value.get("detail")
    if isinstance(detail, dict):
        return _read_fields(detail, status, trust_code)
    if isinstance(detail, str) and detail.strip():
        return _made(status, detail, None, None, None)
    if isinstance(detail, list) and detail:
        return _read_validation(detail, status)
    if isinstance(value.get("message"), str):
        return _read_fields(value, status, trust_code)
    return None


def _read_fields(error: dict[str, object], status: int, trust_code: bool) -> ErrorInfo | None:
    message, kind, code, param = (error.get(key) for key in ("message", "type", "code", "param"))
    if isinstance(code, int) and not isinstance(code, bool):
        code = str(code)
    if isinstance(code, str) and _STATUS.fullmatch(code):
        status, code = (int(code) if trust_code else status), None
    if not isinstance(message, str) or not message.strip():
        message = kind if isinstance(kind, str) and kind else _status_message(status)
    if kind in ("NotFoundError", "not_found_error") and param == "model" and code is None:
        code = "model_not_found"
    if kind == "error":  # the envelope's own name (Responses), not a type
        kind = None
    return _made(status, message, kind, code, param)


def _read_validation(details: list[object], status: int) -> ErrorInfo:
    """FastAPI's list of problems; the input that it echoes is left out."""
    lines: list[str] = []
    first: str | None = None
    for detail in details[:MAX_DETAILS]:
        if not isinstance(detail, dict):
            lines.append(str(detail)[:MAX_WORD_CHARS])
            continue
        loc = detail.get("loc")
        parts = loc if isinstance(loc, list) else []
        where = ".".join(str(part)[:MAX_WORD_CHARS] for part in parts[:20] if part != "body")
        first = first or where or None
        message = str(detail.get("msg", "invalid"))[:MAX_PLAIN_CHARS]
        lines.append(f"{where}: {message}" if where else message)
    if len(details) > MAX_DETAILS:
        lines.append(f"and {len(details) - MAX_DETAILS} more")
    return _made(status, "; ".join(lines), None, None, first)


def _made(status: int, message: str, kind: object, code: object, param: object) -> ErrorInfo:
    return ErrorInfo(
        status,
        _bounded(_without_trace(message.strip()), MAX_MESSAGE_CHARS),
        _word(kind) or openai_type(status),
        _word(code),
        _word(param),
    )


def _word(value: object) -> str | None:
    return _bounded(value, MAX_WORD_CHARS) if isinstance(value, str) and value else None


def _bounded(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _without_trace(message: str) -> str:
    """FastAPI appends the source line that refused; its file paths are not the client's business."""
    for mark in ('\n\n  File "', "\nTraceback (most recent call last)"):
        message = message.split(mark, 1)[0]
    return (
        message
        if not message.startswith("Traceback (most recent call last)")
        else message.rsplit("\n", 1)[-1]
    )


def _plain_message(content_type: str | None, body: bytes) -> str | None:
    """The text of a body that is not JSON; None when there is nothing to show a person."""
    head = body[: 4 * MAX_PLAIN_CHARS + 4].decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    if not head or head[0] in "<{[" or "html" in (content_type or "").lower():
        return None
    if any(ord(char) < 32 and char not in "\t\r\n" for char in head) or head.count("\ufffd") > 8:
        return None  # binary
    return _bounded(_without_trace(head.strip()), MAX_PLAIN_CHARS)


def _status_message(status: int) -> str:
    try:
        phrase = f" {HTTPStatus(status).phrase}"
    except ValueError:
        phrase = ""
    return f"the backend answered {status}{phrase} without a readable message"
