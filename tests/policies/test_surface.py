"""A surface meets its cells, stays between them, and beyond them a stream never gets faster."""

from __future__ import annotations

from bisect import bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import profile
from policies.surface import Surface

COUNTS = st.sampled_from([1, 2, 3, 4, 8, 12, 16, 32, 64, 128])
CONTEXTS = st.sampled_from([0, 500, 16384, 32768, 65536, 131072, 250000])
CELLS = st.dictionaries(st.tuples(COUNTS, CONTEXTS), st.floats(1e-4, 1e3), min_size=1, max_size=20)
POINT = st.tuples(st.floats(1, 6000), st.floats(0, 400_000))
SETTINGS = settings(max_examples=200, derandomize=True, deadline=None)
PROFILES = [profile.get(n) for n in profile.names() if not profile.get(n).quality_only]
SURFACES = [s for p in PROFILES for s in (p.decode, p.warm, p.warm_p99) if s is not None]


def close(low: float, value: float, high: float) -> bool:
    return low * (1 - 1e-9) <= value <= high * (1 + 1e-9)


def around(axis: list[int], value: float) -> tuple[int, int]:
    i = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 1)
    return axis[i], axis[min(i + 1, len(axis) - 1)]


def check_between(surface: Surface, c: float, x: float) -> None:
    """No value, per stream or in total, leaves the range of the four knots around it."""
    c0, c1 = around(surface.concurrencies, c)
    x0, x1 = around(surface.contexts, x)
    knots = [(a, surface.at(a, b)) for a in (c0, c1) for b in (x0, x1)]
    cost = surface.at(c, x)
    assert close(min(v for _, v in knots), cost, max(v for _, v in knots))
    shares = [v / a for a, v in knots]
    assert close(min(shares), cost / c, max(shares))


def beyond(surface: Surface, c: float, x: float) -> bool:
    """Past the last measured concurrency of both rows around x."""
    return all(c >= surface.last_measured[row] for row in around(surface.contexts, x))


@SETTINGS
@given(CELLS, st.booleans())
def test_cells_are_met_exactly(cells: dict[tuple[int, int], float], by_rate: bool) -> None:
    surface = Surface(((c, x, v) for (c, x), v in cells.items()), by_rate=by_rate)
    for (c, x), cost in cells.items():
        assert surface.at(c, x) == cost


@SETTINGS
@given(CELLS, POINT, st.booleans())
def test_nothing_overshoots_between_cells(
    cells: dict[tuple[int, int], float], point: tuple[float, float], by_rate: bool
) -> None:
    surface = Surface(((c, x, v) for (c, x), v in cells.items()), by_rate=by_rate)
    c = min(max(point[0], surface.concurrencies[0]), surface.concurrencies[-1])
    check_between(surface, c, min(point[1], surface.contexts[-1]))


@SETTINGS
@given(CELLS, POINT, st.floats(1, 30), st.floats(0, 100_000), st.booleans())
def test_beyond_the_cells_cost_never_falls_with_more_streams_or_more_context(
    cells: dict[tuple[int, int], float], point: tuple[float, float], more: float, longer: float, by_rate: bool
) -> None:
    surface = Surface(((c, x, v) for (c, x), v in cells.items()), by_rate=by_rate)
    c, x = point
    here = surface.at(c, x)
    if beyond(surface, c, x):
        assert surface.at(c * more, x) >= here * (1 - 1e-9)
    if x >= surface.contexts[-1]:
        assert surface.at(c, x + longer) >= here * (1 - 1e-9)


@SETTINGS
@given(st.sampled_from(SURFACES), POINT, st.floats(1, 30), st.floats(0, 100_000))
def test_the_profiles_surfaces_keep_the_same_promises(
    surface: Surface, point: tuple[float, float], more: float, longer: float
) -> None:
    c, x = point
    here = surface.at(c, x)
    if beyond(surface, c, x):
        assert surface.at(c * more, x) >= here * (1 - 1e-9)
    if x >= surface.contexts[-1]:
        assert surface.at(c, x + longer) >= here * (1 - 1e-9)
    inside = min(max(c, surface.concurrencies[0]), surface.concurrencies[-1])
    check_between(surface, inside, min(x, surface.contexts[-1]))


@SETTINGS
@given(st.sampled_from(PROFILES), st.floats(1, 4096), st.floats(0, 300_000))
def test_total_throughput_beyond_the_grid_never_falls_by_more_streams_alone(
    p: profile.Profile, c: float, x: float
) -> None:
    assert p.decode is not None
    if beyond(p.decode, c, x) and x <= p.decode.contexts[0]:
        assert p.aggregate_rate(c * 2, x) >= p.aggregate_rate(c, x) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("cells", "point", "expected"),
    [
        ({(1, 0): 1.0, (4, 0): 4.0}, (2, 0), 2.0),  # a power law between concurrencies
        ({(1, 0): 1.0, (1, 100): 3.0}, (1, 50), 2.0),  # linear in context
        ({(1, 0): 1.0, (1, 100): 3.0}, (1, 150), 4.0),  # the last slope goes on
        ({(1, 0): 3.0, (1, 100): 1.0}, (1, 150), 1.0),  # but never downwards
        ({(2, 0): 3.0, (4, 0): 3.0}, (1, 0), 3.0),  # fewer streams than measured: as the fewest
        ({(1, 0): 1.0, (1, 100): 2.0, (2, 0): 1.5}, (2, 100), 3.0),  # a hole grows as the row below
        ({(1, 0): 1.0, (1, 100): 0.5, (2, 0): 1.5}, (2, 100), 1.5),  # and costs no less than it
    ],
)
def test_rules_by_example(
    cells: dict[tuple[int, int], float], point: tuple[float, float], expected: float
) -> None:
    surface = Surface((c, x, v) for (c, x), v in cells.items())
    assert surface.at(*point) == pytest.approx(expected)
