"""`tierline sim` in a process of its own, as other tests and the demo use it."""

from __future__ import annotations

import asyncio

import pytest

from tests.real.server import Unavailable
from tests.sim.process import SimServer


async def test_it_serves_counts_what_it_works_on_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERLINE_SIM_KEY", "of another simulator")
    async with SimServer("fp8-mtp3-tp2-v17", name="tiny", options=("--time-scale", "20")) as server:
        child = server.child
        assert child is not None
        assert server.running() == 0
        body = {"messages": [{"role": "user", "content": "#sim tokens=2000 think=0"}], "model": "tiny"}
        asked = asyncio.create_task(asyncio.to_thread(server.post, "/v1/chat/completions", body))
        await server.until_running(1)
        status, answer = await asked
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2001)
    assert not child.running


async def test_one_that_cannot_start_says_why() -> None:
    with pytest.raises(Unavailable, match="known: fp8-mtp3-may5"):
        async with SimServer("fp9"):
            pass
