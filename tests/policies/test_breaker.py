"""The health of one backend, told as what happens to it: each letter is one thing.

p good probe   P bad probe   t good trial   T bad trial   s answered request   c connect failure   e failed answer
o failed answer of an outlier   u no progress   x a failure by the client's fault
E, O and U: the same, while no more backends may be out
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import BreakerParams, Failure, Health, HealthState, on_failure, on_probe, on_success
from policies.breaker import CERTAIN, COUNTED, Answers, is_outlier, may_spare, on_suspicion, on_trial

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
        case "e" | "E" | "o" | "O":
            spare, outlier = letter.islower(), letter in "oO"
            return on_failure(health, Failure.ERROR, now, params, outlier=outlier, spare=spare)
        case "u" | "U":
            return on_suspicion(health, now, params, spare=letter == "u")
        case "t" | "T":
            return on_trial(health, letter == "t", now, params)
        case _:
            return on_failure(health, Failure.REJECTED, now, params)


UP, OUT = HealthState.HEALTHY, HealthState.EJECTED
DOUBTED, BACK = HealthState.SUSPECT, HealthState.RETURNING


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
        ("ee", Health(UP, errors=2), "two failed answers are nothing yet"),
        ("eesee", Health(UP, errors=2), "an answer ends their row"),
        (
            "eepe",
            Health(DOUBTED, since=4, doubts=1),
            "a good probe does not: /health is well with a dead engine",
        ),
        ("eee", Health(DOUBTED, since=3, doubts=1), "three, and a trial is wanted"),
        ("eeet", Health(UP, since=4, doubts=1), "it was the requests"),
        ("eeeT", Health(OUT, since=4, doubts=1, until=9), "it was the backend"),
        ("eeets", Health(UP, since=4), "an answer ends all doubts"),
        (
            "eeeteee",
            Health(OUT, since=7, doubts=2, until=17, guessed=True),
            "a trial is believed once, not twice",
        ),
        ("eeetEEE", Health(DOUBTED, since=7, doubts=2), "but not when too many are out"),
        ("eees", Health(DOUBTED, since=3, doubts=1), "an answer that began before ends no suspicion"),
        ("eeep", Health(DOUBTED, since=3, doubts=1), "nor does a probe"),
        ("eeeccc", Health(OUT, since=6, doubts=1), "certain failures eject a suspect, too"),
        ("eeePPP", Health(OUT, since=6, doubts=1), "of both kinds"),
        ("eeeTpp", Health(OUT, since=4, doubts=1, until=9), "not before its time"),
        ("eeeTppppp", Health(OUT, since=4, doubts=1, until=9, successes=1), "from then on probes count"),
        ("eeeTpppppp", Health(BACK, since=10, doubts=1), "and a trial is wanted"),
        ("eeeTppppppt", Health(UP, since=11, doubts=1), "that is good"),
        ("eeeTppppppT", Health(OUT, since=11, doubts=2, until=21), "that is bad: out for twice as long"),
        ("eeeTppppppP", Health(OUT, since=11, doubts=1), "gone before it was asked"),
        ("eeeTppppppp", Health(BACK, since=10, doubts=1), "a probe is no trial"),
        ("eeeTppppppe", Health(BACK, since=10, doubts=1), "late failures of old requests say nothing"),
        (
            "eeeTppppppteee",
            Health(OUT, since=14, doubts=2, until=24, guessed=True),
            "back, failing again: out at once",
        ),
        ("cccpp", Health(UP, since=5), "who only was not there needs no trial"),
        ("u", Health(DOUBTED, since=1, doubts=1), "no progress: a trial"),
        ("ut", Health(UP, since=2, doubts=1), "which was good"),
        ("utu", Health(DOUBTED, since=3, doubts=1), "no progress again: another trial"),
        ("uT", Health(OUT, since=2, doubts=1, until=7), "a bad one is believed at once"),
        (
            "uteee",
            Health(OUT, since=5, doubts=2, until=15, guessed=True),
            "failed answers after it need no further one",
        ),
        ("uu", Health(DOUBTED, since=1, doubts=1), "one suspicion is one"),
        ("cccu", Health(OUT, since=3), "out is out"),
        ("o", Health(OUT, since=1, doubts=1, until=6, guessed=True), "an outlier is out"),
        ("oP", Health(OUT, since=1, doubts=1, until=6), "a failed probe makes a guess certain"),
        (
            "op",
            Health(OUT, since=1, doubts=1, until=6, guessed=True),
            "a good one does not end it before its time",
        ),
        ("O", Health(UP, errors=1), "but for the share"),
        ("OOO", Health(DOUBTED, since=3, doubts=1), "then it is like any other"),
        (
            "eeeo",
            Health(OUT, since=4, doubts=1, until=9, guessed=True),
            "a suspect that is an outlier needs no trial",
        ),
        ("t", Health(UP), "a trial that nobody wanted says nothing"),
        ("T", Health(UP), "neither way"),
        ("cccT", Health(OUT, since=3), "nor of one that is out"),
    ],
)
def test_story(story: str, end: Health, why: str) -> None:
    assert after(story) == end, why


def test_thresholds_of_one_react_at_once() -> None:
    quick = BreakerParams(failures_to_eject=1, successes_to_return=1)
    assert after("c", quick) == Health(OUT, since=1)
    assert after("cp", quick) == Health(UP, since=2)


def test_without_trials_a_row_ejects_and_probes_bring_back() -> None:
    blind = BreakerParams(trials=False)
    assert after("eee", blind) == Health(OUT, since=3, doubts=1, until=8, guessed=True)
    assert after("eeepppppp", blind) == Health(UP, since=9, doubts=1)
    assert after("u", blind) == Health(OUT, since=1, doubts=1, until=6, guessed=True)
    assert after("U", blind) == Health(DOUBTED, since=1, doubts=1)
    assert after("EEE", blind) == Health(DOUBTED, since=3, doubts=1)
    assert after("EEEpp", blind) == Health(UP, since=5, doubts=1)


def test_each_time_that_it_comes_back_and_fails_it_is_out_for_longer() -> None:
    params = BreakerParams(failures_to_eject=1, successes_to_return=1, eject_seconds=5, most_eject_seconds=60)
    health, now, lasted = after("eT", params), 2.0, []
    for _ in range(7):
        lasted.append(health.until - now)
        now = health.until
        health = on_probe(health, True, now, params)
        health = on_trial(health, True, now, params)
        assert health.healthy
        health = on_failure(health, Failure.ERROR, now, params)
    assert lasted == [5, 10, 20, 40, 60, 60, 60]


@pytest.mark.parametrize("failure", list(Failure))
def test_what_the_client_caused_never_counts(failure: Failure) -> None:
    health = on_failure(Health(), failure, 1.0, PARAMS)
    assert (health != Health()) == (failure in COUNTED)
    assert (health.failures, health.errors) == (failure in CERTAIN, failure in COUNTED - CERTAIN)


BY_THE_BACKEND = {Failure.CONNECT, Failure.ERROR, Failure.TIMEOUT, Failure.CUT, Failure.MALFORMED}


def test_5xx_and_time_outs_count_4xx_and_a_busy_backend_do_not() -> None:
    assert COUNTED == BY_THE_BACKEND


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"failures_to_eject": 0}, "failures_to_eject must be 1 or more"),
        ({"successes_to_return": 0}, "successes_to_return must be 1 or more"),
        ({"outlier_answers": 0}, "outlier_answers must be 1 or more"),
        ({"eject_seconds": -1}, "eject_seconds must be 0 or more"),
        ({"ejected_share": 1.1}, "ejected_share must be between 0 and 1"),
        ({"most_eject_seconds": float("nan")}, "most_eject_seconds must be 0 or more"),
        ({"outlier_margin": -0.1}, "outlier_margin must be between 0 and 1"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BreakerParams(**wrong)


@pytest.mark.parametrize(
    ("out", "pool", "share", "may"),
    [(0, 1, 0.5, False), (0, 2, 0.5, True), (1, 2, 0.5, False), (0, 3, 0.5, True), (1, 3, 0.5, False)]
    + [(1, 4, 0.5, True), (0, 8, 0.1, False), (0, 1, 1.0, True), (0, 8, 0.0, False)],
)
def test_the_share_that_may_be_out(out: int, pool: int, share: float, may: bool) -> None:
    assert may_spare(out, pool, BreakerParams(ejected_share=share)) is may


def answers(total: int, failed: int, at: float = 0.0) -> Answers:
    found = Answers()
    for number in range(total):
        found.add(at, ok=number >= failed)
    return found


@pytest.mark.parametrize(
    ("own", "peers", "outlier", "why"),
    [
        ((20, 10), [(20, 0)], True, "half of its answers fail, none of the others'"),
        ((20, 10), [(20, 10)], False, "they fail everywhere: it is the requests"),
        ((20, 10), [(20, 5)], False, "not by far"),
        ((20, 10), [(20, 0), (20, 10)], False, "of several peers, all their answers"),
        ((9, 9), [(20, 0)], False, "too few to say"),
        ((20, 20), [(9, 0)], False, "too few to compare"),
        ((20, 20), [], False, "nobody to compare with"),
        ((20, 5), [(100, 1)], False, "a quarter is not yet the margin"),
    ],
)
def test_an_outlier_fails_far_more_often_than_its_peers(
    own: tuple[int, int], peers: list[tuple[int, int]], outlier: bool, why: str
) -> None:
    others = [answers(*peer) for peer in peers]
    assert is_outlier(0.0, answers(*own), others, BreakerParams()) is outlier, why


def test_what_was_long_ago_makes_no_outlier() -> None:
    assert not is_outlier(300.0, answers(100, 100), [answers(100, 0, at=300.0)], BreakerParams())


LETTERS = "pPscxeEoOuUtT"


@settings(max_examples=400, derandomize=True, deadline=None)
@given(
    st.text(LETTERS, max_size=30),
    st.sampled_from(LETTERS),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_the_state_changes_only_by_its_rule_and_says_since_when(
    story: str, letter: str, failures: int, successes: int, trials: bool
) -> None:
    params = BreakerParams(failures, successes, trials=trials)
    before = after(story, params)
    now = len(story) + 1.0
    changed = step(before, letter, now, params)
    if changed.state is before.state:
        assert changed.since == before.since
    else:
        assert changed.since == now
        assert (before.state, changed.state) in {
            (UP, DOUBTED), (UP, OUT), (DOUBTED, UP), (DOUBTED, OUT), (OUT, UP), (OUT, BACK), (BACK, UP), (BACK, OUT)
        }  # fmt: skip
        if changed.state is OUT:
            assert letter in "PceoT" + "u" * (not trials)
        if before.state in (OUT, BACK) and changed.state is UP:
            assert letter in "pt"
    assert changed.failures < failures
    assert changed.successes < successes


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.text(LETTERS, max_size=30))
def test_enough_good_probes_and_a_good_trial_always_bring_a_backend_back(story: str) -> None:
    health = after(story)
    late = len(story) + PARAMS.most_eject_seconds
    for letter in "pptpp":
        health = step(health, letter, late, PARAMS)
    assert health.state is UP


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.text("psxEOUtT", max_size=30))
def test_beyond_the_share_only_what_is_certain_ejects(story: str) -> None:
    health = Health()
    for now, letter in enumerate(story, start=1):
        was, health = health, step(health, letter, float(now))
        if health.state is OUT and was.state is not OUT:
            assert letter == "T"
