"""What holds for every request, every fleet and every attempt."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import (
    SCORERS,
    BackendView,
    RequestFacts,
)
from tests.policies.build import EXACT, choose, pools, requests

no_attempt: dict[str, object] = {}
attempts = st.one_of(
    st.just(no_attempt),
    st.fixed_dictionaries(
        {},
        optional={
            "tried": st.frozensets(st.sampled_from("abcde"), min_size=1, max_size=3),
            "pinned": st.sampled_from("abcde"),
            "larger_than": st.sampled_from([0, 4096, 32_768]),
        },
    ),
)
everything = settings(max_examples=200, derandomize=True, deadline=None)


@everything
@given(requests, pools, attempts, st.integers(0, 99))
def test_every_backend_is_either_dropped_or_scored_and_the_choice_is_a_scored_one(
    facts: RequestFacts, views: list[BackendView], attempt: dict[str, object], seed: int
) -> None:
    decision = choose(facts, views, seed, **attempt)
    dropped = [drop.backend for drop in decision.drops]
    scored = [score.backend for score in decision.scores]
    assert sorted(dropped + scored) == sorted(view.name for view in views)
    assert decision.backend in scored if scored else decision.backend is None
    assert (decision.reason is None) == (decision.backend is None)


@everything
@given(requests, pools, attempts)
def test_nothing_that_must_not_serve_is_even_considered(
    facts: RequestFacts, views: list[BackendView], attempt: dict[str, object]
) -> None:
    considered = {score.backend for score in choose(facts, views, **attempt).scores}
    for view in views:
        if view.name in considered:
            assert view.healthy
            assert not view.draining
            assert view.in_flight < view.max_in_flight
            assert view.reference or not facts.tier.reference
            assert view.window_tokens is None or facts.prompt.low <= view.window_tokens
            assert view.name not in attempt.get("tried", ())  # type: ignore[operator]
            assert attempt.get("pinned", view.name) == view.name
            assert "larger_than" not in attempt or (view.window_tokens or 0) > attempt["larger_than"]  # type: ignore[operator]


@everything
@given(pools, attempts, requests)
def test_exact_is_never_served_by_less_than_the_reference(
    views: list[BackendView], attempt: dict[str, object], facts: RequestFacts
) -> None:
    decision = choose(replace(facts, tier=EXACT), views, **attempt)
    references = {view.name for view in views if view.reference}
    assert decision.backend is None or decision.backend in references
    assert {score.backend for score in decision.scores} <= references


@everything
@given(requests, pools, attempts)
def test_only_full_is_true_exactly_when_an_idle_fleet_would_take_the_request(
    facts: RequestFacts, views: list[BackendView], attempt: dict[str, object]
) -> None:
    """A 429 says "later": it must be true. A 503 says "not like this": so must that."""
    decision = choose(facts, views, **attempt)
    idle = [replace(view, in_flight=0, in_flight_tokens=0, waiting=0) for view in views]
    mended_by_waiting = decision.backend is None and choose(facts, idle, **attempt).backend is not None
    assert decision.only_full() == mended_by_waiting


@everything
@given(requests, pools, st.randoms(use_true_random=False), attempts)
def test_the_order_of_the_config_decides_nothing(
    facts: RequestFacts, views: list[BackendView], shuffler: Random, attempt: dict[str, object]
) -> None:
    shuffled = shuffler.sample(views, len(views))
    one, other = choose(facts, views, **attempt), choose(facts, shuffled, **attempt)
    assert set(one.drops) == set(other.drops)
    assert set(one.scores) == set(other.scores)


@everything
@given(requests, pools, attempts)
def test_the_total_is_the_sum_of_its_named_terms_and_the_choice_has_the_lowest(
    facts: RequestFacts, views: list[BackendView], attempt: dict[str, object]
) -> None:
    decision = choose(facts, views, **attempt)
    for score in decision.scores:
        assert [name for name, _ in score.terms] == [name for name, _ in SCORERS]
        assert score.total == pytest.approx(sum(value for _, value in score.terms))
        if score.backend == decision.backend:
            assert score.total <= min(s.total for s in decision.scores) + 1e-9


@everything
@given(requests, pools, attempts, st.integers(0, 99))
def test_the_same_snapshot_and_seed_give_the_same_decision(
    facts: RequestFacts, views: list[BackendView], attempt: dict[str, object], seed: int
) -> None:
    assert choose(facts, views, seed, **attempt) == choose(facts, views, seed, **attempt)
