"""What a whole (not streamed) answer says, and what any usage object says, in one vocabulary."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import orjson


# Named tuples: one of each is made for every answer, and a frozen dataclass takes several times as long.
class Usage(NamedTuple):
    """Tokens as reported by the backend; None where it did not say. `cached` is part of `prompt`."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None


class Answer(NamedTuple):
    """finish_reason: of the first choice (chat, completions), status (responses), stop_reason (messages).
    failed: an error dressed as an answer, status 200 or not. malformed: not a JSON object."""

    usage: Usage = Usage()
    finish_reason: str | None = None
    id: str | None = None
    aborted: bool = False
    failed: bool = False
    malformed: bool = False


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def read_usage(usage: Any) -> Usage:
    """OpenAI's, Responses' and Anthropic's usage objects. Anthropic counts cache reads beside input tokens, the
    others inside."""
    if not isinstance(usage, dict):
        return Usage()
    if "prompt_tokens" in usage or "total_tokens" in usage:
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        return Usage(_count(prompt), _count(completion), _count(cached))
    prompt, completion = _count(usage.get("input_tokens")), _count(usage.get("output_tokens"))
    details = usage.get("input_tokens_details")
    if isinstance(details, dict):
        return Usage(prompt, completion, _count(details.get("cached_tokens")))
    cached = _count(usage.get("cache_read_input_tokens"))
    if cached and prompt is not None:
        prompt += cached
    return Usage(prompt, completion, cached)


def read_answer(body: bytes) -> Answer:
    """Never raises, whatever the bytes."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            data = json.loads(body)
        except (ValueError, RecursionError):
            return Answer(malformed=True)
    if not isinstance(data, dict):
        return Answer(malformed=True)
    finish: Any = data.get("stop_reason")
    aborted = finish == "abort"
    choices = data.get("choices")
    if isinstance(choices, list):
        reasons = [choice.get("finish_reason") for choice in choices if isinstance(choice, dict)]
        finish = reasons[0] if reasons else None
        aborted = "abort" in reasons
    elif data.get("object") == "response":
        finish = data.get("status")
    elif data.get("type") == "message":
        aborted = aborted or finish is None  # vLLM has no other word there for what it gives up
    ident = data.get("id")
    return Answer(
        read_usage(data.get("usage")),
        finish if isinstance(finish, str) else None,
        ident if isinstance(ident, str) else None,
        aborted,
        bool(data.get("error")) and data.get("object") != "response",
    )
