"""`tierline bench` finds what is there: the profile of a simulated server comes back, and decides alike."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from policies import BackendView, Fleet, Member, PolicyParams, RequestFacts, Result, Router
from policies import profile as profiles
from policies.admission import Admission
from policies.profile import Profile
from policies.profilefile import read
from policies.simulation import SHAPES, Live, Machine, Simulation
from policies.simulation.players import member
from proxy.bench.matrix import Found, Plan
from proxy.bench.stream import Client, Failed, Heard
from proxy.bench.write import text
from proxy.cli import main
from proxy.clock import LoopClock
from proxy.config import backend_at, loads
from proxy.probe import Asker, session
from tests.benching import OPTIONS, bench, bench_all, errors, found_again
from tests.scripted import ScriptedBackend, Steps, closed_port, error_json, event, sse
from tests.sim.process import SimServer

SMALL = Plan((1, 4, 16), (0, 16384), (8192, 16384), tokens=200, rounds=1)
FLEET = {"fp8": "fp8-mtp3-tp2-v17", "bf16": "bf16-dflash8-tp2-v17"}
SERVING = [name for name in profiles.names() if not profiles.get(name).quality_only]
AS_STUDIED = [name for name in SERVING if not profiles.get(name).measured.latency_cold]
WITHIN = 0.05


@cache
def small(name: str, through: bool = False) -> Found:
    return bench(name, SMALL, through=through)


def wrong(found: Found, name: str, within: float = WITHIN) -> dict[str, float]:
    return {what: round(off, 3) for what, off in errors(found, name).items() if abs(off) > within}


@pytest.mark.parametrize("through", [False, True])
def test_the_profile_of_a_simulated_server_comes_back(through: bool) -> None:
    found = small(FLEET["fp8"], through)
    assert (len(found.cells), len(found.prefill)) == (6, 2)
    assert wrong(found, FLEET["fp8"]) == {}


def test_through_the_gateway_streams_are_as_fast_as_without() -> None:
    direct, through = small(FLEET["fp8"]), small(FLEET["fp8"], through=True)
    for one, other in zip(direct.cells, through.cells, strict=True):
        assert (one.streams, one.context) == (other.streams, other.context)
        assert other.rate / one.rate >= 0.99, other
        assert one.ttft / other.ttft >= 0.99, other


@pytest.mark.slow
@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("name", AS_STUDIED)
def test_every_shipped_profile_comes_back_in_every_cell(name: str, through: bool) -> None:
    found = bench_all(name, through=through)
    own = profiles.get(name)
    # A prompt of the whole window leaves no room for an answer.
    fits = [(c, x) for c, x, _ in own.measured.decode if x < own.window_tokens]
    assert sorted((cell.streams, cell.context) for cell in found.cells) == sorted(fits)
    assert wrong(found, name) == {}


def test_what_the_engine_says_of_itself_is_in_the_profile() -> None:
    own, found = profiles.get(FLEET["fp8"]), found_again(small(FLEET["fp8"]), FLEET["fp8"])
    assert found.window_tokens == own.window_tokens
    assert found.kv_tokens == own.kv_tokens // OPTIONS.block_tokens * OPTIONS.block_tokens
    assert found.speculation.draft_tokens == own.measured.speculation.draft_tokens
    for _, share in found.speculation.acceptance:
        assert share == pytest.approx(own.acceptance(), rel=0.05)
    assert found.quality == own.quality


def test_through_a_gateway_speculation_is_not_seen_and_that_is_said() -> None:
    found = small(FLEET["fp8"], through=True)
    assert all(cell.acceptance is None for cell in found.cells)
    assert any("no engine metrics" in note for note in found.notes)
    own = profiles.get(FLEET["fp8"]).measured
    assert found_again(found, FLEET["fp8"]).speculation == own.speculation


def test_a_server_without_speculation_is_told_as_one() -> None:
    found = bench("fp8-nospec-may5", Plan((8,), (0,), (8192,), rounds=1))
    assert found_again(found, "fp8-nospec-may5").speculation.draft_tokens == 0


def test_cells_that_cannot_fit_are_left_out_and_said() -> None:
    options = replace(OPTIONS, window_tokens=20000, kv_tokens=40000)
    found = bench(FLEET["fp8"], Plan((1, 64), (0, 32768), (8192, 32768), rounds=1), options=options)
    assert [(cell.streams, cell.context) for cell in found.cells] == [(1, 0)]
    assert [tokens // 1000 for tokens, _ in found.prefill] == [8]
    assert sum("left out: the window has 20000 tokens" in note for note in found.notes) == 3
    assert sum("left out: the KV cache has" in note for note in found.notes) == 1


def test_streams_that_never_run_together_are_no_cell() -> None:
    options = replace(OPTIONS, max_num_seqs=2)
    found = bench(FLEET["fp8"], Plan((1, 4), (0,), (8192,), tokens=50, rounds=1), options=options)
    assert [cell.streams for cell in found.cells] == [1]
    assert any("never all ran at once" in note for note in found.notes)


# -- the file, and what is decided by it ----------------------------------------------------------------------


def profile_of(name: str, found: Found) -> Profile:
    """As a backend with the written file would have it."""
    return read(text(found_again(found, name), "http://127.0.0.1:1", found.notes))


def test_the_written_profile_is_read_by_a_backend_and_by_check(tmp_path: Path) -> None:
    own = found_again(small(FLEET["fp8"]), FLEET["fp8"])
    (tmp_path / "measured.toml").write_text(text(own, "http://127.0.0.1:1", ["a note\nof two lines"]))
    config = '[[backends]]\nname = "a"\nurl = "http://127.0.0.1:1"\nprofile = "measured.toml"\n[models.m]\n'
    measured = loads(config, {}, folder=tmp_path).backends[0].measured
    assert measured is not None
    assert measured.measured == own
    (tmp_path / "config.toml").write_text(config)
    done = CliRunner().invoke(main, ["check", "--config", str(tmp_path / "config.toml")])
    assert done.exit_code == 0, done.output
    assert tomllib.loads(done.output.partition("Who may")[0])["backends"][0]["profile"].endswith(
        "measured.toml"
    )


class Twins(Fleet):
    """A fleet that tells all it hears to another one, of the same backends with other profiles, and notes at each look
    which of them each would choose: (by this one, by the other, how much worse the other's is, in this one's seconds)."""

    def __init__(self, members: Iterable[Member], others: Iterable[Member], params: PolicyParams) -> None:
        self.other = Fleet(others, params)
        self.router = Router(params.router)
        self.noted: list[tuple[str, str, float, float]] = []
        super().__init__(members, params)

    def views(
        self, now: float, facts: RequestFacts, names: Iterable[str], hold: Any = None
    ) -> tuple[BackendView, ...]:
        names = tuple(names)
        found = super().views(now, facts, names, hold)
        if len(names) > 1:
            views = super().views(now, facts, names)
            one = self.router.choose(facts, views, Random(1)).backend
            other = self.router.choose(facts, self.other.views(now, facts, names), Random(1)).backend
            if one is not None and other is not None:
                cost = {view.name: view.forecast.cost for view in views if view.forecast is not None}
                self.noted.append((one, other, cost[one], cost[other]))
        return found

    def begin(self, now: float, id: int, name: str, facts: RequestFacts, view: Any = None) -> None:
        super().begin(now, id, name, facts, view)
        self.other.begin(now, id, name, facts)

    def first_token(self, now: float, id: int) -> None:
        super().first_token(now, id)
        self.other.first_token(now, id)

    def finish(self, now: float, id: int, result: Result) -> None:
        super().finish(now, id, result)
        self.other.finish(now, id, result)

    def polled(self, now: float, name: str, numbers: Any) -> None:
        super().polled(now, name, numbers)
        self.other.polled(now, name, numbers)


def choices(measured: dict[str, Profile], shape: str, rate: float, seconds: float) -> Iterator[Any]:
    """The gateway's own policy with the shipped profiles, in simulated traffic; at each choice also the one with others."""
    machines = [Machine(name, profile) for name, profile in FLEET.items()]
    players = []

    def make(running: Any, rng: Random) -> Live:
        player = Live(machines, PolicyParams(), rng)
        others = [member(Machine(machine.name, measured[machine.name])) for machine in machines]
        twins = Twins([member(machine) for machine in machines], others, PolicyParams())
        player.fleet = twins
        player.admission = Admission(twins, Router(PolicyParams().router), PolicyParams(), rng)
        player.advance, player.withdraw = player.admission.advance, player.admission.withdraw
        player.next_event_at = player.admission.next_event_at
        player.first_token, player.finish, player.polled = twins.first_token, twins.finish, twins.polled
        players.append(twins)
        return player

    traffic = SHAPES[shape].traffic(rate, Random(5), seconds=seconds)
    Simulation(machines, traffic, make, Random(3)).run()
    yield from players[0].noted


def differing(
    measured: dict[str, Profile], shape: str, rate: float, seconds: float
) -> list[tuple[float, float]]:
    """(seconds that the shipped profiles predict of their own choice, how much more of the other one), where they differ;
    padded with nothing for each choice that is the same."""
    noted = list(choices(measured, shape, rate, seconds))
    assert len(noted) > 200
    assert len({one for one, *_ in noted}) == 2, "both are chosen at times"
    found = [(cost, other - cost) for a, b, cost, other in noted if a != b]
    assert len(found) <= 0.05 * len(noted)
    return found


def test_a_gateway_with_the_measured_profiles_decides_as_with_the_shipped_ones() -> None:
    """Where it does not, the two places are as good as equal. Of a small matrix."""
    measured = {name: profile_of(profile, small(profile)) for name, profile in FLEET.items()}
    for cost, more in differing(measured, "chat", 4.0, 60.0):
        assert more <= max(0.05, 0.05 * cost)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "rate"), [("chat", 6.5), ("agents", 0.3), ("documents", 0.2)])
def test_with_the_whole_matrix_it_decides_so_in_any_traffic(shape: str, rate: float) -> None:
    measured = {name: profile_of(profile, whole(profile)) for name, profile in FLEET.items()}
    for cost, more in differing(measured, shape, rate, 600.0 / rate):
        assert more <= max(0.03, 0.03 * cost)


@cache
def whole(name: str) -> Found:
    return bench_all(name)


# -- servers that tell less ------------------------------------------------------------------------------------


def text_event(text: str, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}], **more})


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion}


async def heard_of(*events: bytes) -> tuple[Heard, Client]:
    """What a client hears when the answer is these events."""
    async with ScriptedBackend() as backend, session(5.0) as asking:
        backend.answer(sse(*events))
        backend.answer(sse(*events))
        client = Client(Asker(backend_at(backend.url), asking), LoopClock(), "m")
        await client.settle()
        return await client.ask("hi", 9), client


async def test_usage_with_every_event_counts_tokens_exactly() -> None:
    heard, client = await heard_of(
        text_event("a", usage=usage(7, 3)),
        text_event("b", usage=usage(7, 5)),
        event({"choices": [], "usage": usage(7, 5)}),
    )
    assert (client.counts, heard.counts, heard.prompt, heard.usage) == ("each event", [3, 5], 7, 5)
    assert heard.tokens(-1.0, heard.times[-1]) == 5.0


async def test_usage_at_the_end_makes_each_delta_the_mean_of_its_answer() -> None:
    heard, client = await heard_of(*[text_event("a")] * 4, event({"choices": [], "usage": usage(7, 12)}))
    assert (client.counts, heard.counts, heard.usage) == ("usage", [1, 2, 3, 4], 12)
    assert heard.tokens(-1.0, heard.times[-1]) == 12.0


async def test_usage_in_the_last_delta_is_no_count_of_that_delta() -> None:
    last = event({"choices": [{"index": 0, "text": "b", "finish_reason": "length"}], "usage": usage(7, 12)})
    heard, client = await heard_of(*[text_event("a")] * 3, last)
    assert (client.counts, heard.counts, heard.usage) == ("usage", [1, 2, 3, 4], 12)


async def test_without_usage_a_delta_is_a_token_and_that_is_said() -> None:
    heard, client = await heard_of(*[text_event("a")] * 4)
    assert (client.counts, heard.usage, heard.prompt) == ("deltas", None, None)
    assert heard.tokens(-1.0, heard.times[-1]) == 4.0


async def test_a_server_that_refuses_a_field_is_asked_without_it() -> None:
    async with ScriptedBackend() as backend, session(5.0) as asking:
        no = error_json(400, "no such field")
        for answer in (no, no, sse(text_event("a"))):
            backend.answer(answer)
        client = Client(Asker(backend_at(backend.url), asking), LoopClock(), "m")
        await client.settle()
        assert client.without == ["continuous_usage_stats", "ignore_eos"]
        asked = (await backend.received(2)).json
    assert "ignore_eos" not in asked
    assert asked["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (error_json(404, "no such path"), "answers 404: no such path"),
        (sse(event({"error": {"message": "engine died", "code": 500}})), "the stream says: engine died"),
        (sse(), "the answer has no token"),
    ],
)
async def test_what_a_server_answers_in_place_of_tokens_is_said(answer: Steps, says: str) -> None:
    async with ScriptedBackend() as backend, session(5.0) as asking:
        backend.answer(answer)
        client = Client(Asker(backend_at(backend.url), asking), LoopClock(), "m")
        with pytest.raises(Failed, match=says):
            await client.ask("hi")


# -- the command -------------------------------------------------------------------------------------------------


def command(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ftp://x"], 'expected "http://HOST:PORT"'),
        (["http://127.0.0.1:1", "--key", "plain"], "a key is never written"),
        (["http://127.0.0.1:1", "--context", "4q"], "no whole number"),
        (["http://127.0.0.1:1", "--concurrency", "0"], "no whole number, 1 or more"),
        (["http://127.0.0.1:1", "--like", "fp9"], "no profile is named"),
    ],
)
def test_a_command_line_that_cannot_work_is_a_usage_error(arguments: list[str], says: str) -> None:
    done = command(*arguments)
    assert (done.exit_code, says in done.output) == (2, True), done.output


def test_a_server_that_is_not_there_is_a_failure() -> None:
    done = command(f"http://127.0.0.1:{closed_port()}")
    assert (done.exit_code, "is the server running" in done.output or "refused" in done.output) == (1, True)


def test_the_command_writes_a_profile_that_sim_can_be(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    with SimServer(FLEET["fp8"], options=("--time-scale", "20")) as server:
        done = command(
            server.url + "/v1", "--quick", "--concurrency", "2", "--context", "0", "--prefill", "8k", "--tokens", "40",
            "--like", FLEET["fp8"], "--out", str(out),
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "[1/2] decode, 2 x 0 tokens:" in done.output
    made = read(out.read_text())
    assert (made.name, made.window_tokens, len(made.measured.decode)) == ("mine", 262144, 1)
    listed = CliRunner().invoke(main, ["sim", "--profile", str(out), "--check"])
    assert listed.exit_code == 0, listed.output
