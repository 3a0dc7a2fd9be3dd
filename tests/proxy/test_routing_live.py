"""Which backend gets a request, seen from outside: tiers, windows, load, sessions, draining; and what a client is told
when there is none. All with the policy `least_load`, whose choices need no forecast; `predicted` is in test_gate_live."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import pytest

from proxy.errors import Outcome
from tests.client import Response
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.proxy.scenes import LEAST_LOAD
from tests.scripted import ScriptedBackend, Stall, after, chat_json, chat_stream, error_json, json_answer

REFERENCE = "quality.reference = true"
GOOD, POOR = "quality.kl_bits = 0.01", "quality.kl_bits = 0.5"
TIERS = """
[tiers.balanced]
max_kl_bits = 0.05
[models.tiny]
[models.best]
alias_of = "tiny"
tier = "exact"
[models.quick]
alias_of = "tiny"
tier = "fast"
"""


@pytest.fixture
def make_gateway(make_gateway: MakeGateway) -> MakeGateway:
    def make(*backends: ScriptedBackend | str, config: str = "", **more: Any) -> Awaitable[Gateway]:
        return make_gateway(*backends, config=LEAST_LOAD + config, **more)

    return make


def tier(name: str) -> dict[str, str]:
    return {"x-quality-tier": name}


def who(response: Response) -> str:
    return response.headers["x-tierline-backend"]


async def held(backend: ScriptedBackend, request: Awaitable[Response], index: int) -> asyncio.Task[Response]:
    """A request that is now running at the backend."""
    task = asyncio.ensure_future(request)
    await backend.received(index)
    return task


# -- tiers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "headers", "served", "may"),
    [
        ("tiny", {}, "balanced", {"a", "b"}),
        ("best", {}, "exact", {"a"}),
        ("quick", {}, "fast", {"a", "b", "c"}),
        ("tiny", tier("exact"), "exact", {"a"}),
        ("tiny", tier(" EXACT "), "exact", {"a"}),
        ("best", tier("fast"), "fast", {"a", "b", "c"}),
        ("quick", tier("exact"), "exact", {"a"}),
        ("quick", tier("balanced"), "balanced", {"a", "b"}),
    ],
)
async def test_the_tier_is_the_headers_or_the_aliass_or_the_default(
    make_gateway: MakeGateway, model: str, headers: dict[str, str], served: str, may: set[str]
) -> None:
    async with ScriptedBackend() as a, ScriptedBackend() as b, ScriptedBackend() as c:
        gateway = await make_gateway(
            a, b, c, config=TIERS, per_backend={"a": REFERENCE, "b": GOOD, "c": POOR}
        )
        responses = [await gateway.chat(model=model, headers=headers) for _ in range(24)]
        assert {r.status for r in responses} == {200}
        assert {who(r) for r in responses} == may
        assert {r.headers["x-tierline-tier"] for r in responses} == {served}
        assert {r.headers["x-tierline-reason"] for r in responses} == {
            "only" if len(may) == 1 else "least_load"
        }
        record = await gateway.record()
        assert (record.tier_asked, record.tier, record.model) == (served, served, model)
        await gateway.ended(*[Outcome.OK] * 24)


@pytest.mark.parametrize("name", ["best-effort", "", "exact,fast", "\xff"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/embeddings"])
async def test_an_unknown_tier_is_a_400_that_names_the_known_ones(
    make_gateway: MakeGateway, backend: ScriptedBackend, name: str, path: str
) -> None:
    gateway = await make_gateway(backend)
    async with await gateway.connect() as connection:
        body = b'{"model":"tiny"}'
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-quality-tier: {name}\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.send_raw(head.encode("latin-1") + body)
        response = await connection.read()
    assert response.status == 400
    assert "exact, balanced, fast" in response.json["error"]["message"]
    assert path == "/v1/messages" or response.json["error"]["code"] == "unknown_tier"
    assert backend.requests == []
    await gateway.ended(Outcome.BAD_REQUEST)


@pytest.mark.parametrize("model", ["nope", "", "TINY", "tiny ", "a/b", "x" * 300, "naïve"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"])
async def test_an_unknown_model_is_a_404_in_the_endpoints_shape(
    make_gateway: MakeGateway, backend: ScriptedBackend, model: str, path: str
) -> None:
    gateway = await make_gateway(backend)
    response = await gateway.ask(path, chat(model=model))
    error = response.json["error"]
    assert response.status == 404
    assert model[:200] in error["message"]
    if path == "/v1/messages":
        assert (response.json["type"], error["type"]) == ("error", "not_found_error")
    else:
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert backend.requests == []
    assert "x-tierline-backend" not in response.headers
    await gateway.ended(Outcome.BAD_REQUEST)


async def test_no_model_is_the_only_one_or_a_400(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    one = await make_gateway(backend)
    assert (await one.ask(CHAT, {"messages": []})).status == 200
    two = await make_gateway(backend, config="[models.tiny]\n[models.other]\n")
    response = await two.ask(CHAT, {"messages": []})
    assert (response.status, response.json["error"]["param"]) == (400, "model")
    assert "tiny, other" in response.json["error"]["message"]


@pytest.mark.parametrize("trouble", ["none", "full", "draining", "ejected"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_exact_is_never_served_by_anything_but_the_reference(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, trouble: str, stream: bool
) -> None:
    reference = "" if trouble == "none" else REFERENCE
    limit = "limits.max_in_flight = 1"
    gateway = await make_gateway(
        backend, other, per_backend={"a": f"{reference}\n{limit}", "b": "quality.kl_bits = 0.0"}
    )
    running = None
    if trouble == "full":
        backend.answer([Stall(), *chat_json()])
        running = await held(backend, gateway.chat(headers=tier("exact")), 0)
    elif trouble == "draining":
        gateway.app.pool.set_draining("a", True)
    elif trouble == "ejected":
        for _ in range(3):
            gateway.app.pool.probe("a", False, "down", gateway.app.clock.now())
    responses = [await gateway.chat(headers=tier("exact"), stream=stream) for _ in range(4)]
    assert other.requests == []
    for response in responses:
        error = response.json["error"]
        assert response.status == (429 if trouble == "full" else 503)
        assert error["code"] == ("rate_limit_exceeded" if trouble == "full" else "no_backend")
        reason = {"none": "tier", "full": "full", "draining": "draining", "ejected": "unhealthy"}[trouble]
        assert f"a: {reason}" in error["message"]
        assert "b: tier" in error["message"]
        assert response.headers["x-tierline-tier"] == "exact"
        assert ("retry-after" in response.headers) is (trouble == "full")
    assert (await gateway.chat(stream=stream)).status == 200  # others are served meanwhile
    assert trouble == "none" or len(other.requests) == 1
    if running is not None:
        backend.release()
        assert who(await running) == "a"


# -- capacity -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_when_all_are_full_it_is_a_429_with_retry_after_and_a_slot_that_frees_is_used(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, path: str
) -> None:
    limit = "limits.max_in_flight = 2"
    gateway = await make_gateway(backend, other, per_backend={"a": limit, "b": limit})
    backend.default = other.default = [Stall(), *chat_json()]
    tasks = [asyncio.ensure_future(gateway.chat()) for _ in range(4)]
    await backend.received(1)
    await other.received(1)
    response = await gateway.ask(path, chat())
    assert response.status == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.headers["x-tierline-reason"] == "full"
    error = response.json["error"]
    assert error["type"] == ("rate_limit_error")
    assert "a: full" in error["message"]
    assert "b: full" in error["message"]
    assert (await gateway.ask("/ready")).status == 200  # busy is able
    backend.release()
    other.release()
    assert [(await task).status for task in tasks] == [200] * 4
    assert (await gateway.ask(path, chat())).status == 200
    await gateway.ended(Outcome.SHED, *[Outcome.OK] * 5)


async def test_a_full_backend_is_no_503_when_another_is_merely_down(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, other, per_backend={"a": "limits.max_in_flight = 1"})
    gateway.app.pool.set_draining("b", True)
    backend.answer([Stall(), *chat_json()])
    running = await held(backend, gateway.chat(), 0)
    response = await gateway.chat()
    assert response.status == 429
    assert "b: draining" in response.json["error"]["message"]
    backend.release()
    assert (await running).status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_slot_is_held_until_the_answer_ends_and_not_longer(
    make_gateway: MakeGateway, backend: ScriptedBackend, stream: bool
) -> None:
    gateway = await make_gateway(backend, per_backend={"a": "limits.max_in_flight = 1"})
    answer = after(chat_stream(), 2, Stall()) if stream else [Stall(), *chat_json()]
    backend.answer(answer)
    running = await held(backend, gateway.chat(stream=stream), 0)
    assert (await gateway.chat()).status == 429
    backend.release()
    assert (await running).status == 200
    for _ in range(5):
        assert (await gateway.chat(stream=stream)).status == 200


async def test_concurrent_requests_spread_and_do_not_herd(make_gateway: MakeGateway) -> None:
    async with ScriptedBackend() as a, ScriptedBackend() as b, ScriptedBackend() as c:
        gateway = await make_gateway(a, b, c)
        for each in (a, b, c):
            each.default = [Stall(), *chat_json()]
        tasks = [asyncio.ensure_future(gateway.chat()) for _ in range(30)]
        for each in (a, b, c):
            await each.received(9)
        for each in (a, b, c):
            each.release()
        assert Counter([who(await task) for task in tasks]) == {"a": 10, "b": 10, "c": 10}


async def test_a_draining_backend_finishes_what_it_has_and_gets_nothing_new(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, other)
    gateway.app.pool.set_draining("b", True)
    backend.answer(after(chat_stream(), 2, Stall()))
    running = await held(backend, gateway.chat(stream=True), 0)
    gateway.app.pool.set_draining("b", False)
    gateway.app.pool.set_draining("a", True)
    assert {who(await gateway.chat()) for _ in range(10)} == {"b"}
    backend.release()
    assert (await running).text == "Hello there."
    gateway.app.pool.set_draining("a", False)
    assert {who(await gateway.chat()) for _ in range(24)} == {"a", "b"}


# -- context --------------------------------------------------------------------------------------------------

WORDS = "word " * 9000
SMALL, LARGE = "limits.window_tokens = 4096", "limits.window_tokens = 8192"


def prompt(path: str, text: str, **more: object) -> dict[str, object]:
    if path == "/v1/completions":
        return {"model": "tiny", "prompt": text, **more}
    if path == "/v1/responses":
        return {"model": "tiny", "input": text, **more}
    return chat(text, **more)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_prompt_that_surely_fits_nowhere_is_a_400_with_the_numbers_and_nobody_is_asked(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, path: str, stream: bool
) -> None:
    gateway = await make_gateway(backend, other, per_backend={"a": SMALL, "b": LARGE})
    response = await gateway.ask(path, prompt(path, WORDS, stream=stream))
    error = response.json["error"]
    assert response.status == 400
    assert "8192" in error["message"]
    assert "9000" in error["message"]
    if path == "/v1/messages":
        assert error["message"].startswith("prompt is too long: ")
    else:
        assert error["code"] == "context_length_exceeded"
    assert backend.requests == other.requests == []
    record = await gateway.record()
    assert record.prompt_tokens_low is not None
    assert 8192 < record.prompt_tokens_low <= 9100
    await gateway.ended(Outcome.BAD_REQUEST)


async def test_a_prompt_goes_where_it_fits_however_busy_that_is(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(
        backend, other, per_backend={"a": SMALL, "b": "limits.window_tokens = 32768"}
    )
    assert {who(await gateway.chat(WORDS)) for _ in range(5)} == {"b"}
    gateway.app.pool.set_draining("b", True)
    response = await gateway.chat("x" * 129 * 4096)
    # It is not the client's fault: the backend that holds it will be back.
    assert response.status == 503
    assert "a: prompt_too_long" in response.json["error"]["message"]
    assert "b: draining" in response.json["error"]["message"]


async def test_a_window_that_the_tier_forbids_does_not_count(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(
        backend, other, per_backend={"a": f"{SMALL}\n{REFERENCE}", "b": "limits.window_tokens = 32768"}
    )
    response = await gateway.chat(WORDS, headers=tier("exact"))
    assert (response.status, response.json["error"]["code"]) == (400, "context_length_exceeded")
    assert "4096" in response.json["error"]["message"]
    assert "exact" in response.json["error"]["message"]
    assert (await gateway.chat(WORDS)).status == 200


OVERFLOW = error_json(
    400, "This model's maximum context length is 4096 tokens. However, your prompt contains 5000."
)
FAVOUR_A = "limits.max_in_flight = 2"  # a request weighs more on b, so that a is asked first


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_an_overflow_that_the_backend_finds_is_tried_once_on_a_larger_window(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, path: str, stream: bool
) -> None:
    gateway = await make_gateway(backend, other, per_backend={"a": SMALL, "b": f"{LARGE}\n{FAVOUR_A}"})
    backend.answer(OVERFLOW)
    if path != CHAT:
        other.answer(json_answer({"id": "x", "object": "response"}))
        stream = False
    response = await gateway.ask(path, prompt(path, "hi", stream=stream))
    assert (response.status, who(response)) == (200, "b")
    assert response.headers["x-tierline-reason"] == "larger_window"
    assert (len(backend.requests), len(other.requests)) == (1, 1)
    assert backend.requests[0].body == other.requests[0].body
    record = await gateway.record()
    assert (record.attempts, record.backend) == (2, "b")
    await gateway.ended(Outcome.OK)


async def test_a_second_overflow_is_the_clients(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    async with ScriptedBackend() as third:
        limits = {"a": SMALL, "b": f"{LARGE}\n{FAVOUR_A}", "c": f"limits.window_tokens = 16384\n{FAVOUR_A}"}
        gateway = await make_gateway(backend, other, third, per_backend=limits)
        for each in (backend, other, third):
            each.answer(OVERFLOW)
        response = await gateway.chat()
        assert (response.status, response.json["error"]["code"]) == (400, "context_length_exceeded")
        assert len(backend.requests) == 1
        assert len(other.requests) + len(third.requests) == 1
        await gateway.ended(Outcome.UPSTREAM_REJECTED)


@pytest.mark.parametrize(
    "second", [SMALL, f"{LARGE}\nquality.kl_bits = 9.0", ""], ids=["same window", "tier", "unknown window"]
)
async def test_an_overflow_with_no_larger_window_to_go_to_is_told_at_once(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, second: str
) -> None:
    other.pages["/v1/models"] = json_answer({"data": [{"id": "tiny"}]})
    other.pages["/props"] = json_answer({})
    gateway = await make_gateway(
        backend,
        other,
        config=TIERS,
        per_backend={"a": f"{SMALL}\n{REFERENCE}", "b": second + f"\n{FAVOUR_A}"},
    )
    backend.answer(OVERFLOW)
    response = await gateway.chat(headers=tier("exact" if "kl" in second else "fast"))
    assert (response.status, response.json["error"]["code"]) == (400, "context_length_exceeded")
    assert other.requests == []


# -- sessions -------------------------------------------------------------------------------------------------

SESSIONS = [f"session-{i}" for i in range(12)]


async def ask_in_session(gateway: Gateway, way: str, session: str) -> Response:
    if way == "prompt_cache_key":
        return await gateway.chat(prompt_cache_key=session)
    if way == "metadata.user_id":
        return await gateway.ask("/v1/messages", chat(metadata={"user_id": session}))
    return await gateway.chat(headers={way: session})


@pytest.mark.parametrize(
    "way", ["x-session-id", "session_id", "x-claude-code-session-id", "prompt_cache_key", "metadata.user_id"]
)
async def test_a_session_stays_where_it_is_and_sessions_spread(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, way: str
) -> None:
    gateway = await make_gateway(backend, other)
    homes = {session: who(await ask_in_session(gateway, way, session)) for session in SESSIONS}
    assert set(homes.values()) == {"a", "b"}
    for session, home in homes.items():
        again = [await ask_in_session(gateway, way, session) for _ in range(3)]
        assert {(who(r), r.headers["x-tierline-reason"]) for r in again} == {(home, "session")}
    records = [record for record, _ in gateway.records.closed]
    assert len({record.session_hash for record in records}) == len(SESSIONS)
    assert not any("session-" in str(record) for record in records)


async def test_a_session_moves_when_its_backend_drains_and_returns_with_it(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, other)
    home = who(await ask_in_session(gateway, "x-session-id", "s"))
    gateway.app.pool.set_draining(home, True)
    assert who(await ask_in_session(gateway, "x-session-id", "s")) != home
    gateway.app.pool.set_draining(home, False)
    assert who(await ask_in_session(gateway, "x-session-id", "s")) == home
