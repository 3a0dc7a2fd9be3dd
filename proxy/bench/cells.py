"""One point of the matrix, measured.

Rules
1. Decode and warm: the prompt is in the prefix cache (asked once before, which is not counted), all streams are sent at
   once with the same prompt, and tokens are counted from the moment in which the last of them got its second delta
   until the slowest got `tokens` more. What is left of the answers is cancelled.
2. Cold: a prompt that nobody has seen, alone on an idle engine.
3. Nothing begins before the engine is idle again, where it says so.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from statistics import fmean, median

from proxy.bench.stream import Client, Failed, Heard, together
from proxy.bench.text import Texts
from proxy.probe import Unreachable
from proxy.wire.promtext import EngineMetrics, read_metrics

IDLE_SECONDS = 60.0
POLL_SECONDS = 0.05
CELL_SECONDS = 900.0
SHORT = 16
"""Tokens of a prompt at context 0."""


@dataclass(frozen=True, slots=True)
class Round:
    """rate: tokens a second of all streams. ttft: seconds of each. acceptance: of drafted tokens, None: not told."""

    rate: float
    ttft: list[float]
    acceptance: float | None = None
    draft_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """A point, over all its rounds. rate: tokens a second of all streams. ttft, worst: mean and 99th percentile, seconds."""

    streams: int
    context: int
    rate: float
    ttft: float
    worst: float
    acceptance: float | None
    draft_tokens: float | None

    @property
    def tpot(self) -> float:
        """Seconds a token, of one stream."""
        return self.streams / self.rate


class Engine:
    """What the server's /metrics says, where it has one."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.speaks = True

    async def numbers(self) -> EngineMetrics:
        if not self.speaks:
            return EngineMetrics()
        try:
            answer = await self._client.asker.ask("GET", self._client.asker.backend.metrics_path)
        except Unreachable:
            return EngineMetrics()
        found = read_metrics(answer.body) if answer.status == 200 else EngineMetrics()
        self.speaks = found.running is not None
        return found

    async def idle(self) -> None:
        """Wait until nothing runs there. Raises `Failed` when somebody else's requests do not end."""
        clock = self._client.clock
        until = clock.now() + IDLE_SECONDS
        while True:
            found = await self.numbers()
            if not (found.running or found.waiting):
                return
            if clock.now() > until:
                raise Failed("the server is busy with other requests: it cannot be measured now")
            await clock.sleep(POLL_SECONDS)


async def warm(
    client: Client, engine: Engine, texts: Texts, streams: int, context: int, tokens: int, rounds: int
) -> Cell:
    """Decode rate and warm first tokens of `streams` with `context` tokens each. Raises `Failed`."""
    prompt = await texts.exact(client, "warm", context) if context else texts.about("short", SHORT)
    if not context:
        await client.ask(prompt)
    limit = 3 * tokens + 200
    found: list[Round] = []
    while len(found) < rounds:
        await engine.idle()
        made = await _round(client, engine, client.body(prompt, limit), streams, tokens)
        if made is not None:
            found.append(made)
        elif limit >= 27 * tokens:
            raise Failed(f"the {streams} streams never all ran at once: more than the engine has seats for?")
        else:
            limit *= 3
    times = [seconds for one in found for seconds in one.ttft]
    accepted = [one.acceptance for one in found if one.acceptance is not None]
    drafts = [one.draft_tokens for one in found if one.draft_tokens is not None]
    return Cell(
        streams,
        context,
        median(one.rate for one in found),
        median(fmean(one.ttft) for one in found),
        sorted(times)[max(0, -(-99 * len(times) // 100) - 1)],
        fmean(accepted) if accepted else None,
        fmean(drafts) if drafts else None,
    )


class _Window:
    """The time in which every stream decodes. `begin`: all have begun; `over`: the slowest has its tokens."""

    def __init__(self, client: Client, streams: int, tokens: int) -> None:
        self._clock, self._tokens = client.clock, tokens
        self.heard = [Heard() for _ in range(streams)]
        self.over = asyncio.Event()
        self.begin: float | None = None
        self.end: float | None = None
        self._waiting = set(map(id, self.heard))
        self._short = set(self._waiting)

    def told(self, heard: Heard) -> None:
        if self.begin is None:
            if len(heard.times) > 1:
                self._waiting.discard(id(heard))
            if not self._waiting:
                self.begin = heard.times[-1]
        elif self.end is None and id(heard) in self._short:
            if heard.counted and heard.tokens(self.begin, heard.times[-1]) >= self._tokens:
                self._short.discard(id(heard))
            if not self._short:
                self.end = heard.times[-1]
                self.over.set()


async def _round(client: Client, engine: Engine, body: bytes, streams: int, tokens: int) -> Round | None:
    """None: the answers ended too soon. Raises `Failed`."""
    window = _Window(client, streams, tokens)
    before = await engine.numbers()
    jobs = [asyncio.ensure_future(client.stream(body, heard, window.told)) for heard in window.heard]
    try:
        async with client.clock.timeout_at(client.clock.now() + CELL_SECONDS):
            await together(jobs, window.over)
    except TimeoutError:
        raise Failed(f"not done within {CELL_SECONDS:g} s") from None
    after = await engine.numbers()
    begin = window.begin
    ended = [heard.times[-1] for heard in window.heard if heard.ended and heard.times]
    end = window.end if window.end is not None else min(ended, default=None)
    if begin is None or end is None or end <= begin:
        return None
    counts = [heard.tokens(begin, end) for heard in window.heard]
    if fmean(counts) < tokens / 2:
        return None
    ttft = [heard.first - heard.sent for heard in window.heard if heard.first is not None]
    return Round(sum(counts) / (end - begin), ttft, *_speculation(before, after))


def _speculation(before: EngineMetrics, after: EngineMetrics) -> tuple[float | None, float | None]:
    """(accepted share, tokens drafted a step) between two looks."""
    drafted = (after.spec_draft_tokens or 0) - (before.spec_draft_tokens or 0)
    steps = (after.spec_drafts or 0) - (before.spec_drafts or 0)
    accepted = (after.spec_accepted_tokens or 0) - (before.spec_accepted_tokens or 0)
    if drafted <= 0:
        return (None, None) if after.running is None else (0.0, 0.0)
    return accepted / drafted, drafted / steps if steps > 0 else None


async def cold(client: Client, engine: Engine, texts: Texts, tokens: int, rounds: int) -> tuple[int, float]:
    """(prompt tokens as the server counts, median seconds to the first token). Raises `Failed`."""
    found: list[tuple[float, int]] = []
    for number in range(rounds):
        await engine.idle()
        heard = await client.ask(texts.about(f"cold {tokens} {number}", tokens))
        assert heard.first is not None
        if heard.prompt and (heard.cached or 0) > heard.prompt / 50:
            raise Failed(
                f"{heard.cached} of {heard.prompt} tokens were in the cache: with --seed, a second run is not cold"
            )
        found.append((heard.first - heard.sent, heard.prompt or tokens))
    return round(median(prompt for _, prompt in found)), median(seconds for seconds, _ in found)
