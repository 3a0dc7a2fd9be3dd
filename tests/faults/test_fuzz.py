"""A bounded number of cases for everything that reads bytes; `python -m tests.faults.fuzz` goes on for as long as told."""

from __future__ import annotations

import pytest

from tests.faults.fuzz import TARGETS, play

CASES = 300
MORE = 6000


@pytest.mark.parametrize("target", TARGETS)
def test_bytes_that_nobody_wrote_are_read_or_refused(target: str) -> None:
    for seed in range(CASES):
        play(target, seed)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_many_more_of_them(target: str) -> None:
    for seed in range(CASES, MORE):
        play(target, seed)
