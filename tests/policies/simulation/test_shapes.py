"""Drawn traffic is what it says: lengths that follow from one another, rates, shared beginnings."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from policies.engine import BLOCK_TOKENS
from policies.simulation import SHAPES, Traffic
from policies.simulation.shapes import AGENTS, WINDOW


def draw(name: str, rate: float = 4.0, seed: int = 1, seconds: float = 600.0) -> Traffic:
    return SHAPES[name].traffic(rate, Random(seed), seconds=seconds)


@pytest.mark.parametrize("name", SHAPES)
def test_every_turn_holds_all_that_came_before_and_something_new(name: str) -> None:
    for conversation in draw(name).conversations:
        for before, turn in pairwise(conversation.turns):
            assert turn.prompt > before.prompt + before.output or turn.prompt == WINDOW - 4096
            assert turn.new == max(turn.new, 0) == turn.prompt - before.prompt - before.output
        assert conversation.turns[0].new == conversation.turns[0].prompt


@pytest.mark.parametrize("name", SHAPES)
def test_the_chain_covers_every_turn_of_its_conversation(name: str) -> None:
    for conversation in draw(name).conversations:
        chain = conversation.turns[0].chain
        last = conversation.turns[-1]
        assert len(chain) >= (last.prompt + last.output) // BLOCK_TOKENS
        assert all(turn.chain is chain for turn in conversation.turns)
        assert len(set(chain)) == len(chain)


def test_agents_of_a_kind_begin_alike_and_part_at_once() -> None:
    chains = [conversation.turns[0].chain for conversation in draw("agents", 8).conversations]
    head = AGENTS.head // BLOCK_TOKENS
    assert len({chain[:head] for chain in chains}) == AGENTS.heads
    assert len({chain[head] for chain in chains}) == len(chains) > AGENTS.heads


def test_agents_grow_from_8k_to_128k_in_10_to_40_turns_with_tools() -> None:
    conversations = draw("agents", 8, seconds=1500).conversations
    assert {len(c.turns) for c in conversations} == set(range(10, 41))
    firsts = [c.turns[0].prompt for c in conversations]
    lasts = [c.turns[-1].prompt + c.turns[-1].output for c in conversations]
    assert 7000 < sum(firsts) / len(firsts) < 9000
    assert 115_000 < sum(lasts) / len(lasts) <= max(lasts) < WINDOW
    assert all(turn.tools for c in conversations for turn in c.turns)


@pytest.mark.parametrize("name", SHAPES)
def test_the_rate_is_requests_a_second(name: str) -> None:
    shape = SHAPES[name]
    traffic = shape.traffic(10.0, Random(3), seconds=3000.0)
    assert traffic.requests / traffic.seconds == pytest.approx(10.0, rel=0.06)


def test_a_higher_rate_brings_the_same_conversations_sooner() -> None:
    slow, fast = draw("chat", 1.0), draw("chat", 2.0)
    alike = [(a.turns, a.identity) for a in slow.conversations]
    assert alike == [(b.turns, b.identity) for b in fast.conversations[: len(alike)]]
    assert len(fast.conversations) > 1.7 * len(slow.conversations)


def test_a_burst_brings_two_fifths_of_all_in_a_sixth_of_the_time() -> None:
    conversations = draw("burst", 20.0, seconds=2400).conversations
    inside = sum(conversation.start % 60 >= 50 for conversation in conversations)
    assert inside / len(conversations) == pytest.approx(0.4, abs=0.03)


def test_mixed_traffic_has_all_tiers_and_tenants() -> None:
    conversations = draw("mixed", 20.0).conversations
    shares = {
        name: sum(c.tier.name == name for c in conversations) / len(conversations)
        for name in ("balanced", "exact", "fast")
    }
    assert shares == pytest.approx({"balanced": 0.6, "exact": 0.2, "fast": 0.2}, abs=0.03)
    assert {c.tenant for c in conversations} == {"a", "b"}


def test_the_same_seed_draws_the_same_traffic_and_another_seed_another() -> None:
    assert draw("mixed", seed=5) == draw("mixed", seed=5)
    assert draw("mixed", seed=5) != draw("mixed", seed=6)
