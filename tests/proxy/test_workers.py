"""`server.workers = 2`, in real processes: what is exact stays exact, what dies is replaced, nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.proxy.test_upgrade import Load, ends, says
from tests.real.gateway import GatewayProcess

CHAT = "/v1/chat/completions"
WHOLE = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "tiny",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}
TWO = "workers = 2"
QUEUE = "[policy.gate]\nqueue = 1000\n"


class Backend:
    """Answers at once, unless it is told to hold; counts how many it has at a time."""

    def __init__(self) -> None:
        self.running = self.most = self.asked = 0
        self.held = asyncio.Event()
        self.held.set()
        self.arrived = asyncio.Event()

    @property
    def url(self) -> str:
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    async def __aenter__(self) -> Backend:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.held.set()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                await reader.readexactly(int(length[1]) if length is not None else 0)
                body = await self._answer() if head.startswith(b"POST") else self._page(head.split()[1])
                status = b"200 OK" if body else b"404 Not Found"
                writer.write(
                    b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (status, len(body), body)
                )
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self) -> bytes:
        self.asked += 1
        self.running += 1
        self.most = max(self.most, self.running)
        self.arrived.set()
        try:
            await asyncio.sleep(0)
            await self.held.wait()
        finally:
            self.running -= 1
        return orjson.dumps(WHOLE)

    def _page(self, path: bytes) -> bytes:
        models = {"object": "list", "data": [{"id": "tiny", "max_model_len": 4096}]}
        return {b"/health": b"{}", b"/v1/models": orjson.dumps(models)}.get(path, b"")


@asynccontextmanager
async def gateway_of(backend: Backend, more: str = "", *, slots: int = 64) -> AsyncIterator[GatewayProcess]:
    made = GatewayProcess(
        {"a": backend},  # type: ignore[dict-item]  # it has a url
        server=TWO,
        config=more,
        per_backend={"a": f"limits = {{ max_in_flight = {slots} }}"},
    )
    made.prepare()
    made.start()
    try:
        async with asyncio.timeout(made.start_seconds):  # in a thread: the backend is polled meanwhile
            while not await asyncio.to_thread(made.ready):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield made
    finally:
        await asyncio.to_thread(made.stop)


def children(pid: int) -> list[int]:
    """Processes that this one started and that still run."""
    return [int(at) for at in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def until(happened: Callable[[], Any]) -> Any:
    async with asyncio.timeout(60):
        while not (found := happened()):  # noqa: ASYNC110 (other processes announce nothing)
            await asyncio.sleep(0.05)
    return found


async def metrics(session: aiohttp.ClientSession, gateway: GatewayProcess) -> dict[str, float]:
    async with session.get(gateway.url + "/metrics") as response:
        assert response.status == 200
        text = await response.text()
    lines = [line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#"]
    return {key: float(value) for key, _, value in lines}


def served(found: dict[str, float]) -> float:
    return sum(value for key, value in found.items() if key.startswith("tierline_requests_total"))


async def ask(session: aiohttp.ClientSession, gateway: GatewayProcess) -> aiohttp.ClientResponse:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    patient = {"x-tierline-deadline": "86400"}
    async with session.post(gateway.url + CHAT, json=body, headers=patient) as response:
        await response.read()
        return response


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # each request may come to another worker
    async with aiohttp.ClientSession(connector=connector) as made:
        yield made


async def test_one_slot_is_given_once_comes_back_from_a_worker_that_is_killed_and_all_end_when_told_to(
    session: aiohttp.ClientSession,
) -> None:
    async with Backend() as backend, gateway_of(backend, QUEUE, slots=1) as gateway:
        assert gateway.child is not None
        workers = children(gateway.child.pid)
        assert len(workers) == 2
        answers = await asyncio.gather(*[ask(session, gateway) for _ in range(400)])
        assert {answer.status for answer in answers} == {200}
        assert backend.most == 1
        before = await metrics(session, gateway)
        assert served(before) == 400
        assert before["process_resident_memory_bytes"] > 3 * 20e6

        backend.held.clear()
        backend.arrived.clear()
        tasks = [asyncio.create_task(ask(session, gateway)) for _ in range(8)]
        await backend.arrived.wait()
        os.kill(workers[0], signal.SIGKILL)
        await until(lambda: not alive(workers[0]))
        backend.held.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        whole = [one for one in done if isinstance(one, aiohttp.ClientResponse)]
        assert whole, "those of the other worker are answered"
        assert {one.status for one in whole} == {200}
        assert all(isinstance(one, aiohttp.ClientResponse | aiohttp.ClientError) for one in done)
        after = await metrics(session, gateway)
        assert served(after) >= served(before) + len(whole)
        new = await until(lambda: len(found := children(gateway.child.pid)) == 2 and found)  # type: ignore[union-attr]
        assert workers[0] not in new
        assert gateway.running() == 0
        assert after["tierline_worker_restarts_total"] in (0, 1)

        gateway.child.terminate()
        assert await ends(gateway) == 0
        assert not any(map(alive, new))


async def test_a_new_policy_and_a_new_process_under_load_fail_nothing(session: aiohttp.ClientSession) -> None:
    async with Backend() as backend, gateway_of(backend) as gateway:
        assert gateway.child is not None
        owner = gateway.child.pid
        async with Load(gateway.url) as load:
            await load.more(50)
            gateway._config.write_text(gateway._config.read_text() + '\n[policy]\nname = "least_load"\n')
            os.kill(owner, signal.SIGHUP)
            await says(gateway, "reload (SIGHUP): policy")
            await load.more(100)
            os.kill(owner, signal.SIGUSR2)
            assert await ends(gateway) == 0
            await load.more(50)
        (successor,) = re.findall(r"process (\d+) serves", gateway.complaints)
        assert len(children(int(successor))) == 2
        assert 'name="least_load"' in str(await metrics(session, gateway))
        assert "Traceback" not in gateway.complaints


async def test_workers_whose_owner_is_killed_end() -> None:
    async with Backend() as backend, gateway_of(backend) as gateway:
        assert gateway.child is not None
        workers = children(gateway.child.pid)
        os.kill(gateway.child.pid, signal.SIGKILL)
        await until(lambda: not any(map(alive, workers)))
        await says(gateway, "the owner is gone")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # nobody waits for it where the owner is gone
