"""Profiles by name: what a configuration does at any load, from what was measured of it.

Rules: `get(name)` answers the same frozen value every time; borrowed parts are resolved here, one level
deep, and stay marked in `measured.borrowed`. A profile without decode figures (`quality_only`) answers
quality alone.
Times are seconds, rates tokens per second, contexts and prompts tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache

from policies.measured import LatencyRow, LimitKind, Measured, Part, PrefillRow, Quality
from policies.profiles import MEASURED
from policies.surface import Surface


@dataclass(frozen=True, slots=True)
class Profile:
    """A configuration with its surfaces. `decode`: seconds per token of a stream; `warm`, `warm_p99`: seconds
    to the first token. Build with `get`."""

    measured: Measured
    window_tokens: int
    kv_tokens: int
    prefill: tuple[PrefillRow, ...]
    acceptance_points: tuple[tuple[int, float], ...]
    decode: Surface | None = field(repr=False)
    warm: Surface | None = field(repr=False)
    warm_p99: Surface | None = field(repr=False)
    cold_share: tuple[tuple[int, float], ...] = ()

    @property
    def name(self) -> str:
        return self.measured.name

    @property
    def quality(self) -> Quality:
        return self.measured.quality

    @property
    def quality_only(self) -> bool:
        return self.decode is None

    @property
    def max_num_seqs(self) -> int:
        return self.measured.max_num_seqs

    @property
    def tool_choice_required_works(self) -> bool:
        return all(limit.kind is not LimitKind.TOOL_CHOICE_REQUIRED for limit in self.measured.limits)

    @property
    def usable_tokens(self) -> int:
        """The longest context that works at its measured speed: the window less known limits."""
        bounds = [limit.context_tokens for limit in self.measured.limits if limit.context_tokens is not None]
        return min([self.window_tokens, *bounds])

    def stream_rate(self, concurrency: float, context: float) -> float:
        """tok/s of one of `concurrency` streams holding `context` tokens each."""
        if self.decode is None:
            raise ValueError(f"profile {self.name} holds quality figures only")
        return 1.0 / self.decode.at(max(1.0, concurrency), context)

    def aggregate_rate(self, concurrency: float, context: float) -> float:
        """tok/s of all streams together."""
        return max(1.0, concurrency) * self.stream_rate(concurrency, context)

    def warm_ttft(self, concurrency: float, context: float) -> float:
        """Mean TTFT when `concurrency` requests start together, their prompts in the prefix cache."""
        if self.warm is None:
            raise ValueError(f"profile {self.name} holds quality figures only")
        return self.warm.at(max(1.0, concurrency), context)

    def cold_ttft(self, prompt: float) -> float:
        """TTFT of one request whose prompt is not in the prefix cache, on an idle engine.

        Linear between measured lengths; beyond them the cost per token grows as it did between the last two
        intervals (attention is quadratic).
        """
        points = self.prefill
        (n0, t0), (n1, t1) = points[0], points[1]
        if prompt <= n1:
            return t0 + (prompt - n0) * ((t1 - t0) / (n1 - n0))
        i = min(max(bisect_right(points, (prompt, 0.0)) - 1, 0), len(points) - 2)
        (n0, t0), (n1, t1) = points[i], points[i + 1]
        slope = (t1 - t0) / (n1 - n0)
        if prompt <= n1 or i == 0:
            return t0 + (prompt - n0) * slope
        before_n, before_t = points[i - 1]
        before = (t0 - before_t) / (n0 - before_n)
        bend = max(0.0, (slope - before) / ((n1 - before_n) / 2))
        return t1 + (prompt - n1) * (slope + bend * ((n1 - n0) / 2 + (prompt - n1) / 2))

    def acceptance(self, context: float = 0) -> float:
        """Fraction of drafted tokens accepted, 0..1."""
        points = self.acceptance_points
        if not points:
            return 0.0
        i = bisect_right(points, (context, 2.0)) - 1
        if i < 0:
            return points[0][1]
        if i + 1 == len(points):
            return points[-1][1]
        (x0, a0), (x1, a1) = points[i], points[i + 1]
        return a0 + (a1 - a0) * (context - x0) / (x1 - x0)

    def tokens_per_step(self, context: float = 0) -> float:
        """Mean tokens a stream gets in one engine step: what a streamed delta holds."""
        return 1.0 + self.measured.speculation.draft_tokens * self.acceptance(context)


def names() -> tuple[str, ...]:
    """Every profile, in the order of the study's table."""
    return tuple(MEASURED)


def get(name: str | Profile) -> Profile:
    """The profile of that name, or the one that is given; KeyError names the known ones."""
    return name if isinstance(name, Profile) else _named(name)


@cache
def _named(name: str) -> Profile:
    if name not in MEASURED:
        raise KeyError(f"unknown profile {name!r}; known: {', '.join(MEASURED)}")
    return build(
        MEASURED[name], {b.part: MEASURED[b.source] for b in MEASURED[name].borrowed if b.source in MEASURED}
    )


def build(own: Measured, lenders: dict[Part, Measured]) -> Profile:
    """Resolve borrowed parts and make the surfaces. `lenders`: whom a missing part is taken from."""
    window, kv = own.window_tokens or 0, own.kv_tokens or lenders.get(Part.KV, own).kv_tokens or 0
    if not own.decode:
        return Profile(own, window, kv, (), (), None, None, None)
    decode = Surface(((c, x, c / rate) for c, x, rate in own.decode + own.decode_assumed), by_rate=True)
    latency = _warm_rows(own, lenders.get(Part.WARM))
    warm = Surface((c, x, mean / 1e3) for c, x, mean, *_ in latency)
    p99 = Surface((c, x, max(mean, worst) / 1e3) for c, x, mean, worst, *_ in latency)
    prefill = lenders[Part.PREFILL].prefill if Part.PREFILL in lenders else own.prefill
    share: tuple[tuple[int, float], ...] = ()
    if own.latency_cold:
        prefill = tuple((x, mean / 1e3) for c, x, mean, *_ in own.latency if c == 1)
        share = _cold_share(own.latency)
    if prefill[0][0] > 0:
        prefill = ((0, warm.at(1, 0)), *prefill)
    acceptance = lenders.get(Part.ACCEPTANCE, own).speculation.acceptance or own.speculation.acceptance
    return Profile(own, window, kv, prefill, acceptance, decode, warm, p99, share)


def _warm_rows(own: Measured, lender: Measured | None) -> tuple[LatencyRow, ...]:
    """Its own warm rows, and the lender's at every concurrency that it has none for."""
    rows = () if own.latency_cold else own.latency
    measured = {c for c, *_ in rows}
    return rows + tuple(row for row in (lender.latency if lender else ()) if row[0] not in measured)


def _cold_share(rows: tuple[LatencyRow, ...]) -> tuple[tuple[int, float], ...]:
    """(concurrency, share): mean cold TTFT of requests that start together ÷ what one after the other would
    give, at the longest context measured with several."""
    context = max(x for c, x, *_ in rows if c > 1)
    one = next(mean for c, x, mean, *_ in rows if (c, x) == (1, context))
    return tuple((c, mean / (one * (c + 1) / 2)) for c, x, mean, *_ in rows if x == context)
