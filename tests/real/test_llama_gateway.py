"""The gateway in front of real llama-servers: cancel, overflow, qualities, sessions, and a server that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import openai
import pytest

from tests.client import Connection
from tests.real.alike import Clients
from tests.real.breaking import AT_ONCE, BODIES, assert_honest, broken_off, message_of
from tests.real.conftest import StartLlama, start_or_give_up
from tests.real.gateway import GatewayProcess
from tests.real.llama import LlamaServer

pytestmark = pytest.mark.real

PATHS = sorted(BODIES)
LEAST_LOAD = '[policy]\nname = "least_load"\n'
"""Choices that need no forecast: what is compared here are the servers."""
GENEROUS = "[policy.tokens]\nbytes_per_token = 20.0"  # prompts seem short: the backends judge


def say(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "max_tokens": 40, "temperature": 0, **more}


@pytest.fixture(scope="module")
def servers(llama: LlamaServer) -> Iterator[dict[str, LlamaServer]]:
    """One model twice: `fp8` with a window of 1024 tokens, `bf16` with 4096."""
    with ExitStack() as stack:
        yield {"fp8": start_or_give_up(stack, LlamaServer(window_tokens=1024)), "bf16": llama}


@pytest.fixture(scope="module")
def tiers(servers: dict[str, LlamaServer]) -> Iterator[GatewayProcess]:
    """fp8 is so roomy that it is always the less loaded one; bf16 is the reference."""
    per_backend = {
        "fp8": "quality.kl_bits = 0.0055\nlimits.max_in_flight = 1000\nlimits.kv_tokens = 10_000_000",
        "bf16": "quality.reference = true\nlimits.max_in_flight = 20",
    }
    models = '[models.tiny]\n[models.tiny-exact]\nalias_of = "tiny"\ntier = "exact"\n'
    config = f"{models}{LEAST_LOAD}[policy.router]\nwindow_penalty = 0.0\n{GENEROUS}"
    with GatewayProcess(servers, config=config, per_backend=per_backend) as gateway:
        yield gateway
        assert gateway.running() == 0


@pytest.fixture(scope="module")
def twins(servers: dict[str, LlamaServer]) -> Iterator[GatewayProcess]:
    """Two backends that are alike to the router."""
    with GatewayProcess(
        servers, config=f"{LEAST_LOAD}[policy.router]\nwindow_penalty = 0.0\n{GENEROUS}"
    ) as gateway:
        yield gateway
        assert gateway.running() == 0


@pytest.fixture(scope="module")
def single(llama: LlamaServer) -> Iterator[GatewayProcess]:
    with GatewayProcess({"llama": llama}) as gateway:
        yield gateway
        assert gateway.running() == 0
        assert gateway.complaints == ""


@pytest.fixture
async def tiers_client(tiers: GatewayProcess) -> Any:
    async with Clients(tiers.url).async_openai() as client:
        yield client


# -- cancel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_leaves_its_stream_frees_the_server(
    single: GatewayProcess, llama: LlamaServer, path: str, how: str
) -> None:
    ident = f"leaves{path}/{how}"
    async with await Connection.open(single.port) as connection:
        connection.send(path, BODIES[path] | {"stream": True}, headers={"x-request-id": ident})
        await connection.read_until(b" two")
        await llama.until_running(1)
        getattr(connection, how)()
        await llama.until_running(0, within=2.0)
    assert (await single.record(ident))["outcome"] == "cancelled"
    assert single.running() == 0


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_before_the_answer_is_cancelled(
    single: GatewayProcess, llama: LlamaServer, path: str
) -> None:
    """llama-server itself computes an unstreamed answer to its end, gone or not, also when asked directly."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    async with await Connection.open(single.port) as connection:
        connection.send(path, BODIES[path] | {limit: 1500}, headers={"x-request-id": f"whole{path}"})
        await llama.until_running(1)
        connection.close()
        record = await single.record(f"whole{path}", within=2.0)
    assert (record["outcome"], record["stream"], record["status"]) == ("cancelled", False, None)
    assert single.running() == 0
    await llama.until_running(0, within=30.0)


async def test_an_sdk_that_stops_reading_frees_the_server(single: GatewayProcess, llama: LlamaServer) -> None:
    async with Clients(single.url).async_openai() as client:
        async with await client.chat.completions.create(
            **BODIES["/v1/chat/completions"], stream=True
        ) as stream:
            await anext(aiter(stream))
            await llama.until_running(1)
        await llama.until_running(0, within=2.0)


# -- overflow ------------------------------------------------------------------------------------------------

TOO_LONG = "x" * 5000  # of a window of 4096
NUMBERS = r"\b50\d\d\b.*\b4096\b"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_prompt_beyond_every_window_is_an_honest_refusal(
    tiers: GatewayProcess, path: str, stream: bool
) -> None:
    async with Clients(tiers.url).async_openai() as client, Clients(tiers.url).async_claude() as claude:
        create: Any = {
            "/v1/chat/completions": client.chat.completions.create,
            "/v1/completions": client.completions.create,
            "/v1/messages": claude.messages.create,
            "/v1/responses": client.responses.create,
        }[path]
        field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path)
        longer = {field: TOO_LONG} if field else {"messages": say(TOO_LONG)["messages"]}
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
            await create(**(BODIES[path] | longer), stream=stream)
    error = caught.value
    if isinstance(error, openai.BadRequestError):
        assert (error.code, error.type) == ("context_length_exceeded", "invalid_request_error")
    else:
        assert "prompt is too long" in error.message
    # fp8 said so first, then bf16 was tried.
    assert error.response.headers["x-tierline-backend"] == "bf16"
    record = await tiers.record(error.response.headers["x-request-id"])
    assert (record["attempts"], record["outcome"]) == (2, "upstream_rejected")


async def test_the_refusal_says_the_numbers(single: GatewayProcess) -> None:
    async with Clients(single.url).async_openai() as client:
        with pytest.raises(openai.BadRequestError, match=NUMBERS) as caught:
            await client.chat.completions.create(**say(TOO_LONG))
    assert caught.value.code == "context_length_exceeded"


async def test_a_prompt_that_fits_nowhere_is_refused_without_asking(single: GatewayProcess) -> None:
    async with Clients(single.url).async_openai() as client:
        with pytest.raises(openai.BadRequestError, match="4096 tokens") as caught:
            await client.chat.completions.create(**say("x " * 300_000))
    assert caught.value.code == "context_length_exceeded"
    assert (await single.record(caught.value.response.headers["x-request-id"]))["attempts"] == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_overflow_is_tried_once_on_a_larger_window(
    tiers: GatewayProcess, tiers_client: openai.AsyncOpenAI, stream: bool
) -> None:
    short = await tiers_client.chat.completions.with_raw_response.create(**say("hi"))
    assert short.headers["x-tierline-backend"] == "fp8"
    body = say("x" * 1500 + " #script:text", stream=stream)
    long = await tiers_client.chat.completions.with_raw_response.create(**body)
    content = b"".join([part async for part in long.http_response.aiter_bytes()])
    assert b"scripted" in content
    assert long.headers["x-tierline-backend"] == "bf16"
    assert long.headers["x-tierline-reason"] == "larger_window"
    record = await tiers.record(long.headers["x-request-id"])
    assert (record["attempts"], record["outcome"], record["finish_reason"]) == (2, "ok", "stop")
    assert record["prompt_tokens"] > 1500


# -- qualities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exact",
    [{"model": "tiny-exact"}, {"extra_headers": {"x-quality-tier": "exact"}}],
    ids=["alias", "header"],
)
async def test_exact_means_the_reference_weights(
    tiers_client: openai.AsyncOpenAI, exact: dict[str, Any]
) -> None:
    for _ in range(3):
        answer = await tiers_client.chat.completions.with_raw_response.create(**(say("hi") | exact))
        assert answer.headers["x-tierline-backend"] == "bf16"
        assert answer.headers["x-tierline-tier"] == "exact"


async def test_exact_is_never_served_by_less(tiers: GatewayProcess, tiers_client: openai.AsyncOpenAI) -> None:
    """The reference is drained: an exact request is refused, another one served."""
    tiers.drain("bf16")
    try:
        with pytest.raises(openai.InternalServerError, match="bf16: draining") as caught:
            await tiers_client.chat.completions.create(**(say("hi") | {"model": "tiny-exact"}))
        assert (caught.value.status_code, caught.value.code) == (503, "no_backend")
        answer = await tiers_client.chat.completions.with_raw_response.create(**say("hi"))
        assert answer.headers["x-tierline-backend"] == "fp8"
    finally:
        tiers.undrain("bf16")


async def test_models_are_listed_with_window_and_tier(tiers_client: openai.AsyncOpenAI) -> None:
    models = {model.id: model.model_dump() async for model in tiers_client.models.list()}
    assert {name: (m["max_model_len"], m["tier"]) for name, m in models.items()} == {
        "tiny": (4096, "balanced"),
        "tiny-exact": (4096, "exact"),
    }


# -- sessions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["header", "field"])
async def test_a_session_stays_where_its_prefix_is_cached(twins: GatewayProcess, how: str) -> None:
    async with Clients(twins.url).async_openai() as client:
        sessions = [f"{how}-{number}" for number in range(8)]
        homes = [{await _turn(client, how, session, turn) for turn in range(3)} for session in sessions]
    assert all(len(home) == 1 for home in homes)
    assert set.union(*homes) == {"fp8", "bf16"}


async def _turn(client: openai.AsyncOpenAI, how: str, session: str, turn: int) -> str:
    """One request of a session; the backend that answered."""
    own = {"prompt_cache_key": session} if how == "field" else {"extra_headers": {"x-session-id": session}}
    prompt = f"{session}: " + "again " * 50
    answer = await client.chat.completions.with_raw_response.create(**say(prompt), **own)
    usage = answer.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    if turn:
        assert answer.headers["x-tierline-reason"] == "session"
        assert (usage.prompt_tokens_details.cached_tokens or 0) > 200
    return answer.headers["x-tierline-backend"]


# -- the server dies -----------------------------------------------------------------------------------------


async def test_a_killed_server_ends_no_answer_cleanly(start_llama: StartLlama) -> None:
    server = await asyncio.to_thread(start_llama, slots=AT_ONCE)
    with GatewayProcess({"doomed": server}, config="[timeouts]\nconnect = 1.0") as gateway:

        async def kill() -> None:
            assert server.child is not None
            os.kill(server.child.pid, signal.SIGKILL)

        ends = await broken_off(gateway, kill)
        assert_honest(ends)
        assert isinstance(ends.unstreamed, openai.InternalServerError)
        assert ends.unstreamed.status_code == 502
        for path, response in ends.seen.items():
            assert "doomed" in message_of(response)
            record = await gateway.record(f"raw{path}")
            assert (record["outcome"], record["finish_reason"], record["status"]) == (
                "upstream_cut",
                None,
                200,
            )
        assert gateway.running() == 0
        # Nobody is left: said at once, and by the health checks soon after.
        async with Clients(gateway.url).async_openai() as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(**say("hi"))
        assert caught.value.status_code in (502, 503)
