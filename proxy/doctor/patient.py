"""One backend on the couch: how the checks ask it, and what they found.

Rules: every question has a deadline on the clock. A finding names a check and what to change; its patch holds keys of
the backend's table in the configuration.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from proxy.clock import Clock
from proxy.config import Backend
from proxy.probe import Answer, Asker, Finding, Unreachable, Verdict, events_of, plain_json, unreachable
from proxy.wire.promtext import EngineMetrics, read_metrics

CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Said:
    """An answer of chat, streamed or whole. `at`: when each read with content came, clock seconds."""

    status: int
    body: bytes = b""
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """(name, arguments)."""
    finish: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    at: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Patient:
    """model: its own name for it. idle_seconds: how long the gateway keeps a connection. deep: also what costs a long
    prefill."""

    backend: Backend
    asker: Asker
    clock: Clock
    model: str
    seconds: float
    idle_seconds: float
    deep: bool = False
    findings: list[Finding] = field(default_factory=list)

    def tell(self, what: str, verdict: Verdict, detail: str, fix: str = "", **patch: object) -> None:
        """patch: `__` stands for a dot; a key that begins with `_` is one of the whole configuration."""
        keys = tuple((key.replace("__", "."), value) for key, value in patch.items())
        self.findings.append(Finding(self.backend.name, what, verdict, detail, fix, keys))

    async def check(self, what: str, look: Callable[[Patient], Awaitable[None]]) -> None:
        """One check; what keeps it from being made is a finding of its own."""
        try:
            await look(self)
        except Unreachable as error:
            self.tell(what, Verdict.PROBLEM, error.detail, error.fix)

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        seconds: float | None = None,
    ) -> Answer:
        """seconds: in place of the usual. Raises `Unreachable`."""
        raw = None if body is None else orjson.dumps({"model": self.model, **body})
        return await self.asker.ask(method, path, raw, seconds=seconds)

    async def chat(self, text: str, tokens: int, **more: Any) -> Said:
        """One whole answer. Raises `Unreachable`."""
        return await self.talk([{"role": "user", "content": text}], tokens, **more)

    async def talk(
        self,
        messages: Sequence[Mapping[str, object]],
        tokens: int,
        *,
        seconds: float | None = None,
        **more: Any,
    ) -> Said:
        """The same of a conversation. seconds: in place of the usual."""
        body = {"messages": messages, "max_tokens": tokens, **more}
        answer = await self.ask("POST", CHAT, body, seconds=seconds)
        said = Said(answer.status, answer.body)
        value = plain_json(answer.body)
        if answer.status == 200 and isinstance(value, dict):
            said.usage = value.get("usage") or {}
            for choice in value.get("choices") or ():
                _take(said, choice.get("message") or {}, choice)
        return said

    async def stream(self, text: str, tokens: int, **more: object) -> Said:
        """The same, streamed. Raises `Unreachable`."""
        body = orjson.dumps(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                **more,
            }
        )
        try:
            async with self.asker.open("POST", CHAT, body) as response:
                said, parts = Said(response.status), []
                async for data in response.content.iter_any():
                    parts.append(data)
                    if b'"delta"' in data:
                        said.at.append(self.clock.now())
                said.body = b"".join(parts)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise unreachable(error) from error
        for event in events_of(said.body):
            if isinstance(event, dict):
                said.usage = event.get("usage") or said.usage
                for choice in event.get("choices") or ():
                    _take(said, choice.get("delta") or {}, choice)
        return said

    async def metrics(self) -> EngineMetrics:
        """What the engine says; nothing where it has no such page. Raises `Unreachable`."""
        answer = await self.asker.ask("GET", self.backend.metrics_path)
        return read_metrics(answer.body) if answer.status == 200 else EngineMetrics()

    async def until(self, true: Callable[[EngineMetrics], bool], seconds: float) -> EngineMetrics | None:
        """The metrics as soon as they say so; None if they do not within `seconds`."""
        over = self.clock.now() + seconds
        while True:
            found = await self.metrics()
            if true(found):
                return found
            if self.clock.now() >= over:
                return None
            await self.clock.sleep(0.05)


def _take(said: Said, part: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
    said.content += part.get("content") or ""
    said.reasoning += part.get("reasoning") or part.get("reasoning_content") or ""
    said.finish = choice.get("finish_reason") or said.finish
    for call in part.get("tool_calls") or ():
        function = call.get("function") or {}
        if function.get("name"):
            said.calls.append((function["name"], ""))
        if said.calls and function.get("arguments"):
            name, arguments = said.calls[-1]
            said.calls[-1] = name, arguments + function["arguments"]
