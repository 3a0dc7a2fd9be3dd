"""An engine that gets nowhere behind a server that is well: found out, tried, ejected, and what waits for it moved."""

from __future__ import annotations

from itertools import count

from policies import Failure, HealthState
from proxy.errors import Outcome
from tests.client import Connection
from tests.fake_clock import FakeClock
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.proxy.dialects import CHAT_DIALECT
from tests.proxy.scenes import LEAST_LOAD
from tests.proxy.test_breaker_live import A_FIRST, passes, state, trials
from tests.scripted import Close, ScriptedBackend, Stall, metrics_page

SLOW = "[timeouts]\nfirst_token = 600\ngap = 600\nkeepalive_after = 0\n"


async def made(
    make_gateway: MakeGateway, *backends: ScriptedBackend, health: str = ""
) -> tuple[Gateway, FakeClock]:
    clock = FakeClock()
    config = LEAST_LOAD + SLOW + f"[health]\n{health}\n"
    gateway = await make_gateway(*backends, config=config, per_backend=A_FIRST, clock=clock)
    await passes(gateway, clock, 1.0)
    return gateway, clock


async def begun(client: Connection, backend: ScriptedBackend) -> None:
    """A stream of this backend that has begun, and then stands still."""
    number = len(backend.requests)
    backend.answer([*CHAT_DIALECT.begin(), Stall(), Close()])
    client.send(CHAT, chat(stream=True))
    await client.read_until(CHAT_DIALECT.begun_bytes)
    await backend.received(number)


async def test_silent_streams_put_a_backend_in_doubt_and_a_dead_engine_out(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway, clock = await made(make_gateway, backend, other)
    async with await gateway.connect() as one, await gateway.connect() as two:
        await begun(one, backend)
        await begun(two, backend)
        backend.default = lambda request: [Stall()]  # the trial, too: /health is well all the time
        await passes(gateway, clock, 19.0)
        assert state(gateway) is HealthState.HEALTHY
        await passes(gateway, clock, 4.0)
        assert state(gateway) is HealthState.SUSPECT
        assert (await gateway.chat()).headers["x-tierline-backend"] == "b"
        await passes(gateway, clock, 11.0)  # the trial's time
        assert state(gateway) is HealthState.EJECTED
        assert len(trials(backend)) == 1
        for client in (one, two):  # long before the gap's end
            error = CHAT_DIALECT.error_at_end(await client.read())
            assert "makes no progress" in error["message"]
    await gateway.ended(Outcome.OK, *[Outcome.UPSTREAM_TIMEOUT] * 2)


async def test_one_stream_that_gets_tokens_is_progress_and_so_is_a_good_trial(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway, clock = await made(make_gateway, backend, other)
    async with await gateway.connect() as client:
        await begun(client, backend)
        await passes(gateway, clock, 25.0)  # a trial in between, which is good
        assert [t.path for t in trials(backend)] == ["/v1/completions"]
        assert state(gateway) is HealthState.HEALTHY
        (exchange,) = gateway.app.gateway.exchanges  # a good trial: it is only this stream, and it goes on
        assert exchange.heard() is not None
        backend.release()
        await client.read()


async def test_what_waits_for_its_first_token_on_a_dead_engine_is_answered_elsewhere(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway, clock = await made(make_gateway, backend, other)
    async with await gateway.connect() as client, await gateway.connect() as waiting:
        await begun(client, backend)
        backend.default = lambda request: [Stall()]
        waiting.send(CHAT, chat(stream=True))
        await backend.received(1)
        await passes(gateway, clock, 35.0)
        response = await waiting.read()
        assert (response.status, response.headers["x-tierline-backend"]) == (200, "b")
        await client.read()
    record = await gateway.record(1)
    assert record.failures == (("a", Failure.TIMEOUT),)


async def test_counters_that_stand_still_while_it_claims_to_run_put_it_in_doubt(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    """Other people's requests: none of ours runs there."""
    backend.pages["/metrics"] = metrics_page(running=3, generated=100)
    other.pages["/metrics"] = metrics_page(running=0, generated=100)
    gateway, clock = await made(make_gateway, backend, other)
    assert gateway.app.pool.backends["a"].moved_at is not None
    backend.default = lambda request: [Stall()]
    await passes(gateway, clock, 24.0)
    assert [state(gateway, name) for name in "ab"] == [HealthState.SUSPECT, HealthState.HEALTHY]
    await passes(gateway, clock, 11.0)
    assert state(gateway) is HealthState.EJECTED


async def test_counters_that_move_are_progress(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    tokens = count(100)
    backend.pages["/metrics"] = lambda request: metrics_page(running=3, generated=next(tokens))
    gateway, clock = await made(make_gateway, backend, other)
    await passes(gateway, clock, 60.0)
    assert state(gateway) is HealthState.HEALTHY
    assert trials(backend) == []


async def test_a_client_that_does_not_read_makes_its_backend_no_suspect(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway, clock = await made(make_gateway, backend, other)
    async with await gateway.connect() as client:
        await begun(client, backend)
        (exchange,) = gateway.app.gateway.exchanges
        exchange.answer._connection.pause_writing()
        await passes(gateway, clock, 40.0)
        assert state(gateway) is HealthState.HEALTHY
        exchange.answer._connection.resume_writing()
        backend.release()
        await client.read()


async def test_nobody_looks_when_told_not_to(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway, clock = await made(make_gateway, backend, other, health="stuck_seconds = 0")
    async with await gateway.connect() as client:
        await begun(client, backend)
        await passes(gateway, clock, 100.0)
        assert state(gateway) is HealthState.HEALTHY
        backend.release()
        await client.read()
