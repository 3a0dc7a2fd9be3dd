"""A broken stream goes on at a backend that gives no token ids: by its text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from proxy.abilities import Ability, Prefill, find_out
from proxy.errors import Ending
from tests.proxy.conftest import CHAT, Gateway, MakeGateway
from tests.proxy.test_continuation import (
    BREAKS,
    CALLS,
    LONG_TOOL,
    ON,
    able,
    body,
    cannot,
    events,
    heard,
)
from tests.scripted import (
    Call,
    Close,
    ScriptedBackend,
    Step,
    chat_event,
    json_answer,
    sse,
    usage_event,
)
from tests.sim.running import Running, running

BY_TEXT = ON.replace("exact", "text")
TEXT = "hi #sim tokens=40 think=4"
IN_ORDER = 'def score(facts, backend):\n    return {"place": float("abc".find(backend.name))}\n'
Two = tuple[Running, Running]


@pytest.fixture
async def sims() -> AsyncIterator[Two]:
    """Servers that go on with an answer's beginning, and give no ids."""
    async with (
        running(time_scale=200.0, token_ids=False) as one,
        running(time_scale=200.0, token_ids=False) as two,
    ):
        yield one, two


async def gateway_of(make_gateway: MakeGateway, *sims: Running, config: str = BY_TEXT) -> Gateway:
    gateway = await make_gateway(*(sim.url for sim in sims), config=config)
    await able(gateway)
    return gateway


async def broken(gateway: Gateway, sims: Two, asked: dict[str, Any], *, after: int = 24) -> Any:
    """(answer, record) of a request whose first backend breaks, when another may go on."""
    whole = await gateway.ask(CHAT, asked)
    assert whole.status == 200
    first = (await gateway.record()).backend or ""
    await sims["ab".index(first)].fault("reset", after_tokens=after)
    return await gateway.ask(CHAT, asked), await gateway.record(1)


@pytest.mark.parametrize("fault", BREAKS, ids=str)
async def test_a_text_that_breaks_arrives_whole_and_once(
    make_gateway: MakeGateway, sims: Two, fault: str
) -> None:
    gateway = await gateway_of(make_gateway, *sims)
    whole = heard(await gateway.ask(CHAT, body(TEXT)))
    first = (await gateway.record()).backend or ""
    await sims["ab".index(first)].fault(**BREAKS[fault], after_tokens=24)  # type: ignore[arg-type]
    reply = await gateway.ask(CHAT, body(TEXT))
    got = heard(reply)
    assert got[:4] == whole[:4]
    (was,), (counted,) = whole[4], got[4]
    assert counted["total_tokens"] == counted["prompt_tokens"] + counted["completion_tokens"]
    assert all(abs(was[key] - counted[key]) <= 4 for key in was), "an estimate: each piece is cut for itself"
    assert len({event["id"] for event in events(reply)}) == 1
    record = await gateway.record(1)
    gateway.assert_idle()
    if fault == "malformed" and not record.legs:
        return  # it may have come in the very first read: then all was asked anew
    assert record.continuation is Ending.WHOLE
    ((name, tokens, by),) = record.legs
    assert name == record.backend != first
    assert by == "text"
    assert 0 < tokens <= 30


@pytest.mark.parametrize("after", range(9, 44, 5))
async def test_wherever_a_text_is_cut_no_blank_is_lost_and_none_comes_twice(
    make_gateway: MakeGateway, sims: Two, after: int
) -> None:
    gateway = await gateway_of(make_gateway, *sims)
    whole = await gateway.ask(CHAT, body(TEXT))
    first = (await gateway.record()).backend or ""
    await sims["ab".index(first)].fault("reset", after_tokens=after)
    reply = await gateway.ask(CHAT, body(TEXT))
    assert (await gateway.record(1)).continuation is Ending.WHOLE

    def text(response: Any) -> str:
        choices = [choice for event in events(response) for choice in event["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    assert text(reply) == text(whole)


async def test_a_limit_counts_what_was_there(make_gateway: MakeGateway, sims: Two) -> None:
    gateway = await gateway_of(make_gateway, *sims)
    reply, record = await broken(gateway, sims, body(TEXT, max_tokens=34))
    *_, finish, (usage,) = heard(reply)
    assert finish == ["length"]
    assert record.continuation is Ending.WHOLE
    assert usage["completion_tokens"] == 34


@pytest.mark.parametrize(
    ("asked", "after", "why"),
    [
        (body("hi #sim tokens=6 think=40"), 20, "thinking"),
        (body(CALLS, tools=[LONG_TOOL]), 40, "call"),
        (body("hi #sim tokens=40 think=0"), 20, "thinking"),
        (body(TEXT, seed=3), 24, "seed"),
        (body(TEXT, add_generation_prompt=True, truncate_prompt_tokens=100), 24, "truncate_prompt_tokens"),
    ],
    ids=["in thinking", "in a call", "no thinking though it began", "a seed", "a cut prompt"],
)
async def test_where_text_does_not_do_the_stream_ends_with_an_error(
    make_gateway: MakeGateway, sims: Two, asked: dict[str, Any], after: int, why: str
) -> None:
    gateway = await gateway_of(make_gateway, *sims)
    reply, record = await broken(gateway, sims, asked, after=after)
    assert events(reply)[-1]["error"]["code"] == "upstream_cut"
    assert not reply.body.endswith(b"[DONE]\n\n")
    assert (record.continuation, record.continuation_why) == (Ending.UNSAFE, why)
    gateway.assert_idle()


async def test_exact_stays_what_it_is(make_gateway: MakeGateway, sims: Two) -> None:
    gateway = await gateway_of(make_gateway, *sims, config=ON)
    reply, record = await broken(gateway, sims, body(TEXT))
    assert events(reply)[-1]["error"]["code"] == "upstream_cut"
    assert (record.continuation, record.continuation_why) == (Ending.UNSAFE, "backend")


@pytest.mark.parametrize(
    ("ids", "leg"), [((True, False, True), ("c", "token")), ((True, False), ("b", "text"))]
)
async def test_who_can_go_on_by_token_goes_before_who_can_by_text(
    make_gateway: MakeGateway, tmp_path: Path, ids: tuple[bool, ...], leg: tuple[str, str]
) -> None:
    (tmp_path / "first.py").write_text(IN_ORDER)
    async with AsyncExitStack() as stack:
        sims = [await stack.enter_async_context(running(time_scale=200.0, token_ids=can)) for can in ids]
        order = BY_TEXT + '[policy]\nfile = "first.py"\n'
        gateway = await gateway_of(make_gateway, *sims, config=order)
        whole = heard(await gateway.ask(CHAT, body(TEXT)))
        await sims[0].fault("reset", after_tokens=24)
        assert heard(await gateway.ask(CHAT, body(TEXT)))[:4] == whole[:4]
        ((name, _, by),) = (await gateway.record(1)).legs
        assert (name, by) == leg


async def test_a_leg_by_text_that_breaks_goes_on_by_text(make_gateway: MakeGateway, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        sims = [await stack.enter_async_context(running(time_scale=200.0, token_ids=False)) for _ in range(3)]
        gateway = await gateway_of(make_gateway, *sims)
        whole = heard(await gateway.ask(CHAT, body(TEXT)))
        first = (await gateway.record()).backend or ""
        rest = [sim for name, sim in zip("abc", sims, strict=True) if name != first]
        await sims["abc".index(first)].fault("reset", after_tokens=15)
        await gateway.ask(CHAT, body(TEXT))
        second = (await gateway.record(1)).legs[0][0]
        del rest
        await sims["abc".index(first)].fault("reset", after_tokens=15)
        await sims["abc".index(second)].fault("reset", after_tokens=8)
        assert heard(await gateway.ask(CHAT, body(TEXT)))[:4] == whole[:4]
        record = await gateway.record(2)
        assert record.continuation is Ending.WHOLE
        assert [by for _, _, by in record.legs][:1] == ["text"]


async def test_a_completion_goes_on_as_text(make_gateway: MakeGateway, sims: Two) -> None:
    gateway = await gateway_of(make_gateway, *sims)
    asked = {"model": "tiny", "prompt": "a text", "max_tokens": 30, "stream": True}
    whole = await gateway.ask("/v1/completions", asked)
    first = (await gateway.record()).backend or ""
    await sims["ab".index(first)].fault("reset", after_tokens=12)
    reply = await gateway.ask("/v1/completions", asked)
    assert reply.body.endswith(b"data: [DONE]\n\n")
    assert len({event["id"] for event in events(reply)}) == 1
    record = await gateway.record(1)
    assert (record.continuation, record.legs[0][2]) == (Ending.WHOLE, "text")
    cut, full = (
        "".join(choice["text"] for event in events(response) for choice in event["choices"])
        for response in (reply, whole)
    )
    assert cut[:40] == full[:40], "the same beginning; what this model says behind it is its own affair"
    assert record.completion_tokens == 30


# -- servers of other kinds, scripted ------------------------------------------------------------------------------

HEAD = {"id": "first", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def delta(content: str, finish: str | None = None, key: str = "content") -> bytes:
    return chat_event({key: content}, finish)


async def begun(
    make_gateway: MakeGateway,
    first: ScriptedBackend,
    second: ScriptedBackend,
    had: str,
    rest: list[bytes],
    *,
    echoes: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """(answer, what the second was sent to go on) of a text that breaks behind `had`."""
    for backend in (first, second):
        cannot(backend)
    gateway = await make_gateway(first, second, config=BY_TEXT)
    await able(gateway)
    able_to = Ability(False, "the same", b"/tokenize", Prefill(b"/apply-template", echoes))
    for name in gateway.app.pool.backends:
        gateway.app.abilities._known[name] = gateway.app.clock.now(), able_to
    gateway.app.pool.set_draining("b", True)
    steps: list[Step] = [*sse(delta(had), done=False)[:-1]]
    first.answer([*steps, Call(lambda: gateway.app.pool.set_draining("b", False)), Close()])
    second.answer(json_answer({"tokens": list(range(7))}))
    second.answer(json_answer({"prompt": RENDERED + had.rstrip()}))
    second.answer(json_answer({"prompt": RENDERED}))
    second.answer(sse(*rest))
    reply = await gateway.ask(CHAT, body("hi"))
    gateway.assert_idle()
    return reply, (await second.received(5)).json


ENDS: dict[str, tuple[str, list[bytes], str]] = {
    "the blank comes again": ("Hello ", [delta(" there", "stop")], "Hello there"),
    "no blank comes": ("Hello ", [delta("there", "stop")], "Hello there"),
    "another blank comes": ("Hello\n\n", [delta("\n- there", "stop")], "Hello\n\n- there"),
    "blanks in pieces": ("Hello \n ", [delta(" "), delta("\n"), delta(" there", "stop")], "Hello \n there"),
    "taken for thinking": ("Hello ", [delta(" the", key="reasoning"), delta("re", "stop")], "Hello there"),
    "nothing was left": ("Hello there", [chat_event({}, "stop")], "Hello there"),
}


@pytest.mark.parametrize("case", ENDS)
async def test_at_the_seam_everything_is_there_once(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, case: str
) -> None:
    had, rest, text = ENDS[case]
    reply, asked = await begun(make_gateway, backend, other, had, [*rest, usage_event((20, 3))])
    choices = [choice for event in events(reply) for choice in event["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == text
    assert not any(choice["delta"].get("reasoning") for choice in choices)
    assert asked["messages"][-1] == {"role": "assistant", "content": had.rstrip()}
    assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)
    usage = {"prompt_tokens": 13, "completion_tokens": 10, "total_tokens": 23}
    assert heard(reply)[3:] == (["stop"], [usage])


@pytest.mark.parametrize("step", [1, 4, 50])
async def test_what_a_backend_repeats_of_the_beginning_is_skipped(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, step: int
) -> None:
    text = "Hello there, all of you"
    told = [delta(text[at : at + step]) for at in range(0, len(text), step)]
    rest = [*told, chat_event({}, "stop"), usage_event((20, 3))]
    reply, _ = await begun(make_gateway, backend, other, "Hello there ", rest, echoes=True)
    choices = [choice for event in events(reply) for choice in event["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == (
        "Hello there , all of you"
    ), "a blank that the client has stays"


async def test_another_answer_in_place_of_the_beginning_ends_with_an_error(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    reply, _ = await begun(make_gateway, backend, other, "Hello", [delta("Good", "stop")], echoes=True)
    assert events(reply)[-1]["error"]["code"] == "upstream_malformed"


# -- what servers can do is found out --------------------------------------------------------------------------------

BEGUN = "The first one"


class Server:
    """Answers by path, as one kind of server does."""

    def __init__(
        self, *, opens: bool, echoes: bool = False, vllm: bool = False, counts: str = "/tokenize"
    ) -> None:
        self.opens, self.echoes, self.vllm, self.counts = opens, echoes, vllm, counts

    async def ask(self, path: bytes, body: dict[str, Any]) -> Any:
        match path.decode():
            case "/tokenize" if self.vllm and "messages" in body:
                return {"tokens": list(self._prompt(body).encode())}
            case self.counts:
                key = {"/tokenize": "prompt" if self.vllm else "content"}.get(self.counts, "input")
                return {"tokens": list(str(body.get(key, "")).encode())}
            case "/detokenize" if self.vllm:
                return {"prompt": bytes(body["tokens"]).decode()}
            case "/apply-template" if not self.vllm and self.counts == "/tokenize":
                return {"prompt": self._prompt(body)}
            case "/v1/chat/completions" if body.get("stream"):
                words = [BEGUN + " and", " two"] if self.echoes else [" and", " two"]
                return [{"choices": [{"delta": {"content": word}}]} for word in words] + [
                    {"choices": [{"delta": {}, "finish_reason": "length"}]}
                ]
        return None

    def _prompt(self, body: dict[str, Any]) -> str:
        text = "\n".join(message["content"] for message in body["messages"])
        return text if self.opens and body.get("continue_final_message") else text + "<|im_end|>\nassistant"


@pytest.mark.parametrize(
    ("server", "prefill"),
    [
        (Server(opens=True, vllm=True), Prefill(b"/tokenize", False)),
        (Server(opens=True), Prefill(b"/apply-template", False)),
        (Server(opens=True, echoes=True), Prefill(b"/apply-template", True)),
        (Server(opens=False), None),
        (Server(opens=True, counts="/extras/tokenize"), None),
    ],
    ids=["vLLM", "llama-server", "one that repeats", "one that begins anew", "llama-cpp-python"],
)
async def test_whether_a_server_goes_on_with_a_beginning_is_found_out(
    server: Server, prefill: Prefill | None
) -> None:
    ability = await find_out(server.ask)
    assert ability.prefill == prefill
    assert ability.counts == server.counts.encode()
    assert ability.tokenizer is not None
    assert not ability.exact
    assert str(ability) == ("can be continued by text" if prefill else "cannot be continued")
