"""When a second attempt is due, how many there may be, and where it may go."""

from __future__ import annotations

from random import Random

import pytest

from policies import Admission, Fleet, Forecast, Go, Member, PolicyParams, Router, RouterParams, Wait
from policies.hedge import MOST, Allowance, HedgeParams, delay
from policies.types import RequestFacts, Tier
from tests.policies.build import ask

FORECAST = Forecast(queue=0.5, prefill=1.0, decode=6.0)


@pytest.mark.parametrize(
    ("after", "factor", "stream", "expected"),
    [
        (1.0, 2.0, True, 3.0),  # twice what is predicted to the first token
        (5.0, 2.0, True, 5.0),  # never sooner than `after`
        (1.0, 0.0, True, 1.0),
        (1.0, 2.0, False, 15.0),  # not streamed: nothing shows before the end
    ],
)
def test_it_is_due_after_its_seconds_and_its_prediction(
    after: float, factor: float, stream: bool, expected: float
) -> None:
    assert delay(HedgeParams(after, factor), FORECAST, stream=stream) == expected


def test_without_a_forecast_the_seconds_alone_count() -> None:
    assert delay(HedgeParams(1.5), None, stream=True) == 1.5


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_never_more_than_the_share_of_a_tiers_requests_and_one_are_sent_twice(share: float) -> None:
    allowance, sent = Allowance(), 0
    for number in range(1, 1001):
        allowance.asked("fast", share)
        if allowance.allows("fast"):
            allowance.took("fast")
            sent += 1
        assert sent <= 1 + share * number
    assert sent >= share * 1000 - 1, "and what is earned may be spent"


def test_no_more_than_a_few_are_saved_up_and_tiers_are_apart() -> None:
    allowance = Allowance()
    for _ in range(1000):
        allowance.asked("fast", 0.5)
    for _ in range(int(MOST)):
        assert allowance.allows("fast")
        allowance.took("fast")
    assert not allowance.allows("fast")
    assert allowance.allows("balanced")


# -- where to ---------------------------------------------------------------------------------------------------------


def admission(*names: str, places: int = 8) -> tuple[Admission, Fleet]:
    fleet = Fleet([Member(name, max_in_flight=places) for name in names], PolicyParams())
    return Admission(fleet, Router(RouterParams()), PolicyParams(), Random(1)), fleet


def beside(
    at: Admission, names: tuple[str, ...], tried: str = "a", asked: RequestFacts | None = None
) -> Go | None:
    return at.beside(0.0, 99, asked or ask(), names, tried=frozenset((tried,)))


def test_it_goes_to_another_backend_that_has_nothing_to_start() -> None:
    at, fleet = admission("a", "b")
    go = beside(at, ("a", "b"))
    assert go is not None
    assert go.view.name == "b"
    assert 99 in fleet.states["b"].running, "choice and lease are one step"


def test_it_goes_nowhere_when_there_is_no_other() -> None:
    at, fleet = admission("a")
    assert beside(at, ("a",)) is None
    assert not fleet.states["a"].running


def test_it_does_not_go_where_another_request_has_not_begun_yet() -> None:
    at, fleet = admission("a", "b")
    fleet.begin(0.0, 1, "b", ask())
    assert beside(at, ("a", "b")) is None
    fleet.first_token(0.0, 1)
    assert beside(at, ("a", "b")) is not None


def test_it_does_not_go_where_every_place_is_taken() -> None:
    at, fleet = admission("a", "b", places=1)
    fleet.begin(0.0, 1, "b", ask())
    fleet.first_token(0.0, 1)
    assert beside(at, ("a", "b")) is None


def test_it_does_not_go_anywhere_while_somebody_waits() -> None:
    at, fleet = admission("a", "b", "c", places=1)
    for number, name in enumerate("ab"):
        fleet.begin(0.0, number, name, ask())
        fleet.first_token(0.0, number)
    assert isinstance(at.offer(0.0, 5, ask(), ("a", "b")), Wait)
    assert beside(at, ("a", "b", "c")) is None
    at.withdraw(0.0, 5)
    assert beside(at, ("a", "b", "c")) is not None


def test_it_never_lowers_the_tier_and_never_takes_a_remote_or_a_doubtful_one() -> None:
    at, fleet = admission("a", "b")
    assert beside(at, ("a", "b"), asked=ask(Tier("exact", reference=True))) is None
    fleet.set_state(0.0, "b", suspect=True)
    assert beside(at, ("a", "b")) is None
    at, _ = admission("a")
    fleet = Fleet([Member("a"), Member("r", remote=True)], PolicyParams())
    at = Admission(fleet, Router(RouterParams()), PolicyParams(), Random(1))
    last_resort = ask(Tier("fast", last_resort=True))
    assert beside(at, ("a", "r"), asked=last_resort) is None
