"""`tierline sim` says what it can be, checks itself against the study, and serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from policies import profile
from proxy.sim.cli import sim


def test_list_names_every_profile() -> None:
    result = CliRunner().invoke(sim, ["--list"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()] == list(profile.names())


def test_check_prints_model_beside_study_and_succeeds() -> None:
    result = CliRunner().invoke(sim, ["--check", "--profile", "fp8-mtp3-tp1-v17"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    own = profile.get("fp8-mtp3-tp1-v17").measured
    assert len(lines) == 2 + len(own.decode) + len(own.latency) + len(own.prefill)
    assert "91.500" in lines[1]
    assert lines[-1].endswith("0 out of tolerance (tok/s 3 %, TTFT 10 %)")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give --profile NAME, --list or --check"),
        (["--profile", "fp9"], "known: fp8-mtp3-may5"),
        (["--profile", "gguf-q8"], "quality figures only"),
        (["--profile", "fp8-mtp3-v13", "--time-scale", "0"], "time-scale"),
    ],
)
def test_a_command_line_that_cannot_work_is_a_usage_error(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(sim, arguments)
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize(
    ("script", "says"),
    [({"fault": "die"}, "a script is a list"), ([{"fault": "dye"}], "unknown fault 'dye'"), ("{", "")],
)
def test_a_script_that_means_nothing_is_refused(tmp_path: Path, script: object, says: str) -> None:
    path = tmp_path / "faults.json"
    path.write_text(script if isinstance(script, str) else json.dumps(script))
    result = CliRunner().invoke(sim, ["--profile", "fp8-mtp3-v13", "--script", str(path)])
    assert result.exit_code == 2
    assert says in result.output


def test_every_option_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text("utf-8")
    options = [o for p in sim.params for o in p.opts if not getattr(p, "hidden", False)]
    assert [option for option in options if f"`{option}" not in page] == []


def test_every_fault_is_documented() -> None:
    from proxy.sim.faults import FaultKind

    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text("utf-8")
    assert [kind for kind in FaultKind if f"| `{kind}`" not in page] == []


def test_every_profile_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "profiles.md").read_text("utf-8")
    assert [name for name in profile.names() if f"| `{name}`" not in page] == []
