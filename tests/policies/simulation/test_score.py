"""SLO, goodput, quantiles and capacity, on figures that can be checked by hand."""

from __future__ import annotations

from math import isnan

import pytest

from policies import profile
from policies.simulation import Conversation, End, Machine, Served, Turn, judge, score, timeline
from policies.simulation.capacity import capacity
from policies.simulation.score import quantile
from policies.simulation.values import BALANCED, EXACT

FP8, BF16 = Machine("fp8", "fp8-mtp3-tp2-v17"), Machine("bf16", "bf16-dflash8-tp2-v17")
COLD = {machine: profile.get(machine.profile).cold_ttft(32_298) for machine in (FP8, BF16)}


def served(
    ttft: float = 1.0,
    tpot: float = 0.02,
    *,
    end: End = End.ANSWERED,
    arrived: float = 10.0,
    new: int = 100,
    output: int = 101,
    machine: str = "fp8",
    exact: bool = False,
    shed: int = 0,
    turns: int = 1,
) -> Served:
    turn = Turn(40_000, output, new, 0.0, (), 4096)
    one = Served(Conversation(arrived, (turn,) * turns, EXACT if exact else BALANCED), 0, 0, arrived)
    one.shed, one.end, one.machine, one.sent, one.attempts = shed, end, machine, arrived, 1 + shed
    one.missed_turns = turns - 1
    if end is End.ANSWERED:
        one.first, one.cached = arrived + ttft, 20_000
        one.ended = one.first + tpot * (output - 1)
    else:
        one.ended = arrived + ttft
    return one


MET = judge((FP8, BF16))


@pytest.mark.parametrize(
    ("one", "met"),
    [
        (served(), True),
        (served(ttft=2.0), True),
        (served(ttft=2.2, new=100), False),
        (served(ttft=2 + 1.5 * COLD[FP8] - 0.01, new=32_298), True),
        (served(ttft=2 + 1.5 * COLD[FP8] + 0.01, new=32_298), False),
        (served(ttft=2 + 1.5 * COLD[BF16] - 0.01, new=32_298, exact=True), True),
        (served(tpot=0.0499), True),
        (served(tpot=0.0501), False),
        (served(output=1), True),
        (served(shed=1), True),
        (served(end=End.SHED), False),
        (served(end=End.FAILED), False),
        (served(end=End.GAVE_UP), False),
    ],
)
def test_a_request_meets_the_slo_by_its_first_token_its_pace_and_a_whole_answer(
    one: Served, met: bool
) -> None:
    """TTFT ≤ 2 s + 1.5 × cold prefill of new tokens on the fastest backend of its tier, TPOT ≤ 50 ms."""
    assert MET(one) is met


def test_goodput_is_met_of_offered_and_what_never_came_was_offered() -> None:
    result = score(
        [served(), served(ttft=30), served(end=End.SHED, turns=4), served(end=End.GAVE_UP)], (FP8, BF16), MET
    )
    assert (result.met, result.offered, result.lost, result.shed, result.gave_up) == (1, 7, 3, 1, 1)
    assert result.goodput == 1 / 7


def test_a_shed_attempt_was_offered_and_missed_and_the_next_counts_by_itself() -> None:
    again = served(shed=1, ttft=1.0)
    again.arrived = again.asked - 5.0
    result = score([again, served()], (FP8, BF16), MET)
    assert (result.met, result.offered, result.shed, result.shed_once) == (2, 3, 0, 1)
    assert result.ttft95 == pytest.approx(1.0)
    assert result.longest == pytest.approx(6.0)


def test_only_turns_that_arrived_in_the_counted_time_count() -> None:
    ones = [served(arrived=at) for at in (9.9, 10.0, 19.9, 20.0)]
    result = score(ones, (FP8,), MET, 10.0, 20.0)
    assert (result.offered, result.met, result.seconds) == (2, 2, 10.0)


def test_met_per_second_counts_over_the_whole_counted_time() -> None:
    ones = [served(arrived=at) for at in range(10, 30)]
    assert score(ones, (FP8,), MET, 10.0, 30.0).met_per_second == pytest.approx(20 / 20)
    assert score(ones[:1], (FP8,), MET, 10.0, 30.0).met_per_second == pytest.approx(1 / 20)


def test_tier_violations_are_seen() -> None:
    ones = [served(machine="fp8", exact=True), served(machine="bf16", exact=True), served(machine="fp8")]
    assert score(ones, (FP8, BF16), MET).violations == 1


@pytest.mark.parametrize(("q", "value"), [(0.0, 1), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)])
def test_a_quantile_is_a_value_that_so_many_do_not_exceed(q: float, value: float) -> None:
    assert quantile([1, 2, 3, 4], q) == value


def test_of_nothing_there_is_no_figure() -> None:
    result = score([], (FP8,), MET)
    assert isnan(result.ttft95)
    assert isnan(result.goodput)
    assert isnan(result.cached)


def test_the_timeline_counts_by_arrival() -> None:
    ones = [served(arrived=1.0), served(arrived=4.9, ttft=9.0), served(arrived=12.0)]
    assert [(at, n, met) for at, n, met, _ in timeline(ones, MET, 5.0, 15.0)] == [
        (0.0, 2, 1), (5.0, 0, 0), (10.0, 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("guess", [0.3, 1.0, 3.0, 9.9, 30.0])
@pytest.mark.parametrize("edge", [2.0, 3.3])
def test_capacity_is_the_highest_rate_that_meets_the_goal(guess: float, edge: float) -> None:
    asked: list[float] = []

    def goodput(rate: float) -> float:
        asked.append(rate)
        return 1.0 if rate <= edge else 0.5

    found = capacity(goodput, guess)
    assert edge / 1.021 < found <= edge
    assert found in asked
    assert len(asked) <= 18


def test_a_fleet_that_never_meets_the_goal_or_always_does_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rate"):
        capacity(lambda rate: 0.9, 1.0)
    with pytest.raises(ValueError, match="every rate"):
        capacity(lambda rate: 1.0, 1.0)
