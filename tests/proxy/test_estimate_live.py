"""What the gateway makes of a request for routing: tokens that it learns to count, a chain, a conversation."""

from __future__ import annotations

from random import Random

import pytest

from proxy.errors import Outcome
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.proxy.scenes import QUIET
from tests.scripted import ScriptedBackend, json_answer

WORDS = [f"w{n * 7919 % 1000}" for n in range(500)]


def text(seed: int, words: int) -> str:
    return " ".join(Random(seed).choices(WORDS, k=words))


def answer(prompt_tokens: int) -> list[object]:
    body = {
        "id": "c",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "total_tokens": prompt_tokens + 1},
    }
    return json_answer(body)


async def taught(gateway: Gateway, backend: ScriptedBackend, requests: int, rate: float = 2.0) -> None:
    """Each word is `rate` tokens."""
    for seed in range(requests):
        words = 20 + seed * 13 % 200
        backend.answer(answer(round(words * rate)))
        assert (await gateway.chat(text(seed, words))).status == 200


async def test_the_estimate_learns_from_usage_and_states_its_error(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    await taught(gateway, backend, 40)
    records = [record for record, _ in gateway.records.closed]
    assert records[0].prompt_tokens_error is None

    def error(record: object) -> float:
        return abs(record.prompt_tokens_estimate / record.prompt_tokens - 1)  # type: ignore[attr-defined]

    assert max(error(record) for record in records[-10:]) < 0.1
    assert records[-1].prompt_tokens_error is not None
    assert records[-1].prompt_tokens_error < 0.1
    for record in records:
        assert record.prompt_tokens_low is not None
        assert record.prompt_tokens_low <= record.prompt_tokens <= record.prompt_tokens_high  # type: ignore[operator]
    exposition = gateway.app.metrics.render()[0].decode()
    assert 'tierline_prompt_estimate_error_ratio{content="text",model="tiny"}' in exposition or (
        'tierline_prompt_estimate_error_ratio{content="code",model="tiny"}' in exposition
    )


async def test_calibration_can_be_switched_off(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    gateway = await make_gateway(backend, config=QUIET + "[policy]\ncalibrate = false\n")
    await taught(gateway, backend, 12)
    assert all(record.prompt_tokens_error is None for record, _ in gateway.records.closed)


WINDOWS = {"a": "limits.window_tokens = 1000", "b": "limits.window_tokens = 9000"}


@pytest.mark.parametrize(
    ("words", "asked"),
    [(30, False), (480, True), (500, True), (520, True)],
    ids=["far", "below", "at", "above"],
)
async def test_the_tokenizer_is_asked_only_near_a_limit(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, words: int, asked: bool
) -> None:
    """One window is 1000 tokens, five hundred words; the other one is larger."""
    gateway = await make_gateway(backend, other, config=QUIET, per_backend=WINDOWS)
    gateway.app.pool.set_draining("b", True)
    await taught(gateway, backend, 30)
    gateway.app.pool.set_draining("b", False)
    before, seen = gateway.app.gateway.tokenizer.asked, len(backend.requests)
    if asked:
        backend.answer(json_answer({"count": words * 2, "max_model_len": 1000, "tokens": []}))
    for served in (backend, other):
        served.answer(answer(words * 2))
    response = await gateway.chat(text(99, words))
    assert response.status == 200
    assert gateway.app.gateway.tokenizer.asked - before == asked
    if not asked:
        return
    assert backend.requests[seen].path == "/tokenize"
    assert backend.requests[seen].json["messages"][0]["content"] == text(99, words)
    record = gateway.records.closed[-1][0]
    assert record.prompt_tokens_estimate == record.prompt_tokens_low == words * 2
    if words > 500:
        assert record.backend == "b"


async def test_where_all_windows_are_the_same_the_backend_judges(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET, per_backend={"a": WINDOWS["a"]})
    await taught(gateway, backend, 30)
    words = "This model's maximum context length is 1000 tokens. However, your request has 1020 input tokens."
    theirs = {"error": {"message": words, "type": "BadRequestError", "param": None, "code": 400}}
    backend.answer(json_answer(theirs, 400))
    response = await gateway.chat(text(99, 510))
    assert (response.status, response.json["error"]["code"]) == (400, "context_length_exceeded")
    assert response.json["error"]["message"] == words
    assert gateway.app.gateway.tokenizer.asked == 0


@pytest.mark.parametrize(
    "page", [json_answer({"tokens": [1]}), json_answer([]), json_answer({"count": "x"}), json_answer({}, 404)]
)
async def test_a_tokenizer_that_says_nothing_is_left_alone(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, page: list[object]
) -> None:
    gateway = await make_gateway(backend, other, config=QUIET, per_backend=WINDOWS)
    gateway.app.pool.set_draining("b", True)
    await taught(gateway, backend, 30)
    before = gateway.app.gateway.tokenizer.asked
    backend.answer(page, *[answer(960)] * 3)
    for _ in range(3):
        assert (await gateway.chat(text(99, 480))).status == 200
    assert gateway.app.gateway.tokenizer.asked == before + 1
    gateway.assert_idle()


# -- conversations --------------------------------------------------------------------------------------------


async def conversation(gateway: Gateway, body: dict[str, object], **headers: str) -> str | None:
    count = len(gateway.records.closed)
    await gateway.ask(CHAT, body, headers={k.replace("_", "-"): v for k, v in headers.items()})
    record, _ = await gateway.records.get(count)
    return record.conversation


async def test_a_conversation_is_known_by_its_session_or_by_how_it_begins(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=QUIET)
    first = chat("hello")
    longer = {**first, "messages": [*first["messages"], {"role": "assistant", "content": "hi"}]}
    begun = await conversation(gateway, first)
    assert begun is not None
    assert await conversation(gateway, longer) == begun
    assert await conversation(gateway, chat("hallo")) != begun
    by_header = await conversation(gateway, first, x_session_id="s")
    assert by_header not in (None, begun)
    assert await conversation(gateway, chat("other"), x_session_id="s") == by_header
    assert await conversation(gateway, chat("other", prompt_cache_key="s")) == by_header
    for name in gateway.app.config.server.session_headers:
        assert await conversation(gateway, chat("other"), **{name.replace("-", "_"): "s"}) == by_header or (
            "_" in name
        )


async def test_an_api_key_is_never_an_identity_and_tenants_are_apart(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    config = QUIET + (
        '[server]\nport = 0\n[[server.keys]]\nname = "one"\nkey = "env:ONE"\n'
        '[[server.keys]]\nname = "two"\nkey = "env:TWO"\n'
    )
    env = {"ONE": "sk-one", "TWO": "sk-two"}
    gateway = await make_gateway(backend, config=config, env=env)
    one = await conversation(gateway, chat("a"), authorization="Bearer sk-one")
    assert await conversation(gateway, chat("b"), authorization="Bearer sk-one") != one
    assert await conversation(gateway, chat("a"), authorization="Bearer sk-two") != one
    of_one = await conversation(gateway, chat(), authorization="Bearer sk-one", x_session_id="s")
    of_two = await conversation(gateway, chat(), authorization="Bearer sk-two", x_session_id="s")
    assert of_one != of_two
    shown = " ".join(str(record) for record, _ in gateway.records.closed)
    assert "sk-" not in shown


async def test_own_session_headers_take_the_place_of_the_usual_ones(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    config = QUIET + '[server]\nport = 0\nsession_headers = ["x-my-agent"]\n'
    gateway = await make_gateway(backend, config=config)
    mine = await conversation(gateway, chat("a"), x_my_agent="s")
    assert await conversation(gateway, chat("b"), x_my_agent="s") == mine
    assert await conversation(gateway, chat("b"), x_session_id="s") != mine


async def test_a_warm_turn_is_expected_warm_and_goes_where_it_is(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    limits = dict.fromkeys("ab", "limits.window_tokens = 100000")
    gateway = await make_gateway(backend, other, config=QUIET, per_backend=limits)
    messages = [{"role": "user", "content": text(1, 5000)}]
    homes, warm = [], []
    for turn in range(4):
        response = await gateway.ask(CHAT, {"model": "tiny", "messages": messages, "stream": True})
        homes.append(response.headers["x-tierline-backend"])
        record, _ = await gateway.records.get(turn)
        warm.append(record.cached_tokens_estimate)
        messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": text(turn, 50)}]
    assert len(set(homes)) == 1
    assert warm[0] == 0
    assert all(tokens is not None and tokens > 3000 for tokens in warm[1:])
    await gateway.ended(*[Outcome.OK] * 4)
