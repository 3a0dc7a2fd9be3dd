"""The engine model behaves like vLLM's scheduler, and its arithmetic does not depend on how it is driven."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import profile
from policies.engine import (
    Engine,
    EngineConfig,
    Event,
    Finished,
    FirstToken,
    Preempted,
    Request,
    Started,
    Tokens,
)
from policies.engine.draft import LENGTH, Draft

FP8 = profile.get("fp8-mtp3-tp2-v17")
SMALL = EngineConfig(kv_tokens=784 * 12, max_num_seqs=4, batched_tokens=2048)
SETTINGS = settings(max_examples=100, derandomize=True, deadline=None)
ARRIVALS = st.lists(
    st.tuples(
        st.floats(0, 3),  # seconds after the one before
        st.integers(1, 4000),  # prompt
        st.integers(1, 1500),  # output
        st.integers(0, 3),  # which prompt
        st.booleans(),  # streamed
    ),
    min_size=1,
    max_size=12,
)
Arrival = tuple[float, int, int, int, bool]


def request(prompt: int, output: int, family: int = 0, stream: bool = False) -> Request:
    return Request(prompt, output, tuple(family * 1000 + i for i in range(prompt // 784)), stream=stream)


def drain(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while (at := engine.next_event_at()) is not None:
        events += engine.advance(at)
    return events


def run(arrivals: Sequence[Arrival], *, stream: bool | None = None, tick: float | None = None) -> list[Event]:
    """All events of a small engine. `tick`: advance in steps of this many seconds too."""
    engine, now, events = Engine(FP8, SMALL), 0.0, []
    for gap, prompt, output, family, streamed in arrivals:
        until = now + gap
        while tick and now + tick < until:
            now += tick
            events += engine.advance(now)
        now = until
        events += engine.advance(now)
        engine.submit(now, request(prompt, output, family, streamed if stream is None else stream))
    while tick and engine.next_event_at() is not None:
        now += tick
        events += engine.advance(now)
    events += drain(engine)
    stats = engine.stats(1e9)
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert stats.finished == len(arrivals)
    assert stats.generation_tokens == sum(a[2] for a in arrivals)
    assert stats.prompt_tokens == sum(a[1] for a in arrivals)
    return events


def milestones(events: Sequence[Event]) -> list[tuple[str, int, float]]:
    kept = (Started, FirstToken, Preempted, Finished)
    return sorted((type(e).__name__, e.id, round(e.at, 5)) for e in events if isinstance(e, kept))


@SETTINGS
@given(ARRIVALS)
def test_every_request_starts_first_answers_once_and_ends_once(arrivals: list[Arrival]) -> None:
    events = run(arrivals)
    assert [e.at for e in events] == sorted(e.at for e in events)
    for kind in (FirstToken, Finished):
        assert Counter(e.id for e in events if isinstance(e, kind)) == dict.fromkeys(
            range(1, len(arrivals) + 1), 1
        )
    streamed = Counter[int]()
    for e in events:
        if isinstance(e, Tokens):
            assert e.n > 0
            streamed[e.id] += e.n
    for id, (_, _, output, _, stream) in enumerate(arrivals, 1):
        assert streamed[id] == (output - 1 if stream else 0)


@SETTINGS
@given(ARRIVALS)
def test_streaming_changes_what_is_told_not_what_happens(arrivals: list[Arrival]) -> None:
    streamed, silent = milestones(run(arrivals, stream=True)), milestones(run(arrivals, stream=False))
    assert [m[:2] for m in streamed] == [m[:2] for m in silent]
    assert [m[2] for m in streamed] == pytest.approx([m[2] for m in silent], abs=1e-4)


@SETTINGS
@given(ARRIVALS, st.floats(0.05, 2))
def test_it_does_not_matter_how_often_time_is_told(arrivals: list[Arrival], tick: float) -> None:
    once, often = milestones(run(arrivals)), milestones(run(arrivals, tick=tick))
    assert [m[:2] for m in often] == [m[:2] for m in once]
    assert [m[2] for m in often] == pytest.approx([m[2] for m in once], abs=1e-3)


@SETTINGS
@given(ARRIVALS, st.randoms(use_true_random=False))
def test_a_cancelled_request_leaves_nothing_behind(arrivals: list[Arrival], rng: random.Random) -> None:
    engine, now, alive = Engine(FP8, SMALL), 0.0, set[int]()
    for gap, prompt, output, family, streamed in arrivals:
        now += gap
        alive -= {e.id for e in engine.advance(now) if isinstance(e, Finished)}
        alive.add(engine.submit(now, request(prompt, output, family, streamed)))
        if rng.random() < 0.5:
            gone = rng.choice(sorted(alive))
            now += rng.random()
            alive -= {e.id for e in engine.advance(now) if isinstance(e, Finished)}
            assert engine.cancel(gone, now) == (gone in alive)
            assert not engine.cancel(gone, now)
            alive.discard(gone)
    ended = {e.id for e in drain(engine) if isinstance(e, Finished)}
    assert ended == alive
    stats = engine.stats(1e9)
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)


def test_no_more_run_than_max_num_seqs_and_the_rest_wait_their_turn() -> None:
    engine = Engine(FP8, EngineConfig(784 * 1000, max_num_seqs=3))
    for _ in range(10):
        engine.submit(5.0, request(100, 200))
    engine.advance(5.0)
    assert (engine.stats(5.0).running, engine.stats(5.0).waiting) == (3, 7)
    events = drain(engine)
    assert [e.id for e in events if isinstance(e, FirstToken)] == list(range(1, 11))


def test_a_prompt_seen_before_is_cached_up_to_its_last_full_block_and_starts_sooner() -> None:
    engine = Engine(FP8)
    times = []
    for i in range(2):
        begin = 100.0 * i
        engine.submit(begin, request(65536, 1))
        events = drain(engine)
        times.append(next(e.at - begin for e in events if isinstance(e, FirstToken)))
        assert next(e.cached for e in events if isinstance(e, Started)) == (0, 65536 // 784 * 784)[i]
    assert times[1] < times[0] / 10
    stats = engine.stats(200.0)
    assert (stats.queried_tokens, stats.hit_tokens) == (2 * 65536, 65536 // 784 * 784)
    engine.flush_cache(200.0)
    engine.submit(200.0, request(65536, 1))
    assert next(e.cached for e in drain(engine) if isinstance(e, Started)) == 0


def test_a_next_turn_finds_what_was_generated() -> None:
    engine = Engine(FP8)
    engine.submit(0.0, Request(784 * 2, 784 * 2, blocks=(1, 2), output_blocks=(3, 4)))
    drain(engine)
    engine.submit(900.0, Request(784 * 5, 1, blocks=(1, 2, 3, 4, 5)))
    assert next(e.cached for e in drain(engine) if isinstance(e, Started)) == 784 * 4


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token() -> None:
    engine = Engine(FP8)
    for begin, cached in ((0.0, 0), (50.0, 784)):
        engine.submit(begin, request(784 * 2, 1))
        assert next(e.cached for e in drain(engine) if isinstance(e, Started)) == cached


def test_without_prefix_caching_nothing_is_remembered() -> None:
    engine = Engine(FP8, EngineConfig(784 * 100, prefix_caching=False))
    for begin in (0.0, 50.0):
        engine.submit(begin, request(7840, 1))
        assert next(e.cached for e in drain(engine) if isinstance(e, Started)) == 0


def test_the_youngest_is_preempted_when_blocks_run_out_and_still_finishes() -> None:
    engine = Engine(FP8, EngineConfig(784 * 10, max_num_seqs=8))
    for family in range(3):
        engine.submit(0.0, request(784 * 3 - 10, 2000, family))
    events = drain(engine)
    lost = [e.id for e in events if isinstance(e, Preempted)]
    assert lost
    assert lost[0] == 3
    assert 1 not in lost
    assert {e.id: e.tokens for e in events if isinstance(e, Finished)} == dict.fromkeys((1, 2, 3), 2000)
    assert engine.stats(1e6).preemptions == len(lost)


def test_what_can_never_fit_is_refused() -> None:
    engine = Engine(FP8, SMALL)
    for prompt, output in ((784 * 12, 1), (1, 784 * 12), (0, 5), (5, 0)):
        with pytest.raises(ValueError):
            engine.submit(0.0, Request(prompt, output))
    assert engine.next_event_at() is None


def test_decoding_crawls_while_a_cold_prompt_is_prefilled_and_recovers() -> None:
    engine = Engine(FP8)
    engine.submit(0.0, request(100, 5000, stream=True))
    engine.advance(2.0)
    engine.submit(2.0, request(131072, 1, family=7))
    at = [e.at for e in drain(engine) if isinstance(e, Tokens) and e.id == 1]
    gaps = [b - a for a, b in pairwise(at)]
    during = [gap for a, gap in zip(at, gaps, strict=False) if 2.5 < a < 15]
    after = [gap for a, gap in zip(at, gaps, strict=False) if a > 25]
    assert min(during) > 1.0  # one step for each chunk of 32768 tokens
    assert max(after) < 0.03


def test_a_step_gives_one_to_four_tokens_under_mtp3() -> None:
    engine = Engine(FP8)
    engine.submit(0.0, request(100, 4000, stream=True))
    sizes = Counter(e.n for e in drain(engine) if isinstance(e, Tokens))
    assert set(sizes) == {1, 2, 3, 4}
    assert sum(n * k for n, k in sizes.items()) / sizes.total() == pytest.approx(2.698, rel=0.02)
    stats = engine.stats(1e6)
    assert stats.accepted_tokens / stats.drafted_tokens == pytest.approx(0.566, abs=0.01)


def test_requests_a_moment_apart_start_together() -> None:
    engine = Engine(FP8)
    for i in range(8):
        at = i * 0.002
        engine.advance(at)
        engine.submit(at, request(16, 100))
    times = [e.at for e in drain(engine) if isinstance(e, FirstToken)]
    assert sum(times) / 8 == pytest.approx(FP8.warm_ttft(8, 0), rel=0.1)


def test_a_steady_trickle_of_requests_is_never_starved_by_late_comers() -> None:
    engine, events = Engine(FP8), list[Event]()
    for i in range(400):
        events += engine.advance(i * 0.05)
        engine.submit(i * 0.05, request(500, 20, family=i))
    first = {e.id: e.at for e in events + drain(engine) if isinstance(e, FirstToken)}
    waits = [first[i + 1] - i * 0.05 for i in range(400)]
    assert max(waits[200:]) < 1.5


@pytest.mark.parametrize("factor", [0.5, 0.1])
def test_a_slowed_engine_takes_longer_by_that_factor(factor: float) -> None:
    ends = []
    for speed in (1.0, factor):
        engine = Engine(FP8)
        engine.set_speed(speed, 0.0)
        engine.submit(0.0, request(5000, 300))
        ends.append(drain(engine)[-1].at)
    assert ends[1] == pytest.approx(ends[0] / factor)


def test_a_stopped_engine_does_nothing_until_it_goes_on() -> None:
    engine = Engine(FP8)
    engine.submit(0.0, request(100, 300, stream=True))
    engine.advance(1.0)
    engine.set_speed(0.0, 1.0)
    engine.submit(2.0, request(100, 300))
    assert engine.next_event_at() is None
    assert engine.advance(50.0) == []
    engine.set_speed(1.0, 50.0)
    assert {e.id for e in drain(engine) if isinstance(e, Finished)} == {1, 2}


def test_when_acceptance_collapses_steps_take_as_long_and_give_less() -> None:
    ends = []
    for acceptance in (None, 0.01):
        engine = Engine(FP8)
        engine.submit(0.0, request(100, 3000))
        engine.advance(2.0)
        engine.set_acceptance(acceptance, 2.0)
        ends.append(drain(engine)[-1].at)
    assert (ends[1] - 2.0) / (ends[0] - 2.0) == pytest.approx(2.698 / 1.03, rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "acceptance"), [(0, 0.0), (3, 0.566), (8, 0.231), (5, 0.0), (3, 1.0), (8, 0.0215)]
)
def test_a_draft_table_has_the_mean_it_was_made_for(tokens: int, acceptance: float) -> None:
    table = Draft(tokens, acceptance)
    assert table.mean == pytest.approx(1 + tokens * acceptance, abs=0.01)
    assert set(table.table) <= set(range(1, tokens + 2))


@SETTINGS
@given(st.integers(0, 8), st.floats(0, 1), st.integers(0, LENGTH - 1), st.integers(1, 5000))
def test_steps_are_the_fewest_that_give_the_tokens(
    k: int, acceptance: float, offset: int, tokens: int
) -> None:
    table = Draft(k, acceptance)
    steps = table.steps(offset, tokens)
    assert table.tokens(offset, steps) >= tokens > table.tokens(offset, steps - 1)


def test_long_outputs_cost_no_more_events_than_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[str]()
    due = Engine._due

    def counted(engine: Engine) -> tuple[float, int | None] | None:
        calls["due"] += 1
        return due(engine)

    monkeypatch.setattr(Engine, "_due", counted)
    engine, rng, now = Engine(FP8), random.Random(3), 0.0
    for i in range(2000):
        now += rng.expovariate(2)
        engine.advance(now)
        engine.submit(now, request(rng.choice((100, 3000)), rng.randrange(10, 600), family=i % 50))
    engine.advance(1e6)
    assert engine.stats(1e6).finished == 2000
    assert calls["due"] < 12 * 2000


def test_a_preempted_request_comes_before_those_that_have_not_started() -> None:
    engine = Engine(FP8, EngineConfig(784 * 10, max_num_seqs=3))
    for family in range(3):
        engine.submit(0.0, request(784 * 3 - 10, 2000, family))
    late = engine.submit(0.0, request(100, 10, family=9))
    events = drain(engine)
    again = [e.id for e in events if isinstance(e, Started)]
    assert again.index(late) > max(i for i, id in enumerate(again) if id == 3)


def test_prefill_waits_for_the_decode_steps_it_shares() -> None:
    times = []
    for streams in (0, 64):
        engine = Engine(FP8)
        for i in range(streams):
            engine.submit(0.0, request(16, 20000, family=100 + i))
        engine.advance(10.0)
        id = engine.submit(10.0, request(131072, 1, family=7))
        first = [e for e in engine.advance(60.0) if isinstance(e, FirstToken) and e.id == id]
        assert first
        times.append(first[0].at - 10.0)
    step = 64 * 2.698 / FP8.aggregate_rate(64, 0)
    assert times[1] - times[0] == pytest.approx(4 * step, rel=0.2)  # four chunks of 32768


def test_a_seat_holds_the_prompt_and_the_next_token() -> None:
    engine = Engine(FP8, EngineConfig(784 * 10))
    engine.submit(0.0, request(784 * 2, 1000))
    engine.advance(0.0)
    assert engine.stats(0.0).kv_usage == pytest.approx(0.3)


def test_who_comes_after_the_start_was_under_way_changes_nothing_for_who_was_first() -> None:
    times = []
    for late in (False, True):
        engine, events = Engine(FP8), list[Event]()
        engine.submit(0.0, request(65536, 1))
        events += engine.advance(1.0)
        if late:
            engine.submit(1.0, request(65536, 1, family=3))
        events += drain(engine)
        times.append([e.at for e in events if isinstance(e, FirstToken)])
    assert times[1][0] == pytest.approx(times[0][0])
    assert times[1][1] == pytest.approx(2 * times[0][0], rel=0.02)
