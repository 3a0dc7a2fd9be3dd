"""The fault table's smaller set on a real vLLM: its server or its engine killed, told to stop, stopped, its queue full.

Continuation is off (tests/real/test_vllm_continuation.py is with it): what has begun ends with an error, what has not is
answered by the server that is well, a llama-server. A start takes most of a minute: one vLLM is broken again and again, and
started anew only where it died.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest

from tests.client import Connection
from tests.proxy.dialects import CHAT_DIALECT
from tests.real.conftest import start_or_give_up
from tests.real.gateway import GatewayProcess
from tests.real.llama import LlamaServer
from tests.real.server import until
from tests.real.vllm_cpu import VllmServer

pytestmark = pytest.mark.vllm

PATH = "/v1/chat/completions"
AT_ONCE = 2
"""Requests that the vLLM runs; more wait in its queue."""
CONFIG = """[policy]
file = "{policy}"
admission = false
[timeouts]
connect = 2.0
first_token = 30.0
gap = {gap}
total = 600.0
keepalive_after = 0
"""
IN_ORDER = 'def score(facts, backend):\n    return {"place": 0.0 if backend.name == "a" else 1.0}\n'
MANY = "limits.max_in_flight = 24"
LONG = {"model": "tiny", "messages": [{"role": "user", "content": "#script:long"}], "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[VllmServer]:
    with ExitStack() as stack:
        yield start_or_give_up(stack, VllmServer(max_num_seqs=AT_ONCE))


@pytest.fixture
async def up(server: VllmServer) -> VllmServer:
    """It serves, and nothing runs on it."""
    assert server.child is not None
    if not server.child.running or not server.ready():
        await asyncio.to_thread(server.stop)
        server.start()
        await until(1, lambda: int(server.ready()), server.start_seconds)
    await server.until_running(0, within=60.0)
    return server


def gateway_of(up: VllmServer, llama: LlamaServer, folder: Path, *, gap: float = 60.0) -> GatewayProcess:
    """Every request goes to `a`, the vLLM, first; `b` is well."""
    config = CONFIG.format(policy=f"{folder}/first.py", gap=gap)
    (folder / "first.py").write_text(IN_ORDER)
    return GatewayProcess({"a": up, "b": llama}, config=config, per_backend={"a": MANY, "b": MANY})


def _pid(server: VllmServer) -> int:
    assert server.child is not None
    return server.child.pid


FAULTS: dict[str, tuple[Callable[[VllmServer], None], tuple[str, ...]]] = {
    "SIGSTOP": (lambda server: os.killpg(_pid(server), signal.SIGSTOP), ("upstream_timeout",)),
    # Its engine goes at once, sometimes with an abort; else the server waits in silence for the streams to close.
    "SIGTERM": (
        lambda server: os.kill(_pid(server), signal.SIGTERM),
        ("upstream_error", "upstream_timeout", "upstream_cut"),
    ),
    # The engine's last word is an error event; the process may be gone before it has left.
    "engine-killed": (VllmServer.kill_engine, ("upstream_error", "upstream_cut")),
    "server-killed": (lambda server: os.kill(_pid(server), signal.SIGKILL), ("upstream_cut",)),
}


async def test_when_its_queue_is_full_what_comes_waits_there_and_is_answered(
    up: VllmServer, llama: LlamaServer, tmp_path: Path
) -> None:
    async with gateway_of(up, llama, tmp_path) as gateway, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await Connection.open(gateway.port)) for _ in range(12)]
        for number, client in enumerate(clients):
            body = LONG | {"max_tokens": 30}
            client.send(PATH, body, headers={"x-request-id": f"full-{number}"})
        answers = await asyncio.gather(*(client.read(within=300) for client in clients))
        for number, response in enumerate(answers):
            assert response.events[-1] == "[DONE]", response.body[-300:]
            record = await gateway.record(f"full-{number}")
            assert (record["outcome"], record["backend"], record["attempts"]) == ("ok", "a", 1)
            assert record["completion_tokens"] == 30
        assert gateway.running() == 0
        assert "Traceback" not in gateway.complaints


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_has_begun_ends_with_an_error_and_what_waits_is_answered_by_the_other(
    up: VllmServer, llama: LlamaServer, tmp_path: Path, fault: str
) -> None:
    break_it, outcomes = FAULTS[fault]
    gap = 10.0 if fault in ("SIGSTOP", "SIGTERM") else 60.0
    async with gateway_of(up, llama, tmp_path, gap=gap) as gateway, AsyncExitStack() as stack:
        names = [f"{fault}-begun-{number}" for number in range(AT_ONCE)]
        begun = {name: await stack.enter_async_context(await Connection.open(gateway.port)) for name in names}
        for name, client in begun.items():
            client.send(PATH, LONG | {"max_tokens": 3500}, headers={"x-request-id": name})
            await client.read_until(b" two", within=240)
        waits = await stack.enter_async_context(await Connection.open(gateway.port))
        waits.send(PATH, LONG | {"max_tokens": 20}, headers={"x-request-id": f"{fault}-waits"})
        await up.until_running(AT_ONCE + 1, within=60.0)
        pid = _pid(up)
        break_it(up)
        try:
            responses = {name: await client.read(within=120) for name, client in begun.items()}
            answered = await waits.read(within=120)
        finally:
            if fault == "SIGSTOP":
                os.killpg(pid, signal.SIGCONT)
        for name, response in responses.items():
            CHAT_DIALECT.error_at_end(response)
            record = await gateway.record(name)
            assert record["outcome"] in outcomes, record
            assert (record["backend"], record["attempts"]) == ("a", 1)
        assert answered.status == 200
        assert answered.events[-1] == "[DONE]", answered.body[-300:]
        record = await gateway.record(f"{fault}-waits")
        assert (record["outcome"], record["backend"]) == ("ok", "b")
        assert [failure["backend"] for failure in record["failures"]] == ["a"]
        assert gateway.running() == 0
        assert "Traceback" not in gateway.complaints
    if fault == "SIGSTOP":
        await up.until_running(0, within=60.0)  # it was told that nobody wants them
    else:
        await up.until_ended(within=60.0)
