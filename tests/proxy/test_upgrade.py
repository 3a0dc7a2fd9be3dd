"""One process takes another's place: nobody is refused, nothing that runs is cut; and sockets come from where they may."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from proxy import listen
from proxy.listen import FROM, LISTEN, READY, Listeners, ready
from tests.real.gateway import GatewayProcess
from tests.scripted import ScriptedBackend

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


class Load:
    """Clients that ask again and again, half of them on a connection of their own each time."""

    def __init__(self, url: str, *, clients: int = 6) -> None:
        self._url, self._clients = url, clients
        self.answered = 0
        self._stop = False
        self._more = asyncio.Event()

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._client(kept=at % 2 == 0)) for at in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def _client(self, *, kept: bool) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=not kept)) as session:
            while not self._stop:
                async with session.post(self._url + "/v1/chat/completions", json=BODY) as response:
                    assert response.status == 200, await response.text()
                    assert (await response.json())["choices"]
                self.answered += 1
                self._more.set()

    async def more(self, count: int) -> None:
        """Until so many further requests are answered; a client that failed says so."""
        end = self.answered + count
        async with asyncio.timeout(60):
            while self.answered < end:
                for task in self._tasks:
                    if task.done():
                        task.result()
                self._more.clear()
                await self._more.wait()


async def ends(gateway: GatewayProcess) -> int:
    assert gateway.child is not None
    return await asyncio.to_thread(gateway.child.process.wait, 60)


async def says(gateway: GatewayProcess, words: str) -> None:
    async with asyncio.timeout(60):
        while words not in gateway.complaints:  # noqa: ASYNC110 (a log announces nothing)
            await asyncio.sleep(0.05)


@pytest.fixture
async def gateway(backend: ScriptedBackend) -> AsyncIterator[GatewayProcess]:
    made = GatewayProcess({"a": backend})  # type: ignore[dict-item]  # it has a url
    async with made:
        yield made


async def test_an_upgrade_under_load_refuses_and_fails_nothing(gateway: GatewayProcess) -> None:
    assert gateway.child is not None
    async with Load(gateway.url) as load:
        await load.more(50)
        os.kill(gateway.child.pid, signal.SIGUSR2)
        assert await ends(gateway) == 0
        await load.more(50)
    (successor,) = re.findall(r"process (\d+) serves", gateway.complaints)
    os.kill(int(successor), 0)  # it is there
    assert "Traceback" not in gateway.complaints


async def test_an_upgrade_to_what_cannot_start_changes_nothing_and_says_why(gateway: GatewayProcess) -> None:
    assert gateway.child is not None
    gateway._config.write_text(gateway._config.read_text() + "\n[nonsense]\n")
    async with Load(gateway.url, clients=2) as load:
        os.kill(gateway.child.pid, signal.SIGUSR2)
        await says(gateway, "this one goes on")
        await load.more(10)
    assert "nonsense" in gateway.complaints
    assert "exit code 2" in gateway.complaints
    assert gateway.child.running


# -- where sockets come from -----------------------------------------------------------------------------------


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


async def test_systemds_socket_is_used_whatever_is_configured(
    bound: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "FIRST_FD", os.dup(bound.fileno()))
    environ = {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "tierline.socket"}
    listeners = Listeners(environ)
    (sock,) = await listeners.listen("data", "127.0.0.1", 1, 5)
    assert sock.getsockname() == bound.getsockname()
    assert not environ
    sock.close()


async def test_sockets_of_another_process_are_left_alone(bound: socket.socket) -> None:
    listeners = Listeners({"LISTEN_FDS": "1", "LISTEN_PID": "1", LISTEN: f"data={bound.fileno()}", FROM: "1"})
    (sock,) = await listeners.listen("data", "127.0.0.1", 0, 5)
    assert sock.getsockname() != bound.getsockname()
    sock.close()


async def test_a_socket_that_is_passed_on_is_used_at_its_own_address_only(bound: socket.socket) -> None:
    port = bound.getsockname()[1]
    for wanted, same in ((0, True), (port, True), (free(), False)):
        environ = {LISTEN: f"data={os.dup(bound.fileno())}", FROM: str(os.getppid())}
        listeners = Listeners(environ)
        (sock,) = await listeners.listen("data", "127.0.0.1", wanted, 5)
        assert (sock.getsockname()[1] == port) is same
        sock.close()


def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


async def test_what_nobody_wants_is_closed(bound: socket.socket) -> None:
    spare = os.dup(bound.fileno())
    listeners = Listeners({LISTEN: f"admin={spare}", FROM: str(os.getppid())})
    listeners.close_unused()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(spare)


def test_ready_is_told_to_systemd_and_to_whom_we_replace(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as manager:
        manager.bind(str(tmp_path / "notify"))
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), READY: str(writing), FROM: str(os.getppid())}
        ready(environ)
        assert manager.recv(100) == b"READY=1\nMAINPID=%d" % os.getpid()
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"ready"
    assert environ.keys() == {"NOTIFY_SOCKET"}
