"""What a choice costs. The goal is 15 µs among 3 backends: it is paid by every request, on the loop."""

from __future__ import annotations

from random import Random

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from policies import BackendView
from tests.policies.build import BALANCED, ROUTER, ask


@pytest.mark.parametrize("session", [None, "agent-17"], ids=["no_session", "session"])
@pytest.mark.parametrize("backends", [3, 64])
def test_choose(benchmark: BenchmarkFixture, backends: int, session: str | None) -> None:
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
        )
        for i in range(backends)
    ]
    facts, rng = ask(BALANCED, session=session), Random(1)
    assert benchmark(lambda: ROUTER.choose(facts, views, rng)).backend is not None
