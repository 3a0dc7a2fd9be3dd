"""Another policy while requests run: checked first, swapped at once, refused whole; nothing that runs notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from proxy.app import App
from proxy.config import load
from proxy.errors import Outcome
from tests.client import ask
from tests.fake_clock import FakeClock
from tests.proxy.conftest import Gateway, config_text
from tests.proxy.scenes import QUIET, eventually
from tests.scripted import ScriptedBackend, Stall, after, chat_json, chat_stream

HERE = {"host": "localhost"}
LEAST = '[policy]\nname = "least_load"\n'


class File:
    """A configuration in a file, and the gateway that read it."""

    def __init__(self, path: Path, backend: ScriptedBackend) -> None:
        self.path = path
        self._backend = backend
        self.gateway: Gateway

    def write(self, more: str, per_backend: str = "") -> None:
        self.path.write_text(config_text([self._backend.url], more, {"a": per_backend}), "utf-8")

    async def start(self, more: str, clock: FakeClock | None = None) -> Gateway:
        self.write(more)
        app = App(load(self.path, {}), clock, Random(7))
        self.gateway = Gateway(app)
        await app.start()
        return self.gateway


@pytest.fixture
async def file(tmp_path: Path, backend: ScriptedBackend) -> AsyncIterator[File]:
    made = File(tmp_path / "config.toml", backend)
    yield made
    await made.gateway.app.close()
    made.gateway.assert_idle()


async def test_a_new_policy_is_in_force_at_once_and_named(file: File) -> None:
    gateway = await file.start(QUIET)
    before = gateway.app.config.policy_digest
    assert (await gateway.chat()).status == 200
    file.write(QUIET + LEAST)
    done = gateway.app.reloader.reload("test")
    assert (done.changed, done.problems) == (("policy",), ())
    assert done.policy != before
    response = await gateway.chat(headers={"x-session-id": "s"})
    assert response.status == 200
    records = [record for record, _ in gateway.records.closed]
    assert [record.policy for record in records] == [before, done.policy]
    assert f'digest="{done.policy}",name="least_load"' in gateway.app.metrics.render()[0].decode()
    assert gateway.app.gate._router.ranking.name == "least_load"


@pytest.mark.parametrize(
    ("more", "per_backend", "problem"),
    [
        ("[policy.router]\nkv_limit = 7\n", "", "kv_limit must be above 0"),
        ("[policy\n", "", "config.toml"),
        ('[policy]\nfile = "none.py"\n', "", "cannot be read"),
        ("[policy]\nunknown = 1\n", "", "unknown key"),
        ("[telemetry]\nrecords = 'stdout'\n", "", "telemetry.records: changed, and that takes a restart"),
        (LEAST, "url = 'twice'", "Cannot overwrite a value"),
        ("[server]\nport = 0\nbacklog = 7\n", "", "server.backlog: changed, and that takes a restart"),
    ],
)
async def test_a_file_with_a_problem_changes_nothing(
    file: File, more: str, per_backend: str, problem: str
) -> None:
    gateway = await file.start(QUIET)
    before = gateway.app.config
    file.write(QUIET + more, per_backend)
    done = gateway.app.reloader.reload("test")
    assert any(problem in line for line in done.problems), done.problems
    assert done.changed == ()
    assert gateway.app.config is gateway.app.reloader.config is before
    assert (await gateway.chat()).status == 200
    file.write(QUIET + LEAST)
    assert gateway.app.reloader.reload("mended").changed == ("policy",)


async def test_a_missing_file_changes_nothing(file: File) -> None:
    gateway = await file.start(QUIET)
    file.path.unlink()
    assert gateway.app.reloader.reload("test").problems
    assert (await gateway.chat()).status == 200


async def test_what_runs_and_what_waits_goes_on(file: File, backend: ScriptedBackend) -> None:
    """A stream in the middle, a request in line; the model that they asked for is gone from the new file."""
    backend.answer(after(chat_stream(), 2, Stall()))
    gateway = await file.start(QUIET + "[models.tiny]\n[models.old]\nalias_of = 'tiny'\n")
    running = asyncio.ensure_future(gateway.chat(stream=True, model="old"))
    await backend.received(0)
    file.write(QUIET + "[models.tiny]\n[tiers.new]\nmax_kl_bits = 1.0\n" + LEAST)
    assert gateway.app.reloader.reload("test").problems == ()
    assert (await gateway.chat(model="old")).status == 404
    backend.release()
    response = await running
    assert (response.status, response.events[-1]) == (200, "[DONE]")
    await gateway.records.get(1)
    assert {record.outcome for record, _ in gateway.records.closed} == {Outcome.OK, Outcome.BAD_REQUEST}


async def test_who_waits_is_served_under_the_new_policy(file: File, backend: ScriptedBackend) -> None:
    gateway = await file.start(QUIET)
    backend.answer([Stall(), *chat_json()])
    running = asyncio.ensure_future(gateway.chat())
    await backend.received(0)
    # A policy under which nothing waits behind a prefill.
    queued = asyncio.ensure_future(gateway.chat(headers={"x-tierline-deadline": "50"}))
    await eventually(lambda: len(gateway.app.gateway.exchanges) == 2, "two requests")
    file.write(QUIET + "[policy.gate]\nahead_seconds = 1000.0\n")
    assert gateway.app.reloader.reload("test").changed == ("policy",)
    await backend.received(1)
    assert (await queued).status == 200
    backend.release()
    assert (await running).status == 200


async def test_what_was_learned_stays(file: File) -> None:
    gateway = await file.start(QUIET)
    for _ in range(6):
        await gateway.chat("some words to count")
    learned = gateway.app.gateway.classifier.calibrations["tiny"]
    file.write(QUIET + LEAST)
    gateway.app.reloader.reload("test")
    assert gateway.app.gateway.classifier.calibrations["tiny"] is learned


async def test_a_changed_file_is_seen(file: File, tmp_path: Path) -> None:
    clock = FakeClock()
    watch = "[server]\nport = 0\nwatch_config = 2.0\n"
    own = tmp_path / "mine.py"
    own.write_text("def score(facts, backend):\n    return {'x': 1.0}\n")
    mine = '[policy]\nfile = "mine.py"\n'
    gateway = await file.start(QUIET + watch + mine, clock)
    before = gateway.app.config.policy_digest
    own.write_text("def score(facts, backend):\n    return {'x': 2.0}\n# changed\n")
    await eventually(lambda: clock.pending > 1, "the watcher")
    clock.advance(2.1)
    await eventually(lambda: gateway.app.config.policy_digest != before, "the new policy")
    between = gateway.app.config.policy_digest
    own.write_text("def score(facts, backend):\n    return 7\n")
    clock.advance(2.1)
    await asyncio.sleep(0.01)
    assert gateway.app.config.policy_digest == between, "the broken one is not taken"
    assert (await gateway.chat()).headers["x-tierline-reason"] in ("only", "policy")


async def test_the_admin_listener_reloads_and_says_what_is_wrong(file: File) -> None:
    gateway = await file.start(QUIET + "[admin]\nport = 0\n")
    port = gateway.app.admin_port
    file.write(QUIET + "[admin]\nport = 0\n" + LEAST)
    response = await ask(port, "/admin/reload", {}, method="POST", headers=HERE)
    assert response.status == 200
    assert response.json == {"policy": gateway.app.config.policy_digest, "changed": ["policy"]}
    shown = (await ask(port, "/admin/config", headers=HERE)).json
    assert (shown["policy"]["name"], shown["policy_digest"]) == ("least_load", response.json["policy"])
    file.write(QUIET + "[admin]\nport = 0\n[policy]\nname = 'nope'\n")
    response = await ask(port, "/admin/reload", {}, method="POST", headers=HERE)
    assert (response.status, response.json["error"]["code"]) == (409, "config_refused")
    assert "policy.name" in response.json["error"]["message"]


# -- explain --------------------------------------------------------------------------------------------------


async def test_a_request_is_explained_by_its_id(file: File) -> None:
    gateway = await file.start(QUIET + "[admin]\nport = 0\n")
    response = await gateway.chat("hello", headers={"x-request-id": "mine-1"})
    story = (await ask(gateway.app.admin_port, "/admin/explain/mine-1", headers=HERE)).json
    (attempt,) = story["attempts"]
    assert (attempt["backend"], attempt["reason"]) == ("a", response.headers["x-tierline-reason"])
    (backend,) = attempt["backends"]
    assert {"queue", "prefill", "decode", "harm", "demotion"} == set(backend["terms"])
    assert backend["total"] == pytest.approx(sum(backend["terms"].values()), rel=0.01)
    assert attempt["unit"] == "s"
    gateway.app.pool.set_draining("a", True)
    await gateway.chat(headers={"x-request-id": "mine-2"})
    (attempt,) = (await ask(gateway.app.admin_port, "/admin/explain/mine-2", headers=HERE)).json["attempts"]
    assert attempt["backends"][0]["dropped"] == "draining"
    missing = await ask(gateway.app.admin_port, "/admin/explain/other", headers=HERE)
    assert (missing.status, missing.json["error"]["code"]) == (404, "request_not_found")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_header_explains_to_who_has_the_admin_key(
    tmp_path: Path, backend: ScriptedBackend, stream: bool
) -> None:
    path = tmp_path / "config.toml"
    admin = '[admin]\nport = 0\nkey = "env:ADMIN"\n'
    path.write_text(config_text([backend.url], QUIET + admin, {}), "utf-8")
    gateway = Gateway(App(load(path, {"ADMIN": "sk-admin"}), None, Random(7)))
    await gateway.app.start()
    try:
        asked = {"x-tierline-explain": "1", "x-tierline-admin-key": "sk-admin"}
        response = await gateway.chat(headers=asked, stream=stream)
        (attempt,) = json.loads(response.headers["x-tierline-explain"])
        assert attempt["backend"] == "a"
        own = {"x-tierline-explain": "1", "authorization": "Bearer sk-admin"}
        assert "x-tierline-explain" in (await gateway.chat(headers=own, stream=stream)).headers
        assert not any(name.lower() == "authorization" for name, _ in backend.requests[-1].headers)
        for headers in (
            {"x-tierline-explain": "1"},
            {**asked, "x-tierline-admin-key": "sk-other"},
            {**asked, "x-tierline-explain": "0"},
        ):
            response = await gateway.chat(headers=headers, stream=stream)
            assert "x-tierline-explain" not in response.headers
        assert all("admin" not in name.lower() for r in backend.requests for name, _ in r.headers)
    finally:
        await gateway.app.close()
