"""Who is a conversation, who lives, and what they hold."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from policies import RequestFacts
from policies.params import WorkingSetParams
from policies.workingset import Talk, WorkingSet
from tests.policies.build import ask

PARAMS = WorkingSetParams()


def turn(key: str | None = None, prompt: int = 1000, chain: tuple[int, ...] = ()) -> RequestFacts:
    return replace(ask(prompt=prompt), conversation=key, prefix=chain, link_tokens=100.0 if chain else 0.0)


def patience(talks: WorkingSet, *, tools: bool = False) -> float:
    return talks.habits(replace(turn(), tools=tools)).patience


def begin(talks: WorkingSet, now: float, facts: RequestFacts, backend: str = "a") -> Talk:
    key = talks.key(facts)
    assert key is not None
    return talks.begin(now, key, backend, facts)


def test_a_conversation_is_what_the_request_says_before_what_its_prefix_says() -> None:
    talks = WorkingSet(PARAMS)
    assert talks.key(turn("agent-7", chain=(1, 2))) == "agent-7"
    assert talks.key(turn()) is None
    assert talks.key(replace(turn(), session="s")) == "s"


def test_a_prompt_that_begins_with_a_whole_earlier_one_continues_it() -> None:
    talks = WorkingSet(PARAMS)
    first, other = turn(chain=(1, 2, 3)), turn(chain=(1, 2, 9))
    begin(talks, 0.0, first)
    begin(talks, 0.0, other)
    assert talks.key(first) != talks.key(other), "a shared beginning is no conversation"
    second = turn(chain=(1, 2, 3, 4, 5))
    assert talks.key(second) == talks.key(turn(chain=(1, 2, 3)))
    key = talks.key(second)
    begin(talks, 1.0, second)
    assert talks.key(turn(chain=(1, 2, 3, 4, 5, 6))) == key


def test_it_lives_while_it_runs_and_until_its_return_is_unlikely() -> None:
    talks = WorkingSet(PARAMS)
    talk = begin(talks, 0.0, turn("c", 5000))
    assert (talks.live, talks.tokens) == ({"a": 1}, {"a": 5000.0})
    talks.finish(10.0, talk, 5500.0)
    talks.sweep(10.0 + patience(talks))
    assert talks.live["a"] == 1
    assert 0 < talks.tokens["a"] < 5500, "its return is likely, not sure"
    talks.sweep(10.1 + patience(talks))
    assert talks.live["a"] == 0
    assert talks.tokens["a"] == pytest.approx(0.0)
    assert talks.get("c") is talk, "idle, not forgotten"


def test_it_lives_where_its_last_turn_went() -> None:
    talks = WorkingSet(PARAMS)
    talk = begin(talks, 0.0, turn("c"), "a")
    talks.finish(1.0, talk, 1100.0)
    begin(talks, 2.0, turn("c", 1500), "b")
    assert talks.live == {"a": 0, "b": 1}


def test_how_long_to_wait_for_a_return_is_learned() -> None:
    """900 returns after 2 to 4 s: it need not wait half a minute for them; and up again for slower ones."""
    talks, rng, now = WorkingSet(replace(PARAMS, least_idle_seconds=1.0)), Random(1), 0.0
    for low, high in ((2.0, 4.0), (20.0, 40.0)):
        for _ in range(900):
            talk = begin(talks, now, turn("c"))
            talks.finish(now + 1.0, talk, 1000.0)
            now += 1.0 + rng.uniform(low, high)
        assert low < patience(talks) < 1.5 * high


def test_a_new_conversation_is_expected_to_grow_to_what_is_usual() -> None:
    talks = WorkingSet(PARAMS)
    for i in range(50):
        talk = begin(talks, float(i), turn(f"old-{i}", 60_000))
        talks.finish(float(i), talk, 60_000.0)
    assert talks.expected(turn("new", 8000)) == pytest.approx(60_000)
    assert talks.expected(turn("new", 90_000)) == 90_000


def test_agents_and_chats_are_waited_for_as_long_as_each_of_them_takes() -> None:
    """Nine chats in ten that are back after a minute say nothing of an agent that waits for a build, nor of its size."""
    talks, rng, now = WorkingSet(PARAMS), Random(1), 0.0
    for tools, turns, size, low, high in ((True, 200, 80_000, 60, 200), (False, 2000, 800, 5, 20)):
        asked = replace(turn(f"{tools}", size), tools=tools)
        for _ in range(turns):
            talks.finish(now, begin(talks, now, asked), float(size))
            now += rng.uniform(low, high)
    assert patience(talks) < 40 < 120 < patience(talks, tools=True)
    assert talks.expected(turn("new", 500)) == pytest.approx(800)
    assert talks.expected(replace(turn("new", 500), tools=True)) == pytest.approx(80_000)


def test_an_emptied_cache_holds_nobodys_context() -> None:
    talks = WorkingSet(PARAMS)
    for i in range(5):
        talks.finish(1.0, begin(talks, 0.0, turn(f"c{i}")), 1000.0)
    begin(talks, 0.0, turn("elsewhere"), "b")
    talks.lost("a")
    assert talks.live == {"a": 0, "b": 1}


def test_what_is_remembered_is_bounded_and_counted_right() -> None:
    talks = WorkingSet(replace(PARAMS, conversations=50))
    rng, running = Random(5), []
    for step in range(2000):
        now = step * 0.5
        key = f"c{rng.randrange(200)}"
        running.append(begin(talks, now, turn(key, chain=(rng.randrange(10**6),)), rng.choice("ab")))
        if len(running) > 8:
            talks.finish(now, running.pop(rng.randrange(len(running))), 2000.0)
        talks.sweep(now)
    assert len(talks) <= 50
    for talk in running:
        talks.finish(2000.0, talk, 10.0)
    talks.sweep(5000.0)
    assert set(talks.live.values()) == {0}
    assert all(abs(tokens) < 1e-6 for tokens in talks.tokens.values())
