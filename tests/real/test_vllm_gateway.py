"""The gateway in front of a real vLLM: streams, tools, usage, cancel, overflow, keys, and the ways in which it ends.

tests/real/test_sdks.py compares clients' answers on vLLM, too. Each start takes most of a minute: the one server of
the run serves all but the tests that end theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.client import Connection, ask
from tests.real.alike import Clients, Pair, joined
from tests.real.breaking import AT_ONCE, BODIES, Ends, assert_honest, broken_off, message_of
from tests.real.conftest import StartVllm
from tests.real.gateway import GatewayProcess
from tests.real.server import until
from tests.real.vllm_cpu import VllmServer

pytestmark = pytest.mark.vllm

PATHS = sorted(BODIES)
SLOTS = f"quality.reference = true\nlimits.max_in_flight = {4 * AT_ONCE}"


def say(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "max_tokens": 40, "temperature": 0, **more}


@pytest.fixture(scope="module")
def pair(vllm: VllmServer) -> Iterator[Pair]:
    with GatewayProcess({"vllm": vllm}) as gateway, Pair(vllm, gateway) as both:
        yield both
        assert gateway.running() == 0
        assert gateway.complaints == ""


@pytest.fixture
async def client(pair: Pair) -> AsyncIterator[openai.AsyncOpenAI]:
    async with pair.through.async_openai() as client:
        yield client


# -- more of the same as direct ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "temperature": 1.0},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["scripted"]},
        {"max_tokens": 8},
        {"n": 2, "temperature": 1.0, "top_p": 0.1, "stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
    ids=str,
)
def test_chats_with_options_are_the_same(pair: Pair, stream: bool, more: dict[str, Any]) -> None:
    options = more if stream else {key: value for key, value in more.items() if key != "stream_options"}

    def question(clients: Clients) -> Any:
        answer = clients.openai.chat.completions.create(**(say("#script:text") | options), stream=stream)
        return joined(answer) if stream else answer

    answer = pair.same(question)
    assert [choice["finish_reason"] for choice in answer["choices"]] == [
        "length" if "max_tokens" in more else "stop"
    ] * more.get("n", 1)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "tiny", "prompt": "hello"},
        {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
    ],
    ids=["prompt", "messages"],
)
def test_tokens_are_the_same_there_and_back(pair: Pair, body: dict[str, Any]) -> None:
    status, answer = pair.gateway.post("/tokenize", body)
    assert (status, answer) == pair.server.post("/tokenize", body)
    assert answer["max_model_len"] == 4096
    back = {"model": "tiny", "tokens": answer["tokens"]}
    assert pair.gateway.post("/detokenize", back) == pair.server.post("/detokenize", back)
    assert "hello" in pair.gateway.post("/detokenize", back)[1]["prompt"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score", "/pooling", "/classify"])
def test_what_this_model_cannot_do_is_refused_with_the_same_status(pair: Pair, path: str) -> None:
    body = {"model": "tiny", "input": "x", "text_1": "x", "text_2": "y", "query": "x", "documents": ["y"]}
    status, answer = pair.gateway.post(path, body)
    assert status == pair.server.post(path, body)[0]
    assert isinstance(answer["error"]["message"], str)


async def test_the_window_and_the_load_are_known(pair: Pair) -> None:
    """The gateway's view of the load is that of its last poll: it follows."""
    backend: dict[str, Any] = {}

    def running() -> int:
        (polled,) = pair.gateway.backends().values()
        backend.update(polled)
        return polled["running"] + polled["waiting"]

    await until(0, running, within=15.0)
    assert (backend["model"], backend["window_tokens"]) == ("tiny", 4096)
    assert backend["kv_tokens"] > 4096
    assert backend["prefix_queries"] is not None


# -- stored responses ----------------------------------------------------------------------------------------


def test_a_stored_response_can_be_continued_and_fetched(pair: Pair) -> None:
    client = pair.through.openai
    first = client.responses.create(model="tiny", input="hi", max_output_tokens=40)
    second = client.responses.create(
        model="tiny", input="and?", max_output_tokens=40, previous_response_id=first.id
    )
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    with client.responses.stream(
        model="tiny", input="and?", max_output_tokens=40, previous_response_id=second.id
    ) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
        third = stream.get_final_response()
    assert client.responses.retrieve(third.id).output_text == third.output_text


@pytest.mark.parametrize("how", ["retrieve", "continue"])
def test_an_unknown_response_is_not_found(pair: Pair, how: str) -> None:
    def question(clients: Clients) -> Any:
        if how == "retrieve":
            return clients.openai.responses.retrieve("resp_nowhere")
        return clients.openai.responses.create(
            model="tiny", input="hi", max_output_tokens=40, previous_response_id="resp_nowhere"
        )

    assert pair.same(question)["status"] == 404


# -- cancel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_leaves_frees_the_engine(pair: Pair, path: str, stream: bool, how: str) -> None:
    ident = f"leaves{path}/{stream}/{how}"
    async with await Connection.open(pair.gateway.port) as connection:
        connection.send(path, BODIES[path] | {"stream": stream}, headers={"x-request-id": ident})
        if stream:
            await connection.read_until(b" two")
        await pair.server.until_running(1)
        getattr(connection, how)()
        await pair.server.until_running(0, within=3.0)
    record = await pair.gateway.record(ident)
    assert (record["outcome"], record["stream"]) == ("cancelled", stream)
    assert pair.gateway.running() == 0


async def test_a_client_that_leaves_while_its_request_waits_frees_its_place(pair: Pair) -> None:
    """Four run, the fifth waits in the engine; all five leave."""
    connections = [await Connection.open(pair.gateway.port) for _ in range(5)]
    for connection in connections:
        connection.send("/v1/chat/completions", BODIES["/v1/chat/completions"] | {"stream": True})
    await pair.server.until_running(5)
    for connection in reversed(connections):
        connection.reset()
    await pair.server.until_running(0, within=3.0)
    await pair.gateway.until_running(0)


# -- overflow ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_prompt_beyond_the_window_is_an_honest_refusal(
    pair: Pair, client: openai.AsyncOpenAI, path: str, stream: bool
) -> None:
    async with pair.through.async_claude() as claude:
        create: Any = {
            "/v1/chat/completions": client.chat.completions.create,
            "/v1/completions": client.completions.create,
            "/v1/messages": claude.messages.create,
            "/v1/responses": client.responses.create,
        }[path]
        field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path)
        longer = {field: "x" * 5000} if field else {"messages": say("x" * 5000)["messages"]}
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
            await create(**(BODIES[path] | longer), stream=stream)
    error = caught.value
    if isinstance(error, openai.BadRequestError):
        assert (error.code, error.type) == ("context_length_exceeded", "invalid_request_error")
    else:
        assert "prompt is too long" in error.message
    assert "4096" in error.message
    record = await pair.gateway.record(error.response.headers["x-request-id"])
    assert (record["attempts"], record["outcome"]) == (1, "upstream_rejected")


# -- keys, and ends ------------------------------------------------------------------------------------------


async def test_keys_and_then_the_end_by_sigterm(start_vllm: StartVllm) -> None:
    """One start for both: a server that wants a key, and that an operator stops while it answers.

    vLLM's own end is a race of its processes: its streams end with an error, or with "abort", or not at all, and
    then it is the gateway's limits that end them.
    """
    server = await asyncio.to_thread(start_vllm, key="sk-theirs", max_num_seqs=2 * AT_ONCE)
    known = 'model = "tiny"\nlimits.window_tokens = 4096\n'
    await _keys(server, known)
    ours = (
        known
        + SLOTS
        + '\nkey = "env:VLLM_KEY"\ntimeouts.first_token = 30.0\ntimeouts.gap = 3.0\ntimeouts.total = 30.0'
    )
    environment = {"VLLM_KEY": "sk-theirs"}
    with GatewayProcess({"vllm": server}, per_backend={"vllm": ours}, environment=environment) as gateway:

        async def terminate() -> None:
            assert server.child is not None
            server.child.terminate()

        await _assert_broken(gateway, terminate, PATHS)
        assert await server.until_ended(within=30.0) in (0, -15)


async def _keys(server: VllmServer, known: str) -> None:
    """(key of the gateway for the backend, key of the client) → what the client gets."""
    for ours, theirs, status in (
        (None, "sk-theirs", 200),  # neither side has keys configured: the client's own passes
        (None, "sk-wrong", 401),
        (None, None, 401),
        ("sk-theirs", "sk-any", 200),  # the gateway's own goes there, the client's does not
        ("sk-theirs", None, 200),
        ("sk-wrong", "sk-theirs", 502),  # a fault of the set-up, not of the client
        ("sk-wrong", None, 502),
    ):
        more = known + ('key = "env:VLLM_KEY"' if ours else "")
        headers = {"authorization": f"Bearer {theirs}"} if theirs else {}
        environment = {"VLLM_KEY": ours or ""}
        with GatewayProcess({"vllm": server}, per_backend={"vllm": more}, environment=environment) as gateway:
            for stream in (False, True):
                body = say("#script:text", stream=stream)
                answer = await ask(gateway.port, "/v1/chat/completions", body, headers=headers)
                assert answer.status == status, (ours, theirs, stream)
                assert b"sk-" not in answer.body
                if status == 502:
                    assert answer.json["error"]["code"] == "upstream_auth"
                elif status == 401:
                    assert answer.json["error"]["type"] == "authentication_error"


async def test_what_an_engine_gives_up_is_no_answer(start_vllm: StartVllm) -> None:
    """SIGTERM to the engine: finish_reason "abort", on messages no stop_reason at all.

    Of a response vLLM says "completed": nothing there tells it from a whole one.
    """
    server = await asyncio.to_thread(start_vllm, max_num_seqs=2 * AT_ONCE)
    with GatewayProcess({"vllm": server}, per_backend={"vllm": SLOTS}) as gateway:

        async def terminate() -> None:
            server.terminate_engine()

        paths = [path for path in PATHS if path != "/v1/responses"]
        ends = await _assert_broken(gateway, terminate, paths)
        assert "abort" in message_of(ends.seen["/v1/chat/completions"])
        assert (await gateway.record("raw/v1/chat/completions"))["finish_reason"] == "abort"


async def test_a_killed_engine_ends_no_answer_cleanly(start_vllm: StartVllm) -> None:
    server = await asyncio.to_thread(start_vllm, max_num_seqs=2 * AT_ONCE)
    with GatewayProcess({"vllm": server}, per_backend={"vllm": SLOTS}) as gateway:

        async def kill() -> None:
            server.kill_engine()

        ends = await _assert_broken(gateway, kill, PATHS)
        assert isinstance(ends.unstreamed, openai.InternalServerError)
        assert ends.unstreamed.status_code in (500, 502)
        await server.until_ended()
        answer = await ask(gateway.port, "/v1/chat/completions", say("hi"))
        assert answer.status in (502, 503)
        assert answer.json["error"]["code"] in ("upstream_unreachable", "no_backend")


async def _assert_broken(
    gateway: GatewayProcess, break_it: Callable[[], Awaitable[None]], paths: list[str]
) -> Ends:
    """What runs is broken off, and said to be."""
    ends = await broken_off(gateway, break_it)
    assert_honest(ends, paths)
    for path in paths:
        record = await gateway.record(f"raw{path}")
        assert record["outcome"] in ("upstream_error", "upstream_cut", "upstream_timeout"), path
        assert record["status"] == 200
    await gateway.until_running(0)
    return ends
