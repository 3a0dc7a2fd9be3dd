"""Each fault does what its name says, to those it is meant for, and goes away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from policies import profile
from proxy.sim.faults import BadFault, Fault, FaultKind, read_fault
from tests.sim.running import TOOL, Running, eventually, running

STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


async def well(sim: Running) -> None:
    """A plain request is served."""
    got = await sim.chat("hi", **STREAM)
    assert (got.status, got.done, got.broken) == (200, True, False)


async def says(sim: Running, health: int) -> bool:
    return await sim.health() == health


async def refused(sim: Running) -> bool:
    try:
        await sim.ask("GET", "/health", connection="close")
    except aiohttp.ClientConnectionError:
        return True
    return False


async def test_refuse_closes_the_port_until_cleared() -> None:
    async with running() as sim:
        await sim.fault("refuse")
        assert await refused(sim)
        await sim.clear()
        await well(sim)


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_status_answers_with_it_as_often_as_told(status: int) -> None:
    async with running() as sim:
        await sim.fault("status", status=status, count=2)
        for _ in range(2):
            got = await sim.chat("hi", **STREAM)
            assert (got.status, got.json["error"]["code"]) == (status, status)
        await well(sim)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", [None, 0, 5])
async def test_reset_breaks_the_connection(stream: bool, after: int | None) -> None:
    async with running() as sim:
        await sim.fault("reset", **({} if after is None else {"after_tokens": after}))
        try:
            got = await sim.chat("hi", stream=stream)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            assert after == 0 or not stream
        else:
            assert got.broken
            assert bool(got.events) == bool(after)
        await well(sim)
        await sim.until("live", 0)


async def test_hang_silences_one_stream_and_no_other() -> None:
    async with running() as sim:
        await sim.fault("hang", after_tokens=4)
        hung = asyncio.create_task(sim.chat("hi", **STREAM))
        await sim.until("live", 1)
        await well(sim)
        await sim.until("live", 0)
        done, _ = await asyncio.wait([hung], timeout=0.1)
        assert not done
        hung.cancel()
        await asyncio.gather(hung, return_exceptions=True)


async def test_stall_stops_the_engine_while_health_says_well() -> None:
    async with running() as sim:
        await sim.fault("stall")
        ask = asyncio.create_task(sim.chat("hi", **STREAM))
        await sim.until("waiting", 1)
        assert await sim.health() == 200
        done, _ = await asyncio.wait([ask], timeout=0.1)
        assert not done
        await sim.clear("stall")
        assert (await ask).done


async def test_slow_takes_longer() -> None:
    loop, times = asyncio.get_running_loop(), []
    async with running() as sim:
        for value in (None, 0.1):
            if value:
                await sim.fault("slow", value=value)
            begin = loop.time()
            await sim.chat("hi", max_tokens=200, ignore_eos=True)
            times.append(loop.time() - begin)
    assert times[1] > 4 * times[0]


async def test_die_ends_streams_in_band_then_health_fails_then_nothing_listens() -> None:
    async with running(time_scale=1.0) as sim:
        stream = asyncio.create_task(sim.chat("hi", max_tokens=9000, ignore_eos=True, **STREAM))
        whole = asyncio.create_task(sim.chat("hi", max_tokens=9000, ignore_eos=True))
        await sim.until("running", 2)
        await sim.fault("die")
        assert await sim.health() == 503
        assert (await sim.chat("hi")).status == 500
        got = await stream
        assert got.done
        assert got.events[-1]["error"]["code"] == 500
        assert (await whole).status == 500
        await eventually(lambda: refused(sim))
        await sim.clear("die")
        await well(sim)


async def test_abort_looks_like_a_clean_end_and_then_the_port_is_closed() -> None:
    async with running(time_scale=1.0) as sim:
        stream = asyncio.create_task(sim.chat("hi", max_tokens=9000, ignore_eos=True, **STREAM))
        await sim.until("generation_tokens", 1)
        await sim.fault("abort")
        got = await stream
        assert (got.done, got.finish) == (True, ["abort"])
        assert await refused(sim)
        await sim.clear()
        await well(sim)


async def test_abort_after_tokens_hits_one_stream() -> None:
    async with running() as sim:
        await sim.fault("abort", after_tokens=6, count=1)
        got = await sim.chat("hi", **STREAM)
        assert got.finish == ["abort"]
        await well(sim)


async def test_malformed_sends_one_torn_event_and_goes_on() -> None:
    async with running() as sim:
        await sim.fault("malformed", after_tokens=5)
        got = await sim.chat("hi", **STREAM)
        lines = [line[6:] for line in got.raw.split(b"\n\n") if line.startswith(b"data: {")]
        assert len(lines) - len(got.events) == 1
        assert got.done
        assert got.events[-1]["usage"]["completion_tokens"] > 5
        await well(sim)


async def test_malformed_tears_a_whole_body() -> None:
    async with running() as sim:
        await sim.fault("malformed")
        got = await sim.chat("hi")
        with pytest.raises(json.JSONDecodeError):
            _ = got.json


async def test_truncated_ends_properly_framed_without_an_end() -> None:
    async with running() as sim:
        await sim.fault("truncated", after_tokens=5)
        got = await sim.chat("hi", **STREAM)
        assert (got.status, got.broken, got.done, got.finish) == (200, False, False, [])
        assert got.events
        await sim.fault("truncated")
        assert (await sim.chat("hi")).broken
        await well(sim)


async def test_acceptance_collapses_and_recovers() -> None:
    async with running() as sim:
        await sim.fault("acceptance", value=0.0)
        body: dict[str, Any] = {
            "max_tokens": 60,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        got = await sim.chat("hi", **body)
        sizes = {len(c["token_ids"]) for e in got.events for c in e["choices"] if c.get("token_ids")}
        assert sizes == {1}
        await sim.clear()
        got = await sim.chat("hi", **body)
        assert max(len(c.get("token_ids") or ()) for e in got.events for c in e["choices"]) > 1


async def test_flush_empties_the_prefix_cache_once() -> None:
    text = "long " * 4000
    async with running() as sim:
        await sim.chat(text, max_tokens=1)
        _, answer = await sim.fault("flush")
        assert answer == {"faults": []}
        cold = (await sim.chat(text, max_tokens=1)).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        warm = (await sim.chat(text, max_tokens=1)).json["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cold == 0 < warm


async def test_health_lies_both_ways() -> None:
    async with running() as sim:
        await sim.fault("health")
        assert await sim.health() == 503
        await well(sim)
        await sim.clear()
        await sim.fault("health", status=200)
        await sim.fault("die")
        assert await sim.health() == 200
        assert (await sim.chat("hi")).status == 500


async def test_metrics_stand_still_and_go_on() -> None:
    async with running() as sim:
        await sim.fault("metrics")
        before = await sim.metrics()
        await well(sim)
        assert await sim.metrics() == before
        await sim.clear()
        assert await sim.metrics() != before


async def test_dialect_and_required_leave_calls_unparsed() -> None:
    async with running() as sim:
        await sim.fault("dialect", dialect="hermes")
        got = (await sim.chat("hi", tools=[TOOL])).json["choices"][0]
        assert '<tool_call>\n{"name"' in got["message"]["content"]
        await sim.clear()
        await sim.fault("required", value=1.0)
        got = (await sim.chat("hi", tools=[TOOL], tool_choice="required")).json["choices"][0]
        assert "<function=get_weather>" in got["message"]["content"]
        assert "tool_calls" not in got["message"]
        got = (await sim.chat("hi", tools=[TOOL])).json["choices"][0]
        assert got["finish_reason"] == "tool_calls"


async def test_a_profile_with_that_limit_breaks_required_for_some_prompts() -> None:
    assert not profile.get("fp8-mtp3-upstream-v0.20.1").tool_choice_required_works
    async with running(profile="fp8-mtp3-upstream-v0.20.1", time_scale=100.0) as sim:
        finishes = [
            (await sim.chat(f"hi {i}", tools=[TOOL], tool_choice="required")).json["choices"][0][
                "finish_reason"
            ]
            for i in range(40)
        ]
    assert 12 <= finishes.count("stop") <= 34


async def test_a_fault_ends_after_its_seconds() -> None:
    async with running() as sim:
        await sim.fault("health", seconds=0.05)
        assert await sim.health() == 503
        await eventually(lambda: says(sim, 200))


async def test_a_script_switches_faults_on_by_its_clock() -> None:
    async with running(script=(Fault(FaultKind.HEALTH, at=0.05, status=503),)) as sim:
        assert await sim.health() == 200
        await eventually(lambda: says(sim, 503))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ({"fault": "explode"}, "unknown fault 'explode'; known: refuse"),
        ({"fault": "reset", "after": 3}, "unknown field 'after'"),
        ({"fault": "reset", "after_tokens": "3"}, "after_tokens is not a int"),
        ({"fault": "reset", "count": True}, "count is not a int"),
        ([], "a fault is an object"),
    ],
)
async def test_a_command_that_means_nothing_is_refused(command: Any, says: str) -> None:
    with pytest.raises(BadFault, match=r"known|not|object"):
        read_fault(command)
    async with (
        running() as sim,
        sim.session.post(sim.simulator.admin_url + "/faults", json=command) as response,
    ):
        assert response.status == 400
        assert says in (await response.json())["error"]


def test_every_fault_is_tried_here() -> None:
    from pathlib import Path

    text = Path(__file__).read_text("utf-8")
    assert [kind for kind in FaultKind if f'"{kind}"' not in text] == []
