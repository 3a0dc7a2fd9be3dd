"""Before the first event: what fails on one backend is answered by another, and what the client is told if it is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from policies import Failure
from proxy.errors import Outcome
from tests.client import Connection
from tests.fake_clock import FakeClock
from tests.proxy.conftest import Gateway, MakeGateway
from tests.proxy.dialects import CHAT_DIALECT, DIALECTS, Dialect
from tests.proxy.scenes import LEAST_LOAD, QUIET, eventually, polled, settled
from tests.proxy.test_ends import BEFORE
from tests.scripted import (
    DONE,
    Close,
    Head,
    ScriptedBackend,
    Stall,
    Step,
    closed_port,
    error_json,
    event,
    sse,
)

A_FIRST = {"b": "limits.max_in_flight = 2"}  # a request weighs more on b, so that a is asked first
CONFIG = QUIET + LEAST_LOAD
BACK = CONFIG + "[policy.retry]\n"
"""With the defaults: whoever answered is asked again after a pause."""

each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=str)
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def first_event(error: dict[str, Any]) -> list[Step]:
    return sse(event({"error": error}, "error"), done=True)


ANSWERS: dict[str, tuple[list[Step], Failure]] = {
    **{
        str(status): (error_json(status, "not now"), Failure.ERROR)
        for status in (408, 425, 500, 502, 503, 504, 529)
    },
    "429": (error_json(429, "slow down"), Failure.BUSY),
    "503 that says when": (error_json(503, "full", headers=[("retry-after", "3")]), Failure.BUSY),
    "a redirect": ([Head(302, [("location", "http://elsewhere/"), ("content-length", "0")])], Failure.ERROR),
    "our key is refused": (error_json(401, "who are you"), Failure.ERROR),
}
KEYED = 'key = "env:BACKEND_KEY"'
ENV = {"BACKEND_KEY": "sk-backend"}


@each_way
@pytest.mark.parametrize("answer", ANSWERS)
async def test_another_backend_answers_what_one_does_not(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, answer: str, stream: bool
) -> None:
    steps, failure = ANSWERS[answer]
    gateway = await make_gateway(backend, other, config=CONFIG, per_backend=A_FIRST | {"a": KEYED}, env=ENV)
    backend.answer(steps)
    response = await gateway.chat(stream=stream)
    assert (response.status, response.headers["x-tierline-backend"]) == (200, "b")
    assert (response.headers["x-tierline-reason"], response.headers["x-tierline-attempts"]) == ("retry", "2")
    assert "x-should-retry" not in response.headers
    record = await gateway.record()
    assert (record.attempts, record.failures) == (2, (("a", failure),))
    await gateway.ended(Outcome.OK)


@pytest.mark.parametrize("broken", BEFORE)
@each_way
async def test_another_backend_answers_what_breaks_on_one(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, broken: str, stream: bool
) -> None:
    steps, outcome = BEFORE[broken]
    gateway = await make_gateway(backend, other, config=CONFIG, per_backend=A_FIRST)
    backend.answer(steps)
    response = await gateway.chat(stream=stream)
    assert (response.status, response.complete) == (200, True)
    assert response.headers["x-tierline-backend"] == "b"
    record = await gateway.record()
    failure = Failure.CUT if outcome is Outcome.UPSTREAM_CUT else Failure.MALFORMED
    assert (record.failures, record.outcome) == ((("a", failure),), Outcome.OK)
    await settled(gateway, pooled=None)


@each_dialect
@pytest.mark.parametrize(
    ("code", "failure"), [(500, Failure.ERROR), (503, Failure.ERROR), (429, Failure.BUSY)]
)
async def test_another_backend_answers_when_the_first_event_is_an_error(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    other: ScriptedBackend,
    dialect: Dialect,
    code: int,
    failure: Failure,
) -> None:
    gateway = await make_gateway(backend, other, config=CONFIG, per_backend=A_FIRST)
    backend.answer(dialect.stream(event({"error": {"message": "no room", "code": code}}, "error"), DONE))
    other.answer(dialect.stream())
    response = await gateway.ask(dialect.path, dialect.request(stream=True))
    assert (response.status, response.body) == (200, b"".join(dialect.events))
    assert (await gateway.record()).failures == (("a", failure),)
    await gateway.ended(Outcome.OK)


@pytest.mark.parametrize("status", [400, 404, 413, 422, 501])
@each_way
async def test_what_would_be_the_same_elsewhere_is_not_asked_elsewhere(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, status: int, stream: bool
) -> None:
    gateway = await make_gateway(backend, other, config=BACK, per_backend=A_FIRST)
    backend.answer(error_json(status, "no such thing"))
    response = await gateway.chat(stream=stream)
    assert (response.status, response.headers["x-tierline-attempts"]) == (status, "1")
    assert "x-should-retry" not in response.headers
    assert not other.requests
    await settled(gateway)


@each_dialect
async def test_no_token_in_time_is_somebody_elses_and_the_silent_one_is_let_go(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, dialect: Dialect
) -> None:
    clock = FakeClock()
    config = CONFIG + "[timeouts]\nfirst_token = 10\nfirst_token_per_1k_tokens = 0\nkeepalive_after = 0\n"
    gateway = await make_gateway(backend, other, config=config, per_backend=A_FIRST, clock=clock)
    await polled(gateway)
    backend.answer([Stall()])
    other.answer(dialect.stream())
    async with await gateway.connect() as client:
        client.send(dialect.path, dialect.request(stream=True))
        await backend.received()
        clock.advance(9.9)
        assert not other.requests
        clock.advance(0.2)
        response = await client.read()
    assert (response.status, response.headers["x-tierline-backend"]) == (200, "b")
    assert (await backend.closed()).by_peer  # it would go on generating for nobody
    record = await gateway.record()
    assert record.failures == (("a", Failure.TIMEOUT),)
    assert record.backoff_seconds == pytest.approx(10.0, abs=0.2)
    await settled(gateway, pooled=1)


async def test_no_token_from_two_is_told_not_tried_on_a_third(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    clock = FakeClock()
    config = CONFIG + "[timeouts]\nfirst_token = 10\nfirst_token_per_1k_tokens = 0\nkeepalive_after = 0\n"
    async with ScriptedBackend() as third:
        gateway = await make_gateway(
            backend,
            other,
            third,
            config=config,
            per_backend=A_FIRST | {"c": "limits.max_in_flight = 1"},
            clock=clock,
        )
        await polled(gateway)
        backend.answer([Stall()])
        other.answer([Stall()])
        async with await gateway.connect() as client:
            client.send(CHAT_DIALECT.path, CHAT_DIALECT.request(stream=True))
            await backend.received()
            clock.advance(10.1)
            await other.received()
            clock.advance(10.1)
            response = await client.read()
        assert (response.status, response.json["error"]["code"]) == (504, "upstream_timeout")
        assert response.headers["x-should-retry"] == "false"
        assert not third.requests
        await gateway.ended(Outcome.UPSTREAM_TIMEOUT)


async def test_when_the_time_for_the_request_is_over_nobody_else_is_asked(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    clock = FakeClock()
    config = CONFIG + "[timeouts]\ntotal = 20\nfirst_token = 20\ngap = 20\nkeepalive_after = 0\n"
    gateway = await make_gateway(backend, other, config=config, per_backend=A_FIRST, clock=clock)
    await polled(gateway)
    backend.answer([Stall()])
    async with await gateway.connect() as client:
        client.send(CHAT_DIALECT.path, CHAT_DIALECT.request(stream=False))
        await backend.received()
        clock.advance(20.1)
        response = await client.read()
    assert (response.status, response.json["error"]["code"]) == (504, "upstream_timeout")
    assert (await gateway.record()).failures == (("a", Failure.LATE),)
    assert not other.requests


# -- what the client is told when nobody answers ----------------------------------------------------------------------


async def test_when_all_fail_the_last_ones_words_are_told_and_sdks_are_asked_not_to_multiply_the_tries(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, other, config=CONFIG, per_backend=A_FIRST)
    backend.answer(error_json(500, "a is broken"))
    other.answer(error_json(502, "b is broken", headers=[("x-should-retry", "true")]))
    response = await gateway.chat()
    assert (response.status, response.json["error"]["message"]) == (502, "b is broken")
    assert (response.headers["x-tierline-backend"], response.headers["x-tierline-attempts"]) == ("b", "2")
    assert response.values("x-should-retry") == ["false"]
    record = await gateway.record()
    assert record.failures == (("a", Failure.ERROR), ("b", Failure.ERROR))
    await gateway.ended(Outcome.UPSTREAM_ERROR)
    await settled(gateway)


async def test_a_lone_backends_error_may_be_retried_by_the_client(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=CONFIG)
    backend.answer(error_json(500, "broken"))
    response = await gateway.chat()
    assert (response.status, response.headers["x-tierline-attempts"]) == (500, "1")
    assert "x-should-retry" not in response.headers


async def test_who_says_when_to_come_back_is_passed_on_although_another_failed_after_it(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(
        backend, f"http://127.0.0.1:{closed_port()}", config=CONFIG, per_backend=A_FIRST
    )
    backend.answer(error_json(429, "in a while", headers=[("retry-after", "7")]))
    response = await gateway.chat()
    assert (response.status, response.headers["retry-after"]) == (429, "7")
    assert "x-should-retry" not in response.headers  # the client is asked to come back
    assert (await gateway.record()).failures == (("a", Failure.BUSY), ("b", Failure.CONNECT))


async def test_a_shed_request_may_come_again(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    gateway = await make_gateway(backend, config=CONFIG, per_backend={"a": "limits.max_in_flight = 1"})
    backend.answer([Stall()])
    async with await gateway.connect() as client:
        client.send(CHAT_DIALECT.path, CHAT_DIALECT.request(stream=False))
        await backend.received()
        response = await gateway.chat()
        assert response.status == 429
        assert int(response.headers["retry-after"]) >= 1
        assert "x-should-retry" not in response.headers
        assert "x-tierline-attempts" not in response.headers
        backend.release()


async def test_the_tier_is_never_lowered_by_a_failure(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, other, config=CONFIG, per_backend={"a": "quality.reference = true"})
    backend.answer(error_json(500, "broken"))
    response = await gateway.chat(headers={"x-quality-tier": "exact"})
    assert (response.status, response.headers["x-tierline-backend"]) == (500, "a")
    assert not other.requests


@pytest.mark.parametrize(("spill", "status"), [("full", 200), ("never", 500)])
async def test_a_failure_goes_to_the_reference_only_where_the_spill_rule_says_so(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, spill: str, status: int
) -> None:
    config = CONFIG + f'[tiers.balanced]\nspill = "{spill}"\n'
    gateway = await make_gateway(backend, other, config=config, per_backend={"b": "quality.reference = true"})
    backend.answer(error_json(500, "broken"))
    assert (await gateway.chat()).status == status
    assert len(other.requests) == (status == 200)


# -- pauses -----------------------------------------------------------------------------------------------------


async def paused(clock: FakeClock, backend: ScriptedBackend, index: int) -> float:
    """Move the clock until a further request comes; how long that took."""
    began = clock.time
    await backend.answered(index - 1)
    for _ in range(4000):
        if len(backend.requests) > index:
            return clock.time - began
        clock.advance(0.001)
        await asyncio.sleep(0)
    raise AssertionError("nobody came back")


async def told_to_wait(make_gateway: MakeGateway, backend: ScriptedBackend) -> tuple[Gateway, FakeClock]:
    """A gateway whose only backend asks the next request to come back in a second and a half."""
    clock = FakeClock()
    gateway = await make_gateway(backend, config=BACK, clock=clock)
    await polled(gateway)
    backend.answer(error_json(429, "wait", headers=[("retry-after", "1.5")]))
    return gateway, clock


async def in_the_pause(gateway: Gateway, backend: ScriptedBackend) -> Connection:
    """A client whose request waits to be sent again."""
    client = await gateway.connect()
    client.send(CHAT_DIALECT.path, CHAT_DIALECT.request(stream=True))
    await backend.answered()
    await eventually(lambda: not gateway.app.pool.backends["a"].in_flight, "the pause")
    return client


@each_way
async def test_a_lone_backend_that_erred_is_asked_again_after_a_pause(
    make_gateway: MakeGateway, backend: ScriptedBackend, stream: bool
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(backend, config=BACK, clock=clock)
    await polled(gateway)
    backend.answer(error_json(500, "once"), error_json(503, "twice"))
    async with await gateway.connect() as client:
        client.send(CHAT_DIALECT.path, CHAT_DIALECT.request(stream=stream))
        took = await paused(clock, backend, 1) + await paused(clock, backend, 2)
        response = await client.read()
    assert (response.status, response.headers["x-tierline-attempts"]) == (200, "3")
    assert 0 < took <= 0.3 + 0.05
    record = await gateway.record()
    assert record.backoff_seconds == pytest.approx(took, abs=0.02)
    await gateway.ended(Outcome.OK)


async def test_a_pause_is_as_long_as_retry_after_asks_for(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway, clock = await told_to_wait(make_gateway, backend)
    async with await gateway.connect() as client:
        client.send(CHAT_DIALECT.path, CHAT_DIALECT.request(stream=False))
        assert await paused(clock, backend, 1) == pytest.approx(1.5, abs=0.02)
        assert (await client.read()).status == 200


async def test_a_longer_retry_after_is_the_clients_to_wait_for(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=BACK)
    backend.answer(error_json(429, "wait", headers=[("retry-after", "30")]))
    response = await gateway.chat()
    assert (response.status, response.headers["retry-after"]) == (429, "30")
    assert len(backend.requests) == 1


async def test_a_client_that_leaves_in_a_pause_is_let_go(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway, clock = await told_to_wait(make_gateway, backend)
    (await in_the_pause(gateway, backend)).close()
    await gateway.ended(Outcome.CANCELLED)
    clock.advance(5)
    assert len(backend.requests) == 1
    await settled(gateway, pooled=None)


async def test_the_gateway_may_stop_in_a_pause(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    gateway, _ = await told_to_wait(make_gateway, backend)
    async with await in_the_pause(gateway, backend) as client:
        gateway.app.gateway.interrupt()
        assert (await client.read()).json["error"]["code"] == "shutdown"
    await gateway.ended(Outcome.SHUTDOWN)


# -- who is full, and what is paid for ---------------------------------------------------------------------------


async def test_who_said_to_come_back_later_gets_nothing_until_then(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(
        backend, other, config=CONFIG, per_backend=A_FIRST | {"a": KEYED}, clock=clock, env=ENV
    )
    await polled(gateway)
    backend.answer(error_json(429, "wait", headers=[("retry-after", "20")]))
    for at, where in ((0, "b"), (10, "b"), (9.9, "b"), (0.2, "a")):
        clock.advance(at)
        assert (await gateway.chat()).headers["x-tierline-backend"] == where
    assert len(backend.requests) == 2


async def test_a_client_whose_own_key_is_limited_keeps_nobody_else_away(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, other, config=CONFIG, per_backend=A_FIRST)
    backend.answer(error_json(429, "wait", headers=[("retry-after", "20")]))
    for where in ("b", "a"):
        assert (await gateway.chat()).headers["x-tierline-backend"] == where


async def test_in_a_storm_only_a_share_of_the_requests_is_tried_twice(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    clock = FakeClock()
    patient = QUIET + "failures_to_eject = 1000\n" + LEAST_LOAD
    config = patient + "[policy.retry]\nbackoff_seconds = 0\nbudget_floor = 0.2\n"
    gateway = await make_gateway(backend, other, config=config, per_backend=A_FIRST, clock=clock)
    await polled(gateway)
    backend.default = other.default = lambda request: error_json(500, "broken")
    for _ in range(50):
        response = await gateway.chat()
        retried = response.headers["x-tierline-attempts"] == "2"
        assert response.headers.get("x-should-retry") == ("false" if retried else None)
    attempts = len(backend.requests) + len(other.requests)
    assert attempts == 50 + 2 + 10  # the floor of ten seconds, and a fifth of the requests
    assert gateway.app.metrics.retries_denied >= 50 - 12
    text = gateway.app.metrics.render()[0].decode()
    assert 'tierline_failed_attempts_total{backend="a",failure="error"} 50.0' in text


async def test_a_failure_after_the_first_event_is_never_begun_again(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, other, config=BACK, per_backend=A_FIRST)
    backend.answer([*CHAT_DIALECT.begin(), Close()])
    response = await gateway.chat(stream=True)
    CHAT_DIALECT.error_at_end(response)
    assert not other.requests
    assert (await gateway.record()).failures == (("a", Failure.CUT),)
