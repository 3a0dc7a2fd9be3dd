"""What the fleet believes of its backends, and how events change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from policies import (
    BackendView,
    DropReason,
    Fleet,
    Forecast,
    Member,
    PolicyParams,
    Polled,
    RequestFacts,
    Result,
    Slo,
    Tier,
)
from policies.engine import Engine, FirstToken, Request
from policies.filters import drop_reason
from policies.profile import get
from tests.policies.build import PARAMS, ask, choose

FP8, BF16 = get("fp8-mtp3-tp2-v17"), get("bf16-dflash8-tp2-v17")
PARAMS_ALL = PolicyParams()


def fast(name: str = "fp8", **differs: Any) -> Member:
    return Member(
        name,
        **({"profile": FP8, "kl_bits": 0.0055, "max_in_flight": 128, "kv_tokens": FP8.kv_tokens} | differs),
    )


def exact(name: str = "bf16", **differs: Any) -> Member:
    return fast(name, **({"profile": BF16, "reference": True, "kv_tokens": BF16.kv_tokens} | differs))


def fleet(*members: Member) -> Fleet:
    return Fleet(members or (fast(), exact()), PARAMS_ALL)


def turn(talk: str | None, prompt: int, links: int = 0, **differs: Any) -> RequestFacts:
    """A turn whose chain is that of its conversation, 784 tokens a link."""
    chain = tuple(hash((talk, i)) for i in range(links or prompt // 784))
    return replace(
        ask(prompt=prompt, output=1000), conversation=talk, prefix=chain, link_tokens=784.0, **differs
    )


def view(f: Fleet, now: float, facts: RequestFacts, name: str) -> BackendView:
    return f.views(now, facts, (name,))[0]


def forecast(f: Fleet, now: float, facts: RequestFacts, name: str) -> Forecast:
    found = view(f, now, facts, name).forecast
    assert found is not None
    return found


def serve(
    f: Fleet, now: float, id: int, name: str, facts: RequestFacts, answer: int = 200, **result: Any
) -> None:
    """The whole life of a request, as predicted."""
    start = forecast(f, now, facts, name).ttft
    f.begin(now, id, name, facts)
    f.first_token(now + start, id)
    f.finish(now + start + 1.0, id, Result(True, facts.prompt.tokens, answer, **result))


# -- prediction


@pytest.mark.parametrize("prompt", [2000, 16_000, 64_000, 128_000])
@pytest.mark.parametrize("profile", [FP8, BF16], ids=["fp8", "bf16"])
def test_a_cold_start_on_an_idle_backend_takes_as_long_as_the_engine_takes(profile: Any, prompt: int) -> None:
    f = fleet(fast("a", profile=profile))
    engine = Engine(profile)
    engine.submit(0.0, Request(prompt, 100))
    events = engine.advance(60.0)
    first = next(event.at for event in events if isinstance(event, FirstToken))
    assert forecast(f, 0.0, ask(prompt=prompt), "a").ttft == pytest.approx(first, rel=0.02)


def test_a_warm_prompt_costs_a_small_part_of_a_cold_one_and_only_where_it_is_warm() -> None:
    f = fleet()
    serve(f, 0.0, 1, "fp8", turn("c", 100_000))
    following = turn("c", 101_000)
    warm, cold = (forecast(f, 30.0, following, name).prefill for name in ("fp8", "bf16"))
    assert warm < 1.5
    assert cold > 10 * warm
    assert view(f, 30.0, following, "bf16").cached_tokens == 0


def test_the_answer_of_the_last_turn_is_warm_too() -> None:
    f = fleet()
    serve(f, 0.0, 1, "fp8", turn("c", 20_000), answer=4000)
    assert view(f, 30.0, turn("c", 24_100), "fp8").cached_tokens >= 23_000
    assert view(f, 30.0, turn("d", 24_100), "fp8").cached_tokens == 0, "another conversation's is not"


def test_a_conversation_without_chain_is_warm_where_it_was() -> None:
    f = fleet()
    serve(f, 0.0, 1, "fp8", replace(ask(prompt=20_000), conversation="c"))
    following = replace(ask(prompt=21_000), conversation="c")
    assert view(f, 30.0, following, "fp8").cached_tokens > 18_000
    assert view(f, 30.0, following, "bf16").cached_tokens == 0


def test_queue_is_what_those_before_still_need_and_passes_with_time() -> None:
    f = fleet()
    f.begin(0.0, 1, "fp8", ask(prompt=64_000))
    own = forecast(f, 0.0, ask(prompt=64_000), "bf16").prefill
    at = [forecast(f, now, ask(), "fp8").queue for now in (0.0, 3.0, 6.0)]
    assert at[0] == pytest.approx(8.1, rel=0.05)
    assert at[0] - at[1] == pytest.approx(3.0)
    assert at[1] - at[2] == pytest.approx(3.0)
    assert own > at[0] - at[2]
    f.first_token(7.0, 1)
    assert forecast(f, 7.0, ask(), "fp8").queue == 0


def test_a_backend_that_stands_still_looks_worse_every_second() -> None:
    f = fleet()
    f.begin(0.0, 1, "fp8", ask(prompt=1000))
    queues = [forecast(f, now, ask(), "fp8").queue for now in (5.0, 10.0, 20.0, 40.0)]
    assert queues == sorted(queues)
    assert queues[-1] > 10


def test_streams_slow_each_other_and_long_prefill_harms_who_decodes() -> None:
    f = fleet()
    idle = forecast(f, 0.0, ask(prompt=30_000), "fp8")
    for id in range(40):
        f.begin(0.0, id, "fp8", ask())
        f.first_token(0.1, id)
    busy = forecast(f, 60.0, ask(prompt=30_000), "fp8")
    assert busy.tpot > 1.5 * idle.tpot
    assert idle.harm == 0
    assert busy.harm > 10 * forecast(f, 60.0, ask(prompt=300), "fp8").harm


def test_with_mtp5_and_mtp3_the_surfaces_decide_which_is_sooner() -> None:
    """The study: n=5 wins up to four streams, n=3 from eight on. Nobody wrote an if."""
    f = fleet(
        fast("mtp5", profile=get("fp8-mtp5-may5")),
        fast("mtp3", profile=get("fp8-mtp3-may5")),
    )

    def better(streams: int) -> str:
        tpot = {name: f.states[name].speed.tpot(streams, 0) for name in f.states}
        return min(tpot, key=lambda name: tpot[name])

    assert better(1) == better(4) == "mtp5"
    assert better(8) == better(32) == "mtp3"


def test_without_a_profile_it_starts_conservative_and_learns() -> None:
    f = fleet(fast("plain", profile=None), fast())
    facts = ask(prompt=16_000)
    guessed = forecast(f, 0.0, facts, "plain").ttft
    assert guessed > forecast(f, 0.0, facts, "fp8").ttft
    for id in range(40):
        now = 100.0 * id
        f.begin(now, id, "plain", facts)
        f.first_token(now + 1.0, id)
        f.finish(now + 5.0, id, Result(True, 16_000, 401, 0))
    learned = forecast(f, 9000.0, facts, "plain")
    assert learned.ttft == pytest.approx(1.0, rel=0.15)
    assert learned.tpot == pytest.approx(0.01, rel=0.1)


def test_a_slow_card_is_noticed_and_avoided() -> None:
    """Two equal backends, one at a third of its speed: after twenty answers it takes a small part."""
    f, rng, sent = fleet(fast("slow"), fast("well")), Random(1), {"slow": 0, "well": 0}
    for id in range(300):
        now = id * 3.0
        facts = ask(prompt=4000)
        views = f.views(now, facts, ("slow", "well"))
        name = choose(facts, views, id).backend
        assert name is not None
        factor = 3.0 if name == "slow" else 1.0
        own = f.states[name]
        warm, cold = own.starts(4000, 0.0)
        f.begin(now, id, name, facts)
        f.first_token(now + (warm + cold) * factor, id)
        f.finish(now + (warm + cold) * factor + 199 * factor / 129, id, Result(True, 4000, 200, 0))
        if id >= 50:
            sent[name] += 1
        rng.random()
    assert sent["slow"] < 0.2 * sent["well"], sent
    assert f.snapshot(900.0)["well"]["decode_factor"] == pytest.approx(1.0, rel=0.1)


# -- caches


def test_reported_cached_tokens_correct_the_estimate_downwards() -> None:
    f = fleet()
    for id in range(3):
        serve(f, id * 30.0, id, "fp8", turn("c", 50_000 + 1000 * id), cached_tokens=0)
    assert view(f, 100.0, turn("c", 60_000), "fp8").cached_tokens == 0


def test_a_restart_that_the_counters_show_empties_the_cache() -> None:
    f = fleet()
    serve(f, 0.0, 1, "fp8", turn("c", 50_000))
    f.polled(10.0, "fp8", Polled(0, 0, 0.0, preemptions=5, drafted=10_000, accepted=5000))
    assert view(f, 11.0, turn("c", 51_000), "fp8").cached_tokens > 0
    f.polled(12.0, "fp8", Polled(0, 0, 0.0, preemptions=0, drafted=0, accepted=0))
    assert view(f, 13.0, turn("c", 51_000), "fp8").cached_tokens == 0
    assert f.talks.live["fp8"] == 0


def test_nothing_is_known_of_a_session_so_its_rendezvous_home_is_a_little_better() -> None:
    f = fleet(fast("a"), fast("b"), fast("c"))
    homes = {
        choose(ask(session=f"s{i}"), f.views(0.0, ask(session=f"s{i}"), "abc"), seed).backend
        for i in range(20)
        for seed in range(3)
    }
    assert homes == {"a", "b", "c"}
    for i in range(20):
        facts = ask(session=f"s{i}")
        assert len({choose(facts, f.views(0.0, facts, "abc"), seed).backend for seed in range(5)}) == 1


# -- state


def test_in_flight_is_what_has_begun_and_not_ended_whatever_the_end() -> None:
    f = fleet()
    for id in range(6):
        f.begin(0.0, id, "fp8", ask(prompt=1000, output=500))
    assert view(f, 0.0, ask(), "fp8").in_flight == 6
    f.first_token(1.0, 0)
    f.finish(2.0, 0, Result())
    f.finish(2.0, 1, Result(ok=False))
    f.finish(2.0, 2, Result(ok=False))
    assert (view(f, 3.0, ask(), "fp8").in_flight, view(f, 3.0, ask(), "fp8").in_flight_tokens) == (3, 4500)
    for id in (3, 4, 5):
        f.finish(4.0, id, Result())
    state = f.states["fp8"]
    assert (state.in_flight_tokens, state.held_tokens, state.outputs, len(state.pending)) == (0, 0, 0, 0)


def test_events_of_a_request_that_is_not_there_are_nothing() -> None:
    f = fleet()
    f.first_token(0.0, 99)
    f.finish(0.0, 99, Result())
    f.begin(0.0, 1, "fp8", ask())
    f.configure(1.0, [exact()], PARAMS_ALL)
    f.first_token(2.0, 1)
    f.finish(3.0, 1, Result())
    assert f.names() == ("bf16",)


def test_who_stays_through_a_reload_keeps_what_runs_and_what_was_learned() -> None:
    f = fleet()
    serve(f, 0.0, 1, "fp8", turn("c", 50_000))
    f.begin(10.0, 2, "fp8", ask())
    f.configure(11.0, [fast(max_in_flight=7), fast("new")], PARAMS_ALL)
    now = view(f, 12.0, turn("c", 51_000), "fp8")
    assert (now.in_flight, now.max_in_flight) == (1, 7)
    assert now.cached_tokens > 40_000


def test_after_a_recovery_places_open_one_after_the_other() -> None:
    f = fleet()
    f.set_state(0.0, "fp8", healthy=False)
    assert drop_reason(ask(), view(f, 1.0, ask(), "fp8"), PARAMS) is DropReason.UNHEALTHY
    f.set_state(10.0, "fp8", healthy=True)
    seconds = PARAMS_ALL.predict.slow_start_seconds
    places = [view(f, 10.0 + share * seconds, ask(), "fp8").max_in_flight for share in (0, 0.25, 0.5, 1)]
    assert places == [1, 32, 64, 128]


def test_who_says_that_it_takes_no_more_is_full_until_then_and_for_a_minute_at_most() -> None:
    f = fleet()
    f.full(10.0, "fp8", 20.0)
    f.full(10.0, "bf16", 86_400.0)

    def reasons(now: float) -> list[DropReason | None]:
        return [drop_reason(ask(), view(f, now, ask(), name), PARAMS) for name in f.names()]

    assert reasons(29.9) == [DropReason.FULL, DropReason.FULL]
    assert reasons(30.0) == [None, DropReason.FULL]
    assert reasons(70.0) == [None, None]
    f.full(70.0, "fp8", 5.0)
    f.full(70.0, "fp8", 1.0)  # the later end counts
    assert reasons(74.0) == [DropReason.FULL, None]


def test_speculation_that_collapsed_is_dropped_in_its_range_and_shown() -> None:
    f = fleet()
    f.begin(0.0, 1, "bf16", ask(prompt=50_000))
    f.first_token(5.0, 1)
    f.polled(6.0, "bf16", Polled(1, 0, 0.1, 0, drafted=0, accepted=0))
    f.polled(8.0, "bf16", Polled(1, 0, 0.1, 0, drafted=1000, accepted=10))
    long, short = ask(prompt=50_000), ask(prompt=1000)
    assert drop_reason(long, replace(view(f, 8.0, long, "bf16"), window_tokens=None), PARAMS) is (
        DropReason.COLLAPSED
    )
    assert drop_reason(short, view(f, 8.0, short, "bf16"), PARAMS) is None
    assert f.snapshot(8.0)["bf16"]["speculation_collapsed"] == 1


def test_what_a_profile_knows_to_be_broken_is_not_tried() -> None:
    f = fleet(
        fast("dflash", profile=get("bf16-dflash8-upstream-v0.20.1"), window_tokens=134_144),
        fast("nvfp4", profile=get("nvfp4-mtp3-upstream-v0.20.1"), window_tokens=262_144),
    )
    assert view(f, 0.0, ask(prompt=40_000), "dflash").collapsed
    assert not view(f, 0.0, ask(prompt=30_000), "dflash").collapsed
    assert (view(f, 0.0, ask(), "nvfp4").window_tokens or 0) < 262_144


def test_a_backend_whose_tool_calls_go_wrong_is_demoted_for_tools_only() -> None:
    f = fleet(fast("good"), fast("bad"))
    for id in range(40):
        for number, name, fine in ((id, "good", True), (1000 + id, "bad", id % 2 == 0)):
            f.begin(id * 10.0, number, name, ask())
            f.finish(id * 10.0 + 1, number, Result(calls_ok=fine))

    def demotions(facts: RequestFacts) -> list[float]:
        return [v.forecast.demotion for v in f.views(500.0, facts, ("good", "bad")) if v.forecast is not None]

    with_tools = replace(ask(), tools=True)
    good, bad = demotions(with_tools)
    assert good == 0
    assert bad > 3
    assert demotions(ask()) == [0, 0]
    went = {choose(with_tools, f.views(500.0, with_tools, ("good", "bad")), s).backend for s in range(9)}
    assert went == {"good"}


def test_the_promise_is_over_what_is_new_to_the_conversation() -> None:
    f = fleet()
    tier = Tier("fast", slo=Slo(2.0, 1.5, 0.05))
    first = replace(turn("c", 64_000), tier=tier)
    names: Sequence[str] = ("fp8", "bf16")
    cold = f.promise(first, f.views(0.0, first, names))
    assert cold == pytest.approx(2.0 + 1.5 * 8.1, rel=0.05)
    serve(f, 0.0, 1, "fp8", first, answer=300)
    following = replace(turn("c", 64_400), tier=tier)
    assert f.promise(following, f.views(60.0, following, names)) == pytest.approx(2.1, abs=0.1)
    assert f.promise(ask(), f.views(60.0, ask(), names)) is None, "a tier without SLO promises nothing"


def test_expected_answers_are_learned_by_kind_and_never_more_than_allowed() -> None:
    f = fleet()
    tools = replace(ask(output=4000), tools=True)
    for id in range(100):
        f.begin(float(id), id, "fp8", tools)
        f.finish(float(id), id, Result(True, 1000, 50))
    assert f.expected_output(tools) == pytest.approx(50, rel=0.05)
    assert f.expected_output(ask(output=4000)) == PARAMS_ALL.predict.usual_output
    assert f.expected_output(ask(output=20)) == 20


def test_polled_load_that_is_not_ours_counts_and_fades() -> None:
    f = fleet()
    f.polled(0.0, "fp8", Polled(running=60, waiting=0))
    fresh, old = (forecast(f, now, ask(), "fp8").tpot for now in (0.0, 6.0))
    assert fresh > 2 * old
    f.begin(7.0, 1, "fp8", ask())
    f.polled(8.0, "fp8", Polled(running=1, waiting=0))
    assert forecast(f, 8.0, ask(), "fp8").tpot < 1.2 * old, "our own is not counted twice"
