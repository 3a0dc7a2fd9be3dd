"""What a simulated request costs. The goal is an hour of 100,000 requests in a minute: 600 µs each, policy included."""

from __future__ import annotations

from random import Random

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from policies import PolicyParams
from policies.simulation import SHAPES, Machine, Simulation, live

FLEET = (("fp8", "fp8-mtp3-tp2-v17"), ("bf16", "bf16-dflash8-tp2-v17"))


@pytest.mark.parametrize("times", [1, 3], ids=["1+1", "3+3"])
@pytest.mark.parametrize("name", ["chat", "agents"])
def test_simulate(benchmark: BenchmarkFixture, name: str, times: int) -> None:
    """Compare the time with the requests noted beside it."""
    machines = [Machine(f"{kind}-{i}", profile) for i in range(times) for kind, profile in FLEET]
    rate = {"chat": 10.0, "agents": 0.45}[name] * times
    traffic = SHAPES[name].traffic(rate, Random(1), seconds=60.0 if name == "chat" else 300.0)

    def run() -> int:
        return len(Simulation(machines, traffic, live(PolicyParams()), Random(2)).run())

    benchmark.extra_info["requests"] = benchmark(run)
    assert benchmark.extra_info["requests"] > 100
