"""Limits on the request path: who fits is let in, who does not is told why and until when, and every end settles once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest
from multidict import CIMultiDict

from policies.limits import MINUTE, Account, micros
from proxy.errors import ChargedBy, Outcome
from proxy.keystore import Store, StoreError
from proxy.ledger import LocalLedger
from proxy.record import Record
from tests.client import Response
from tests.fake_clock import FakeClock
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.proxy.scenes import QUIET, eventually, settled
from tests.scripted import (
    Close,
    ScriptedBackend,
    Stall,
    WaitFor,
    chat_event,
    chat_events,
    chat_json,
    chat_stream,
    closed_port,
    error_json,
    json_answer,
    sse,
    usage_event,
)

ENV = {"K": "sk-k", "L": "sk-l"}
KEY = {"authorization": "Bearer sk-k"}
OTHER = {"authorization": "Bearer sk-l"}


def limited(limits: str, more: str = "", *, store: bool = False) -> str:
    """Two keys of one tenant; the first has these limits."""
    return (
        QUIET
        + "[server]\nport = 0\n"
        + ('store = "keys.db"\n' if store else "")
        + f'[[server.keys]]\nname = "k"\nkey = "env:K"\ntenant = "team"\nlimits = {{ {limits} }}\n'
        + '[[server.keys]]\nname = "l"\nkey = "env:L"\ntenant = "team"\n'
        + more
    )


def accounts(gateway: Gateway) -> dict[str, Account]:
    ledger = gateway.app.gateway.limiter._ledger
    assert isinstance(ledger, LocalLedger)
    return ledger._accounts


async def given_back(gateway: Gateway) -> None:
    """Nothing is held any more."""
    await eventually(lambda: not gateway.app.gateway.exchanges, "the end of all requests")
    for name, account in accounts(gateway).items():
        assert (account.running, account.held_tokens, account.held_cost) == (0, 0, 0), name


def tokens_used(gateway: Gateway, name: str = "key:k") -> int:
    bucket = accounts(gateway)[name].tokens
    assert bucket is not None
    bucket.refill(micros(gateway.app.clock.now()))
    return -(-bucket.used // MINUTE)


def refused(response: Response, limit: str, *, code: str = "rate_limit_exceeded") -> str:
    """The message of a 429 by this limit."""
    assert response.status == 429, response
    error = response.json["error"]
    assert (error["code"], error["param"]) == (code, None)
    assert response.headers["x-tierline-limit"] == limit
    return str(error["message"])


TOKENS = "tokens_per_minute = 6000"


# -- requests a minute, and the headers -----------------------------------------------------------------------


async def test_requests_a_minute_are_let_in_exactly_and_the_headers_say_what_is_left(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(backend, config=limited("requests_per_minute = 3"), clock=clock, env=ENV)
    told = []
    for _ in range(3):
        response = await gateway.chat(headers=KEY)
        assert response.status == 200
        told.append([response.headers[f"x-ratelimit-{w}-requests"] for w in ("limit", "remaining", "reset")])
    assert told == [["3", "2", "20s"], ["3", "1", "40s"], ["3", "0", "1m0s"]]
    response = await gateway.chat(headers=KEY)
    assert refused(response, "key.requests_per_minute") == (
        "Rate limit reached for key 'k' on requests per minute: limit 3, used 3, requested 1. "
        "Please try again in 20 s."
    )
    assert response.json["error"]["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "20"
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-ratelimit-limit-tokens" not in response.headers
    assert (await gateway.chat(headers=OTHER)).status == 200, "another key is not concerned"
    clock.advance(19.9)
    assert (await gateway.chat(headers=KEY)).headers["retry-after"] == "1"
    clock.advance(0.1)
    assert (await gateway.chat(headers=KEY)).status == 200
    assert (await gateway.chat(headers=KEY)).status == 429
    await given_back(gateway)
    record = await gateway.record(3)
    assert (record.outcome, record.limit, record.key) == (Outcome.LIMITED, "key.requests_per_minute", "k")
    assert record.tenant == "team"
    assert record.attempts == 0
    metrics = (await gateway.ask("/metrics")).body.decode()
    assert 'tierline_limit_refusals_total{limit="requests_per_minute",scope="key"} 3.0' in metrics


async def test_where_nothing_is_limited_no_answer_speaks_of_limits(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    backend.default = chat_json(headers=[("x-ratelimit-limit-requests", "7")])
    gateway = await make_gateway(backend, config=limited("requests_per_minute = 3"), env=ENV)
    mine, free = await gateway.chat(headers=KEY), await gateway.chat(headers=OTHER)
    assert mine.values("x-ratelimit-limit-requests") == ["3"], "a backend's own are not the client's"
    assert free.values("x-ratelimit-limit-requests") == ["7"], "and pass where there are none of ours"
    assert (await gateway.record(1)).reserved_tokens is None


async def test_a_streams_headers_say_it_too_and_anthropics_clients_are_refused_in_their_shape(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=limited("requests_per_minute = 1, " + TOKENS), env=ENV)
    response = await gateway.chat(stream=True, headers=KEY)
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert response.headers["x-ratelimit-limit-tokens"] == "6000"
    assert response.headers["x-ratelimit-reset-tokens"].endswith("s")
    response = await gateway.ask("/v1/messages", chat(), headers={"x-api-key": "sk-k"})
    assert (response.status, response.json["error"]["type"]) == (429, "rate_limit_error")
    assert int(response.headers["retry-after"]) in (59, 60)


async def test_a_wrong_request_is_not_counted(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    gateway = await make_gateway(backend, config=limited("requests_per_minute = 1"), env=ENV)
    for body in ("{", {"model": "none", "messages": []}, {"messages": 5, "model": ["x"]}):
        assert (await gateway.ask(CHAT, body, headers=KEY)).status in (400, 404)
    assert (await gateway.chat(headers=KEY)).status == 200


# -- tenants and models ---------------------------------------------------------------------------------------


async def test_a_tenants_keys_share_its_limit_and_a_models_clients_share_the_models(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    more = (
        "[tenants.team]\nlimits.requests_per_minute = 2\n"
        "[models.tiny]\n[models.nick]\nalias_of = 'tiny'\n[models.rare]\nlimits.requests_per_minute = 1\n"
    )
    config = limited("requests_per_minute = 100", more)
    gateway = await make_gateway(backend, config=config, env=ENV)
    first = await gateway.chat(headers=KEY)
    assert first.headers["x-ratelimit-limit-requests"] == "2", "the least that is left"
    assert (await gateway.chat(model="nick", headers=OTHER)).status == 200
    message = refused(await gateway.chat(headers=KEY), "tenant.requests_per_minute")
    assert "tenant 'team'" in message
    gateway = await make_gateway(backend, config=config.replace("minute = 2\n", "minute = 9\n"), env=ENV)
    assert (await gateway.chat(model="rare", headers=KEY)).status == 200
    refused(await gateway.chat(model="rare", headers=OTHER), "model.requests_per_minute")
    assert (await gateway.chat(headers=OTHER)).status == 200


async def test_a_models_limit_holds_also_where_no_key_is_asked_for(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    config = "[models.tiny]\nlimits.requests_per_minute = 1\n[models.nick]\nalias_of = 'tiny'\n"
    gateway = await make_gateway(backend, config=config)
    assert (await gateway.chat()).status == 200
    refused(await gateway.chat(model="nick"), "model.requests_per_minute")


# -- requests at once -----------------------------------------------------------------------------------------


async def test_as_many_run_at_once_as_may_and_who_waits_in_the_queue_counts(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(
        backend,
        config=limited("concurrent_requests = 2"),
        per_backend={"a": "limits.max_in_flight = 1"},
        env=ENV,
    )
    backend.answer([Stall(), *chat_json()])
    running = asyncio.ensure_future(gateway.chat(headers=KEY))
    await backend.received(0)
    queued = asyncio.ensure_future(gateway.chat(headers=KEY))
    await eventually(lambda: sum(gateway.app.gate.waiting().values()) == 1, "a request in line")
    response = await gateway.chat(headers=KEY)
    message = refused(response, "key.concurrent_requests")
    assert message.endswith("There is room again when a request that runs has ended.")
    assert response.headers["retry-after"] == "1"
    backend.release()
    assert [(await task).status for task in (running, queued)] == [200, 200]
    await given_back(gateway)
    assert (await gateway.chat(headers=KEY)).status == 200


# -- tokens: reserved, and settled by usage -------------------------------------------------------------------


async def test_tokens_are_reserved_by_the_rule_and_charged_by_usage(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    clock = FakeClock()
    config = limited(TOKENS).replace(
        'tenant = "team"\nlimits', 'reserve_tokens = 500\ntenant = "team"\nlimits'
    )
    gateway = await make_gateway(backend, config=config, clock=clock, env=ENV)
    for number, (asked, reserve) in enumerate(((None, 500), (100, 100), (9000, 500))):
        backend.answer(chat_json(usage=(10, 5)))
        more = {} if asked is None else {"max_tokens": asked}
        response = await gateway.chat(headers=KEY, **more)
        record = await gateway.record(number)
        prompt = record.prompt_tokens_estimate
        assert prompt is not None
        assert record.reserved_tokens == prompt + reserve
        left = 6000 - 15 * number - record.reserved_tokens
        assert response.headers["x-ratelimit-remaining-tokens"] == str(left), "told when it was let in"
        assert (record.charged_tokens, record.charged_by) == (15, ChargedBy.USAGE)
        assert tokens_used(gateway) == 15 * (number + 1)
    await given_back(gateway)
    metrics = (await gateway.ask("/metrics")).body.decode()
    assert 'tierline_limit_charged_tokens_total{charged_by="usage",model="tiny"} 45.0' in metrics


async def test_an_answer_beyond_its_reserve_is_owed_and_the_refusal_says_for_how_long(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(backend, config=limited("tokens_per_minute = 2400"), clock=clock, env=ENV)
    backend.answer(chat_json(usage=(10, 9590)))
    assert (await gateway.chat(headers=KEY)).status == 200
    response = await gateway.chat(headers=KEY, max_tokens=10)
    wait = int(response.headers["retry-after"])
    assert refused(response, "key.tokens_per_minute").endswith(f"Please try again in {wait} s.")
    assert response.headers["x-ratelimit-remaining-tokens"] == "0"
    assert response.headers["x-ratelimit-reset-tokens"] == "4m0s"
    clock.advance(wait - 1)
    assert (await gateway.chat(headers=KEY, max_tokens=10)).status == 429
    clock.advance(1)
    assert (await gateway.chat(headers=KEY, max_tokens=10)).status == 200


async def test_a_request_larger_than_the_limit_is_told_not_to_come_again(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=limited("tokens_per_minute = 100"), env=ENV)
    response = await gateway.chat(headers=KEY)
    assert refused(response, "key.tokens_per_minute").startswith("Request too large for key 'k'")
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers
    assert (await gateway.chat(headers=KEY, max_tokens=10)).status == 200


async def test_what_is_not_run_takes_no_tokens(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    config = limited(TOKENS + ", requests_per_minute = 9")
    gateway = await make_gateway(backend, config=config, clock=FakeClock(), env=ENV)
    for path in ("/tokenize", "/v1/messages/count_tokens"):
        assert (await gateway.ask(path, chat("word " * 100), headers=KEY)).status == 200
    caller = gateway.app.gateway.callers.find(CIMultiDict(KEY), 0.0)
    assert caller is not None
    gateway.app.gateway.owners.learn("resp_1", "a", caller.whose)
    assert (await gateway.ask("/v1/responses/resp_1", headers=KEY)).status == 200
    assert tokens_used(gateway) == 0
    await gateway.ask("/v1/embeddings", {"model": "tiny", "input": "word " * 100}, headers=KEY)
    record = await gateway.record(3)
    assert record.charged_by is ChargedBy.ESTIMATE
    assert record.charged_tokens == record.reserved_tokens == record.prompt_tokens_estimate
    assert tokens_used(gateway) == record.charged_tokens


# -- every end, once ------------------------------------------------------------------------------------------

ENDS = {
    "rejected": (error_json(400, "no"), Outcome.UPSTREAM_REJECTED),
    "failed": (error_json(500, "no"), Outcome.UPSTREAM_ERROR),
    "cut before a byte": ([Close()], Outcome.UPSTREAM_CUT),
    "aborted": (chat_json(finish="abort"), Outcome.UPSTREAM_ERROR),
}


@pytest.mark.parametrize(("script", "outcome"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_what_the_client_got_nothing_of_is_given_back(
    make_gateway: MakeGateway, backend: ScriptedBackend, script: list[object], outcome: Outcome, stream: bool
) -> None:
    gateway = await make_gateway(backend, config=limited(TOKENS + ", requests_per_minute = 9"), env=ENV)
    if stream and "abort" in str(script):
        script = [*chat_stream("", finish="abort")]
    backend.answer(script)  # type: ignore[arg-type]
    assert (await gateway.chat(stream=stream, headers=KEY)).status >= 400
    await gateway.ended(outcome)
    record = await gateway.record()
    assert (record.charged_tokens, record.charged_by) == (0, ChargedBy.NOTHING)
    assert tokens_used(gateway) == 0
    await given_back(gateway)
    response = await gateway.chat(headers=KEY)
    assert response.headers["x-ratelimit-remaining-requests"] == "7", "a request stays counted"


async def test_a_backend_that_is_not_there_and_a_shed_request_cost_no_tokens(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(f"http://127.0.0.1:{closed_port()}", config=limited(TOKENS), env=ENV)
    assert (await gateway.chat(headers=KEY)).status == 502
    config = limited(TOKENS, "[policy.gate]\nqueue = 1\nwait_seconds = 0.05\n")
    full = await make_gateway(backend, config=config, per_backend={"a": "limits.max_in_flight = 1"}, env=ENV)
    backend.answer([Stall(), *chat_json()])
    running = asyncio.ensure_future(full.chat(headers=KEY))
    await backend.received(0)
    assert (await full.chat(headers=KEY)).headers["x-tierline-reason"] == "expired"
    assert (await full.record()).charged_by is ChargedBy.NOTHING
    backend.release()
    assert (await running).status == 200
    for made in (gateway, full):
        await given_back(made)
    assert (await gateway.record()).charged_tokens == 0
    assert [record.charged_tokens for record, _ in full.records.closed] == [0, 15]


async def test_a_failover_is_charged_once_by_who_answered(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(
        backend, other, config=limited(TOKENS + ", requests_per_minute = 9"), env=ENV
    )
    backend.answer(error_json(500, "no"))
    backend.default = other.default = chat_json(usage=(10, 5))
    count = 0
    while not backend.requests:
        assert (await gateway.chat(headers=KEY)).status == 200
        count += 1
    last = await gateway.record(count - 1)
    assert (last.attempts, last.charged_tokens, last.charged_by) == (2, 15, ChargedBy.USAGE)
    bucket = accounts(gateway)["key:k"].requests
    assert bucket is not None
    assert bucket.full > bucket.used > (count - 1) * MINUTE, "one request, whatever the attempts"
    await given_back(gateway)


async def test_a_client_that_leaves_before_anything_was_sent_upstream_pays_nothing(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(
        backend, config=limited(TOKENS), per_backend={"a": "limits.max_in_flight = 1"}, env=ENV
    )
    backend.answer([Stall(), *chat_json()])
    running = asyncio.ensure_future(gateway.chat(headers=KEY))
    await backend.received(0)
    async with await gateway.connect() as client:
        client.send(CHAT, chat(), headers=KEY)
        await eventually(lambda: sum(gateway.app.gate.waiting().values()) == 1, "a request in line")
        client.close()
        record = await gateway.record()
    assert (record.outcome, record.charged_by) == (Outcome.CANCELLED, ChargedBy.NOTHING)
    backend.release()
    await running
    await given_back(gateway)


async def test_an_answer_not_streamed_that_the_client_left_is_charged_what_was_reserved(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=limited(TOKENS), env=ENV)
    backend.answer([Stall()])
    async with await gateway.connect() as client:
        client.send(CHAT, chat(max_tokens=100), headers=KEY)
        await backend.received(0)
        client.close()
        record = await gateway.record()
    assert (record.charged_tokens, record.charged_by) == (record.reserved_tokens, ChargedBy.ESTIMATE)
    await given_back(gateway)


async def leave_after(
    gateway: Gateway, backend: ScriptedBackend, events: list[bytes], **more: object
) -> Record:
    """A stream whose client leaves when it has read so many events."""
    gate = asyncio.Event()
    head, *steps = sse(*events, done=False)
    backend.answer([head, *steps[: len(events)], WaitFor(gate)])
    before = len(gateway.records.closed)
    async with await gateway.connect() as client:
        client.send(CHAT, chat(stream=True, **more), headers=KEY)
        await client.read_until(events[-1].split(b"usage")[0][-20:])
        client.close()
        record = await gateway.record(before)
    gate.set()
    assert record.outcome is Outcome.CANCELLED
    return record


async def test_a_stream_that_the_client_left_is_charged_what_was_seen_of_it_marked_as_an_estimate(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=limited(TOKENS), env=ENV)
    events = [chat_event({"content": f"word {n}"}) for n in range(7)]
    record = await leave_after(gateway, backend, events)
    assert record.charged_by is ChargedBy.ESTIMATE
    deltas = record.gaps.count + 1
    assert 1 <= deltas <= 7  # several may come in one read
    assert record.charged_tokens == (record.prompt_tokens_estimate or 0) + deltas
    await given_back(gateway)


async def test_what_a_delta_holds_is_learned_from_streams_that_ended(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=limited("tokens_per_minute = 1000000"), env=ENV)
    gates = [asyncio.Event() for _ in range(10)]
    for _ in range(60):  # four tokens a delta
        head, *events = sse(*chat_events([f"w{n} " for n in range(10)], usage=(10, 40)))
        for gate in gates:
            gate.clear()
        steps: list[object] = [head, events[0]]
        for gate, event in zip(gates, events[1:11], strict=True):
            steps += [event, WaitFor(gate)]
        backend.answer([*steps, *events[11:]])  # type: ignore[arg-type]
        async with await gateway.connect() as client:
            client.send(CHAT, chat(stream=True, stream_options={"include_usage": True}), headers=KEY)
            for n, gate in enumerate(gates):
                await client.read_until(b"w%d " % n)
                gate.set()
            await client.read()
    record = await leave_after(gateway, backend, [chat_event({"content": "only one"})])
    assert record.charged_by is ChargedBy.ESTIMATE
    assert record.charged_tokens == (record.prompt_tokens_estimate or 0) + 4


async def test_a_stream_that_says_its_usage_all_the_time_is_charged_by_that(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=limited(TOKENS), env=ENV)
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = [usage_event((12, 3 * n)) for n in range(1, 4)]
    texts = [chat_event({"content": f"word {n}"}) for n in range(3)]
    mixed = [event for pair in zip(texts, events, strict=True) for event in pair]
    record = await leave_after(gateway, backend, mixed, stream_options=options)
    assert record.charged_by is ChargedBy.USAGE
    assert record.charged_tokens in (15, 18, 21)  # the last one may not have been read
    assert record.charged_tokens == 12 + (record.completion_tokens or 0)


async def test_a_stream_that_breaks_is_charged_what_was_seen_of_it(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=limited(TOKENS), env=ENV)
    head, *steps = sse(*[chat_event({"content": "word"})] * 3, done=False)
    backend.answer([head, *steps[:3], Close()])
    await gateway.chat(stream=True, headers=KEY)
    record = await gateway.record()
    assert (record.outcome, record.charged_by) == (Outcome.UPSTREAM_CUT, ChargedBy.ESTIMATE)
    assert (record.charged_tokens or 0) > (record.prompt_tokens_estimate or 0)
    await given_back(gateway)


async def test_a_shutdown_gives_back_what_waits_and_charges_what_ran(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    config = limited(TOKENS).replace("port = 0\n", "port = 0\ndrain_timeout = 0.05\n")
    gateway = await make_gateway(
        backend, config=config, per_backend={"a": "limits.max_in_flight = 1"}, env=ENV
    )
    first = chat_event({"content": "word"})
    head, *steps = sse(first, done=False)
    backend.answer([head, steps[0], Stall()])
    async with await gateway.connect() as client:
        client.send(CHAT, chat(stream=True), headers=KEY)
        await client.read_until(b"word")
        queued = asyncio.ensure_future(gateway.chat(headers=KEY))
        await eventually(lambda: sum(gateway.app.gate.waiting().values()) == 1, "a request in line")
        await gateway.app.drain()
        assert (await queued).status == 503
    charged = {record.stream: record.charged_by for record, _ in gateway.records.closed}
    assert charged == {True: ChargedBy.ESTIMATE, False: ChargedBy.NOTHING}
    await given_back(gateway)


# -- budgets --------------------------------------------------------------------------------------------------

BUDGET = "tokens_per_day = 2000"
DAY = 86_400


def until_midnight(clock: FakeClock) -> float:
    return DAY - clock.wall() % DAY


async def test_a_budget_that_is_used_up_is_a_quota_and_new_at_midnight(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    clock = FakeClock()
    gateway = await make_gateway(backend, config=limited(BUDGET, store=True), clock=clock, env=ENV)
    backend.answer(chat_json(usage=(1000, 1000)))
    assert (await gateway.chat(headers=KEY)).status == 200
    response = await gateway.chat(headers=KEY)
    wait = int(response.headers["retry-after"])
    assert wait == until_midnight(clock)
    message = refused(response, "key.tokens_per_day", code="insufficient_quota")
    assert message.startswith("You exceeded the budget of key 'k' on tokens per day: limit 2000, used 2000,")
    assert message.endswith(f"It is renewed in {wait} s.")
    assert response.json["error"]["type"] == "insufficient_quota"
    assert response.headers["x-should-retry"] == "false"
    clock.time += wait - 1  # no timer in between
    assert (await gateway.chat(headers=KEY)).status == 429
    clock.time += 1
    assert (await gateway.chat(headers=KEY)).status == 200
    assert datetime.fromtimestamp(clock.wall(), UTC).hour == 0


async def test_a_budget_held_by_what_runs_is_worth_asking_again_soon(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=limited("tokens_per_day = 1500", store=True), env=ENV)
    backend.answer([Stall(), *chat_json()])
    running = asyncio.ensure_future(gateway.chat(headers=KEY))
    await backend.received(0)
    response = await gateway.chat(headers=KEY)
    refused(response, "key.tokens_per_day")
    assert response.headers["retry-after"] == "1"
    backend.release()
    await running
    assert (await gateway.chat(headers=KEY)).status == 200


async def test_money_is_charged_by_the_models_price(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    more = "[models.tiny]\nprice = { prompt = 2.0, cached = 0.5, completion = 10.0 }\n[models.free]\n"
    gateway = await make_gateway(backend, config=limited("cost_per_month = 0.02", more, store=True), env=ENV)
    usage = {"prompt_tokens": 1000, "completion_tokens": 500, "prompt_tokens_details": {"cached_tokens": 400}}
    backend.answer(json_answer({"id": "x", "choices": [{"finish_reason": "stop"}], "usage": usage}))
    assert (await gateway.chat(headers=KEY)).status == 200
    (budget,) = accounts(gateway)["key:k"].budgets
    assert budget.spent == (600 * 2 + 400 * 0.5 + 500 * 10) * 1000
    backend.default = chat_json(usage=(10, 3000))
    assert (await gateway.chat(headers=KEY)).status == 200
    message = refused(await gateway.chat(headers=KEY), "key.cost_per_month", code="insufficient_quota")
    assert "on money per month: limit 0.02, used 0.03642, requested 0.0102" in message
    assert (await gateway.chat(model="free", headers=KEY)).status == 429, "nothing is left, whatever it costs"


async def test_budgets_survive_a_restart_and_a_crash_loses_a_second_at_most(
    make_gateway: MakeGateway, backend: ScriptedBackend, tmp_path: Path
) -> None:
    clock = FakeClock()
    config = limited(BUDGET, store=True)
    first = await make_gateway(backend, config=config, clock=clock, env=ENV)
    backend.default = chat_json(usage=(500, 500))
    assert (await first.chat(headers=KEY)).status == 200
    await given_back(first)
    beside = Store(str(tmp_path / "keys.db"))
    try:
        assert beside.budgets() == []
        clock.advance(0.5)  # the next turn
        await eventually(lambda: bool(beside.budgets()), "what was spent in the file")
        (row,) = beside.budgets()
        assert (row.account, row.kind, row.spent) == ("key:k", "tokens_per_day", 1000)
    finally:
        beside.close()
    crashed = await make_gateway(backend, config=config, clock=clock, env=ENV)  # the first is not closed
    assert (await crashed.chat(headers=KEY, max_tokens=900)).status == 200
    await given_back(crashed)
    await crashed.app.close()
    closed = await make_gateway(backend, config=config, clock=clock, env=ENV)
    refused(await closed.chat(headers=KEY, max_tokens=1), "key.tokens_per_day", code="insufficient_quota")


async def test_what_could_not_be_written_is_written_later(
    make_gateway: MakeGateway, backend: ScriptedBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await make_gateway(backend, config=limited(BUDGET, store=True), env=ENV)
    keys = gateway.app.keys
    backend.default = chat_json(usage=(5, 5))

    def broken(*_: object) -> None:
        raise StoreError("keys.db: database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(keys._store, "turn", broken)
        await gateway.chat(headers=KEY)
        await given_back(gateway)
        await keys.turn()
    await keys.turn()
    beside = Store(str(tmp_path / "keys.db"))
    assert [row.spent for row in beside.budgets()] == [10]
    beside.close()


async def test_a_reload_changes_limits_and_keeps_what_was_used(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=limited("requests_per_minute = 2"), env=ENV)
    for _ in range(2):
        assert (await gateway.chat(headers=KEY)).status == 200
    app = gateway.app
    (key, other) = app.config.server.keys
    more = key.model_copy(update={"limits": key.limits.model_copy(update={"requests_per_minute": 3})})
    server = app.config.server.model_copy(update={"keys": (more, other)})
    app.configure(app.config.model_copy(update={"server": server}))
    assert [(await gateway.chat(headers=KEY)).status for _ in range(2)] == [200, 429]


async def test_a_limit_that_goes_while_its_request_runs_is_settled_all_the_same(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=limited(TOKENS), env=ENV)
    backend.answer([Stall(), *chat_json()])
    running = asyncio.ensure_future(gateway.chat(headers=KEY))
    await backend.received(0)
    app = gateway.app
    server = app.config.server.model_copy(update={"keys": app.config.server.keys[1:]})
    app.configure(app.config.model_copy(update={"server": server}))
    backend.release()
    assert (await running).status == 200
    await given_back(gateway)
    await settled(gateway)
