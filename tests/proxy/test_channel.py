"""What owner and workers say to each other: frames however they are cut, values that come out as they went in."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Decision, Drop, DropReason, Go, RequestFacts, Shed, ShedReason
from policies.limits import LimitKind, Refusal
from policies.trace import Trace
from policies.types import BackendView, ChooseReason, ContextEstimate, Forecast, Score, Tier
from proxy.channel import LATER_SECONDS, Channel, Frames, Kind, frame, receive
from proxy.clock import LoopClock
from proxy.messages import (
    entry_in,
    entry_out,
    facts_in,
    facts_out,
    go_in,
    go_out,
    shed_in,
    shed_out,
    trace_in,
    trace_out,
)
from tests.fake_clock import FakeClock

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=8,
)
messages = st.lists(st.lists(plain, min_size=1, max_size=4).map(tuple), min_size=1, max_size=4)


@given(st.lists(messages, min_size=1, max_size=4), st.data())
def test_frames_come_out_as_they_went_in_however_they_are_cut(said: list[Any], data: st.DataObject) -> None:
    whole = b"".join(map(frame, said))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    frames, heard = Frames(), []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        heard += frames.feed(whole[start:end])
    assert heard == [message for messages in said for message in messages]


def test_half_a_frame_says_nothing() -> None:
    assert Frames().feed(frame([(1,)])[:-1]) == []


def test_the_first_frame_can_be_had_without_a_loop() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame([(1, "a")]) + frame([(2,)]))
        assert receive(theirs) == [(1, "a")]
        assert receive(theirs) == [(2,)]
        ours.close()
        assert receive(theirs) == []


async def test_what_is_said_in_one_turn_is_one_write_in_order_and_the_end_is_told_once() -> None:
    ours, theirs = socket.socketpair()
    heard: list[tuple[Any, ...]] = []
    lost = [0, 0]

    def end(at: int) -> None:
        lost[at] += 1

    loop = asyncio.get_running_loop()
    one = Channel(LoopClock(), {1: lambda *words: heard.append(words)}, lambda: end(0))
    two = Channel(LoopClock(), {}, lambda: end(1))
    await loop.create_unix_connection(lambda: one, sock=ours)
    await loop.create_unix_connection(lambda: two, sock=theirs)
    writes = []
    write = two._transport.write  # type: ignore[union-attr]
    two._transport = type("Spy", (), {"write": lambda _, data: (writes.append(data), write(data))})()
    transport = one._transport
    for number in range(3):
        two.say(1, number)
    while len(heard) < 3:  # noqa: ASYNC110 (a turn of the loop each)
        await asyncio.sleep(0)
    assert (heard, len(writes)) == ([(0,), (1,), (2,)], 1)
    assert transport is not None
    transport.close()
    while lost != [1, 1]:  # noqa: ASYNC110
        await asyncio.sleep(0)
    two.say(1, 4)  # to nobody
    two.flush()


async def test_what_is_mentioned_goes_out_with_what_is_said_next_and_soon_in_any_case() -> None:
    ours, theirs = socket.socketpair()
    clock, heard = FakeClock(), list[tuple[Any, ...]]()
    loop = asyncio.get_running_loop()
    one = Channel(LoopClock(), {1: lambda *words: heard.append(words)}, lambda: None)
    two = Channel(clock, {}, lambda: None)
    await loop.create_unix_connection(lambda: one, sock=ours)
    await loop.create_unix_connection(lambda: two, sock=theirs)
    for said in (two.mention, two.say, two.mention):
        said(1, said.__name__)
    while len(heard) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    two.mention(1, "last")
    await asyncio.sleep(0.01)
    assert len(heard) == 3
    clock.advance(LATER_SECONDS)
    while len(heard) < 4:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert [words[0] for words in heard] == ["mention", "say", "mention", "last"]
    for channel in (one, two):
        channel.close()


def test_kinds_are_all_different() -> None:
    kinds = [value for name, value in vars(Kind).items() if name.isupper()]
    assert len(kinds) == len(set(kinds)) > 20


TIER = Tier("exact", reference=True)
FACTS = RequestFacts(
    "m", TIER, ContextEstimate(9, 5, 12), 512, "s", True, True, (1, 2**63), 3.5, "c", -1, "t", 17.25, 3.0
)
VIEW = BackendView("a", cached_tokens=32.0, forecast=Forecast(0.1, 0.2, 0.03, 4.0, 0.5, 0.6), in_flight=3)
DROPS = (Drop("b", DropReason.FULL), Drop("c", DropReason.TIER))


def through(value: Any) -> Any:
    return Frames().feed(frame([(value,)]))[0][0]


def test_facts_are_the_same_at_the_other_end() -> None:
    assert facts_in(through(facts_out(FACTS)), {"exact": TIER}) == FACTS
    assert facts_in(through(facts_out(FACTS)), {}) is None


@pytest.mark.parametrize("forecast", [VIEW.forecast, None])
def test_of_a_go_everything_that_is_asked_is_the_same(forecast: Forecast | None) -> None:
    view = BackendView("a", cached_tokens=32.0, forecast=forecast, in_flight=3)
    go = Go(Decision("a", ChooseReason.SOONEST, DROPS), view)
    found = go_in(*through(go_out(go)))
    assert (found.decision.backend, found.decision.reason, found.decision.drops) == (
        "a",
        ChooseReason.SOONEST,
        DROPS,
    )
    assert (found.view.name, found.view.forecast, found.view.cached_tokens) == ("a", forecast, 32.0)
    assert found.view.in_flight == 3


def test_a_refusal_is_the_same() -> None:
    shed = Shed(ShedReason.QUEUE_FULL, 7, Decision(None, None, DROPS))
    assert shed_in(*through(shed_out(shed))) == shed


def test_a_trace_is_the_same_and_its_scores_are_made() -> None:
    decision = Decision("a", ChooseReason.SOONEST, DROPS, lambda: (Score("a", 1.0, (("queue", 0.5),)),))
    trace = Trace(FACTS, (VIEW,), decision, "s", 17)
    found = trace_in(through(trace_out(trace)))
    assert found == trace
    assert found is not None
    assert found.decision.scores == (Score("a", 1.0, (("queue", 0.5),)),)
    assert trace_in(trace_out(None)) is None


def test_what_a_limit_says_is_the_same() -> None:
    refusal = Refusal(LimitKind.TOKENS, 1, 100, 90, 20, 3)
    for entry in ((refusal, (5, 0, 10), None), (None, None, (1, 1, 0))):
        assert entry_in(*through(entry_out(entry))) == entry
