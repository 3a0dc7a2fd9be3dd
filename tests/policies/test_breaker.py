"""The health of one backend, told as what happens to it: each letter is one thing.

p good probe   P bad probe   s answered request   c connect failure   x any other failure of a request
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import BreakerParams, Failure, Health, HealthState, on_failure, on_probe, on_success
from policies.breaker import COUNTED

PARAMS = BreakerParams(failures_to_eject=3, successes_to_return=2)


def after(story: str, params: BreakerParams = PARAMS) -> Health:
    """One thing a second, the first at 1."""
    health = Health()
    for now, letter in enumerate(story, start=1):
        health = step(health, letter, float(now), params)
    return health


def step(health: Health, letter: str, now: float, params: BreakerParams = PARAMS) -> Health:
    match letter:
        case "p" | "P":
            return on_probe(health, letter == "p", now, params)
        case "s":
            return on_success(health)
        case "c":
            return on_failure(health, Failure.CONNECT, now, params)
        case _:
            return on_failure(health, Failure.REJECTED, now, params)


UP, OUT = HealthState.HEALTHY, HealthState.EJECTED


@pytest.mark.parametrize(
    ("story", "end", "why"),
    [
        ("", Health(UP), "a new backend gets requests"),
        ("cc", Health(UP, failures=2), "not yet"),
        ("ccc", Health(OUT, since=3), "three connects in a row"),
        ("PPP", Health(OUT, since=3), "three probes in a row"),
        ("cPc", Health(OUT, since=3), "of both kinds"),
        ("ccscc", Health(UP, failures=2), "an answer ends the row"),
        ("ccpcc", Health(UP, failures=2), "so does a good probe"),
        ("ccxc", Health(OUT, since=4), "a 4xx neither counts nor clears"),
        ("xxxxxxxx", Health(UP), "4xx alone never eject"),
        ("cccp", Health(OUT, since=3, successes=1), "one good probe is not enough"),
        ("cccpp", Health(UP, since=5), "two are"),
        ("cccpPp", Health(OUT, since=3, successes=1), "in a row"),
        ("cccpcp", Health(OUT, since=3, successes=1), "a late connect failure ends the row too"),
        ("cccPPP", Health(OUT, since=3), "out stays out, since when it went"),
        ("cccsss", Health(OUT, since=3), "late answers of old requests do not bring it back"),
        ("cccppcc", Health(UP, since=5, failures=2), "back with a clean sheet"),
        ("cccppccc", Health(OUT, since=8), "and out again"),
        ("ssp", Health(UP), "good news changes nothing"),
    ],
)
def test_story(story: str, end: Health, why: str) -> None:
    assert after(story) == end, why


def test_thresholds_of_one_react_at_once() -> None:
    quick = BreakerParams(failures_to_eject=1, successes_to_return=1)
    assert after("c", quick) == Health(OUT, since=1)
    assert after("cp", quick) == Health(UP, since=2)


@pytest.mark.parametrize("failure", list(Failure))
def test_only_a_connection_that_could_not_be_made_counts_against_a_backend(failure: Failure) -> None:
    health = on_failure(Health(), failure, 1.0, PARAMS)
    assert (health != Health()) == (failure in COUNTED) == (failure is Failure.CONNECT)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"failures_to_eject": 0}, "failures_to_eject must be 1 or more"),
        ({"successes_to_return": 0}, "successes_to_return must be 1 or more"),
    ],
)
def test_thresholds_below_one_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BreakerParams(**wrong)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.text("pPscx", max_size=30), st.sampled_from("pPscx"), st.integers(1, 4), st.integers(1, 3))
def test_the_state_changes_only_by_its_rule_and_says_since_when(
    story: str, letter: str, failures: int, successes: int
) -> None:
    params = BreakerParams(failures, successes)
    before = after(story, params)
    now = len(story) + 1.0
    changed = step(before, letter, now, params)
    if changed.state is before.state:
        assert changed.since == before.since
    elif before.healthy:
        assert letter in "Pc"
        assert changed == Health(OUT, since=now)
    else:
        assert letter == "p"
        assert changed == Health(UP, since=now)
    assert changed.failures < failures
    assert changed.successes < successes


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.text("pPscx", max_size=30))
def test_enough_good_probes_always_bring_a_backend_back(story: str) -> None:
    assert after(story + "pp").healthy
