"""What the database of records tells, against figures worked out by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from policies.retry import Failure
from policies.types import Slo
from proxy.cli import main
from proxy.errors import Ending, Hedged, Outcome
from proxy.record import Record, line
from proxy.recordrow import row
from proxy.recordstore import RecordStore
from proxy.report import scan as scanning
from proxy.report.cli import BY
from proxy.report.figures import figures, percentiles
from proxy.report.picture import colour
from proxy.report.promise import Promises
from proxy.report.scan import CONTEXT_EDGES, CONTEXTS, Found, Question, context_bin, scan
from proxy.report.source import BadStore, Extent, Window, extent
from proxy.wire.toolevents import Counters

NOON = 1_800_000_000.0
"""Seconds since the epoch: 2027-01-15 08:00 UTC."""
CLOSE = 0.0015
"""Relative: ticks are 0.25 % wide."""

CONFIG = """
[[backends]]
name = "fp8"
url = "http://127.0.0.1:1"
profile = "fp8-mtp3-tp2-v17"
[[backends]]
name = "bf16"
url = "http://127.0.0.1:2"
profile = "bf16-dflash8-tp2-v17"
[models.qwen]
[tiers.balanced.slo]
ttft_seconds = 1.0
prefill_factor = 0
tpot_seconds = 0.05
"""


def stream(
    number: int,
    ttft: float,
    tpot: float = 0.02,
    *,
    tokens: int = 11,
    prompt: int = 2000,
    cached: int | None = 500,
    backend: str = "fp8",
    at: float | None = None,
    wait: float = 0.0,
    **more: Any,
) -> Record:
    """One that was streamed, ended well, and took exactly that."""
    r = Record(f"r{number}", "chat", "/v1/chat/completions", 100.0, NOON + number if at is None else at)
    r.model = r.target = "qwen"
    r.tier_asked = r.tier = "balanced"
    r.backend, r.reason, r.attempts, r.in_flight, r.stream = backend, "predicted", 1, 2, True
    r.tenant, r.key = "acme", "tl-1"
    r.body_read_at = 100.0
    r.queued_at, r.admitted_at = 100.0, 100.0 + wait
    r.dispatched_at = 100.0 + wait
    r.first_delta_at = 100.0 + ttft
    r.last_delta_at = r.last_upstream_at = r.finished_at = r.first_delta_at + tpot * (tokens - 1)
    r.prompt_tokens, r.completion_tokens, r.cached_tokens = prompt, tokens, cached
    r.gaps.add(tpot)
    r.outcome, r.status = Outcome.OK, 200
    for name, value in more.items():
        setattr(r, name, value)
    return r


SMALL = [
    stream(0, 0.1),
    stream(1, 0.2),
    stream(2, 0.3, 0.04),
    stream(3, 0.4, 0.06),  # too slow a token
    stream(4, 2.0, wait=1.5),  # too late
    stream(5, 0.5, outcome=Outcome.UPSTREAM_CUT, error="cut", attempts=2, failures=(("bf16", Failure.CUT),)),
    stream(6, 0.6, outcome=Outcome.CANCELLED),
    stream(7, 0.3, backend="bf16", tier_asked="exact", tier="exact", prompt=5000, cached=None),
    stream(8, 0.2, continuation=Ending.WHOLE, hedge=Hedged.WON, tool_counts=Counters(parsed=1)),
    stream(9, 0.2, tool_counts=Counters(xml=1, cut=1)),
]


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Path]:
    def make(records: list[Record]) -> Path:
        path = tmp_path / "records.db"
        store = RecordStore(str(path), lambda: NOON)
        for one in records:
            one.closed = False
        store([row(one, one.close(200.0)) for one in records])
        store.close()
        return path

    return make


PROMISES = Promises({"balanced": Slo(1.0, 0.0, 0.05)})


def told(path: Path, *by: str, promises: Promises = PROMISES, step: float | None = None) -> dict[str, Any]:
    there = extent(path, Window())
    assert there is not None
    question = Question(path, Window(), by, promises, NOON, step, 10, (there.low, there.high))
    return figures(question, scan(question), 10.0)


def near(value: float) -> Any:
    return pytest.approx(value, rel=CLOSE)


# -- figures -------------------------------------------------------------------------------------------------


def test_the_figures_of_a_small_set_are_those_worked_out_by_hand(made: Callable[..., Path]) -> None:
    report = told(made(SMALL), "backend")
    assert report["requests"] == 10
    by_name = {group["by"]["backend"]: group for group in report["groups"]}
    assert list(by_name) == ["fp8", "bf16"], "the largest first"
    fp8 = by_name["fp8"]
    assert (fp8["requests"], fp8["ok"]) == (9, 7)
    assert fp8["outcomes"] == {"ok": 7, "upstream_cut": 1, "cancelled": 1}
    # 0.1 0.2 0.2 0.2 0.3 0.4 0.5 0.6 2.0
    assert fp8["ttft"] == {"p50": near(0.3), "p95": near(2.0), "p99": near(2.0)}
    # 0.02 seven times, 0.04, 0.06
    assert fp8["tpot"] == {"p50": near(0.02), "p95": near(0.06), "p99": near(0.06)}
    assert fp8["queue_wait"]["p95"] == near(1.5)
    assert fp8["e2e"]["p50"] == near(0.7)  # 0.3 0.4 0.4 0.4 0.7 0.7 0.8 1.0 2.2: the fifth
    # Offered: all but the one that its client gave up. Missed: slow, late, cut.
    assert fp8["goodput"] == pytest.approx(5 / 8)
    assert fp8["completion_tokens"] == 99
    assert fp8["tokens_per_second"] == pytest.approx(9.9)
    assert fp8["cached"] == pytest.approx(0.25)
    assert fp8["retries"] == 1
    assert fp8["continuations"] == {"whole": 1}
    assert fp8["hedges"] == {"won": 1}
    assert (fp8["tool_answers"], fp8["tool_integrity"]) == (2, 0.5)
    bf16 = by_name["bf16"]
    assert (bf16["goodput"], bf16["cached"], bf16["tool_integrity"]) == (None, None, None)
    assert report["tiers"] == [
        {"asked": "balanced", "served": "balanced", "requests": 9},
        {"asked": "exact", "served": "exact", "requests": 1},
    ]
    assert report["failed_attempts"] == [{"backend": "bf16", "failure": "cut", "attempts": 1}]


def test_the_whole_is_what_the_groups_are_together(made: Callable[..., Path]) -> None:
    path = made(SMALL)
    alone = told(path)
    for by in ("backend", "tier", "tenant", "context", "model", "key"):
        assert told(path, by)["all"] == alone["all"], by


def test_contexts_are_grouped_by_their_size_and_dimensions_can_be_combined(made: Callable[..., Path]) -> None:
    groups = told(made(SMALL), "context", "tier")["groups"]
    assert [group["by"] for group in groups] == [
        {"context": "1k–4k", "tier": "balanced"},
        {"context": "4k–16k", "tier": "exact"},
    ]


def test_what_a_record_does_not_have_is_a_group_of_its_own(made: Callable[..., Path]) -> None:
    refused = Record("x", "chat", "/", 100.0, NOON, outcome=Outcome.BAD_REQUEST)
    groups = told(made([*SMALL, refused]), "context", "backend")["groups"]
    assert {"context": "–", "backend": "–"} in [group["by"] for group in groups]


@pytest.mark.parametrize("tokens", [0, 1, *(edge + d for edge in CONTEXT_EDGES for d in (-1, 0, 1))])
def test_context_bins_meet_at_their_edges(tokens: int) -> None:
    edges = [0, *CONTEXT_EDGES, 10**9]
    place = context_bin(tokens)
    assert edges[place] <= tokens < edges[place + 1]
    assert CONTEXTS[place]
    assert context_bin(2 ** tokens.bit_length() - 1) == place, "numbers of as many bits are in one bin"


def test_percentiles_are_values_that_were_there() -> None:
    assert percentiles({}) == {"p50": None, "p95": None, "p99": None}
    found = percentiles({5000: 98, 5100: 1, 5200: 1})
    assert found["p50"] == found["p95"]
    assert found["p99"] is not None
    assert found["p99"] > (found["p95"] or 0)


# -- the promise ---------------------------------------------------------------------------------------------


def test_prefill_of_what_was_not_cached_extends_the_promise(made: Callable[..., Path]) -> None:
    from proxy.config import loads

    promises = Promises.of(loads(CONFIG.replace("prefill_factor = 0", "prefill_factor = 2"), {}))
    cold = min(profile.cold_ttft(60_000) for profile in promises.profiles.values())
    bounds = [1.0 + 2 * cold - 0.1, 1.0 + 2 * cold + 0.1]
    for ttft, goodput in zip(bounds, (1.0, 0.0), strict=True):
        path = made([stream(0, ttft, prompt=70_000, cached=10_000)])
        assert told(path, promises=promises)["all"]["goodput"] == goodput
        path.unlink()


@pytest.mark.parametrize(("seconds", "goodput"), [(1.4, 1.0), (1.6, 0.0)])
def test_what_was_not_streamed_has_to_be_whole_when_a_stream_would(
    made: Callable[..., Path], seconds: float, goodput: float
) -> None:
    one = stream(0, 0.1, stream=False, finished_at=100 + seconds)  # 1 s and 10 tokens of 50 ms
    assert told(made([one]))["all"]["goodput"] == goodput


def test_a_tier_that_promises_nothing_has_no_goodput(made: Callable[..., Path]) -> None:
    assert told(made(SMALL), promises=Promises())["all"]["goodput"] is None


# -- many ----------------------------------------------------------------------------------------------------


def test_many_records_are_split_and_add_up_to_the_same(
    made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made([stream(n, 0.1 + n % 97 / 50, backend=("fp8", "bf16")[n % 2]) for n in range(1000)])
    there = extent(path, Window())
    assert there is not None
    question = Question(path, Window(), ("backend",), PROMISES, NOON, 100.0, 10, (there.low, there.high))
    parts = [scanning._part(question, low, low + 250) for low in range(1, 1001, 250)]
    found = Found()
    for part in parts:
        found.add(part)
    found.slowest = sorted(found.slowest, key=lambda one: -one[0])[:10]
    monkeypatch.setattr(scanning, "TOGETHER", 70)
    monkeypatch.setattr(scanning, "FETCH", 30)
    pieces = scan(question)
    monkeypatch.undo()
    once = scan(question)
    assert figures(question, found, 1.0) == figures(question, once, 1.0) == figures(question, pieces, 1.0)
    assert once.groups["fp8",].requests == 500


def test_curves_and_cells_hold_every_record_once(made: Callable[..., Path]) -> None:
    report = told(made([stream(n, 0.2, in_flight=n % 5) for n in range(100)]), "backend", step=10.0)
    assert [(c["at"] - NOON, c["requests"]) for c in report["curves"]] == [(10 * n, 10) for n in range(10)]
    assert {c["streams"]: c["requests"] for c in report["cells"]} == {"1": 20, "2": 20, "3–4": 40, "5–8": 20}
    for cell in report["cells"]:
        assert cell["tokens_per_second"] == near(50.0)
        assert (cell["context"], cell["mean_context"]) == ("1k–4k", 2000)


def test_cells_stand_beside_the_profile(made: Callable[..., Path]) -> None:
    from policies.profile import get

    profile = get("fp8-mtp3-tp2-v17")
    tpot = 2 / profile.stream_rate(3, 2000)  # half as fast
    promises = Promises(profiles={"fp8": profile})
    (cell,) = told(made([stream(0, 0.2, tpot, in_flight=2)]), promises=promises, step=10.0)["cells"]
    assert cell["of_profile"] == pytest.approx(0.5, rel=CLOSE)


# -- the slowest ---------------------------------------------------------------------------------------------


def test_the_slowest_come_first_and_say_where_their_time_went(made: Callable[..., Path]) -> None:
    slow = told(made(SMALL))["slowest"]
    assert [one["request_id"] for one in slow[:3]] == ["r4", "r6", "r5"]
    assert slow[0]["why"] == "1.50 s in line; 0.50 s at fp8 with 1,500 tokens to read, beside 2 others"
    assert slow[2]["why"].endswith("cut at bf16")


# -- the command line ----------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, made: Callable[..., Path]) -> Callable[..., Result]:
    made(SMALL)
    (tmp_path / "config.toml").write_text(CONFIG)

    def invoke(*arguments: str, config: str = "config.toml") -> Result:
        return CliRunner().invoke(main, [*arguments, "--config", str(tmp_path / config)])

    return invoke


def test_the_terminal_shows_every_table(run: Callable[..., Result]) -> None:
    result = run("report", "--since", "all")
    assert result.exit_code == 0, result.output
    for words in (
        "10 requests",
        "TTFT p50",
        "goodput",
        "62.5%",
        "upstream_cut",
        "exact",
        "bf16",
        "1.50 s in line",
    ):
        assert words in result.output, words


def test_json_has_the_same_figures_and_curves(run: Callable[..., Result]) -> None:
    result = run("report", "--since", "all", "--by", "tier,backend", "--json")
    report = json.loads(result.stdout)
    assert report["by"] == ["tier", "backend"]
    assert report["groups"][0]["goodput"] == pytest.approx(5 / 8)
    assert sum(curve["requests"] for curve in report["curves"]) == 10
    assert sum(cell["requests"] for cell in report["cells"]) == 10


class Links(HTMLParser):
    """Whatever a page would fetch, or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("script", "link", "img", "iframe", "object", "use", "image"):
            self.found.append(tag)
        self.found += [
            f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "xlink:href")
        ]
        self.found += [f"{tag} {name}" for name, _ in attrs if name.startswith("on")]


def test_the_page_needs_nothing_else_and_escapes_what_clients_chose(
    run: Callable[..., Result], tmp_path: Path, made: Callable[..., Path]
) -> None:
    made([stream(20, 9.0, request_id="<script>alert(1)</script>", model="<b>x"), stream(120, 0.3)])
    result = run("report", "--since", "all", "--by", "model", "--html", str(tmp_path / "r.html"))
    assert result.exit_code == 0, result.output
    text = (tmp_path / "r.html").read_text("utf-8")
    links = Links()
    links.feed(text)
    assert links.found == []
    assert not re.search(r"https?:|url\(|@import", text)
    assert "<b>x" not in text
    assert links.tags.count("svg") >= 5
    assert "fp8: tokens/s of a stream" in text


def test_a_window_is_taken_by_when_requests_were_accepted(run: Callable[..., Result]) -> None:
    def count(*window: str) -> int:
        result = run("report", "--json", *window)
        assert result.exit_code == 0, result.output
        return int(json.loads(result.stdout)["requests"])

    def at(seconds: float) -> str:
        return datetime.fromtimestamp(NOON + seconds, UTC).isoformat()

    assert count("--since", "all") == 10
    assert count("--from", at(3), "--to", at(7)) == 4
    assert count("--to", at(2)) == 2
    assert count("--since", "3s", "--to", at(10)) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("report", "--since", "soon"), 2, "--since"),
        (("report", "--from", "tomorrow"), 2, "--from"),
        (("report", "--since", "1h", "--from", "2027-01-01"), 2, "one of them"),
        (("report", "--by", "colour"), 2, "backend, tier"),
        (("report", "--from", "2040-01-01"), 1, "no records of that time"),
        (("report", "--db", "nowhere.db"), 1, "no such file"),
        (("records", "export", "--format", "parquet"), 2, "--out"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    run: Callable[..., Result], arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = run(*arguments)
    assert (result.exit_code, words in result.output) == (code, True), result.output


def test_without_a_database_the_configuration_says_so(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "off.toml").write_text(CONFIG + '[telemetry]\nstore = "off"\n')
    result = run("report", config="off.toml")
    assert (result.exit_code, "telemetry.store" in result.output) == (2, True)


def test_a_database_can_be_asked_without_a_configuration(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run("report", "--db", str(tmp_path / "records.db"), "--since", "all", "--json", config="no.toml")
    assert json.loads(result.stdout)["all"]["goodput"] is None


def test_what_is_no_database_of_records_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"no database " * 1000)
    with pytest.raises(BadStore, match="not a database"):
        extent(tmp_path / "x.db", Window())


def test_reading_changes_nothing_and_goes_on_beside_a_writer(made: Callable[..., Path]) -> None:
    path = made(SMALL)
    store = RecordStore(str(path), lambda: NOON)
    one = stream(50, 0.1)
    store([row(one, one.close(200.0))])
    assert extent(path, Window()) == Extent(1, 11, NOON, NOON + 50)
    assert told(path)["requests"] == 11
    store.close()


# -- export --------------------------------------------------------------------------------------------------


def lines() -> list[dict[str, Any]]:
    out = []
    for one in SMALL:
        one.closed = False
        out.append(json.loads(line(one, one.close(200.0))))
    return out


def test_exported_lines_are_those_of_telemetry_records(run: Callable[..., Result]) -> None:
    result = run("records", "export")
    assert [json.loads(text) for text in result.stdout.splitlines()] == lines()


def test_exported_lines_can_be_of_a_window_and_go_to_a_file(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    at = datetime.fromtimestamp(NOON + 8, UTC).isoformat()
    result = run("records", "export", "--from", at, "--out", str(tmp_path / "out.jsonl"))
    assert result.exit_code == 0
    found = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found == lines()[8:]


def test_parquet_has_a_column_for_each_key(run: Callable[..., Result], tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="needs tierline[parquet]")
    result = run("records", "export", "--format", "parquet", "--out", str(tmp_path / "r.parquet"))
    assert result.exit_code == 0, result.output
    found = pq.read_table(tmp_path / "r.parquet").to_pylist()
    nested = ("drops", "failures", "continuation", "hedge", "tool_counts", "decisions")
    for flat, said in zip(found, lines(), strict=True):
        assert flat.pop("time") == datetime.fromisoformat(said.pop("time"))
        for key in nested:
            flat[key] = None if flat[key] is None else json.loads(flat[key])
        assert flat == said


# -- colours -------------------------------------------------------------------------------------------------


def test_a_cell_is_white_at_the_profile_and_redder_the_slower() -> None:
    assert colour(1.0) == "rgb(255,255,255)"
    assert colour(0.5) == colour(0.2) == "rgb(195,115,115)"
    assert colour(None) == "#eee"


# -- the page ------------------------------------------------------------------------------------------------


def test_every_option_is_documented_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text("utf-8")
    rows = [text.split(" | ") for text in page.splitlines() if text.startswith("| `-")]
    said = {name.split()[0]: cells[1] for cells in rows for name in re.findall(r"`(-[^`]+)`", cells[0])}
    options = [option for option in main.commands["report"].params if isinstance(option, click.Option)]
    assert set(said) == {name for option in options for name in option.opts}
    for option in options:
        if option.opts[0] in ("--by", "--slowest"):
            assert said[option.opts[0]].strip("`") == str(option.default), option.opts
    by = next(text for text in page.splitlines() if text.startswith("| `--by"))
    assert re.findall(r"`(\w+)`", by.split(" | ")[2]) == list(BY)
