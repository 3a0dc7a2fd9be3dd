"""The real vLLM does what the tests through the gateway rely on."""

from __future__ import annotations

import json

import aiohttp
import pytest

from tests.real.vllm_cpu import VllmServer

pytestmark = pytest.mark.vllm


def ask(script: str, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": f"hi #script:{script}"}]
    return {"model": "tiny", "messages": messages, "max_tokens": 80, **more}


def test_it_says_the_script_and_separates_the_thinking(vllm: VllmServer) -> None:
    status, answer = vllm.post("/v1/chat/completions", ask("text"))
    message = answer["choices"][0]["message"]
    assert status == 200
    assert (message["reasoning"], message["content"]) == (
        "The user says hi.\n",
        "\n\nHello! I am a tiny scripted model.",
    )
    assert answer["usage"]["completion_tokens"] == 16


def test_its_window_is_what_was_asked_for(vllm: VllmServer) -> None:
    (model,) = json.loads(vllm.get("/v1/models"))["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", vllm.window_tokens)


async def test_running_requests_are_seen_and_end_with_the_client(vllm: VllmServer) -> None:
    asked = ask("long", stream=True) | {"max_tokens": 3500}
    async with aiohttp.ClientSession(vllm.url) as session:
        answer = await session.post("/v1/chat/completions", json=asked)
        assert (await answer.content.readuntil(b"\n\n")).startswith(b"data: ")
        await vllm.until_running(1)
        answer.close()
        await vllm.until_running(0)
