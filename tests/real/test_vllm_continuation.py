"""Two real vLLMs, one of which is killed while it thinks, writes and calls a tool: every answer arrives whole and once.

Each start takes most of a minute. By default every way to break is tried once, on `AT_ONCE` streams of each kind, cut at
different tokens; TIERLINE_KILLS says how many kills of the whole server follow each other.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.real.conftest import StartVllm
from tests.real.gateway import GatewayProcess
from tests.real.server import cache_folder, until
from tests.real.vllm_cpu import VllmServer

pytestmark = pytest.mark.vllm

AT_ONCE = 4
AHEAD = 60
"""Characters, of the 600 that matter, that a group of streams is ahead of the next when their backend breaks."""
KILLS = int(os.environ.get("TIERLINE_KILLS", "2"))
ON = '[tiers.balanced]\ncontinuation = "exact"\n[timeouts]\ngap = 15.0\nconnect = 2.0'
SLOTS = f"quality.reference = true\nlimits.max_in_flight = {6 * AT_ONCE}"


def words(mark: str, count: int) -> list[str]:
    """Chunks of a script: no two are alike, or the model would not know where it is."""
    return [f" {mark}{number}" for number in range(count)]


THOUGHT, TEXT, ARGUMENT = words("t", 150), [*words("w", 150), "."], words("c", 150)
SCRIPTS = {
    "ponder": [THOUGHT, [" Done", "."]],
    "tale": [[" A", " tale"], TEXT],
    "writing": [
        [" I", " write"],
        [
            "<tool_call>",
            "\n<function=write>\n",
            "<parameter=text>\n",
            *ARGUMENT,
            "\n</parameter>\n</function>\n",
            "</tool_call>",
        ],
    ],
}
WRITE: Any = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
KINDS = tuple(SCRIPTS)


def scripts() -> Path:
    path = cache_folder() / "long-scripts.json"
    path.write_text(json.dumps(SCRIPTS))
    return path


@dataclass
class Heard:
    """What an SDK made of one stream."""

    thought: str = ""
    text: str = ""
    arguments: str = ""
    calls: int = 0
    finish: str | None = None
    usage: tuple[int, int] | None = None
    ids: frozenset[str] = frozenset()

    def add(self, chunk: Any) -> None:
        self.ids |= {chunk.id}
        if chunk.usage is not None:
            self.usage = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        for choice in chunk.choices:
            self.text += choice.delta.content or ""
            self.thought += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or ():
                self.calls += call.id is not None
                self.arguments += call.function.arguments or ""
            self.finish = choice.finish_reason or self.finish

    @property
    def size(self) -> int:
        return len(self.thought) + len(self.text) + len(self.arguments)

    def meaning(self) -> tuple[object, ...]:
        arguments = json.loads(self.arguments) if self.calls else None
        return (
            self.thought.strip(),
            self.text.strip(),
            self.calls,
            arguments,
            self.finish,
            self.usage,
            len(self.ids),
        )


class Talk:
    """One stream being read. `begun`: the client has enough of it to be in the middle."""

    def __init__(self, client: openai.AsyncOpenAI, kind: str, name: str, middle: int) -> None:
        self.kind, self.name = kind, name
        self.heard = Heard()
        self.begun = asyncio.Event()
        self._middle = middle
        self._client = client
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        stream = await self._client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"#script:{self.kind}"}],
            tools=[WRITE] if self.kind == "writing" else openai.NOT_GIVEN,
            max_tokens=600,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-request-id": self.name},
        )
        async for chunk in stream:
            self.heard.add(chunk)
            if self.heard.size > self._middle:
                self.begun.set()


@asynccontextmanager
async def two(start_vllm: StartVllm) -> AsyncIterator[tuple[GatewayProcess, dict[str, VllmServer]]]:
    servers = {name: start_vllm(max_num_seqs=4 * AT_ONCE, scripts=scripts()) for name in "ab"}
    slots = dict.fromkeys(servers, SLOTS)
    async with GatewayProcess(servers, config=ON, per_backend=slots) as gateway:
        yield gateway, servers


async def undisturbed(client: openai.AsyncOpenAI, name: str) -> dict[str, tuple[object, ...]]:
    talks = [Talk(client, kind, f"{name}-{kind}", 0) for kind in KINDS]
    await asyncio.gather(*(talk.task for talk in talks))
    told = {talk.kind: talk.heard.meaning() for talk in talks}
    assert told["ponder"][:2] == ("".join(THOUGHT).strip(), "Done.")
    assert told["tale"][1] == "".join(TEXT).strip()
    (argument,) = told["writing"][3].values()  # type: ignore[attr-defined]
    assert argument.strip() == "".join(ARGUMENT).strip()
    return told


async def break_in_the_middle(
    gateway: GatewayProcess,
    client: openai.AsyncOpenAI,
    first: str,
    names: str,
    break_it: Callable[[], object],
) -> list[Talk]:
    """Streams of every kind at `first`, each in another place of its answer, when it breaks."""
    (rest,) = set("ab") - {first}
    gateway.drain(rest)
    talks: list[Talk] = []
    try:
        for number in range(AT_ONCE):
            group = [Talk(client, kind, f"{names}-{kind}-{number}", AHEAD) for kind in KINDS]
            talks += group
            async with asyncio.timeout(300):
                await asyncio.gather(*(talk.begun.wait() for talk in group))
    finally:
        gateway.undrain(rest)
    assert not any(talk.task.done() for talk in talks), "they are all in the middle"
    break_it()
    async with asyncio.timeout(300):
        await asyncio.gather(*(talk.task for talk in talks))
    return talks


async def assert_whole(
    gateway: GatewayProcess, talks: list[Talk], whole: dict[str, tuple[object, ...]]
) -> None:
    for talk in talks:
        assert talk.heard.meaning() == whole[talk.kind], talk.name
        record = await gateway.record(talk.name)
        assert record["outcome"] == "ok"
        assert record["continuation"]["ending"] == "whole", record
        assert [leg["backend"] for leg in record["continuation"]["legs"]] == [record["backend"]]
    assert gateway.running() == 0


def kill(server: VllmServer) -> None:
    """The server and its engine, at once and without a word."""
    assert server.child is not None
    os.killpg(server.child.pid, signal.SIGKILL)


@asynccontextmanager
async def sdk(gateway: GatewayProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def again(gateway: GatewayProcess, server: VllmServer, name: str) -> None:
    """The same server, started anew on its port, and seen by the gateway."""
    await asyncio.to_thread(server.stop)
    server.start()

    def serves() -> int:
        return int(server.ready() and gateway.backends()[name]["state"] == "healthy")

    await until(1, serves, server.start_seconds)


async def test_every_way_to_break_leaves_every_answer_whole(start_vllm: StartVllm) -> None:
    async with two(start_vllm) as (gateway, servers), sdk(gateway) as client:
        whole = await undisturbed(client, "before")
        a, b = servers["a"], servers["b"]
        assert a.child is not None
        pid = a.child.pid
        try:
            stalled = await break_in_the_middle(
                gateway, client, "a", "stall", lambda: os.killpg(pid, signal.SIGSTOP)
            )
        finally:
            os.killpg(pid, signal.SIGCONT)
        await assert_whole(gateway, stalled, whole)
        await a.until_running(0, within=30.0)
        await until(1, lambda: int(gateway.backends()["a"]["state"] == "healthy"), within=120.0)
        for name, server, break_it in (("engine", b, b.kill_engine), ("abort", a, a.terminate_engine)):
            first = "b" if server is b else "a"
            broken = await break_in_the_middle(gateway, client, first, name, break_it)
            await assert_whole(gateway, broken, whole)
            await again(gateway, server, first)


async def test_a_server_is_killed_again_and_again_in_the_middle(start_vllm: StartVllm) -> None:
    async with two(start_vllm) as (gateway, servers), sdk(gateway) as client:
        whole = await undisturbed(client, "before")
        for number in range(KILLS):
            first = "ab"[number % 2]
            server = servers[first]
            talks = await break_in_the_middle(
                gateway, client, first, f"kill{number}", lambda server=server: kill(server)
            )
            await assert_whole(gateway, talks, whole)
            if number < KILLS - 1:
                await again(gateway, server, first)
