"""Two real llama-servers, which give no token ids: one is killed, stopped or told to stop, its text goes on at the other.

The script's chunks are single characters: the model goes on behind any of them, as a model that learned to does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import string
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.real.conftest import StartLlama, StartVllm
from tests.real.gateway import GatewayProcess
from tests.real.llama import LlamaServer, make_model
from tests.real.server import RealServer, cache_folder

pytestmark = pytest.mark.real

AT_ONCE = 3
ALPHABET = string.ascii_letters + " " + string.digits + "!#$%&()*+,-./:;=?@^_~"
SCRIPT = {"letters": [[" hmm"], [*ALPHABET, "LOOP"]]}
ON = """
[tiers.balanced]
continuation = "text"
[timeouts]
gap = 3.0
connect = 2.0
"""
ALIKE = f"quality.reference = true\nlimits.max_in_flight = {2 * AT_ONCE}"


def scripts() -> Path:
    path = cache_folder() / "letters.json"
    path.write_text(json.dumps(SCRIPT))
    return path


@asynccontextmanager
async def gateway_of(servers: Mapping[str, RealServer]) -> AsyncIterator[GatewayProcess]:
    async with GatewayProcess(servers, config=ON, per_backend=dict.fromkeys(servers, ALIKE)) as gateway:
        yield gateway
        assert gateway.running() == 0
        assert "Traceback" not in gateway.complaints


class Talk:
    """One stream, read by the SDK. `begun`: the client has so many characters of the text."""

    def __init__(self, client: openai.AsyncOpenAI, name: str, middle: int, limit: int) -> None:
        self.name, self.limit = name, limit
        self.text, self.thought, self.finish = "", "", ""
        self.usage: Any = None
        self.ids: set[str] = set()
        self.begun = asyncio.Event()
        self._client, self._middle = client, middle
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        stream = await self._client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "#script:letters"}],
            max_tokens=self.limit,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-request-id": self.name},
        )
        async for chunk in stream:
            self.ids |= {chunk.id}
            self.usage = chunk.usage or self.usage
            for choice in chunk.choices:
                self.text += choice.delta.content or ""
                self.thought += getattr(choice.delta, "reasoning_content", None) or ""
                self.finish = choice.finish_reason or self.finish
            if len(self.text) > self._middle:
                self.begun.set()

    def assert_whole(self) -> None:
        assert self.text == "".join(itertools.islice(itertools.cycle(ALPHABET), len(self.text)))
        assert abs(len(self.text) - self.limit) < 12, "tokens before the cut are counted by their text"
        assert (self.thought.strip(), self.finish, len(self.ids)) == ("hmm", "length", 1)
        usage = self.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert abs(usage.completion_tokens - self.limit) < 12


BREAKS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}


@pytest.mark.parametrize(
    "way", ["SIGKILL", *(pytest.param(way, marks=pytest.mark.slow) for way in ("SIGTERM", "SIGSTOP"))]
)
async def test_the_text_arrives_whole_and_once(start_llama: StartLlama, way: str) -> None:
    model = make_model("--scripts", str(scripts())) / "model.gguf"
    servers = {name: start_llama(model=model, slots=2 * AT_ONCE) for name in "ab"}
    async with gateway_of(servers) as gateway:
        await goes_on(gateway, servers["a"], way, 2500)


@pytest.mark.vllm
async def test_the_text_of_a_llama_server_goes_on_at_a_vllm_whose_parser_takes_it_for_thinking(
    start_llama: StartLlama, start_vllm: StartVllm
) -> None:
    model = make_model("--scripts", str(scripts())) / "model.gguf"
    a = start_llama(model=model, slots=2 * AT_ONCE)
    b = start_vllm(max_num_seqs=2 * AT_ONCE, scripts=scripts())
    async with gateway_of({"a": a, "b": b}) as gateway:
        await goes_on(gateway, a, "SIGKILL", 1000)


async def goes_on(gateway: GatewayProcess, first: LlamaServer, way: str, limit: int) -> None:
    """Streams at `a`, the first, are in the middle of their text when it breaks."""
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        gateway.drain("b")
        talk = Talk(client, "undisturbed", 0, limit)
        await talk.task
        talk.assert_whole()
        # Each a little further than the one before it: they are cut at different characters, also behind the blank.
        talks = [Talk(client, f"{way}-{number}", 60 + 17 * number, limit) for number in range(AT_ONCE)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(talk.begun.wait() for talk in talks))
        gateway.undrain("b")
        assert first.child is not None
        pid = first.child.pid
        os.killpg(pid, BREAKS[way])
        try:
            async with asyncio.timeout(480):
                await asyncio.gather(*(talk.task for talk in talks))
        finally:
            if way == "SIGSTOP":
                os.killpg(pid, signal.SIGCONT)
    for talk in talks:
        record = await gateway.record(talk.name)
        assert record["outcome"] == "ok"
        assert record["continuation"]["ending"] == "whole", record
        assert [(leg["backend"], leg["by"]) for leg in record["continuation"]["legs"]] == [("b", "text")]
        talk.assert_whole()
