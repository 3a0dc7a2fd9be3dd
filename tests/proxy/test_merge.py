"""One exposition of several processes': sums that never go backwards."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from proxy.merge import Page, keep, merge, read, write


def page(requests: float, gauge: float | None = None, memory: int = 10, seconds: float = 0.5) -> str:
    lines = [
        "# HELP t_requests_total Requests.",
        "# TYPE t_requests_total counter",
        f't_requests_total{{model="a b"}} {requests}',
        "# HELP t_seconds Took.",
        "# TYPE t_seconds histogram",
        f't_seconds_bucket{{le="1.0"}} {requests}',
        f't_seconds_bucket{{le="+Inf"}} {requests}',
        f"t_seconds_count {requests}",
        f"t_seconds_sum {seconds!r}",
        "# HELP t_gauge G.",
        "# TYPE t_gauge gauge",
        *([f"t_gauge {gauge}"] if gauge is not None else []),
        "# HELP process_resident_memory_bytes M.",
        "# TYPE process_resident_memory_bytes gauge",
        f"process_resident_memory_bytes {memory}",
    ]
    return "\n".join(lines) + "\n"


def values(merged: Page) -> dict[str, float]:
    """As Prometheus would read it."""
    found = {}
    for family in text_string_to_metric_families(write(merged).decode()):
        for sample in family.samples:
            found[f"{sample.name}{sample.labels.get('le', '')}"] = sample.value
    return found


def test_counters_and_histograms_are_sums_and_so_is_memory() -> None:
    found = values(merge(read(page(0)), [read(page(3)), read(page(4, seconds=0.25))]))
    assert found["t_requests_total"] == found["t_seconds_count"] == found["t_seconds_bucket1.0"] == 7
    assert found["t_seconds_sum"] == 1.25
    assert found["process_resident_memory_bytes"] == 30


def test_a_gauge_is_the_owners_else_the_largest() -> None:
    assert values(merge(read(page(0, 1)), [read(page(0, 5)), read(page(0, 9))]))["t_gauge"] == 1
    assert values(merge(read(page(0)), [read(page(0, 9)), read(page(0, 5))]))["t_gauge"] == 9


def test_what_only_a_worker_has_is_there_with_its_type() -> None:
    merged = merge({}, [read(page(2))])
    assert write(merged).decode().count("# TYPE t_requests_total counter") == 1
    assert values(merged)["t_requests_total"] == 2


def test_what_the_dead_counted_stays_and_what_they_held_does_not() -> None:
    gone: Page = {}
    keep(gone, read(page(3, 7)))
    keep(gone, read(page(4)))
    found = values(merge(read(page(0)), [gone, read(page(1))]))
    assert found["t_requests_total"] == 8
    assert found["process_resident_memory_bytes"] == 20
    assert "t_gauge" not in found


def test_of_two_exemplars_the_later_one_is_shown_and_only_where_they_are_asked_for() -> None:
    one, two = (
        read(page(1).replace('{le="1.0"} 1', f'{{le="1.0"}} 1 # {{request_id="{name}"}} 0.5 {time}'))
        for name, time in (("late", "9.5"), ("early", "8.25"))
    )
    merged = merge(read(page(0)), [one, two])
    assert values(merged)["t_requests_total"] == 2
    lines = write(merged, exemplars=True).decode().splitlines()
    assert 't_seconds_bucket{le="1.0"} 2 # {request_id="late"} 0.5 9.5' in lines
    assert lines[-1] == "# EOF"
    assert "early" not in str(lines)
    assert "late" not in write(merged).decode()


def test_whole_numbers_stay_whole_and_large_ones_keep_every_digit() -> None:
    text = write(merge(read(page(2**40 + 1)), [])).decode()
    assert f't_requests_total{{model="a b"}} {2**40 + 1}\n' in text
