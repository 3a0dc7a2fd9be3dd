"""DESIGN's words, each fixed by a scripted timeline; a record is closed once; lines are whole or counted."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from random import Random

import pytest

from policies.retry import Failure
from policies.types import Drop, DropReason
from proxy.errors import Ending, Hedged, Outcome
from proxy.record import (
    MAX_LINE_BYTES,
    Measures,
    Record,
    line,
    measures,
)
from proxy.recorder import FileWriter, Recorder, write_all
from proxy.tracecontext import begin
from proxy.wire.toolevents import Counters
from proxy.wire.toolrequest import HistoryRepairs
from tests.fake_clock import FakeClock


def accepted(clock: FakeClock) -> Record:
    return Record("req-1", "chat", "/v1/chat/completions", clock.now(), clock.wall())


def scripted(*, stream: bool = True, outcome: Outcome = Outcome.OK, queue: float = 0.0, backoff: float = 0.0):
    """One request whose every part has a length of its own, so that no sum can be right by accident.

    accept, 0.1 s reading the body, 0.002 s parsing, `queue` waiting, 0.003 s choosing, `backoff` on earlier
    attempts, dispatch, 0.5 s to the first delta, 0.2 s, 0.4 s, 0.4 s to the others, 0.05 s to the last
    upstream byte, 0.007 s to the last byte written.
    """
    clock = FakeClock()
    record = accepted(clock)
    record.stream = stream
    clock.advance(0.1)
    record.body_read_at = clock.now()
    clock.advance(0.002)
    if queue:
        record.queued_at = clock.now()
        clock.advance(queue)
    record.admitted_at = clock.now()
    clock.advance(0.003)
    clock.advance(backoff)
    record.backoff_seconds = backoff
    record.dispatched_at = clock.now()
    clock.advance(0.5)
    if stream:
        record.first_delta_at = record.last_delta_at = clock.now()
        for gap in (0.2, 0.4, 0.4):
            clock.advance(gap)
            record.gaps.add(gap)
            record.last_delta_at = clock.now()
    clock.advance(0.05)
    record.last_upstream_at = clock.now()
    clock.advance(0.007)
    record.finished_at = clock.now()
    record.completion_tokens = 11
    record.outcome = outcome
    return record


def test_ttft_is_accept_to_first_content_delta():
    assert measures(scripted()).ttft == pytest.approx(0.1 + 0.002 + 0.003 + 0.5)
    assert measures(scripted(queue=2.0)).ttft == pytest.approx(0.605 + 2.0)


def test_upstream_ttft_is_dispatch_to_first_content_delta():
    assert measures(scripted(queue=2.0, backoff=1.0)).upstream_ttft == pytest.approx(0.5)


def test_tpot_is_the_time_between_first_and_last_delta_over_tokens_less_one():
    assert measures(scripted()).tpot == pytest.approx((0.2 + 0.4 + 0.4) / 10)


@pytest.mark.parametrize("tokens", [None, 0, 1])
def test_tpot_is_absent_without_usage_or_with_a_single_token(tokens):
    record = scripted()
    record.completion_tokens = tokens
    assert measures(record).tpot is None


def test_chunk_gaps_are_the_times_between_reads_with_content():
    found = measures(scripted())
    assert found.gap_p50 == pytest.approx(0.4, rel=0.08)
    assert found.gap_p99 == found.gap_max == 0.4


def test_a_stream_of_one_delta_has_a_ttft_and_no_gap():
    record = scripted()
    record.gaps = type(record.gaps)()
    record.last_delta_at = record.first_delta_at
    found = measures(record)
    assert found.ttft is not None
    assert (found.gap_p50, found.gap_p99, found.gap_max) == (None, None, None)


def test_e2e_is_accept_to_last_byte():
    assert measures(scripted(queue=2.0)).e2e == pytest.approx(
        0.1 + 0.002 + 2.0 + 0.003 + 0.5 + 1.0 + 0.05 + 0.007
    )


def test_queue_wait_is_accept_to_admitted():
    assert measures(scripted()).queue_wait == pytest.approx(0.102)
    assert measures(scripted(queue=2.0)).queue_wait == pytest.approx(2.102)


@pytest.mark.parametrize("queue", [0.0, 2.0])
@pytest.mark.parametrize("backoff", [0.0, 0.75])
@pytest.mark.parametrize("stream", [True, False])
def test_overhead_is_our_own_time_on_both_sides_whatever_else_was_waited_for(queue, backoff, stream):
    found = measures(scripted(queue=queue, backoff=backoff, stream=stream))
    assert found.overhead == pytest.approx(0.002 + 0.003 + 0.007)


@pytest.mark.parametrize("outcome", [o for o in Outcome if o not in (Outcome.OK, Outcome.UPSTREAM_REJECTED)])
def test_an_answer_that_did_not_pass_whole_has_no_overhead(outcome):
    assert measures(scripted(outcome=outcome)).overhead is None


def test_a_rejection_by_the_backend_has_overhead():
    assert measures(scripted(outcome=Outcome.UPSTREAM_REJECTED)).overhead is not None


def test_what_is_not_streamed_has_no_ttft_gap_or_tpot():
    found = measures(scripted(stream=False))
    absent = (found.ttft, found.upstream_ttft, found.gap_p50, found.gap_p99, found.gap_max, found.tpot)
    assert absent == (None,) * 6
    assert found.e2e > 0
    assert found.queue_wait is not None


def test_a_request_refused_at_the_door_has_only_an_end():
    clock = FakeClock()
    record = accepted(clock)
    clock.advance(0.25)
    assert record.close(clock.now()) == Measures(None, None, None, None, None, None, 0.25, None, None)


def test_closing_twice_raises_and_leaves_the_first_end():
    clock = FakeClock()
    record = accepted(clock)
    first = record.close(clock.now())
    clock.advance(1)
    with pytest.raises(RuntimeError, match="req-1 closed twice"):
        record.close(clock.now())
    assert measures(record) == first


def test_closing_keeps_the_time_of_the_last_byte():
    clock = FakeClock()
    record = accepted(clock)
    record.finished_at = clock.now() + 1
    clock.advance(5)
    assert record.close(clock.now()).e2e == 1.0


def test_a_record_that_nobody_judged_is_an_internal_fault():
    assert accepted(FakeClock()).outcome is Outcome.INTERNAL


# --- lines -----------------------------------------------------------------------------------------------

FIELDS = [
    "time", "request_id", "trace_id", "api", "path", "model", "target", "tier_asked", "tier", "backend", "reason",
    "drops", "attempts", "in_flight", "failures", "continuation", "hedge", "client", "tenant",
    "key", "limit", "reserved_tokens", "charged_tokens", "charged_by",
    "session", "conversation", "policy", "stream", "tools",
    "outcome", "status",
    "error", "finish_reason", "tool_counts", "prompt_tokens_estimate", "prompt_tokens_low", "prompt_tokens_high",
    "prompt_tokens_error", "prompt_tokens", "completion_tokens", "cached_tokens", "cached_tokens_estimate",
    "predicted_wait_seconds", "predicted_ttft_seconds", "predicted_tpot_seconds",
    "body_read_seconds", "queue_wait_seconds",
    "dispatch_seconds", "backoff_seconds", "ttft_seconds", "upstream_ttft_seconds",
    "chunk_gap_p50_seconds", "chunk_gap_p99_seconds", "chunk_gap_max_seconds", "tpot_seconds",
    "e2e_seconds", "overhead_seconds", "bytes_in", "bytes_out",
    "decisions",
]  # fmt: skip


def test_a_line_holds_every_field_under_its_name():
    record = scripted()
    record.model, record.tier, record.backend = "qwen", "exact", "bf16"
    record.drops = (Drop("fp8", DropReason.TIER),)
    record.failures = (("fp8", Failure.CUT), ("bf16", Failure.BUSY))
    record.path += "?api_key=secret"
    data = line(record, record.close(0.0))
    assert data.endswith(b"}\n")
    assert data.count(b"\n") == 1
    value = json.loads(data)
    assert list(value) == FIELDS
    assert value["time"].endswith("Z")
    assert value["outcome"] == "ok"
    assert value["drops"] == {"fp8": "tier"}
    assert value["failures"] == [
        {"backend": "fp8", "failure": "cut"},
        {"backend": "bf16", "failure": "busy"},
    ]
    assert value["path"] == "/v1/chat/completions"
    assert value["ttft_seconds"] == pytest.approx(0.605)
    assert value["dispatch_seconds"] == pytest.approx(0.105)


def test_every_field_of_a_record_reaches_its_line():
    """A field that is added and forgotten in the line fails here."""
    plain = accepted(FakeClock())
    before = json.loads(line(plain, measures(plain)))
    marks = {
        "queued_at",  # seen only in the overhead
        "first_delta_at", "last_delta_at", "last_upstream_at", "finished_at",  # seen in what is derived
        "gaps", "closed", "accepted_at",  # all times are from accept
    }  # fmt: skip
    for name in Record.__slots__:
        if name in marks:
            continue
        record, without = replace(plain), before
        old = getattr(record, name)
        setattr(
            record, name, {bool: True, int: 7, tuple: (Drop("x", DropReason.FULL),)}.get(type(old), 1234.5)
        )
        if old is None and not name.endswith("_at"):
            setattr(record, name, "text")
        if name == "failures":
            record.failures = (("x", Failure.CUT),)
        if name in ("continuation", "continuation_why", "legs"):
            record = replace(plain, continuation=Ending.UNSAFE)
            without = json.loads(line(record, measures(record)))
            value = {"continuation": Ending.WHOLE, "continuation_why": "seed", "legs": (("x", 3, "text"),)}[
                name
            ]
            setattr(record, name, value)
        if name in ("hedge", "hedged_to", "hedged_after"):
            record = replace(plain, hedge=Hedged.LOST)
            without = json.loads(line(record, measures(record)))
            setattr(record, name, {"hedge": Hedged.WON, "hedged_to": "b", "hedged_after": 0.5}[name])
        if name == "trace":
            record.trace = begin((), (), 1.0, Random(1))
        if name == "tool_counts":
            record.tool_counts = Counters(xml=2)
        if name == "history_repairs":
            record.history_repairs = HistoryRepairs(ids=1)
        if name == "path":
            record.path = "/other"
        if name == "time":
            record.time = 5.0
        assert json.loads(line(record, measures(record))) != without, name


def test_text_that_a_client_chose_is_bounded_and_never_breaks_a_line():
    record = accepted(FakeClock())
    record.model = 'x\n"' * 5000
    record.path = "/" + "y" * 5000
    data = line(record, measures(record))
    assert len(data) < MAX_LINE_BYTES
    assert data.count(b"\n") == 1
    assert json.loads(data)["model"].startswith('x\n"x')
    record = accepted(FakeClock())
    record.model = "m\ud800"
    assert json.loads(line(record, measures(record)))["model"] == "m?"


# --- writing ---------------------------------------------------------------------------------------------


class Sink:
    """A writer that a test can hold, break and read."""

    def __init__(self) -> None:
        self.data = b""
        self.calls = 0
        self.open = threading.Event()
        self.open.set()
        self.fails = False

    def __call__(self, lines: bytes) -> None:
        assert self.open.wait(5)
        self.calls += 1
        if self.fails:
            raise OSError(28, "No space left on device")
        self.data += lines

    def ids(self) -> list[str]:
        assert self.data.endswith(b"\n")
        return [json.loads(text)["request_id"] for text in self.data.splitlines()]


def add(recorder: Recorder, clock: FakeClock, *names: str) -> None:
    for name in names:
        record = accepted(clock)
        record.request_id = name
        recorder.add(record, record.close(clock.now()))


def written(recorder: Recorder) -> None:
    """Wait for the writing thread."""
    assert recorder.lines is not None
    assert recorder.lines.writing is not None
    recorder.lines.writing.result(5)


async def test_lines_are_written_in_batches_at_most_half_a_second_later():
    clock, sink = FakeClock(), Sink()
    recorder = Recorder(clock, sink)
    add(recorder, clock, "a", "b")
    clock.advance(0.4)
    add(recorder, clock, "c")
    assert sink.calls == 0
    clock.advance(0.1)
    written(recorder)
    assert sink.ids() == ["a", "b", "c"]
    assert sink.calls == 1
    assert clock.pending == 0
    add(recorder, clock, "d")
    clock.advance(0.5)
    written(recorder)
    assert sink.ids() == ["a", "b", "c", "d"]


async def test_writing_happens_off_the_event_loops_thread():
    clock, threads = FakeClock(), []
    recorder = Recorder(clock, lambda lines: threads.append(threading.current_thread()))
    add(recorder, clock, "a")
    clock.advance(0.5)
    written(recorder)
    assert threads != [threading.main_thread()]


async def test_a_slow_disk_holds_lines_up_to_the_capacity_then_drops_and_counts():
    clock, sink = FakeClock(), Sink()
    recorder = Recorder(clock, sink, capacity=3)
    sink.open.clear()
    add(recorder, clock, "a")
    clock.advance(0.5)
    add(recorder, clock, "b", "c", "d", "e", "f")
    clock.advance(5.0)
    assert (sink.calls, recorder.dropped) == (0, 2)
    sink.open.set()
    written(recorder)
    clock.advance(0.5)
    written(recorder)
    assert sink.ids() == ["a", "b", "c", "d"]
    assert sink.calls == 2


async def test_failing_writes_drop_and_count_and_are_said_once(caplog):
    clock, sink = FakeClock(), Sink()
    recorder = Recorder(clock, sink)
    sink.fails = True
    for name in "ab":
        add(recorder, clock, name)
        clock.advance(0.5)
        written(recorder)
    assert recorder.dropped == 2
    sink.fails = False
    add(recorder, clock, "c")
    clock.advance(0.5)
    written(recorder)
    assert sink.ids() == ["c"]
    assert [r.levelname for r in caplog.records] == ["ERROR", "WARNING"]
    assert "No space left" in caplog.records[0].message


async def test_closing_writes_what_is_left_and_cancels_the_timer():
    clock, sink = FakeClock(), Sink()
    recorder = Recorder(clock, sink)
    add(recorder, clock, "a", "b")
    await recorder.close()
    assert sink.ids() == ["a", "b"]
    assert clock.pending == 0
    await recorder.close()
    assert sink.calls == 1


async def test_closing_waits_for_the_batch_being_written_and_keeps_the_order():
    clock, sink = FakeClock(), Sink()
    recorder = Recorder(clock, sink)
    sink.open.clear()
    add(recorder, clock, "a")
    clock.advance(0.5)
    add(recorder, clock, "b")
    threading.Timer(0.02, sink.open.set).start()
    await recorder.close()
    assert sink.ids() == ["a", "b"]


async def test_a_record_that_comes_after_closing_is_counted_as_dropped():
    clock, sink = FakeClock(), Sink()
    recorder = Recorder(clock, sink)
    await recorder.close()
    add(recorder, clock, "late")
    assert recorder.dropped == 1
    assert repr(recorder) == "Recorder(lines=Batches(waiting=0, dropped=1, closed=True), rows=None)"


async def test_closing_gives_up_on_a_disk_that_hangs(event_loop_runs):
    clock, sink = FakeClock(), Sink()
    recorder = Recorder(clock, sink)
    sink.open.clear()
    add(recorder, clock, "a")
    clock.advance(0.5)
    add(recorder, clock, "b")
    closing = event_loop_runs(recorder.close(5.0))
    await closing.started()
    clock.advance(5.0)
    await closing.task
    assert recorder.dropped == 1
    sink.open.set()
    written(recorder)


async def test_records_can_be_off():
    clock = FakeClock()
    recorder = Recorder(clock, None)
    add(recorder, clock, "a")
    assert clock.pending == 0
    await recorder.close()
    assert recorder.dropped == 0


@pytest.fixture
def event_loop_runs():
    import asyncio

    class Running:
        def __init__(self, coroutine) -> None:
            self.task = asyncio.ensure_future(coroutine)

        async def started(self) -> None:
            for _ in range(3):
                await asyncio.sleep(0)

    return Running


# --- files -----------------------------------------------------------------------------------------------


def test_a_file_is_appended_to_and_is_not_for_everyone(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"old\n")
    writer = FileWriter(str(path))
    writer(b"a\n")
    writer(b"b\nc\n")
    writer.close()
    assert path.read_bytes() == b"old\na\nb\nc\n"
    fresh = tmp_path / "fresh.jsonl"
    FileWriter(str(fresh)).close()
    assert fresh.stat().st_mode & 0o007 == 0


@pytest.mark.parametrize("recreated", [True, False])
def test_a_rotated_file_is_left_and_the_new_one_written(tmp_path, recreated):
    path = tmp_path / "records.jsonl"
    writer = FileWriter(str(path))
    writer(b"a\n")
    path.rename(tmp_path / "records.jsonl.1")
    if recreated:
        path.touch()
    writer(b"b\n")
    writer.close()
    assert (tmp_path / "records.jsonl.1").read_bytes() == b"a\n"
    assert path.read_bytes() == b"b\n"


def test_a_line_torn_by_a_kill_does_not_spoil_the_first_of_the_next_process(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"whole": 1}\n{"torn')
    writer = FileWriter(str(path))
    writer(b'{"next": 2}\n')
    writer.close()
    assert path.read_bytes() == b'{"whole": 1}\n{"torn\n{"next": 2}\n'


def test_a_line_torn_by_a_full_disk_does_not_spoil_the_next(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    writer = FileWriter(str(path))
    real = os.write

    def full(fd: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", nothing)
        return real(fd, bytes(data)[:4])

    def nothing(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        writer(b'{"a":1}\n')
    monkeypatch.setattr(os, "write", real)
    writer(b'{"b":2}\n')
    writer.close()
    assert path.read_bytes() == b'{"a"\n{"b":2}\n'


def test_short_writes_are_finished():
    read, write = os.pipe()
    write_all(write, b"x" * 1000)
    os.close(write)
    assert os.read(read, 2000) == b"x" * 1000
    os.close(read)
