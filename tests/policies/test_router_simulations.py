"""Small simulations on the production router, seeded, with the tolerance stated."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from policies import (
    BackendView,
    RequestFacts,
)
from policies.scorers import home
from tests.policies.build import EXACT, FAST, ROUTER, ask, backend, choose, pool_of_three


class Fleet:
    """Backends that count leases as the pool does, and are polled when told."""

    def __init__(self, *views: BackendView) -> None:
        self.views = {view.name: view for view in views}
        self.rng = Random(12345)

    def send(self, facts: RequestFacts) -> str:
        name = ROUTER.choose(facts, list(self.views.values()), self.rng).backend
        assert name is not None
        self._change(name, +1, facts.context_tokens)
        return name

    def finish(self, name: str, facts: RequestFacts) -> None:
        self._change(name, -1, -facts.context_tokens)

    def age(self, seconds: float) -> None:
        for name, view in self.views.items():
            self.views[name] = replace(view, polled_age=(view.polled_age or 0.0) + seconds)

    def poll(self) -> None:
        for name, view in self.views.items():
            self.views[name] = replace(view, running=view.in_flight, waiting=0, polled_age=0.0)

    def _change(self, name: str, requests: int, tokens: int) -> None:
        view = self.views[name]
        self.views[name] = replace(
            view, in_flight=view.in_flight + requests, in_flight_tokens=view.in_flight_tokens + tokens
        )


def test_concurrent_choices_spread_evenly_over_equal_backends() -> None:
    """Each choice sees the lease of the one before, with no await between: 200 at once do not herd."""
    fleet = Fleet(*[backend(name, max_in_flight=100, kv_tokens=10**6) for name in "abcd"])
    went = Counter(fleet.send(ask()) for _ in range(200))
    assert set(went.values()) == {50}


def test_concurrent_choices_spread_by_capacity_over_unequal_backends() -> None:
    fleet = Fleet(
        backend("big", max_in_flight=90, kv_tokens=900_000),
        backend("mid", max_in_flight=60, kv_tokens=600_000),
        backend("small", max_in_flight=30, kv_tokens=300_000),
    )
    went = Counter(fleet.send(ask()) for _ in range(120))
    assert went == {"big": 60, "mid": 40, "small": 20}


def test_equal_idle_backends_get_equal_shares_whatever_their_order() -> None:
    went = Counter(choose(ask(), pool_of_three(), seed).backend for seed in range(3000))
    assert all(abs(n - 1000) < 100 for n in went.values()), went


@pytest.mark.parametrize(("age", "lead"), [(0.0, 12), (2.5, 6), (5.0, 0), (60.0, 0)])
def test_a_burst_between_two_polls_fills_the_idle_backend_only_up_to_the_difference(
    age: float, lead: int
) -> None:
    """b had 12 requests of somebody else when it was polled; nothing is polled during the burst of 100."""
    fleet = Fleet(
        backend("a", max_in_flight=200, kv_tokens=10**6, running=0, waiting=0, polled_age=age),
        backend("b", max_in_flight=200, kv_tokens=10**6, running=8, waiting=4, polled_age=age),
    )
    went = Counter(fleet.send(ask(output=0, prompt=0)) for _ in range(100))
    # Once b holds as many of ours as the poll saw, the poll says nothing that our own count does not.
    assert abs(went["a"] - went["b"]) <= max(lead, 1)


@pytest.mark.parametrize("interval", [0.5, 2.0, 10.0, 1e9])
def test_however_rarely_it_polls_equal_backends_stay_equally_busy(interval: float) -> None:
    """Poisson arrivals, exponential service of 3 s, 20 in flight on average on four backends: on average the
    busiest has no more than two over the idlest. Trusting the polls would send a whole interval's arrivals
    to one backend."""
    fleet = Fleet(*[backend(name, max_in_flight=200, kv_tokens=10**7) for name in "abcd"])
    rng, facts, now, polled_at = Random(7), ask(), 0.0, 0.0
    ends: list[tuple[float, str]] = []
    spreads = []
    for _ in range(1500):
        step = rng.expovariate(20 / 3)
        now += step
        while ends and ends[0][0] <= now:
            fleet.finish(heapq.heappop(ends)[1], facts)
        fleet.age(step)
        if now - polled_at >= interval:
            fleet.poll()
            polled_at = now
        heapq.heappush(ends, (now + rng.expovariate(1 / 3), fleet.send(facts)))
        in_flight = [view.in_flight for view in fleet.views.values()]
        spreads.append(max(in_flight) - min(in_flight))
    assert sum(spreads) / len(spreads) < 2


def test_sessions_stick_through_a_quiet_day_and_share_a_busy_one() -> None:
    """60 sessions of 10 turns. One turn at a time: each session has one backend. All at once: load wins."""
    quiet = Fleet(*[backend(name, max_in_flight=20, kv_tokens=10**6) for name in "abc"])
    homes: dict[int, set[str]] = {}
    for turn in range(600):
        facts = ask(session=f"agent-{turn % 60}")
        name = quiet.send(facts)
        homes.setdefault(turn % 60, set()).add(name)
        quiet.finish(name, facts)
    assert all(len(names) == 1 for names in homes.values())
    busy = Fleet(*[backend(name, max_in_flight=20, kv_tokens=10**6) for name in "abc"])
    went = Counter(busy.send(ask(session=f"agent-{i}")) for i in range(54))
    assert max(went.values()) - min(went.values()) <= 5, went


def test_one_hot_session_overflows_to_the_others_instead_of_queueing() -> None:
    fleet = Fleet(*[backend(name, max_in_flight=20, kv_tokens=10**6) for name in "abc"])
    went = Counter(fleet.send(ask(session="hot")) for _ in range(45))
    own = home("hot", list("abc"))
    assert went[own] == max(went.values())
    assert min(went.values()) >= 12, went


def test_fast_traffic_leaves_exact_its_place_as_long_as_others_are_less_loaded() -> None:
    fleet = Fleet(backend("bf16", reference=True), backend("fp8", kl_bits=0.01))
    went = Counter(fleet.send(ask(EXACT if i % 4 == 0 else FAST)) for i in range(40))
    assert went == {"bf16": 20, "fp8": 20}
