"""Who goes, who waits, who is turned away, and what is promised to each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest

from policies import (
    Admission,
    ChooseReason,
    DropReason,
    Fleet,
    Go,
    Member,
    PolicyParams,
    RequestFacts,
    Result,
    Router,
    Shed,
    ShedReason,
    Slo,
    Tier,
    Verdict,
    Wait,
)
from policies.params import AdmissionParams
from policies.profile import get
from policies.simulation import SHAPES, Conversation, Machine, Simulation, Traffic, live
from tests.policies.build import ask
from tests.policies.test_fleet import exact, fast, turn

SLO = Slo()
BALANCED = Tier("balanced", max_kl_bits=0.05, slo=SLO)
EXACT = Tier("exact", reference=True, slo=SLO)
ANY = Tier("any")
FP8 = get("fp8-mtp3-tp2-v17")


def short(tier: Tier = BALANCED, prompt: int = 700, **differs: Any) -> RequestFacts:
    return replace(ask(tier, prompt=prompt, output=400), **({"expected_output": 200.0} | differs))


class Site:
    """A fleet whose backends answer as predicted: start when their turn comes, then 200 tokens. `events` is the future."""

    def __init__(
        self, *members: Member, params: PolicyParams | None = None, policy: str = "predicted"
    ) -> None:
        self.params = params or PolicyParams(name=policy)
        self.fleet = Fleet(members or (fast(), exact()), self.params)
        self.admission = Admission(
            self.fleet, Router(self.params.router, self.params.name), self.params, Random(1)
        )
        self.names = self.fleet.names()
        self.now = 0.0
        self.events: list[tuple[float, int, str]] = []
        self.free_at = dict.fromkeys(self.names, 0.0)
        self.arrived: dict[int, tuple[float, RequestFacts]] = {}
        self.went: dict[int, tuple[float, str]] = {}
        self.shed: dict[int, Shed] = {}
        self.waited: dict[int, float] = {}
        self.tpots: list[float] = []

    def offer(self, id: int, facts: RequestFacts, **how: Any) -> Verdict:
        self.arrived[id] = self.now, facts
        return self._note(id, self.admission.offer(self.now, id, facts, self.names, **how))

    def until(self, end: float) -> None:
        """Let everything happen up to `end`."""
        while True:
            queue_at = self.admission.next_event_at()
            at = min(self.events[0][0] if self.events else inf, inf if queue_at is None else queue_at)
            if at > end:
                break
            self.now = max(self.now, at)
            if self.events and self.events[0][0] <= self.now:
                _, id, what = heapq.heappop(self.events)
                if what == "first":
                    self.fleet.first_token(self.now, id)
                else:
                    facts = self.arrived[id][1]
                    self.fleet.finish(self.now, id, Result(True, facts.prompt.tokens, 200))
            for id, verdict in self.admission.advance(self.now):
                self._note(id, verdict)
        self.now = max(self.now, end)

    def ttft(self, id: int) -> float:
        return self.waited[id] - self.arrived[id][0]

    def _note(self, id: int, verdict: Verdict) -> Verdict:
        if isinstance(verdict, Go):
            name, forecast = verdict.view.name, verdict.view.forecast
            assert forecast is not None
            self.went[id] = self.now, name
            self.tpots.append(forecast.tpot)
            first = self.free_at[name] = max(self.now, self.free_at[name]) + forecast.prefill
            self.waited[id] = first
            heapq.heappush(self.events, (first, id, "first"))
            heapq.heappush(self.events, (first + 200 * forecast.tpot, id, "end"))
        elif isinstance(verdict, Shed):
            self.shed[id] = verdict
        return verdict


def reasons(site: Site, ids: Sequence[int]) -> set[ShedReason]:
    return {site.shed[id].reason for id in ids}


# -- go


def test_an_idle_fleet_takes_a_request_at_once_and_it_has_begun() -> None:
    site = Site()
    verdict = site.offer(1, short())
    assert isinstance(verdict, Go)
    assert len(site.fleet.states[verdict.view.name].running) == 1


def test_choices_that_come_at_once_see_each_other() -> None:
    """Nothing is awaited and nothing polled between them: forty do not herd onto the idle one."""
    site = Site(fast("a"), fast("b"), fast("c"), fast("d"), params=PolicyParams(admission=False))
    for id in range(40):
        site.offer(id, short())
    went = [name for _, name in site.went.values()]
    assert {went.count(name) for name in "abcd"} == {10}


def test_a_request_that_nothing_fits_is_refused_with_each_backends_reason() -> None:
    site = Site(fast())
    verdict = site.offer(1, short(EXACT))
    assert isinstance(verdict, Shed)
    assert (verdict.reason, verdict.retry_after) == (ShedReason.NO_BACKEND, 0)
    assert verdict.decision.drops[0].reason is DropReason.TIER


def test_a_second_attempt_goes_elsewhere_without_waiting_again() -> None:
    site = Site()
    first = site.offer(1, short())
    assert isinstance(first, Go)
    site.fleet.finish(0.1, 1, Result(ok=False))
    second = site.admission.again(0.1, 1, short(), site.names, tried=frozenset({first.view.name}))
    assert isinstance(second, Go)
    assert second.view.name != first.view.name
    assert second.decision.reason is ChooseReason.RETRY


def test_a_pinned_request_goes_to_its_backend_or_nowhere() -> None:
    site = Site()
    verdict = site.offer(1, short(), pinned="bf16")
    assert isinstance(verdict, Go)
    assert verdict.view.name == "bf16"


@pytest.mark.parametrize("policy", ["least_in_flight", "round_robin", "session_hash"])
def test_classic_policies_send_at_once_and_shed_when_full(policy: str) -> None:
    site = Site(fast(max_in_flight=4), policy=policy)
    verdicts = [site.offer(id, short()) for id in range(6)]
    assert [type(verdict) for verdict in verdicts] == [Go] * 4 + [Shed] * 2
    assert reasons(site, [4, 5]) == {ShedReason.FULL}


# -- wait


def test_what_would_queue_in_the_engine_waits_here_and_goes_in_order() -> None:
    site = Site(fast())
    documents = [short(ANY, prompt=20_000) for _ in range(4)]
    verdicts = [site.offer(id, facts) for id, facts in enumerate(documents)]
    assert isinstance(verdicts[0], Go)
    assert any(isinstance(verdict, Wait) for verdict in verdicts)
    site.until(30.0)
    assert not site.shed
    assert sorted(site.went, key=lambda id: site.went[id][0]) == [0, 1, 2, 3]


def test_a_running_conversations_next_turn_overtakes_a_new_one() -> None:
    site = Site(fast())
    site.offer(1, replace(turn("old", 8000), tier=ANY))
    site.until(20.0)
    site.offer(2, replace(turn("big", 30_000), tier=ANY))
    site.offer(3, replace(turn("new", 8000), tier=ANY))
    site.offer(4, replace(turn("old", 9000), tier=ANY))
    site.until(60.0)
    assert site.went[2][0] < site.went[4][0] < site.went[3][0]


def test_a_conversation_waits_for_the_backend_where_it_is_warm_if_that_is_sooner() -> None:
    site = Site(fast("a"), fast("b"))
    site.offer(1, replace(turn("c", 100_000), tier=BALANCED))
    home = site.went[1][1]
    site.until(60.0)
    site.fleet.begin(60.0, 99, home, short(prompt=9000))
    assert isinstance(site.offer(2, replace(turn("c", 101_000), tier=BALANCED)), Wait), "1 s here, 15 s there"
    site.fleet.first_token(61.0, 99)
    site.now = 61.0
    for id, verdict in site.admission.advance(61.0):
        site._note(id, verdict)
    assert site.went[2] == (61.0, home)


def test_requests_that_only_one_backend_may_serve_do_not_block_those_that_another_could() -> None:
    site = Site()
    for id in range(10):
        site.offer(id, short(EXACT, prompt=20_000))
    assert len(site.went) < 10
    assert isinstance(site.offer(100, short()), Go)
    assert site.went[100][1] == "fp8"


@pytest.mark.parametrize(("tier", "bounded"), [(BALANCED, True), (ANY, False)])
def test_a_backend_is_not_filled_beyond_the_speed_its_tier_promises(tier: Tier, bounded: bool) -> None:
    """Bf16 alone has 60 ms per token at 64 streams; the promise is 50. A tier without promise has no such bound."""
    site = Site(exact())
    for id in range(300):
        site.until(id * 0.05)
        site.offer(id, short(tier, expected_output=2000.0))
    assert (max(site.tpots) <= SLO.tpot_seconds) is bounded
    assert len(site.went) >= 24


def test_the_cache_is_never_promised_twice() -> None:
    site = Site(fast(kv_tokens=100_000))
    for id in range(8):
        site.offer(id, short(ANY, prompt=30_000))
        site.until(site.now + 6.0)
        assert site.fleet.states["fp8"].held_tokens <= 100_000


def test_new_conversations_wait_while_those_that_live_fill_the_cache_and_running_ones_do_not() -> None:
    site = Site(fast(kv_tokens=100_000))
    talks, params = site.fleet.talks, site.params.working_set
    for id in range(10):
        site.offer(id, replace(turn(f"c{id}", 20_000), tier=ANY))
        site.until(site.now + 2.5)
        assert talks.tokens["fp8"] <= 100_000 * params.kv_share
    assert 4 <= len(site.went) < 10
    assert not site.shed
    assert isinstance(site.offer(100, replace(turn("c0", 21_000), tier=ANY)), Go), "its memory is there"
    site.until(site.now + 100.0)
    assert len(site.went) + len(site.shed) == 11, "the idle ones made room, or the wait was over"


def test_a_lone_conversation_larger_than_the_budget_is_still_served() -> None:
    site = Site(fast(kv_tokens=100_000))
    assert isinstance(site.offer(1, replace(turn("c", 95_000), tier=BALANCED)), Go)


# -- turned away


def flood(site: Site, count: int, gap: float, facts: RequestFacts) -> None:
    for id in range(count):
        site.until(id * gap)
        site.offer(id, facts)
    site.until(count * gap + 120.0)


def test_twice_what_fits_is_half_turned_away_at_once_and_the_rest_in_time() -> None:
    site = Site(exact())
    flood(site, 900, 0.05, short())
    assert len(site.went) + len(site.shed) == 900
    assert reasons(site, list(site.shed)) <= {ShedReason.TOO_LATE, ShedReason.EXPIRED}
    assert 0.2 < len(site.shed) / 900 < 0.8
    late = [id for id in site.went if site.ttft(id) > 2.2]
    assert len(late) < 0.1 * len(site.went)


def test_retry_after_is_whole_seconds_between_one_and_sixty_and_grows_with_the_line() -> None:
    site = Site(exact())
    flood(site, 900, 0.02, short())
    after = [shed.retry_after for shed in site.shed.values()]
    assert all(isinstance(seconds, int) and 1 <= seconds <= 60 for seconds in after)
    deep = Site(exact(), params=PolicyParams(gate=AdmissionParams(queue=2000)))
    facts = short(ANY, prompt=8000)
    for id in range(400):
        deep.offer(id, facts)
    assert max(shed.retry_after for shed in deep.shed.values()) > max(after[:50])


def test_a_new_conversation_that_found_no_memory_is_told_that() -> None:
    site = Site(fast(kv_tokens=100_000))
    for id in range(6):
        site.offer(id, replace(turn(f"c{id}", 30_000), tier=ANY))
        site.until(site.now + 4.0)
    late = replace(turn("late", 30_000), tier=ANY, deadline=site.now + 5.0)
    verdict = site.offer(50, late)
    assert isinstance(verdict, Shed)
    assert verdict.reason is ShedReason.WORKING_SET


def test_who_is_turned_away_is_told_each_backends_reason() -> None:
    site = Site()
    flood(site, 900, 0.02, short(EXACT))
    for shed in site.shed.values():
        assert shed.decision.backend is None
        reasons_of = {drop.backend: drop.reason for drop in shed.decision.drops}
        assert reasons_of == {"fp8": DropReason.TIER, "bf16": DropReason.HELD}


def test_a_full_line_says_so() -> None:
    site = Site(exact(), params=PolicyParams(gate=AdmissionParams(queue=3, wait_seconds=1e6)))
    for id in range(30):
        site.offer(id, short(ANY, prompt=8000))
    assert reasons(site, list(site.shed)) == {ShedReason.QUEUE_FULL}
    assert sum(site.admission.waiting().values()) == 3


def test_a_deadline_of_ones_own_is_kept_or_refused() -> None:
    site = Site(exact())
    for id in range(20):
        site.offer(id, short(ANY, prompt=8000, deadline=4.0))
    assert site.shed
    assert reasons(site, list(site.shed)) == {ShedReason.TOO_LATE}
    site.until(30.0)
    assert len(site.went) + len(site.shed) == 20
    assert all(site.waited[id] <= 4.5 for id in site.went)


def test_a_wrong_forecast_ends_a_wait_at_its_deadline() -> None:
    site = Site(fast(kv_tokens=50_000))
    site.fleet.begin(0.0, 99, "fp8", short(ANY, prompt=40_000))
    site.fleet.first_token(5.0, 99)
    site.now = 5.0
    assert isinstance(site.offer(1, short(ANY, prompt=20_000)), Wait), "a place is expected soon"
    site.until(60.0)
    assert not site.shed
    site.until(70.0)
    assert site.shed[1].reason is ShedReason.EXPIRED


def test_a_turn_of_a_running_conversation_is_rather_late_than_lost() -> None:
    site = Site(fast())
    site.offer(1, replace(turn("c", 8000), tier=BALANCED))
    site.until(20.0)
    site.fleet.begin(20.0, 99, "fp8", short(prompt=64_000))
    assert isinstance(site.offer(2, replace(turn("c", 8100), tier=BALANCED)), Wait)
    site.until(26.0)
    assert 2 not in site.shed
    site.fleet.first_token(27.0, 99)
    site.until(28.0)
    assert site.went[2][1] == "fp8"


def test_who_left_the_line_is_gone_and_holds_nobody_up() -> None:
    site = Site(fast())
    site.fleet.begin(0.0, 99, "fp8", short(prompt=8000))
    for id in (1, 2):
        assert isinstance(site.offer(id, short()), Wait)
    site.admission.withdraw(0.1, 1)
    site.admission.withdraw(0.1, 1)
    site.fleet.first_token(0.9, 99)
    site.until(1.0)
    assert set(site.went) == {2}
    assert sum(site.admission.waiting().values()) == 0


def test_a_remote_takes_what_would_be_turned_away_and_nothing_else() -> None:
    cloud = Member("cloud", kl_bits=0.01, remote=True, max_in_flight=1000)
    site = Site(exact(), cloud)
    tier = replace(BALANCED, last_resort=True)
    flood(site, 600, 0.05, short(tier))
    went = [name for _, name in site.went.values()]
    assert not site.shed
    assert 0.2 < went.count("cloud") / 600 < 0.8
    calm = Site(exact(), cloud)
    flood(calm, 100, 0.3, short(tier))
    assert {name for _, name in calm.went.values()} == {"bf16"}


@pytest.mark.parametrize("seed", [4, 5, 6])
def test_nobody_starves(seed: int) -> None:
    """Twice what fits, of three priorities and two tenants, for a minute: each kind is served, each waits at most as long
    as it may, and the quiet tenant as well as the loud one."""
    site = Site(exact())
    rng = Random(seed)
    for id in range(1200):
        site.until(id * 0.05)
        share = "loud" if rng.random() < 0.9 else "quiet"
        site.offer(id, short(share=share))
    site.until(300.0)
    assert len(site.went) + len(site.shed) == 1200
    served = {share: [0, 0] for share in ("loud", "quiet")}
    for id, (_, facts) in site.arrived.items():
        served[facts.share or ""][id in site.went] += 1
    loud, quiet = (ok / (ok + no) for no, ok in served.values())
    assert quiet > 0.78  # what it asks for is a fifth of what fits: most of the rest met a burst of its own
    assert loud > 0.4


def test_higher_priority_goes_first() -> None:
    site = Site(fast())
    site.fleet.begin(0.0, 99, "fp8", short(prompt=8000))
    site.offer(1, short())
    site.offer(2, short(priority=5))
    site.fleet.first_token(0.9, 99)
    site.until(1.2)
    order = sorted(site.went, key=lambda id: (site.went[id][0], id == 1))
    assert order[0] == 2


def test_the_line_moves_by_the_clock_when_nothing_else_happens() -> None:
    """Work conserving: a place opens when enough prefill is done, though no event says so."""
    site = Site(fast())
    site.offer(1, short(prompt=8000))
    assert isinstance(site.offer(2, short(prompt=8000)), Wait)
    at = site.admission.next_event_at()
    assert at is not None
    assert 0.0 < at < 0.9
    assert isinstance(site.admission.advance(at + 0.02)[0][1], Go)


def test_a_new_policy_takes_over_the_line() -> None:
    site = Site(fast())
    site.fleet.begin(0.0, 99, "fp8", short(prompt=8000))
    assert isinstance(site.offer(1, short()), Wait)
    params = PolicyParams(gate=AdmissionParams(ahead_seconds=30.0))
    site.fleet.configure(0.1, [fast()], params)
    site.admission.configure(0.1, Router(params.router), params)
    assert [id for id, _ in site.admission.advance(0.1)] == [1]


def test_a_backend_that_nobody_measured_keeps_nobody_waiting() -> None:
    """What is guessed of it may be wrong by any factor; it knows itself when it is full."""
    site = Site(Member("plain", max_in_flight=500))
    promised = Tier("any", slo=SLO)
    verdicts = [site.offer(id, short(promised, prompt=4000)) for id in range(500)]
    assert all(isinstance(verdict, Go) for verdict in verdicts)
    assert isinstance(site.offer(500, short(ANY)), Wait)  # its places are taken


def test_a_promise_that_no_stream_alone_could_be_kept_holds_nobody() -> None:
    never = replace(BALANCED, slo=Slo(tpot_seconds=0.0001, ttft_seconds=60.0))
    site = Site()
    assert all(isinstance(site.offer(id, short(never, prompt=50)), Go) for id in range(3))


def test_who_waits_for_a_backend_that_said_when_it_takes_more_goes_then() -> None:
    site = Site(fast())
    site.fleet.full(0.0, "fp8", 1.5)
    assert isinstance(site.offer(1, short()), Wait)
    site.until(5.0)
    assert site.went[1] == (pytest.approx(1.5, abs=0.02), "fp8")


def test_under_overload_what_is_let_in_line_starts_in_time_and_the_rest_is_told_at_once() -> None:
    """Three times what fits: after the first wrong forecasts nobody waits in vain."""
    site = Site()
    flood(site, 4000, 0.01, short())
    waited_in_vain = [id for id, shed in site.shed.items() if shed.reason is ShedReason.EXPIRED]
    assert len(site.shed) > 2000
    assert len(waited_in_vain) < 0.02 * len(site.shed)
    assert len([id for id in waited_in_vain if id > 1000]) < 0.005 * len(site.shed)
    late = [id for id, (at, _) in site.went.items() if at - site.arrived[id][0] > SLO.ttft_seconds]
    assert len(late) < 0.01 * len(site.went)


@pytest.mark.parametrize("seed", [21, 31, 41])
def test_at_three_times_the_load_the_slowest_of_those_let_in_are_well_within_the_slo(seed: int) -> None:
    """Starts that use up the time until they must happen count against predictions, not only those that come too late."""
    rng, chat = Random(seed), SHAPES["chat"].traffic(54.0, Random(seed), seconds=60.0)
    turns = [it for one in chat.conversations for it in one.turns]
    rng.shuffle(turns)
    at, conversations = 0.0, []
    for number, one in enumerate(turns):
        at += rng.expovariate(18.0)
        if at > 40:
            break
        once = (replace(one, gap=0.0),)
        conversations.append(Conversation(at, once, BALANCED, opening=str(number)))
    machines = [Machine("fp8", FP8.name), Machine("bf16", "bf16-dflash8-tp2-v17")]
    traffic = Traffic("overload", tuple(conversations), 40.0)
    served = Simulation(machines, traffic, live(PolicyParams()), Random(3)).run()
    ttft = sorted([one.ttft for one in served if one.ttft is not None])
    assert len(ttft) > 250, "and the fleet is kept busy"
    assert ttft[int(0.95 * len(ttft))] < 1.92
