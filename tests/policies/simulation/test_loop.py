"""The event loop by hand: who comes when, who is told what, how each turn ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random

import pytest

from policies.engine import BLOCK_TOKENS
from policies.simulation import (
    Client,
    Conversation,
    End,
    Fault,
    FaultKind,
    Machine,
    Served,
    Simulation,
    Traffic,
    Turn,
)
from policies.simulation.machines import Running
from policies.types import (
    BackendView,
    ChooseReason,
    Decision,
    Go,
    Polled,
    RequestFacts,
    Result,
    Shed,
    ShedReason,
    Verdict,
    Wait,
)

FP8, BF16 = Machine("fp8", "fp8-mtp3-tp2-v17"), Machine("bf16", "bf16-dflash8-tp2-v17")
NOBODY = Decision(None, None)
CLIENT = Client(retries=2, backoff=0.5, patience=600)


class Script:
    """Answers offers as told (then always with the first machine), and notes all that it hears."""

    def __init__(self, answers: Sequence[Verdict | str] = ()) -> None:
        self.answers = list(answers)
        self.offers: list[tuple[float, RequestFacts, frozenset[str]]] = []
        self.told: list[tuple[object, ...]] = []
        self.waiting: list[tuple[float, int, Verdict]] = []

    def make(self, machines: Sequence[Running], rng: Random) -> Script:
        self.first = machines[0].name
        return self

    def offer(
        self,
        now: float,
        id: int,
        served: Served,
        facts: RequestFacts,
        tried: frozenset[str] = frozenset(),
    ) -> Verdict:
        self.offers.append((now, facts, tried))
        answer = self.answers.pop(0) if self.answers else self.first
        if isinstance(answer, str):
            return go(answer)
        if isinstance(answer, Wait):
            self.waiting.append((now + answer.seconds, id, go(self.first)))
        return answer

    def advance(self, now: float) -> Iterable[tuple[int, Verdict]]:
        over = [(id, verdict) for at, id, verdict in self.waiting if at <= now]
        self.waiting = [entry for entry in self.waiting if entry[0] > now]
        return over

    def next_event_at(self) -> float | None:
        return min([at for at, _, _ in self.waiting], default=None)

    def withdraw(self, now: float, id: int) -> None:
        self.told.append(("withdraw", now, id))
        self.waiting = [entry for entry in self.waiting if entry[1] != id]

    def first_token(self, now: float, id: int) -> None:
        self.told.append(("first", now, id))

    def finish(self, now: float, id: int, result: Result) -> None:
        self.told.append(("finish", now, id, result))

    def polled(self, now: float, name: str, numbers: Polled) -> None:
        self.told.append(("polled", now, name, numbers))

    def healthy(self, now: float, name: str, healthy: bool) -> None:
        self.told.append(("healthy", now, name, healthy))

    def of(self, what: str) -> list[tuple[object, ...]]:
        return [told[1:] for told in self.told if told[0] == what]


def go(name: str) -> Go:
    return Go(Decision(name, ChooseReason.SOONEST), BackendView(name))


def shed(retry_after: int) -> Shed:
    return Shed(ShedReason.QUEUE_FULL, retry_after, NOBODY)


def turn(prompt: int = 1000, output: int = 50, gap: float = 0.0, at: float = 0.0, first: int = 0) -> Turn:
    chain = tuple(range(first, first + (prompt + output) // BLOCK_TOKENS))
    return Turn(prompt, output, prompt, gap, chain, 4096, at=at)


def run(
    player: Script,
    *conversations: Conversation,
    machines: Sequence[Machine] = (FP8, BF16),
    faults: Sequence[Fault] = (),
    client: Client = CLIENT,
) -> list[Served]:
    traffic = Traffic("test", conversations, 100.0)
    return Simulation(machines, traffic, player.make, Random(1), faults=faults, client=client).run()


def test_a_turn_comes_after_the_answer_before_and_its_gap() -> None:
    one, two = run(Script(), Conversation(3.0, (turn(), turn(2000, gap=7.0))))
    assert one.arrived == 3.0
    assert one.ended is not None
    assert two.arrived == one.ended + 7.0


def test_a_recorded_time_holds_a_turn_back_and_never_brings_it_forward() -> None:
    _, late, early = run(
        Script(), Conversation(0.0, (turn(), turn(2000, gap=1.0, at=40.0), turn(3000, gap=1.0, at=2.0)))
    )
    assert late.arrived == 40.0
    assert late.ended is not None
    assert early.arrived == late.ended + 1.0


def test_what_was_computed_for_a_turn_is_cached_for_the_next_on_the_same_machine_only() -> None:
    turns = (turn(8000, 100), turn(9000, 100, gap=1.0), turn(10_000, 100, gap=1.0))
    first, warm, cold = run(Script(["fp8", "fp8", "bf16"]), Conversation(0.0, turns))
    assert first.cached == 0
    assert warm.cached == 8100 // BLOCK_TOKENS * BLOCK_TOKENS  # its answer's blocks, too
    assert cold.cached == 0
    assert warm.ttft is not None
    assert first.ttft is not None
    assert warm.ttft < first.ttft


def test_the_policy_hears_of_first_token_and_end_with_reported_tokens() -> None:
    player = Script()
    (only,) = run(player, Conversation(0.0, (turn(1600, 50),)))
    assert player.of("first") == [(only.first, only.id)]
    assert player.of("finish") == [(only.ended, only.id, Result(True, 1600, 50, 0))]


def test_a_policy_sees_an_estimate_the_clients_limit_and_the_chain_and_not_the_answers_length() -> None:
    player = Script()
    run(player, Conversation(0.0, (turn(1600, 50, first=7),), identity="x", bias=1.1))
    facts = player.offers[0][1]
    assert (facts.prompt.tokens, facts.output_tokens, facts.expected_output) == (1760, 4096, None)
    assert facts.prefix == (7, 8)
    assert facts.link_tokens == pytest.approx(1.1 * BLOCK_TOKENS)
    assert facts.conversation == "x"


def test_who_waits_is_sent_when_the_policy_says_so() -> None:
    (only,) = run(Script([Wait(2.5, ShedReason.FULL)]), Conversation(1.0, (turn(),)))
    assert (only.arrived, only.sent) == (1.0, 3.5)
    assert only.ttft is not None
    assert only.ttft > 2.5


def test_a_shed_turn_comes_again_after_retry_after() -> None:
    player = Script([shed(3), shed(1)])
    (only,) = run(player, Conversation(1.0, (turn(),)))
    assert [at for at, *_ in player.offers] == [1.0, 4.0, 5.0]
    assert (only.end, only.shed, only.arrived) == (End.ANSWERED, 2, 1.0)


def test_a_turn_shed_for_good_ends_its_conversation() -> None:
    player = Script([shed(1)] * 3)
    (only,) = run(player, Conversation(0.0, (turn(), turn(2000), turn(3000))))
    assert (only.end, only.missed_turns, len(player.offers)) == (End.SHED, 2, 3)


def test_without_retry_after_a_client_backs_off() -> None:
    player = Script([shed(0)])
    run(player, Conversation(0.0, (turn(),)))
    assert [at for at, *_ in player.offers] == [0.0, 0.5]


def test_a_client_that_waits_in_the_queue_too_long_is_withdrawn_and_gone() -> None:
    player = Script([Wait(1e6, ShedReason.FULL)])
    (only,) = run(player, Conversation(0.0, (turn(), turn())), client=Client(patience=30.0))
    assert (only.end, only.ended, only.missed_turns) == (End.GAVE_UP, 30.0, 1)
    assert player.of("withdraw") == [(30.0, only.id)]


def test_a_client_that_waits_on_a_machine_too_long_frees_its_place() -> None:
    player = Script()
    stuck = Fault(FaultKind.SLOW, "fp8", 0.0, 50.0, factor=0.0)
    first, second = run(
        player, Conversation(1.0, (turn(),)), Conversation(45.0, (turn(first=50),)),
        faults=[stuck], client=Client(patience=30.0),
    )  # fmt: skip
    assert (first.end, first.ended) == (End.GAVE_UP, 31.0)
    assert second.end is End.ANSWERED
    assert player.of("finish")[0] == (31.0, first.id, Result(ok=False))


def test_a_machine_that_goes_down_cuts_what_it_has_and_loses_its_cache() -> None:
    player = Script()
    turns = (turn(8000, 50), turn(8100, 4000, gap=1.0), turn(12_200, 50, gap=1.0))
    down = Fault(FaultKind.DOWN, "fp8", 5.0, 0.25)
    first, cut, after = run(player, Conversation(0.0, turns), faults=[down])
    assert first.end is cut.end is after.end is End.ANSWERED
    assert cut.attempts == 2
    assert cut.sent == 5.5  # it came again after its back-off
    assert cut.cached == 0
    assert player.of("finish")[1] == (5.0, player.of("first")[1][1], Result(ok=False))


def test_a_machine_that_cannot_be_reached_is_tried_elsewhere_at_once() -> None:
    player = Script(["fp8", "bf16"])
    (only,) = run(player, Conversation(1.0, (turn(),)), faults=[Fault(FaultKind.DOWN, "fp8", 0.5, 9.0)])
    assert [tried for *_, tried in player.offers] == [frozenset(), frozenset({"fp8"})]
    assert (only.machine, only.sent, only.end) == ("bf16", 1.0, End.ANSWERED)


def test_a_dead_machine_is_ejected_and_comes_back_after_two_good_probes() -> None:
    player = Script(["bf16"])
    long = Conversation(0.0, (turn(1000, 6000),))
    run(player, long, faults=[Fault(FaultKind.DOWN, "fp8", 3.0, 20.0)])
    (ejected_at, name, healthy), (back_at, _, again) = player.of("healthy")
    assert (name, healthy, again) == ("fp8", False, True)
    assert isinstance(ejected_at, float)
    assert isinstance(back_at, float)
    assert 3.0 < ejected_at < 3.0 + 3 * 2.2
    assert 23.0 < back_at < 23.0 + 2 * 2.2
    silent = [
        at for at, who, _ in player.of("polled") if who == "fp8" and isinstance(at, float) and 3 < at < 23
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("fault", "slower"),
    [
        (Fault(FaultKind.SLOW, "fp8", 0.0, 1e4, factor=0.25), 4.0),
        (Fault(FaultKind.COLLAPSE, "fp8", 0.0, 1e4, factor=0.0), 1 + 3 * 0.566),
    ],
)
def test_faults_slow_decoding_down_by_what_they_say(fault: Fault, slower: float) -> None:
    conversation = Conversation(1.0, (turn(100, 2000),))
    (calm,), (hurt,) = run(Script(), conversation), run(Script(), conversation, faults=[fault])
    assert calm.tpot is not None
    assert hurt.tpot is not None
    assert hurt.tpot / calm.tpot == pytest.approx(slower, rel=0.02)


def test_every_machine_is_polled_about_every_two_seconds() -> None:
    player = Script()
    run(player, Conversation(0.0, (turn(1000, 6000),)))
    for name in ("fp8", "bf16"):
        times = [at for at, who, _ in player.of("polled") if who == name and isinstance(at, float)]
        gaps = [b - a for a, b in pairwise(times)]
        assert len(gaps) > 10
        assert all(1.8 <= gap <= 2.2 for gap in gaps)
