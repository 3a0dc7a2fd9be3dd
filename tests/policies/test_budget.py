"""Retries are paid for: small fleets, storms, and what fades."""

from __future__ import annotations

import pytest

from policies import RetryParams
from policies.budget import WINDOW, Budget

PARAMS = RetryParams(budget_share=0.2, budget_floor=0.5)
FREE = 5  # retries of a fleet that nothing was sent to: floor × window


def paid(budget: Budget, now: float, name: str = "a", wanted: int = 1000) -> int:
    """How many retries after failures of this backend are paid for, one after the other."""
    for count in range(wanted):
        if not budget.allows(now, name):
            return count
        budget.retried(now, name)
    return wanted


def test_a_quiet_fleet_can_always_move_a_few_requests() -> None:
    assert paid(Budget(PARAMS), 100.0) == FREE


def test_a_share_of_the_requests_of_late_comes_on_top() -> None:
    budget = Budget(PARAMS)
    for _ in range(100):
        budget.sent(100.0, "a")
    assert paid(budget, 100.0) == FREE + 20


def test_requests_of_long_ago_pay_for_nothing() -> None:
    budget = Budget(PARAMS)
    for _ in range(1000):
        budget.sent(100.0, "a")
    assert paid(budget, 100.0 + 20 * WINDOW) == FREE


def test_what_was_spent_comes_back_with_time() -> None:
    budget = Budget(PARAMS)
    assert paid(budget, 100.0) == FREE
    assert paid(budget, 100.0) == 0
    assert 0 < paid(budget, 100.0 + WINDOW / 2) < FREE


def test_one_that_fails_all_the_time_does_not_spend_what_the_others_may_need() -> None:
    budget = Budget(PARAMS)
    for name, requests in (("a", 100), ("b", 1000)):
        for _ in range(requests):
            budget.sent(100.0, name)
    assert paid(budget, 100.0, "a") == FREE + 20
    assert paid(budget, 100.0, "b") == FREE + 220 - (FREE + 20)  # the fleet pays its floor once


def test_the_fleet_as_a_whole_pays_once_for_all_its_backends() -> None:
    budget = Budget(PARAMS)
    assert paid(budget, 100.0, "a") == FREE
    assert paid(budget, 100.0, "b") == 0


@pytest.mark.parametrize("rate", [2, 50])
def test_in_a_storm_retries_settle_at_their_share(rate: int) -> None:
    """Every request fails and wants a retry, for two minutes: share × requests + floor, and no more."""
    budget = Budget(PARAMS)
    retries = 0
    for step in range(120 * rate):
        now = 100.0 + step / rate
        budget.sent(now, "a")
        if budget.allows(now, "a"):
            budget.retried(now, "a")
            retries += 1
    per_second = retries / 120
    assert per_second == pytest.approx(0.2 * rate + 0.5, rel=0.15)


def test_nothing_free_and_no_share_is_no_retry() -> None:
    budget = Budget(RetryParams(budget_share=0.0, budget_floor=0.0))
    for _ in range(100):
        budget.sent(100.0, "a")
    assert paid(budget, 100.0) == 0
