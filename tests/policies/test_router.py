"""Where a request goes, and why. Read this to learn routing."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from policies import (
    BackendView,
    ChooseReason,
    Decision,
    Drop,
    DropReason,
    Forecast,
    RequestFacts,
    Router,
    RouterParams,
    Spill,
)
from policies.scorers import home
from tests.policies.build import BALANCED, EXACT, FAST, ROUTER, ask, backend, choose, pool_of_three

# -- a pool of three


def test_the_least_loaded_backend_is_chosen() -> None:
    decision = choose(
        ask(), [backend("a", in_flight=3), backend("b", in_flight=1), backend("c", in_flight=2)]
    )
    assert (decision.backend, decision.reason) == ("b", ChooseReason.LEAST_LOAD)


def test_load_is_a_share_so_a_bigger_backend_takes_more() -> None:
    views = [backend("small", in_flight=2, max_in_flight=8), backend("big", in_flight=4, max_in_flight=32)]
    assert choose(ask(), views).backend == "big"


def test_tokens_in_flight_count_beside_requests() -> None:
    views = [
        backend("one_long", in_flight=1, in_flight_tokens=100_000),
        backend("two_short", in_flight=2, in_flight_tokens=2_000),
    ]
    assert choose(ask(), views).backend == "two_short"


def test_a_pool_of_three_goes_down_fills_up_and_comes_back() -> None:
    a, b, c = pool_of_three()
    a = replace(a, healthy=False)
    assert choose(ask(), [a, b, replace(c, in_flight=1)]).backend == "b"
    b = replace(b, in_flight=b.max_in_flight)
    decision = choose(ask(), [a, b, c])
    assert (decision.backend, decision.reason) == ("c", ChooseReason.ONLY)
    assert decision.drops == (Drop("a", DropReason.UNHEALTHY), Drop("b", DropReason.FULL))
    c = replace(c, draining=True)
    decision = choose(ask(), [a, b, c])
    assert decision.backend is None
    assert decision.reason is None
    assert decision.only_full()
    a = replace(a, healthy=True)
    assert choose(ask(), [a, b, c]).backend == "a"


def test_exact_waits_for_the_reference_rather_than_take_less() -> None:
    views = [backend("bf16", reference=True, in_flight=32), backend("fp8", kl_bits=0.01)]
    decision = choose(ask(EXACT), views)
    assert decision.backend is None
    assert decision.drops == (Drop("bf16", DropReason.FULL), Drop("fp8", DropReason.TIER))
    assert decision.only_full()


def test_balanced_takes_the_reference_when_that_is_sooner() -> None:
    views = [backend("bf16", reference=True), backend("fp8", kl_bits=0.01, in_flight=5)]
    assert choose(ask(BALANCED), views).backend == "bf16"


def test_waiting_is_no_help_when_nothing_that_fits_is_merely_full() -> None:
    views = [backend("bf16", reference=True, healthy=False), backend("fp8", in_flight=32)]
    decision = choose(ask(EXACT), views)
    assert decision.drops == (Drop("bf16", DropReason.UNHEALTHY), Drop("fp8", DropReason.TIER))
    assert not decision.only_full()


def test_near_the_edge_a_larger_window_is_preferred_to_a_lesser_load() -> None:
    views = [backend("small", window_tokens=8192), backend("large", window_tokens=131_072, in_flight=16)]
    near = ask(prompt=8000, low=2000)
    assert choose(near, views).backend == "large"
    assert choose(ask(prompt=4000), views).backend == "small", "when it surely fits, load decides"
    views[1] = replace(views[1], in_flight=31, in_flight_tokens=100_000)
    assert choose(near, views).backend == "small", "and at last the load outweighs the risk"


def test_no_backend_at_all_is_no_choice() -> None:
    assert choose(ask(), []) == Decision(None, None)


# -- tiers


def test_a_tier_without_speculation_goes_where_nothing_is_drafted() -> None:
    plain = replace(FAST, no_speculation=True)
    views = [backend("mtp", speculates=True), backend("plain", in_flight=20)]
    decision = choose(ask(plain), views)
    assert decision.backend == "plain"
    assert decision.drops == (Drop("mtp", DropReason.SPECULATION),)
    assert choose(ask(FAST), views).backend == "mtp"


def test_a_spill_rule_says_when_others_may_use_the_reference() -> None:
    bf16, fp8 = backend("bf16", reference=True), backend("fp8", kl_bits=0.01, in_flight=20)
    full = replace(fp8, in_flight=32)
    for spill, busy, filled in (
        (Spill.SOONER, "bf16", "bf16"),
        (Spill.FULL, "fp8", "bf16"),
        (Spill.NEVER, "fp8", None),
    ):
        tier = replace(BALANCED, spill=spill)
        assert choose(ask(tier), [bf16, fp8]).backend == busy, spill
        assert choose(ask(tier), [bf16, full]).backend == filled, spill
        exact = replace(EXACT, spill=spill)
        assert choose(ask(exact), [bf16, fp8]).backend == "bf16", "nobody spills into one's own"


def test_a_remote_is_a_last_resort_of_tiers_that_name_it_and_of_no_other() -> None:
    remote, own = backend("cloud", remote=True), backend("own", in_flight=31)
    last = replace(FAST, last_resort=True)
    assert choose(ask(last), [remote, own]).backend == "own"
    decision = choose(ask(last), [remote, replace(own, healthy=False)])
    assert (decision.backend, decision.reason) == ("cloud", ChooseReason.LAST_RESORT)
    assert choose(ask(FAST), [remote, replace(own, healthy=False)]).backend is None
    held = choose(ask(last), [remote, replace(own, held=True)])
    assert held.backend is None, "one's own will have room: that is admission's to judge"
    assert held.only_full()


def test_exact_does_not_go_to_a_remote_of_less_quality() -> None:
    exact = replace(EXACT, last_resort=True)
    views = [backend("cloud", remote=True), backend("bf16", reference=True, healthy=False)]
    assert choose(ask(exact), views).backend is None


def test_a_suspect_gets_what_no_other_can_take_and_nobody_else() -> None:
    doubted, well = backend("doubted", suspect=True), backend("well", in_flight=30)
    decision = choose(ask(), [doubted, well])
    assert (decision.backend, decision.drops) == ("well", (Drop("doubted", DropReason.SUSPECT),))
    for gone in ({"healthy": False}, {"draining": True}, {"window_tokens": 1}):
        assert choose(ask(), [doubted, replace(well, **gone)]).backend == "doubted", gone
    assert choose(ask(), [doubted]).backend == "doubted"
    assert choose(ask(EXACT), [doubted, replace(well, reference=True)]).backend == "well"
    assert choose(ask(EXACT), [doubted, replace(well, reference=True, healthy=False)]).backend is None


@pytest.mark.parametrize("doubt", [{"suspect": True}, {"collapsed": True}])
def test_a_doubtful_one_that_is_full_says_so_when_there_is_no_other(doubt: dict[str, bool]) -> None:
    decision = choose(ask(), [backend("a", in_flight=32, **doubt), backend("b", healthy=False)])
    assert decision.drops == (Drop("a", DropReason.FULL), Drop("b", DropReason.UNHEALTHY))
    assert decision.only_full()


def test_nobody_is_sent_to_a_suspect_because_the_others_are_full_for_the_moment() -> None:
    doubted, well = backend("doubted", suspect=True), backend("well")
    for busy in ({"in_flight": 32}, {"held": True}):
        decision = choose(ask(), [doubted, replace(well, **busy)])
        assert decision.backend is None
        assert decision.only_full()


def test_of_the_doubtful_the_slow_one_comes_before_the_suspect() -> None:
    views = [backend("doubted", suspect=True), backend("collapsed", collapsed=True, in_flight=9)]
    assert choose(ask(), views).backend == "collapsed"
    assert choose(ask(), [replace(views[0], collapsed=True), views[1]]).backend == "collapsed"


def test_a_collapsed_backend_is_used_when_no_other_can_take_the_request_now() -> None:
    views = [backend("collapsed", collapsed=True), backend("well", in_flight=31)]
    decision = choose(ask(), views)
    assert decision.backend == "well"
    assert decision.drops == (Drop("collapsed", DropReason.COLLAPSED),)
    for differs in ({"held": True}, {"in_flight": 32}, {"healthy": False}):
        assert choose(ask(), [views[0], replace(views[1], **differs)]).backend == "collapsed", differs
    assert choose(ask(), [replace(views[0], healthy=False), replace(views[1], held=True)]).backend is None


# -- forecasts


def soon(name: str, cached: float = 0.0, **terms: float) -> BackendView:
    return backend(name, cached_tokens=cached, forecast=Forecast(**terms))


def test_the_sum_of_the_forecasts_seconds_decides() -> None:
    views = [
        soon("warm_but_busy", 900, queue=3.0),
        soon("cold", prefill=2.5, harm=1.0),
        soon("idle", prefill=2.9),
    ]
    decision = choose(ask(), views)
    assert (decision.backend, decision.reason) == ("idle", ChooseReason.SOONEST)


def test_affinity_yields_when_the_wait_exceeds_what_the_cache_saves() -> None:
    for wait, to, why in ((18.0, "warm", ChooseReason.PREFIX), (20.0, "cold", ChooseReason.SOONEST)):
        decision = choose(ask(), [soon("warm", 900, queue=wait, prefill=0.5), soon("cold", prefill=19.3)])
        assert (decision.backend, decision.reason) == (to, why)


def test_one_view_without_forecast_and_all_are_ranked_by_load() -> None:
    views = [soon("a", prefill=0.1), backend("b"), backend("c", in_flight=5)]
    views[0] = replace(views[0], in_flight=3)
    decision = choose(ask(), views)
    assert (decision.backend, decision.reason) == ("b", ChooseReason.LEAST_LOAD)


# -- further attempts, and what a request refers to


def test_a_backend_that_failed_is_not_tried_again() -> None:
    views = [backend("a"), backend("b", in_flight=9), backend("c", healthy=False)]
    decision = choose(ask(), views, tried=frozenset({"a"}))
    assert (decision.backend, decision.reason) == ("b", ChooseReason.RETRY)
    assert decision.drops == (Drop("a", DropReason.TRIED), Drop("c", DropReason.UNHEALTHY))


def test_when_all_were_tried_none_is_left_and_waiting_is_no_help() -> None:
    decision = choose(ask(), pool_of_three(in_flight=99), tried=frozenset("abc"))
    assert decision.backend is None
    assert not decision.only_full()


def test_after_an_overflow_only_windows_known_to_be_larger_count() -> None:
    views = [
        backend("same", window_tokens=8192),
        backend("larger", window_tokens=32_768, in_flight=20),
        backend("unknown", window_tokens=None),
    ]
    decision = choose(ask(), views, larger_than=8192)
    assert (decision.backend, decision.reason) == ("larger", ChooseReason.LARGER_WINDOW)
    assert {drop.reason for drop in decision.drops} == {DropReason.PROMPT_TOO_LONG}


def test_a_pinned_request_goes_to_the_backend_that_holds_its_response() -> None:
    decision = choose(ask(), [backend("a"), backend("b", in_flight=30)], pinned="b")
    assert (decision.backend, decision.reason) == ("b", ChooseReason.PINNED)
    assert decision.drops == (Drop("a", DropReason.PINNED_ELSEWHERE),)


@pytest.mark.parametrize(
    ("state", "reason", "waits"),
    [
        ({"healthy": False}, DropReason.UNHEALTHY, False),
        ({"in_flight": 32}, DropReason.FULL, True),
        ({"window_tokens": 1}, DropReason.PROMPT_TOO_LONG, False),
    ],
)
def test_the_filters_judge_a_pinned_backend_too(
    state: dict[str, int], reason: DropReason, waits: bool
) -> None:
    decision = choose(ask(), [backend("a"), backend("b", **state)], pinned="b")
    assert decision.backend is None
    assert Drop("b", reason) in decision.drops
    assert decision.only_full() is waits


def test_exact_is_not_downgraded_by_a_pin() -> None:
    decision = choose(ask(EXACT), [backend("bf16", reference=True), backend("fp8")], pinned="fp8")
    assert decision.drops == (Drop("bf16", DropReason.PINNED_ELSEWHERE), Drop("fp8", DropReason.TIER))


def test_a_pin_to_a_backend_that_is_gone_drops_all() -> None:
    decision = choose(ask(), pool_of_three(), pinned="gone")
    assert {drop.reason for drop in decision.drops} == {DropReason.PINNED_ELSEWHERE}


REASONS = [
    ("least load without a session", ask(), "abc", {}, ChooseReason.LEAST_LOAD),
    ("session on its own backend", ask(session="s1"), "abc", {}, ChooseReason.SESSION),
    ("only one left", ask(session="s1"), "a", {}, ChooseReason.ONLY),
    (
        "a second try, though one is left",
        ask(session="s1"),
        "ab",
        {"tried": frozenset("a")},
        ChooseReason.RETRY,
    ),
    (
        "a larger window, though others were tried",
        ask(),
        "abc",
        {"tried": frozenset("a"), "larger_than": 100},
        ChooseReason.LARGER_WINDOW,
    ),
    (
        "pinned, whatever else",
        ask(session="s1"),
        "ab",
        {"pinned": "b", "tried": frozenset("a")},
        ChooseReason.PINNED,
    ),
]


@pytest.mark.parametrize(
    ("facts", "names", "attempt", "reason"), [r[1:] for r in REASONS], ids=[r[0] for r in REASONS]
)
def test_the_reason_names_what_decided(
    facts: RequestFacts, names: str, attempt: dict[str, object], reason: ChooseReason
) -> None:
    decision = choose(facts, [backend(name) for name in names], **attempt)
    assert decision.reason is reason


# -- sessions


def test_a_session_stays_until_its_backend_is_clearly_busier_and_returns_afterwards() -> None:
    views = {name: backend(name, max_in_flight=100, kv_tokens=10**9) for name in "abc"}
    own = home("s1", list(views))
    went = []
    for load in (0, 10, 24, 26, 60, 24, 0):
        views[own] = replace(views[own], in_flight=load)
        decision = choose(ask(session="s1"), list(views.values()))
        went.append((load, decision.backend == own, decision.reason is ChooseReason.SESSION))
    assert went == [
        (0, True, True),
        (10, True, True),
        (24, True, True),
        (26, False, False),
        (60, False, False),
        (24, True, True),
        (0, True, True),
    ]


def test_affinity_can_be_switched_off() -> None:
    router = Router(RouterParams(affinity_weight=0))
    went = [router.choose(ask(session="s1"), pool_of_three(), Random(seed)) for seed in range(100)]
    assert {decision.backend for decision in went} == {"a", "b", "c"}
    assert {decision.reason for decision in went} == {ChooseReason.LEAST_LOAD}


def test_equal_loads_tie_however_their_terms_were_added() -> None:
    """0.1 + 0.2 is not 0.3 to a float; to a router it is."""
    views = [
        backend("a", max_in_flight=10, kv_tokens=1000, in_flight_tokens=200),
        backend("b", max_in_flight=10, kv_tokens=1000, in_flight=2),
    ]
    assert {choose(ask(prompt=0, output=0), views, seed).backend for seed in range(20)} == {"a", "b"}


def test_a_session_whose_backend_may_not_serve_has_a_second_home() -> None:
    views = {name: backend(name) for name in "abc"}
    own = home("s1", list(views))
    views[own] = replace(views[own], draining=True)
    went = {choose(ask(session="s1"), list(views.values()), seed).backend for seed in range(50)}
    assert went == {home("s1", [name for name in views if name != own])}


# -- the decision explains itself


def test_a_decision_holds_every_term_of_every_candidate() -> None:
    views = [
        backend("a", in_flight=3, max_in_flight=8, kv_tokens=10_000, in_flight_tokens=1000),
        backend("b", window_tokens=1000),
        backend("c", healthy=False),
    ]
    decision = choose(ask(prompt=1000, output=500), views)
    a, b = decision.scores
    assert a.backend == "a"
    assert dict(a.terms) == pytest.approx({"in_flight": 0.5, "kv": 0.25, "window": 0.0, "affinity": 0.0})
    assert a.total == pytest.approx(0.75)
    assert dict(b.terms)["window"] == pytest.approx(4 / 3)
    assert decision.drops == (Drop("c", DropReason.UNHEALTHY),)


def test_a_router_says_what_it_is_set_to() -> None:
    assert repr(ROUTER) == (
        "Router(RouterParams(kv_limit=0.95, fresh_seconds=5.0, affinity_weight=0.25, window_penalty=1.0), "
        "'predicted')"
    )
