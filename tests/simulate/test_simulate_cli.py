"""`tierline simulate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.simulate.cli import SHAPES, simulate
from proxy.simulate.table import COLUMNS

ROOT = Path(__file__).parents[2]
SHORT = ["--rate", "2", "--rate", "6", "--seconds", "20", "--policy", "predicted", "--policy", "clairvoyant"]


class Page(HTMLParser):
    """Counts tags, notes attributes that would load something, and checks that every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.loads += [name for name, _ in attrs if name in ("src", "href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_it_prints_a_table_and_writes_a_picture_and_lines(tmp_path: Path) -> None:
    html, lines = tmp_path / "out.html", tmp_path / "out.jsonl"
    result = CliRunner().invoke(simulate, ["chat", *SHORT, "--html", str(html), "--json", str(lines)])
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if "predicted" in line or "clairvoyant" in line]
    assert len(rows) == 4
    outcomes = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(o["policy"], o["rate"]) for o in outcomes] == [
        ("predicted", 2), ("clairvoyant", 2), ("predicted", 6), ("clairvoyant", 6),
    ]  # fmt: skip
    assert all(o["goodput"] > 0.9 and o["violations"] == 0 and o["requests"] > 20 for o in outcomes)
    page = Page()
    page.feed(html.read_text())
    assert page.open == []
    assert page.loads == []
    assert "script" not in page.count
    assert page.count["svg"] == 4
    assert page.count["polyline"] == 8


def test_at_one_rate_the_picture_shows_time(tmp_path: Path) -> None:
    html = tmp_path / "out.html"
    arguments = ["--rate", "3", "--seconds", "20", "--policy", "predicted", "--html", str(html)]
    result = CliRunner().invoke(simulate, [*arguments, "--fault", "down:bf16:5"])
    assert result.exit_code == 0, result.output
    assert "goodput before the fault" in result.stdout
    text = html.read_text()
    assert "goodput over time" in text
    assert len(re.findall("<svg", text)) == 2


def test_capacity_given_is_not_sought(tmp_path: Path) -> None:
    lines = tmp_path / "out.jsonl"
    arguments = [
        "--capacity",
        "4",
        "--load",
        "50",
        "--load",
        "100",
        "--seconds",
        "10",
        "--policy",
        "predicted",
    ]
    result = CliRunner().invoke(simulate, [*arguments, "--json", str(lines)])
    assert result.exit_code == 0, result.output
    outcomes = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(o["rate"], o["load"]) for o in outcomes] == [(2.0, 0.5), (4.0, 1.0)]


def test_markdown_is_a_table_of_the_same_columns() -> None:
    result = CliRunner().invoke(
        simulate, ["--rate", "2", "--seconds", "10", "--policy", "predicted", "--markdown"]
    )
    assert result.exit_code == 0, result.output
    table = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert table[0] == "| " + " | ".join(COLUMNS) + " |"
    assert {line.count("|") for line in table} == {len(COLUMNS) + 1}


def test_a_fleet_is_named_backend_by_backend() -> None:
    arguments = ["--rate", "2", "--seconds", "10", "--policy", "predicted", "--times", "2"]
    result = CliRunner().invoke(simulate, [*arguments, "--backend", "a=fp8-mtp3-tp1-v17"])
    assert result.exit_code == 0, result.output
    assert "chat on a-1 + a-2" in result.stdout


def test_a_trace_file_is_played(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    rows = [f"2023-11-16 18:{minute:02}:{second:02},500,40" for minute in range(5) for second in range(60)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    result = CliRunner().invoke(simulate, [str(path), "--rate", "2", "--policy", "predicted"])
    assert result.exit_code == 0, result.output
    assert "mine on fp8 + bf16" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chit-chat"], "neither a file nor one of chat, agents"),
        (["--backend", "fp8"], "not NAME=PROFILE"),
        (["--backend", "a=fp9"], "fp8-mtp3-tp2-v17"),
        (["--backend", "a=gguf-q8"], "not NAME=PROFILE"),
        (["--backend", "a=fp8-mtp3-tp2-v17", "--backend", "a=bf16-dflash8-tp2-v17"], "names must differ"),
        (["--policy", "best"], "least_in_flight"),
        (["--fault", "melt:fp8"], "kinds: down, slow, collapse"),
        (["--fault", "down:fp9"], "there are fp8, bf16"),
        (["--fault", "down:fp8:0"], "KIND:BACKEND"),
        (["--fault", "down:fp8:soon"], "KIND:BACKEND"),
        (["--load", "0"], "--load"),
    ],
)
def test_a_command_line_that_cannot_work_is_a_usage_error(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(simulate, arguments)
    assert result.exit_code == 2
    assert says in result.output


def test_a_file_that_is_no_trace_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    result = CliRunner().invoke(simulate, [str(path)])
    assert result.exit_code == 2
    assert "neither a Mooncake trace" in result.output


def test_every_option_shape_and_column_is_documented() -> None:
    page = (ROOT / "docs" / "simulate.md").read_text("utf-8")
    options = [o for p in simulate.params for o in p.opts if o.startswith("--")]
    assert [option for option in options if f"`{option}" not in page] == []
    assert [name for name in SHAPES if f"| `{name}`" not in page] == []
    assert [column for column in COLUMNS if f"| {column} |" not in page] == []


def test_the_shapes_on_the_command_line_are_those_of_the_simulator() -> None:
    from policies.simulation import SHAPES as drawn

    assert tuple(drawn) == SHAPES


def test_a_files_policy_plays_beside_the_named_ones(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('[policy]\nname = "round_robin"\n')
    other = tmp_path / "other.toml"
    other.write_text('[policy]\nfile = "own.py"\n')
    (tmp_path / "own.py").write_text(
        "def score(facts, backend):\n    return {'w': float(backend.name == 'fp8')}\n"
    )
    lines = tmp_path / "out.jsonl"
    policies = ["--policy", "round_robin", "--policy", str(mine), "--policy", str(other)]
    result = CliRunner().invoke(simulate, ["--rate", "2", "--seconds", "20", *policies, "--json", str(lines)])
    assert result.exit_code == 0, result.output
    named, same, own = [json.loads(line) for line in lines.read_text().splitlines()]
    assert (named["policy"], same["policy"], own["policy"]) == ("round_robin", "mine", "other")
    assert named | {"policy": "mine"} == same
    assert own["shares"]["fp8"] == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [("[policy]\nname = 'best'", "policy.name"), ("[policy", "TOML"), ("[policy.router]\nkv = 1", "kv")],
)
def test_a_file_with_a_wrong_policy_is_a_usage_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    result = CliRunner().invoke(simulate, ["--policy", str(path)])
    assert result.exit_code == 2
    assert says.lower() in result.output.lower()
