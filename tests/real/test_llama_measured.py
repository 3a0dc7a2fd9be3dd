"""`tierline bench`, `doctor` and `gate` against a real llama-server: usage at the end only, no token ids, connections
that it closes after some answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from policies.profilefile import read
from proxy.cli import main
from tests.real.llama import LlamaServer

pytestmark = pytest.mark.real


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_bench_measures_it_and_says_what_it_could_not(llama: LlamaServer, tmp_path: Path) -> None:
    out = tmp_path / "llama.toml"
    matrix = [
        "--concurrency",
        "1,2",
        "--context",
        "0",
        "--prefill",
        "300,900",
        "--tokens",
        "40",
        "--rounds",
        "1",
    ]
    done = run("bench", llama.url, *matrix, "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "usage comes at an answer's end only" in done.output
    own = read(out.read_text()).measured
    assert [(streams, context) for streams, context, _ in own.decode] == [(1, 0), (2, 0)]
    assert [
        abs(tokens / wanted - 1) < 0.1 for (tokens, _), wanted in zip(own.prefill, (300, 900), strict=True)
    ]
    assert own.speculation.draft_tokens == 0


def test_doctor_finds_what_it_lacks_and_nothing_that_it_has(llama: LlamaServer) -> None:
    done = run("doctor", llama.url, "--json", "--timeout", "30")
    found = {entry["what"]: entry for entry in json.loads(done.output)}
    for what in ("stream", "usage", "long stream", "thinking", "counters", "tools", "required", "cancel"):
        assert found[what]["severity"] == "ok", found[what]
    assert found["continuation"]["severity"] == "note"
    assert found["history"]["patch"] == {"history_reasoning": "reasoning_content"}


def test_a_scripted_model_passes_no_gate(llama: LlamaServer) -> None:
    done = run("gate", llama.url, "--needle", "500", "--json", "--patience", "30")
    assert done.exit_code == 1
    tests = {test["name"]: test for test in json.loads(done.output)["tests"]}
    assert not tests["arithmetic"]["passed"]
    assert "scripted model" in tests["arithmetic"]["detail"]
