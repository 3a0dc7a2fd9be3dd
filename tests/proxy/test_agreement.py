"""The gateway on real sockets, with simulated servers behind it, does what the simulation says: turn by turn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from aiohttp import web

from policies import Fleet, Polled
from policies.engine import BLOCK_TOKENS
from policies.simulation import SHAPES, Conversation
from proxy.sim.ask import steering
from proxy.wire.errors import Api
from proxy.wire.prefix import Prefix, read_prefix
from proxy.wire.request import read_request
from tests.agreement import BYTES, IdleClock, Live, client_session, converse, fleet, on_idle_clock, prompts_of

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "rate", "requests", "warm_up"),
    [("chat", 7.5, 120, 10), ("chat", 6.5, 1700, 30), ("agents", 0.3, 120, 200)],
)
def test_times_to_the_first_token_are_those_of_the_simulation(
    shape: str, rate: float, requests: int, warm_up: int
) -> None:
    """A process of its own: its loop has another selector. It exits with 1 when p50 or p95 are 15 % apart."""
    command = [sys.executable, "-m", "tests.agreement", shape, "--rate", str(rate)]
    command += ["--requests", str(requests), "--warm-up", str(warm_up)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def links(prompt: str) -> Prefix:
    return read_prefix(read_request(Api.COMPLETIONS, json.dumps({"prompt": prompt}).encode()), "m")


def drawn(shape: str) -> tuple[Conversation, ...]:
    return SHAPES[shape].traffic(1.0, Random(1), seconds=60.0).conversations[:20]


@pytest.mark.parametrize("shape", ["chat", "agents", "documents"])
def test_the_gateway_sees_each_turn_go_on_where_the_one_before_ended(shape: str) -> None:
    """Else it sends the turn elsewhere, and the simulation, whose links are the cache's blocks, does not."""
    for number, one in enumerate(drawn(shape)):
        before, text = links(""), ""
        for turn, prompt in zip(one.turns, prompts_of(one.turns, f"c{number}"), strict=True):
            assert len(prompt) == turn.prompt * BYTES
            assert prompt.startswith(text)
            chain = links(prompt)
            assert chain.links[: len(before.links)] == before.links
            assert steering(prompt)["tokens"] == str(max(1, turn.output - 1))
            before, text = chain, prompt


def test_conversations_share_the_blocks_of_their_chains_and_no_others() -> None:
    size = BLOCK_TOKENS * BYTES
    asked = [(one.turns[0], next(prompts_of(one.turns, f"c{n}"))) for n, one in enumerate(drawn("agents"))]
    shared = 0
    for turn, prompt in asked:
        for other, text in asked:
            for at in range(min(turn.prompt, other.prompt) // BLOCK_TOKENS):
                same = turn.chain[: at + 1] == other.chain[: at + 1]
                assert (prompt[: (at + 1) * size] == text[: (at + 1) * size]) is same
                shared += same and turn is not other
    assert shared


@pytest.mark.parametrize(("refusals", "answered", "refused"), [(0, 1, 0), (2, 1, 2), (3, 0, 3)])
def test_a_client_who_is_refused_comes_again_as_the_simulations_does(
    refusals: int, answered: int, refused: int
) -> None:
    """Its time to the first token counts from the attempt that was answered."""
    one = drawn("chat")[0]
    one = Conversation(0.0, one.turns[:1])
    came: list[float] = []

    async def run(clock: IdleClock) -> Live:
        async def answer(request: web.BaseRequest) -> web.Response:
            came.append(clock.now())
            if len(came) <= refusals:
                return web.Response(status=429, headers={"retry-after": "3"})
            return web.Response(text='data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n')

        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        app, found = SimpleNamespace(port=runner.addresses[0][1]), Live()
        async with client_session() as session:
            await converse(app, session, clock, one, 0, found, 2000.0)  # type: ignore[arg-type]
        await runner.cleanup()
        return found

    found = on_idle_clock(run)
    assert (len(found.ttft), found.refused, found.cut) == (answered, refused, 0)
    assert came == [1000.0 + 3.0 * n for n in range(refused + answered)]
    assert found.ttft == [(0.0, 0.0)] * answered


def test_a_gateway_with_the_same_chance_polls_at_the_same_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no live run is like another."""
    polls: list[tuple[str, float]] = []
    polled = Fleet.polled

    def noted(self: Fleet, now: float, name: str, numbers: Polled) -> None:
        polls.append((name, now))
        polled(self, now, name, numbers)

    monkeypatch.setattr(Fleet, "polled", noted)

    async def idle(clock: IdleClock) -> list[tuple[str, float]]:
        polls.clear()
        async with fleet(clock):
            await clock.sleep(20.0)
        return sorted(polls)

    first = on_idle_clock(idle)
    assert len(first) >= 18
    assert on_idle_clock(idle) == first
