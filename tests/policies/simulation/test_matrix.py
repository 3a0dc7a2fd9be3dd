"""What holds under every traffic, load and fault: tiers are kept, nobody starves, everything ends."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from policies import PolicyParams
from policies.simulation import SHAPES, Contest, End, Fault, FaultKind, Machine, Served, judge, live, score

pytestmark = pytest.mark.slow

PROFILES = {"fp8": "fp8-mtp3-tp2-v17", "bf16": "bf16-dflash8-tp2-v17"}
CAPACITY = {"chat": 12.5, "agents": 0.45, "documents": 0.06, "burst": 12.5, "mixed": 3.0}
"""Of one FP8 and one BF16 backend, requests a second, about: docs/routing.md has them exactly."""
SECONDS = {"chat": 120.0, "agents": 900.0, "documents": 3000.0, "burst": 120.0, "mixed": 600.0}
FAULTS = {
    None: None,
    **{kind.value: Fault(kind, "bf16-0", 0.0, 30.0, factor=0.02) for kind in FaultKind},
}


def simulate(name: str, times: int, load: float, fault: str | None) -> tuple[Contest, list[Served]]:
    machines = tuple(Machine(f"{kind}-{i}", PROFILES[kind]) for i in range(times) for kind in PROFILES)
    shape = replace(SHAPES[name], warm_up=60.0)
    seconds = SECONDS[name] / times
    contest = Contest(machines, shape, seed=7, seconds=seconds)
    traffic = contest.traffic(CAPACITY[name] * times * load)
    placed = FAULTS[fault]
    if placed is not None:
        placed = replace(placed, at=60.0 + seconds / 2)
    return contest, contest.simulate(live(PolicyParams()), traffic, placed)


@pytest.mark.parametrize(
    ("load", "fault"), [(0.5, None), (1.0, None), (2.5, None), *((1.0, kind.value) for kind in FaultKind)]
)
@pytest.mark.parametrize("times", [1, 3], ids=["1+1", "3+3"])
@pytest.mark.parametrize("name", SHAPES)
def test_tiers_are_kept_nobody_starves_and_everything_ends(
    name: str, times: int, load: float, fault: str | None
) -> None:
    contest, served = simulate(name, times, load, fault)
    result = score(served, contest.machines, judge(contest.machines))
    assert result.violations == 0
    assert [one for one in served if one.end is End.OPEN] == []
    assert result.gave_up == 0
    assert result.longest < 240
    if fault != FaultKind.DOWN:
        assert result.failed == 0
    last = {one.order: one for one in served}
    for one in last.values():
        whole = one.place + 1 == len(one.conversation.turns)
        assert whole or one.end is not End.ANSWERED
    answered: dict[tuple[str, str | None], list[bool]] = defaultdict(list)
    for one in served:
        answered[one.conversation.tier.name, one.conversation.tenant].append(one.end is End.ANSWERED)
    # Shed turns come again, so even far past capacity every tier and tenant gets answers.
    assert all(sum(group) > len(group) / 4 for group in answered.values() if len(group) > 20)
