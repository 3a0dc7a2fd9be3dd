"""The gateway in a test: the same `App` as in production, on a free port, with its records at hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

import pytest

from proxy.app import App
from proxy.clock import Clock
from proxy.config import loads
from proxy.errors import Outcome
from proxy.record import Measures, Record
from tests.client import Connection, Response, ask
from tests.scripted import DEADLINE, ScriptedBackend

CHAT = "/v1/chat/completions"


def chat(text: str = "hi", *, stream: bool = False, model: str = "tiny", **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    if stream:
        body["stream"] = True
    return body


@dataclass
class Records:
    """Takes the recorder's place."""

    closed: list[tuple[Record, Measures]] = field(default_factory=list)
    dropped: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, record: Record, derived: Measures) -> None:
        self.closed.append((record, derived))
        self._changed.set()

    async def get(self, index: int = 0) -> tuple[Record, Measures]:
        """The n-th record, once it is closed."""
        async with asyncio.timeout(DEADLINE):
            while len(self.closed) <= index:
                self._changed.clear()
                await self._changed.wait()
        return self.closed[index]


class Gateway:
    def __init__(self, app: App) -> None:
        self.app = app
        self.records = Records()
        app.gateway.recorder = self.records  # type: ignore[assignment]

    @property
    def port(self) -> int:
        return self.app.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def ask(self, path: str, body: object = None, **kwargs: Any) -> Response:
        return await ask(self.port, path, body, **kwargs)

    async def chat(self, text: str = "hi", *, headers: dict[str, str] | None = None, **more: Any) -> Response:
        return await ask(self.port, CHAT, chat(text, **more), headers=headers)

    async def connect(self) -> Connection:
        return await Connection.open(self.port)

    async def record(self, index: int = 0) -> Record:
        return (await self.records.get(index))[0]

    async def ended(self, *outcomes: Outcome | str) -> None:
        """One record a request, with these outcomes in order, and every count back at zero."""
        if outcomes:
            await self.records.get(len(outcomes) - 1)
        assert [record.outcome for record, _ in self.records.closed] == list(outcomes)
        self.assert_idle()

    def assert_idle(self) -> None:
        """Every count is back at zero."""
        assert not self.app.gateway.exchanges
        for backend in self.app.pool.backends.values():
            assert (backend.in_flight, backend.in_flight_tokens) == (0, 0), backend


class MakeGateway(Protocol):
    def __call__(
        self,
        *backends: ScriptedBackend | str,
        config: str = "",
        per_backend: dict[str, str] | None = None,
        clock: Clock | None = None,
        env: dict[str, str] | None = None,
    ) -> Awaitable[Gateway]: ...


def config_text(urls: list[str], more: str, per_backend: dict[str, str]) -> str:
    """A config with backends a, b, c …; `more` may repeat no table but those left out here. Nobody goes back to a backend
    that failed: what it says is what the client gets where there is no other."""
    text = "" if "[server]" in more else "[server]\nport = 0\n"
    text += "" if "[admin]" in more else "[admin]\nenabled = false\n"
    text += "" if "[telemetry]" in more else '[telemetry]\nrecords = "off"\n'
    text += "" if "[policy.retry]" in more else "[policy.retry]\nbackoff_seconds = 0\n"
    for name, url in zip("abcdefgh", urls, strict=False):
        text += f'[[backends]]\nname = "{name}"\nurl = "{url}"\n{per_backend.get(name, "")}\n'
    text += "" if "[models" in more else "[models.tiny]\n"
    return text + more


@pytest.fixture
async def make_gateway(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Gateway]]]:
    """`await make_gateway(backend_a, backend_b, config="…")`; stopped after the test, and then idle."""
    made: list[Gateway] = []

    async def make(
        *backends: ScriptedBackend | str,
        config: str = "",
        per_backend: dict[str, str] | None = None,
        clock: Clock | None = None,
        env: dict[str, str] | None = None,
    ) -> Gateway:
        urls = [backend if isinstance(backend, str) else backend.url for backend in backends]
        text = config_text(urls, config, per_backend or {})
        app = App(loads(text, env or {}, folder=tmp_path), clock, Random(7))
        gateway = Gateway(app)
        await app.start()
        made.append(gateway)
        return gateway

    yield make
    for gateway in made:
        await gateway.app.close()
        gateway.assert_idle()


@pytest.fixture
async def backend() -> AsyncIterator[ScriptedBackend]:
    async with ScriptedBackend() as scripted:
        yield scripted


@pytest.fixture
async def other() -> AsyncIterator[ScriptedBackend]:
    async with ScriptedBackend() as scripted:
        yield scripted
