"""A broken stream goes on at another backend: two simulated servers of one model, one of which breaks in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from proxy.abilities import Ability
from proxy.errors import Ending, Hedged, Outcome
from proxy.sim.plan import Dialect
from proxy.tap import Tap
from tests.client import Response
from tests.proxy.conftest import CHAT, Gateway, MakeGateway
from tests.proxy.scenes import eventually
from tests.scripted import (
    DONE,
    Call,
    Close,
    ScriptedBackend,
    Stall,
    WaitFor,
    chat_stream,
    event,
    json_answer,
    sse,
)
from tests.sim.running import TOOL, Running, running
from tests.wire.cases import Result, accumulate

ON = """
[tiers.balanced]
continuation = "exact"
[timeouts]
gap = 0.5
[health]
interval = 60.0
"""
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TEXT = "hi #sim tokens=40 think=0"
THINK = "hi #sim tokens=6 think=40"
CALLS = "hi #sim think=4 calls=2"
PARTS = {f"part_{n}": f'the text of part {n}, "quoted" and é 🙂' for n in range(9)}
LONG_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {key: {"enum": [text]} for key, text in PARTS.items()},
        },
    },
}


@pytest.fixture
async def sims() -> AsyncIterator[tuple[Running, Running]]:
    async with running(time_scale=200.0) as one, running(time_scale=200.0) as two:
        yield one, two


async def able(gateway: Gateway) -> None:
    """Every backend has been asked what it can do."""
    for name in gateway.app.pool.backends:
        gateway.app.abilities.of(name)
    await gateway.app.abilities.settled()


async def two_backends(make_gateway: MakeGateway, sims: tuple[Running, Running], config: str = ON) -> Gateway:
    gateway = await make_gateway(*(sim.url for sim in sims), config=config)
    await able(gateway)
    return gateway


def cannot(backend: ScriptedBackend) -> None:
    """It will not say how it cuts text into tokens."""
    for _ in range(2):
        backend.answer(json_answer({"detail": "Not Found"}, status=404))


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **USAGE, **more}


def events(response: Response) -> list[dict[str, Any]]:
    lines = response.body.split(b"\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def heard(response: Response) -> tuple[str, str, Any, list[str | None], Any]:
    """(thinking, content, calls, finish reasons, usage) as a client takes them, once each."""
    assert response.status == 200, response.body
    assert response.body.endswith(b"data: [DONE]\n\n"), response.body[-300:]
    result, usage = Result(), []
    for told in events(response):
        assert "error" not in told
        if told["choices"]:
            accumulate(result, told)
        usage += [told["usage"]] if told.get("usage") else []
    calls = [(call["name"], json.loads(call["arguments"])) for call in result.calls]
    finishes = [choice["finish_reason"] for event in events(response) for choice in event["choices"]]
    tokens = [
        {key: told[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")} for told in usage
    ]
    return result.reasoning.strip(), result.content.strip(), calls, [f for f in finishes if f], tokens


BREAKS = {
    "reset": {"fault": "reset"},
    "hang": {"fault": "hang"},
    "abort": {"fault": "abort", "count": 1},
    "truncated": {"fault": "truncated"},
    "malformed": {"fault": "malformed"},
}


@pytest.mark.parametrize("fault", BREAKS, ids=str)
@pytest.mark.parametrize(
    ("text", "more"),
    [(TEXT, {}), (THINK, {}), (CALLS, {"tools": [LONG_TOOL]})],
    ids=["text", "thinking", "call"],
)
async def test_a_stream_that_breaks_in_the_middle_arrives_whole_and_once(
    make_gateway: MakeGateway,
    sims: tuple[Running, Running],
    text: str,
    more: dict[str, Any],
    fault: str,
) -> None:
    gateway = await two_backends(make_gateway, sims)
    whole = heard(await gateway.ask(CHAT, body(text, **more)))
    first = (await gateway.record()).backend
    await sims["ab".index(first)].fault(**BREAKS[fault], after_tokens=20)
    broken = await gateway.ask(CHAT, body(text, **more))
    assert heard(broken) == whole
    assert len({event["id"] for event in events(broken)}) == 1
    assert b'token_ids":[' not in broken.body
    record = await gateway.record(1)
    assert record.outcome is Outcome.OK
    assert [name for name, _ in record.failures] == [first]
    if (
        fault != "malformed" or record.legs
    ):  # it may have come in the very first read: then all was asked anew
        assert record.continuation is Ending.WHOLE
        assert [leg[0] for leg in record.legs] == [record.backend] != [first]
        assert 0 < record.legs[0][1] <= 24
    (usage,) = whole[4]
    told = record.prompt_tokens, record.completion_tokens
    assert told == (usage["prompt_tokens"], usage["completion_tokens"])
    gateway.assert_idle()


@pytest.mark.parametrize("dialect", [Dialect.XML, Dialect.HERMES], ids=str)
@pytest.mark.parametrize("after", [12, 40, 90])
async def test_calls_that_the_backend_does_not_parse_go_on_too(
    make_gateway: MakeGateway, dialect: Dialect, after: int
) -> None:
    async with (
        running(time_scale=200.0, dialect=dialect) as a,
        running(time_scale=200.0, dialect=dialect) as b,
    ):
        gateway = await two_backends(make_gateway, (a, b))
        asked = body(CALLS, tools=[LONG_TOOL])
        whole = heard(await gateway.ask(CHAT, asked))
        assert whole[2] == [("write", PARTS), ("write", PARTS)]
        first = (await gateway.record()).backend
        await (a if first == "a" else b).fault("reset", after_tokens=after)
        assert heard(await gateway.ask(CHAT, asked)) == whole
        assert (await gateway.record(1)).continuation is Ending.WHOLE


async def test_a_client_sees_nothing_of_the_ids(
    make_gateway: MakeGateway, sims: tuple[Running, Running]
) -> None:
    plain = await make_gateway(sims[0].url)
    watched = await make_gateway(sims[0].url, config=ON)
    await able(watched)
    asked = {"path": CHAT, "body": body(CALLS, tools=[TOOL])}
    assert deltas(await watched.ask(**asked)) == deltas(await plain.ask(**asked))


def deltas(response: Response) -> tuple[str, list[Any]]:
    """All keys of all events, and everything that was said: what the ids could show in."""
    keys = sorted({key for event in events(response) for part in (event, *event["choices"]) for key in part})
    return " ".join(keys), list(heard(response))


async def test_the_openai_sdk_sees_one_ordinary_stream(
    make_gateway: MakeGateway, sims: tuple[Running, Running]
) -> None:
    gateway = await two_backends(make_gateway, sims)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": CALLS}], "tools": [LONG_TOOL]}
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        for _ in range(2):
            async with client.chat.completions.stream(
                **asked, stream_options={"include_usage": True}
            ) as stream:
                final = await stream.get_final_completion()
            calls = final.choices[0].message.tool_calls or ()
            assert [json.loads(call.function.arguments) for call in calls] == [PARTS, PARTS]
            assert final.choices[0].finish_reason == "tool_calls"
            assert final.usage is not None
            first = (await gateway.record()).backend or ""
            await sims["ab".index(first)].fault("reset", after_tokens=60)
    assert (await gateway.record(1)).continuation is Ending.WHOLE


HEDGED = ON.replace("[timeouts]", "hedge = { after = 0.1, factor = 0.0 }\n[timeouts]")


@pytest.mark.parametrize("winner", ["first", "second"])
async def test_whichever_of_two_attempts_won_and_broke_the_other_backend_goes_on(
    make_gateway: MakeGateway, sims: tuple[Running, Running], winner: str
) -> None:
    """What the loser had noted for a continuation is not taken for the winner's."""
    gateway = await two_backends(make_gateway, sims, HEDGED)
    whole = heard(await gateway.ask(CHAT, body(TEXT)))
    name = (await gateway.record()).backend
    first, second = sims if name == "a" else sims[::-1]
    if winner == "second":
        await first.fault("hang", after_tokens=0)
        await second.fault("reset", after_tokens=20)
        asking = asyncio.ensure_future(gateway.ask(CHAT, body(TEXT)))
    else:
        await first.fault("stall")
        await first.fault("reset", after_tokens=20)
        await second.fault("hang", after_tokens=0)
        asking = asyncio.ensure_future(gateway.ask(CHAT, body(TEXT)))
        await eventually(lambda: any(e.record.hedge for e in gateway.app.gateway.exchanges), "the hedge")
        await first.clear()
    assert heard(await asking) == whole
    record = await gateway.record(1)
    assert record.hedge is (Hedged.LOST if winner == "first" else Hedged.WON)
    assert (record.continuation, record.attempts) == (Ending.WHOLE, 3)
    gateway.assert_idle()


async def test_a_leg_behind_one_that_gave_tokens_costs_nothing_of_the_budget(
    make_gateway: MakeGateway, sims: tuple[Running, Running]
) -> None:
    gateway = await two_backends(
        make_gateway, sims, ON + "[policy.retry]\nbudget_share = 0.0\nbudget_floor = 0.0\n"
    )
    whole = heard(await gateway.ask(CHAT, body(TEXT)))
    first = (await gateway.record()).backend or ""
    await sims["ab".index(first)].fault("reset", after_tokens=20)
    assert heard(await gateway.ask(CHAT, body(TEXT))) == whole
    assert (await gateway.record(1)).continuation is Ending.WHOLE


async def test_legs_break_too_and_the_last_one_ends_the_answer(make_gateway: MakeGateway) -> None:
    async with running(time_scale=200.0) as a, running(time_scale=200.0) as b, running(time_scale=200.0) as c:
        gateway = await make_gateway(a.url, b.url, c.url, config=ON)
        await able(gateway)
        whole = heard(await gateway.ask(CHAT, body(TEXT)))
        sims = {"a": a, "b": b, "c": c}
        first = (await gateway.record()).backend or ""
        await sims.pop(first).fault("reset", after_tokens=9)
        for sim in sims.values():
            await sim.fault("reset", after_tokens=9)
        broken = await gateway.ask(CHAT, body(TEXT))
        record = await gateway.record(1)
        assert len(record.failures) == 3
        assert record.continuation is Ending.BROKEN
        assert "upstream_cut" in broken.body.decode()
        for sim in (a, b, c):
            await sim.clear()
        await sims["b" if "b" in sims else "c"].fault("reset", after_tokens=9)
        assert heard(await gateway.ask(CHAT, body(TEXT))) == whole
        got = "".join(c["delta"].get("content", "") for e in events(broken) for c in e.get("choices", ()))
        assert got
        assert whole[1].startswith(got.strip())


@pytest.mark.parametrize("more", [{"seed": 3}, {"n": 2}, {"presence_penalty": 1.5}], ids=str)
async def test_what_would_not_be_the_same_answer_ends_with_an_error(
    make_gateway: MakeGateway, sims: tuple[Running, Running], more: dict[str, Any]
) -> None:
    gateway = await two_backends(make_gateway, sims)
    for sim in sims:
        await sim.fault("reset", after_tokens=20)
    broken = await gateway.ask(CHAT, body(TEXT, **more))
    assert broken.status == 200
    assert not broken.body.endswith(b"[DONE]\n\n")
    assert events(broken)[-1]["error"]["code"] == "upstream_cut"
    record = await gateway.record()
    assert (record.continuation, record.continuation_why) == (Ending.UNSAFE, *more)
    assert record.legs == ()


async def test_a_stop_string_that_may_span_the_cut_ends_with_an_error(
    make_gateway: MakeGateway, sims: tuple[Running, Running]
) -> None:
    gateway = await two_backends(make_gateway, sims)
    for sim in sims:
        await sim.fault("reset", after_tokens=6)
    stop = [f"{letter}~" for letter in "abcdefghijklmnopqrstuvwxyz "]
    broken = await gateway.ask(CHAT, body(TEXT, stop=stop))
    assert events(broken)[-1]["error"]["code"] == "upstream_cut"
    assert (await gateway.record()).continuation_why == "stop"


async def test_where_nobody_else_can_the_stream_ends_with_an_error(
    make_gateway: MakeGateway, sims: tuple[Running, Running]
) -> None:
    gateway = await make_gateway(sims[0].url, config=ON)
    await able(gateway)
    await sims[0].fault("reset", after_tokens=20)
    broken = await gateway.ask(CHAT, body(TEXT))
    assert events(broken)[-1]["error"]["code"] == "upstream_cut"
    assert (await gateway.record()).continuation is Ending.NOBODY


async def test_backends_that_cut_text_otherwise_do_not_finish_each_others_answers(
    make_gateway: MakeGateway,
) -> None:
    async with running(time_scale=200.0) as one, running(time_scale=200.0, bytes_per_token=3) as two:
        gateway = await make_gateway(one.url, two.url, config=ON)
        await able(gateway)
        for sim in (one, two):
            await sim.fault("reset", after_tokens=20)
        broken = await gateway.ask(CHAT, body(TEXT))
        assert events(broken)[-1]["error"]["code"] == "upstream_cut"
        assert (await gateway.record()).continuation is Ending.NOBODY


async def test_whoever_may_be_needed_is_asked_before_it_is(
    make_gateway: MakeGateway, sims: tuple[Running, Running]
) -> None:
    gateway = await two_backends(make_gateway, sims)
    await gateway.ask(CHAT, body(TEXT))
    first = (await gateway.record()).backend or ""
    (rest,) = {"a", "b"} - {first}
    gateway.app.abilities._known.pop(rest)  # as of one that was ejected
    await gateway.ask(CHAT, body(TEXT))
    await gateway.app.abilities.settled()
    assert gateway.app.abilities._known[rest][1].exact


async def test_by_default_nothing_is_asked_for_and_nothing_goes_on(
    make_gateway: MakeGateway, sims: tuple[Running, Running]
) -> None:
    gateway = await two_backends(make_gateway, sims, "")
    for sim in sims:
        await sim.fault("reset", after_tokens=20)
    broken = await gateway.ask(CHAT, body(TEXT))
    assert events(broken)[-1]["error"]["code"] == "upstream_cut"
    assert (await gateway.record()).continuation is None


async def test_a_backend_without_ids_is_asked_as_ever(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    cannot(backend)
    backend.answer(chat_stream("Hello there"))
    gateway = await make_gateway(backend, config=ON)
    await able(gateway)
    assert (await gateway.ask(CHAT, body("hi"))).body.endswith(DONE)
    request = json.loads((await backend.received(len(backend.requests) - 1)).body)
    assert "return_token_ids" not in request


async def test_a_completion_goes_on_as_text(make_gateway: MakeGateway, sims: tuple[Running, Running]) -> None:
    gateway = await two_backends(make_gateway, sims)
    asked = {"model": "tiny", "prompt": "a text #sim tokens=40", "max_tokens": 30, **USAGE}
    whole = await gateway.ask("/v1/completions", asked)
    first = (await gateway.record()).backend or ""
    await sims["ab".index(first)].fault("reset", after_tokens=12)
    broken = await gateway.ask("/v1/completions", asked)
    assert broken.body.endswith(DONE)
    record = await gateway.record(1)
    assert record.continuation is Ending.WHOLE
    assert len({event["id"] for event in events(broken)}) == 1
    for response in (whole, broken):
        usage = [event["usage"] for event in events(response) if event.get("usage")]
        assert [told["completion_tokens"] for told in usage] == [30]
    cut = "".join(choice["text"] for event in events(broken) for choice in event["choices"])
    text = "".join(choice["text"] for event in events(whole) for choice in event["choices"])
    assert cut[:40] == text[:40], (
        "the same beginning; what this model says behind its own text is its own affair"
    )


def ids_stream(*words: str, finish: str | None) -> list[bytes]:
    head = {"id": "first", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    out = [event({**head, "choices": [role], "prompt_token_ids": [1, 2, 3]})]
    for number, word in enumerate(words):
        last = finish if number == len(words) - 1 else None
        choice = {"index": 0, "delta": {"content": word}, "finish_reason": last, "token_ids": [number]}
        out.append(event({**head, "choices": [choice]}))
    return out


async def scripted(make_gateway: MakeGateway, *backends: ScriptedBackend) -> Gateway:
    """A gateway that believes of scripted backends what it would have found out of others."""
    for backend in backends:
        cannot(backend)
    gateway = await make_gateway(*backends, config=ON)
    await able(gateway)
    for name in gateway.app.pool.backends:
        gateway.app.abilities._known[name] = gateway.app.clock.now(), Ability(True, "the same", b"/tokenize")
    return gateway


def breaks_then_other(gateway: Gateway, backend: ScriptedBackend, *texts: str) -> None:
    """`backend` is asked first and breaks behind these texts; only then may b be chosen."""
    gateway.app.pool.set_draining("b", True)
    swap = Call(lambda: gateway.app.pool.set_draining("b", False))
    backend.answer([*sse(*ids_stream(*texts, finish=None), done=False)[:-1], swap, Close()])


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}], ids=["plain", "tools"])
async def test_deltas_that_are_alike_pass_unseen_and_what_they_say_is_kept(
    make_gateway: MakeGateway, backend: ScriptedBackend, tools: dict[str, Any]
) -> None:
    gateway, gate = await scripted(make_gateway, backend), asyncio.Event()
    head, *events = sse(*ids_stream("One", *["one"] * 400, "two", finish="stop"))
    backend.answer([head, *events[:2], WaitFor(gate), *events[402:]])
    client = await gateway.connect()
    client.send(CHAT, body("hi", **tools))
    await client.read_until(b'"One"')
    (upstream,) = gateway.app.pool.backends["a"].connections._all
    (exchange,) = gateway.app.gateway.exchanges
    transcript = exchange._continuation._transcript  # type: ignore[union-attr]
    assert transcript is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tap, "data", None)  # whoever calls it fails
        for told in ids_stream("One", *["one"] * 400, finish=None)[2:]:
            upstream.data_received(b"%x\r\n%b\r\n" % (len(told), told))
    assert list(transcript.ids) == list(range(401))
    assert transcript.said.content == "One" + "one" * 400
    gate.set()
    reply = await client.read()
    client.close()
    assert heard(reply)[1] == "One" + "one" * 400 + "two"
    assert b'token_ids":[' not in reply.body
    assert (await gateway.record()).gaps.count == 401


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}], ids=["plain", "tools"])
async def test_an_answer_whose_reason_was_there_is_whole_and_its_usage_counted(
    make_gateway: MakeGateway, backend: ScriptedBackend, tools: dict[str, Any]
) -> None:
    gateway = await scripted(make_gateway, backend)
    backend.answer([*sse(*ids_stream("Hel", "lo", finish="stop"), done=False)[:-1], Close()])
    reply = await gateway.ask(CHAT, body("hi", **tools))
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert heard(reply) == ("", "Hello", [], ["stop"], [usage])
    record = await gateway.record()
    assert (record.outcome, record.completion_tokens, record.continuation) == (Outcome.OK, 2, None)


async def test_ids_that_end_inside_a_character_are_cut_back_before_another_goes_on(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await scripted(make_gateway, backend, other)
    breaks_then_other(gateway, backend, "A:", "", "")
    for text in ("A:\ufffd", "A:\ufffd", "A:"):
        other.answer(json_answer({"prompt": text}))
    choice = {"index": 0, "text": "🙂", "finish_reason": "stop", "token_ids": [1, 2, 9, 8]}
    other.answer(sse({"id": "second", "choices": [choice]}))
    reply = await gateway.ask(CHAT, body("hi"))
    *asked, rest = [json.loads((await other.received(number)).body) for number in range(2, 6)]
    assert [question["tokens"] for question in asked] == [[0, 1, 2], [0, 1], [0]]
    assert rest["prompt"] == [1, 2, 3, 0]
    assert heard(reply)[1] == "A:🙂"
    assert (await gateway.record()).completion_tokens == 5


async def test_an_answer_that_decodes_to_something_else_ends_with_an_error(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await scripted(make_gateway, backend, other)
    breaks_then_other(gateway, backend, "Hello")
    other.answer(json_answer({"prompt": "Goodbye"}))
    reply = await gateway.ask(CHAT, body("hi"))
    assert events(reply)[-1]["error"]["code"] == "upstream_cut"
    record = await gateway.record()
    assert (record.continuation, record.continuation_why) == (Ending.UNSAFE, "differs")


async def test_a_client_that_leaves_between_two_legs_leaves_nothing_behind(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await scripted(make_gateway, backend, other)
    breaks_then_other(gateway, backend, "Hello")
    other.answer([Stall()])
    connection = await gateway.connect()
    connection.send(CHAT, body("hi"))
    await other.received(1)
    connection.close()
    await gateway.ended(Outcome.CANCELLED)
