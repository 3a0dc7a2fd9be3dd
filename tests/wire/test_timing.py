"""The gap histogram: exact where it is exported, within 8 % everywhere."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.timing import BUCKET_OF_BIN, EDGES, GAP_BUCKETS, GapHistogram

GAPS = st.lists(st.floats(0.0001, 100.0) | st.sampled_from(GAP_BUCKETS), min_size=1, max_size=60)


def filled(gaps) -> GapHistogram:
    histogram = GapHistogram()
    for gap in gaps:
        histogram.add(gap)
    return histogram


def test_edges_are_at_most_eight_percent_apart_and_hold_every_exported_edge():
    assert EDGES[0] == 0.0001
    assert EDGES[-1] == 100.0
    assert all(1 < high / low <= 1.08 + 1e-9 for low, high in pairwise(EDGES))
    assert set(GAP_BUCKETS) <= set(EDGES)
    assert (GAP_BUCKETS[0], GAP_BUCKETS[-1]) == (0.0002, 2.0)


def test_an_empty_histogram_has_no_quantiles():
    histogram = GapHistogram()
    assert histogram.quantile(0.5) is None
    assert (histogram.count, histogram.max, histogram.total) == (0, 0.0, 0.0)


def test_one_gap_is_every_quantile():
    histogram = filled([0.0123])
    assert histogram.quantile(0.0) == histogram.quantile(0.5) == histogram.quantile(1.0) == 0.0123


def test_gaps_beyond_the_table_are_counted_and_reported_as_the_longest():
    histogram = filled([0.01, 250.0, 300.0])
    assert histogram.quantile(0.99) == 300.0
    assert histogram.count == 3


def test_a_gap_of_nothing_is_counted():
    histogram = filled([0.0, 0.0])
    assert histogram.count == 2
    assert histogram.quantile(0.5) == 0.0


@settings(max_examples=200, derandomize=True, deadline=None)
@given(GAPS, st.floats(0.01, 1.0))
def test_a_quantile_is_never_below_the_exact_one_and_at_most_eight_percent_above(gaps, q):
    exact = sorted(gaps)[max(1, math.ceil(q * len(gaps))) - 1]
    estimate = filled(gaps).quantile(q)
    assert exact <= estimate * (1 + 1e-12)
    assert estimate <= exact * 1.0801


@settings(max_examples=200, derandomize=True, deadline=None)
@given(GAPS)
def test_folding_into_exported_buckets_loses_nothing(gaps):
    buckets = [0] * (len(GAP_BUCKETS) + 1)
    for where, count in filled(gaps).bins():
        buckets[BUCKET_OF_BIN[where]] += count
    exact = [0] * (len(GAP_BUCKETS) + 1)
    for gap in gaps:  # Prometheus: the first edge that the value does not exceed
        exact[next((i for i, edge in enumerate(GAP_BUCKETS) if gap <= edge), len(GAP_BUCKETS))] += 1
    assert buckets == exact


def test_memory_is_bounded_by_the_table():
    histogram = filled(1e-5 * 1.01**i for i in range(5000))
    assert len(list(histogram.bins())) <= len(EDGES) + 1


@given(st.lists(st.floats(0, 50), max_size=40))
def test_times_folded_together_count_like_gaps_one_by_one(steps: list[float]) -> None:
    times = list(accumulate(steps, initial=1000.0))
    together, apart = GapHistogram(), GapHistogram()
    together.add_between(times)
    for before, after in pairwise(times):
        apart.add(after - before)
    assert dict(together.bins()) == dict(apart.bins())
    assert (together.max, together.total) == (apart.max, apart.total)
