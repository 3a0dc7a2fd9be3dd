"""SIGTERM: nothing new comes in, what runs may finish, the rest is told in its own way; then the process ends with 0."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.cli import Exit
from proxy.errors import Outcome
from proxy.wire.errors import Api
from tests.client import Connection
from tests.fake_clock import FakeClock
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat, config_text
from tests.proxy.dialects import CHAT_DIALECT, DIALECTS, Dialect
from tests.proxy.scenes import (
    QUIET,
    dispatching,
    eventually,
    held_back,
    polled,
    settled,
)
from tests.scripted import Head, Raw, ScriptedBackend, Stall, WaitFor, black_hole, closed_port

each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=str)
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
ROOT = Path(__file__).parents[2]
SECONDS = 10.0  # a process that takes longer hangs
SILENT = "[timeouts]\nkeepalive_after = 0\n"  # a comment would commit 200
LIMIT = "[server]\nport = 0\ndrain_timeout = 30\n"


@asynccontextmanager
async def draining(gateway: Gateway) -> AsyncIterator[asyncio.Task[None]]:
    """The gateway has been told to stop."""
    task = asyncio.create_task(gateway.app.drain())
    await eventually(lambda: gateway.app.gateway.draining, "the drain")
    await eventually(lambda: not listening(gateway), "the end of the listener")
    yield task
    async with asyncio.timeout(SECONDS):
        await task


def listening(gateway: Gateway) -> bool:
    return any(site._server is not None and site._server.sockets for site in gateway.app._sites["data"])


# -- what still happens ---------------------------------------------------------------------------------------------


async def test_an_idle_gateway_stops_at_once(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    gateway = await make_gateway(backend, config=QUIET + LIMIT, clock=FakeClock())
    async with draining(gateway):
        pass


@each_dialect
async def test_nothing_new_comes_in_and_a_running_stream_finishes(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect
) -> None:
    gateway = await make_gateway(backend, config=QUIET + LIMIT)
    gate = asyncio.Event()
    begun, rest = dialect.begin(), dialect.stream()[dialect.begun + 1 :]
    backend.answer([*begun, WaitFor(gate), *rest])
    async with await gateway.connect() as client:
        client.send(dialect.path, dialect.request(stream=True))
        await client.read_until(dialect.begun_bytes)
        async with draining(gateway) as task:
            with pytest.raises(ConnectionRefusedError):
                await gateway.connect()
            assert not task.done()
            gate.set()
            response = await client.read()
            assert (response.complete, response.body) == (True, b"".join(dialect.events))
        await client.read_end()  # the connection does not wait for another request
    await gateway.ended(Outcome.OK)
    await settled(gateway, pooled=1)


@each_way
async def test_an_answer_that_begins_while_draining_says_that_the_connection_closes(
    make_gateway: MakeGateway, backend: ScriptedBackend, stream: bool
) -> None:
    gateway = await make_gateway(backend, config=QUIET + LIMIT)
    gate = asyncio.Event()
    backend.answer([WaitFor(gate), *(CHAT_DIALECT.stream() if stream else CHAT_DIALECT.whole())])
    async with await gateway.connect() as client:
        client.send(CHAT, chat(stream=stream))
        await backend.received()
        async with draining(gateway):
            gate.set()
            response = await client.read()
            assert (response.status, response.headers["connection"]) == (200, "close")
            await client.read_end()
    await gateway.ended(Outcome.OK)


async def test_a_kept_connection_gets_its_next_answer_and_is_told_to_close(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET + LIMIT)
    gate = asyncio.Event()
    backend.answer(CHAT_DIALECT.whole(), [WaitFor(gate), *CHAT_DIALECT.whole()])
    async with (
        await gateway.connect() as kept,
        await gateway.connect() as probe,
        await gateway.connect() as busy,
    ):
        kept.send(CHAT, chat())
        assert "connection" not in (await kept.read()).headers
        probe.send("/ready")
        assert (await probe.read()).status == 200
        busy.send(CHAT, chat())
        await backend.received(1)
        async with draining(gateway):
            probe.send("/ready")
            ready = await probe.read()
            assert (ready.status, ready.json["status"], ready.headers["connection"]) == (
                503,
                "draining",
                "close",
            )
            kept.send(CHAT, chat())
            response = await kept.read()
            assert (response.status, response.headers["connection"]) == (200, "close")
            await kept.read_end()
            gate.set()
            assert (await busy.read()).complete
    await gateway.ended(*[Outcome.OK] * 3)
    await settled(gateway)


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "never reads"])
async def test_an_answer_that_is_not_read_yet_is_waited_for_up_to_the_limit(
    make_gateway: MakeGateway, backend: ScriptedBackend, reads: bool
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(backend, config=QUIET + LIMIT, clock=clock)
    await polled(gateway)
    size = 7 << 20
    backend.answer(
        [
            Head(200, [("content-type", "application/json"), ("content-length", str(size))]),
            Raw(b'{"a":"'),
            Raw(b"x" * (size - 8)),
            Raw(b'"}'),
        ]
    )
    async with await gateway.connect() as client:
        client.send(CHAT, chat())
        await gateway.records.get(0)
        async with draining(gateway) as task:
            for _ in range(50):
                await asyncio.sleep(0)
            assert not task.done()
            if reads:
                response = await client.read()
                assert (response.complete, len(response.body)) == (True, size)
            else:
                clock.advance(30.5)
                await eventually(lambda: clock.pending > 2, "the last wait")
                clock.advance(5.5)
    await gateway.ended(Outcome.OK)


# -- what is ended -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stopped(gateway: Gateway) -> AsyncIterator[None]:
    """Drained past the limit."""
    clock = gateway.app.clock
    assert isinstance(clock, FakeClock)
    async with draining(gateway) as task:
        clock.advance(29.9)
        assert not task.done()
        assert gateway.app.gateway.exchanges
        clock.advance(0.2)
        yield


def says_so(dialect: Dialect, error: dict[str, str]) -> None:
    assert "shutting down" in error["message"]
    if dialect.api is not Api.MESSAGES:
        assert error["code"] == "shutdown"


async def cleaned_up(gateway: Gateway, backend: ScriptedBackend | None = None) -> None:
    await gateway.ended(Outcome.SHUTDOWN)
    if backend is not None:
        assert (await backend.closed()).by_peer
    for live in gateway.app.pool.backends.values():
        assert live.health.failures == 0
    await settled(gateway, pooled=0)


@each_dialect
async def test_a_stream_that_still_runs_at_the_limit_ends_in_band(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect
) -> None:
    gateway = await make_gateway(backend, config=QUIET + LIMIT, clock=FakeClock())
    await polled(gateway)
    backend.answer([*dialect.begin(), Stall()])
    async with await gateway.connect() as client:
        client.send(dialect.path, dialect.request(stream=True))
        await client.read_until(dialect.begun_bytes)
        async with stopped(gateway):
            response = await client.read()
            assert response.body.startswith(dialect.begun_bytes)
            says_so(dialect, dialect.error_at_end(response))
            await client.read_end()
    await cleaned_up(gateway, backend)


@each_way
@each_dialect
async def test_one_without_a_head_at_the_limit_is_a_503(
    make_gateway: MakeGateway, backend: ScriptedBackend, dialect: Dialect, stream: bool
) -> None:
    gateway = await make_gateway(backend, config=QUIET + LIMIT + SILENT, clock=FakeClock())
    await polled(gateway)
    backend.answer([Stall()])
    async with await gateway.connect() as client:
        client.send(dialect.path, dialect.request(stream=stream))
        await backend.received()
        async with stopped(gateway):
            response = await client.read()
            assert (response.status, response.complete) == (503, True)
            assert response.headers["connection"] == "close"
            says_so(dialect, dialect.error_in(response.json))
    await cleaned_up(gateway, backend)


@pytest.mark.parametrize("phase", ["half a body", "connecting"])
async def test_one_without_a_backend_at_the_limit_is_a_503(make_gateway: MakeGateway, phase: str) -> None:
    with black_hole() as port:
        config = QUIET + "timeout = 100\n" + LIMIT + "body_timeout = 100\n[timeouts]\nconnect = 100\n"
        gateway = await make_gateway(f"http://127.0.0.1:{port}", config=config, clock=FakeClock())
        async with await gateway.connect() as client:
            if phase == "connecting":
                client.send(CHAT, chat())
                await dispatching(gateway)
            else:
                client.send_raw(
                    b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{" % CHAT.encode()
                )
                await eventually(lambda: bool(gateway.app.gateway.exchanges), "the request")
            async with stopped(gateway):
                response = await client.read()
                assert response.status == 503
                says_so(CHAT_DIALECT, CHAT_DIALECT.error_in(response.json))
        await gateway.ended(Outcome.SHUTDOWN)


async def test_what_is_no_event_stream_is_cut_at_the_limit(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET + LIMIT, clock=FakeClock())
    await polled(gateway)
    backend.answer(
        [Head(200, [("content-type", "audio/mpeg"), ("content-length", "99")]), Raw(b"x"), Stall()]
    )
    async with await gateway.connect() as client:
        client.send("/v1/audio/speech", {"model": "tiny", "input": "hi"})
        await client.read_until(b"x")
        async with stopped(gateway):
            assert not (await client.read()).complete
    await cleaned_up(gateway, backend)


async def test_a_client_that_does_not_read_does_not_hold_up_the_end(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    clock = FakeClock()
    config = QUIET + LIMIT + "[timeouts]\nclient_idle = 1000\n"
    gateway = await make_gateway(backend, config=config, clock=clock)
    await polled(gateway)
    word = CHAT_DIALECT.events[1].replace(b"Hello", b"word " * 200_000)
    backend.answer([*CHAT_DIALECT.begin(*[word] * 32), Stall()])
    async with await gateway.connect() as client:
        client.send(CHAT, chat(stream=True))
        await backend.blocked()
        await held_back(gateway)
        async with stopped(gateway):
            await gateway.records.get(0)
            await eventually(lambda: clock.pending > 2, "the last wait")
            clock.advance(5.5)
    await gateway.ended(Outcome.SHUTDOWN)
    assert (await backend.closed()).by_peer


async def test_many_at_once_all_end(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    per_backend = {"a": "limits.max_in_flight = 200\nlimits.kv_tokens = 10_000_000"}
    gateway = await make_gateway(backend, config=QUIET + LIMIT, per_backend=per_backend, clock=FakeClock())
    await polled(gateway)
    backend.default = [*CHAT_DIALECT.begin(), Stall()]
    clients = [await gateway.connect() for _ in range(60)]
    for client in clients:
        client.send(CHAT, chat(stream=True))
    for client in clients:
        await client.read_until(b"Hello")
    async with stopped(gateway):
        for client in clients:
            CHAT_DIALECT.error_at_end(await client.read())
    for client in clients:
        async with client:
            pass
    await gateway.ended(*[Outcome.SHUTDOWN] * 60)
    await settled(gateway, pooled=0)


# -- the process --------------------------------------------------------------------------------------------------------


class Served:
    """`python -m proxy serve` on a free port."""

    def __init__(self, process: Process, port: int) -> None:
        self.process, self.port = process, port
        self.stderr = b""

    async def until(self, text: bytes) -> None:
        assert self.process.stderr is not None
        async with asyncio.timeout(SECONDS):
            while text not in self.stderr:
                line = await self.process.stderr.readline()
                assert line, f"{text!r} was not said: {self.stderr.decode()}"
                self.stderr += line

    async def exit(self) -> int:
        assert self.process.stderr is not None
        async with asyncio.timeout(SECONDS):
            self.stderr += await self.process.stderr.read()
            return await self.process.wait()


@asynccontextmanager
async def serve(
    tmp_path: Path, backend: str, server: str = "", port: int | None = None
) -> AsyncIterator[Served]:
    port = closed_port() if port is None else port
    path = tmp_path / "config.toml"
    path.write_text(config_text([backend], f"[server]\nport = {port}\n{server}", {}))
    command: Sequence[str] = (sys.executable, "-W", "error", "-m", "proxy", "serve", "-c", str(path))
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=PIPE)
    try:
        yield Served(process, port)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        transport = process._transport  # type: ignore[attr-defined]
        transport.close()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_a_signal_lets_a_stream_finish_and_the_process_exits_with_0(
    tmp_path: Path, backend: ScriptedBackend, sign: signal.Signals
) -> None:
    gate = asyncio.Event()
    backend.answer([*CHAT_DIALECT.begin(), WaitFor(gate), *CHAT_DIALECT.stream()[3:]])
    async with serve(tmp_path, backend.url) as served:
        await served.until(b"serving tiny on http://127.0.0.1:")
        async with await Connection.open(served.port) as client:
            client.send(CHAT, chat(stream=True))
            await client.read_until(CHAT_DIALECT.begun_bytes)
            served.process.send_signal(sign)
            await served.until(b"stopping")
            gate.set()
            response = await client.read()
            assert (response.complete, response.body) == (True, b"".join(CHAT_DIALECT.events))
        assert await served.exit() == Exit.OK, served.stderr.decode()
        assert b"stopped" in served.stderr
        assert b"Traceback" not in served.stderr


async def test_past_the_limit_the_stream_ends_in_band_and_the_process_exits_with_0(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    backend.answer([*CHAT_DIALECT.begin(), Stall()])
    async with serve(tmp_path, backend.url, "drain_timeout = 0.2") as served:
        await served.until(b"serving")
        async with await Connection.open(served.port) as client:
            client.send(CHAT, chat(stream=True))
            await client.read_until(b"Hello")
            served.process.terminate()
            CHAT_DIALECT.error_at_end(await client.read())
        assert await served.exit() == Exit.OK, served.stderr.decode()
        assert b"Traceback" not in served.stderr
    assert (await backend.closed()).by_peer


async def test_a_taken_port_is_exit_code_3(tmp_path: Path, backend: ScriptedBackend) -> None:
    async with serve(tmp_path, backend.url, port=backend.port) as served:
        assert await served.exit() == Exit.BIND
        assert b"cannot listen" in served.stderr
        assert b"Traceback" not in served.stderr


async def test_a_config_that_cannot_be_used_is_exit_code_2(tmp_path: Path) -> None:
    async with serve(tmp_path, "http://127.0.0.1:1", "prot = 8080") as served:
        assert await served.exit() == Exit.CONFIG
        assert b'did you mean "port"' in served.stderr
