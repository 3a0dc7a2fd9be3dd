"""What a record costs the event loop: the goal is 20 µs for the row of the database, whatever becomes of it."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from proxy.record import Record, measures
from proxy.recorder import Recorder
from proxy.recordrow import Row
from tests.fake_clock import FakeClock
from tests.report.test_report import stream


@pytest.mark.parametrize("streamed", [True, False])
def test_add(benchmark: BenchmarkFixture, streamed: bool) -> None:
    record: Record = stream(0, 0.3, stream=streamed)
    derived = measures(record)
    rows: list[Row] = []
    recorder = Recorder(FakeClock(), None, rows.extend, capacity=10**9)
    benchmark(lambda: recorder.add(record, derived))
    assert recorder.dropped == 0
