"""The policies that everybody knows, and a user's own: same filters, same interface."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings

from policies import (
    RANKINGS,
    BackendView,
    ChooseReason,
    Forecast,
    RequestFacts,
    Router,
    RouterParams,
    own_policy,
)
from policies.ranking import Own
from tests.policies.build import BALANCED, EXACT, FAST, ask, backend, pool_of_three, pools, requests

CLASSIC = ("round_robin", "least_in_flight", "power_of_two", "session_hash", "static_tier")
P = RouterParams()


def send(policy: str, facts: RequestFacts, views: list[BackendView], seed: int = 1) -> str | None:
    return Router(P, policy).choose(facts, views, Random(seed)).backend


def run(policy: str, facts: list[RequestFacts], views: list[BackendView]) -> list[str]:
    """Requests that never end, one after the other."""
    rng, went = Random(7), []
    for turn, one in enumerate(facts, 1):
        name = Router(P, policy).choose(one, views, rng).backend
        assert name is not None
        went.append(name)
        views = [
            replace(view, in_flight=view.in_flight + 1, turn=turn) if view.name == name else view
            for view in views
        ]
    return went


def test_round_robin_takes_turns_whatever_the_load() -> None:
    went = run("round_robin", [ask()] * 9, pool_of_three())
    assert Counter(went) == {"a": 3, "b": 3, "c": 3}
    assert all(len(set(went[i : i + 3])) == 3 for i in (0, 3, 6))


def test_round_robin_does_not_make_up_for_an_absence() -> None:
    views = [backend("a", turn=99), backend("b", turn=98), backend("c", turn=3)]
    assert send("round_robin", ask(), views) == "c"
    views[2] = replace(views[2], turn=100)
    assert send("round_robin", ask(), views) == "b"


def test_least_in_flight_takes_the_fewest_and_draws_among_equals() -> None:
    views = [backend("a", in_flight=2), backend("b", in_flight=1), backend("c", in_flight=1)]
    assert {send("least_in_flight", ask(), views, seed) for seed in range(20)} == {"b", "c"}


def test_power_of_two_never_takes_the_busiest_of_three_and_evens_out() -> None:
    views = [backend("a", in_flight=5), backend("b", in_flight=1), backend("c", in_flight=3)]
    went = Counter(send("power_of_two", ask(), views, seed) for seed in range(600))
    assert set(went) == {"b", "c"}
    assert abs(went["b"] - 400) < 60, "the least busy of two in three draws"
    even = Counter(run("power_of_two", [ask()] * 90, pool_of_three(max_in_flight=100)))
    assert max(even.values()) - min(even.values()) <= 4


def test_session_hash_keeps_a_session_and_moves_only_those_of_a_backend_that_left() -> None:
    views = pool_of_three(max_in_flight=999)
    facts = [ask(session=f"s{i}") for i in range(60)]
    before = [send("session_hash", one, views) for one in facts]
    busy = [replace(view, in_flight=500 if view.name == "a" else 0) for view in views]
    assert [send("session_hash", one, busy) for one in facts] == before
    after = [send("session_hash", one, views[:2]) for one in facts]
    assert all(now == was for now, was in zip(after, before, strict=True) if was != "c")
    assert set(before) == {"a", "b", "c"}
    assert send("session_hash", ask(), busy) != "a", "without a session: the fewest in flight"


def test_static_tier_gives_each_tier_the_least_quality_that_satisfies_it() -> None:
    views = [
        backend("bf16", reference=True),
        backend("fp8", kl_bits=0.005),
        backend("nvfp4", kl_bits=0.3, in_flight=30),
    ]
    assert send("static_tier", ask(EXACT), views) == "bf16"
    assert send("static_tier", ask(BALANCED), views) == "fp8"
    assert send("static_tier", ask(FAST), views) == "nvfp4", "however busy"


def test_static_tier_takes_turns_among_equals() -> None:
    views = [backend(name, kl_bits=0.005) for name in "abc"]
    assert Counter(run("static_tier", [ask(BALANCED)] * 9, views)) == {"a": 3, "b": 3, "c": 3}


@pytest.mark.parametrize("policy", RANKINGS)
@settings(max_examples=40, derandomize=True, deadline=None)
@given(facts=requests, views=pools)
def test_no_policy_breaks_a_tier_or_takes_what_the_filters_dropped(
    policy: str, facts: RequestFacts, views: list[BackendView]
) -> None:
    decision = Router(P, policy).choose(facts, views, Random(1))
    names = {view.name: view for view in views}
    dropped = {drop.backend for drop in decision.drops}
    assert dropped | {score.backend for score in decision.scores} == set(names)
    if decision.backend is not None:
        assert decision.backend not in dropped
        assert names[decision.backend].reference or not facts.tier.reference
    else:
        assert dropped == set(names)


@pytest.mark.parametrize("policy", RANKINGS)
@settings(max_examples=40, derandomize=True, deadline=None)
@given(facts=requests, views=pools)
def test_every_policys_terms_add_up_to_its_totals_and_the_same_seed_decides_alike(
    policy: str, facts: RequestFacts, views: list[BackendView]
) -> None:
    views = [replace(v, forecast=Forecast(v.in_flight * 0.1, 0.2, 0.01, 3.0, 0.4)) for v in views]
    router = Router(P, policy)
    decision = router.choose(facts, views, Random(3))
    assert decision == router.choose(facts, views, Random(3))
    for score in decision.scores:
        assert score.total == pytest.approx(sum(value for _, value in score.terms))


# -- a user's own


def test_a_policy_of_ones_own_decides_and_its_terms_are_told() -> None:
    def score(facts: RequestFacts, backend: BackendView) -> Mapping[str, float]:
        return {"alphabet": -float(ord(backend.name[0])), "load": backend.in_flight / 100}

    own = own_policy("mine", score, "letters")
    decision = Router(P, own).choose(ask(), pool_of_three(), Random(1))
    assert (decision.backend, decision.reason) == ("c", ChooseReason.POLICY)
    assert dict(decision.scores[2].terms) == {"alphabet": -99.0, "load": 0.0}


@pytest.mark.parametrize(
    ("score", "complaint"),
    [
        (None, "define `score"),
        (lambda facts: {}, "TypeError"),
        (lambda facts, backend: 3, "TypeError"),
        (lambda facts, backend: {"a": "fast"}, "names and numbers"),
        (lambda facts, backend: {"a": float("nan")}, "finite"),
        (lambda facts, backend: {"a": 1 / (backend.running or 0)}, "ZeroDivisionError"),
        (lambda facts, backend: {"a": Random().random()}, "and then"),
    ],
)
def test_what_is_wrong_with_it_is_said_at_load(score: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        own_policy("mine", score)


def test_what_goes_wrong_later_costs_that_backend_its_rank_and_no_request_its_answer() -> None:
    def score(facts: RequestFacts, backend: BackendView) -> Mapping[str, float]:
        if backend.name == "a":
            raise RuntimeError
        return {"x": float("inf") if backend.name == "b" else 5.0}

    assert Router(P, Own("mine", score)).choose(ask(), pool_of_three(), Random(1)).backend == "c"
