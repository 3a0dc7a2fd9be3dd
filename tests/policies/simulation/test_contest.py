"""Policies side by side: small simulations of the whole, with the invariants that every run keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies import RANKINGS, PolicyParams
from policies.simulation import (
    REFERENCE,
    SHAPES,
    Contest,
    End,
    Fault,
    FaultKind,
    Machine,
    Make,
    Outcome,
    live,
)
from policies.simulation.values import Client, Served

ONE_OF_EACH = (Machine("fp8", "fp8-mtp3-tp2-v17"), Machine("bf16", "bf16-dflash8-tp2-v17"))
RATES = {"chat": 6.0, "agents": 0.4, "documents": 0.06, "burst": 6.0, "mixed": 2.0}
SHORT = {name: replace(shape, warm_up=20.0) for name, shape in SHAPES.items()}


def contest(name: str, fault: Fault | None = None, seconds: float = 60.0) -> Contest:
    return Contest(ONE_OF_EACH, SHORT[name], seed=1, seconds=seconds, fault=fault)


def player(name: str) -> Make | None:
    return None if name == REFERENCE else live(PolicyParams(name=name))


def run(name: str, policy: str, times: float = 1.0, fault: Fault | None = None) -> Outcome:
    return contest(name, fault).run(policy, player(policy), RATES[name] * times)


@pytest.mark.parametrize("policy", [REFERENCE, "predicted", "least_in_flight"])
def test_the_same_seed_gives_the_same_outcome(policy: str) -> None:
    assert run("mixed", policy) == run("mixed", policy)


@pytest.mark.parametrize("policy", [REFERENCE, *RANKINGS])
def test_no_policy_serves_a_tier_with_less_and_every_turn_ends(policy: str) -> None:
    s = run("mixed", policy, 4.0).score
    assert s.violations == 0
    assert s.answered + s.shed + s.failed + s.gave_up + s.lost <= s.offered
    assert s.answered > 100
    assert 0 < s.met <= s.answered


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "mixed"])
def test_at_a_modest_load_the_slo_is_met(name: str) -> None:
    assert run(name, "predicted", 0.5).score.goodput > 0.9


def test_capacity_is_a_rate_that_the_reference_takes() -> None:
    small = Contest(ONE_OF_EACH, SHORT["agents"], seed=1, seconds=100.0)
    tried: list[float] = []
    found = small.capacity(lambda rate, score: tried.append(rate))
    assert small.run(REFERENCE, None, found).score.goodput >= 0.95
    assert found in tried
    assert max(tried) > found


@pytest.mark.parametrize("kind", FaultKind)
def test_a_fault_hurts_while_it_lasts_and_is_compared_with_a_calm_run(kind: FaultKind) -> None:
    quiet = contest("chat")
    stormy = replace(quiet, fault=Fault(kind, "bf16", 0.0, 20.0, factor=0.1))
    make = player("round_robin")
    calm, hurt = quiet.run("round_robin", make, 8.0), stormy.run("round_robin", make, 8.0)
    assert (hurt.score.goodput, -hurt.score.tpot95) < (calm.score.goodput, -calm.score.tpot95)
    assert calm.fault is None
    assert hurt.fault is not None
    assert hurt.fault.calm > 0.95
    assert stormy.run("round_robin", make, 8.0, calm=True) == calm


def test_a_fleet_that_lost_all_its_machines_loses_no_turn_of_its_books() -> None:
    whole = Contest(
        ONE_OF_EACH[:1], SHORT["chat"], seed=1, seconds=60.0, client=Client(retries=1, patience=20.0)
    )
    traffic = whole.traffic(4.0)
    served: list[Served] = whole.simulate(
        live(PolicyParams()), traffic, Fault(FaultKind.DOWN, "fp8", traffic.seconds - 30.0, 40.0)
    )
    assert all(one.end is not End.OPEN for one in served)
    assert any(one.end is End.FAILED or one.end is End.SHED for one in served)
    ended = {
        one.order
        for one in served
        if one.end is not End.ANSWERED or one.place + 1 == len(one.conversation.turns)
    }
    assert ended == set(range(len(traffic.conversations)))
