"""The admin API on a gateway that runs: what it changes is in force at once, logged with who, and says how long it lasts."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from proxy.adminapi.routes import ROUTES
from proxy.app import App
from proxy.config import load
from proxy.kept import with_kept
from proxy.keystore import digest
from tests.client import Response, ask
from tests.proxy.conftest import Gateway, config_text
from tests.proxy.scenes import LEAST_LOAD, QUIET, eventually
from tests.scripted import ScriptedBackend, Stall, after, chat_stream

ADMIN = f"""
[admin]
port = 0
[[admin.keys]]
name = "anna"
sha256 = "{digest("sk-anna")}"
[[admin.keys]]
name = "watcher"
sha256 = "{digest("sk-watch")}"
role = "read"
"""
ANNA, WATCHER = ({"authorization": f"Bearer {key}"} for key in ("sk-anna", "sk-watch"))
PLAIN = QUIET + LEAST_LOAD + ADMIN


class Admin:
    """A gateway, and an operator who asks it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.toml"
        self.gateways: list[Gateway] = []

    @property
    def gateway(self) -> Gateway:
        return self.gateways[-1]

    async def start(self, *urls: str, more: str = PLAIN) -> Gateway:
        self.path.write_text(config_text(list(urls), more, {}), "utf-8")
        return await self.again()

    async def again(self) -> Gateway:
        self.gateways.append(Gateway(App(with_kept(load(self.path, {})), None, Random(7))))
        await self.gateway.app.start()
        return self.gateway

    async def ask(
        self, method: str, path: str, body: object = None, *, key: dict[str, str] = ANNA
    ) -> Response:
        headers = {"host": "127.0.0.1", **key}
        return await ask(self.gateway.app.admin_port, path, body, method=method, headers=headers)

    async def done(self, method: str, path: str, body: object = None, status: int = 200) -> Any:
        response = await self.ask(method, path, body)
        assert response.status == status, response.body
        return response.json

    async def refused(self, method: str, path: str, body: object = None, status: int = 409) -> dict[str, Any]:
        response = await self.ask(method, path, body)
        assert response.status == status, response.body
        error: dict[str, Any] = response.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[Admin]:
    made = Admin(tmp_path)
    yield made
    for gateway in made.gateways:
        await gateway.app.close()
        gateway.assert_idle()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tierline.admin"]


# -- backends -------------------------------------------------------------------------------------------------


async def test_a_backend_is_added_serves_and_is_removed_again(
    admin: Admin, backend: ScriptedBackend, other: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await admin.start(backend.url)
    table = {"name": "b", "url": other.url, "limits": {"max_in_flight": 7}}
    made = await admin.done("POST", "/admin/backends", table, 201)
    assert (made["name"], made["max_in_flight"], made["lasts"]) == (
        "b",
        7,
        "until the gateway is started again",
    )
    await eventually(lambda: gateway.app.pool.backends["b"].state == "healthy", "its first probe")
    await admin.done("POST", "/admin/backends/a/drain")
    assert (await gateway.chat()).headers["x-tierline-backend"] == "b"
    changed = await admin.done("PATCH", "/admin/backends/b", {"limits": {"max_in_flight": 9}})
    assert changed["max_in_flight"] == 9
    assert (await admin.done("GET", "/admin/backends/b"))["configured"]["limits"] == {"max_in_flight": 9}
    await admin.done("POST", "/admin/backends/a/undrain")
    gone = await admin.done("DELETE", "/admin/backends/b")
    assert gone["changed"] == ["backends"]
    assert not gateway.app.reloader.overlay, "the file again"
    await eventually(lambda: list(gateway.app.pool.backends) == ["a"], "the end of b")
    assert logged(caplog) == [
        "backend b is added: backends, by anna from 127.0.0.1",
        "backend a: draining False -> True, by anna from 127.0.0.1",
        "backend b is changed: backends, by anna from 127.0.0.1",
        "backend a: draining True -> False, by anna from 127.0.0.1",
        "backend b is removed: backends, by anna from 127.0.0.1",
    ]


async def test_a_removed_backend_of_the_file_finishes_its_stream_and_stays_away_after_a_reload(
    admin: Admin, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await admin.start(backend.url, other.url)
    backend.answer(after(chat_stream("to the end"), 2, Stall()))
    running = asyncio.ensure_future(gateway.chat(stream=True))
    await backend.received(0)
    await admin.done("DELETE", "/admin/backends/a")
    (shown,) = [row for row in (await admin.done("GET", "/admin/backends"))["backends"] if row["name"] == "a"]
    assert (shown["state"], shown["in_flight"]) == ("leaving", 1)
    assert (await admin.done("POST", "/admin/reload"))["changed"] == []
    backend.release()
    assert (await running).text == "to the end"
    await eventually(lambda: list(gateway.app.pool.backends) == ["b"], "the end of a")
    assert (await admin.done("GET", "/admin/changes"))["backends"] == {"a": None}
    assert (await admin.done("DELETE", "/admin/changes"))["changed"] == ["backends"]
    assert list(gateway.app.pool.backends) == ["a", "b"]


async def test_models_that_list_their_backends_follow(
    admin: Admin, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await admin.start(backend.url, more=PLAIN + "[models.tiny]\nbackends = ['a']\n")
    table = {"name": "b", "url": other.url, "models": ["tiny"]}
    await admin.done("POST", "/admin/backends", table, 201)
    assert gateway.app.config.routes["tiny"].backends == ("a", "b")
    await admin.done("DELETE", "/admin/backends/a")
    assert gateway.app.config.routes["tiny"].backends == ("b",)
    error = await admin.refused("DELETE", "/admin/backends/b")
    assert error["code"] == "config_refused"
    assert gateway.app.config.routes["tiny"].backends == ("b",), "nothing changed"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"name": "b"}, 400, "url"),
        ({"name": "b", "url": "ftp://x"}, 409, "url"),
        (
            {"name": "b", "url": "http://127.0.0.1:1", "limits": {"max_in_flight": 0}},
            400,
            "limits.max_in_flight",
        ),
        ({"name": "b", "url": "http://127.0.0.1:1", "colour": "red"}, 400, "colour"),
        ({"name": "b", "url": "http://127.0.0.1:1", "models": ["nope"]}, 409, "models"),
        ({"name": "a", "url": "http://127.0.0.1:1"}, 409, "name"),
        ({"name": "b", "url": "http://127.0.0.1:1", "profile": "nope"}, 409, "backends[1].profile"),
        ({"name": "b", "url": "http://127.0.0.1:1", "key": "env:AWS_SECRET_ACCESS_KEY"}, 409, "key"),
        ({"name": "b", "url": "http://127.0.0.1:1", "key": "file:/etc/shadow"}, 409, "key"),
        ({"name": "b", "url": "https://127.0.0.1:1", "tls": {"ca": "/etc/passwd"}}, 409, "tls.ca"),
        ({"name": "b", "url": "http://127.0.0.1:1", "profile": "/etc/x.toml"}, 409, "profile"),
        ([], 400, None),
    ],
)
async def test_what_is_wrong_with_a_backend_is_named_and_nothing_changes(
    admin: Admin, backend: ScriptedBackend, body: object, status: int, param: str | None
) -> None:
    gateway = await admin.start(backend.url)
    before = gateway.app.config
    error = await admin.refused("POST", "/admin/backends", body, status)
    assert error["param"] == param, error
    assert gateway.app.config is before


async def test_changes_are_kept_over_a_restart_where_a_file_for_them_is_named(
    admin: Admin, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    more = QUIET + ADMIN + LEAST_LOAD + '[server]\nport = 0\nstate = "state.json"\n'
    gateway = await admin.start(backend.url, more=more)
    made = await admin.done("POST", "/admin/backends", {"name": "b", "url": other.url}, 201)
    assert made["lasts"] == "over restarts, in server.state"
    await admin.done("POST", "/admin/backends/a/drain")
    await gateway.app.close()
    gateway = await admin.again()
    states = {name: one.state for name, one in gateway.app.pool.backends.items()}
    assert states == {"a": "draining", "b": "healthy"}
    admin.path.write_text(
        config_text([backend.url, other.url], more, {}), "utf-8"
    )  # two of one URL, with b's
    (admin.path.parent / "state.json").write_text("{")
    await gateway.app.close()
    gateway = await admin.again()
    assert gateway.app.pool.backends["a"].state == "healthy", "a broken file is left out"


# -- policy ---------------------------------------------------------------------------------------------------


async def test_a_policy_is_checked_activated_and_taken_back(
    admin: Admin, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await admin.start(backend.url)
    first = gateway.app.config.policy_digest
    tables = {"policy": {"name": "round_robin"}, "tiers": {"quick": {"max_kl_bits": 0.5}}}
    checked = await admin.done("POST", "/admin/policy/check", tables)
    assert checked["changed"] == ["tiers", "policy"]
    assert gateway.app.config.policy_digest == checked["in_force"] == first
    done = await admin.done("POST", "/admin/policy/activate", tables)
    assert done["policy"] == checked["policy"] == gateway.app.config.policy_digest
    shown = await admin.done("GET", "/admin/policy")
    assert (shown["name"], shown["from"], shown["tables"]) == ("round_robin", "the admin API", tables)
    assert [one["policy"] for one in shown["before"]] == [first]
    assert shown["by"] == f"policy {checked['policy']}, by anna from 127.0.0.1"
    assert (await admin.done("POST", "/admin/reload"))["policy"] == checked["policy"], "it stays"
    back = await admin.done("POST", "/admin/policy/rollback")
    assert back["policy"] == first
    assert gateway.app.reloader.overlay.policy is None, "the file's own again"
    again = await admin.done("POST", "/admin/policy/rollback", {"digest": checked["policy"]})
    assert again["policy"] == checked["policy"]
    assert (await admin.done("POST", "/admin/policy/revert"))["policy"] == first
    assert len(logged(caplog)) == 4


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"policy": {"name": "nope"}}, 400, "policy.name"),
        ({"policy": {"router": {"kv_limit": 7}}}, 409, "policy.router"),
        ({"policy": {"default_tier": "nope"}}, 409, "policy.default_tier"),
        ({"policy": {"file": "mine.py"}}, 409, "policy.file"),
        ({"tiers": {"exact": {"reference": False}}}, 409, "tiers.exact.reference"),
    ],
)
@pytest.mark.parametrize("path", ["check", "activate"])
async def test_what_is_wrong_with_a_policy_is_named(
    admin: Admin, backend: ScriptedBackend, path: str, body: object, status: int, param: str
) -> None:
    gateway = await admin.start(backend.url)
    (admin.path.parent / "mine.py").write_text("raise SystemExit('this was run')")
    before = gateway.app.config
    error = await admin.refused("POST", f"/admin/policy/{path}", body, status)
    assert error["param"] == param, error
    assert gateway.app.config is before


async def test_going_back_to_what_never_was_is_refused(admin: Admin, backend: ScriptedBackend) -> None:
    await admin.start(backend.url)
    assert (await admin.refused("POST", "/admin/policy/rollback"))["code"] == "policy_not_found"
    error = await admin.refused("POST", "/admin/policy/rollback", {"digest": "0" * 12})
    assert error["param"] == "digest"


async def test_a_policy_is_replayed_against_the_recorded_traffic_before_it_is_activated(
    admin: Admin, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    more = QUIET + ADMIN + '[telemetry]\nrecords = "file:records.jsonl"\ndecisions = true\n'
    admin.path.write_text(config_text([backend.url, other.url], more, {}), "utf-8")
    app = App(load(admin.path, {}), None, Random(7))
    recorder = app.recorder
    gateway = Gateway(app)
    app.gateway.recorder = recorder
    admin.gateways.append(gateway)
    await app.start()
    for number in range(6):
        assert (await gateway.chat(f"number {number}")).status == 200
    records = admin.path.parent / "records.jsonl"
    await eventually(lambda: records.exists() and records.read_text().count("\n") == 6, "six records")
    body = {"policy": {"name": "least_load"}, "decisions_only": True, "margin_percent": 1000}
    report = await admin.done("POST", "/admin/policy/replay", body)
    assert report["passed"], report
    assert any("6 decisions made again" in line for line in report["report"]), report
    done = await admin.done("POST", "/admin/policy/activate", {**body, "replay": True})
    assert done["replay"]["passed"]
    assert app.config.policy.name == "least_load"


async def test_without_records_nothing_is_replayed(admin: Admin, backend: ScriptedBackend) -> None:
    gateway = await admin.start(backend.url)
    before = gateway.app.config
    body = {"policy": {"name": "round_robin"}, "replay": True}
    error = await admin.refused("POST", "/admin/policy/activate", body)
    assert error["param"] == "telemetry.records"
    assert gateway.app.config is before


# -- keys and limits ------------------------------------------------------------------------------------------


async def test_a_key_is_made_limited_rotated_and_revoked_and_each_is_in_force_at_once(
    admin: Admin, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await admin.start(backend.url, more=PLAIN + '[server]\nport = 0\nstore = "keys.db"\n')
    caplog.set_level(logging.INFO)

    async def status(key: str) -> int:
        return (await gateway.chat(headers={"authorization": f"Bearer {key}"})).status

    made = await admin.done("POST", "/admin/keys", {"name": "app", "models": ["tiny"]}, 201)
    first = made["secret"]
    assert (await status(first), made["lasts"]) == (200, "over restarts, in server.store")
    account = f"key:{made['key']}"
    await admin.done("PUT", f"/admin/limits/{account}", {"requests_per_minute": 2})
    assert [await status(first) for _ in range(3)] == [200, 200, 429]
    limited = await admin.done("GET", f"/admin/limits/{account}")
    assert (limited["limits"], limited["used"]) == ({"requests_per_minute": 2}, {"requests_per_minute": 2})
    assert limited in (await admin.done("GET", "/admin/limits"))["accounts"]
    await admin.done("PATCH", "/admin/keys/app", {"limits": None})
    assert await status(first) == 200
    rotated = await admin.done("POST", "/admin/keys/app/rotate", {"grace_seconds": 60})
    assert [await status(key) for key in (first, rotated["secret"])] == [200, 200]
    listed = (await admin.done("GET", "/admin/keys"))["keys"]
    assert [(row["name"], row["state"]) for row in listed] == [("app", "rotating")]
    await admin.done("DELETE", "/admin/keys/app")
    assert [await status(key) for key in (first, rotated["secret"])] == [401, 401]
    assert (await admin.refused("DELETE", "/admin/keys/app", status=404))["param"] == "key"
    assert all(line.endswith("by anna from 127.0.0.1") for line in logged(caplog))
    assert len(logged(caplog)) == 5
    for secret in (first, rotated["secret"]):
        assert secret not in caplog.text
        assert secret not in json.dumps(listed)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/admin/keys", {"name": "app", "models": ["nope"]}, 409, "models[0]"),
        ("POST", "/admin/keys", {"name": "app", "priority": 99}, 400, "priority"),
        ("POST", "/admin/keys", {"name": "app", "expires": "2001-01-01"}, 409, "expires"),
        ("PATCH", "/admin/keys/nobody", {"priority": 1}, 404, "key"),
        ("PUT", "/admin/limits/model:tiny", {}, 409, "account"),
        ("GET", "/admin/limits/key:nobody", None, 404, "account"),
    ],
)
async def test_what_is_wrong_with_a_key_is_named(
    admin: Admin, backend: ScriptedBackend, method: str, path: str, body: object, status: int, param: str
) -> None:
    await admin.start(backend.url, more=PLAIN + '[server]\nport = 0\nstore = "keys.db"\n')
    assert (await admin.refused(method, path, body, status))["param"] == param


async def test_without_a_store_there_are_no_keys_to_change(admin: Admin, backend: ScriptedBackend) -> None:
    await admin.start(backend.url)
    assert (await admin.refused("GET", "/admin/keys"))["code"] == "no_key_store"


# -- who may --------------------------------------------------------------------------------------------------

CHANGES = [route for route in ROUTES if route.changes]


@pytest.mark.parametrize("route", CHANGES, ids=lambda route: f"{route.method} {route.path}")
async def test_a_key_that_may_only_read_changes_nothing(
    admin: Admin, backend: ScriptedBackend, route: Any
) -> None:
    gateway = await admin.start(backend.url)
    before = gateway.app.config
    path = route.path.replace("{name}", "a").replace("{key}", "app").replace("{account}", "key:app")
    response = await admin.ask(route.method, path, {}, key=WATCHER)
    assert (response.status, response.json["error"]["code"]) == (403, "read_only")
    assert gateway.app.config is before
    assert (await admin.ask("GET", "/admin/config", key=WATCHER)).status == 200


async def test_every_route_that_is_no_get_changes_or_only_asks(admin: Admin) -> None:
    asking = {"/admin/policy/check", "/admin/policy/replay"}
    assert {route.path for route in ROUTES if route.method != "GET" and not route.changes} == asking
    assert not any(route.changes for route in ROUTES if route.method == "GET")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_nothing_of_it_answers_on_the_data_listener(
    admin: Admin, backend: ScriptedBackend, route: Any
) -> None:
    gateway = await admin.start(backend.url)
    if not route.path.startswith("/admin"):
        return
    path = route.path.replace("{name}", "a").replace("{key}", "app")
    response = await gateway.ask(path, b"{}", method=route.method, headers=ANNA)
    assert response.status == 404
    assert (await gateway.ask("/openapi.json", headers=ANNA)).status == 404


async def test_the_admin_keys_change_without_a_restart(admin: Admin, backend: ScriptedBackend) -> None:
    await admin.start(backend.url)
    text = admin.path.read_text().replace(digest("sk-anna"), digest("sk-new"))
    admin.path.write_text(text)
    await admin.done("POST", "/admin/reload")
    assert (await admin.ask("GET", "/admin/config")).status == 401
    assert (await admin.ask("GET", "/admin/config", key={"authorization": "Bearer sk-new"})).status == 200
