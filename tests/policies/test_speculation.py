"""A collapse is noticed in its context range, drained, looked at again, and forgiven."""

from __future__ import annotations

from policies.params import SpeculationParams
from policies.speculation import Speculation

PARAMS = SpeculationParams()
SHORT, LONG = 4000.0, 50_000.0


class Engine:
    """Counters that go up by 1000 drafted tokens a poll."""

    def __init__(self) -> None:
        self.spec = Speculation(PARAMS)
        self.drafted = self.accepted = 0
        self.spec.polled(0.0, 0, 0, [], 0.3)

    def poll(self, now: float, acceptance: float, *contexts: float, usual: float = 0.3) -> None:
        self.drafted += 1000
        self.accepted += round(1000 * acceptance)
        self.spec.polled(now, self.drafted, self.accepted, contexts, usual)


def test_thirty_percent_falling_to_two_drains_the_range_its_streams_were_in() -> None:
    engine = Engine()
    engine.poll(2.0, 0.3, LONG, LONG, LONG)
    assert not engine.spec.drained()
    engine.poll(4.0, 0.02, LONG, LONG, SHORT)
    assert engine.spec.collapsed(4.0, LONG)
    assert not engine.spec.collapsed(4.0, SHORT)
    assert engine.spec.drained() == 1


def test_an_ordinary_dip_is_no_collapse() -> None:
    engine = Engine()
    for now in range(1, 20):
        engine.poll(now * 2.0, 0.15, SHORT)
    assert not engine.spec.drained()


def test_without_a_profile_the_best_that_was_seen_is_the_measure() -> None:
    engine = Engine()
    engine.poll(2.0, 0.4, SHORT, usual=0.0)
    engine.poll(4.0, 0.05, SHORT, usual=0.0)
    assert engine.spec.collapsed(4.0, SHORT)


def test_a_drained_range_gets_a_look_now_and_then_each_later_than_the_one_before() -> None:
    engine = Engine()
    engine.poll(2.0, 0.0, SHORT)
    spec, looks, now = engine.spec, [], 2.0
    while now < 200.0:
        if not spec.collapsed(now, SHORT):
            looks.append(now)
            spec.begins(now, SHORT)
            assert spec.collapsed(now, SHORT), "one at a time"
            engine.poll(now + 1.0, 0.0, SHORT)
        now += 0.5
    gaps = [b - a for a, b in zip([2.0, *looks], looks, strict=False)]
    assert gaps == sorted(gaps)
    assert gaps[0] == PARAMS.look_seconds
    assert gaps[-1] >= 60.0
    assert spec.drained() == 1


def test_a_good_look_ends_it() -> None:
    engine = Engine()
    engine.poll(2.0, 0.0, SHORT)
    engine.poll(9.0, 0.3, SHORT)
    assert not engine.spec.drained()


def test_a_restart_forgives() -> None:
    engine = Engine()
    engine.poll(2.0, 0.0, SHORT)
    engine.spec.restarted()
    assert not engine.spec.drained()
    assert engine.spec.acceptance is None


def test_slow_answers_in_a_row_are_a_sign_only_where_no_acceptance_is_reported() -> None:
    """A card that is slow for another reason still has its usual acceptance: corrections deal with that."""
    silent = Speculation(PARAMS)
    silent.answered(1.0, LONG, 8.0)
    silent.answered(2.0, LONG, 1.0)
    silent.answered(3.0, LONG, 8.0)
    silent.answered(4.0, LONG, 8.0)
    assert not silent.drained()
    silent.answered(5.0, LONG, 8.0)
    assert silent.collapsed(5.0, LONG)
    engine = Engine()
    engine.poll(2.0, 0.3, LONG)
    for now in range(3, 20):
        engine.spec.answered(float(now), LONG, 8.0)
    assert not engine.spec.drained()


def test_too_few_drafts_are_waited_for() -> None:
    spec = Speculation(PARAMS)
    spec.polled(0.0, 0, 0, [], 0.3)
    spec.polled(2.0, PARAMS.least_drafts - 1, 0, [SHORT], 0.3)
    assert not spec.drained()
    spec.polled(4.0, PARAMS.least_drafts, 0, [SHORT], 0.3)
    assert spec.drained() == 1
