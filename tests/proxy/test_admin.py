"""The admin listener: its own key, one error shape, every change logged with who asked."""

from __future__ import annotations

import json
import logging

import pytest
from aiohttp.test_utils import TestClient, TestServer

from proxy import __version__
from proxy.adminapi import Gear, admin_app
from proxy.config import Config, loads
from proxy.explain import Memory
from proxy.reload import Reloader
from tests.fake_clock import FakeClock

CONFIG = """
[server]
keys = [{ name = "app", key = "env:APP_KEY" }]
[admin]
%s
[[backends]]
name = "fp8"
url = "http://127.0.0.1:8001"
key = "env:BACKEND_KEY"
[[backends]]
name = "bf16"
url = "http://127.0.0.1:8002"
quality.reference = true
[models.qwen]
"""
ENV = {"APP_KEY": "sk-app-secret", "ADMIN_KEY": "sk-admin-secret", "BACKEND_KEY": "sk-backend-secret"}
KEY = {"Authorization": "Bearer sk-admin-secret"}


class Pool:
    """Two backends; remembers nothing but draining."""

    def __init__(self) -> None:
        self.draining = {"fp8": False, "bf16": False}
        self.broken = False

    def snapshot(self) -> list[dict[str, object]]:
        if self.broken:
            raise RuntimeError("secret detail")
        return [
            {
                "name": name,
                "state": "draining" if draining else "healthy",
                "draining": draining,
                "in_flight": 1,
            }
            for name, draining in self.draining.items()
        ]

    def set_draining(self, name: str, draining: bool) -> None:
        if name not in self.draining:
            raise KeyError(name)
        self.draining[name] = draining


class Exposition:
    def render(self, accept: str = "") -> tuple[bytes, str]:
        return b"tierline_build_info 1\n", "text/plain; version=0.0.4; charset=utf-8"


def config(admin: str = 'key = "env:ADMIN_KEY"') -> Config:
    return loads(CONFIG % admin, ENV)


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
async def make(pool):
    clients = []

    async def make(admin: str = 'key = "env:ADMIN_KEY"') -> TestClient:
        reloader = Reloader(config(admin), lambda config: None, FakeClock())
        gear = Gear(pool, Exposition(), reloader, Memory(), FakeClock())
        client = TestClient(TestServer(admin_app(gear)))
        await client.start_server()
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.close()


async def test_backends_are_the_view_that_routing_has(make, pool):
    client = await make()
    response = await client.get("/admin/backends", headers=KEY)
    assert response.status == 200
    assert await response.json() == {"backends": pool.snapshot()}


async def test_a_backend_is_drained_and_taken_back_and_the_log_says_who_did_it(make, pool, caplog):
    client = await make()
    caplog.set_level(logging.INFO, "tierline.admin")
    response = await client.post("/admin/backends/fp8/drain", headers=KEY)
    assert response.status == 200
    assert (await response.json())["state"] == "draining"
    assert pool.draining == {"fp8": True, "bf16": False}
    response = await client.post("/admin/backends/fp8/undrain", headers=KEY)
    assert pool.draining == {"fp8": False, "bf16": False}
    assert [record.getMessage() for record in caplog.records] == [
        "backend fp8: draining False -> True, by admin from 127.0.0.1",
        "backend fp8: draining True -> False, by admin from 127.0.0.1",
    ]


async def test_an_unknown_backend_is_a_404_and_changes_nothing(make, pool, caplog):
    client = await make()
    response = await client.post("/admin/backends/nope%0Ax/drain", headers=KEY)
    assert response.status == 404
    error = (await response.json())["error"]
    assert error == {
        "message": "No backend is named 'nope\\nx'.",
        "type": "not_found_error",
        "param": "name",
        "code": "backend_not_found",
    }
    assert not any(pool.draining.values())
    assert not caplog.records


async def test_the_configuration_is_shown_without_secrets(make):
    client = await make()
    text = await (await client.get("/admin/config", headers=KEY)).text()
    assert json.loads(text)["backends"][0]["name"] == "fp8"
    for secret in ENV.values():
        assert secret not in text


WANT_KEY = [
    ("GET", "/admin/backends"),
    ("GET", "/admin/config"),
    ("POST", "/admin/backends/fp8/drain"),
    ("POST", "/admin/backends/fp8/undrain"),
    ("GET", "/metrics"),
    ("GET", "/admin/nothing"),
    ("GET", "/admin/backends/"),
]


@pytest.mark.parametrize(("method", "path"), WANT_KEY)
@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer sk-app-secret"}, {"x-api-key": "sk-backend-secret"}], ids=str
)
async def test_nothing_opens_without_the_admin_key_and_no_other_key_does(make, pool, method, path, headers):
    client = await make('key = "env:ADMIN_KEY"\nmetrics_on = "admin"')
    response = await client.request(method, path, headers=headers)
    assert response.status == 401
    assert (await response.json())["error"]["code"] == "invalid_api_key"
    assert not any(pool.draining.values())


@pytest.mark.parametrize(
    ("path", "body"), [("/health", {"status": "ok"}), ("/version", {"version": __version__})]
)
async def test_health_and_version_need_no_key(make, path, body):
    response = await (await make()).get(path)
    assert (response.status, await response.json()) == (200, body)


async def test_without_a_configured_key_the_loopback_listener_is_open(make, caplog):
    client = await make("")
    caplog.set_level(logging.INFO, "tierline.admin")
    assert (await client.get("/admin/backends")).status == 200
    await client.post("/admin/backends/bf16/drain")
    assert caplog.records[-1].getMessage().endswith("by without key from 127.0.0.1")


@pytest.mark.parametrize(("where", "status"), [("data", 404), ("admin", 200), ("both", 200)])
async def test_metrics_are_where_the_configuration_says(make, where, status):
    client = await make(f'key = "env:ADMIN_KEY"\nmetrics_on = "{where}"')
    response = await client.get("/metrics", headers=KEY)
    assert response.status == status
    if status == 200:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert await response.read() == b"tierline_build_info 1\n"


async def test_unknown_paths_and_methods_have_openais_error_shape(make):
    client = await make()
    response = await client.get("/admin/nothing", headers=KEY)
    assert response.status == 404
    assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
    response = await client.get("/admin/backends/fp8/drain", headers=KEY)
    assert (response.status, response.headers["Allow"]) == (405, "POST")


async def test_a_fault_of_ours_is_a_500_that_tells_nothing_and_a_log_that_tells_all(make, pool, caplog):
    client = await make()
    pool.broken = True
    response = await client.get("/admin/backends", headers=KEY)
    assert response.status == 500
    assert (await response.json())["error"]["message"] == "internal error"
    assert "secret detail" in caplog.text
