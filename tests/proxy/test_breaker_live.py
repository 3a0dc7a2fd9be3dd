"""Who fails is doubted, tried, ejected and comes back: with requests, probes and trials on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

import pytest

from policies import HealthState
from tests.fake_clock import FakeClock
from tests.proxy.conftest import Gateway, MakeGateway
from tests.proxy.scenes import LEAST_LOAD, QUIET
from tests.scripted import Close, Received, ScriptedBackend, Steps, chat_json, error_json

A_FIRST = {"b": "limits.max_in_flight = 2"}  # a request weighs more on b, so that a is asked first
CONFIG = QUIET + LEAST_LOAD
TRIAL = "/v1/completions"


def state(gateway: Gateway, name: str = "a") -> HealthState:
    return gateway.app.pool.backends[name].health.state


def dead(request: Received) -> Steps:
    """A server whose engine has died and whose /health does not know."""
    return error_json(500, "EngineCore encountered an issue")


async def where(gateway: Gateway, requests: int) -> list[str]:
    return [(await gateway.chat()).headers["x-tierline-backend"] for _ in range(requests)]


@pytest.mark.parametrize("policy", ["least_load", "least_in_flight", "predicted"])
async def test_a_backend_that_fails_fast_is_not_attractive_for_being_idle(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, policy: str
) -> None:
    gateway = await make_gateway(
        backend, other, config=QUIET + f'[policy]\nname = "{policy}"\n', per_backend=A_FIRST
    )
    backend.default = dead
    assert await where(gateway, 20) == ["b"] * 20
    assert len(backend.requests) == 3
    assert state(gateway) is HealthState.SUSPECT


async def test_a_lone_suspect_gets_everything_there_is(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=CONFIG)
    backend.answer(*[error_json(500, "broken")] * 5)
    assert [(await gateway.chat()).status for _ in range(7)] == [500] * 5 + [200] * 2


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429])
async def test_what_the_client_causes_puts_nobody_in_doubt(
    make_gateway: MakeGateway, backend: ScriptedBackend, status: int
) -> None:
    gateway = await make_gateway(backend, config=CONFIG)
    backend.answer(*[error_json(status, "no")] * 9)
    for _ in range(9):
        assert (await gateway.chat()).status == status
    assert state(gateway) is HealthState.HEALTHY


# -- trials and the way back: the backend is polled every 2 s


async def doubted(make_gateway: MakeGateway, *backends: ScriptedBackend) -> tuple[Gateway, FakeClock]:
    """A gateway that doubts a: three of its answers failed."""
    clock = FakeClock()
    gateway = await make_gateway(*backends, config=LEAST_LOAD, per_backend=A_FIRST, clock=clock)
    await backends[0].until(lambda: any(p.path == "/v1/models" for p in backends[0].polls), "the first poll")
    backends[0].default = dead
    await where(gateway, 3)
    assert state(gateway) is HealthState.SUSPECT
    return gateway, clock


def trials(backend: ScriptedBackend) -> list[Received]:
    return [request for request in backend.requests if request.path == TRIAL]


async def passes(gateway: Gateway, clock: FakeClock, seconds: float) -> None:
    """Time goes by, and every poll and trial on the way is answered."""
    pollers = {f"health {name}" for name in gateway.app.pool.backends}

    async def settle() -> None:
        for _ in range(2000):  # then a trial hangs: it wants more time to go by
            if pollers <= set(clock.sleepers):
                return
            await asyncio.sleep(0)

    end = clock.time + seconds
    while clock.time < end:
        await settle()
        clock.advance(min(0.25, end - clock.time))
    await settle()


async def test_a_good_trial_ends_the_doubt(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway, clock = await doubted(make_gateway, backend, other)
    backend.default = lambda request: chat_json()
    await passes(gateway, clock, 2.5)
    assert state(gateway) is HealthState.HEALTHY
    (trial,) = trials(backend)
    assert trial.json == {"model": "tiny", "prompt": "1", "max_tokens": 1}
    assert trial.header("user-agent") == "tierline-health"
    assert await where(gateway, 2) == ["a", "a"]


async def test_a_bad_trial_ejects_and_a_good_one_brings_back_place_by_place(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway, clock = await doubted(make_gateway, backend, other)
    await passes(gateway, clock, 2.5)
    assert state(gateway) is HealthState.EJECTED
    assert len(trials(backend)) == 1
    assert await where(gateway, 3) == ["b"] * 3
    await passes(gateway, clock, 12.0)  # /health is well all the time; the trial is not
    assert len(trials(backend)) == 2
    assert state(gateway) is HealthState.EJECTED
    backend.default = lambda request: chat_json()
    places: list[int] = []
    for _ in range(200):
        await passes(gateway, clock, 0.25)
        (view,) = gateway.app.pool.views(["a"])
        if view.healthy:
            places.append(view.max_in_flight)
        if len(places) == 12:
            break
    assert state(gateway) is HealthState.HEALTHY
    assert places[0] < 64  # slow start
    assert places == sorted(places)
    assert places[-1] == 256
    assert await where(gateway, 2) == ["a", "a"]


async def test_a_backend_that_restarted_needs_no_trial(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(backend, other, config=LEAST_LOAD, per_backend=A_FIRST, clock=clock)
    await passes(gateway, clock, 1.0)
    health = backend.pages["/health"]
    backend.pages["/health"] = [Close()]
    await passes(gateway, clock, 7.0)
    assert state(gateway) is HealthState.EJECTED
    backend.pages["/health"] = health
    await passes(gateway, clock, 5.0)
    assert state(gateway) is HealthState.HEALTHY
    assert trials(backend) == []


# -- outliers, and how many may be out


def every(second: Iterator[int]) -> object:
    def answer(request: Received) -> Steps:
        return error_json(500, "flaky") if next(second) % 2 else chat_json()

    return answer


async def test_who_fails_half_of_the_time_is_an_outlier(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, other, config=CONFIG, per_backend=A_FIRST)
    backend.default = every(count())  # type: ignore[assignment]
    for number in range(40):
        response = await gateway.chat()
        assert response.status == 200, number
        if state(gateway) is HealthState.EJECTED:
            break
    assert state(gateway) is HealthState.EJECTED
    assert 10 <= len(backend.requests) <= 30
    assert await where(gateway, 5) == ["b"] * 5


async def test_who_is_out_on_a_guess_still_gets_what_would_else_be_refused(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, other, config=CONFIG, per_backend=A_FIRST)
    backend.default = every(count())  # type: ignore[assignment]
    while state(gateway) is not HealthState.EJECTED:
        assert (await gateway.chat()).status == 200
    backend.default = lambda request: chat_json()
    assert await where(gateway, 3) == ["b"] * 3
    other.stop_listening()
    other.close_idle()
    assert await where(gateway, 3) == ["a"] * 3
    assert state(gateway) is HealthState.EJECTED


async def test_requests_that_fail_everywhere_make_no_outlier(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, other, config=CONFIG, per_backend=A_FIRST)
    backend.default, other.default = every(count()), every(count())  # type: ignore[assignment]
    for _ in range(60):
        await gateway.chat()
    assert [state(gateway, name) for name in "ab"] == [HealthState.HEALTHY] * 2


async def test_no_more_than_the_share_is_out_for_what_is_inferred(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(
        backend, other, config=QUIET + "trials = false\n" + LEAST_LOAD, per_backend=A_FIRST
    )
    backend.default = other.default = dead
    for _ in range(12):
        assert (await gateway.chat()).status == 500
    assert [state(gateway, name) for name in "ab"] == [HealthState.EJECTED, HealthState.SUSPECT]
    other.default = lambda request: chat_json()
    assert (await gateway.chat()).status == 200  # the pool never empties for a guess
