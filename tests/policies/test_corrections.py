"""What answers teach about a backend's speed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.corrections import HIGHEST, LOWEST, Correction, Learned, context_range
from policies.predict import Guessed


def test_nothing_observed_corrects_nothing() -> None:
    assert Correction().factor == 1.0


def test_a_card_at_half_speed_is_noticed_within_ten_answers_and_forgiven_sooner() -> None:
    correction = Correction()
    for _ in range(10):
        correction.observe(1.0, 2.0, 0.2)
    assert 1.8 < correction.factor < 2.05
    for _ in range(6):
        correction.observe(1.0, 1.0, 0.2)
    assert correction.factor < 1.1


def test_one_wild_answer_moves_it_little() -> None:
    correction = Correction()
    correction.observe(1.0, 1000.0)
    assert correction.factor < 1.12
    correction = Correction()
    correction.observe(1000.0, 1.0)
    assert correction.factor > 0.8


def test_what_nobody_confirms_fades() -> None:
    correction = Correction()
    for _ in range(50):
        correction.observe(1.0, 4.0)
    high = correction.factor
    correction.fade(60.0)
    assert correction.factor == pytest.approx(high**0.5)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.floats(-1, 1e9), st.floats(-1, 1e9)), max_size=60))
def test_it_stays_within_its_bounds_whatever_is_observed(pairs: list[tuple[float, float]]) -> None:
    correction = Correction()
    for predicted, observed in pairs:
        correction.observe(predicted, observed, 1.0)
    assert LOWEST * 0.999 <= correction.factor <= HIGHEST * 1.001


def test_a_backend_without_profile_learns_its_prefill_rate() -> None:
    learned = Learned()
    for _ in range(60):
        learned.saw_prefill(8000, 1.1)  # 8000 tokens a second beside its 0.1 s
    assert learned.cold(16_000, 0) == pytest.approx(2.0, rel=0.05)
    for _ in range(60):
        learned.saw_prefill(20, 30.0)  # says nothing of the rate
    assert learned.cold(16_000, 0) == pytest.approx(2.0, rel=0.05)


def test_it_learns_its_decode_surface_where_it_saw_it_and_scales_the_rest_alike() -> None:
    learned, guess = Learned(), Guessed()
    assert learned.tpot(4, 1000) == guess.tpot(4, 1000)
    for _ in range(60):
        learned.saw_decode(4, 1000, guess.tpot(4, 1000) / 2)
        learned.saw_decode(32, 1000, guess.tpot(32, 1000) * 3)
    assert learned.tpot(4, 1000) == pytest.approx(guess.tpot(4, 1000) / 2, rel=0.05)
    assert learned.tpot(32, 1000) == pytest.approx(guess.tpot(32, 1000) * 3, rel=0.05)
    assert learned.tpot(64, 1000) == pytest.approx(guess.tpot(64, 1000) * 3, rel=0.05)


def test_context_ranges_are_those_of_the_study() -> None:
    assert [context_range(x) for x in (0, 8192, 8193, 32_768, 65_536, 65_537)] == [0, 0, 1, 1, 2, 3]
