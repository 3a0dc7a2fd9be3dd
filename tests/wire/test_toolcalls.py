"""Every tool-call case in every chunking: one result, whatever the cuts, streamed or not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tally import RESULTS
from tests.wire.cases import (
    CASES,
    DEBATABLE,
    HANDED,
    SETTLED,
    Case,
    as_message,
    as_stream,
    every_character,
    has_message,
    problems,
    recut,
    run_stream,
    run_whole,
)


def name(case: Case) -> str:
    return str(case["id"])


def cut_randomly(seed: int) -> list[str]:
    rng = random.Random(seed)

    def cut(text: str) -> list[str]:
        pieces, at = [], 0
        while at < len(text):
            size = rng.choice((1, 1, 2, 3, 4, 7, 12, 30))
            pieces.append(text[at : at + size])
            at += size
        return pieces

    return cut


def every_way(case: Case):
    """The case's result in each chunking, by the chunking's name."""
    yield "as given", run_stream(case, as_stream(case))
    yield "every character", run_stream(case, recut(case, every_character))
    yield "joined", run_stream(case, recut(case, lambda text: [text]))
    if has_message(case):
        yield "whole", run_whole(case, as_message(case))


def test_the_handed_cases_are_all_here():
    assert (len(HANDED), len([c for c in HANDED if not c.get("debatable")])) == (127, 117)


@pytest.mark.parametrize("case", SETTLED, ids=name)
def test_a_settled_case_gives_the_right_answer_in_every_chunking(case):
    wrong = {way: found for way, result in every_way(case) if (found := problems(case, result))}
    RESULTS[case["kind"], "wrong" if wrong else "right"] += 1
    assert not wrong


@pytest.mark.parametrize("case", DEBATABLE, ids=name)
def test_a_debatable_case_gives_one_answer_in_every_chunking(case):
    wrong = {way: found for way, result in every_way(case) if (found := problems(case, result))}
    RESULTS[case["kind"], "debatable, otherwise" if wrong else "debatable, as expected"] += 1


@settings(max_examples=4, derandomize=True, deadline=None)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("case", SETTLED, ids=name)
def test_random_cuts_change_nothing(case, seed):
    assert problems(case, run_stream(case, recut(case, cut_randomly(seed)))) == []


@pytest.mark.parametrize("case", [c for c in CASES if "emit_by" in c], ids=name)
def test_what_must_be_out_by_a_chunk_is_out(case):
    by = case["emit_by"]
    content, arguments = run_stream(case, as_stream(case)).timeline[by["chunk"]]
    assert by.get("content", "") in content
    assert by.get("arguments", "") in arguments
