"""`tierline doctor` finds every fault that the simulated backend can plant, others that are scripted, and none where all is
well."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from proxy.cli import main
from proxy.clock import LoopClock
from proxy.config import Backend, loads
from proxy.doctor import examine as examination
from proxy.doctor import prompts, report, speech, wire
from proxy.doctor.examine import examine
from proxy.doctor.patient import Patient
from proxy.probe import Asker, Finding, Verdict, session
from proxy.sim.faults import FaultKind
from proxy.sim.plan import Dialect
from tests.scripted import (
    Close,
    Received,
    ScriptedBackend,
    Steps,
    WaitFor,
    chat_event,
    closed_port,
    error_json,
    json_answer,
    sse,
    usage_event,
)
from tests.sim.process import SimServer
from tests.sim.running import running

SECONDS = 1.0
"""For a question: what hangs is told after that."""
IDLE = 0.1


def of_url(url: str, extra: str = 'profile = "fp8-mtp3-tp2-v17"\n') -> Backend:
    return loads(f'[models.m]\n[[backends]]\nname = "b"\nurl = "{url}"\n{extra}', {}).backends[0]


async def found(url: str, extra: str = 'profile = "fp8-mtp3-tp2-v17"\n', **more: Any) -> list[Finding]:
    return await examine(of_url(url, extra), LoopClock(), more.pop("seconds", SECONDS), IDLE, **more)


def wrong(findings: list[Finding]) -> dict[str, Finding]:
    """Those that are not well, by what they are about; notes are well."""
    return {f.what: f for f in findings if f.verdict in (Verdict.WARNING, Verdict.PROBLEM)}


async def test_a_healthy_backend_has_no_finding() -> None:
    async with running() as sim:
        findings = await found(sim.url, deep=True)
    assert [f for f in findings if f.verdict is not Verdict.OK] == []
    assert [f.what for f in findings if f.fix or f.patch] == []
    assert {f.what for f in findings} >= {
        "usage", "continuation", "long stream", "thinking", "speed", "counters", "acceptance", "tools", "required",
        "named", "cancel", "window size", "prefix cache", "history", "distance", "keep-alive",
    }  # fmt: skip


FAULTS: dict[FaultKind, tuple[dict[str, Any], set[str]]] = {
    FaultKind.REFUSE: ({}, {"reachable"}),
    FaultKind.STATUS: ({"count": 100}, {"model"}),
    FaultKind.RESET: ({}, {"answers"}),
    FaultKind.HANG: ({}, {"answers"}),
    FaultKind.STALL: ({}, {"answers"}),
    FaultKind.SLOW: ({"value": 0.01}, {"speed"}),
    FaultKind.DIE: ({}, {"health", "stream", "answers", "reachable"}),
    FaultKind.ABORT: ({"after_tokens": 1}, {"stream", "long stream"}),
    FaultKind.MALFORMED: ({}, {"stream"}),
    FaultKind.TRUNCATED: ({}, {"stream"}),
    FaultKind.ACCEPTANCE: ({}, {"acceptance"}),
    FaultKind.HEALTH: ({}, {"health"}),
    FaultKind.METRICS: ({}, {"counters"}),
    FaultKind.DIALECT: ({}, {"tools"}),
    FaultKind.REQUIRED: ({}, {"required"}),
}
"""What is planted, and the findings of which at least one tells it. A flush leaves nothing to be found: see below."""


def test_every_fault_of_the_simulated_backend_is_planted() -> None:
    assert set(FAULTS) | {FaultKind.FLUSH} == set(FaultKind)


@pytest.mark.parametrize("kind", FAULTS)
async def test_a_planted_fault_is_found(kind: FaultKind, monkeypatch: pytest.MonkeyPatch) -> None:
    how, tells = FAULTS[kind]
    if kind is FaultKind.SLOW:  # the other checks would take long
        monkeypatch.setattr(examination, "CHECKS", examination.CHECKS[:1])
    async with running() as sim:
        assert (await sim.fault(kind.value, **how))[0] == 200
        bad = wrong(await found(sim.url, seconds=5.0 if kind is FaultKind.SLOW else SECONDS))
    assert tells & bad.keys(), bad
    assert all(finding.fix for finding in bad.values())


@pytest.mark.parametrize("kind", [FaultKind.RESET, FaultKind.HANG, FaultKind.MALFORMED, FaultKind.TRUNCATED])
async def test_what_befalls_a_long_stream_only_is_found_too(kind: FaultKind) -> None:
    async with running() as sim:
        await sim.fault(kind.value, after_tokens=40, count=1000)
        bad = wrong(await found(sim.url))
    assert "long stream" in bad, bad


async def test_a_cache_that_is_emptied_all_the_time_is_found() -> None:
    async with running() as sim:
        over = False

        async def flush() -> None:
            while not over:
                await sim.fault("flush")

        flushing = asyncio.ensure_future(flush())
        bad = wrong(await found(sim.url))
        over = True
        await flushing
    assert set(bad) == {"prefix cache"}
    assert "--enable-prefix-caching" in bad["prefix cache"].fix


@pytest.mark.parametrize(
    ("options", "what", "patch"),
    [
        ({"tool_parser": False}, "tools", {"parser": "none"}),
        ({"dialect": Dialect.XML}, "tools", {"parser": "none"}),
        ({"kv_tokens": 40000}, "window size", {"limits.window_tokens": 40000 // 784 * 784}),
        ({"profile": "fp8-mtp3-upstream-v0.20.1"}, "required", {"tool_choice": "auto_enforced"}),
    ],
)
async def test_a_server_that_is_set_up_so_gets_the_keys_that_mend_it(
    options: dict[str, Any], what: str, patch: dict[str, Any]
) -> None:
    async with running(**options) as sim:
        bad = wrong(await found(sim.url, ""))
        assert dict(bad[what].patch) == patch, bad
        lines = report.patch(list(bad.values()), (of_url(sim.url, ""),), whole=False)
        table = tomllib.loads("\n".join(lines))["backends"][0]
        assert table.pop("name") == "b"
        more = "".join(f"{key} = {json.dumps(value)}\n" for key, value in patch.items())
        assert what not in wrong(await found(sim.url, more))


async def test_a_key_that_is_wanted_is_the_only_finding() -> None:
    async with running(api_key="secret") as sim:
        assert set(wrong(await found(sim.url))) == {"key"}


async def test_a_server_without_token_ids_is_noted() -> None:
    async with running(token_ids=False) as sim:
        findings = await found(sim.url)
    assert wrong(findings) == {}
    assert [f.what for f in findings if f.verdict is Verdict.NOTE] == ["continuation"]


# -- what the simulated backend cannot do, scripted ----------------------------------------------------------------


def metrics(**values: float) -> Steps:
    from tests.scripted import metrics_page

    return metrics_page(**values)


async def patient_of(
    backend: ScriptedBackend, look: Callable[[Patient], Any], extra: str = "", idle: float = IDLE
) -> list[Finding]:
    """What one check finds."""
    mine = of_url(backend.url, extra)
    async with session(SECONDS) as asking:
        patient = Patient(mine, Asker(mine, asking), LoopClock(), "tiny", SECONDS, idle)
        await patient.check("check", look)
    return patient.findings


def spoken(text: str) -> Steps:
    events = [
        chat_event({"role": "assistant", "content": ""}),
        chat_event({"content": text}),
        chat_event({}, "stop"),
    ]
    return sse(*events, usage_event((5, 90)))


@pytest.mark.parametrize("text", ["I think so.</think>Yes", "<think>I think so."])
async def test_thinking_in_the_text_is_found_and_patched(text: str) -> None:
    async with ScriptedBackend() as backend:
        backend.answer(spoken(text))
        bad = wrong(await patient_of(backend, speech.stream))
    assert dict(bad["thinking"].patch) == {"reasoning_parser": "none"}


async def test_thinking_in_the_text_is_right_where_it_is_configured() -> None:
    async with ScriptedBackend() as backend:
        backend.answer(spoken("I think so.</think>Yes"))
        assert wrong(await patient_of(backend, speech.stream, 'reasoning_parser = "none"\n')) == {}


async def test_a_long_prompt_that_is_silently_cut_is_found() -> None:
    async with ScriptedBackend() as backend:
        backend.pages["/v1/models"] = json_answer({"data": [{"id": "tiny", "max_model_len": 1000}]})
        counts = iter((50, 550, 1000))
        for _ in range(3):
            backend.answer(json_answer({"choices": [], "usage": {"prompt_tokens": next(counts)}}))
        bad = wrong(await patient_of(backend, prompts.window))
    assert "longer than its 1000 tokens is answered" in bad["window size"].detail


async def test_an_overflow_in_words_that_nobody_knows_is_found() -> None:
    async with ScriptedBackend() as backend:
        backend.pages["/v1/models"] = json_answer({"data": [{"id": "tiny", "max_model_len": 1000}]})
        for count in (50, 550):
            backend.answer(json_answer({"choices": [], "usage": {"prompt_tokens": count}}))
        backend.answer(error_json(400, "no"))
        bad = wrong(await patient_of(backend, prompts.window))
    assert bad["window size"].verdict is Verdict.WARNING


@pytest.mark.parametrize(
    ("sizes", "patch"),
    [
        ((10, 70, 10), {"history_reasoning": "reasoning"}),
        ((10, 10, 70), {"history_reasoning": "reasoning_content"}),
        ((10, 70, 70), {}),
        ((10, 10, 10), {}),
    ],
)
async def test_the_name_under_which_thinking_is_read_is_told(
    sizes: tuple[int, ...], patch: dict[str, str]
) -> None:
    async with ScriptedBackend() as backend:
        for size in sizes:
            backend.answer(json_answer({"choices": [], "usage": {"prompt_tokens": size}}))
        findings = await patient_of(backend, prompts.history)
    assert dict(findings[0].patch) == patch


async def test_connections_that_are_closed_early_are_found_and_patched() -> None:
    async with ScriptedBackend() as backend:
        backend.pages["/health"] = [*json_answer({}), Close()]
        findings = await patient_of(backend, wire.keep_alive, idle=2.0)
    assert findings[0].verdict is Verdict.WARNING
    lines = list(report.patch(findings, (of_url(backend.url, ""),), whole=False))
    assert tomllib.loads("\n".join(lines)) == {"pool": {"idle_seconds": 0.1}}


async def test_a_generation_that_goes_on_after_its_client_left_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speech, "CANCEL_SECONDS", 0.2)
    gate = asyncio.Event()
    asked = 0

    def page(_: Received) -> Steps:
        nonlocal asked
        asked += 1
        return metrics(running=1 if asked > 1 else 0)

    async with ScriptedBackend() as backend:
        backend.pages["/metrics"] = page
        backend.answer([*sse(chat_event({"content": "once"}), done=False)[:-1], WaitFor(gate)])
        bad = wrong(await patient_of(backend, speech.cancel))
    assert "goes on" in bad["cancel"].detail


# -- the command ---------------------------------------------------------------------------------------------------


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def test_the_command_looks_at_a_url_and_prints_a_table_to_paste() -> None:
    with SimServer("fp8-mtp3-tp2-v17", options=("--time-scale", "40", "--no-tool-parser")) as server:
        done = command(server.url)
    assert done.exit_code == 1, done.output
    patch = tomllib.loads(done.output.partition("# what would mend it, in the configuration:\n")[2])
    assert patch["backends"] == [{"name": "NAME", "url": server.url, "parser": "none"}]


def test_the_command_looks_at_every_backend_of_a_configuration_or_at_those_that_are_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.toml"
    gone = closed_port()
    with SimServer("fp8-mtp3-tp2-v17", options=("--time-scale", "40")) as server:
        path.write_text(
            f'[models.m]\n[pool]\nidle_seconds = 0.1\n[[backends]]\nname = "a"\nurl = "{server.url}"\n'
            f'[[backends]]\nname = "b"\nurl = "http://127.0.0.1:{gone}"\n'
        )
        both = command(str(path), "--json")
        told = {(entry["backend"], entry["what"]): entry for entry in json.loads(both.output)}
        assert both.exit_code == 1
        assert told["a", "usage"]["severity"] == "ok"
        assert (told["b", "reachable"]["severity"], told["b", "reachable"]["patch"]) == ("problem", {})
        alone = command(str(path), "--backend", "a")
        assert (alone.exit_code, "what would mend it" in alone.output) == (0, False), alone.output
        assert command(str(path), "--backend", "c").exit_code == 2
    assert command(str(tmp_path / "none.toml")).exit_code == 2


def test_warnings_fail_only_where_that_is_wanted() -> None:
    findings = [Finding("b", "speed", Verdict.WARNING, "slow")]
    assert not report.failed(findings, strict=False)
    assert report.failed(findings, strict=True)
    assert report.failed([replace(findings[0], verdict=Verdict.PROBLEM)], strict=False)
