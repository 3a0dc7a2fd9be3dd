"""The real llama-server and its scripted model do what the tests through the gateway rely on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.real import llama as real
from tests.real.child import Child
from tests.real.conftest import StartLlama
from tests.real.llama import LlamaServer
from tests.real.server import Unavailable

pytestmark = pytest.mark.real

WEATHER = {
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


def ask(script: str, **more: object) -> dict[str, object]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"hi #script:{script}"}],
        "max_tokens": 80,
        **more,
    }


def test_it_says_the_script_that_the_prompt_names(llama: LlamaServer) -> None:
    status, answer = llama.post("/v1/chat/completions", ask("text"))
    message = answer["choices"][0]["message"]
    assert status == 200
    assert (message["reasoning_content"], message["content"]) == (
        "The user says hi.\n",
        "Hello! I am a tiny scripted model.",
    )
    assert answer["usage"]["completion_tokens"] == 16


def test_it_calls_a_tool_and_then_answers(llama: LlamaServer) -> None:
    asked = ask("tool", tools=[WEATHER])
    _, answer = llama.post("/v1/chat/completions", asked)
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "get_weather",
        {"city": "Paris", "days": 3},
    )
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    messages = [{"role": "user", "content": "weather?"}, message, result]
    _, answer = llama.post("/v1/chat/completions", asked | {"messages": messages})
    assert answer["choices"][0]["message"]["content"] == "Hello! I am a tiny scripted model."


def test_a_prompt_beyond_the_window_is_refused_with_the_numbers(llama: LlamaServer) -> None:
    long = [{"role": "user", "content": "x" * 5000}]
    status, answer = llama.post("/v1/chat/completions", {"model": "tiny", "messages": long, "max_tokens": 5})
    assert status == 400
    assert answer["error"]["type"] == "exceed_context_size_error"
    assert answer["error"]["n_ctx"] == llama.window_tokens


async def test_it_streams_until_the_client_goes_away(llama: LlamaServer) -> None:
    asked = ask("long", stream=True) | {"max_tokens": 4000}
    async with aiohttp.ClientSession(llama.url) as session:
        answer = await session.post("/v1/chat/completions", json=asked)
        assert (await answer.content.readuntil(b"\n\n")).startswith(b"data: ")
        await llama.until_running(1)
        answer.close()
        await llama.until_running(0)


def test_servers_of_ones_own_have_their_own_window_and_key(start_llama: StartLlama) -> None:
    small = start_llama(slots=1, window_tokens=512, key="secret", name="small")
    models = json.loads(small.get("/v1/models"))["data"]
    assert [(m["id"], m["meta"]["n_ctx"]) for m in models] == [("small", 512)]
    small.key = None
    assert small.post("/v1/chat/completions", ask("text"))[0] == 401


@pytest.mark.usefixtures("llama")  # to be skipped where that one cannot run
async def test_it_can_be_started_from_a_running_loop() -> None:
    async with LlamaServer(slots=1, window_tokens=256) as server:
        assert await asyncio.to_thread(server.running) == 0
        child = server.child
    assert child is not None
    assert not child.running


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent death signal is Linux's")
def test_a_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from tests.real.child import Child\n"
        "child = Child(['sleep', '60'], pathlib.Path(sys.argv[1]))\n"
        "while b'sleep' not in pathlib.Path(f'/proc/{child.pid}/comm').read_bytes(): pass\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=real.REPOSITORY,
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        watch = os.pidfd_open(pid)
        parent.kill()
    try:
        assert select.select([watch], [], [], 5)[0], "the child outlived its parent"
    finally:
        os.close(watch)


@pytest.mark.parametrize(
    ("status", "complaint", "reason"),
    [
        (1, "/lib/libc.so.6: version `GLIBC_2.38' not found", "needs glibc 2.35 or newer, here is"),
        (
            127,
            "libgomp.so.1: cannot open shared object file",
            r"needs libgomp.so.1 \(apt-get install libgomp1\)",
        ),
        (127, "libstdc++.so.6: cannot open shared object file", r"needs libstdc\+\+.so.6, which is not"),
        (-4, "", "needs CPU instructions that this machine lacks"),
        (-9, "", "was ended by signal 9"),
        (3, "something\nelse", "does not start: else"),
        (3, "", "does not start: exit status 3"),
    ],
)
def test_a_server_that_cannot_run_says_what_is_missing(status: int, complaint: str, reason: str) -> None:
    assert re.search(reason, real._why(status, complaint))


def test_a_named_server_that_is_not_there_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERLINE_LLAMA_SERVER", "/nowhere/llama-server")
    with pytest.raises(Unavailable, match="there is no llama-server at /nowhere/llama-server"):
        real.find_server.__wrapped__()


def test_a_child_that_ends_at_once_shows_what_it_printed(tmp_path: Path) -> None:
    child = Child(["sh", "-c", "echo out of luck; exit 7"], tmp_path / "log")
    assert child.process.wait() == 7
    assert child.tail() == "out of luck"
    assert child.stop() == 7
