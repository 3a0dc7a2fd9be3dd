"""Is an answer through the gateway the answer that the server gives directly?

Everything is compared but what no two answers share: ids, times, speeds. Each question is asked three times, first
to warm the server's prompt cache, so that cached tokens can be compared, too. Errors are answers: their class,
status and message count, their other fields are the gateway's to put right.

vLLM puts as many tokens into one event as it has, and what its parser makes of a call depends on that: there, the
answer through the gateway must be one of those that the server gave directly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import cached_property
from typing import Any, Self

import anthropic
import openai
from pydantic import BaseModel

from tests.real.gateway import GatewayProcess
from tests.real.server import RealServer

# Different in every answer; and vLLM's fingerprint of itself, which goes with the last event of a stream: that is the
# usage, and out again with it, where only the gateway asked for usage.
_OWN = frozenset(
    {
        "id",
        "created",
        "created_at",
        "completed_at",
        "timings",
        "call_id",
        "item_id",
        "signature",
        "system_fingerprint",
    }
)
# Strings that come in pieces.
_PIECES = frozenset({"content", "reasoning", "reasoning_content", "arguments", "text", "refusal"})

SDK_ERRORS = (openai.APIError, anthropic.APIError)


class Clients:
    """The SDKs, unmodified, for one URL. The synchronous ones are kept: making one takes longer than asking it."""

    def __init__(self, url: str, key: str = "none") -> None:
        self.url = url
        self._options: dict[str, Any] = {"api_key": key, "max_retries": 0, "timeout": 60.0}

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **self._options)

    @cached_property
    def claude(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, **self._options)

    def async_openai(self) -> openai.AsyncOpenAI:
        """A new one: it belongs to a test's loop."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **self._options)

    def async_claude(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, **self._options)

    def close(self) -> None:
        for name in ("openai", "claude"):
            if name in vars(self):
                getattr(self, name).close()


class Pair:
    """One server, and the gateway in front of it, with clients for both. tries: to get the same answer."""

    def __init__(self, server: RealServer, gateway: GatewayProcess, tries: int = 1) -> None:
        self._tries = tries
        self.server = server
        self.gateway = gateway
        self.direct, self.through = Clients(server.url), Clients(gateway.url)

    def same(self, ask: Callable[[Clients], Any]) -> Any:
        """What `ask` gets, directly and through the gateway; asserted to be the same."""
        seen = [_outcome(ask, self.direct)]
        for _ in range(self._tries):
            direct = _outcome(ask, self.direct)
            through = _outcome(ask, self.through)
            if through == direct or through in seen[1:]:
                return through
            seen.append(direct)
        assert through == direct
        return through

    async def same_async(self, ask: Callable[[Clients], Awaitable[Any]]) -> Any:
        seen = [await _outcome_async(ask, self.direct)]
        for _ in range(self._tries):
            direct = await _outcome_async(ask, self.direct)
            through = await _outcome_async(ask, self.through)
            if through == direct or through in seen[1:]:
                return through
            seen.append(direct)
        assert through == direct
        return through

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.direct.close()
        self.through.close()


def _outcome(ask: Callable[[Clients], Any], clients: Clients) -> Any:
    try:
        return plain(ask(clients))
    except SDK_ERRORS as error:
        return _told(error)


async def _outcome_async(ask: Callable[[Clients], Awaitable[Any]], clients: Clients) -> Any:
    try:
        return plain(await ask(clients))
    except SDK_ERRORS as error:
        return _told(error)


def _told(error: openai.APIError | anthropic.APIError) -> dict[str, Any]:
    body = error.body if isinstance(error.body, dict) else {}
    inner = body.get("error", body)
    message = inner.get("message") if isinstance(inner, dict) else inner
    return {"error": type(error).__name__, "status": getattr(error, "status_code", None), "message": message}


def plain(value: Any) -> Any:
    """As JSON, without what every answer has of its own."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", warnings=False)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in _OWN}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def joined(chunks: Iterable[Any]) -> dict[str, Any]:
    """The chunks of a chat or completions stream as one: servers may put two tokens into one chunk, or not."""
    whole: dict[str, Any] = {}
    for chunk in chunks:
        whole = _join(whole, plain(chunk))
    return whole


def _join(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    out = dict(old)
    for key, value in new.items():
        before = out.get(key)
        if value is None or before is None:
            out[key] = before if value is None else value
        elif key in _PIECES and isinstance(value, str):
            out[key] = before + value
        elif isinstance(value, dict):
            out[key] = _join(before, value)
        elif isinstance(value, list):
            out[key] = _join_lists(before, value)
        else:
            out[key] = value
    return out


def _join_lists(old: list[Any], new: list[Any]) -> list[Any]:
    """Choices and tool calls by their index; anything else, such as logprobs, one behind the other."""
    if not all(isinstance(item, dict) and "index" in item for item in [*old, *new]):
        return [*old, *new]
    by_index: dict[int, dict[str, Any]] = {}
    for item in [*old, *new]:
        known = by_index.get(item["index"])
        by_index[item["index"]] = item if known is None else _join(known, item)
    return [by_index[index] for index in sorted(by_index)]
