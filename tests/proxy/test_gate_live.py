"""Waiting to be let in, seen from outside: who waits is served as soon as there is room, and leaves without a trace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from policies import Verdict
from proxy.errors import Outcome
from tests.client import Response
from tests.fake_clock import FakeClock
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.proxy.scenes import QUIET, eventually, settled
from tests.proxy.test_cancel import leave
from tests.scripted import ScriptedBackend, Stall, chat_json

ONE = "limits.max_in_flight = 1"


def waiting(gateway: Gateway) -> int:
    return sum(gateway.app.gate.waiting().values())


async def busy(gateway: Gateway, backend: ScriptedBackend) -> asyncio.Task[Response]:
    """A request that holds the only place until `backend.release()`."""
    backend.answer([Stall(), *chat_json()])
    task = asyncio.ensure_future(gateway.chat())
    await backend.received(len(backend.requests))
    return task


async def in_line(gateway: Gateway, request: Awaitable[Response]) -> asyncio.Task[Response]:
    before = waiting(gateway)
    task = asyncio.ensure_future(request)
    await eventually(lambda: waiting(gateway) == before + 1, "a request in line")
    return task


@pytest.fixture
async def gateway(make_gateway: MakeGateway, backend: ScriptedBackend) -> Gateway:
    return await make_gateway(backend, per_backend={"a": ONE}, config=QUIET)


async def test_who_waits_is_served_when_a_place_is_free(gateway: Gateway, backend: ScriptedBackend) -> None:
    running = await busy(gateway, backend)
    queued = [await in_line(gateway, gateway.chat(f"q{n}")) for n in range(3)]
    assert len(backend.requests) == 1
    backend.release()
    assert [(await task).status for task in (running, *queued)] == [200] * 4
    texts = [request.json["messages"][0]["content"] for request in backend.requests]
    assert texts == ["hi", "q0", "q1", "q2"], "in the order of arrival"
    await gateway.ended(*[Outcome.OK] * 4)
    first, *others = [record for record, _ in gateway.records.closed]
    assert first.queued_at is None
    for record in others:
        assert record.queued_at is not None
        assert record.admitted_at is not None
        assert record.admitted_at > record.queued_at
        assert record.predicted_wait is not None
    assert waiting(gateway) == 0


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_a_client_that_leaves_the_line_is_out_of_it_at_once(
    gateway: Gateway, backend: ScriptedBackend, how: str
) -> None:
    running = await busy(gateway, backend)
    leaver = await gateway.connect()
    leaver.send(CHAT, chat("leaves"))
    await eventually(lambda: waiting(gateway) == 1, "a request in line")
    stays = await in_line(gateway, gateway.chat("stays"))
    leave(leaver, how)
    await eventually(lambda: waiting(gateway) == 1, "one left in line")
    backend.release()
    assert ((await running).status, (await stays).status) == (200, 200)
    assert [request.json["messages"][0]["content"] for request in backend.requests] == ["hi", "stays"]
    outcomes = sorted(record.outcome for record, _ in gateway.records.closed)
    assert outcomes == sorted([Outcome.CANCELLED, Outcome.OK, Outcome.OK])
    gateway.assert_idle()


async def test_who_leaves_in_the_moment_it_is_let_in_frees_its_place(
    gateway: Gateway, backend: ScriptedBackend
) -> None:
    running = await busy(gateway, backend)
    leaver = await gateway.connect()
    leaver.send(CHAT, chat("leaves"))
    await eventually(lambda: waiting(gateway) == 1, "a request in line")
    (task,) = [
        e._task
        for e in gateway.app.gateway.exchanges
        if e.record.queued_at is not None and e._task is not None
    ]
    held = gateway.app.pool.backends["a"]
    pump = gateway.app.gate.pump

    def pump_and_cancel() -> None:
        pump()
        task.cancel()  # the answer is set, its task has not run yet

    gateway.app.gate.pump = pump_and_cancel  # type: ignore[method-assign]
    backend.release()
    await running
    gateway.app.gate.pump = pump  # type: ignore[method-assign]
    await eventually(lambda: held.in_flight == 0, "the place to be free")
    assert (await gateway.chat()).status == 200
    leaver.close()


async def test_a_deadline_that_cannot_be_met_is_told_at_once(
    gateway: Gateway, backend: ScriptedBackend
) -> None:
    running = await busy(gateway, backend)
    queued = [await in_line(gateway, gateway.chat()) for _ in range(4)]
    response = await gateway.chat(headers={"x-tierline-deadline": "0.001"})
    assert response.status == 429
    assert response.json["error"]["code"] == "rate_limit_exceeded"
    assert response.headers["x-tierline-reason"] == "too_late"
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert waiting(gateway) == 4
    backend.release()
    assert [(await task).status for task in (running, *queued)] == [200] * 5
    assert sum(record.outcome is Outcome.SHED for record, _ in gateway.records.closed) == 1


async def test_a_wait_that_comes_to_nothing_ends_with_the_deadline(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(backend, per_backend={"a": ONE}, config=QUIET, clock=clock)
    running = await busy(gateway, backend)
    late = await in_line(gateway, gateway.chat(headers={"x-tierline-deadline": "20"}))
    clock.advance(10)
    await asyncio.sleep(0)
    assert not late.done()
    clock.advance(11)
    response = await late
    assert (response.status, response.headers["x-tierline-reason"]) == (429, "expired")
    assert 1 <= int(response.headers["retry-after"]) <= 60
    backend.release()
    assert (await running).status == 200
    await settled(gateway)


async def test_a_full_line_takes_nobody(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    config = QUIET + "[policy.gate]\nqueue = 2\n"
    gateway = await make_gateway(backend, per_backend={"a": ONE}, config=config)
    running = await busy(gateway, backend)
    queued = [await in_line(gateway, gateway.chat()) for _ in range(2)]
    response = await gateway.chat()
    assert (response.status, response.headers["x-tierline-reason"]) == (429, "queue_full")
    backend.release()
    assert [(await task).status for task in (running, *queued)] == [200] * 3


async def test_priority_goes_first_and_a_client_cannot_raise_its_own(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    config = QUIET + (
        '[server]\nport = 0\n[[server.keys]]\nname = "slow"\nkey = "env:SLOW"\n'
        '[[server.keys]]\nname = "fast"\nkey = "env:FAST"\npriority = 5\n'
    )
    env = {"SLOW": "sk-slow", "FAST": "sk-fast"}
    gateway = await make_gateway(backend, per_backend={"a": ONE}, config=config, env=env)

    def ask(key: str, text: str, **headers: str) -> Awaitable[Response]:
        return gateway.chat(text, headers={"authorization": f"Bearer {env[key]}", **headers})

    backend.answer([Stall(), *chat_json()])
    running = asyncio.ensure_future(ask("SLOW", "first"))
    await backend.received(0)
    queued = [
        await in_line(gateway, ask("SLOW", "greedy", **{"x-tierline-priority": "9"})),
        await in_line(gateway, ask("FAST", "humble", **{"x-tierline-priority": "-3"})),
        await in_line(gateway, ask("FAST", "fast")),
    ]
    backend.release()
    assert [(await task).status for task in (running, *queued)] == [200] * 4
    texts = [request.json["messages"][0]["content"] for request in backend.requests]
    assert texts == ["first", "fast", "greedy", "humble"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-tierline-deadline", "soon"),
        ("x-tierline-deadline", "0"),
        ("x-tierline-deadline", "-1"),
        ("x-tierline-deadline", "nan"),
        ("x-tierline-deadline", "1e99"),
        ("x-tierline-priority", "high"),
        ("x-tierline-priority", "1.5"),
    ],
)
async def test_a_header_that_is_no_such_number_is_a_400(
    gateway: Gateway, backend: ScriptedBackend, name: str, value: str
) -> None:
    response = await gateway.chat(headers={name: value})
    assert (response.status, response.json["error"]["code"]) == (400, "bad_header")
    assert response.json["error"]["param"] == name
    assert backend.requests == []


async def test_our_headers_stay_here(gateway: Gateway, backend: ScriptedBackend) -> None:
    headers = {"x-tierline-deadline": "30", "x-tierline-priority": "-1", "x-tierline-admin-key": "secret"}
    assert (await gateway.chat(headers=headers)).status == 200
    assert not any(name.lower().startswith("x-tierline") for name, _ in backend.requests[0].headers)


async def test_a_wait_that_seems_over_and_is_not_does_not_spin(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(backend, per_backend={"a": ONE}, config=QUIET, clock=clock)
    running = await busy(gateway, backend)
    queued = await in_line(gateway, gateway.chat("queued"))
    looks = 0
    admission = gateway.app.gate._admission
    advance = admission.advance

    def count(now: float) -> list[tuple[int, Verdict]]:
        nonlocal looks
        looks += 1
        return advance(now)

    admission.advance = count  # type: ignore[method-assign]
    admission.next_event_at = lambda: clock.now() - 1.0  # type: ignore[method-assign]
    gateway.app.gate.pump()
    clock.advance(0.1)
    assert 50 < looks < 150
    backend.release()
    assert ((await running).status, (await queued).status) == (200, 200)


# -- the gateway stops ----------------------------------------------------------------------------------------


async def test_who_waits_when_the_gateway_stops_is_still_served_if_there_is_time(
    gateway: Gateway, backend: ScriptedBackend
) -> None:
    running = await busy(gateway, backend)
    queued = await in_line(gateway, gateway.chat("queued"))
    stopping = asyncio.ensure_future(gateway.app.drain())
    await eventually(lambda: gateway.app.gateway.draining, "draining")
    backend.release()
    assert ((await running).status, (await queued).status) == (200, 200)
    await stopping


async def test_who_still_waits_at_the_limit_is_told_so(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    clock = FakeClock()
    config = QUIET + "[server]\nport = 0\ndrain_timeout = 5.0\n"
    gateway = await make_gateway(backend, per_backend={"a": ONE}, config=config, clock=clock)
    running = await busy(gateway, backend)
    queued = await in_line(gateway, gateway.chat("queued"))
    stopping = asyncio.ensure_future(gateway.app.drain())
    await eventually(lambda: gateway.app.gateway.draining, "draining")
    clock.advance(5.5)
    responses = [await running, await queued]
    assert [response.status for response in responses] == [503, 503]
    assert {response.json["error"]["code"] for response in responses} == {"shutdown"}
    await stopping
    assert waiting(gateway) == 0
    assert len(backend.requests) == 1
    await gateway.ended(Outcome.SHUTDOWN, Outcome.SHUTDOWN)


# -- what waits for what --------------------------------------------------------------------------------------


async def test_a_request_that_only_one_backend_may_serve_blocks_no_other(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    per_backend = {"a": f"quality.reference = true\n{ONE}", "b": "quality.kl_bits = 0.01"}
    gateway = await make_gateway(backend, other, per_backend=per_backend, config=QUIET)
    backend.answer([Stall(), *chat_json()])
    exact = {"x-quality-tier": "exact"}
    running = asyncio.ensure_future(gateway.chat(headers=exact))
    await backend.received(0)
    queued = await in_line(gateway, gateway.chat(headers=exact))
    for _ in range(3):
        response = await gateway.chat()
        assert (response.status, response.headers["x-tierline-backend"]) == (200, "b")
    assert not queued.done()
    backend.release()
    assert [(await task).headers["x-tierline-backend"] for task in (running, queued)] == ["a", "a"]


async def test_a_drained_fleet_refuses_who_waited(gateway: Gateway, backend: ScriptedBackend) -> None:
    running = await busy(gateway, backend)
    queued = await in_line(gateway, gateway.chat("queued"))
    gateway.app.pool.set_draining("a", True)
    response = await queued
    assert (response.status, response.json["error"]["code"]) == (503, "no_backend")
    backend.release()
    assert (await running).status == 200


async def test_predictions_and_what_became_of_them_are_recorded_and_scraped(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    assert (await gateway.chat(stream=True)).status == 200
    record = await gateway.record()
    assert record.predicted_ttft is not None
    assert record.predicted_tpot is not None
    assert record.cached_tokens_estimate == 0
    assert record.policy == gateway.app.config.policy_digest
    text = gateway.app.metrics.render()[0].decode()
    assert f'tierline_policy_info{{digest="{record.policy}",name="predicted"}} 1.0' in text
    assert 'tierline_ttft_prediction_ratio_count{backend="a",model="tiny",tier="balanced"} 1' in text
    assert 'tierline_backend_decode_factor{backend="a"}' in text
