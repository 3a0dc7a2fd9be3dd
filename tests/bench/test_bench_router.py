"""What a choice costs. The goal is 15 µs among 3 backends and 120 µs among 64, over a ready snapshot: it is paid by every
request, on the loop. And what the snapshot costs, and one whole life of a request in the fleet."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from policies import Admission, BackendView, Fleet, Forecast, PolicyParams, Result, Router
from tests.policies.build import BALANCED, ROUTER, ask
from tests.policies.test_fleet import exact, fast, turn


@pytest.mark.parametrize("policy", ["predicted", "least_load", "session_hash"])
@pytest.mark.parametrize("backends", [3, 64])
def test_choose(benchmark: BenchmarkFixture, backends: int, policy: str) -> None:
    views = [
        BackendView(
            f"b{i}",
            reference=i % 2 == 0,
            kl_bits=0.01,
            window_tokens=131_072,
            in_flight=i % 30,
            in_flight_tokens=i * 1000,
            running=i % 30 + 1,
            waiting=0,
            kv_usage=0.3,
            polled_age=0.5,
            cached_tokens=500.0,
            forecast=Forecast(i * 0.01, 0.2, 0.01, 3.0, 0.1),
        )
        for i in range(backends)
    ]
    facts, rng, router = ask(BALANCED, session="agent-17"), Random(1), Router(ROUTER.params, policy)
    assert benchmark(lambda: router.choose(facts, views, rng)).backend is not None


@pytest.mark.parametrize("backends", [3, 64])
def test_snapshot(benchmark: BenchmarkFixture, backends: int) -> None:
    """Forecasts and cached tokens of one request with a chain of 80 links."""
    fleet = Fleet([fast(f"b{i}") for i in range(backends)], PolicyParams())
    for i in range(backends * 8):
        fleet.begin(0.0, i, f"b{i % backends}", turn(f"c{i}", 30_000))
        fleet.first_token(3.0, i)
    facts, names = turn("c3", 62_000), fleet.names()
    assert len(benchmark(lambda: fleet.views(10.0, facts, names))) == backends


def test_life_of_a_request(benchmark: BenchmarkFixture) -> None:
    """Offer, first token, end, and what follows each, with 20 others running."""
    params = PolicyParams()
    fleet = Fleet([fast(), exact()], params)
    admission = Admission(fleet, Router(params.router), params, Random(1))
    for i in range(20):
        fleet.begin(0.0, i, "fp8", ask(BALANCED))
        fleet.first_token(1.0, i)
    facts = replace(turn("c", 4000), tier=BALANCED)
    clock = [10.0]

    def live() -> None:
        clock[0] += 1.0
        now = clock[0]
        admission.offer(now, 100, facts, ("fp8", "bf16"))
        admission.advance(now)
        fleet.first_token(now + 0.2, 100)
        admission.advance(now + 0.2)
        fleet.finish(now + 0.9, 100, Result(True, 4000, 100, 3000))
        admission.advance(now + 0.9)

    benchmark(live)
    assert len(fleet.states["fp8"].running) + len(fleet.states["bf16"].running) == 20
