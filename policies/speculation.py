"""When speculation stops paying: the study saw 30 % of drafts accepted fall to 1–3 %, and eight times the time per token.

Rules: judged by context range (`context_range`), since one range collapses and another does not. The sign is the
acceptance that the engine reports, attributed to the range that most of its streams were in; where it reports none, the
time per token of answers. A range that collapsed is drained: it gets a request only when no other backend can take it,
and one every so often to see whether it is well again; each one that is not doubles the time to the next. A restart
forgives all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from policies.corrections import RANGE_NAMES, context_range
from policies.params import SpeculationParams

RANGES = len(RANGE_NAMES)
LONGEST = 60.0
"""Seconds between two looks at a drained range, at most."""


@dataclass(slots=True)
class Health:
    """One range. slow: answers in a row far slower than predicted. look_at: the next request that may go there to see;
    every: seconds between those; looking: one is there. best: acceptance seen, 0..1."""

    slow: int = 0
    drained: bool = False
    looking: bool = False
    look_at: float = 0.0
    every: float = 0.0
    best: float = 0.0


@dataclass(slots=True)
class Speculation:
    """One backend's."""

    params: SpeculationParams
    ranges: list[Health] = field(default_factory=lambda: [Health() for _ in range(RANGES)])
    acceptance: float | None = None
    """Of the last poll with enough drafts, 0..1."""
    _drafted: int | None = None
    _accepted: int = 0

    def collapsed(self, now: float, context: float) -> bool:
        health = self.ranges[context_range(context)]
        return health.drained and now < health.look_at

    def drained(self) -> int:
        """How many ranges are: the alert's figure."""
        return sum([health.drained for health in self.ranges])

    def begins(self, now: float, context: float) -> None:
        """A request goes there: if the range is drained, the next look comes later."""
        health = self.ranges[context_range(context)]
        if health.drained:
            health.looking = True
            health.look_at = max(health.look_at, now + health.every)

    def polled(
        self, now: float, drafted: int | None, accepted: int | None, contexts: Iterable[float], usual: float
    ) -> None:
        """Counters since the engine's start; contexts of the streams that decode; the usual acceptance, 0: unknown.

        acceptance = accepted ÷ drafted since the last poll. Collapsed: below `acceptance_share` of the usual, or of the
        best seen. Fewer than `least_drafts`: wait for more.
        """
        if drafted is None or accepted is None:
            return
        if self._drafted is None or drafted < self._drafted:
            self._drafted, self._accepted = drafted, accepted
            return
        if drafted - self._drafted < self.params.least_drafts:
            return
        self.acceptance = (accepted - self._accepted) / (drafted - self._drafted)
        self._drafted, self._accepted = drafted, accepted
        counts = [0] * RANGES
        for context in contexts:
            counts[context_range(context)] += 1
        for health, count in zip(self.ranges, counts, strict=True):
            # A range that few of the streams were in has little part in the mean.
            if not count or count * 2 < sum(counts):
                continue
            wanted = usual or health.best
            health.best = max(self.acceptance, health.best * 0.999)
            self._judge(now, health, self.acceptance < self.params.acceptance_share * wanted)

    def answered(self, now: float, context: float, ratio: float) -> None:
        """An answer's time per token ÷ what was predicted for its load, corrections left out."""
        if self.acceptance is not None:
            return
        health = self.ranges[context_range(context)]
        slow = ratio >= self.params.slow_ratio
        health.slow = health.slow + 1 if slow else 0
        if not slow or health.slow >= self.params.slow_answers:
            self._judge(now, health, slow)

    def restarted(self) -> None:
        self.ranges = [Health() for _ in range(RANGES)]
        self._drafted, self._accepted, self.acceptance = None, 0, None

    def _judge(self, now: float, health: Health, broken: bool) -> None:
        if not broken:
            health.drained = False
        elif not health.drained:
            health.drained, health.looking, health.every = True, False, self.params.look_seconds
            health.look_at = now + health.every
        elif health.looking:
            health.looking = False
            health.every = min(LONGEST, 2.0 * health.every)
            health.look_at = now + health.every
