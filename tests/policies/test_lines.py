"""Who goes next."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.lines import Line, Waiting
from tests.policies.build import ask


def one(id: int, share: str | None = None, *, running: bool = False, cost: float = 1.0) -> Waiting:
    waiting = Waiting(id, replace(ask(), share=share), ("a",), None, float(id), running)
    waiting.cost = cost
    return waiting


def serve(line: Line) -> int:
    """Takes out the one that goes next."""
    side = next(side for side in line.sides if side)
    first = line.heads(side, 1)[0]
    line.remove(first, served=True)
    return first.id


def order(line: Line) -> list[int]:
    return [serve(line) for _ in range(len(line))]


def test_running_conversations_go_before_new_ones_and_who_is_late_makes_nobody_else_late() -> None:
    line = Line({})
    ones = [one(1), one(2), one(3, running=True), one(4, running=True)]
    for waiting in ones:
        line.add(waiting)
    line.is_late(ones[0])
    line.is_late(ones[2])
    assert order(line) == [4, 3, 2, 1]


def test_within_a_share_the_order_is_that_of_arrival() -> None:
    line = Line({})
    for id in (1, 2, 3, 4):
        line.add(one(id, cost=5.0 - id))
    assert order(line) == [1, 2, 3, 4]


def test_a_flood_of_one_tenant_leaves_the_others_their_turns() -> None:
    line = Line({})
    for id in range(100):
        line.add(one(id, "loud"))
    for id in range(100, 105):
        line.add(one(id, "quiet"))
    assert {100, 101, 102, 103, 104} <= set(order(line)[:11])


def test_shares_get_service_by_their_weights() -> None:
    line = Line({"big": 3.0})
    for id in range(200):
        line.add(one(id, "big"))
        line.add(one(1000 + id, "small"))
    first = Counter("big" if serve(line) < 1000 else "small" for _ in range(100))
    assert 73 <= first["big"] <= 77


def test_what_counts_is_cost_not_how_many() -> None:
    line = Line({})
    for id in range(100):
        line.add(one(id, "long", cost=10.0))
        line.add(one(1000 + id, "short", cost=1.0))
    first = Counter("long" if serve(line) < 1000 else "short" for _ in range(55))
    assert 4 <= first["long"] <= 7


def test_who_was_away_has_saved_no_credit() -> None:
    line = Line({})
    for id in range(50):
        line.add(one(id, "here"))
    for _ in range(30):
        serve(line)
    for id in range(100, 130):
        line.add(one(id, "back"))
    first = Counter("back" if serve(line) >= 100 else "here" for _ in range(20))
    assert abs(first["back"] - first["here"]) <= 2


def test_before_counts_those_that_would_go_first() -> None:
    line = Line({})
    for waiting in (one(1), one(2, running=True), one(3, running=True)):
        line.add(waiting)
    assert line.before(one(4)) == (3, 3.0)
    assert line.before(one(5, running=True)) == (2, 2.0)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans(), st.integers(0, 3)), max_size=40)
)
def test_everybody_in_line_is_served_exactly_once(steps: list[tuple[str, bool, bool, int]]) -> None:
    line, inside, served = Line({"a": 2.0}), {}, []
    for id, (share, running, late, then) in enumerate(steps):
        inside[id] = one(id, share, running=running)
        line.add(inside[id])
        if late:
            line.is_late(inside[id])
        if then == 1:
            served.append(serve(line))
        elif then == 2 and inside:
            gone = next(iter(set(inside) - set(served)), None)
            if gone is not None:
                line.remove(inside[gone], served=False)
                served.append(gone)
        assert len(line) == len(list(line)) == id + 1 - len(served)
    served += order(line)
    assert sorted(served) == list(range(len(steps)))
