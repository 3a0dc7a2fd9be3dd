"""The fault table's smaller set on real llama-servers: killed, told to stop, stopped, all of its slots taken.

The server that is well is the second one: what has not begun is answered by it, what has begun ends with an error.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.client import Connection
from tests.proxy.dialects import CHAT_DIALECT
from tests.real.conftest import StartLlama
from tests.real.gateway import GatewayProcess
from tests.real.llama import LlamaServer

pytestmark = pytest.mark.real

PATH = "/v1/chat/completions"
CONFIG = """[policy]
file = "{policy}"
admission = true
[timeouts]
first_token = 4.0
gap = 2.0
total = 20.0
keepalive_after = 0
"""
IN_ORDER = 'def score(facts, backend):\n    return {"place": 0.0 if backend.name == "a" else 1.0}\n'
LONG = {"model": "tiny", "messages": [{"role": "user", "content": "#script:long"}], "max_tokens": 3000}


@pytest.fixture
def fleet(
    start_llama: StartLlama, llama: LlamaServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GatewayProcess, LlamaServer]]:
    """The gateway, and the server `a` that every request goes to first."""
    policy = tmp_path_factory.mktemp("policy") / "first.py"
    policy.write_text(IN_ORDER)
    server = start_llama(slots=2)
    with GatewayProcess({"a": server, "b": llama}, config=CONFIG.format(policy=policy)) as gateway:
        yield gateway, server
        assert gateway.running() == 0
        assert "Traceback" not in gateway.complaints


async def _signal(server: LlamaServer, number: int) -> None:
    assert server.child is not None
    server.child.process.send_signal(number)


FAULTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "kill -9": (signal.SIGKILL, ("upstream_cut",)),
    # It may also fall silent with the connection open, as long as that stream is not written to its end.
    "SIGTERM": (signal.SIGTERM, ("upstream_cut", "upstream_error", "upstream_timeout")),
    "SIGSTOP": (signal.SIGSTOP, ("upstream_timeout",)),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_stream_that_has_begun_ends_with_an_error(
    fleet: tuple[GatewayProcess, LlamaServer], fault: str
) -> None:
    gateway, server = fleet
    number, outcomes = FAULTS[fault]
    async with await Connection.open(gateway.port) as client:
        client.send(PATH, LONG | {"stream": True}, headers={"x-request-id": "begun"})
        await client.read_until(b" two")
        await _signal(server, number)
        response = await client.read(within=30)
    if fault == "SIGSTOP":
        await _signal(server, signal.SIGCONT)
    CHAT_DIALECT.error_at_end(response)
    record = await gateway.record("begun")
    assert record["outcome"] in outcomes
    assert record["backend"] == "a"


# An answer that is not streamed has no first token to wait for: when the server is stopped, timeouts.total ends it.
@pytest.mark.parametrize(("fault", "stream"), [("kill -9", False), ("kill -9", True), ("SIGSTOP", True)])
async def test_what_has_not_begun_is_answered_by_the_other(
    fleet: tuple[GatewayProcess, LlamaServer], fault: str, stream: bool
) -> None:
    gateway, server = fleet
    await _signal(server, FAULTS[fault][0])
    async with await Connection.open(gateway.port) as client:
        body: dict[str, Any] = LONG | {"max_tokens": 20, "stream": stream}
        client.send(PATH, body, headers={"x-request-id": "not-begun"})
        response = await client.read(within=30)
    if fault == "SIGSTOP":
        await _signal(server, signal.SIGCONT)
    assert response.status == 200
    assert b'"error"' not in response.body
    record = await gateway.record("not-begun")
    assert (record["outcome"], record["backend"]) == ("ok", "b")


async def test_when_all_of_its_slots_are_taken_what_comes_waits_and_is_answered(
    fleet: tuple[GatewayProcess, LlamaServer],
) -> None:
    gateway, _ = fleet
    body = LONG | {"max_tokens": 200, "stream": True}
    clients = [await Connection.open(gateway.port) for _ in range(12)]
    for number, client in enumerate(clients):
        client.send(PATH, body, headers={"x-request-id": f"full-{number}"})
    answers = [await client.read(within=30) for client in clients]
    for client in clients:
        client.close()
    for number, response in enumerate(answers):
        record = await gateway.record(f"full-{number}")
        if response.status == 200:
            assert response.events[-1] == "[DONE]", response.events[-1]
            assert record["outcome"] == "ok"
        else:  # turned away in time, with when to come back
            assert (response.status, record["outcome"]) == (429, "shed")
            assert int(response.headers["retry-after"]) >= 1
