"""The drive turns clock time into engine time: one timer, exact times, nothing after a cancel."""

from __future__ import annotations

import pytest

from policies import profile
from policies.engine import Engine, Request
from proxy.sim.drive import Drive
from tests.fake_clock import FakeClock

FP8 = profile.get("fp8-mtp3-tp2-v17")


class Sink:
    def __init__(self) -> None:
        self.first: float | None = None
        self.total = 0
        self.end: float | None = None

    def started(self, at: float, cached: int) -> None: ...

    def tokens(self, at: float, n: int) -> None:
        self.first = at if self.first is None else self.first
        self.total += n

    def finished(self, at: float) -> None:
        self.end = at


@pytest.mark.parametrize("scale", [0.5, 1.0, 30.0])
def test_a_request_takes_the_models_time_divided_by_the_scale(scale: float) -> None:
    alone = Engine(FP8)
    alone.submit(0.0, Request(16, 200))
    while (at := alone.next_event_at()) is not None:
        alone.advance(at)
        expected = at
    clock = FakeClock()
    drive, sink = Drive(clock, Engine(FP8), scale), Sink()
    drive.submit(Request(16, 200, stream=True), sink)
    clock.advance((expected - 0.005) / scale)
    assert (sink.end, drive.live) == (None, 1)
    clock.advance(0.01 / scale)
    assert sink.end == pytest.approx(expected, abs=1e-6)
    assert (sink.total, drive.live, clock.pending) == (200, 0, 0)
    assert sink.first == pytest.approx(FP8.warm_ttft(1, 0), rel=0.01)


def test_there_is_one_timer_however_many_streams() -> None:
    clock = FakeClock()
    drive, sinks = Drive(clock, Engine(FP8)), [Sink() for _ in range(50)]
    for sink in sinks:
        drive.submit(Request(16, 100, stream=True), sink)
    for _ in range(200):
        clock.advance(0.02)
        assert clock.pending <= 1
    assert all(sink.total == 100 for sink in sinks)


def test_a_cancelled_request_hears_nothing_more() -> None:
    clock = FakeClock()
    drive, gone, kept = Drive(clock, Engine(FP8)), Sink(), Sink()
    id = drive.submit(Request(16, 500, stream=True), gone)
    drive.submit(Request(16, 100, stream=True), kept)
    clock.advance(0.5)
    before = gone.total
    assert before > 0
    drive.cancel(id)
    drive.cancel(id)
    clock.advance(60)
    assert (gone.total, gone.end) == (before, None)
    assert kept.total == 100
    assert drive.stats().finished == 1


def test_a_stopped_engine_goes_on_when_told() -> None:
    clock = FakeClock()
    drive, sink = Drive(clock, Engine(FP8)), Sink()
    drive.change(lambda engine, now: engine.set_speed(0.0, now))
    drive.submit(Request(16, 10), sink)
    clock.advance(100)
    assert (sink.total, clock.pending) == (0, 0)
    drive.change(lambda engine, now: engine.set_speed(1.0, now))
    clock.advance(1)
    assert sink.end is not None
