"""A simulator on a real socket, for tests: fast (`time_scale`), small, and asked over plain HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from proxy.clock import LoopClock
from proxy.sim.server import Options, Simulator

FAST = Options(profile="fp8-mtp3-tp2-v17", model="tiny", admin_port=0, time_scale=40.0)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}


@dataclass
class Got:
    """An answer as it came. `broken`: it ended without its end."""

    status: int
    headers: dict[str, str]
    raw: bytes
    broken: bool = False
    events: list[Any] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def done(self) -> bool:
        return self.raw.endswith(b"data: [DONE]\n\n")

    @property
    def text(self) -> str:
        return self.joined("content")

    def joined(self, key: str) -> str:
        deltas = [c["delta"] for e in self.events for c in e.get("choices", ())]
        return "".join(d[key] for d in deltas if d.get(key))

    @property
    def finish(self) -> list[str]:
        reasons = [c["finish_reason"] for e in self.events for c in e.get("choices", ())]
        return [reason for reason in reasons if reason]


class Running:
    """What a test talks to."""

    def __init__(self, simulator: Simulator, session: aiohttp.ClientSession) -> None:
        self.simulator = simulator
        self.session = session
        self.url = simulator.url

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Got:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        async with self.session.request(method, self.url + path, data=data, headers=kind) as response:
            raw, broken = b"", False
            try:
                async for chunk in response.content.iter_any():
                    raw += chunk
            except aiohttp.ClientPayloadError:
                broken = True
            got = Got(response.status, {k.lower(): v for k, v in response.headers.items()}, raw, broken)
        if "event-stream" in got.headers.get("content-type", ""):
            got.events = [json.loads(line[6:]) for line in raw.split(b"\n\n") if _is_json(line)]
        return got

    async def chat(self, text: str, **more: Any) -> Got:
        return await self.ask("POST", "/v1/chat/completions", chat_body(text, **more))

    async def fault(self, fault: str, **more: Any) -> Any:
        command = {"fault": fault, **more}
        async with self.session.post(self.simulator.admin_url + "/faults", json=command) as response:
            return response.status, await response.json()

    async def clear(self, fault: str | None = None) -> None:
        query = f"?fault={fault}" if fault else ""
        async with self.session.delete(self.simulator.admin_url + "/faults" + query) as response:
            assert response.status == 200

    async def until(self, what: str, value: float) -> None:
        """Wait for a figure of the engine's."""

        async def there() -> bool:
            return (await self.state())[what] == value

        await eventually(there)

    async def health(self) -> int:
        return (await self.ask("GET", "/health")).status

    async def state(self) -> dict[str, float]:
        async with self.session.get(self.simulator.admin_url + "/state") as response:
            return dict(await response.json())

    async def metrics(self) -> str:
        return (await self.ask("GET", "/metrics")).raw.decode()


def chat_body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


def _is_json(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    try:
        json.loads(line[6:])
    except json.JSONDecodeError:
        return False
    return True


async def eventually(check: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    """Ask until the answer is yes; TimeoutError if it never is."""
    async with asyncio.timeout(seconds):
        while True:
            if await check():
                return
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(options: Options = FAST, **changes: Any) -> AsyncIterator[Running]:
    simulator = Simulator(replace(options, **changes), LoopClock())
    await simulator.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Running(simulator, session)
    finally:
        await simulator.close()
