"""Which backends may serve a request: one table a reason, read as "dropped because"."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from policies import (
    FILTERS,
    LOAD_REASONS,
    BackendView,
    DropReason,
    RequestFacts,
    RouterParams,
    Tier,
    drop_reason,
)
from policies.filters import draining, full, gate, kv_full, prompt_too_long, tier, unhealthy
from tests.policies.build import BALANCED, EXACT, FAST, PARAMS, ask, backend, requests, views

BOUNDED = Tier("bounded", max_kl_bits=0.05)


@pytest.mark.parametrize(
    ("wanted", "view", "dropped", "why"),
    [
        (EXACT, backend(reference=True), False, "the reference is what exact asks for"),
        (EXACT, backend(kl_bits=0.0), True, "zero KL is still not the reference"),
        (EXACT, backend(), True, "unknown quality is not the reference"),
        (BOUNDED, backend(kl_bits=0.05), False, "the bound itself is within"),
        (BOUNDED, backend(kl_bits=0.0501), True, "beyond the bound"),
        (BOUNDED, backend(), True, "unknown KL satisfies no bound"),
        (BOUNDED, backend(reference=True), False, "the reference is within any bound"),
        (BOUNDED, backend(reference=True, kl_bits=9.0), False, "whatever its KL is said to be"),
        (
            Tier("both", reference=True, max_kl_bits=1.0),
            backend(kl_bits=0.1),
            True,
            "a bound does not weaken reference",
        ),
        (FAST, backend(), False, "a tier without demands takes anything"),
        (FAST, backend(kl_bits=9.0), False, "however bad"),
    ],
)
def test_tier(wanted: Tier, view: BackendView, dropped: bool, why: str) -> None:
    assert (tier(ask(wanted), view, PARAMS) is DropReason.TIER) is dropped, why


@pytest.mark.parametrize(
    ("facts", "window", "dropped", "why"),
    [
        (ask(low=4096, prompt=9000), 4096, False, "near the edge the backend judges"),
        (ask(low=4097, prompt=9000), 4096, True, "surely too long"),
        (ask(low=100, prompt=90_000), 4096, False, "expected too long is not surely too long"),
        (ask(low=100, prompt=400, output=90_000), 4096, False, "output is the backend's to refuse"),
        (ask(low=10**9), None, False, "an unknown window drops nothing"),
    ],
)
def test_prompt_too_long(facts: RequestFacts, window: int | None, dropped: bool, why: str) -> None:
    reason = prompt_too_long(facts, backend(window_tokens=window), PARAMS)
    assert (reason is DropReason.PROMPT_TOO_LONG) is dropped, why


@pytest.mark.parametrize(
    ("demands", "age", "dropped"),
    [
        ({}, None, False),
        ({"requires_gate": True}, None, True),
        ({"requires_gate": True}, 1e9, False),
        ({"requires_gate": True, "gate_seconds": 60.0}, 60.0, False),
        ({"requires_gate": True, "gate_seconds": 60.0}, 60.1, True),
        ({"gate_seconds": 60.0}, None, False),
    ],
)
def test_gate(demands: dict[str, Any], age: float | None, dropped: bool) -> None:
    facts, view = ask(Tier("t", **demands)), backend(gate_age=age)
    assert (gate(facts, view, PARAMS) is DropReason.GATE) is dropped
    assert (drop_reason(facts, view, PARAMS) is DropReason.GATE) is dropped


def test_unhealthy() -> None:
    assert unhealthy(ask(), backend(healthy=False), PARAMS) is DropReason.UNHEALTHY
    assert unhealthy(ask(), backend(), PARAMS) is None


def test_draining() -> None:
    assert draining(ask(), backend(draining=True), PARAMS) is DropReason.DRAINING
    assert draining(ask(), backend(), PARAMS) is None


@pytest.mark.parametrize(
    ("polled", "dropped", "why"),
    [
        ({"kv_usage": 0.95, "waiting": 1, "polled_age": 0.0}, True, "no room, and a queue"),
        ({"kv_usage": 1.0, "waiting": 0, "polled_age": 0.0}, False, "full cache, nobody waits"),
        ({"kv_usage": 0.94, "waiting": 9, "polled_age": 0.0}, False, "a queue, but room"),
        ({"kv_usage": 1.0, "waiting": 9, "polled_age": 4.9}, True, "still fresh"),
        ({"kv_usage": 1.0, "waiting": 9, "polled_age": 5.0}, False, "stale"),
        ({"kv_usage": None, "waiting": 9, "polled_age": 0.0}, False, "usage not reported"),
        ({"kv_usage": 1.0, "waiting": None, "polled_age": 0.0}, False, "queue not reported"),
        ({"kv_usage": 1.0, "waiting": 9, "polled_age": None}, False, "never polled"),
        ({"kv_usage": float("nan"), "waiting": 9, "polled_age": 0.0}, False, "not a number"),
    ],
)
def test_kv_full(polled: dict[str, float], dropped: bool, why: str) -> None:
    assert (kv_full(ask(), backend(**polled), PARAMS) is DropReason.KV_FULL) is dropped, why


def test_kv_full_reads_its_limit_and_its_age_from_the_params() -> None:
    view = backend(kv_usage=0.6, waiting=1, polled_age=8.0)
    assert kv_full(ask(), view, PARAMS) is None
    assert kv_full(ask(), view, RouterParams(kv_limit=0.5, fresh_seconds=10)) is DropReason.KV_FULL


@pytest.mark.parametrize(("in_flight", "dropped"), [(0, False), (7, False), (8, True), (9, True)])
def test_full(in_flight: int, dropped: bool) -> None:
    view = backend(in_flight=in_flight, max_in_flight=8)
    assert (full(ask(), view, PARAMS) is DropReason.FULL) is dropped


def test_each_filter_is_named_after_its_reason_and_stands_in_the_table() -> None:
    elsewhere = {DropReason.TRIED, DropReason.PINNED_ELSEWHERE}  # of the attempt: the router's
    assert [f.__name__ for f in FILTERS] == [
        "tier",
        "gate",
        "speculation",
        "remote",
        "spill",
        "prompt_too_long",
        "collapsed",
        "suspect",
        "unhealthy",
        "draining",
        "kv_full",
        "full",
        "held",
    ]
    assert {DropReason(f.__name__) for f in FILTERS} == set(DropReason) - elsewhere


def test_what_waiting_cannot_mend_is_named_before_load() -> None:
    """Otherwise a 429 would promise a place on a backend that will never take the request."""
    is_load = [DropReason(f.__name__) in LOAD_REASONS for f in FILTERS]
    assert is_load == sorted(is_load)
    hopeless = backend(in_flight=99, healthy=False, draining=True, window_tokens=1)
    assert drop_reason(ask(EXACT), hopeless, PARAMS) is DropReason.TIER
    assert drop_reason(ask(FAST), hopeless, PARAMS) is DropReason.PROMPT_TOO_LONG
    assert drop_reason(ask(FAST, low=0), hopeless, PARAMS) is DropReason.UNHEALTHY


@settings(max_examples=100, derandomize=True, deadline=None)
@given(requests, views)
def test_the_first_reason_of_the_table_is_the_one_given(facts: RequestFacts, view: BackendView) -> None:
    reasons = [reason for f in FILTERS if (reason := f(facts, view, PARAMS)) is not None]
    assert drop_reason(facts, view, PARAMS) == (reasons[0] if reasons else None)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(requests)
def test_a_backend_that_told_nothing_is_dropped_only_for_its_quality(facts: RequestFacts) -> None:
    silent = BackendView("silent")
    assert drop_reason(facts, silent, PARAMS) in (None, DropReason.TIER)
    assert facts.tier in (EXACT, BALANCED) or drop_reason(facts, silent, PARAMS) is None
