"""What answers teach: how far a backend is from what was predicted, and how fast one is that nobody measured.

Rules: bounded, so that no single answer and no broken clock can make a backend look free or dead. A value moves by at
most its weight; without observations it stays what it was.
"""

from __future__ import annotations

from math import exp, log, log2

from policies.predict import Guessed

LOWEST, HIGHEST = 0.2, 20.0
WEIGHT = 0.15
STEP = 2.0
"""The most that one observation may differ from the factor, as a ratio."""

HALF_LIFE = 60.0
WILD = 5.0
"""A logarithm of a ratio beyond this is no measurement."""


class Correction:
    """observed ÷ predicted, as a geometric moving average: factor ← factor × (ratio ÷ factor)^weight.

    The ratio is first brought within STEP of the factor, the factor kept within LOWEST..HIGHEST. No unit. Nothing
    observed: 1. What gets better is believed twice as fast: who is thought slow gets little to show otherwise; and for
    the same reason `fade` moves it back towards 1 as time passes. `error`: the same average of the absolute relative
    error, for metrics.
    """

    __slots__ = ("_log", "count", "error")

    def __init__(self) -> None:
        self._log = 0.0
        self.count = 0
        self.error = 0.0

    @property
    def factor(self) -> float:
        return exp(self._log)

    def observe(self, predicted: float, observed: float, weight: float = WEIGHT) -> None:
        """`predicted` without the factor; both above 0, or nothing is learned."""
        if not (predicted > 0 and observed > 0):
            return
        ratio = min(WILD, max(-WILD, log(observed) - log(predicted)))
        step = min(log(STEP), max(-log(STEP), ratio - self._log))
        self.error += weight * (min(10.0, abs(exp(self._log - ratio) - 1.0)) - self.error)
        if step < 0:
            weight = min(1.0, 2.0 * weight)
        self._log = min(log(HIGHEST), max(log(LOWEST), self._log + weight * step))
        self.count += 1

    def fade(self, seconds: float) -> None:
        """So much time has passed: half of it is forgotten in HALF_LIFE seconds."""
        self._log *= 0.5 ** (seconds / HALF_LIFE)

    def forget(self) -> None:
        """The backend is another one now (restarted)."""
        self._log, self.count = 0.0, 0


class Learned:
    """The speed of a backend without profile: `Guessed`, replaced cell by cell by what was seen.

    Decode seconds per token by streams (powers of two) and context (up to 8k, 32k, 64k, more); a cell that was never
    seen takes the ratio of the nearest seen one. Prefill: one rate, tokens per second, from cold starts.
    """

    __slots__ = ("_cells", "_guess", "_rate")

    def __init__(self, guess: Guessed | None = None) -> None:
        self._guess = guess or Guessed()
        self._cells: dict[tuple[int, int], float] = {}  # log of seen ÷ guessed
        self._rate = self._guess.prefill_tokens_per_second

    @property
    def batched_tokens(self) -> int:
        return self._guess.batched_tokens

    def warm(self, prompt: float, cached: float) -> float:
        return self._guess.warm(prompt, cached)

    def cold(self, prompt: float, cached: float) -> float:
        return max(0.0, prompt - cached) / self._rate

    def tpot(self, streams: float, context: float) -> float:
        guess = self._guess.tpot(streams, context)
        if not self._cells:
            return guess
        at = _cell(streams, context)
        seen = self._cells.get(at)
        if seen is None:
            nearest = min(self._cells, key=lambda cell: abs(cell[0] - at[0]) + 2 * abs(cell[1] - at[1]))
            seen = self._cells[nearest]
        return guess * exp(seen)

    def saw_prefill(self, tokens: float, seconds: float) -> None:
        """A prompt with so many uncached tokens took so long; short ones say nothing of the rate."""
        if tokens >= 512 and seconds > self._guess.start_seconds:
            rate = tokens / (seconds - self._guess.start_seconds)
            self._rate = min(100_000.0, max(100.0, self._rate * (rate / self._rate) ** WEIGHT))

    def saw_decode(self, streams: float, context: float, seconds: float) -> None:
        """Seconds per token that a stream had among so many."""
        if seconds <= 0:
            return
        at = _cell(streams, context)
        ratio = log(seconds / self._guess.tpot(streams, context))
        ratio = min(log(HIGHEST), max(log(0.05), ratio))
        seen = self._cells.get(at)
        self._cells[at] = ratio if seen is None else seen + WEIGHT * (ratio - seen)


def context_range(context: float) -> int:
    """0: up to 8k tokens, 1: up to 32k, 2: up to 64k, 3: more."""
    return 0 if context <= 8192 else 1 if context <= 32768 else 2 if context <= 65536 else 3


RANGE_NAMES = ("8k", "32k", "64k", "more")


def _cell(streams: float, context: float) -> tuple[int, int]:
    return min(8, round(log2(max(1.0, streams)))), context_range(context)
