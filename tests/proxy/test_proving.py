"""`tierline gate` tells right answers from wrong ones; what it writes is what a tier may demand."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from policies.gatefile import BadGate, GateResult, Outcome, read, table
from proxy.cli import main
from proxy.clock import LoopClock
from proxy.config import ConfigError, backend_at, loads
from proxy.doctor.patient import Patient
from proxy.probe import Asker, session
from proxy.proving import agree
from proxy.proving.tasks import FIBONACCI, NEEDLE, RUNS, gates, take
from tests.fake_clock import FakeClock
from tests.proxy.conftest import MakeGateway
from tests.scripted import Received, ScriptedBackend, Steps, chat_json, error_json

NUMBERS = ", ".join(map(str, FIBONACCI))


def model(request: Received, **wrong: Any) -> Steps:
    """A model that is right; `wrong`: what it says in place of that, by test."""
    messages = request.json["messages"]
    text = messages[-1]["content"]
    if "Fibonacci" in text:
        return chat_json(wrong.get("fibonacci", NUMBERS))
    if "Paris" in text:
        calls = wrong.get("tool call", [("get_weather", '{"city": "Paris"}')])
        return chat_json(wrong.get("tool text"), tool_calls=calls)
    if "Which word" in text:
        return chat_json(wrong.get("turns", re.search(r"word: (\w+)", messages[0]["content"])[1]))  # type: ignore[index]
    if "47 times 83" in text:
        return chat_json(wrong.get("arithmetic", "3901"))
    if "secret number" in text:
        found = re.search(r"secret number is (\d+)", text)
        assert found is not None
        return chat_json(wrong.get("needle", found[1]))
    return chat_json("OK")


async def outcomes(answer: Callable[[Received], Steps], needle: int = 2000) -> dict[str, Outcome]:
    async with ScriptedBackend() as backend, session(5.0) as asking:
        backend.default = answer
        mine = backend_at(backend.url)
        patient = Patient(mine, Asker(mine, asking), LoopClock(), "tiny", 5.0, 0.0)
        return {one.name: one for one in await take(patient, gates(needle), lambda _: None)}


async def test_right_answers_pass_every_test() -> None:
    found = await outcomes(model)
    assert list(found) == ["fibonacci", "tool call", "turns", "arithmetic", "needle"]
    assert all(one.passed for one in found.values()), found
    assert found["fibonacci"].detail == "5 of 5 right, word for word"


@pytest.mark.parametrize(
    "right",
    [
        {"arithmetic": "47 × 83 = **3,901**"},
        {"arithmetic": "<think>4000 - 99</think>3 901"},
        {"fibonacci": NUMBERS.replace(", ", "\n")},
        {"needle": f"The secret number is {NEEDLE}."},
        {"turns": "Marzipan!"},
        {"tool call": [("get_weather", '{"city": "Paris, France"}')]},
    ],
)
async def test_the_wording_does_not_count(right: dict[str, Any]) -> None:
    found = await outcomes(lambda request: model(request, **right))
    assert all(one.passed for one in found.values()), found


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("fibonacci", {"fibonacci": NUMBERS.replace("34", "33")}),
        ("fibonacci", {"fibonacci": ""}),
        ("tool call", {"tool call": [], "tool text": "<tool_call>\n<function=get_weather>"}),
        ("tool call", {"tool call": [("get_time", '{"city": "Paris"}')]}),
        ("tool call", {"tool call": [("get_weather", '{"city": "Lima"}')]}),
        ("tool call", {"tool call": [("get_weather", '{"city": ')]}),
        ("tool call", {"tool call": [("get_weather", '{"city": "Paris"}')] * 2}),
        ("turns", {"turns": "nougat"}),
        ("arithmetic", {"arithmetic": "3911"}),
        ("arithmetic", {"arithmetic": "3901 it is not</think>3899"}),
        ("needle", {"needle": "There is none."}),
    ],
)
async def test_a_wrong_answer_fails_its_test_and_no_other(name: str, wrong: dict[str, Any]) -> None:
    found = await outcomes(lambda request: model(request, **wrong))
    assert [one.name for one in found.values() if not one.passed] == [name]
    assert found[name].detail


async def test_fibonacci_has_to_be_right_each_time() -> None:
    asked = 0

    def sometimes(request: Received) -> Steps:
        nonlocal asked
        asked += "Fibonacci" in request.json["messages"][-1]["content"]
        return model(request, **({"fibonacci": "0, 1, 2"} if asked == RUNS else {}))

    found = await outcomes(sometimes)
    assert not found["fibonacci"].passed
    assert f"run {RUNS} of {RUNS}" in found["fibonacci"].detail


async def test_a_needle_that_is_too_long_is_made_shorter() -> None:
    def narrow(request: Received) -> Steps:
        text = request.json["messages"][-1]["content"]
        return error_json(400, "too long") if len(text) > 6000 else model(request)

    assert (await outcomes(narrow))["needle"].passed


async def test_a_server_that_fails_passes_nothing() -> None:
    found = await outcomes(lambda _: error_json(500, "engine died"))
    assert [one.passed for one in found.values()] == [False] * 5
    assert "engine died" in found["arithmetic"].detail


# -- agreement -----------------------------------------------------------------------------------------------------


def with_ids(text: str, ids: list[int] | None) -> Callable[[Received], Steps]:
    def answer(_: Received) -> Steps:
        from tests.scripted import json_answer

        choice: dict[str, Any] = {"index": 0, "message": {"content": text}, "finish_reason": "stop"}
        return json_answer({"choices": [choice | ({} if ids is None else {"token_ids": ids})]})

    return answer


@pytest.mark.parametrize(
    ("one", "other", "unit", "equal", "first"),
    [
        (("a b", [1, 2, 3, 4]), ("a b", [1, 2, 3, 4]), "token", 1.0, None),
        (("a b", [1, 2, 3, 4]), ("a b", [1, 2, 9, 4]), "token", 0.5, 2),
        (("a b", [1, 2, 3, 4]), ("a b", [1, 2, 3]), "token", 0.75, 3),
        (("a b c d", None), ("a b c x", [1]), "word", 0.75, 3),
        (("a", [1]), ("b", [2]), "token", 0.0, 0),
    ],
)
async def test_agreement_is_the_share_before_the_first_difference(
    one: Any, other: Any, unit: str, equal: float, first: int | None
) -> None:
    async with ScriptedBackend() as left, ScriptedBackend() as right, session(5.0) as asking:
        left.default, right.default = with_ids(*one), with_ids(*other)
        mine, theirs = backend_at(left.url), backend_at(right.url)
        patients = [Patient(b, Asker(b, asking), LoopClock(), "tiny", 5.0, 0.0) for b in (mine, theirs)]
        found = await agree.compare(*patients)
        asked = (await left.received(0)).json
    assert (found.unit, found.equal, set(found.diverged)) == (unit, equal, {first})
    assert (asked["temperature"], asked["return_token_ids"]) == (0, True)


# -- the command ---------------------------------------------------------------------------------------------------


async def command(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, ["gate", *arguments])


async def test_the_command_prints_keeps_and_passes(tmp_path: Path) -> None:
    out = tmp_path / "gate.json"
    async with ScriptedBackend() as backend:
        backend.default = model
        done = await command(backend.url, "--needle", "1k", "--reference", backend.url, "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "passed  arithmetic: 47 x 83 = 3901" in done.output
    assert "passed  agreement: 100.0% equal" in done.output
    result = read(out.read_text())
    assert (result.passed, result.model, len(result.tests)) == (True, "tiny", 6)
    assert json.loads(out.read_text())["agreement"]["equal"] == 1.0


async def test_a_failed_test_is_exit_code_1_and_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "gate.json"
    async with ScriptedBackend() as backend:
        backend.default = lambda request: model(request, arithmetic="3911")
        done = await command(backend.url, "--needle", "0", "--json", "--out", str(out))
    assert done.exit_code == 1
    assert json.loads(done.output) == json.loads(out.read_text())
    assert not read(out.read_text()).passed
    assert [test["name"] for test in json.loads(done.output)["tests"] if not test["passed"]] == ["arithmetic"]


async def test_too_little_agreement_fails_where_some_is_demanded() -> None:
    async with ScriptedBackend() as backend, ScriptedBackend() as other:
        backend.default, other.default = model, lambda _: chat_json("NO")
        arguments = [backend.url, "--needle", "0", "--reference", other.url]
        assert (await command(*arguments)).exit_code == 0
        assert (await command(*arguments, "--agree", "0.5")).exit_code == 1
        assert (await command(backend.url, "--agree", "0.5")).exit_code == 2


# -- the file, and the tier that demands it ------------------------------------------------------------------------

PASSED = GateResult("http://a", "tiny", 1_700_000_000.0, (Outcome("arithmetic", True, "47 x 83 = 3901"),))
FAILED = GateResult("http://a", "tiny", 1_700_000_000.0, (Outcome("arithmetic", False, "3911"),))


def written(result: GateResult, **more: Any) -> str:
    return json.dumps(table(result, {}) | more)


@pytest.mark.parametrize("result", [PASSED, FAILED])
def test_what_is_written_is_read_back(result: GateResult) -> None:
    assert read(written(result)) == result


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ("[]", "not what tierline gate writes"),
        (written(PASSED, format=2), "not what tierline gate writes"),
        (written(PASSED, at="yesterday"), "at: expected"),
        (written(PASSED, tests=[]), "tests: expected"),
        (written(PASSED, tests=[{"name": "x", "passed": 1}]), "tests: expected"),
        (written(FAILED, passed=True), "passed: does not agree"),
    ],
)
def test_what_is_no_result_is_no_passed_gate(text: str, says: str) -> None:
    with pytest.raises(BadGate, match=says):
        read(text)


CONFIG = """
[[backends]]
name = "a"
url = "http://127.0.0.1:1"
{gate}
[models.tiny]
tier = "fast"
[tiers.fast]
requires_gate = true
"""


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        ("", 'tier "fast" wants a passed gate, and none of its backends has that (a): set their gate'),
        ('gate = "failed.json"', "wants a passed gate"),
        ('gate = "none.json"', "backends[0].gate: "),
        ('gate = "torn.json"', "it is no JSON"),
    ],
)
def test_a_tier_that_nobody_passed_for_is_a_problem_of_the_configuration(
    gate: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "failed.json").write_text(written(FAILED))
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(ConfigError, match=re.escape(says)):
        loads(CONFIG.format(gate=gate), {}, folder=tmp_path)


def test_another_result_in_the_same_file_is_another_configuration(tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    text = CONFIG.format(gate='gate = "gate.json"')
    path.write_text(written(PASSED))
    before, same = loads(text, {}, folder=tmp_path), loads(text, {}, folder=tmp_path)
    assert before == same
    path.write_text(written(PASSED, at=PASSED.at + 1))
    assert loads(text, {}, folder=tmp_path) != before


GATED = """
[models.tiny]
[tiers.fast]
requires_gate = true
gate_max_age = 3600.0
[tiers.balanced]
"""


async def test_only_who_passed_serves_a_tier_that_demands_it_and_only_for_so_long(
    make_gateway: MakeGateway, tmp_path: Path
) -> None:
    clock = FakeClock()
    at = clock.wall() - 1800.0
    (tmp_path / "a.json").write_text(written(FAILED, at=at))
    (tmp_path / "b.json").write_text(written(PASSED, at=at))
    async with ScriptedBackend() as a, ScriptedBackend() as b:
        written_to = {name: f'gate = "{name}.json"' for name in "ab"}
        config = "[health]\ntrials = false\n" + GATED
        gateway = await make_gateway(a, b, config=config, per_backend=written_to, clock=clock)
        fast = {"x-quality-tier": "fast"}
        for _ in range(4):
            answer = await gateway.chat(headers=fast)
            assert (answer.status, answer.headers["x-tierline-backend"]) == (200, "b")
        record = await gateway.record(0)
        assert [(drop.backend, drop.reason) for drop in record.drops] == [("a", "gate")]
        clock.time += 1801.0
        refused = await gateway.chat(headers=fast)
        assert refused.status == 503
        assert "(a: gate, b: gate)" in refused.json["error"]["message"]
        assert (await gateway.chat(headers={"x-quality-tier": "balanced"})).status == 200
