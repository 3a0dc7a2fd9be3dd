"""The engine model beside the study: every measured cell of a profile's own tables, in virtual time.

Rules: decode cells: c streams start together and tokens are counted while all c decode. Warm cells: c
requests start together on prompts in the prefix cache; cold ones on prompts that are not. Streams of a decode
or warm cell share their prefix: the study's longest cells only fit so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from policies.engine.scheduler import Engine
from policies.engine.values import BLOCK_TOKENS, Finished, FirstToken, Request
from policies.profile import Profile

RATE_TOLERANCE = 0.03
TTFT_TOLERANCE = 0.10
OUTPUT = 2000
"""Tokens a stream generates: enough that none ends while others start."""
COUNTED = 400
"""Tokens a stream gets while they are counted."""
SHORT = 16
"""Prompt tokens of a cell at context 0."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison; `study` and `model` are in the unit that `kind` ends with."""

    profile: str
    kind: str
    concurrency: int
    context: int
    study: float
    model: float
    tolerance: float

    @property
    def error(self) -> float:
        return self.model / self.study - 1.0

    @property
    def ok(self) -> bool:
        return abs(self.error) <= self.tolerance


def check(profile: Profile) -> Iterator[Cell]:
    """Every measured cell of the profile's own tables."""
    own = profile.measured
    for c, x, rate in own.decode:
        yield Cell(profile.name, "decode tok/s", c, x, rate, decode_rate(profile, c, x), RATE_TOLERANCE)
    kind = "cold TTFT s" if own.latency_cold else "warm TTFT s"
    for c, x, mean, *_ in own.latency:
        model = mean_ttft(profile, c, x, warm=not own.latency_cold)
        yield Cell(profile.name, kind, c, x, mean / 1e3, model, TTFT_TOLERANCE)
    for tokens, seconds in own.prefill:
        model = mean_ttft(profile, 1, tokens, warm=False)
        yield Cell(profile.name, "cold TTFT s", 1, tokens, seconds, model, TTFT_TOLERANCE)


def decode_rate(profile: Profile, concurrency: int, context: int) -> float:
    """Aggregate tok/s while all streams decode."""
    engine, at = _warmed(profile, context)
    for i in range(concurrency):
        engine.submit(at, _request(context, i, warm=True, output=OUTPUT))
    joined = 0
    while joined < concurrency:
        at = _next(engine)
        joined += sum(isinstance(event, FirstToken) for event in engine.advance(at))
    before = engine.stats(at).generation_tokens
    end = at + COUNTED / profile.stream_rate(concurrency, context)
    if any(isinstance(event, Finished) for event in engine.advance(end)):
        raise ValueError("a stream ended while tokens were counted")
    return (engine.stats(end).generation_tokens - before) / (end - at)


def mean_ttft(profile: Profile, concurrency: int, context: int, *, warm: bool) -> float:
    """Mean seconds to the first token of requests that start together."""
    engine, start = _warmed(profile, context) if warm else (Engine(profile), 0.0)
    for i in range(concurrency):
        engine.submit(start, _request(context, i, warm=warm, output=OUTPUT))
    times: list[float] = []
    while len(times) < concurrency:
        events = engine.advance(_next(engine))
        times += [event.at - start for event in events if isinstance(event, FirstToken)]
    return sum(times) / concurrency


def _warmed(profile: Profile, context: int) -> tuple[Engine, float]:
    """An idle engine whose cache knows the shared prompt, and its time."""
    engine, at = Engine(profile), 0.0
    engine.submit(at, _request(context, 0, warm=True, output=1))
    while engine.next_event_at() is not None:
        at = _next(engine)
        engine.advance(at)
    return engine, at


def _request(context: int, number: int, *, warm: bool, output: int) -> Request:
    tokens = context or SHORT
    first = 0 if warm else (number + 1) << 32
    return Request(tokens, output, blocks=tuple(range(first, first + tokens // BLOCK_TOKENS)))


def _next(engine: Engine) -> float:
    at = engine.next_event_at()
    if at is None:
        raise ValueError("the engine is idle before all requests started")
    return at
