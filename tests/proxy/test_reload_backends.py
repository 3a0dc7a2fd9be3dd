"""Backends come, go and change while requests run: nothing is cut, nothing new goes where none should, nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from policies.breaker import HealthState
from proxy.app import App
from proxy.config import load
from proxy.errors import Outcome
from proxy.reload import Reloaded
from tests.fake_clock import FakeClock
from tests.proxy.conftest import Gateway, config_text
from tests.proxy.scenes import LEAST_LOAD, QUIET, eventually, polled
from tests.scripted import (
    Ending,
    ScriptedBackend,
    Stall,
    after,
    chat_json,
    chat_stream,
    closed_port,
    error_json,
)

PLAIN = QUIET + LEAST_LOAD
ONE = "limits.max_in_flight = 1"


class Fleet:
    """A gateway whose file names other backends whenever a test says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gateway: Gateway

    def write(self, *urls: str, more: str = PLAIN, **per_backend: str) -> None:
        self.path.write_text(config_text(list(urls), more, per_backend), "utf-8")

    async def start(
        self, *urls: str, more: str = PLAIN, clock: FakeClock | None = None, **per_backend: str
    ) -> Gateway:
        self.write(*urls, more=more, **per_backend)
        self.gateway = Gateway(App(load(self.path, {}), clock, Random(7)))
        await self.gateway.app.start()
        return self.gateway

    def reload(self, *urls: str, more: str = PLAIN, **per_backend: str) -> Reloaded:
        self.write(*urls, more=more, **per_backend)
        return self.gateway.app.reloader.reload("test")

    def state(self, name: str) -> str:
        return self.gateway.app.pool.backends[name].state

    def known(self) -> list[str]:
        return list(self.gateway.app.pool.backends)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path / "config.toml")
    yield made
    await made.gateway.app.close()
    made.gateway.assert_idle()


def by_name(name: str, url: str, more: str = "") -> str:
    return f'[[backends]]\nname = "{name}"\nurl = "{url}"\n{more}\n'


# -- removed --------------------------------------------------------------------------------------------------


async def test_one_that_is_removed_ends_what_it_has_begun_and_gets_nothing_new(
    fleet: Fleet, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.answer(after(chat_stream("to the very end"), 2, Stall()))
    gateway = await fleet.start(backend.url)
    running = asyncio.ensure_future(gateway.chat(stream=True))
    await backend.received(0)
    fleet.path.write_text(config_text([], PLAIN, {}) + by_name("b", other.url), "utf-8")
    assert gateway.app.reloader.reload("test").changed == ("backends",)
    assert (fleet.known(), fleet.state("a")) == (["b", "a"], "leaving")
    for _ in range(5):
        assert (await gateway.chat()).headers["x-tierline-backend"] == "b"
    backend.release()
    response = await running
    assert (response.text, response.events[-1]) == ("to the very end", "[DONE]")
    await eventually(lambda: fleet.known() == ["b"], "the end of a")
    assert "a" not in gateway.app.health._watches
    assert await backend.closed(0) is Ending.PEER_CLOSED
    await gateway.ended(*[Outcome.OK] * 6)


async def test_one_without_requests_is_gone_at_once_with_its_connections_and_its_poller(
    fleet: Fleet, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await fleet.start(backend.url, other.url)
    for _ in range(4):
        await gateway.chat()
    fleet.reload(backend.url)
    await eventually(lambda: fleet.known() == ["a"], "the end of b")
    await other.until(lambda: not other.open_connections, "the end of its connections")
    assert gateway.app.pool.fleet.names() == ("a",)
    assert list(gateway.app.health._watches) == ["a"]
    text = gateway.app.metrics.render()[0].decode()
    assert 'tierline_backend_state{backend="b"' not in text
    (counted,) = [
        row for row in text.splitlines() if row.startswith("tierline_requests_total") and '"b"' in row
    ]
    assert counted.endswith(f" {len(other.requests)}.0"), "what it served is still counted"


async def test_who_waits_for_nobody_but_it_is_turned_away_in_words(
    fleet: Fleet, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    models = "[models.tiny]\nbackends = ['a']\n[models.more]\nbackends = ['b']\n"
    backend.answer([Stall(), *chat_json()])
    gateway = await fleet.start(backend.url, other.url, more=QUIET + models, a=ONE)
    running = asyncio.ensure_future(gateway.chat())
    await backend.received(0)
    waiting = asyncio.ensure_future(gateway.chat())
    await eventually(lambda: sum(gateway.app.gate.waiting().values()) == 1, "one in line")
    fleet.path.write_text(config_text([], QUIET + "[models.more]\n", {}) + by_name("b", other.url), "utf-8")
    assert gateway.app.reloader.reload("test").problems == ()
    response = await waiting
    assert (response.status, response.json["error"]["code"]) == (503, "no_backend")
    assert response.headers["x-tierline-reason"] == "no_backend"
    backend.release()
    assert (await running).status == 200


async def test_who_waits_goes_to_the_one_that_came_instead(
    fleet: Fleet, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.answer([Stall(), *chat_json()])
    gateway = await fleet.start(backend.url, more=QUIET, a=ONE)
    running = asyncio.ensure_future(gateway.chat())
    await backend.received(0)
    waiting = asyncio.ensure_future(gateway.chat())
    await eventually(lambda: sum(gateway.app.gate.waiting().values()) == 1, "one in line")
    fleet.path.write_text(config_text([], QUIET, {}) + by_name("b", other.url), "utf-8")
    gateway.app.reloader.reload("test")
    response = await waiting
    assert (response.status, response.headers["x-tierline-backend"]) == (200, "b")
    backend.release()
    assert (await running).status == 200


async def test_what_breaks_on_one_that_is_leaving_goes_on_at_the_one_that_came(
    fleet: Fleet, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.answer([Stall(), *error_json(500, "broken")])
    gateway = await fleet.start(backend.url)
    running = asyncio.ensure_future(gateway.chat())
    await backend.received(0)
    fleet.path.write_text(config_text([], PLAIN, {}) + by_name("b", other.url), "utf-8")
    gateway.app.reloader.reload("test")
    backend.release()
    response = await running
    assert (response.status, response.headers["x-tierline-backend"]) == (200, "b")


async def test_one_that_comes_back_while_it_leaves_has_never_been_away(
    fleet: Fleet, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.answer(after(chat_stream(), 2, Stall()))
    gateway = await fleet.start(backend.url, other.url)
    running = asyncio.ensure_future(gateway.chat(stream=True))
    await backend.received(0)
    before = gateway.app.pool.backends["a"]
    fleet.path.write_text(config_text([], PLAIN, {}) + by_name("b", other.url), "utf-8")
    gateway.app.reloader.reload("test")
    assert fleet.state("a") == "leaving"
    fleet.reload(backend.url, other.url)
    assert gateway.app.pool.backends["a"] is before
    assert (fleet.state("a"), before.in_flight) == ("healthy", 1)
    backend.release()
    assert (await running).events[-1] == "[DONE]"
    await eventually(lambda: not gateway.app.farewell.waiting, "the end of its leaving")
    assert fleet.known() == ["a", "b"]


async def test_one_that_comes_back_changed_while_it_leaves_stays(
    fleet: Fleet, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.answer(after(chat_stream(), 2, Stall()))
    gateway = await fleet.start(backend.url, other.url)
    running = asyncio.ensure_future(gateway.chat(stream=True))
    await backend.received(0)
    without = config_text([], PLAIN, {}) + by_name("b", other.url)
    fleet.path.write_text(without, "utf-8")
    gateway.app.reloader.reload("test")
    fleet.path.write_text(without + by_name("a", backend.url, "stream_usage = false"), "utf-8")
    gateway.app.reloader.reload("test")
    backend.release()
    assert (await running).events[-1] == "[DONE]"
    await eventually(lambda: not gateway.app.farewell.waiting, "the end of its leaving")
    assert fleet.known() == ["b", "a"]
    assert fleet.state("a") == "healthy"


# -- added ----------------------------------------------------------------------------------------------------


async def test_one_that_is_added_is_asked_at_once_and_takes_requests_when_it_is_well(
    fleet: Fleet, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    clock = FakeClock()
    gateway = await fleet.start(backend.url, clock=clock)
    await polled(gateway)
    fleet.reload(backend.url, other.url)
    assert (await gateway.chat()).headers["x-tierline-backend"] == "a", "it is not known to be well"
    await eventually(lambda: fleet.state("b") == "healthy", "its first probe")
    assert other.polls[0].target == "/health"
    await eventually(lambda: gateway.app.pool.backends["b"].window_tokens == 4096, "its window")
    seen = {(await gateway.chat()).headers["x-tierline-backend"] for _ in range(4)}
    assert seen == {"a", "b"}


async def test_one_that_does_not_answer_its_first_probe_gets_nothing_while_another_can(
    fleet: Fleet, backend: ScriptedBackend
) -> None:
    gateway = await fleet.start(backend.url)
    fleet.reload(backend.url, f"http://127.0.0.1:{closed_port()}")
    await eventually(lambda: not gateway.app.pool.backends["b"].health.guessed, "its first probe")
    assert gateway.app.pool.backends["b"].health.state is HealthState.EJECTED
    for _ in range(4):
        assert (await gateway.chat()).headers["x-tierline-attempts"] == "1"


# -- changed --------------------------------------------------------------------------------------------------


async def test_the_same_server_keeps_what_was_learned_of_it_and_its_connections(
    fleet: Fleet, backend: ScriptedBackend
) -> None:
    clock = FakeClock()
    gateway = await fleet.start(backend.url, clock=clock)
    await polled(gateway)
    await gateway.chat()
    pool = gateway.app.pool
    before, state = pool.backends["a"], pool.fleet.states["a"]
    pool.set_draining("a", True)
    done = fleet.reload(backend.url, a="limits.max_in_flight = 3\nkey = 'file:key.txt'")
    assert any("key.txt" in problem for problem in done.problems), "nothing changed"
    assert pool.backends["a"] is before
    (fleet.path.parent / "key.txt").write_text("sk-new")
    assert fleet.reload(backend.url, a="limits.max_in_flight = 3\nkey = 'file:key.txt'").problems == ()
    now = pool.backends["a"]
    assert pool.fleet.states["a"] is state
    assert state.member.max_in_flight == 3
    assert now.connections is before.connections
    assert (now.draining, now.window_tokens, now.served_model) == (True, 4096, "tiny")
    pool.set_draining("a", False)
    await gateway.chat()
    assert backend.requests[-1].header("authorization") == "Bearer sk-new"
    assert backend.requests[-1].reused


async def test_another_url_is_another_server_under_the_same_name(
    fleet: Fleet, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.answer(after(chat_stream("from the old one"), 2, Stall()))
    gateway = await fleet.start(backend.url)
    running = asyncio.ensure_future(gateway.chat(stream=True))
    await backend.received(0)
    state = gateway.app.pool.fleet.states["a"]
    fleet.reload(other.url)
    assert gateway.app.pool.fleet.states["a"] is not state
    assert (await gateway.chat()).status == 200
    assert len(other.requests) == 1
    backend.release()
    assert (await running).text == "from the old one"
    await backend.until(lambda: not backend.open_connections, "the end of the old connections")


async def test_failures_of_the_old_server_are_not_held_against_the_new_one(
    fleet: Fleet, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.answer(*[[Stall(), *error_json(500, "broken")]] * 4)
    gateway = await fleet.start(backend.url)
    running = [asyncio.ensure_future(gateway.chat()) for _ in range(4)]
    await backend.received(3)
    fleet.reload(other.url)
    await eventually(lambda: fleet.state("a") == "healthy", "its first probe")
    backend.release()
    await asyncio.gather(*running)
    assert gateway.app.pool.backends["a"].health.errors == 0


async def test_other_intervals_and_limits_of_the_listener_are_in_force_without_a_restart(
    fleet: Fleet, backend: ScriptedBackend
) -> None:
    gateway = await fleet.start(backend.url)
    more = "[health]\ninterval = 7.0\ntimeout = 1.5\nfailures_to_eject = 9\n" + LEAST_LOAD
    more += (
        "[server]\nport = 0\nmax_body_bytes = 300\nbody_timeout = 3.0\ncors_origins = ['https://x.example']\n"
    )
    done = fleet.reload(backend.url, more=more + "[pool]\nmax_idle = 0\n[timeouts]\nclient_idle = 5.0\n")
    assert done.problems == ()
    app = gateway.app
    assert app._server is not None
    assert app._server.patience is not None
    assert (app._server.patience.idle, app._server.max_body_bytes) == (5.0, 300)
    assert app.health._watches["a"][0].timeout == 1.5
    assert app.pool._breaker.failures_to_eject == 9
    assert (await gateway.chat("x" * 400)).status == 413
    headers = {"origin": "https://x.example"}
    assert (await gateway.chat(headers=headers)).headers["access-control-allow-origin"] == "https://x.example"
    connections = app.pool.backends["a"].connections
    await eventually(lambda: not connections.open_connections, "the end of what is not in use")


# -- what is told of it ---------------------------------------------------------------------------------------


async def test_metrics_say_how_the_last_reload_went(fleet: Fleet, backend: ScriptedBackend) -> None:
    gateway = await fleet.start(backend.url)

    def shown() -> dict[str, float]:
        text = gateway.app.metrics.render()[0].decode()
        rows = [
            line.rpartition(" ") for line in text.splitlines() if line.startswith("tierline_config_reload")
        ]
        return {name.removeprefix("tierline_config_reload"): float(value) for name, _, value in rows}

    began = shown()
    assert (began["_success"], began['s_total{outcome="applied"}']) == (1.0, 0.0)
    fleet.reload("http://user:pass@127.0.0.1:1")
    assert (shown()["_success"], shown()['s_total{outcome="refused"}']) == (0.0, 1.0)
    assert shown()["_success_timestamp_seconds"] == began["_success_timestamp_seconds"]
    fleet.reload(backend.url)
    fleet.reload(backend.url, a="stream_usage = false")
    assert (shown()["_success"], shown()['s_total{outcome="unchanged"}']) == (1.0, 1.0)
    assert shown()['s_total{outcome="applied"}'] == 1.0
    assert shown()["_success_timestamp_seconds"] >= began["_success_timestamp_seconds"]
