"""nginx and Caddy in front of Tierline, as `deploy/` configures them, for real: pieces of a stream arrive one by one, a
client that leaves stops its generation, and what is not the clients' is not answered.

The file is the one that is shipped, but for the names of ports and certificates. Where a server is not installed its tests
are skipped, unless TIERLINE_REQUIRE_TOOLS is set.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import trustme

from proxy.errors import Outcome
from tests.deploy_facts import DEPLOY, config_of
from tests.ports import free_port
from tests.proxy.conftest import CHAT, Gateway, chat, make_gateway
from tests.scripted import DEADLINE, ScriptedBackend, Stall, WaitFor, chat_event, sse

__all__ = ["make_gateway"]  # the fixture


def tool(name: str, package: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if found is None:
        assert not os.environ.get("TIERLINE_REQUIRE_TOOLS"), f"{name} is not installed (Debian: {package})"
        pytest.skip(f"{name} is not installed (Debian: {package})")
    return found


def nginx_files(folder: Path, front: int, gateway: int) -> list[str]:
    text = (DEPLOY / "nginx.conf").read_text("utf-8")
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path(folder / "fullchain.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    for old, new in (
        ("127.0.0.1:8080", f"127.0.0.1:{gateway}"),
        ("listen 443", f"listen 127.0.0.1:{front}"),
        ("/etc/ssl/tierline", str(folder)),
    ):
        assert old in text
        text = text.replace(old, new)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    whole = (
        f"daemon off; pid {folder}/pid; error_log stderr; events {{}} http {{ access_log off; {temporary}\n"
    )
    (folder / "nginx.conf").write_text(f"{whole}{text}\n}}\n")
    return [tool("nginx", "nginx-light"), "-p", str(folder), "-c", str(folder / "nginx.conf")]


def caddy_files(folder: Path, front: int, gateway: int) -> list[str]:
    text = (DEPLOY / "Caddyfile").read_text("utf-8")
    for old, new in (
        ("127.0.0.1:8080", f"127.0.0.1:{gateway}"),
        ("tierline.example.com", f"https://localhost:{front}"),
        ("@clients path", "bind 127.0.0.1\n\ttls internal\n\t@clients path"),
    ):
        assert old in text
        text = text.replace(old, new)
    options = f"{{\n\tadmin off\n\tskip_install_trust\n\tauto_https disable_redirects\n\tstorage file_system {folder}\n}}\n"
    (folder / "Caddyfile").write_text(options + text)
    return [tool("caddy", "caddy"), "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


FRONTS = {"nginx": nginx_files, "caddy": caddy_files}
Front = Callable[[int], Awaitable[int]]


@pytest.fixture(params=FRONTS)
async def front(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Front]:
    """`await front(port of a gateway)`: the port where it answers over TLS."""
    running: list[subprocess.Popen[bytes]] = []

    async def start(gateway: int) -> int:
        port = free_port()
        command = FRONTS[request.param](tmp_path, port, gateway)
        log = (tmp_path / "log").open("wb")
        env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        running.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))  # noqa: ASYNC220
        log.close()
        async with asyncio.timeout(30):
            while True:
                assert running[0].poll() is None, (tmp_path / "log").read_text("utf-8")
                try:
                    _, writer = await connect(port)
                except (OSError, ssl.SSLError):
                    await asyncio.sleep(0.05)
                    continue
                writer.transport.abort()
                return port

    yield start
    for process in running:
        process.terminate()
        process.wait(10)


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")


async def ask(
    port: int, path: str, body: bytes | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await connect(port)
    method, length = ("POST", len(body)) if body is not None else ("GET", 0)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {length}\r\n\r\n"
    writer.write(head.encode() + (body or b""))
    return reader, writer


async def status(port: int, path: str) -> int:
    reader, writer = await ask(port, path)
    async with asyncio.timeout(DEADLINE):
        line = await reader.readline()
    writer.transport.abort()
    return int(line.split()[1])


STREAM = json.dumps(chat(stream=True)).encode()


async def test_pieces_of_a_stream_arrive_one_by_one(
    front: Front, make_gateway: Callable[..., Awaitable[Gateway]]
) -> None:
    """The backend says the next word only when the client has the one before."""
    words = ["one", "two", "three", "four"]
    heard = [asyncio.Event() for _ in words]
    async with ScriptedBackend() as backend:
        gateway = await make_gateway(backend)
        port = await front(gateway.port)
        head, *chunks = sse(*(chat_event({"content": word}) for word in words), chat_event({}, "stop"))
        said = [step for chunk, event in zip(chunks, heard, strict=False) for step in (chunk, WaitFor(event))]
        backend.answer([head, *said, *chunks[len(words) :]])
        reader, writer = await ask(port, CHAT, STREAM)
        async with asyncio.timeout(DEADLINE):
            for word, event in zip(words, heard, strict=True):
                await reader.readuntil(word.encode())
                event.set()
            await reader.readuntil(b"[DONE]")
        writer.transport.abort()
        await gateway.ended(Outcome.OK)


async def test_a_client_that_leaves_the_front_stops_its_generation(
    front: Front, make_gateway: Callable[..., Awaitable[Gateway]]
) -> None:
    async with ScriptedBackend() as backend:
        gateway = await make_gateway(backend)
        port = await front(gateway.port)
        backend.answer([*sse(chat_event({"content": "one"}), done=False)[:2], Stall()])
        reader, writer = await ask(port, CHAT, STREAM)
        async with asyncio.timeout(DEADLINE):
            await reader.readuntil(b"one")
            writer.transport.abort()
            await backend.closed()
        await gateway.ended(Outcome.CANCELLED)


async def test_what_is_not_the_clients_is_not_answered(
    front: Front, make_gateway: Callable[..., Awaitable[Gateway]]
) -> None:
    async with ScriptedBackend() as backend:
        gateway = await make_gateway(backend)
        port = await front(gateway.port)
        assert await status(port, "/health") == 200
        assert await status(port, "/v1/models") == 200
        for path in ("/metrics", "/", "/admin/backends", "/openapi.json"):
            assert await status(port, path) == 404


def test_nginx_accepts_the_snippet(tmp_path: Path) -> None:
    command = nginx_files(tmp_path, free_port(), free_port())
    done = subprocess.run([*command, "-t"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "warn" in done.stderr) == (0, False), done.stderr


def test_caddy_accepts_the_file_and_would_write_it_so() -> None:
    caddy = tool("caddy", "caddy")
    for command in (["validate", "--adapter", "caddyfile", "--config"], ["fmt"]):
        done = subprocess.run(
            [caddy, *command, DEPLOY / "Caddyfile"], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr


def test_the_limits_of_both_are_tierlines() -> None:
    config = config_of("fp8-mtp3")
    megabytes = config.server.max_body_bytes >> 20
    nginx, caddy = (DEPLOY / "nginx.conf").read_text("utf-8"), (DEPLOY / "Caddyfile").read_text("utf-8")
    assert f"client_max_body_size {megabytes}m;" in nginx
    assert f"max_size {megabytes}MiB" in caddy
    (read,) = re.findall(r"proxy_read_timeout (\d+)s;", nginx)
    assert float(read) >= config.timeouts.total
