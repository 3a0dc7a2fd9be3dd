"""The database of records: every key comes back, a kill loses no batch that was written, old ones go, nothing that is wrong
with the file reaches an answer."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from policies.retry import Failure
from policies.types import Drop, DropReason
from proxy import recordschema
from proxy.config import load, loads
from proxy.errors import Ending, Hedged, Outcome
from proxy.record import Record, line
from proxy.recorder import Recorder
from proxy.recordrow import (
    COLUMNS,
    FIGURES,
    KEYS,
    KIND,
    MAX_TEXT,
    NO_CALLS,
    NO_NUMBER,
    NO_TICK,
    NUMBERS,
    REST,
    TIMES,
    TROUBLE,
    UNSOUND,
    Row,
    plain,
    row,
    seconds_of,
)
from proxy.recordstore import SWEEP_ROWS, RecordStore, connect
from proxy.wire.toolevents import Counters
from proxy.wire.toolrequest import HistoryRepairs
from tests.fake_clock import FakeClock
from tests.real.gateway import GatewayProcess
from tests.scripted import ScriptedBackend

ROOT = Path(__file__).parents[2]
VERSION_1 = Path(__file__).parent / "golden" / "records-v1.sql"
NOW = 1_800_000_000.0
DAY = 86_400.0


def record(ident: str = "r", at: float = NOW, **more: Any) -> Record:
    made = Record(ident, "chat", "/v1/chat/completions", 10.0, at)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def full() -> Record:
    """Every field that may be absent is there."""
    made = record(
        "full",
        NOW + 0.123456,
        **{name: f"the {name}" for name in ("model", "target", "tier_asked", "tier", "backend", "reason")},
        **{name: f"the {name}" for name in ("tenant", "key", "session_hash", "conversation", "policy")},
        **{name: n for n, name in enumerate(("prompt_tokens", "completion_tokens", "cached_tokens"), 100)},
        **{f"prompt_tokens_{name}": n for n, name in enumerate(("estimate", "low", "high", "error"), 200)},
        **{name: n / 8 for n, name in enumerate(("predicted_wait", "predicted_ttft", "predicted_tpot"), 1)},
        **{name: 10 + n / 4 for n, name in enumerate(("body_read_at", "queued_at", "admitted_at"), 1)},
        **{
            name: 12 + n / 4 for n, name in enumerate(("dispatched_at", "first_delta_at", "last_delta_at"), 1)
        },
        last_upstream_at=13.0,
        finished_at=13.25,
        backoff_seconds=0.5,
        finish_reason="stop",
        drops=(Drop("other", DropReason.FULL),),
        attempts=3,
        in_flight=7,
        failures=(("other", Failure.CUT), ("third", Failure.BUSY)),
        continuation=Ending.WHOLE,
        continuation_why="seed",
        legs=(("third", 12, "text"),),
        hedge=Hedged.WON,
        hedged_to="third",
        hedged_after=0.75,
        client="192.0.2.7",
        trace=SimpleNamespace(hex="4bf92f3577b34da6a3ce929d0e0e4736"),
        limit="key.tokens_per_minute",
        reserved_tokens=5,
        charged_tokens=6,
        charged_by="usage",
        cached_tokens_estimate=9,
        stream=True,
        tools=True,
        outcome=Outcome.UPSTREAM_REJECTED,
        status=200,
        error="cut",
        tool_counts=Counters(xml=2, cut=1),
        history_repairs=HistoryRepairs(ids=1),
        schema_violations=1,
        bytes_in=11,
        bytes_out=12,
        decisions=[{"facts": {"a": [1, None]}}],
    )
    made.gaps.add(0.5)
    made.gaps.add(1.5)
    return made


def made(one: Record) -> Row:
    one.closed = False
    return row(one, one.close(14.0))


def said(one: Record) -> dict[str, Any]:
    """What the line of it says."""
    one.closed = False
    return json.loads(line(one, one.close(14.0)))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "records.db")


@pytest.fixture
def store(path: str) -> Iterator[RecordStore]:
    made = RecordStore(path, lambda: NOW, keep_days=30, keep_mb=1000)
    yield made
    made.close()


def ids(path: str) -> list[str]:
    with sqlite3.connect(path) as db:
        found = [name for (name,) in db.execute("SELECT request_id FROM requests ORDER BY id")]
    db.close()
    return found


# -- rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", [record("bare"), full()], ids=["bare", "full"])
def test_a_row_read_back_says_what_the_line_says(store: RecordStore, path: str, one: Record) -> None:
    store([made(one)])
    db = sqlite3.connect(path)
    (found,) = db.execute(f"SELECT {', '.join(COLUMNS)} FROM requests").fetchall()
    db.close()
    assert plain(found) == said(one)
    assert list(plain(found)) == list(said(one)) == list(KEYS)


def test_the_full_record_leaves_no_key_empty() -> None:
    assert [key for key, value in said(full()).items() if value in (None, [], {}, 0, False)] == []


def test_the_view_shows_every_key_by_its_name(store: RecordStore, path: str) -> None:
    store([made(full())])
    db = sqlite3.connect(path)
    db.row_factory = sqlite3.Row
    (found,) = db.execute("SELECT * FROM records").fetchall()
    db.close()
    assert set(found.keys()) == {"id", "context", *KEYS}
    for key, value in said(full()).items():
        shown = json.loads(found[key]) if isinstance(value, (dict, list)) else found[key]
        assert key == "time" or shown == value, key


def test_the_figures_are_what_was_measured_to_a_tick() -> None:
    for one in (full(), record("bare")):
        numbers = FIGURES.unpack(made(one)[COLUMNS.index("figures")])
        values = {**said(one), "context": 100 if one.prompt_tokens else None}
        values["tools"] = UNSOUND if one.tool_counts else NO_CALLS
        for name, number in zip((*TIMES, *NUMBERS), numbers, strict=True):
            if values[name] is None:
                assert number == (NO_TICK if name in TIMES else NO_NUMBER), name
            elif name in TIMES:
                assert seconds_of(number) == pytest.approx(values[name], rel=0.0013), name
            else:
                assert number == values[name], name


def test_rest_and_columns_share_no_key_and_lose_none() -> None:
    assert set(COLUMNS) & set(REST) == set()
    ours = {"kind", "context", "figures", "trouble", "rest"}
    assert {*COLUMNS, *REST, *TROUBLE} == {*KEYS, *ours}
    assert {*KIND, *TIMES, *NUMBERS} - {"tools"} <= {*COLUMNS}


@pytest.mark.parametrize(
    "names",
    [
        {"model": "m\ud800", "path": "/v1/\ud800"},
        {"model": "m" * 5000},
        {"path": "/" + "p" * 5000},
        {"session_hash": "s\ud800"},
        {"request_id": "i" * 5000},
        {"prompt_tokens": 2**70, "completion_tokens": -(2**70)},
    ],
    ids=["surrogates", "long model", "long path", "surrogate elsewhere", "long id", "large numbers"],
)
def test_what_a_client_or_a_backend_made_up_costs_no_record(
    store: RecordStore, path: str, names: dict[str, Any]
) -> None:
    store([made(record("before")), made(record(**names)), made(record("after"))])
    found = ids(path)
    assert (found[0], len(found), found[2]) == ("before", 3, "after")
    assert len(found[1]) <= MAX_TEXT


@pytest.mark.parametrize("count", [1, 8, 9, 128, 129, 512, 513, 1100])
def test_rows_are_written_together_and_keep_their_order(store: RecordStore, path: str, count: int) -> None:
    store([made(record(str(n))) for n in range(count)])
    assert ids(path) == [str(n) for n in range(count)]


# -- the file ------------------------------------------------------------------------------------------------


def test_the_file_is_for_nobody_else(store: RecordStore, path: str) -> None:
    store([made(record())])
    for name in (path, f"{path}-wal", f"{path}-shm"):
        assert os.stat(name).st_mode & 0o077 == 0, name


WRITER = """
import sys
from proxy.record import Record
from proxy.recordrow import row
from proxy.recordstore import RecordStore
store = RecordStore(sys.argv[1], lambda: 1.8e9)
number = 0
while True:
    made = [Record(f"{sys.argv[2]}-{number + i}", "chat", "/", 0.0, 1.8e9) for i in range(20)]
    store([row(one, one.close(1.0)) for one in made])
    number += 20
    print(number, flush=True)
"""


def writer(path: str, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, path, name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_a_kill_in_the_middle_of_writing_loses_no_batch_that_was_written(path: str) -> None:
    for turn in range(3):
        with writer(path, str(turn)) as process:
            assert process.stdout is not None
            told = 0
            for text in process.stdout:
                told = int(text)
                if told >= 200:
                    break
            process.kill()
            told = max([told, *map(int, process.stdout.read().split())])
        mine = [name for name in ids(path) if name.startswith(f"{turn}-")]
        assert mine == [f"{turn}-{i}" for i in range(len(mine))], "whole batches, in their order"
        assert told <= len(mine) <= told + 20
    db = connect(path)
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


async def test_a_gateway_that_is_killed_under_load_loses_at_most_the_last_second(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    gateway = GatewayProcess({"a": backend})  # type: ignore[dict-item]  # it has a url
    answered = 0

    async def ask(client: aiohttp.ClientSession) -> None:
        nonlocal answered
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        while True:
            async with client.post(gateway.url + "/v1/chat/completions", json=body) as response:
                assert (await response.json())["choices"]
            answered += 1

    async with gateway, aiohttp.ClientSession() as client:
        assert gateway.child is not None
        tasks = [asyncio.create_task(ask(client)) for _ in range(4)]
        await asyncio.sleep(1)
        before = answered
        await asyncio.sleep(1)  # what was promised
        gateway.child.process.kill()
        await asyncio.gather(*tasks, return_exceptions=True)
        for path in gateway._config.parent.glob("records.db*"):
            path.rename(tmp_path / path.name)
    db = sqlite3.connect(tmp_path / "records.db")
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    (written,) = db.execute("SELECT count(*) FROM records WHERE outcome = 'ok'").fetchone()
    db.close()
    assert 0 < before <= written <= answered + 4


def test_processes_that_write_one_file_at_once_lose_nothing(path: str) -> None:
    both = [writer(path, name) for name in "ab"]
    for process in both:
        assert process.stdout is not None
        while int(process.stdout.readline() or 400) < 400:
            pass
        assert process.poll() is None
    for process in both:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    found = ids(path)
    for name in "ab":
        mine = [one for one in found if one.startswith(name)]
        assert mine == [f"{name}-{i}" for i in range(len(mine))]
        assert len(mine) >= 400


def test_a_file_that_was_taken_away_is_made_anew(store: RecordStore, path: str, tmp_path: Path) -> None:
    store([made(record("a"))])
    for name in tmp_path.iterdir():
        name.rename(str(name) + ".old")
    store([made(record("b"))])
    assert ids(path) == ["b"]


@pytest.mark.parametrize("when", ["before it is opened", "while it is open"])
def test_a_damaged_file_is_set_aside_and_a_new_one_begun(
    store: RecordStore, path: str, tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    if when.startswith("while"):
        store([made(record(str(i))) for i in range(200)])
        db = sqlite3.connect(path)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.close()
        os.truncate(path, os.path.getsize(path))
    with open(path, "r+b" if os.path.exists(path) else "wb") as file:
        file.seek(0)
        file.write(b"no database at all. " * 1000)
    with pytest.raises(OSError, match=r"records\.db"):
        store([made(record("lost"))])
    store([made(record("kept"))])
    assert ids(path) == ["kept"]
    assert [f.name for f in tmp_path.glob("*.damaged-*") if "-wal" not in f.name and "-shm" not in f.name]
    assert [r.levelname for r in caplog.records] == ["ERROR"]


@pytest.mark.parametrize("kind", ["another's", "a later version's"])
def test_a_file_that_is_not_ours_is_left_as_it_is(store: RecordStore, path: str, kind: str) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE mine (x)" if kind == "another's" else "CREATE TABLE requests (x)")
    if kind != "another's":
        db.execute("PRAGMA user_version = 99")
    db.commit()
    db.close()
    before = Path(path).read_bytes()
    for _ in range(2):
        with pytest.raises(OSError, match=r"no database of records|version 99"):
            store([made(record())])
    assert Path(path).read_bytes() == before


def test_a_file_of_version_1_is_brought_up_to_date_and_read(path: str) -> None:
    db = sqlite3.connect(path)
    db.executescript(VERSION_1.read_text("utf-8"))
    db.close()
    store = RecordStore(path, lambda: NOW)
    store([made(record("new"))])
    store.close()
    db = sqlite3.connect(path)
    found = [plain(values) for values in db.execute(f"SELECT {', '.join(COLUMNS)} FROM requests ORDER BY id")]
    assert db.execute("PRAGMA user_version").fetchone() == (recordschema.VERSION,)
    db.close()
    assert [one["request_id"] for one in found] == ["bare", "full", "new"]
    assert found[1] == said(full())


def test_a_migration_keeps_what_was_there_and_is_done_once(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RecordStore(path, lambda: NOW)
    store([made(record("old"))])
    store.close()
    more = ("ALTER TABLE requests ADD COLUMN weather TEXT", "UPDATE requests SET weather = 'unknown'")
    monkeypatch.setattr(recordschema, "MIGRATIONS", (*recordschema.MIGRATIONS, more))
    monkeypatch.setattr(recordschema, "VERSION", recordschema.VERSION + 1)
    for name in ("new", "newer"):
        store([made(record(name))])
        store.close()
    db = sqlite3.connect(path)
    rows = db.execute("SELECT request_id, weather FROM requests ORDER BY id").fetchall()
    db.close()
    assert rows == [("old", "unknown"), ("new", None), ("newer", None)]


def test_a_migration_that_fails_leaves_the_file_as_it_was(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RecordStore(path, lambda: NOW)
    store([made(record("old"))])
    store.close()
    more = ("ALTER TABLE requests ADD COLUMN weather TEXT", "no sql")
    with monkeypatch.context() as patch:
        patch.setattr(recordschema, "MIGRATIONS", (*recordschema.MIGRATIONS, more))
        patch.setattr(recordschema, "VERSION", recordschema.VERSION + 1)
        with pytest.raises(OSError, match="syntax"):
            store([made(record("lost"))])
    store([made(record("new"))])
    store.close()
    assert ids(path) == ["old", "new"]


# -- what goes -----------------------------------------------------------------------------------------------


class Wall:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def test_records_that_are_too_old_go(path: str) -> None:
    wall = Wall()
    store = RecordStore(path, wall, keep_days=7)
    days = [NOW - days * DAY for days in (9, 8, 6, 1)]
    store([made(record(str(n), at)) for n, at in enumerate(days)])
    assert ids(path) == ["2", "3"]
    wall.now += 2 * DAY
    store([made(record("4", wall.now))])
    assert ids(path) == ["3", "4"]
    store.close()


def test_a_size_that_is_exceeded_takes_the_oldest_and_gives_their_room_back(path: str) -> None:
    wall = Wall()
    store = RecordStore(path, wall, keep_mb=2)
    for turn in range(8):
        wall.now += 61
        store([made(record(f"{turn}-{i}", wall.now)) for i in range(SWEEP_ROWS)])
    wall.now += 61
    store([made(record("last", wall.now))])
    store.close()
    found = ids(path)
    assert found[-1] == "last"
    assert SWEEP_ROWS < len(found) < 8 * SWEEP_ROWS
    assert found == sorted(found, key=lambda name: [int(n) if n.isdigit() else 99 for n in name.split("-")])
    assert 1e6 < os.path.getsize(path) < 2.2e6


def test_nothing_goes_where_nothing_is_said(path: str) -> None:
    store = RecordStore(path, lambda: NOW, keep_days=0, keep_mb=0)
    store([made(record("ancient", 0.0))])
    assert ids(path) == ["ancient"]
    store.close()


# -- beside the answers --------------------------------------------------------------------------------------


def recorder(store: Callable[..., None]) -> tuple[FakeClock, Recorder]:
    clock = FakeClock()
    return clock, Recorder(clock, None, store)


def turn(clock: FakeClock, recorder: Recorder, name: str, **more: Any) -> None:
    """A record, and until its batch is written or dropped."""
    one = record(name, **more)
    recorder.add(one, one.close(11.0))
    clock.advance(0.5)
    assert recorder.rows is not None
    assert recorder.rows.writing is not None
    recorder.rows.writing.result(10)


async def test_a_full_file_drops_and_counts_is_said_once_and_is_over_when_there_is_room(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = RecordStore(path, lambda: NOW)
    clock, both = recorder(store)
    turn(clock, both, "a")
    assert store._db is not None
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")  # of this connection
    turn(clock, both, "b", key="k" * 20_000)
    assert both.dropped == 1
    assert "full" in caplog.records[-1].message
    turn(clock, both, "c")
    assert ids(path) == ["a", "c"]
    assert [r.levelname for r in caplog.records] == ["ERROR", "WARNING"]
    await both.close()
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One of 512 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tierline-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_a_full_disk_drops_and_counts_and_keeps_what_it_had(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(small_disk / "records.db")
    store = RecordStore(path, lambda: NOW)
    clock, both = recorder(store)
    number = 0
    while not both.dropped and number < 100:
        turn(clock, both, str(number), key="k" * 20_000)
        number += 1
    assert 3 < number < 100
    turn(clock, both, "still", key="k" * 20_000)
    assert both.dropped == 2
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    await both.close()
    store.close()
    assert ids(path) == [str(n) for n in range(number - 1)]


async def test_a_folder_that_cannot_be_written_drops_and_counts(tmp_path: Path) -> None:
    clock, both = recorder(RecordStore(str(tmp_path / "nowhere" / "records.db"), lambda: NOW))
    turn(clock, both, "a")
    assert both.dropped == 1
    (tmp_path / "nowhere").mkdir()
    turn(clock, both, "b")
    assert both.dropped == 1
    assert ids(str(tmp_path / "nowhere" / "records.db")) == ["b"]
    await both.close()


async def test_a_file_that_is_locked_holds_nobody_up_and_is_written_when_it_is_free(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.recordstore.BUSY_SECONDS", 0.05)
    clock, both = recorder(RecordStore(path, lambda: NOW))
    turn(clock, both, "a")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    turn(clock, both, "b")
    assert both.dropped == 1
    other.execute("ROLLBACK")
    other.close()
    turn(clock, both, "c")
    assert ids(path) == ["a", "c"]
    await both.close()


async def test_rows_are_written_off_the_event_loops_thread() -> None:
    threads: list[threading.Thread] = []
    clock, both = recorder(lambda rows: threads.append(threading.current_thread()))
    turn(clock, both, "a")
    assert threads
    assert threads != [threading.main_thread()]


async def test_lines_and_rows_are_lost_apart() -> None:
    def fails(what: object) -> None:
        raise OSError("no")

    clock = FakeClock()
    written: list[Any] = []
    both = Recorder(clock, fails, written.append)
    turn(clock, both, "a")
    assert both.lines is not None
    assert both.lines.writing is not None
    both.lines.writing.result(10)
    assert both.dropped == 1
    assert [one[COLUMNS.index("request_id")] for batch in written for one in batch] == ["a"]
    await both.close()


# -- where it is ---------------------------------------------------------------------------------------------

TEXT = '[[backends]]\nname = "a"\nurl = "http://h:1"\n[models.m]\n'


def test_the_database_lies_beside_the_configuration_or_in_systemds_folder(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(TEXT)
    assert load(tmp_path / "config.toml", {}).records_store == tmp_path / "records.db"
    state = {"STATE_DIRECTORY": "/var/lib/tierline:/var/lib/other"}
    assert load(tmp_path / "config.toml", state).records_store == Path("/var/lib/tierline/records.db")
    (tmp_path / "config.toml").write_text(TEXT + '[telemetry]\nstore = "kept/r.db"\n')
    assert load(tmp_path / "config.toml", state).records_store == tmp_path / "kept" / "r.db"
    (tmp_path / "config.toml").write_text(TEXT + '[telemetry]\nstore = "off"\n')
    assert load(tmp_path / "config.toml", state).records_store is None


def test_a_configuration_from_nowhere_has_no_place_for_it() -> None:
    assert loads(TEXT, {}).records_store is None
