"""Ways around the key, and ways to learn one."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from proxy.access import Callers
from proxy.record import line
from tests.client import Connection
from tests.proxy.conftest import CHAT, MakeGateway, chat
from tests.scripted import ScriptedBackend, error_json

CONFIG = """
[server]
port = 0
[[server.keys]]
name = "k"
key = "env:K"
[admin]
port = 0
key = "env:ADMIN"
[telemetry]
records = "off"
decisions = true
"""
ENV = {"K": "sk-client-0123456789", "ADMIN": "sk-admin-0123456789", "B": "sk-backend-0123456789"}
BACKEND = {"a": 'key = "env:B"'}

AROUND = {
    "no key": "",
    "an empty one": "authorization: Bearer\r\n",
    "blanks": "authorization: Bearer   \r\n",
    "the word alone": "authorization: bearer bearer\r\n",
    "another scheme": "authorization: Basic sk-client-0123456789\r\n",
    "no scheme": "authorization: sk-client-0123456789\r\n",
    "two keys in one": "authorization: Bearer x, Bearer sk-client-0123456789\r\n",
    "a key and more": "authorization: Bearer sk-client-0123456789 x\r\n",
    "the right one second": "authorization: Bearer x\r\nauthorization: Bearer sk-client-0123456789\r\n",
    "another case": "authorization: Bearer SK-CLIENT-0123456789\r\n",
    "a part": "authorization: Bearer sk-client-012345678\r\n",
    "an empty x-api-key": "x-api-key: \r\n",
    "the backend's": "authorization: Bearer sk-backend-0123456789\r\n",
    "the admin's": "authorization: Bearer sk-admin-0123456789\r\n",
    "the admin's, in its own header alone": "x-tierline-admin-key: sk-admin-0123456789\r\n",
    "explain without the admin's": "x-tierline-explain: 1\r\n",
    "a cookie": "cookie: authorization=sk-client-0123456789\r\n",
    "a proxy's header": "proxy-authorization: Bearer sk-client-0123456789\r\n",
    "a user of the gateway's": "x-forwarded-user: k\r\nx-tierline-tenant: k\r\n",
    "a method in place of another": "x-http-method-override: GET\r\n",
    "a path in place of another": "x-original-url: /health\r\nx-rewrite-url: /health\r\n",
}


def title() -> bytes:
    return Path("/proc/self/cmdline").read_bytes()


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize("headers", AROUND.values(), ids=AROUND.keys())
@pytest.mark.parametrize(
    "target", [CHAT, f"{CHAT}?api_key=sk-client-0123456789&key=sk-client-0123456789", f"http://health{CHAT}"]
)
async def test_there_is_no_way_around_the_key(
    make_gateway: MakeGateway, backend: ScriptedBackend, headers: str, target: str
) -> None:
    gateway = await make_gateway(backend, config=CONFIG, env=ENV, per_backend=BACKEND)
    body = b'{"model":"tiny","messages":[]}'
    async with await gateway.connect() as client:
        head = f"POST {target} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(body)}\r\n\r\n"
        client.send_raw(head.encode() + body)
        assert (await client.read()).status == 401
    assert not backend.requests


@pytest.mark.parametrize(
    "headers",
    [
        "Authorization: bEaReR sk-client-0123456789\r\n",
        "X-API-KEY: sk-client-0123456789\r\nauthorization: Bearer x\r\n",
    ],
)
async def test_the_key_in_any_spelling_that_clients_use_is_one_and_goes_nowhere(
    make_gateway: MakeGateway, backend: ScriptedBackend, headers: str
) -> None:
    gateway = await make_gateway(backend, config=CONFIG, env=ENV, per_backend=BACKEND)
    body = b'{"model":"tiny","messages":[]}'
    async with await gateway.connect() as client:
        client.send_raw(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body
        )
        assert (await client.read()).status == 200
    assert b"sk-client" not in (await backend.received()).head


async def test_no_key_is_in_a_log_an_error_a_record_a_metric_an_admin_page_or_the_process_title(
    make_gateway: MakeGateway, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    gateway = await make_gateway(backend, config=CONFIG, env=ENV, per_backend=BACKEND)
    shown = b""
    quoted = f"invalid key {ENV['B']}"
    backend.answer(error_json(401, quoted, type="AuthenticationError"), error_json(500, "why"))
    for key in (
        "sk-client-0123456789",
        "sk-wrong-0123456789",
        "sk-client-0123456789",
        "sk-client-0123456789",
    ):
        headers = {
            "authorization": f"Bearer {key}",
            "x-tierline-explain": "1",
            "x-tierline-admin-key": ENV["ADMIN"],
        }
        response = await gateway.ask(CHAT, chat(), headers=headers)
        shown += response.body + str(response.header_list).encode()
    shown += (await gateway.ask("/metrics")).body
    for path in ("/admin/config", "/admin/backends", f"/admin/explain/{(await gateway.record()).request_id}"):
        async with await Connection.open(gateway.app.admin_port) as client:
            client.send(path, headers={"host": "localhost", "authorization": f"Bearer {ENV['ADMIN']}"})
            page = await client.read()
            assert page.status == 200
            shown += page.body
    shown += b"".join(line(*closed) for closed in gateway.records.closed)
    shown += caplog.text.encode() + title()
    for secret in (*ENV.values(), "sk-wrong-0123456789"):
        assert secret.encode() not in shown, secret


def test_a_key_is_looked_up_by_its_hash_and_compared_with_none() -> None:
    """So that how long it takes tells nothing of how much of it is right."""
    lookups: list[bytes] = []

    class Watched(dict):  # type: ignore[type-arg]
        def get(self, key: bytes, default: object = None) -> object:
            lookups.append(key)
            return super().get(key, default)

    callers = Callers([], b"secret", required=True)
    callers._by_hash = Watched()
    for key in ("sk-a", "sk-b"):
        assert callers.find({"Authorization": f"Bearer {key}"}, 0.0) is None
    assert {len(key) for key in lookups} == {32}
    assert len(set(lookups)) == len({key[:4] for key in lookups}) == 2


@pytest.mark.parametrize("umask", [0o000, 0o022])
async def test_files_that_hold_what_is_not_everybodys_are_not_everybodys(
    make_gateway: MakeGateway, backend: ScriptedBackend, tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        config = '[server]\nport = 0\nstore = "t.db"\n[telemetry]\nrecords = "file:r.jsonl"\n'
        gateway = await make_gateway(backend, config=config)
        await gateway.ask(CHAT, chat())
        await gateway.app.keys.turn()
        found = modes(tmp_path)
        assert found.keys() >= {"t.db", "r.jsonl"}
        for name, mode in found.items():
            assert not mode & (0o077 if ".db" in name else 0o007), name
    finally:
        os.umask(before)
