"""`tierline admin` against a gateway that runs: what it prints, what it changes, and its exit codes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner, Result

from proxy.app import App
from proxy.cli import main
from proxy.config import load
from tests.proxy.conftest import Gateway, config_text
from tests.proxy.scenes import LEAST_LOAD, QUIET, eventually
from tests.scripted import ScriptedBackend

MORE = QUIET + LEAST_LOAD + '[server]\nport = 0\nstore = "keys.db"\n[admin]\nport = 0\nkey = "env:ADMIN"\n'


class Terminal:
    def __init__(self, gateway: Gateway, path: Path) -> None:
        self.gateway, self.path = gateway, path
        self.env: dict[str, str | None] = {"TIERLINE_ADMIN_KEY": "sk-admin", "ADMIN": "sk-admin"}

    async def run(self, *args: str, url: bool = True) -> Result:
        where = (
            ["--url", f"http://127.0.0.1:{self.gateway.app.admin_port}"] if url else ["-c", str(self.path)]
        )
        runner = CliRunner(env=self.env)
        return await asyncio.to_thread(runner.invoke, main, ["admin", *where, *args])

    async def said(self, *args: str) -> str:
        result = await self.run(*args)
        assert result.exit_code == 0, result.output
        return result.output.strip()


@pytest.fixture
async def terminal(tmp_path: Path, backend: ScriptedBackend) -> AsyncIterator[Terminal]:
    path = tmp_path / "config.toml"
    path.write_text(config_text([backend.url], MORE, {}), "utf-8")
    gateway = Gateway(App(load(path, {"ADMIN": "sk-admin"}), None, Random(7)))
    await gateway.app.start()
    yield Terminal(gateway, path)
    await gateway.app.close()


async def test_backends_are_listed_drained_added_changed_and_removed(
    terminal: Terminal, other: ScriptedBackend
) -> None:
    pool = terminal.gateway.app.pool
    until = "until the gateway is started again"
    assert (await terminal.said("drain", "a")) == f"backend a is draining, 0 in flight; {until}"
    added = await terminal.said(
        "add", "b", other.url, "--set", "limits.max_in_flight=3", "--set", "remote=false"
    )
    assert added.startswith("backend b is ")
    await eventually(lambda: pool.backends["b"].state == "healthy", "its first probe")
    lines = (await terminal.said("backends")).splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["name", "state", "in_flight", "max_in_flight"],
        ["a", "draining", "0", "256"],
        ["b", "healthy", "0", "3"],
    ]
    await terminal.said("change", "b", "limits.max_in_flight=", "stream_usage=false")
    table = json.loads(await terminal.said("--json", "backends", "b"))["configured"]
    assert table == {"name": "b", "url": other.url, "remote": False, "limits": {}, "stream_usage": False}
    assert "backend b is as given there" in await terminal.said("changes")
    assert (await terminal.said("undrain", "a")).startswith("backend a is healthy")
    assert (await terminal.said("remove", "b")) == f"backend b is removed, {until}"
    assert (await terminal.said("changes")) == "# nothing is changed beside the file"


async def test_a_policy_is_shown_checked_activated_and_taken_back(terminal: Terminal, tmp_path: Path) -> None:
    first = terminal.gateway.app.config.policy_digest
    candidate = tmp_path / "candidate.toml"
    candidate.write_text('[policy]\nname = "round_robin"\n')
    assert (await terminal.said("policy", "show")).startswith(
        f"{first}  least_load, from the configuration file"
    )
    assert "changes policy" in await terminal.said("policy", "check", str(candidate))
    assert terminal.gateway.app.config.policy_digest == first
    assert "is in force" in await terminal.said("policy", "activate", str(candidate))
    assert terminal.gateway.app.config.policy.name == "round_robin"
    assert f"before: {first}" in await terminal.said("policy", "show")
    assert first in await terminal.said("policy", "rollback")
    result = await terminal.run("policy", "replay", str(candidate))
    assert (result.exit_code, "telemetry.records" in result.output) == (1, True)
    assert first in await terminal.said("policy", "revert")


async def test_the_configuration_says_what_of_it_is_not_the_files(terminal: Terminal) -> None:
    await terminal.said("drain", "a")
    text = await terminal.said("config")
    assert "# from admin API: a is drained" in text
    assert "sk-admin" not in text
    assert json.loads(await terminal.said("--json", "config"))["from_admin_api"]["draining"] == ["a"]


async def test_limits_of_a_key_are_set_and_shown(terminal: Terminal) -> None:
    assert await terminal.said("limits", "show") == "nothing is limited"
    runner = CliRunner(env=terminal.env)
    await asyncio.to_thread(runner.invoke, main, ["keys", "add", "app", "-c", str(terminal.path)])
    told = await terminal.said("limits", "set", "key:app", "requests_per_minute=5")
    assert '"requests_per_minute": 5' in told
    account = f"key:{told.split()[0]}"
    assert await terminal.said("limits", "show", account) == f"{account}  requests_per_minute: 0 of 5"


async def test_a_refusal_is_said_and_is_exit_code_1(terminal: Terminal) -> None:
    result = await terminal.run("drain", "nope")
    assert (result.exit_code, result.output) == (1, "refused (404): No backend is named 'nope'.\n")
    terminal.path.write_text("[policy\n")
    result = await terminal.run("reload")
    assert result.exit_code == 1
    assert "not valid TOML" in result.output
    terminal.env["TIERLINE_ADMIN_KEY"] = "wrong"
    assert "refused (401)" in (await terminal.run("backends")).output


async def test_no_answer_is_exit_code_1_and_what_cannot_be_used_2(terminal: Terminal, tmp_path: Path) -> None:
    await terminal.gateway.app.close()
    result = await terminal.run("backends")
    assert (result.exit_code, "does not answer" in result.output) == (1, True)
    assert (await terminal.run("--key-from", "sk-in-argv", "backends")).exit_code == 2
    assert (await terminal.run("change", "a", "remote")).exit_code == 2
    assert (await terminal.run("policy", "check", str(tmp_path / "none.toml"))).exit_code == 2
    terminal.path.write_text("[nonsense]\n")
    assert (await terminal.run("backends", url=False)).exit_code == 2


async def test_the_file_says_where_and_with_which_key(terminal: Terminal) -> None:
    """With the port that it says, which is any free one here: nobody answers on port 0."""
    terminal.env["TIERLINE_ADMIN_KEY"] = None
    text = terminal.path.read_text().replace(
        "[admin]\nport = 0", f"[admin]\nport = {terminal.gateway.app.admin_port}"
    )
    terminal.path.write_text(text)
    result = await terminal.run("backends", url=False)
    assert result.exit_code == 0, result.output
