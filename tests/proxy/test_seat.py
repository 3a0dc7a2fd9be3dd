"""Workers that ask one owner, over real socket pairs in one process: nothing is given twice, nothing is lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

from policies import Failure, RequestFacts, Result, ShedReason, Tier, Wait
from policies.limits import NOTHING, Amount, Quota
from policies.types import ContextEstimate
from proxy.app import App
from proxy.channel import Kind
from proxy.config import loads
from proxy.errors import ProxyError
from proxy.gate import Pass, Refused
from proxy.owners import Owners
from proxy.remote import Link, RemoteGate, RemoteLedger, SharedOwners
from proxy.seat import Seat, Shared
from tests.proxy.conftest import MakeGateway, config_text
from tests.scripted import ScriptedBackend, json_answer

ONE_SLOT = """
[policy.gate]
queue = 100000
wait_seconds = 600
late_seconds = 600
[policy.retry]
budget_share = 0
budget_floor = 0.1
"""
FACTS = RequestFacts(
    "tiny", Tier("balanced"), ContextEstimate(10, 5, 20), 10, deadline=1e12
)  # who waits, waits
NAMES = ("a",)


class Rig:
    """An owner, and as many workers' ends as are asked for."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.seats: list[Seat] = []
        self.links: list[Link] = []
        self.lost = 0

        async def page(accept: str) -> tuple[bytes, str]:
            return b"all", "text/plain"

        self._shared = Shared(
            app.config,
            app.clock,
            app.gate,
            app.pool,
            app.ledger,
            app.gateway.memory,
            self._told,
            page,
        )

    async def worker(self) -> tuple[Link, RemoteGate]:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        seat, link = Seat(self._shared, lambda: None), Link(self.app.clock, self._gone)
        await loop.create_unix_connection(lambda: seat.channel, sock=ours)
        await loop.create_unix_connection(lambda: link.channel, sock=theirs)
        self.seats.append(seat)
        self.links.append(link)
        return link, RemoteGate(link)

    def _told(self, who: Seat, what: tuple[str, ...]) -> None:
        for seat in self.seats:
            if seat is not who:
                seat.say(Kind.LEARNT, *what)

    def _gone(self) -> None:
        self.lost += 1

    @property
    def running(self) -> int:
        return self.app.pool.backends["a"].in_flight

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not happened():  # noqa: ASYNC110 (two loops' turns, and no event that spans them)
                await asyncio.sleep(0)

    async def idle(self) -> None:
        """Nothing runs, nobody waits, nothing is held."""
        await self.until(lambda: not self.running and not any(seat.held for seat in self.seats))
        assert not self.app.gate.waiters


@pytest.fixture
async def make_rig(tmp_path: Path) -> AsyncIterator[Callable[[int, str], Rig]]:
    made: list[Rig] = []

    def make(slots: int, more: str = ONE_SLOT) -> Rig:
        text = config_text(["http://127.0.0.1:9"], more, {"a": f"limits = {{ max_in_flight = {slots} }}"})
        made.append(Rig(App(loads(text, {}, folder=tmp_path), None, Random(7))))
        return made[-1]

    yield make
    for rig in made:
        for link in rig.links:
            link.channel.close()
        await rig.until(lambda rig=rig: rig.lost == len(rig.links))  # type: ignore[misc]
        await rig.app.close()


MakeRig = Callable[..., Rig]


def told(waits: list[Wait]) -> Callable[[Wait], None]:
    return waits.append


@pytest.mark.parametrize("contenders", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_one_slot_and_ten_thousand_contenders(make_rig: MakeRig, contenders: int) -> None:
    rig = make_rig(1)
    gates = [(await rig.worker())[1] for _ in range(4)]
    waits: list[Wait] = []
    running = most = served = 0

    async def contender(at: int) -> None:
        nonlocal running, most, served
        facts = replace(
            FACTS, priority=at % 19 - 9
        )  # a line each: looking through one of ten thousand takes long
        made = await gates[at % 4].enter(facts, NAMES, None, told(waits), traced=False)
        assert isinstance(made, Pass)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        served += 1
        made.finish(Result())

    async with asyncio.timeout(120):
        await asyncio.gather(*[contender(at) for at in range(contenders)])
    assert (served, most) == (contenders, 1)
    assert len(waits) == contenders - 1
    await rig.idle()


async def held_by(gate: RemoteGate) -> Pass:
    made = await gate.enter(FACTS, NAMES, None, told([]))
    assert isinstance(made, Pass)
    return made


async def test_what_a_worker_held_is_free_when_it_is_gone(make_rig: MakeRig) -> None:
    rig = make_rig(2)
    (link, gate), (_, other) = await rig.worker(), await rig.worker()
    await held_by(gate)
    await held_by(gate)
    waiting = asyncio.ensure_future(gate.enter(FACTS, NAMES, None, told([])))
    last = asyncio.ensure_future(held_by(other))
    await rig.until(lambda: len(rig.app.gate.waiters) == 2)
    link.channel._transport.abort()  # type: ignore[union-attr]  # kill -9
    made = await last
    assert rig.running == 1
    made.finish(Result())
    with pytest.raises(ProxyError, match="shutting down"):
        await waiting
    await rig.idle()


async def test_who_leaves_the_line_or_leaves_in_the_moment_of_its_turn_holds_nothing(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(1)
    link, gate = await rig.worker()
    left: list[int] = []
    for turns in range(12):  # somewhere among these its answer is on the way
        holder = await held_by(gate)
        task = asyncio.ensure_future(gate.enter(FACTS, NAMES, None, told([])))
        await rig.until(lambda: link.crowded)
        holder.finish(Result())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        (made,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(made, Pass):  # its turn had come, and the answer with it
            made.finish(Result())
        else:
            assert isinstance(made, asyncio.CancelledError)
            left.append(turns)
        await rig.idle()
    assert 0 in left
    assert 11 not in left


async def test_a_retry_is_paid_for_once_by_whichever_worker(make_rig: MakeRig) -> None:
    rig = make_rig(8)
    gates = [(await rig.worker())[1] for _ in range(2)]
    answers = [await gate.again(FACTS, NAMES, pays="a") for gate in gates]
    assert [isinstance(answer, Pass) for answer in answers] == [True, False]
    assert answers[1] is None
    for answer in answers:
        if isinstance(answer, Pass):
            answer.finish(Result())
    await rig.idle()


async def test_a_second_attempt_beside_the_first_is_told_by_a_call(make_rig: MakeRig) -> None:
    rig = make_rig(8)
    _, gate = await rig.worker()
    found: asyncio.Future[Pass | None] = asyncio.get_running_loop().create_future()
    gate.beside(FACTS, NAMES, found.set_result, tried=frozenset())
    made = await found
    assert made is not None
    assert made.go.view.name == "a"
    nowhere: asyncio.Future[Pass | None] = asyncio.get_running_loop().create_future()
    gate.beside(FACTS, NAMES, nowhere.set_result, tried=frozenset(NAMES))
    assert await nowhere is None
    made.finish(Result())
    await rig.idle()


async def test_a_model_that_is_configured_no_more_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig(8)
    _, gate = await rig.worker()
    facts = RequestFacts("gone", FACTS.tier, FACTS.prompt, 10)
    made = await gate.enter(facts, NAMES, None, told([]))
    assert isinstance(made, Refused)
    assert made.shed.reason is ShedReason.NO_BACKEND
    nobody = RequestFacts("tiny", Tier("gone"), FACTS.prompt, 10)
    assert isinstance(await gate.again(nobody, NAMES), Refused)


async def test_what_failed_is_held_against_the_backend_by_the_owner(make_rig: MakeRig) -> None:
    rig = make_rig(8)
    link, _ = await rig.worker()
    pool, failures = rig.app.pool, rig.app.config.health.breaker.failures_to_eject
    for _ in range(failures):
        link.say(Kind.FAILED, "a", "http://127.0.0.1:9", str(Failure.CONNECT.value))
    await rig.until(lambda: not pool.backends["a"].health.healthy)


async def test_what_one_worker_learned_of_a_response_another_knows_when_it_asks(make_rig: MakeRig) -> None:
    rig = make_rig(8)
    links = [(await rig.worker())[0] for _ in range(2)]
    one, two = (SharedOwners(link) for link in links)
    links[1].handlers[Kind.LEARNT] = partial(Owners.learn, two)
    one.learn("resp_1", "a")
    assert two.find("resp_1") is None
    assert await two.catch_up()
    assert two.find("resp_1") == one.find("resp_1") == "a"


async def test_a_response_that_is_not_known_is_looked_for_once_more(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    other: ScriptedBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = await make_gateway(backend, other)
    path, ask = "/v1/responses", {"model": "tiny", "input": "hi", "previous_response_id": "resp_1"}
    assert (await gateway.ask(path, ask)).status == 404

    async def catch_up(self: Owners) -> bool:
        self.learn("resp_1", "b")
        return True

    monkeypatch.setattr(Owners, "catch_up", catch_up)
    other.answer(json_answer({"id": "resp_2", "object": "response", "status": "completed", "output": []}))
    assert (await gateway.ask(path, ask)).headers["x-tierline-backend"] == "b"


# -- limits


async def test_a_limit_is_exact_over_workers_and_what_the_dead_held_comes_back(make_rig: MakeRig) -> None:
    rig = make_rig(8)
    rig.app.ledger.configure({"key:k": Quota(concurrent_requests=3)})
    (link, _), (other, _) = await rig.worker(), await rig.worker()
    one, two = (RemoteLedger(at, rig.app.clock) for at in (link, other))
    names, ask = ("key:k",), Amount(5)
    entries = await asyncio.gather(*[at.enter(names, ask) for at in (one, two) * 5])
    assert [entry[0] is None for entry in entries].count(True) == 3
    held = [at for at, entry in zip((one, two) * 5, entries, strict=True) if entry[0] is None]
    link.channel._transport.abort()  # type: ignore[union-attr]
    await rig.until(lambda: rig.seats[0].held == 0)
    left = held.count(two)
    again = await asyncio.gather(*[two.enter(names, ask) for _ in range(5)])
    assert [entry[0] is None for entry in again].count(True) == 3 - left
    for _ in range(3):
        two.settle(names, ask, NOTHING)
    await rig.idle()


async def test_who_leaves_before_a_limit_answers_holds_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(8)
    rig.app.ledger.configure({"key:k": Quota(concurrent_requests=1)})
    link, _ = await rig.worker()
    ledger = RemoteLedger(link, rig.app.clock)
    task = asyncio.ensure_future(ledger.enter(("key:k",), Amount(5)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.idle()
    assert (await ledger.enter(("key:k",), Amount(5)))[0] is None
    ledger.settle(("key:k",), Amount(5), NOTHING)


async def test_who_asks_when_the_owner_is_gone_is_told_that_the_gateway_stops(make_rig: MakeRig) -> None:
    rig = make_rig(8)
    link, gate = await rig.worker()
    made = await held_by(gate)
    rig.seats[0].channel.close()
    await rig.until(lambda: rig.lost == 1)
    asked: list[Awaitable[object]] = [
        gate.enter(FACTS, NAMES, None, told([])),
        RemoteLedger(link, rig.app.clock).enter(("key:k",), Amount(1)),
    ]
    for one in asked:
        with pytest.raises(ProxyError, match="shutting down"):
            await one
    made.finish(Result())  # to nobody
    await rig.idle()
