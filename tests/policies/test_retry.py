"""What follows a failed attempt: the whole table."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import Failure, Retry, RetryParams, may_retry

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
    ("an error is passed on", [Failure.ERROR], Retry.NO),
    ("what took too long is not begun again", [Failure.TIMEOUT], Retry.NO),
    ("the request may have run", [Failure.CUT], Retry.NO),
    ("nonsense is passed on as an error", [Failure.MALFORMED], Retry.NO),
    ("an error ends it after a retry too", [Failure.CONNECT, Failure.ERROR], Retry.NO),
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
