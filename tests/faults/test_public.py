"""The sixteen scenarios by which gateways are compared in public, each with its strictest outcome.

The application is the openai SDK with its own retries off: what it gets is what the gateway did. `a` is the primary and has
the fault, `b` the fallback. An answer is whole and from one backend, or the SDK raises; a part is never taken for the whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.errors import Outcome
from tests.fake_clock import FakeClock
from tests.faults.drive import CONFIG, IN_ORDER, MANY, After, patiently
from tests.faults.leaks import Leaks
from tests.proxy.conftest import Gateway, MakeGateway
from tests.proxy.scenes import polled
from tests.scripted import (
    DONE,
    Chunk,
    Close,
    LastChunk,
    Raw,
    Received,
    Reset,
    ScriptedBackend,
    Stall,
    Step,
    WaitFor,
    chat_json,
    chat_stream,
    error_json,
    json_answer,
)

TEXT = "Hello there, all of you."
USAGE = (10, 5)
TOO_MANY = error_json(429, "too many", type="RateLimitError", headers=[("retry-after", "7")])
BROKEN = error_json(500, "engine fault", type="InternalServerError")
BUSY = error_json(503, "not now", type="ServiceUnavailable")
ATTEMPTS = 3
"""policy.retry.max_attempts: as many requests at most reach the backends for one of a client."""
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def well(asked: Received) -> list[Step]:
    """The whole answer, in the way that was asked for."""
    return chat_stream(TEXT, usage=USAGE) if asked.json.get("stream") else chat_json(TEXT, usage=USAGE)


@dataclass
class Got:
    """What the application has in the end. raised: instead of an end."""

    text: str = ""
    finish: str | None = None
    usage: Any = None
    raised: openai.APIError | None = None
    headers: dict[str, str] = field(default_factory=dict)


class World:
    """Two backends, the gateway, an application."""

    def __init__(self, gateway: Gateway, clock: FakeClock, a: ScriptedBackend, b: ScriptedBackend) -> None:
        self.gateway, self.clock, self.a, self.b = gateway, clock, a, b

    def cut_after(self, words: int, *end: Step) -> list[Step]:
        """A stream that breaks behind so many words, once the application has read them."""
        return [*chat_stream(TEXT)[: 2 + words], WaitFor(After(self.clock, 1.0)), *end]

    async def ask(self, *, stream: bool, **more: Any) -> Got:
        """What the application gets."""
        running = self.gateway.app.gateway.exchanges  # until the SDK has sent it, no time passes
        asked = self._ask(stream=stream, **more)
        got: Got = await patiently(self.clock, asked, "the request", lambda: running)
        return got

    async def _ask(self, *, stream: bool, **more: Any) -> Got:
        got = Got()
        async with openai.AsyncOpenAI(
            base_url=self.gateway.url + "/v1", api_key="none", max_retries=0
        ) as sdk:
            create = sdk.chat.completions.with_raw_response.create
            try:
                if stream:
                    more.setdefault("stream_options", {"include_usage": True})
                raw = await create(
                    model="tiny", messages=[{"role": "user", "content": "hi"}], stream=stream, **more
                )
                got.headers = dict(raw.headers)
                await self._read(raw.parse(), got, stream)
            except openai.APIStatusError as error:
                got.raised, got.headers = error, dict(error.response.headers)
            except openai.APIError as error:
                got.raised = error
        return got

    @staticmethod
    async def _read(answer: Any, got: Got, stream: bool) -> None:
        if not stream:
            (choice,) = answer.choices
            got.text, got.finish, got.usage = choice.message.content, choice.finish_reason, answer.usage
            return
        async for chunk in answer:
            for choice in chunk.choices:
                got.text += choice.delta.content or ""
                got.finish = choice.finish_reason or got.finish
            got.usage = chunk.usage or got.usage

    async def record(self, index: int = 0) -> Any:
        return await self.gateway.record(index)

    def asked(self) -> tuple[int, int]:
        """Requests that reached each backend."""
        return len(self.a.requests), len(self.b.requests)

    async def served(self, got: Got, by: str, index: int = 0) -> Any:
        """The whole answer, once, from this backend; its record."""
        assert got.raised is None
        assert (got.text, got.finish) == (TEXT, "stop")
        assert (got.usage.prompt_tokens, got.usage.completion_tokens) == USAGE
        assert got.headers["x-tierline-backend"] == by
        record = await self.record(index)
        assert (record.outcome, record.backend) == (Outcome.OK, by)
        return record

    async def failed(self, got: Got, outcome: Outcome, index: int = 0) -> Any:
        """The application knows; what it has is a true beginning."""
        assert got.raised is not None
        assert got.finish is None
        assert TEXT.startswith(got.text)
        record = await self.record(index)
        assert record.outcome is outcome
        return record


MakeWorld = Callable[..., Awaitable[World]]


@pytest.fixture
async def world(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, tmp_path: Path
) -> AsyncIterator[MakeWorld]:
    """`await world()`; nothing is left afterwards."""
    made: list[tuple[World, Leaks]] = []

    async def make(config: str = CONFIG, per: dict[str, str] | None = None) -> World:
        (tmp_path / "first.py").write_text(IN_ORDER)
        clock = FakeClock()
        backend.default = other.default = well
        per = per or {"a": MANY, "b": MANY}
        gateway = await make_gateway(backend, other, config=config, per_backend=per, clock=clock)
        await patiently(clock, polled(gateway), "the first poll")
        made.append((World(gateway, clock, backend, other), await Leaks.of(gateway, [backend, other])))
        return made[-1][0]

    yield make
    for one, leaks in made:
        one.a.release()
        one.b.release()
        await leaks.none_left()


@each_way
async def test_s01_a_429_with_retry_after_is_answered_by_the_fallback_at_once(
    world: MakeWorld, stream: bool
) -> None:
    here = await world()
    here.a.answer(TOO_MANY)
    record = await here.served(await here.ask(stream=stream), "b")
    assert record.attempts == 2
    assert record.finished_at - record.accepted_at <= 2.0
    assert here.asked() == (1, 1)


@each_way
async def test_s02_a_lasting_429_is_told_with_its_retry_after_and_causes_no_storm(
    world: MakeWorld, stream: bool
) -> None:
    here = await world()
    here.a.default = here.b.default = TOO_MANY
    got = await here.ask(stream=stream)
    await here.failed(got, Outcome.UPSTREAM_REJECTED)
    assert isinstance(got.raised, openai.RateLimitError)
    assert int(got.headers["retry-after"]) >= 1
    assert 2 <= sum(here.asked()) <= ATTEMPTS


@each_way
async def test_s03_one_500_is_answered_by_the_fallback(world: MakeWorld, stream: bool) -> None:
    here = await world()
    here.a.answer(BROKEN)
    await here.served(await here.ask(stream=stream), "b")
    await here.served(await here.ask(stream=stream), "a", 1)  # one is no reason to leave it


@each_way
async def test_s04_a_lasting_503_everywhere_is_a_503_after_few_attempts(
    world: MakeWorld, stream: bool
) -> None:
    here = await world()
    here.a.default = here.b.default = BUSY
    got = await here.ask(stream=stream)
    await here.failed(got, Outcome.UPSTREAM_ERROR)
    assert isinstance(got.raised, openai.InternalServerError)
    assert got.raised.status_code == 503
    assert got.headers["x-should-retry"] == "false", "three of the application's would make nine"
    assert 2 <= sum(here.asked()) <= ATTEMPTS


@each_way
@pytest.mark.parametrize("end", [Reset(), Close()], ids=["RST", "FIN"])
async def test_s05_a_connection_reset_before_the_answer_is_answered_by_the_fallback(
    world: MakeWorld, stream: bool, end: Step
) -> None:
    here = await world()
    here.a.answer([end])
    record = await here.served(await here.ask(stream=stream), "b")
    assert record.attempts == 2


async def test_s06_no_response_is_answered_by_the_fallback_within_the_first_tokens_limit(
    world: MakeWorld,
) -> None:
    here = await world()
    here.a.answer([Stall()])
    started = here.clock.time
    await here.served(await here.ask(stream=True), "b")
    assert 60 <= here.clock.time - started <= 65


async def test_s07_a_first_token_after_20_s_is_waited_for_and_the_connection_kept_alive(
    world: MakeWorld,
) -> None:
    config = CONFIG.replace("keepalive_after = 0", "keepalive_after = 15\nkeepalive_interval = 5")
    here = await world(config)
    head, *rest = chat_stream(TEXT, usage=USAGE)
    here.a.answer([WaitFor(After(here.clock, 20.0)), head, *rest])
    got = await here.ask(stream=True)
    assert (got.text, got.finish, got.raised) == (TEXT, "stop", None)
    record = await here.record()
    assert (record.outcome, record.attempts, record.backend) == (Outcome.OK, 1, "a")
    assert record.first_delta_at - record.accepted_at >= 20
    assert here.asked() == (1, 0), "slow is not broken"


@pytest.mark.parametrize("end", [Reset(), Close(), LastChunk()], ids=["RST", "FIN", "ended properly"])
async def test_s08_a_stream_that_is_cut_raises(world: MakeWorld, end: Step) -> None:
    here = await world()
    here.a.answer(here.cut_after(2, end))
    got = await here.ask(stream=True)
    await here.failed(got, Outcome.UPSTREAM_CUT)
    assert got.text == "Hello there,"


async def test_s08_an_answer_that_is_not_streamed_and_cut_is_answered_by_the_fallback(
    world: MakeWorld,
) -> None:
    here = await world()
    head, body = chat_json(TEXT, usage=USAGE)
    assert isinstance(body, Raw)
    here.a.answer([head, Raw(body.data[:40]), Close()])
    await here.served(await here.ask(stream=False), "b")


async def test_s09_a_stream_that_stalls_raises_when_the_gap_is_over(world: MakeWorld) -> None:
    here = await world()
    here.a.answer(here.cut_after(2, Stall()))
    started = here.clock.time
    got = await here.ask(stream=True)
    await here.failed(got, Outcome.UPSTREAM_TIMEOUT)
    assert 20 <= here.clock.time - started <= 25


async def test_s10_a_malformed_chunk_raises(world: MakeWorld) -> None:
    here = await world()
    here.a.answer(here.cut_after(2, Chunk(b'data: {"choices": [{"del\n\n'), Chunk(DONE), LastChunk()))
    await here.failed(await here.ask(stream=True), Outcome.UPSTREAM_MALFORMED)


async def test_s10_a_malformed_first_chunk_is_answered_by_the_fallback(world: MakeWorld) -> None:
    here = await world()
    here.a.answer([chat_stream(TEXT)[0], Chunk(b'data: {"choices": [{"del\n\n'), Chunk(DONE), LastChunk()])
    await here.served(await here.ask(stream=True), "b")


async def test_s11_a_missing_done_is_added_to_a_finished_answer(world: MakeWorld) -> None:
    here = await world()
    here.a.answer(chat_stream(TEXT, usage=USAGE, done=False))
    await here.served(await here.ask(stream=True), "a")


async def test_s11_without_a_finish_a_missing_done_is_a_cut(world: MakeWorld) -> None:
    here = await world()
    here.a.answer(chat_stream(TEXT, finish=None, done=False))
    await here.failed(await here.ask(stream=True), Outcome.UPSTREAM_CUT)


@pytest.mark.parametrize("owed", [True, False], ids=["owed", "not owed"])
async def test_s11_a_break_behind_the_finish_is_no_fault_unless_the_usage_is_owed(
    world: MakeWorld, owed: bool
) -> None:
    here = await world()
    here.a.answer([*chat_stream(TEXT)[:-2], WaitFor(After(here.clock, 1.0)), Reset()])
    got = await here.ask(stream=True, stream_options={"include_usage": owed})
    assert (got.text, got.finish) == (TEXT, "stop")
    assert (got.raised is not None) is owed
    record = await here.record()
    assert record.outcome is (Outcome.UPSTREAM_CUT if owed else Outcome.OK)


OVERFLOW = "This model's maximum context length is 4096 tokens. However, your prompt has 5000 tokens."


@each_way
@pytest.mark.parametrize("larger", [False, True], ids=["no larger window", "a larger window"])
async def test_s12_a_context_overflow_goes_to_a_larger_window_or_is_the_clients(
    world: MakeWorld, stream: bool, larger: bool
) -> None:
    windows = {"a": 100_000, "b": 200_000 if larger else 100_000}
    per = {name: MANY.replace("10_000_000", str(tokens)) for name, tokens in windows.items()}
    here = await world(per=per)
    here.a.answer(error_json(400, OVERFLOW))
    got = await here.ask(stream=stream)
    if larger:
        await here.served(got, "b")
        return
    await here.failed(got, Outcome.UPSTREAM_REJECTED)
    assert isinstance(got.raised, openai.BadRequestError)
    assert got.raised.code == "context_length_exceeded"
    assert here.asked() == (1, 0), "it would be the same elsewhere"


@each_way
async def test_s13_a_content_filter_is_an_answer_and_no_fault(world: MakeWorld, stream: bool) -> None:
    here = await world()
    make = chat_stream if stream else chat_json
    here.a.answer(make("Hello", finish="content_filter", usage=USAGE))
    got = await here.ask(stream=stream)
    assert (got.text, got.finish, got.raised) == ("Hello", "content_filter", None)
    assert here.asked() == (1, 0)


@each_way
async def test_s13_a_refusal_by_a_content_filter_passes_and_is_not_tried_elsewhere(
    world: MakeWorld, stream: bool
) -> None:
    here = await world()
    error = {"message": "filtered", "type": "invalid_request_error", "param": None, "code": "content_filter"}
    here.a.answer(json_answer({"error": error}, 400))
    got = await here.ask(stream=stream)
    await here.failed(got, Outcome.UPSTREAM_REJECTED)
    assert isinstance(got.raised, openai.BadRequestError)
    assert got.raised.code == "content_filter"
    assert here.asked() == (1, 0)


async def test_s14_a_fallback_that_rejects_what_was_begun_leaves_an_error_and_no_part_as_the_whole(
    world: MakeWorld,
) -> None:
    here = await world()
    here.a.answer(here.cut_after(2, Reset()))
    here.b.default = error_json(400, "assistant prefill is not supported")
    got = await here.ask(stream=True)
    await here.failed(got, Outcome.UPSTREAM_CUT)
    assert got.text == "Hello there,"


@each_way
async def test_s15_a_flapping_primary_fails_no_request(world: MakeWorld, stream: bool) -> None:
    here = await world()
    ways: list[Any] = [[Reset()], well, BUSY, well, [Close()], well, TOO_MANY, well]
    here.a.answer(*ways, *ways, *ways)
    for number in range(24):
        got = await here.ask(stream=stream)
        assert (got.raised, got.text, got.finish) == (None, TEXT, "stop"), number
        here.clock.advance(1.0)
    records = [record for record, _ in here.gateway.records.closed]
    assert [record.outcome for record in records] == [Outcome.OK] * 24
    assert sum(record.attempts for record in records) <= 24 * 1.5 + 1, (
        "no more than one further attempt a failure"
    )


@each_way
async def test_s16_a_failover_is_counted_once_and_for_who_answered(world: MakeWorld, stream: bool) -> None:
    here = await world()
    head = (chat_stream(TEXT) if stream else chat_json(TEXT, usage=(99, 99)))[0]
    here.a.answer([head, Reset()])
    record = await here.served(await here.ask(stream=stream), "b")
    assert record.attempts == 2
    assert (record.prompt_tokens, record.completion_tokens) == USAGE
    assert len(here.gateway.records.closed) == 1
    text, _ = here.gateway.app.metrics.render()
    requests = [line for line in text.decode().splitlines() if line.startswith("tierline_requests_total{")]
    assert [line.rsplit(" ", 1)[1] for line in requests] == ["1.0"], requests
    assert 'backend="b"' in requests[0]


def test_every_scenario_has_its_test() -> None:
    names = " ".join(name for name in globals() if name.startswith("test_s"))
    assert [f"s{number:02}" for number in range(1, 17) if f"test_s{number:02}_" not in names] == []
