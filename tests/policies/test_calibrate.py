"""What is learned of a model's tokens, on counts from a real vocabulary (token_counts.json, made by token_counts.py)."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.calibrate import DEFAULT, FEW, UNKNOWN_ERROR, Calibration, ContentKind, Mix, kind_of

Row = tuple[Mix, int]
ROWS: dict[str, list[Row]] = {}
for _kind, _counts, _tokens in json.loads(Path(__file__).with_name("token_counts.json").read_text("utf-8")):
    ROWS.setdefault(_kind, []).append((Mix(*_counts), _tokens))


def error(calibration: Calibration, rows: list[Row]) -> float:
    errors = []
    for mix, tokens in rows:
        expected = calibration.predict(mix)[0]
        assert expected is not None
        errors.append(abs(expected / tokens - 1))
    return median(errors)


def taught(rows: list[Row]) -> Calibration:
    calibration = Calibration()
    for mix, tokens in rows:
        calibration.learn(mix, tokens)
    return calibration


@pytest.mark.parametrize("kind", ROWS)
def test_after_two_hundred_requests_of_a_kind_the_median_error_is_below_five_percent(kind: str) -> None:
    rows = ROWS[kind].copy()
    Random(1).shuffle(rows)
    calibration = taught(rows[:200])
    assert error(calibration, rows[200:]) <= 0.05
    assert error(calibration, rows[200:]) < 0.6 * median(abs(plain(mix) / t - 1) for mix, t in rows[200:])


def plain(mix: Mix) -> float:
    """The estimate without calibration: bytes through one ratio."""
    return (mix.letters + mix.digits + mix.spaces + mix.lines + mix.wide + mix.marks + mix.tools) / 3.6


def test_after_two_hundred_requests_of_all_kinds_each_is_below_five_percent() -> None:
    rng = Random(1)
    mixed = [row for rows in ROWS.values() for row in rows[:50]]
    rng.shuffle(mixed)
    calibration = taught(mixed)
    assert len(mixed) == 200
    for kind, rows in ROWS.items():
        assert error(calibration, rows[50:]) <= (0.055 if kind == "code" else 0.05), kind


@pytest.mark.parametrize("kind", ROWS)
def test_the_stated_error_is_the_one_that_is_made(kind: str) -> None:
    rows = ROWS[kind].copy()
    Random(2).shuffle(rows)
    calibration = taught(rows[:200])
    stated = [calibration.predict(mix)[1:] for mix, _ in rows[200:]]
    made = error(calibration, rows[200:])
    assert made / 2 < median(typical for typical, _ in stated) < made * 2
    assert all(spread >= typical for typical, spread in stated)


def test_another_tokenizer_is_learned_too() -> None:
    """One that gives every byte a token: four times as many."""
    calibration = Calibration()
    rows = [(mix, round(sum(mix[:6]))) for mix, _ in ROWS["text"]]
    for mix, tokens in rows[:100]:
        calibration.learn(mix, tokens)
    assert error(calibration, rows[100:]) <= 0.03


def test_a_change_of_model_behind_a_name_is_followed() -> None:
    calibration = taught(ROWS["text"][:200])
    doubled = [(mix, 2 * tokens) for mix, tokens in ROWS["text"]]
    for _ in range(6):
        for mix, tokens in doubled[:200]:
            calibration.learn(mix, tokens)
    assert error(calibration, doubled[200:]) <= 0.08


def test_nothing_is_said_before_a_few_reports() -> None:
    rows = ROWS["text"]
    calibration = taught(rows[: FEW - 1])
    assert calibration.predict(rows[9][0]) == (None, UNKNOWN_ERROR, UNKNOWN_ERROR)
    assert calibration.errors() == {}
    calibration.learn(*rows[FEW])
    expected, _, _ = calibration.predict(rows[9][0])
    assert expected is not None
    assert abs(expected / rows[9][1] - 1) < 0.25


def test_a_kind_never_seen_is_estimated_from_the_others() -> None:
    calibration = taught(ROWS["text"][:100])
    assert error(calibration, ROWS["code"]) < 0.2


def test_reports_that_are_far_off_do_little() -> None:
    """A template that drops thinking, a prompt that the server cut: one in ten is off by a factor."""
    rng = Random(3)
    calibration = Calibration()
    for n, (mix, tokens) in enumerate(ROWS["code"][:200]):
        calibration.learn(mix, max(1, int(tokens * rng.uniform(0.1, 0.5))) if n % 10 == 9 else tokens)
    assert error(calibration, ROWS["code"][200:]) <= 0.07


def test_kinds_are_told_apart_well_enough_to_matter() -> None:
    shares = {kind: sum(kind_of(mix) == kind for mix, _ in rows) / len(rows) for kind, rows in ROWS.items()}
    assert shares["wide"] > 0.9
    assert shares["code"] > 0.75
    assert shares["text"] > 0.5
    assert {kind_of(Mix(letters=80, spaces=18, marks=2)), kind_of(Mix())} == {ContentKind.TEXT}
    assert kind_of(Mix(escapes=10, digits=20, letters=20)) is ContentKind.WIDE


COUNTS = st.floats(0, 1e7, allow_nan=False)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.tuples(*[COUNTS] * len(DEFAULT)), st.integers(1, 10**7)), max_size=40))
def test_whatever_is_reported_the_answer_is_a_number(reports: list[tuple[tuple[float, ...], int]]) -> None:
    calibration = Calibration()
    for counts, tokens in reports:
        calibration.learn(Mix(*counts), tokens)
        expected, typical, spread = calibration.predict(Mix(*counts))
        assert expected is None or 1.0 <= expected < 1e12
        assert 0 <= typical < 1e12
        assert 0 <= spread < 1e12
