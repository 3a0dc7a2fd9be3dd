"""Recorded rows become conversations: linked where one begins with another, played at any rate."""

from __future__ import annotations

from random import Random

import pytest

from policies.engine import BLOCK_TOKENS
from policies.simulation import Row, Traffic, trace
from policies.simulation.traces import HASHED_TOKENS, PAUSE, Trace, engine_blocks


def row(at: float, *hashes: int, output: int = 100, spare: int = 100) -> Row:
    """A prompt of that many hashed blocks, the last one not full."""
    return Row(at, HASHED_TOKENS * (len(hashes) - 1) + spare, output, hashes)


def play(recorded: Trace, rate: float | None = None, seed: int = 1) -> Traffic:
    return recorded.traffic(rate or recorded.rate, Random(seed))


def lengths(recorded: Trace) -> list[int]:
    return sorted(len(thread) for thread in recorded.threads)


def test_a_prompt_that_begins_with_a_whole_earlier_one_continues_it() -> None:
    recorded = trace("t", [row(0, 1, 2, 3), row(9, 1, 2, 4, 5)])
    assert lengths(recorded) == [2]


@pytest.mark.parametrize(
    "other",
    [
        row(9, 1, 7, 8, 9),  # only the first block is shared: a system prompt
        row(9, 1, 2),  # shorter
        Row(9, 1000, 50),  # says nothing of its blocks
    ],
    ids=["shared_beginning", "shorter", "no_hashes"],
)
def test_a_prompt_that_does_not_is_a_conversation_of_its_own(other: Row) -> None:
    assert lengths(trace("t", [row(0, 1, 2, 3), other])) == [1, 1]


def test_the_longest_continued_prompt_is_the_one_before() -> None:
    recorded = trace("t", [row(0, 1, 2, 3), row(5, 1, 2, 4, 5, 6), row(9, 1, 2, 4, 5, 7, 8)])
    assert lengths(recorded) == [3]


def test_new_tokens_are_those_after_what_was_shared() -> None:
    recorded = trace("t", [row(0, 1, 2, 3), row(9, 1, 2, 4, 5)])
    first, second = play(recorded).conversations[0].turns
    assert first.new == first.prompt
    assert second.new == second.prompt - 2 * HASHED_TOKENS


def test_a_turn_waits_for_the_one_before_and_for_its_recorded_time() -> None:
    recorded = trace("t", [row(3.5, 1, 2, 3), row(9.25, 1, 2, 4, 5)])
    first, second = play(recorded).conversations[0].turns
    assert (first.gap, first.at, second.gap, second.at) == (0.0, 3.5, PAUSE, 9.25)


def test_equal_prefixes_are_equal_blocks_of_the_engine_and_others_are_not() -> None:
    one, other = row(0, *range(20)), row(0, *range(10), *range(30, 40))
    a, b = engine_blocks(one), engine_blocks(other)
    assert len(a) == one.prompt // BLOCK_TOKENS
    same = 10 * HASHED_TOKENS // BLOCK_TOKENS
    assert a[:same] == b[:same]
    assert not set(a[same:]) & set(b)
    assert len(set(a)) == len(a)


def test_requests_without_hashes_share_nothing() -> None:
    traffic = play(trace("t", [Row(i, 5000, 50) for i in range(20)]))
    blocks = [block for c in traffic.conversations for block in c.turns[0].chain]
    assert len(set(blocks)) == len(blocks) == 20 * (5000 // BLOCK_TOKENS)


def test_a_lower_rate_keeps_whole_conversations_and_their_times() -> None:
    rows = [
        r
        for i in range(400)
        for r in (row(i, 9 * i, 9 * i + 1, 9 * i + 2), row(i + 50.25, 9 * i, 9 * i + 1, 9 * i + 3, 9 * i + 4))
    ]
    recorded = trace("t", rows)
    half, tenth = play(recorded, recorded.rate / 2), play(recorded, recorded.rate / 10)
    assert half.requests == pytest.approx(400, abs=60)
    assert {c.start for c in tenth.conversations} <= {c.start for c in half.conversations}
    assert all(c.turns[1].at - c.turns[0].at == 50.25 for c in half.conversations)


def test_a_higher_rate_divides_all_times() -> None:
    recorded = trace("t", [Row(i + 0.25, 500, 50) for i in range(100)])
    twice = play(recorded, recorded.rate * 2)
    assert twice.requests == 100
    assert [c.start for c in twice.conversations[:3]] == [0.125, 0.625, 1.125]


def test_times_that_were_rounded_are_spread_over_what_they_were_rounded_to() -> None:
    recorded = trace("t", [Row(3.0 * (i // 10), 500, 50) for i in range(200)])
    assert recorded.tick == 3.0
    starts = [c.start for c in play(recorded).conversations]
    assert len(set(starts)) == 200
    assert all(sum(3 * i <= at < 3 * i + 3 for at in starts) == 10 for i in range(20))
    assert trace("t", [Row(0.0, 9, 9), Row(1.001, 9, 9), Row(2.5, 9, 9)] * 2).tick == 0.0
    assert trace("t", [Row(3.0 * i, 9, 9) for i in range(9)]).tick == 0.0


def test_an_empty_trace_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        trace("t", [])
