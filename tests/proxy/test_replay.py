"""What a gateway recorded is decided again, to the same answer; and by another policy, with what that would have meant."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner, Result

from policies import RANKINGS, Router
from policies.trace import Trace
from proxy.app import App
from proxy.cli import main
from proxy.config import load
from proxy.decisions import read
from proxy.replay.choices import replay
from proxy.replay.records import read_records
from tests.client import ask
from tests.proxy.conftest import CHAT, chat, config_text
from tests.scripted import ScriptedBackend

PROFILES = {
    "a": 'profile = "fp8-mtp3-tp2-v17"\n',
    "b": 'profile = "bf16-dflash8-tp2-v17"\nquality.reference = true\n',
}
LONG = " ".join(f"word{n}" for n in range(3000))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
async def recorded(tmp_path: Path, backend: ScriptedBackend, other: ScriptedBackend) -> Path:
    """Forty requests, ten at once: conversations, tiers, tools; more than there are places."""
    path = tmp_path / "config.toml"
    more = '[telemetry]\nrecords = "file:records.jsonl"\ndecisions = true\n[admin]\nenabled = false\n'
    limits = {name: text + "limits.max_in_flight = 4\n" for name, text in PROFILES.items()}
    path.write_text(config_text([backend.url, other.url], more, limits), "utf-8")
    app = App(load(path, {}), None, Random(7))
    await app.start()
    tiers = ("balanced", "fast", "exact")

    async def one(number: int) -> None:
        text = LONG + f"conversation {number % 6}" if number % 2 else f"short {number}"
        body = chat(text, stream=number % 3 > 0)
        headers = {"x-quality-tier": tiers[number % 3], "x-request-id": f"r{number}"}
        await ask(app.port, CHAT, body, headers=headers)

    for start in range(0, 40, 10):
        await asyncio.gather(*[one(start + n) for n in range(10)])
    app.pool.set_draining("b", True)
    assert (await ask(app.port, CHAT, chat(), headers={"x-quality-tier": "exact"})).status == 503
    await app.close()
    return path


def records_of(path: Path) -> Path:
    return path.parent / "records.jsonl"


def test_every_decision_of_a_live_run_is_made_again(recorded: Path) -> None:
    records = read_records(records_of(recorded))
    config = load(recorded, {})
    router = Router(config.policy_params.router, config.policy.ranking)
    choices = replay(records, router)
    assert choices.decisions == 41
    assert choices.same == choices.decisions
    assert choices.moved == ()
    assert {record.policy for record in records} == {config.policy_digest}
    reasons = {trace.decision.reason for record in records for trace in record.traces}
    assert len(reasons) > 2, "more than one kind of decision"


@pytest.mark.parametrize("name", RANKINGS)
async def test_every_policy_decides_the_same_again_draws_included(
    tmp_path: Path, backend: ScriptedBackend, other: ScriptedBackend, name: str
) -> None:
    async with ScriptedBackend() as third:
        path = tmp_path / "config.toml"
        more = '[telemetry]\nrecords = "file:records.jsonl"\ndecisions = true\n[admin]\nenabled = false\n'
        more += f'[policy]\nname = "{name}"\n'
        path.write_text(config_text([backend.url, other.url, third.url], more, {}), "utf-8")
        app = App(load(path, {}), None, Random(7))
        await app.start()
        for session in range(5):
            headers = {"x-session-id": f"s{session}"}
            await asyncio.gather(*[ask(app.port, CHAT, chat(), headers=headers) for _ in range(6)])
        await app.close()
    config = load(path, {})
    router = Router(config.policy_params.router, config.policy.ranking)
    choices = replay(read_records(records_of(path)), router)
    assert (choices.decisions, choices.same) == (30, 30)


def test_the_command_says_so(recorded: Path) -> None:
    result = run("replay", records_of(recorded), "-c", recorded, "--gate")
    assert result.exit_code == 0, result.output
    assert "41 decisions made again" in result.output
    assert "41 the same, 0 on another backend" in result.output


def test_a_decision_survives_its_record_to_the_bit(recorded: Path) -> None:
    for line in records_of(recorded).read_text("utf-8").splitlines():
        for data in json.loads(line)["decisions"]:
            trace = read(data)
            assert isinstance(trace, Trace)
            assert len(trace.views) == 2
            assert trace.seed is not None
    lines = [json.loads(line) for line in records_of(recorded).read_text("utf-8").splitlines()]
    prefixes = [d["facts"]["prefix"] for record in lines for d in record["decisions"]]
    assert any(prefixes)
    assert not any("word1" in json.dumps(record) for record in lines), "no prompt in a record"


def test_a_tampered_decision_is_noticed(recorded: Path) -> None:
    path = records_of(recorded)
    lines = path.read_text("utf-8").splitlines()
    data: dict[str, Any] = json.loads(lines[0])
    decision = data["decisions"][0]
    decision["backend"] = "b" if decision["backend"] == "a" else "a"
    path.write_text("\n".join([json.dumps(data), *lines[1:]]), "utf-8")
    result = run("replay", path, "-c", recorded, "--gate")
    assert result.exit_code == 1
    assert "1 decisions are not the recorded ones" in result.output


def test_a_candidate_is_compared_and_models_are_called_models(recorded: Path, tmp_path: Path) -> None:
    candidate = tmp_path / "candidate.toml"
    candidate.write_text('[policy]\nname = "round_robin"\n', "utf-8")
    result = run("replay", records_of(recorded), "-c", recorded, "--policy", candidate)
    assert result.exit_code == 0, result.output
    assert "on another backend" in result.output
    assert " → " in result.output
    assert "modelled outcomes" in result.output
    assert "candidate" in result.output


def test_the_gate_closes_for_a_worse_candidate_and_not_for_the_same(recorded: Path, tmp_path: Path) -> None:
    candidate = tmp_path / "candidate.toml"
    candidate.write_text("[policy]\nname = 'predicted'\n", "utf-8")
    same = run("replay", records_of(recorded), "-c", recorded, "--policy", candidate, "--gate")
    assert same.exit_code == 0, same.output
    beside = tmp_path / "elsewhere"
    beside.mkdir()
    candidate = beside / "candidate.toml"
    own = beside / "worst.py"
    own.write_text(
        "def score(facts, backend):\n    f = backend.forecast\n    return {'x': -f.cost if f else 0.0}\n",
        "utf-8",
    )
    candidate.write_text('[policy]\nfile = "worst.py"\n', "utf-8")
    options = ("--policy", candidate, "--gate", "--decisions-only")
    worse = run("replay", records_of(recorded), "-c", recorded, *options)
    assert worse.exit_code == 1, worse.output
    assert "worse: predicted cost" in worse.output


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "holds no record"), ("{}\n", "line 1 is no record"), ("x\n", "line 1 is no record")],
)
def test_what_is_no_file_of_records_is_told(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(config_text(["http://127.0.0.1:1"], "", {}), "utf-8")
    records = tmp_path / "records.jsonl"
    records.write_text(text, "utf-8")
    result = run("replay", records, "-c", path)
    assert result.exit_code == 2
    assert said in result.output


def test_a_candidate_that_cannot_be_used_is_told(recorded: Path, tmp_path: Path) -> None:
    candidate = tmp_path / "candidate.toml"
    for text, said in (
        ("[policy]\nname = 'best'\n", "policy.name"),
        ("[pool]\n", "neither [policy] nor [tiers]"),
        ("[policy", "candidate.toml"),
    ):
        candidate.write_text(text, "utf-8")
        result = run("replay", records_of(recorded), "-c", recorded, "--policy", candidate)
        assert result.exit_code == 2
        assert said in result.output


# -- explain --------------------------------------------------------------------------------------------------


def test_a_recorded_request_is_explained(recorded: Path) -> None:
    result = run("explain", "r1", "--records", records_of(recorded), "-c", recorded)
    assert result.exit_code == 0, result.output
    assert "attempt 1: " in result.output
    assert "queue" in result.output
    assert "prefill" in result.output
    exact = run("explain", "r2", "--records", records_of(recorded), "-c", recorded)
    assert "a: left out, tier" in exact.output
    as_json = run("explain", "r2", "--records", records_of(recorded), "-c", recorded, "--json")
    assert json.loads(as_json.output)["attempts"][0]["backend"] == "b"
    missing = run("explain", "r999", "--records", records_of(recorded), "-c", recorded)
    assert (missing.exit_code, "no record of r999" in missing.output) == (2, True)


def test_a_gateway_that_is_not_there_is_told(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(config_text(["http://127.0.0.1:1"], "[admin]\nport = 1\n", {}), "utf-8")
    result = run("explain", "r1", "-c", path)
    assert result.exit_code == 2
    assert "does not answer" in result.output
