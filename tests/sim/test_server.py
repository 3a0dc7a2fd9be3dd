"""The simulator serves: text, tokens and timing are what the engine model and the seed say."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import openai
import pytest

from policies import profile
from proxy.clock import LoopClock
from proxy.sim.plan import Dialect
from proxy.sim.server import Options, Simulator
from proxy.wire.promtext import read_metrics
from tests.sim.running import FAST, TOOL, Running, chat_body, eventually, running

STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


async def test_the_openai_sdk_cannot_tell_it_from_a_server() -> None:
    async with running() as sim, openai.AsyncOpenAI(base_url=sim.url + "/v1", api_key="none") as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        whole = await client.chat.completions.create(**chat_body("hi #sim text=Good_day"))
        assert whole.choices[0].message.content == "\n\nGood day"
        assert whole.usage is not None
        async with client.chat.completions.stream(**chat_body("hi", tools=[TOOL])) as stream:
            final = await stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls or ()
        assert call.function.name == "get_weather"
        assert set(json.loads(call.function.arguments)) == {"city", "days"}
        assert final.choices[0].finish_reason == "tool_calls"
        text = await client.completions.create(model="tiny", prompt="abc", max_tokens=5)
        assert (text.choices[0].finish_reason, text.usage and text.usage.completion_tokens) == ("length", 5)
        with pytest.raises(openai.BadRequestError, match="max_model_len=262144"):
            await client.chat.completions.create(**chat_body("hi", max_tokens=300000))


@pytest.mark.parametrize(
    "more", [{}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}, {"max_tokens": 9}]
)
async def test_streamed_and_whole_answers_say_the_same(more: dict[str, Any]) -> None:
    async with running() as sim:
        whole = (await sim.chat("hi", **more)).json
        streamed = await sim.chat("hi", **more, **STREAM)
    message = whole["choices"][0]["message"]
    assert streamed.text == (message["content"] or "")
    assert streamed.joined("reasoning") == (message["reasoning"] or "")
    assert streamed.finish == [whole["choices"][0]["finish_reason"]]
    usage = {k: v for k, v in whole["usage"].items() if k.endswith("tokens")}
    assert {k: v for k, v in streamed.events[-1]["usage"].items() if k.endswith("tokens")} == usage
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_text_depends_on_seed_and_prompt_alone() -> None:
    texts = []
    for options in ({}, {}, {"seed": 5}):
        async with running(**options) as sim:
            texts.append((await sim.chat("hi")).json["choices"][0]["message"]["content"])
            if not options:
                other = (await sim.chat("ho")).json["choices"][0]["message"]["content"]
                again = (await sim.chat("hi", seed=7)).json["choices"][0]["message"]["content"]
    assert texts[0] == texts[1] != texts[2]
    assert len({texts[0], other, again}) == 3


async def test_text_survives_any_cut_between_bytes() -> None:
    async with running(bytes_per_token=1) as sim:
        got = await sim.chat("hi #sim text=Grüße_😀_中文_ende", **STREAM)
    assert got.text == "\n\nGrüße 😀 中文 ende"


@pytest.mark.parametrize("width", [1, 2, 4])
async def test_tokens_go_back_to_the_text(width: int) -> None:
    text = "Grüße, 😀 and plain text."
    async with running(bytes_per_token=width) as sim:
        tokens = (await sim.ask("POST", "/tokenize", {"prompt": text})).json
        back = (await sim.ask("POST", "/detokenize", {"tokens": tokens["tokens"]})).json
        assert back == {"prompt": text}
        assert tokens["count"] == len(tokens["tokens"]) == -(-len(text.encode()) // width)
        counted = (await sim.ask("POST", "/tokenize", chat_body(text, tools=[TOOL]))).json["count"]
        used = (await sim.chat(text, tools=[TOOL], max_tokens=1)).json["usage"]["prompt_tokens"]
        assert counted == used


@pytest.mark.parametrize(
    "more", [{}, {"tools": [TOOL]}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
async def test_an_answer_goes_on_behind_its_own_tokens_on_another_server(more: dict[str, Any]) -> None:
    async with running() as sim, running() as other:
        asked = await sim.chat("hi #sim tokens=8 think=4", return_token_ids=True, **STREAM, **more)
        prompt = asked.events[0]["prompt_token_ids"]
        ids = [t for e in asked.events for c in e["choices"] for t in c.get("token_ids") or ()]
        whole = (await sim.ask("POST", "/detokenize", {"tokens": ids})).json["prompt"]
        for cut in range(0, len(ids), 5):
            begun = (await other.ask("POST", "/detokenize", {"tokens": ids[:cut]})).json["prompt"]
            body = {"model": "tiny", "prompt": prompt + ids[:cut], "max_tokens": None}
            rest = (await other.ask("POST", "/v1/completions", body)).json
            assert begun + rest["choices"][0]["text"] == whole
            assert rest["choices"][0]["finish_reason"] == "stop"
            assert rest["usage"]["prompt_tokens"] == len(prompt) + cut
        short = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
        assert (await other.ask("POST", "/v1/completions", short)).json["choices"][0][
            "finish_reason"
        ] == "length"
        foreign = (await other.ask("POST", "/v1/completions", {**body, "prompt": [*prompt, 7, 7]})).json
        assert foreign["choices"][0]["text"] not in whole


async def test_token_ids_come_when_asked_for_and_are_the_answers_tokens() -> None:
    more = {"return_token_ids": True, "tools": [TOOL]}
    async with running() as sim:
        whole = (await sim.chat("hi", **more)).json
        streamed = await sim.chat("hi", **more, **STREAM)
        ids = [t for e in streamed.events for c in e["choices"] for t in c.get("token_ids") or ()]
        assert ids == whole["choices"][0]["token_ids"]
        assert len(ids) == whole["usage"]["completion_tokens"]
        assert streamed.events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
        text = (await sim.ask("POST", "/detokenize", {"tokens": ids})).json["prompt"]
    assert "<tool_call>\n<function=get_weather>" in text


async def test_continuous_usage_counts_up_to_the_last_events_total() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with running() as sim:
        got = await sim.chat("hi", stream=True, stream_options=options)
    counts = [e["usage"]["completion_tokens"] for e in got.events]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] > 0


@pytest.mark.parametrize(
    ("dialect", "opening"),
    [
        (Dialect.HERMES, '<tool_call>\n{"name": "get_weather"'),
        (Dialect.XML, "<tool_call>\n<function=get_weather>\n<parameter=city>"),
    ],
)
async def test_a_raw_dialect_leaves_calls_in_the_content(dialect: Dialect, opening: str) -> None:
    async with running(dialect=dialect) as sim:
        got = await sim.chat("hi", tools=[TOOL], **STREAM)
    assert opening in got.text
    assert got.joined("tool_calls") == ""
    assert got.finish == ["stop"]


async def test_an_agent_loop_ends_by_itself_and_several_calls_can_be_had() -> None:
    async with running() as sim:
        first = (await sim.chat("hi #sim calls=2", tools=[TOOL])).json["choices"][0]["message"]
        assert len(first["tool_calls"]) == 2
        assert len({call["id"] for call in first["tool_calls"]}) == 2
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "21"} for c in first["tool_calls"]]
        body = chat_body("hi", tools=[TOOL])
        body["messages"] += [first, *results]
        last = (await sim.ask("POST", "/v1/chat/completions", body)).json["choices"][0]
        assert last["finish_reason"] == "stop"
        assert "tool_calls" not in last["message"]


async def test_thinking_goes_to_reasoning_and_can_be_turned_off() -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    async with running() as sim:
        assert (await sim.chat("hi")).json["choices"][0]["message"]["reasoning"]
        assert (await sim.chat("hi", **off)).json["choices"][0]["message"]["reasoning"] is None


async def test_a_json_schema_is_kept_and_a_stop_string_stops() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "w", "schema": TOOL["function"]["parameters"]}}  # type: ignore[index]
    async with running(thinking=False) as sim:
        got = (await sim.chat("hi", response_format=wanted)).json["choices"][0]["message"]["content"]
        assert set(json.loads(got)) == {"city", "days"}
        choice = (await sim.chat("hi #sim text=one_two_three", stop=[" two"])).json["choices"][0]
        assert (choice["message"]["content"], choice["stop_reason"]) == ("one", " two")
        assert choice["finish_reason"] == "stop"


async def test_of_several_lines_that_steer_the_last_one_counts() -> None:
    """A prompt of a completion holds those of the turns before."""
    async with running() as sim:
        got = await sim.chat("#sim tokens=9 text=one\nhi\n#sim think=0 text=two\nhi")
        assert got.json["choices"][0]["message"]["content"].strip() == "two"


async def test_ignore_eos_generates_to_the_limit() -> None:
    async with running() as sim:
        usage = (await sim.chat("hi", max_tokens=333, ignore_eos=True)).json["usage"]
    assert usage["completion_tokens"] == 333


async def test_the_window_cuts_an_answer_and_is_told_by_models() -> None:
    async with running(window_tokens=100, bytes_per_token=1, thinking=False) as sim:
        got = (await sim.chat("hi #sim tokens=500")).json
        assert got["choices"][0]["finish_reason"] == "length"
        assert got["usage"]["total_tokens"] == 100
        assert (await sim.ask("GET", "/v1/models")).json["data"][0]["max_model_len"] == 100


async def test_a_prompt_seen_before_is_cached_and_usage_says_so() -> None:
    text = "long " * 4000
    async with running() as sim:
        first, second = [(await sim.chat(text, max_tokens=2)).json["usage"] for _ in range(2)]
        metrics = await sim.metrics()
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    blocks = first["prompt_tokens"] // 784
    assert second["prompt_tokens_details"]["cached_tokens"] == blocks * 784
    assert f'vllm:prefix_cache_hits_total{{engine="0",model_name="tiny"}} {float(blocks * 784)}' in metrics
    assert 'block_size="784"' in metrics
    assert f'num_gpu_blocks="{1711960 // 784}"' in metrics


async def test_requests_queue_behind_max_num_seqs_and_metrics_count_them() -> None:
    async with running(max_num_seqs=2, time_scale=5.0) as sim:
        asks = [
            asyncio.create_task(sim.chat("hi", max_tokens=200, ignore_eos=True, **STREAM)) for _ in range(5)
        ]
        await sim.until("waiting", 3)
        text = await sim.metrics()
        state = await sim.state()
        load = (await sim.ask("GET", "/load")).json["server_load"]
        await asyncio.gather(*asks)
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 2.0' in text
    assert (state["running"], state["waiting"], load) == (2, 3, 5)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(stream: bool) -> None:
    async with running(time_scale=1.0) as sim:
        ask = asyncio.create_task(sim.chat("hi", max_tokens=20000, ignore_eos=True, stream=stream))
        await sim.until("running", 1)
        ask.cancel()
        await asyncio.gather(ask, return_exceptions=True)
        await sim.until("running", 0)
        state = await sim.state()
    assert (state["live"], state["kv_usage"]) == (0, 0)


async def test_deltas_hold_what_a_speculating_step_gives() -> None:
    async with running(time_scale=10.0) as sim:
        got = await sim.chat("hi #sim tokens=400 think=0", return_token_ids=True, **STREAM)
    sizes = Counter(len(c["token_ids"]) for e in got.events for c in e["choices"] if c.get("token_ids"))
    assert set(sizes) <= {1, 2, 3, 4}
    assert sum(n * k for n, k in sizes.items()) / sizes.total() == pytest.approx(2.7, abs=0.3)


async def test_hundreds_of_streams_share_one_timer_and_all_end_well() -> None:
    async with running(max_num_seqs=1000, time_scale=20.0) as sim:
        body = json.dumps(chat_body("hi #sim tokens=60 think=2", **STREAM)).encode()
        request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )

        async def one() -> bytes:
            reader, writer = await asyncio.open_connection(
                sim.simulator.options.host, sim.simulator.options.port
            )
            writer.write(request)
            data = await reader.read()
            writer.close()
            await writer.wait_closed()
            return data

        answers = await asyncio.gather(*(one() for _ in range(500)))
    assert all(b"data: [DONE]" in a and b'"finish_reason":"stop"' in a for a in answers)


async def measure(sim: Running, streams: int, context: int) -> float:
    """Aggregate tok/s while all streams decode, from what the client sees."""
    loop, marks = asyncio.get_running_loop(), []
    text = "x" * (4 * context)
    if context:
        await sim.chat(text, max_tokens=1)

    async def one() -> None:
        body = json.dumps(
            chat_body(text, max_tokens=100000, ignore_eos=True, stream=True, return_token_ids=True)
        )
        headers = {"content-type": "application/json"}
        async with sim.session.post(sim.url + "/v1/chat/completions", data=body, headers=headers) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    marks.append(
                        (loop.time(), task_number[asyncio.current_task()], len(choice.get("token_ids") or ()))
                    )

    task_number: dict[Any, int] = {}
    tasks = [asyncio.create_task(one()) for _ in range(streams)]
    task_number.update({task: i for i, task in enumerate(tasks)})

    async def all_decode() -> bool:
        return len({n for _, n, k in marks if k}) == streams

    await eventually(all_decode)
    begin = loop.time()
    await asyncio.sleep(4.0)
    end = loop.time()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return sum(k for at, _, k in marks if begin < at <= end) / (end - begin)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "streams", "context"),
    [("fp8-mtp3-tp2-v17", 1, 0), ("fp8-mtp3-tp2-v17", 8, 32768), ("bf16-dflash8-tp2-v17", 16, 0)],
)
async def test_live_it_decodes_as_fast_as_the_study_measured(name: str, streams: int, context: int) -> None:
    async with running(profile=name, time_scale=1.0) as sim:
        assert await measure(sim, streams, context) == pytest.approx(
            profile.get(name).aggregate_rate(streams, context), rel=0.05
        )


async def test_a_profile_without_speed_cannot_be_simulated() -> None:
    with pytest.raises(ValueError, match="quality figures only"):
        Simulator(Options(profile="gguf-q8"), LoopClock())


def test_the_default_options_are_a_known_profile() -> None:
    assert FAST.profile in profile.names()


@pytest.mark.parametrize("old", [False, True])
async def test_the_gateway_reads_its_metrics_as_an_engines(old: bool) -> None:
    async with running(old_metric_names=old, time_scale=5.0) as sim:
        ask = asyncio.create_task(sim.chat("hi", max_tokens=5000, ignore_eos=True))
        await sim.until("running", 1)
        seen = read_metrics((await sim.metrics()).encode())
        ask.cancel()
        await asyncio.gather(ask, return_exceptions=True)
    assert (seen.running, seen.waiting) == (1, 0)
    assert seen.kv_usage is not None
    assert 0 < seen.kv_usage < 0.01
    assert seen.kv_tokens == 1711960 // 784 * 784
    assert seen.prefix_queries
