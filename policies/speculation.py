"""When speculation stops paying: the study saw 30 % of drafts accepted fall to 1–3 %, and eight times the time per token.

Rules: judged by context range (`context_range`), since one range collapses and another does not. Two signs: the
acceptance that the engine reports, attributed to the range that most of its streams were in; and the time per token of
answers. A range that collapsed gets no new requests for `collapse_seconds`, then one more chance; each further collapse
doubles the time. A restart forgives all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from policies.corrections import RANGE_NAMES, context_range
from policies.params import SpeculationParams

RANGES = len(RANGE_NAMES)


@dataclass(slots=True)
class Health:
    """One range. slow: answers in a row far slower than predicted. until: drained until then, seconds."""

    slow: int = 0
    until: float = 0.0
    times: int = 0
    best: float = 0.0


@dataclass(slots=True)
class Speculation:
    """One backend's. `expected(context)` is asked of its profile where there is one; else the best seen counts."""

    params: SpeculationParams
    ranges: list[Health] = field(default_factory=lambda: [Health() for _ in range(RANGES)])
    acceptance: float | None = None
    """Of the last poll with enough drafts, 0..1."""
    _drafted: int | None = None
    _accepted: int = 0

    def collapsed(self, now: float, context: float) -> bool:
        return now < self.ranges[context_range(context)].until

    def any_collapsed(self, now: float) -> int:
        """How many ranges are drained: the alert's figure."""
        return sum([now < health.until for health in self.ranges])

    def polled(
        self, now: float, drafted: int | None, accepted: int | None, contexts: Iterable[float], usual: float
    ) -> None:
        """Counters since the engine's start; contexts of the streams that decode; the usual acceptance, 0: unknown.

        acceptance = accepted ÷ drafted since the last poll. Collapsed: below `acceptance_share` of the usual.
        Fewer than `least_drafts`: wait for more.
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
        if not any(counts):
            return
        for place, count in enumerate(counts):
            # A range that few streams were in has no part in the mean.
            if count * 2 < sum(counts):
                continue
            health = self.ranges[place]
            wanted = usual or health.best
            health.best = max(self.acceptance, health.best * 0.999)
            if self.acceptance < self.params.acceptance_share * wanted:
                self._collapse(now, health)

    def answered(self, now: float, context: float, ratio: float) -> None:
        """An answer's time per token ÷ what was predicted for its load, corrections left out."""
        health = self.ranges[context_range(context)]
        if ratio < self.params.slow_ratio:
            health.slow = 0
            if now >= health.until:
                health.times = 0
            return
        health.slow += 1
        if health.slow >= self.params.slow_answers:
            self._collapse(now, health)

    def restarted(self) -> None:
        self.ranges = [Health() for _ in range(RANGES)]
        self._drafted, self._accepted, self.acceptance = None, 0, None

    def _collapse(self, now: float, health: Health) -> None:
        if now < health.until:
            return
        health.until = now + min(3600.0, self.params.collapse_seconds * 2.0**health.times)
        health.times = min(16, health.times + 1)
        health.slow = 0
