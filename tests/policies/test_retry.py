"""What follows a failed attempt: the whole table."""

from __future__ import annotations

from itertools import product
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import Failure, Retry, RetryParams, may_retry
from policies.retry import Attempts

PARAMS = RetryParams()

CASES = [
    ("nothing failed", [], Retry.NO),
    ("nothing was sent: any other backend", [Failure.CONNECT], Retry.OTHER_BACKEND),
    ("and another", [Failure.CONNECT, Failure.CONNECT], Retry.OTHER_BACKEND),
    ("but not for ever", [Failure.CONNECT] * 3, Retry.NO),
    ("the keep-alive race: same backend, fresh connection", [Failure.REUSED], Retry.SAME_BACKEND),
    ("once", [Failure.REUSED, Failure.REUSED], Retry.NO),
    ("the fresh connection is refused: elsewhere", [Failure.REUSED, Failure.CONNECT], Retry.OTHER_BACKEND),
    ("the prompt was too long: a larger window", [Failure.OVERFLOW], Retry.LARGER_WINDOW),
    ("once", [Failure.OVERFLOW, Failure.OVERFLOW], Retry.NO),
    ("too long where a refused connection led", [Failure.CONNECT, Failure.OVERFLOW], Retry.LARGER_WINDOW),
    ("words instead of the call: asked again, more clearly", [Failure.NO_CALL], Retry.AGAIN),
    ("once", [Failure.NO_CALL, Failure.NO_CALL], Retry.NO),
    ("a 4xx would be the same elsewhere", [Failure.REJECTED], Retry.NO),
    ("who has too much already", [Failure.BUSY], Retry.OTHER_BACKEND),
    ("an error need not be one elsewhere", [Failure.ERROR], Retry.OTHER_BACKEND),
    ("nor twice", [Failure.ERROR, Failure.BUSY], Retry.OTHER_BACKEND),
    ("but the fleet is not asked one by one", [Failure.ERROR, Failure.BUSY, Failure.ERROR], Retry.NO),
    ("no token in time: another backend", [Failure.TIMEOUT], Retry.OTHER_BACKEND),
    ("nobody waits for a third", [Failure.TIMEOUT, Failure.TIMEOUT], Retry.NO),
    ("the time for the whole request is over", [Failure.LATE], Retry.NO),
    ("a cut answer", [Failure.CUT], Retry.OTHER_BACKEND),
    ("nonsense", [Failure.MALFORMED], Retry.OTHER_BACKEND),
    ("an error after a refused connection", [Failure.CONNECT, Failure.ERROR], Retry.OTHER_BACKEND),
]


@pytest.mark.parametrize(("failures", "answer"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_before_the_first_event(failures: list[Failure], answer: Retry) -> None:
    assert may_retry(failures, False, PARAMS) is answer


def test_every_failure_stands_in_the_table_above() -> None:
    assert {failures[-1] for _, failures, _ in CASES if failures} == set(Failure)


@pytest.mark.parametrize(("failures", "answer"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_after_the_first_event_nothing_is_retried(failures: list[Failure], answer: Retry) -> None:
    assert may_retry(failures, True, PARAMS) is Retry.NO


@pytest.mark.parametrize("failure", list(Failure))
def test_one_attempt_means_no_retry(failure: Failure) -> None:
    assert may_retry([failure], False, RetryParams(max_attempts=1)) is Retry.NO


def test_more_attempts_go_on_for_as_long_as_nothing_was_sent() -> None:
    assert may_retry([Failure.CONNECT] * 9, False, RetryParams(max_attempts=10)) is Retry.OTHER_BACKEND


def test_at_least_one_attempt_is_made() -> None:
    with pytest.raises(ValueError, match="max_attempts must be 1 or more"):
        RetryParams(max_attempts=0)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.sampled_from(Failure), min_size=1, max_size=6), st.booleans(), st.integers(1, 5))
def test_a_request_never_makes_more_attempts_than_allowed(
    failures: list[Failure], sent: bool, most: int
) -> None:
    retry = may_retry(failures, sent, RetryParams(max_attempts=most))
    assert retry is Retry.NO or len(failures) < most


def test_no_history_sends_a_request_twice_to_the_same_place_for_the_same_reason() -> None:
    """The once-only rules hold whatever came between."""
    for between in product(list(Failure), repeat=1):
        for once in (Failure.REUSED, Failure.OVERFLOW, Failure.NO_CALL):
            assert may_retry([once, *between, once], False, RetryParams(max_attempts=9)) is Retry.NO


@pytest.mark.parametrize("name", ["backoff_seconds", "max_backoff_seconds", "budget_share", "budget_floor"])
@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_times_and_shares_below_zero_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be 0 or more"):
        RetryParams(**{name: value})  # type: ignore[arg-type]


# -- the attempts of one request

OVER = 1000.0  # when the request's time is over


def after(*failed: tuple[str, Failure], params: RetryParams = PARAMS) -> Attempts:
    """These attempts failed, at 0."""
    attempts = Attempts(params)
    for name, failure in failed:
        attempts.failed(0.0, name, failure)
    return attempts


def test_who_failed_is_not_asked_while_another_is_left() -> None:
    assert after(("a", Failure.ERROR), ("b", Failure.CUT)).tried == {"a", "b"}
    assert after(("a", Failure.REUSED)).tried == set()  # a stale connection says nothing of its backend


def test_an_overflow_asks_for_a_window_larger_than_the_one_that_was_too_small() -> None:
    attempts = Attempts(PARAMS)
    assert attempts.failed(0.0, "a", Failure.OVERFLOW, window=4096) is Retry.LARGER_WINDOW
    assert (attempts.larger_than, attempts.tried) == (4096, frozenset())


@pytest.mark.parametrize("failure", list(Failure))
def test_only_who_answered_is_asked_again_after_a_pause(failure: Failure) -> None:
    attempts = after(("a", failure))
    pause = attempts.go_back(0.0, OVER, Random(1))
    if failure in (Failure.BUSY, Failure.ERROR):
        assert pause is not None
        assert attempts.tried == set()
    else:
        assert pause is None


def test_pauses_are_drawn_from_nothing_to_twice_the_last_most() -> None:
    rng = Random(3)
    first = [after(("a", Failure.ERROR)).go_back(0.0, OVER, rng) for _ in range(400)]
    second = [after(("a", Failure.ERROR), ("a", Failure.ERROR)).go_back(0.0, OVER, rng) for _ in range(400)]
    for pauses, most in ((first, 0.1), (second, 0.2)):
        drawn = [pause for pause in pauses if pause is not None]
        assert len(drawn) == 400
        assert min(drawn) < 0.05 * most
        assert 0.95 * most < max(drawn) <= most
        assert sum(drawn) / 400 == pytest.approx(most / 2, rel=0.15)


def test_no_pause_is_longer_than_the_longest() -> None:
    params = RetryParams(max_attempts=20, max_backoff_seconds=0.4)
    attempts = after(*[("a", Failure.ERROR)] * 15, params=params)
    assert all((attempts.go_back(0.0, OVER, Random(seed)) or 0.0) <= 0.4 for seed in range(50))


@pytest.mark.parametrize(
    ("retry_after", "pause"),
    [(0.0, pytest.approx(0.05, abs=0.05)), (1.5, 1.5), (2.0, 2.0), (2.1, None), (3600.0, None)],
)
def test_a_pause_is_as_long_as_the_backend_asks_for_or_nobody_waits(
    retry_after: float, pause: float | None
) -> None:
    attempts = Attempts(PARAMS)
    attempts.failed(10.0, "a", Failure.BUSY, retry_after=retry_after)
    assert attempts.go_back(10.0, OVER, Random(1)) == pause


def test_after_the_pause_only_those_who_are_ready_are_asked() -> None:
    attempts = Attempts(PARAMS)
    attempts.failed(0.0, "a", Failure.BUSY, retry_after=30.0)
    attempts.failed(0.0, "b", Failure.BUSY, retry_after=1.0)
    assert attempts.go_back(0.0, OVER, Random(1)) == 1.0
    assert attempts.tried == {"a"}


def test_nobody_waits_beyond_the_requests_own_time() -> None:
    attempts = Attempts(PARAMS)
    attempts.failed(0.0, "a", Failure.BUSY, retry_after=1.0)
    assert attempts.go_back(0.0, 1.0, Random(1)) is None
    assert attempts.go_back(0.0, 1.1, Random(1)) == 1.0


def test_without_a_backoff_nobody_goes_back() -> None:
    attempts = after(("a", Failure.ERROR), params=RetryParams(backoff_seconds=0.0))
    assert attempts.go_back(0.0, inf, Random(1)) is None


def test_a_request_was_repeated_when_a_backend_could_have_worked_on_it_twice() -> None:
    assert not after(("a", Failure.ERROR)).repeated
    assert not after(("a", Failure.REUSED), ("a", Failure.ERROR)).repeated
    assert after(("a", Failure.ERROR), ("b", Failure.CONNECT)).repeated
