"""Hedging: a second attempt beside one that does not begin to answer. Who wins, who is let go, and that nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from policies import Failure
from proxy.errors import Hedged, Outcome
from proxy.record import Record
from proxy.relay import KEEPALIVE
from tests.client import Connection
from tests.fake_clock import FakeClock
from tests.faults.leaks import Leaks
from tests.proxy.conftest import Gateway, MakeGateway
from tests.proxy.dialects import CHAT_DIALECT, DIALECTS, Dialect
from tests.proxy.scenes import QUIET, eventually, polled
from tests.scripted import Chunk, Head, Raw, Reset, ScriptedBackend, Stall, Step, WaitFor, error_json

HEDGE = "[tiers.fast]\nhedge = { after = 2.0, factor = 0.0, share = 0.05 }\n"
CONFIG = QUIET + '[policy]\nname = "least_load"\ndefault_tier = "fast"\n'
CONFIG += "[models.tiny]\nlimits = { tokens_per_minute = 1_000_000, concurrent_requests = 9 }\n"
LIMITS = "[timeouts]\nfirst_token = 60\nfirst_token_per_1k_tokens = 0\ngap = 20\nkeepalive_after = 0\n"
A_FIRST = {"b": "limits.max_in_flight = 2"}
HEDGED = [dialect for dialect in DIALECTS if dialect.path != "/v1/responses"]
each_dialect = pytest.mark.parametrize("dialect", HEDGED, ids=str)
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


class At:
    """One gateway with two backends, `slow` asked first; one client."""

    def __init__(
        self,
        gateway: Gateway,
        clock: FakeClock,
        client: Connection,
        slow: ScriptedBackend,
        other: ScriptedBackend,
    ) -> None:
        self.gateway, self.clock, self.client, self.slow, self.other = gateway, clock, client, slow, other
        self.go = asyncio.Event()

    async def ask(self, dialect: Dialect = CHAT_DIALECT, *, stream: bool = True) -> None:
        """Until the first backend has the request."""
        self.client.send(dialect.path, dialect.request(stream=stream))
        await self.slow.received()

    async def hedge(self, seconds: float = 2.1) -> None:
        """Until the second one has it, too."""
        self.clock.advance(seconds)
        await self.other.received()

    async def record(self, outcome: Outcome, *, attempts: int, hedge: Hedged | None) -> Record:
        record = await self.gateway.record()
        assert (record.outcome, record.attempts, record.hedge) == (outcome, attempts, hedge)
        return record


@asynccontextmanager
async def scene(
    make_gateway: MakeGateway,
    slow: ScriptedBackend,
    other: ScriptedBackend,
    config: str = HEDGE + LIMITS,
    per: dict[str, str] | None = None,
) -> AsyncIterator[At]:
    """Nothing is left behind, whatever happens in it."""
    clock = FakeClock()
    gateway = await make_gateway(
        slow, other, config=CONFIG + config, per_backend=A_FIRST | (per or {}), clock=clock
    )
    await polled(gateway)
    leaks = await Leaks.of(gateway, [slow, other])
    async with await gateway.connect() as client:
        yield At(gateway, clock, client, slow, other)
    await leaks.none_left()


def steps(dialect: Dialect, stream: bool) -> list[Step]:
    return dialect.stream() if stream else dialect.whole()


@each_dialect
@each_way
async def test_the_second_answers_when_the_first_does_not_begin(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    other: ScriptedBackend,
    dialect: Dialect,
    stream: bool,
) -> None:
    async with scene(make_gateway, backend, other) as at:
        backend.answer([Stall()])
        other.answer(steps(dialect, stream))
        await at.ask(dialect, stream=stream)
        at.clock.advance(1.9)
        assert not other.requests
        await at.hedge(0.2)
        response = await at.client.read()
        assert (response.status, response.complete) == (200, True)
        if stream:
            assert response.body == b"".join(dialect.events)
        assert response.headers["x-tierline-backend"] == "b"
        assert (response.headers["x-tierline-attempts"], response.headers["x-tierline-reason"]) == (
            "2",
            "retry",
        )
        assert (await at.gateway.record()).charged_tokens, "once, for the one that answered"
        assert (await backend.closed()).by_peer, "the slow one stops generating"
        record = await at.record(Outcome.OK, attempts=2, hedge=Hedged.WON)
        assert (record.backend, record.hedged_to, record.failures) == ("b", "b", ())
        assert record.hedged_after == pytest.approx(2.1, abs=0.2)
        assert record.backoff_seconds == pytest.approx(2.1, abs=0.2)
        assert at.gateway.app.pool.backends["a"].health.errors == 0, "slow this once is no failure"


@each_dialect
@each_way
async def test_the_first_answers_after_all_and_the_second_is_let_go(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    other: ScriptedBackend,
    dialect: Dialect,
    stream: bool,
) -> None:
    async with scene(make_gateway, backend, other) as at:
        backend.answer([WaitFor(at.go), *steps(dialect, stream)])
        other.answer([Stall()])
        await at.ask(dialect, stream=stream)
        await at.hedge()
        at.clock.advance(0.5)
        at.go.set()
        response = await at.client.read()
        assert (response.status, response.headers["x-tierline-backend"]) == (200, "a")
        assert response.headers["x-tierline-attempts"] == "2"
        assert (await other.closed()).by_peer
        record = await at.record(Outcome.OK, attempts=2, hedge=Hedged.LOST)
        assert (record.backend, record.hedged_to, record.failures) == ("a", "b", ())
        assert record.backoff_seconds == 0
        if stream:
            _, found = await at.gateway.records.get()
            assert found.upstream_ttft == found.ttft == pytest.approx(2.6, abs=0.2), (
                "from its own dispatch on"
            )
        assert at.gateway.app.pool.backends["b"].health.errors == 0


async def test_once_the_answer_has_begun_nothing_is_sent_twice(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    async with scene(make_gateway, backend, other) as at:
        backend.answer(
            [*CHAT_DIALECT.begin(), WaitFor(at.go), *map(Chunk, CHAT_DIALECT.events[2:]), Raw(b"0\r\n\r\n")]
        )
        await at.ask()
        await at.client.read_until(CHAT_DIALECT.begun_bytes)
        at.clock.advance(10)
        at.go.set()
        assert (await at.client.read()).complete
        assert not other.requests
        await at.record(Outcome.OK, attempts=1, hedge=None)


async def test_an_unstreamed_answer_that_has_begun_is_waited_for(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    body = b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}'
    async with scene(make_gateway, backend, other) as at:
        head = Head(200, [("content-type", "application/json"), ("content-length", str(len(body)))])
        backend.answer([head, WaitFor(at.go), Raw(body)])
        await at.ask(stream=False)
        (exchange,) = at.gateway.app.gateway.exchanges
        await eventually(lambda: exchange._relay is not None and exchange._relay.answering, "the head")
        at.clock.advance(10)
        at.go.set()
        assert (await at.client.read()).body == body
        assert not other.requests
        await at.record(Outcome.OK, attempts=1, hedge=None)


@each_way
async def test_one_that_fails_meanwhile_is_counted_and_the_other_is_its_second_attempt(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, stream: bool
) -> None:
    async with scene(make_gateway, backend, other) as at:
        later = asyncio.Event()
        backend.answer([WaitFor(at.go), Reset()])
        other.answer([WaitFor(later), *steps(CHAT_DIALECT, stream)])
        await at.ask(stream=stream)
        await at.hedge()
        at.go.set()
        pool = at.gateway.app.pool
        await eventually(lambda: pool.backends["a"].in_flight == 0, "the failed one's place to be free")
        assert pool.backends["b"].in_flight == 1
        later.set()
        response = await at.client.read()
        assert (response.status, response.headers["x-tierline-backend"]) == (200, "b")
        record = await at.record(Outcome.OK, attempts=2, hedge=Hedged.WON)
        assert record.failures == (("a", Failure.CUT),)
        assert len(backend.requests) == len(other.requests) == 1


@each_way
async def test_the_second_that_fails_leaves_the_first_to_answer(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, stream: bool
) -> None:
    async with scene(make_gateway, backend, other) as at:
        backend.answer([WaitFor(at.go), *steps(CHAT_DIALECT, stream)])
        other.answer(error_json(500, "no"))
        await at.ask(stream=stream)
        await at.hedge()
        await eventually(lambda: at.gateway.app.pool.backends["b"].in_flight == 0, "the failed one's place")
        at.go.set()
        response = await at.client.read()
        assert (response.status, response.headers["x-tierline-backend"]) == (200, "a")
        record = await at.record(Outcome.OK, attempts=2, hedge=Hedged.LOST)
        assert record.failures == (("b", Failure.ERROR),)


@each_way
async def test_when_both_fail_the_last_failure_is_told(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, stream: bool
) -> None:
    async with scene(make_gateway, backend, other) as at:
        backend.answer([WaitFor(at.go), Reset()])
        other.answer(error_json(503, "no engine"))
        await at.ask(stream=stream)
        await at.hedge()
        await eventually(lambda: at.gateway.app.pool.backends["b"].in_flight == 0, "the failed one's place")
        at.go.set()
        response = await at.client.read()
        assert (response.status, response.headers["x-should-retry"]) == (502, "false")
        record = await at.record(Outcome.UPSTREAM_CUT, attempts=2, hedge=Hedged.FAILED)
        assert record.failures == (("b", Failure.ERROR), ("a", Failure.CUT))


async def test_when_both_fail_a_third_backend_answers(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    async with ScriptedBackend() as third:
        clock = FakeClock()
        per = A_FIRST | {"c": "limits.max_in_flight = 1"}
        gateway = await make_gateway(
            backend, other, third, config=CONFIG + HEDGE + LIMITS, per_backend=per, clock=clock
        )
        await polled(gateway)
        gate = asyncio.Event()
        backend.answer([WaitFor(gate), Reset()])
        other.answer(error_json(500, "no"))
        third.answer(CHAT_DIALECT.stream())
        async with await gateway.connect() as client:
            client.send(CHAT_DIALECT.path, CHAT_DIALECT.request(stream=True))
            await backend.received()
            clock.advance(2.1)
            await other.received()
            await eventually(lambda: gateway.app.pool.backends["b"].in_flight == 0, "the failed one's place")
            gate.set()
            response = await client.read()
        assert (response.status, response.headers["x-tierline-backend"]) == (200, "c")
        assert response.headers["x-tierline-attempts"] == "3"
        await gateway.ended(Outcome.OK)


@each_way
async def test_what_one_rejects_is_not_waited_for_elsewhere(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, stream: bool
) -> None:
    async with scene(make_gateway, backend, other) as at:
        backend.answer([Stall()])
        other.answer(error_json(400, "no such field"))
        await at.ask(stream=stream)
        await at.hedge()
        assert (await at.client.read()).status == 400
        assert (await backend.closed()).by_peer
        await at.record(Outcome.UPSTREAM_REJECTED, attempts=2, hedge=Hedged.FAILED)


@each_way
async def test_a_client_that_leaves_while_both_run_stops_both(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, stream: bool
) -> None:
    async with scene(make_gateway, backend, other) as at:
        backend.answer([Stall()])
        other.answer([Stall()])
        await at.ask(stream=stream)
        await at.hedge()
        at.client.close()
        assert (await backend.closed()).by_peer
        assert (await other.closed()).by_peer
        await at.record(Outcome.CANCELLED, attempts=2, hedge=Hedged.LEFT)


async def test_a_client_that_leaves_the_winner_frees_its_place(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    async with scene(make_gateway, backend, other) as at:
        backend.answer([Stall()])
        other.answer([*CHAT_DIALECT.begin(), Stall()])
        await at.ask()
        await at.hedge()
        await at.client.read_until(CHAT_DIALECT.begun_bytes)
        assert at.gateway.app.pool.backends["a"].in_flight == 0
        at.client.close()
        assert (await other.closed()).by_peer
        await at.record(Outcome.CANCELLED, attempts=2, hedge=Hedged.WON)


async def test_a_gateway_that_stops_ends_both_with_one_error(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    async with scene(make_gateway, backend, other) as at:
        backend.answer([Stall()])
        other.answer([Stall()])
        await at.ask()
        await at.hedge()
        at.gateway.app.gateway.interrupt()
        response = await at.client.read()
        assert (response.status, response.json["error"]["code"]) == (503, "shutdown")
        assert (await backend.closed()).by_peer
        assert (await other.closed()).by_peer
        await at.record(Outcome.SHUTDOWN, attempts=2, hedge=Hedged.LEFT)


async def test_a_drain_lets_the_race_finish(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    async with scene(make_gateway, backend, other) as at:
        backend.answer([Stall()])
        other.answer([WaitFor(at.go), *CHAT_DIALECT.stream()])
        await at.ask()
        await at.hedge()
        at.gateway.app.gateway.drain()
        at.go.set()
        response = await at.client.read()
        assert (response.status, response.complete) == (200, True)
        await at.record(Outcome.OK, attempts=2, hedge=Hedged.WON)


async def test_the_winner_that_breaks_in_the_middle_is_told_and_nothing_is_sent_again(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    async with scene(make_gateway, backend, other) as at:
        backend.answer([Stall()])
        other.answer([*CHAT_DIALECT.begin(), WaitFor(at.go), Reset()])
        await at.ask()
        await at.hedge()
        await at.client.read_until(CHAT_DIALECT.begun_bytes)
        at.go.set()
        CHAT_DIALECT.error_at_end(await at.client.read())
        record = await at.record(Outcome.UPSTREAM_CUT, attempts=2, hedge=Hedged.WON)
        assert record.failures == (("b", Failure.CUT),)
        assert len(backend.requests) == 1


async def test_a_connection_that_does_not_come_is_hedged_too(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    """The delay counts from the decision, not from a connection."""
    gate = asyncio.Event()
    async with scene(make_gateway, backend, other) as at:
        pool = at.gateway.app.pool.backends["a"].connections

        async def connect() -> None:
            await gate.wait()

        pool.connect = connect  # type: ignore[method-assign,assignment]
        other.answer(CHAT_DIALECT.stream())
        at.client.send(CHAT_DIALECT.path, CHAT_DIALECT.request(stream=True))
        await eventually(lambda: at.gateway.app.pool.backends["a"].in_flight == 1, "the first attempt")
        await at.hedge()
        response = await at.client.read()
        assert (response.status, response.headers["x-tierline-backend"]) == (200, "b")
        await at.record(Outcome.OK, attempts=2, hedge=Hedged.WON)


async def test_comments_come_once_and_the_winner_goes_on_with_them(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    limits = LIMITS.replace("keepalive_after = 0", "keepalive_after = 5\nkeepalive_interval = 5")
    events = CHAT_DIALECT.events
    async with scene(make_gateway, backend, other, HEDGE + limits) as at:
        later = asyncio.Event()
        backend.answer([Stall()])
        head, *chunks = CHAT_DIALECT.stream()
        other.answer([WaitFor(at.go), head, *chunks[:2], WaitFor(later), *chunks[2:]])
        await at.ask()
        await at.hedge()
        at.clock.advance(3.0)
        await at.client.read_until(KEEPALIVE)
        at.clock.advance(5.1)
        await at.client.read_until(KEEPALIVE * 2)
        assert at.client.response.body == KEEPALIVE * 2, "not one of each"
        at.go.set()
        await at.client.read_until(KEEPALIVE * 2 + b"".join(events[:2]))
        at.clock.advance(5.1)
        await at.client.read_until(b"".join(events[:2]) + KEEPALIVE)
        later.set()
        response = await at.client.read()
        assert response.body.replace(KEEPALIVE, b"") == b"".join(events)
        await at.record(Outcome.OK, attempts=2, hedge=Hedged.WON)


# -- when there is none -----------------------------------------------------------------------------------------------


async def test_a_tiers_share_bounds_them(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    """The first may be; the next twenty earn one more."""
    async with scene(make_gateway, backend, other) as at:
        for number in range(2):
            gate = asyncio.Event()
            backend.answer([WaitFor(gate), *CHAT_DIALECT.stream()])
            other.answer([Stall()])
            at.client.send(CHAT_DIALECT.path, CHAT_DIALECT.request(stream=True))
            await backend.received(number)
            at.clock.advance(2.1)
            if number == 0:
                await other.received()
            gate.set()
            assert (await at.client.read()).status == 200
        assert len(other.requests) == 1
        await at.gateway.records.get(1)
        found = [record.hedge for record, _ in at.gateway.records.closed]
        assert found == [Hedged.LOST, Hedged.DENIED]
        assert at.gateway.records.closed[1][0].attempts == 1


async def test_a_backend_with_something_to_start_gets_none(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    async with scene(make_gateway, backend, other, per={"b": "limits.max_in_flight = 1"}) as at:
        at.gateway.app.pool.set_draining("b", draining=True)
        backend.answer([WaitFor(at.go), *CHAT_DIALECT.stream()])
        await at.ask()
        at.clock.advance(2.1)
        at.go.set()
        assert (await at.client.read()).status == 200
        assert not other.requests
        await at.record(Outcome.OK, attempts=1, hedge=Hedged.NOWHERE)


@pytest.mark.parametrize(
    "config",
    [
        LIMITS,
        HEDGE.replace("fast", "balanced") + LIMITS,
        HEDGE + LIMITS + "[policy.retry]\nmax_attempts = 1\n",
    ],
    ids=["off", "another tier's", "no second attempts"],
)
async def test_without_it_nobody_is_asked_twice(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, config: str
) -> None:
    async with scene(make_gateway, backend, other, config) as at:
        backend.answer([WaitFor(at.go), *CHAT_DIALECT.stream()])
        await at.ask()
        at.clock.advance(10)
        at.go.set()
        assert (await at.client.read()).status == 200
        assert not other.requests
        await at.record(Outcome.OK, attempts=1, hedge=None)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/v1/audio/speech"])
async def test_what_a_backend_keeps_or_does_not_generate_is_not_asked_twice(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, path: str
) -> None:
    async with scene(make_gateway, backend, other) as at:
        backend.answer([WaitFor(at.go), *DIALECTS[3].whole()])
        at.client.send(path, {"model": "tiny", "input": "hi"})
        await backend.received()
        at.clock.advance(10)
        at.go.set()
        assert (await at.client.read()).status == 200
        assert not other.requests
        await at.record(Outcome.OK, attempts=1, hedge=None)


async def test_it_can_be_switched_on_without_a_restart(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    async with scene(make_gateway, backend, other, LIMITS) as at:
        app = at.gateway.app
        tiers = dict(app.config.tiers)
        fast = tiers["fast"]
        tiers["fast"] = fast.model_copy(
            update={"hedge": fast.hedge.model_copy(update={"after": 2.0, "factor": 0.0})}
        )
        app.configure(app.config.model_copy(update={"tiers": tiers}))
        backend.answer([Stall()])
        other.answer(CHAT_DIALECT.stream())
        await at.ask()
        await at.hedge()
        assert (await at.client.read()).headers["x-tierline-backend"] == "b"
        await at.record(Outcome.OK, attempts=2, hedge=Hedged.WON)
