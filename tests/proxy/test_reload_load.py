"""Reload under load: backends, keys and the policy change fifty times while requests run, and no client sees any of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from proxy.app import App
from proxy.config import load
from proxy.errors import Outcome
from proxy.keystore import digest
from tests.client import Connection
from tests.proxy.conftest import CHAT, Gateway, chat
from tests.proxy.scenes import eventually
from tests.scripted import ScriptedBackend, Stall, after, chat_stream

KEY = "sk-load"
RELOADS = 50
CLIENTS = 16
TEXT = "streams that outlive them all"
LONG = after(chat_stream(TEXT), 2, Stall())
POLICIES = (
    '[policy]\nname = "least_load"\n',
    '[policy]\nname = "round_robin"\n',
    "[policy.gate]\nahead_seconds = 3.0\n",
    "",
)


def draw(rng: Random, urls: list[str]) -> str:
    """A configuration: one to three backends, under names that move between the servers, with other keys and limits; another
    client beside ours, another policy."""
    names = rng.sample("abcd", rng.randint(1, 3))
    text = '[server]\nport = 0\n[admin]\nenabled = false\n[telemetry]\nrecords = "off"\n[models.tiny]\n'
    text += rng.choice(POLICIES)
    # The long streams stand still for as long as the load takes: on a slow machine longer than any usual limit.
    text += "[timeouts]\ngap = 3000.0\ntotal = 3600.0\n"
    text += f"[health]\nstuck_seconds = 0\ninterval = {rng.choice(('0.05', '0.2', '5.0'))}\n"
    others = [f"other-{number}" for number in rng.sample(range(5), rng.randint(0, 3))]
    for name in ("ours", *others):
        key = KEY if name == "ours" else name
        text += f'[[server.keys]]\nname = "{name}"\nsha256 = "{digest(key)}"\n'
    for name, url in zip(names, rng.sample(urls, len(names)), strict=True):
        text += (
            f'[[backends]]\nname = "{name}"\nurl = "{url}"\nlimits.max_in_flight = {rng.randint(20, 60)}\n'
        )
        text += f"stream_usage = {rng.choice(('true', 'false'))}\n"
    return text


@pytest.mark.parametrize("requests", [1500, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_fifty_reloads_under_load_fail_no_request_and_cut_no_stream(
    tmp_path: Path, requests: int
) -> None:
    rng = Random(requests)
    path = tmp_path / "config.toml"
    async with ScriptedBackend() as one, ScriptedBackend() as two, ScriptedBackend() as three:
        servers = [one, two, three]
        urls = [server.url for server in servers]
        path.write_text(draw(rng, urls), "utf-8")
        gateway = Gateway(App(load(path, {}), None, Random(7)))
        app = gateway.app
        await app.start()
        for server in servers:
            in_kind = server.default
            server.default = lambda request, usual=in_kind: (
                LONG if b"long" in request.body else usual(request)
            )
        done = 0
        failed: list[object] = []
        applied = []
        every = requests // RELOADS
        headers = {"authorization": f"Bearer {KEY}"}

        async def client(number: int) -> None:
            nonlocal done
            mine = Random(number)
            async with await Connection.open(app.port) as connection:
                while done < requests:
                    done += 1
                    if done % every == 0:
                        path.write_text(draw(rng, urls), "utf-8")
                        applied.append(app.reloader.reload("load"))
                    stream = mine.random() < 0.5
                    connection.send(CHAT, chat(f"number {done}", stream=stream), headers=headers)
                    response = await connection.read(30.0)
                    sound = response.complete and response.status == 200
                    if not (sound and (not stream or response.events[-1] == "[DONE]")):
                        failed.append((done, len(applied), response.status, response.body[:200]))

        streams = [await Connection.open(app.port) for _ in range(4)]
        for stream in streams:
            stream.send(CHAT, chat("long", stream=True), headers=headers)
            await stream.read_until(b"data:")
        await asyncio.gather(*(client(number) for number in range(CLIENTS)))
        for server in servers:
            server.release()
        for stream in streams:
            response = await stream.read()
            assert (response.text, response.events[-1]) == (TEXT, "[DONE]")
            stream.close()
        assert failed == []
        assert len(applied) == RELOADS
        assert [reloaded.problems for reloaded in applied if reloaded.problems] == []
        assert {name for reloaded in applied for name in reloaded.changed} >= {
            "backends", "policy", "server.keys", "health",
        }  # fmt: skip
        assert {record.outcome for record, _ in gateway.records.closed} == {Outcome.OK}
        await eventually(lambda: not app.farewell.waiting, "the end of those that left")
        configured = [backend.name for backend in app.config.backends]
        assert list(app.pool.backends) == list(app.pool.fleet.states) == configured
        assert sorted(app.health._watches) == sorted(configured)
        await app.close()
        gateway.assert_idle()
        assert all(not pool.open_connections for pool in app.pool._retired)
