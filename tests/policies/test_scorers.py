"""Load as shares of capacity: each term's arithmetic, and what it does without its signal."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import SCORERS, BackendView, RequestFacts, RouterParams
from policies.scorers import affinity, freshness, home, in_flight_share, kv_share, window_risk
from tests.policies.build import PARAMS, ask, backend, requests, views


@pytest.mark.parametrize(
    ("age", "weight"), [(0.0, 1.0), (1.25, 0.75), (4.0, 0.2), (5.0, 0.0), (60.0, 0.0), (None, 0.0)]
)
def test_polled_numbers_fade_with_age(age: float | None, weight: float) -> None:
    assert freshness(backend(polled_age=age), PARAMS) == pytest.approx(weight)


@pytest.mark.parametrize(
    ("view", "share", "why"),
    [
        (backend(max_in_flight=8), 1 / 8, "idle: this request alone"),
        (backend(max_in_flight=8, in_flight=3), 4 / 8, "ours and this one"),
        (
            backend(max_in_flight=8, in_flight=3, running=3, waiting=0, polled_age=0.0),
            4 / 8,
            "ours are not counted twice",
        ),
        (
            backend(max_in_flight=8, in_flight=3, running=1, waiting=0, polled_age=0.0),
            4 / 8,
            "a poll from before ours came",
        ),
        (
            backend(max_in_flight=8, in_flight=1, running=2, waiting=3, polled_age=0.0),
            6 / 8,
            "other people's, running or waiting",
        ),
        (
            backend(max_in_flight=8, in_flight=1, running=5, waiting=0, polled_age=2.5),
            4 / 8,
            "half as fresh, half as heavy",
        ),
        (
            backend(max_in_flight=8, in_flight=1, running=5, waiting=0, polled_age=5.0),
            2 / 8,
            "stale: nothing",
        ),
        (backend(max_in_flight=8, in_flight=1, running=5, polled_age=0.0), 6 / 8, "waiting not reported"),
        (backend(max_in_flight=8, in_flight=1, waiting=5, polled_age=0.0), 2 / 8, "running not reported"),
        (backend(max_in_flight=8, in_flight=1, running=5, waiting=0), 2 / 8, "never polled"),
        (backend(max_in_flight=0), 1.0, "a capacity of nothing is no crash"),
    ],
)
def test_in_flight_share(view: BackendView, share: float, why: str) -> None:
    assert in_flight_share(ask(), view, PARAMS, None) == pytest.approx(share), why


@pytest.mark.parametrize(
    ("view", "share", "why"),
    [
        (backend(kv_tokens=10_000), 0.15, "idle: prompt and reserved output"),
        (backend(kv_tokens=10_000, in_flight_tokens=2000), 0.35, "ours and this one"),
        (
            backend(kv_tokens=10_000, in_flight_tokens=2000, kv_usage=0.1, polled_age=0.0),
            0.35,
            "a poll below ours",
        ),
        (
            backend(kv_tokens=10_000, in_flight_tokens=2000, kv_usage=0.6, polled_age=0.0),
            0.75,
            "more than ours is held",
        ),
        (
            backend(kv_tokens=10_000, in_flight_tokens=2000, kv_usage=0.6, polled_age=2.5),
            0.55,
            "half as fresh",
        ),
        (backend(kv_tokens=10_000, in_flight_tokens=2000, kv_usage=0.6, polled_age=9.0), 0.35, "stale"),
        (backend(kv_tokens=10_000, in_flight_tokens=2000, kv_usage=0.6), 0.35, "never polled"),
        (backend(kv_tokens=10_000, kv_usage=float("nan"), polled_age=0.0), 0.15, "not a number"),
        (backend(kv_tokens=1000), 1.5, "more than fits at once"),
        (backend(kv_tokens=0), 1500, "a capacity of nothing is no crash"),
    ],
)
def test_kv_share(view: BackendView, share: float, why: str) -> None:
    assert kv_share(ask(prompt=1000, output=500), view, PARAMS, None) == pytest.approx(share), why


@pytest.mark.parametrize(
    ("window", "risk", "why"),
    [
        (None, 0.0, "unknown: as good as any"),
        (2000, 0.0, "fits exactly"),
        (1999, 1.0005, "just too small: the whole penalty"),
        (1000, 1.5, "half of what is needed"),
        (500, 1.75, "the smaller, the worse"),
    ],
)
def test_window_risk(window: int | None, risk: float, why: str) -> None:
    facts = ask(prompt=1500, low=100, output=500)
    assert window_risk(facts, backend(window_tokens=window), PARAMS, None) == pytest.approx(risk), why


def test_affinity_is_a_bonus_for_the_sessions_own_backend_only() -> None:
    assert affinity(ask(), backend("a"), PARAMS, "a") == -PARAMS.affinity_weight
    assert affinity(ask(), backend("b"), PARAMS, "a") == 0.0
    assert affinity(ask(), backend("b"), PARAMS, None) == 0.0


@pytest.mark.parametrize(
    ("session", "own"),
    [
        ("alice", "nvfp4"),
        ("bob", "nvfp4"),
        ("carol", "fp8"),
        ("dave", "nvfp4"),
        ("erin", "nvfp4"),
        ("frank", "fp8"),
    ],
)
def test_a_sessions_own_backend_is_the_same_in_every_process(session: str, own: str) -> None:
    """Fixed answers: a change of the hash would move every session of a running fleet."""
    assert home(session, ["fp8", "bf16", "nvfp4"]) == own
    assert home(session, ["nvfp4", "fp8", "bf16"]) == own, "whatever the order"


def test_sessions_of_any_spelling_have_a_backend() -> None:
    for session in ("", "\ud800", "é", "a\0b", "x" * 10_000):
        assert home(session, ["a", "b"]) in {"a", "b"}


def test_sessions_spread_evenly() -> None:
    share = Counter(home(f"session-{i}", list("abcd")) for i in range(4000))
    assert all(abs(n - 1000) < 100 for n in share.values()), share


def test_when_a_backend_leaves_only_its_own_sessions_move_and_they_spread() -> None:
    before = {f"session-{i}": home(f"session-{i}", list("abcd")) for i in range(4000)}
    after = {session: home(session, list("abd")) for session in before}
    moved = [session for session in before if after[session] != before[session]]
    assert {before[session] for session in moved} == {"c"}
    assert len(moved) == sum(where == "c" for where in before.values())
    spread = Counter(after[session] for session in moved)
    assert all(abs(n - len(moved) / 3) < 60 for n in spread.values()), spread


@settings(max_examples=200, derandomize=True, deadline=None)
@given(requests, views, st.integers(0, 40))
def test_more_load_never_scores_lower(facts: RequestFacts, view: BackendView, more: int) -> None:
    busier = replace(
        view, in_flight=view.in_flight + more, in_flight_tokens=view.in_flight_tokens + more * 100
    )
    for name, scorer in SCORERS:
        assert scorer(facts, busier, PARAMS, "?") >= scorer(facts, view, PARAMS, "?") - 1e-9, name


@settings(max_examples=200, derandomize=True, deadline=None)
@given(requests, views, st.floats(5, 1e6) | st.none())
def test_a_stale_poll_scores_like_no_poll(facts: RequestFacts, view: BackendView, age: float | None) -> None:
    stale = replace(view, polled_age=age)
    silent = replace(view, running=None, waiting=None, kv_usage=None, polled_age=None)
    for name, scorer in SCORERS:
        assert scorer(facts, stale, PARAMS, None) == scorer(facts, silent, PARAMS, None), name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kv_limit": 0}, "kv_limit must be above 0 and at most 1"),
        ({"kv_limit": 95}, "kv_limit must be above 0 and at most 1"),
        ({"fresh_seconds": 0}, "fresh_seconds must be above 0"),
        ({"affinity_weight": -0.1}, "affinity_weight must be 0 or more"),
        ({"window_penalty": float("nan")}, "window_penalty must be 0 or more"),
    ],
)
def test_params_that_make_no_sense_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterParams(**wrong)
