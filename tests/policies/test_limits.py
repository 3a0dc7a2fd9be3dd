"""What is allowed is let in, no more and no less: whatever comes, whenever, however it ends."""

from __future__ import annotations

from datetime import UTC, datetime
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.limits import (
    BILLION,
    DAY,
    NOTHING,
    Account,
    Amount,
    LimitKind,
    Quota,
    Refusal,
    enter,
    settle,
    span,
    standings,
)

START = 1000.0
WALL = float(datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp())


def account(**limits: float) -> Account:
    return Account(Quota(**limits))  # type: ignore[arg-type]


def ask(account: Account, tokens: int = 0, *, at: float = 0.0, cost: int = 0) -> Refusal | None:
    """A request, so many seconds after the start."""
    return enter([account], START + at, WALL + at, Amount(tokens, cost))


def end(account: Account, asked: int, used: int, *, at: float = 0.0, cost: tuple[int, int] = (0, 0)) -> None:
    settle([account], START + at, WALL + at, Amount(asked, cost[0]), Amount(used, cost[1]))


def refused(refusal: Refusal | None) -> Refusal:
    assert refusal is not None
    return refusal


# -- requests a minute ------------------------------------------------------------------------------------------


def test_a_minutes_requests_may_come_at_once_and_then_one_comes_back_every_share_of_a_minute() -> None:
    one = account(requests_per_minute=60)
    assert [ask(one) is None for _ in range(61)] == [True] * 60 + [False]
    assert [ask(one, at=1.0) is None for _ in range(2)] == [True, False]
    assert refused(ask(one, at=1.5)).seconds == 1
    assert ask(one, at=2.0) is None
    assert [ask(one, at=62.0) is None for _ in range(61)] == [True] * 60 + [False]


def test_a_refused_request_is_not_counted_and_an_ended_one_is() -> None:
    one = account(requests_per_minute=1)
    assert ask(one) is None
    end(one, 0, 0)
    for _ in range(10):
        assert refused(ask(one, at=30.0)).seconds == 30
    assert ask(one, at=60.0) is None


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 500), st.lists(st.integers(0, 5_000_000), max_size=80))
def test_requests_are_let_in_exactly_as_a_bucket_of_fractions_would(limit: int, gaps: list[int]) -> None:
    one, left, now = account(requests_per_minute=limit), Fraction(limit), 0
    let_in: list[int] = []
    for gap in gaps:
        now += gap
        left = min(Fraction(limit), left + Fraction(gap * limit, 60_000_000))
        verdict = enter([one], now / 1e6, WALL, NOTHING)
        assert (verdict is None) == (left >= 1)
        if verdict is None:
            left -= 1
            let_in.append(now)
        else:
            assert verdict.seconds == -((left - 1) * 60 / limit // 1)
    for first, begin in enumerate(let_in):
        for last in range(first, len(let_in)):
            assert last - first + 1 <= limit + Fraction((let_in[last] - begin) * limit, 60_000_000)


# -- tokens a minute --------------------------------------------------------------------------------------------


def test_what_a_request_did_not_need_of_its_reserve_is_given_back() -> None:
    one = account(tokens_per_minute=1000)
    assert ask(one, 900) is None
    assert refused(ask(one, 200)).kind is LimitKind.TOKENS
    end(one, 900, 100)
    assert ask(one, 900) is None
    assert refused(ask(one, 1)).used == 1000


def test_what_a_request_took_beyond_its_reserve_is_owed_in_the_minutes_that_follow() -> None:
    one = account(tokens_per_minute=600)
    assert ask(one, 100) is None
    end(one, 100, 1800)
    assert refused(ask(one, 1)).seconds == 121  # 1200 owed, 10 come back a second
    assert refused(ask(one, 1, at=119.0)).seconds == 2
    assert ask(one, 10, at=121.0) is None


def test_a_request_larger_than_the_limit_never_fits_and_is_told_so() -> None:
    one = account(tokens_per_minute=1000)
    refusal = refused(ask(one, 1001))
    assert (refusal.seconds, refusal.limit, refusal.asked) == (None, 1000, 1001)
    assert ask(one, 1000) is None


# -- requests at once -------------------------------------------------------------------------------------------


def test_as_many_run_as_may_and_the_next_when_one_has_ended() -> None:
    one = account(concurrent_requests=3)
    assert [ask(one) is None for _ in range(4)] == [True, True, True, False]
    refusal = refused(ask(one, at=1e6))
    assert (refusal.kind, refusal.running, refusal.seconds) == (LimitKind.CONCURRENT, True, 1)
    end(one, 0, 0)
    assert [ask(one) is None for _ in range(2)] == [True, False]


# -- budgets ----------------------------------------------------------------------------------------------------


def test_a_days_budget_is_new_at_midnight_utc() -> None:
    one = account(tokens_per_day=1000)
    assert ask(one, 1000) is None
    end(one, 1000, 1000)
    refusal = refused(ask(one, 1))
    assert (refusal.kind, refusal.seconds) == (LimitKind.TOKENS_DAY, DAY // 2)
    assert refused(ask(one, 0)).kind is LimitKind.TOKENS_DAY  # nothing is left for who asks for nothing
    assert refused(ask(one, 1, at=DAY / 2 - 0.5)).seconds == 1
    assert ask(one, 1000, at=DAY / 2) is None


def test_a_months_budget_is_new_on_the_first() -> None:
    one = account(tokens_per_month=1000)
    assert ask(one, 10) is None
    end(one, 10, 1000)
    assert refused(ask(one, 1)).seconds == DAY // 2  # it is the 31st
    assert ask(one, 1000, at=DAY / 2) is None


def test_what_was_overdrawn_is_missing_the_next_day_and_the_day_after() -> None:
    one = account(tokens_per_day=1000)
    assert ask(one, 100) is None
    end(one, 100, 2400)
    noon = DAY / 2
    assert refused(ask(one, 1)).seconds == noon + DAY  # of tomorrow's, nothing is left
    assert refused(ask(one, 1, at=noon)).used == 1400
    assert refused(ask(one, 601, at=noon + DAY)).used == 400
    assert ask(one, 600, at=noon + DAY) is None


def test_a_request_counts_for_the_day_in_which_it_ends() -> None:
    one = account(tokens_per_day=1000)
    assert ask(one, 800) is None
    assert refused(ask(one, 800, at=DAY / 2)).running  # what runs holds its reserve
    end(one, 800, 800, at=DAY / 2)
    assert refused(ask(one, 800, at=DAY)).seconds == DAY / 2
    assert ask(one, 200, at=DAY) is None


def test_what_is_only_held_by_running_requests_may_be_free_at_any_moment() -> None:
    one = account(tokens_per_day=1000)
    assert ask(one, 1000) is None
    refusal = refused(ask(one, 500))
    assert (refusal.running, refusal.seconds, refusal.used) == (True, 1, 1000)
    end(one, 1000, 0)
    assert ask(one, 1000) is None


def test_money_is_counted_in_billionths_and_apart_from_tokens() -> None:
    one = account(cost_per_day=0.5, tokens_per_month=10**9)
    assert ask(one, 10, cost=BILLION // 2) is None
    end(one, 10, 10, cost=(BILLION // 2, BILLION // 4))
    assert refused(ask(one, 1, cost=BILLION // 4 + 1)).kind is LimitKind.COST_DAY
    assert ask(one, 1, cost=BILLION // 4) is None


def test_a_budget_that_was_cut_to_a_trifle_says_some_time_and_not_after_a_long_while() -> None:
    one = account(tokens_per_month=10**12)
    assert ask(one, 1) is None
    end(one, 1, 10**12)
    one.configure(Quota(tokens_per_month=1))
    seconds = refused(ask(one, 1)).seconds
    assert seconds is not None
    assert seconds > 30 * 365 * DAY


@pytest.mark.parametrize(
    ("kind", "at", "begins", "ends"),
    [
        (LimitKind.TOKENS_DAY, "2026-02-28T23:59:59", "2026-02-28", "2026-03-01"),
        (LimitKind.TOKENS_MONTH, "2026-02-28T23:59:59", "2026-02-01", "2026-03-01"),
        (LimitKind.COST_MONTH, "2026-12-31T00:00:00", "2026-12-01", "2027-01-01"),
        (LimitKind.COST_DAY, "2028-02-29T00:00:00", "2028-02-29", "2028-03-01"),
    ],
)
def test_days_and_months_are_the_calendars(kind: LimitKind, at: str, begins: str, ends: str) -> None:
    def stamp(text: str) -> float:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()

    assert span(kind, stamp(at)) == (stamp(begins), stamp(ends))


def test_a_wall_clock_that_goes_back_changes_nothing() -> None:
    one = account(tokens_per_day=10)
    assert ask(one, 10) is None
    end(one, 10, 10)
    assert refused(ask(one, 1, at=-DAY)).used == 10


# -- several limits, several accounts ---------------------------------------------------------------------------


def test_the_refusal_names_the_limit_that_frees_last() -> None:
    key, tenant = account(requests_per_minute=60, concurrent_requests=1), account(requests_per_minute=1)
    assert enter([key, tenant], START, WALL, NOTHING) is None
    refusal = refused(enter([key, tenant], START, WALL, NOTHING))
    assert (refusal.account, refusal.kind, refusal.seconds) == (1, LimitKind.REQUESTS, 60)
    settle([key, tenant], START, WALL, NOTHING, NOTHING)
    larger = account(tokens_per_minute=5)
    refusal = refused(enter([tenant, larger], START, WALL, Amount(6)))
    assert (refusal.account, refusal.seconds) == (1, None)


def test_a_changed_allowance_keeps_what_was_used() -> None:
    one = account(requests_per_minute=10, tokens_per_day=100)
    for _ in range(10):
        assert ask(one, 1) is None
        end(one, 1, 5)
    one.configure(Quota(requests_per_minute=15, tokens_per_day=50))
    assert refused(ask(one, 1)).kind is LimitKind.TOKENS_DAY
    one.configure(Quota(requests_per_minute=15))
    assert [ask(one) is None for _ in range(6)] == [True] * 5 + [False]


def test_limits_that_come_or_go_while_requests_run_leave_no_rest_behind() -> None:
    one = account()
    assert ask(one, 50) is None
    one.configure(Quota(tokens_per_day=100, concurrent_requests=1, tokens_per_minute=100))
    assert refused(ask(one, 1)).kind is LimitKind.CONCURRENT
    end(one, 50, 20)
    assert (one.running, one.held_tokens) == (0, 0)
    assert ask(one, 80) is None


def test_standings_are_those_of_the_bucket_with_the_least_left() -> None:
    key, tenant = account(requests_per_minute=60, tokens_per_minute=600), account(requests_per_minute=6)
    assert enter([key, tenant], START, WALL, Amount(60)) is None
    assert standings([key, tenant]) == ((6, 5, 10_000_000), (600, 540, 6_000_000))
    key.refill(round((START + 0.5) * 1e6))
    assert standings([key]) == ((60, 59, 500_000), (600, 545, 5_500_000))
    assert standings([account(concurrent_requests=1)]) == (None, None)


LIMITS = st.builds(
    Quota,
    st.none() | st.integers(1, 10),
    st.none() | st.integers(1, 200),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 500),
    st.none() | st.integers(1, 500),
)
STEPS = st.lists(
    st.tuples(st.integers(0, 40_000), st.integers(0, 60), st.integers(0, 90), st.booleans()), max_size=60
)


def state(accounts: list[Account], now: float) -> list[object]:
    for a in accounts:
        a.refill(round(now * 1e6))
    return [(a.running, a.held_tokens, *standings([a])) for a in accounts]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(LIMITS, min_size=1, max_size=3), STEPS)
def test_whatever_comes_nothing_leaks_nobody_is_refused_who_fitted_and_waits_are_true(
    limits: list[Quota], steps: list[tuple[int, int, int, bool]]
) -> None:
    accounts = [Account(limit) for limit in limits]
    now, running = 0.0, list[Amount]()
    spent = [0] * len(accounts)  # of the day, as a plain sum
    day = WALL // DAY
    for seconds, asked, used, ends in steps:
        now += seconds
        if (today := (WALL + now) // DAY) != day:
            for place, limit in enumerate(limits):
                most = limit.tokens_per_day
                for _ in range(int(today - day)):
                    spent[place] = max(0, spent[place] - most) if most is not None else 0
            day = today
        if ends and running:
            reserve = running.pop(0)
            settle(accounts, now, WALL + now, reserve, Amount(used))
            spent = [before + used for before in spent]
            continue
        before = state(accounts, now)
        refusal = enter(accounts, now, WALL + now, Amount(asked))
        held = sum(reserve.tokens for reserve in running)
        if refusal is None:
            running.append(Amount(asked))
            for place, limit in enumerate(limits):
                assert limit.concurrent_requests is None or len(running) <= limit.concurrent_requests
                assert limit.tokens_per_day is None or spent[place] + held + asked <= limit.tokens_per_day
            continue
        assert state(accounts, now) == before, "all or nothing"
        limit = limits[refusal.account]
        if refusal.kind is LimitKind.CONCURRENT:
            assert limit.concurrent_requests == len(running)
        elif refusal.kind is LimitKind.TOKENS_DAY:
            assert limit.tokens_per_day is not None
            assert spent[refusal.account] + held + max(1, asked) > limit.tokens_per_day
        elif refusal.kind in (LimitKind.REQUESTS, LimitKind.TOKENS):
            bucket = getattr(
                accounts[refusal.account], "requests" if refusal.kind is LimitKind.REQUESTS else "tokens"
            )
            assert bucket.wait(refusal.asked) > 0
            if refusal.seconds is not None:
                later = round((now + refusal.seconds) * 1e6)
                other = type(bucket)(bucket.limit)
                other.used, other.at = bucket.used, bucket.at
                other.refill(later - 1_000_000)
                assert other.wait(refusal.asked) > 0, "it would have fitted a second before"
                other.refill(later)
                assert other.wait(refusal.asked) == 0
    for reserve in running:
        settle(accounts, now, WALL + now, reserve, NOTHING)
    assert all((one.running, one.held_tokens, one.held_cost) == (0, 0, 0) for one in accounts)
    # And with all that is owed paid, everything is as new.
    now += 10_000 * DAY
    assert [standing for one in state(accounts, now) for standing in one[2:] if standing] == [  # type: ignore[index]
        (limit, limit, 0)
        for one in limits
        for limit in (one.requests_per_minute, one.tokens_per_minute)
        if limit
    ]
