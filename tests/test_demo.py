"""The demos' parts: rows, the tail of the records, plans, the picture; and the whole of each, on its servers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from proxy import config as configuration
from tests.demo.fleet import Fleet
from tests.demo.llama import llama_fleet
from tests.demo.picture import CELL, picture
from tests.demo.study import study_fleet
from tests.demo.table import (
    COLUMNS,
    PLAIN_WIDTH,
    Rows,
    Tail,
    fitting,
    milliseconds,
    outcome,
    tokens_per_second,
    warmth,
    why,
)
from tests.demo.traffic import Job
from tests.real.llama import find_server
from tests.real.server import Unavailable

REPOSITORY = Path(__file__).parents[1]

RECORD = {
    "request_id": "demo-0001",
    "path": "/v1/chat/completions",
    "model": "tiny",
    "tier": "balanced",
    "backend": "fp8",
    "reason": "least_load",
    "drops": {},
    "prompt_tokens": 41,
    "cached_tokens": 0,
    "completion_tokens": 16,
    "ttft_seconds": 0.0123,
    "chunk_gap_p50_seconds": 0.00123,
    "tpot_seconds": 0.001,
    "e2e_seconds": 0.04,
    "overhead_seconds": 0.0002,
    "finish_reason": "stop",
    "outcome": "ok",
    "status": 200,
    "error": None,
}
REFUSED = RECORD | {
    "request_id": "demo-0002",
    "backend": None,
    "reason": None,
    "prompt_tokens": None,
    "cached_tokens": None,
    "completion_tokens": None,
    "ttft_seconds": None,
    "chunk_gap_p50_seconds": None,
    "tpot_seconds": None,
    "finish_reason": None,
    "outcome": "bad_request",
    "status": 400,
    "error": "context_length_exceeded",
}


def rows(width: int, jobs: Sequence[Job] = ()) -> tuple[Rows, Console]:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    return Rows(console, {job.request_id: job for job in jobs}), console


def printed(console: Console) -> list[str]:
    console.file.close()
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_a_row_shows_what_the_record_says() -> None:
    table, console = rows(PLAIN_WIDTH, [Job("demo-0001", "chat")])
    table.header()
    table.add(RECORD)
    header, row = printed(console)
    assert header.split() == [column.title for column in COLUMNS]
    assert row.split() == (
        ["chat", "balanced", "fp8", "least_load", "41", "0", "12", "ms", "1.23", "ms", "1.00", "ms"]
        + ["400", "ok,", "stop"]
    )
    assert table.surprises == 0


def test_what_a_request_does_not_have_is_a_dash() -> None:
    table, console = rows(PLAIN_WIDTH, [Job("demo-0002", "over-long", expected="bad_request")])
    table.add(REFUSED)
    (row,) = printed(console)
    assert row.split() == (
        ["over-long", "balanced", "–", "context_length…", "–", "–", "–", "–", "–", "–"]
        + ["bad_request", "400"]
    )
    assert table.surprises == 0


def test_an_end_that_was_not_expected_is_counted() -> None:
    table, console = rows(
        PLAIN_WIDTH, [Job("demo-0001", "over-long", expected="bad_request"), Job("demo-0002", "x")]
    )
    table.add(RECORD)
    table.add(REFUSED)
    table.add(REFUSED | {"request_id": "of somebody else"})
    printed(console)
    assert table.surprises == 3


@pytest.mark.parametrize("width", [PLAIN_WIDTH, 110, 100, 80, 60, 5])
def test_rows_fit_the_terminal(width: int) -> None:
    table, console = rows(width, [Job("demo-0001", "a very long description of what happens")])
    table.header()
    table.add(RECORD)
    for line in printed(console):
        assert len(line) <= max(width, COLUMNS[-1].width)


def test_a_narrow_terminal_loses_the_leftmost_columns_first() -> None:
    assert fitting(COLUMNS, PLAIN_WIDTH) == COLUMNS
    assert [c.title for c in fitting(COLUMNS, PLAIN_WIDTH - 1)] == [c.title for c in COLUMNS[1:]]
    assert [c.title for c in fitting(COLUMNS, 1)] == ["outcome"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.0, "0.00 ms"),
        (0.00012, "0.12 ms"),
        (0.0099, "9.90 ms"),
        (0.0104, "10 ms"),
        (3.2, "3200 ms"),
    ],
)
def test_times_are_milliseconds_with_three_figures_at_most(seconds: float | None, text: str) -> None:
    assert milliseconds(seconds) == text


def test_why_falls_back_to_the_drops_and_the_error() -> None:
    assert why(RECORD) == "least_load"
    assert why(REFUSED | {"drops": {"a": "full", "b": "tier", "c": "full"}}) == "full"
    assert why(REFUSED) == "context_length_exceeded"
    assert why(REFUSED | {"error": None}) == "–"


def test_outcome_and_rate_are_short() -> None:
    assert outcome(RECORD) == "ok, stop"
    assert outcome(RECORD | {"finish_reason": None}) == "ok"
    assert outcome(REFUSED) == "bad_request 400"
    assert outcome(REFUSED | {"outcome": "cancelled", "status": 200}) == "cancelled"
    assert tokens_per_second(RECORD) == "400"
    assert tokens_per_second(REFUSED) == "–"


def test_the_summary_has_a_line_a_backend() -> None:
    table, console = rows(PLAIN_WIDTH)
    table.add(RECORD)
    table.add(RECORD | {"backend": "bf16", "ttft_seconds": None})
    table.add(REFUSED)
    printed(console)
    console = Console(width=PLAIN_WIDTH, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table.summary())
    _, first, second = printed(console)
    assert first.split()[:3] == ["bf16", "1", "–"]
    assert second.split()[:4] == ["fp8", "1", "12", "ms"]


def test_the_tail_gives_each_line_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    tail = Tail(path)
    assert list(tail.new()) == []
    line = json.dumps({"a": "é"}).encode() + b"\n"
    path.write_bytes(line + line[:5])
    assert list(tail.new()) == [{"a": "é"}]
    assert list(tail.new()) == []
    with path.open("ab") as file:
        file.write(line[5:] + line)
    assert list(tail.new()) == [{"a": "é"}] * 2


FLEETS = {"demo": study_fleet, "demo-real": llama_fleet}


@pytest.mark.parametrize("fleet", [make() for make in FLEETS.values()], ids=FLEETS)
async def test_a_plan_is_the_same_for_the_same_seed_and_in_order(fleet: Fleet) -> None:
    clients = fleet.traffic("http://127.0.0.1:1")
    first = [at for at, _ in clients.plan(30, Random(1))]
    assert first == [at for at, _ in clients.plan(30, Random(1))]
    assert first == sorted(first)
    assert len(first) > 25
    assert max(first) < 30
    await clients.close()


async def test_where_time_runs_faster_as_much_is_asked_in_less_of_it() -> None:
    slow, fast = study_fleet().traffic("http://127.0.0.1:1"), study_fleet(10).traffic("http://127.0.0.1:1")
    assert len(list(fast.plan(3, Random(1)))) == len(list(slow.plan(30, Random(1))))
    await slow.close()
    await fast.close()


@pytest.mark.parametrize("fleet", [make() for make in FLEETS.values()], ids=FLEETS)
async def test_a_demos_configuration_serves_every_name_that_its_clients_ask_for(fleet: Fleet) -> None:
    for port, server in enumerate(fleet.servers.values(), start=9001):
        server.port = port
    config = configuration.loads(fleet.config(9003, 9004, "records.jsonl"))
    clients = fleet.traffic("http://127.0.0.1:1")
    assert {clients.model, clients.exact, clients.instruct} == set(config.models)
    assert [backend.name for backend in config.backends] == list(fleet.servers) == ["fp8", "bf16"]
    await clients.close()


@pytest.mark.parametrize(
    ("prompt", "cached", "style"),
    [
        (None, None, ""),
        (9000, None, ""),
        (50, 0, ""),
        (9000, 0, "bold yellow"),
        (9000, 4499, "bold yellow"),
        (9000, 4500, "bold green"),
    ],
)
def test_only_long_prompts_are_told_cold_or_warm(prompt: int | None, cached: int | None, style: str) -> None:
    assert warmth({"prompt_tokens": prompt, "cached_tokens": cached}) == style


def test_in_the_picture_words_stand_where_they_stood_on_the_screen() -> None:
    console = Console(width=40, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print("a & b    <c>", soft_wrap=True, highlight=False)
    console.file.close()
    svg = picture(console, "title")
    placed = re.findall(r'x="([\d.]+)" y="[\d.]+" textLength="([\d.]+)"[^>]*>([^<]+)</text>', svg)
    assert placed == [
        ("0.0", f"{5 * CELL:.1f}", "a&#160;&amp;&#160;b"),
        (f"{9 * CELL:.1f}", f"{3 * CELL:.1f}", "&lt;c&gt;"),
    ]
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "").replace(
        "https://www.textualize.io", ""
    )


# -- the whole of it -----------------------------------------------------------------------------------------


async def start(*options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.demo",
        *options,
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


def running() -> dict[int, int]:
    """Every process that runs, and its parent."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # gone meanwhile
            continue
        if state != "Z":
            parents[int(folder.name)] = int(parent)
    return parents


def children(pid: int) -> set[int]:
    """Processes that a process has started and that run, and theirs."""
    parents = running()
    found: set[int] = set()
    todo = {pid}
    while todo:
        todo = {child for child, parent in parents.items() if parent in todo} - found
        found |= todo
    return found


async def shown_and_ended(sign: signal.Signals, *options: str) -> str:
    """What it printed until it serves on; then it is told to end, and leaves nothing behind."""
    process = await start("--port", "0", *options)
    assert process.stdout is not None
    assert process.stderr is not None
    lines = []
    try:
        async with asyncio.timeout(90):
            while b"/admin/backends" not in (lines[-1] if lines else b""):
                line = await process.stdout.readline()
                assert line, (await process.stderr.read()).decode()
                lines.append(line)
        mine = children(process.pid)
        assert len(mine) == 3  # two servers and the gateway
        process.send_signal(sign)
        _, errors = await asyncio.wait_for(process.communicate(), 20)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, errors.decode()) == (0, "")
    assert not mine & running().keys()
    return b"".join(lines).decode()


ENDS = pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])


@ENDS
async def test_the_simulated_fleet_shows_tiers_reasons_and_warm_prompts_and_leaves_nothing_behind(
    sign: signal.Signals,
) -> None:
    text = await shown_and_ended(sign, "--seconds", "5", "--time-scale", "6")
    assert "6 times as fast" in text
    for expected in (
        r"chat +balanced fp8 +(soonest|only)",
        r"exact, by alias +exact +bf16 +only",
        r"exact, by header +exact +bf16 +only",
        r"agent a2: call .* (prefix|only) .* ok, tool_calls",
        r"agent a3: answer .* (prefix|only) .* ok, stop",
        r"burst 10 ",
        r"over-long prompt .* prompt_too_long .* bad_request 400",
        r"client leaves .* cancelled",
    ):
        assert re.search(expected, text), text
    for document, studied in (("document", 3600 / 6), ("exact doc.", 2060 / 6)):  # ms, cold: of FP8, of BF16
        cold = re.search(rf"{document}, cold .* \d{{5}} +(\d+) +(\d+) ms", text)
        warm = re.search(rf"{document}, warm .* \d{{5}} +(\d+) +(\d+) ms", text)
        assert cold, text
        assert warm, text
        assert (int(cold[1]), int(warm[1]) > 15_000) == (0, True)
        assert int(cold[2]) > studied  # how much more depends on what else this machine does
    assert "did not end as they should" not in text


@pytest.mark.real
@ENDS
async def test_the_real_fleet_shows_rows_serves_on_and_leaves_nothing_behind(sign: signal.Signals) -> None:
    try:
        find_server()
    except Unavailable as reason:
        pytest.skip(str(reason))
    text = await shown_and_ended(sign, "--real", "--seconds", "5")
    for expected in (r"balanced fp8 .* ok, stop", r"exact +bf16 +only", "ok, tool_calls", "bad_request 400"):
        assert re.search(expected, text), text
    assert "did not end as they should" not in text


async def test_the_picture_holds_the_rows_and_not_the_hints(tmp_path: Path) -> None:
    file = tmp_path / "demo.svg"
    options = ("--seconds", "1", "--time-scale", "30", "--exit", "--svg", str(file))
    process = await start("--port", "0", *options)
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, errors.decode()) == (0, "")
    svg = file.read_text("utf-8")
    assert "exact,&#160;by&#160;alias" in svg
    assert "curl" not in svg


@pytest.mark.parametrize(
    ("options", "says"),
    [(("--real", "--time-scale", "2"), "takes the time that it takes"), (("--time-scale", "0"), "above 0")],
)
async def test_a_command_line_that_cannot_work_is_a_usage_error(options: Sequence[str], says: str) -> None:
    process = await start(*options)
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2
    assert says in errors.decode()


@pytest.mark.parametrize(("more", "command"), [((), "demo"), (("--real",), "demo-real")])
async def test_a_port_that_is_taken_is_one_clear_line(more: Sequence[str], command: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        process = await start("--port", str(port), *more)
        _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert errors.decode() == (
        f"demo: port {port} on 127.0.0.1 is taken: stop what listens there, or choose another, "
        f"as in: make {command} DEMO_PORT=8090\n"
    )


async def test_without_a_server_that_runs_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERLINE_LLAMA_SERVER", "/nowhere/llama-server")
    process = await start("--real", "--port", "0")
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert errors.decode() == "demo: there is no llama-server at /nowhere/llama-server\n"
