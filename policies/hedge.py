"""When a second attempt goes out beside the first that has not begun to answer, and how many there may be.

Rules: pure, no clock. A hedge is for the odd slow start, not for a slow fleet: a tier's requests earn `share` of one each,
and a hedge takes a whole one, so that never more than that share is sent twice. Where it goes is the router's to say
(`Admission.beside`): only where it would start at once.
"""

from __future__ import annotations

from policies.frozen import frozen
from policies.types import Forecast

MOST = 10.0
"""Hedges that may be saved up."""


@frozen
class HedgeParams:
    """after: seconds without a sign of the answer, at least. factor: so many times its own predicted time to that sign, at
    least. share: of the tier's requests that may be hedged."""

    after: float
    factor: float = 2.0
    share: float = 0.05


def delay(params: HedgeParams, forecast: Forecast | None, *, stream: bool) -> float:
    """Seconds from dispatch until the second attempt is due. What is not streamed shows its first sign when all of it is
    done. Without a forecast `after` alone counts."""
    if forecast is None:
        return params.after
    expected = forecast.ttft if stream else forecast.finish
    return max(params.after, params.factor * expected)


class Allowance:
    """Of one gateway: hedges that each tier may still send. Begins with one each."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left: dict[str, float] = {}

    def asked(self, tier: str, share: float) -> None:
        """One more request of the tier goes to a backend."""
        self._left[tier] = min(MOST, self._left.get(tier, 1.0) + share)

    def allows(self, tier: str) -> bool:
        """Whether one more may be sent twice."""
        return self._left.get(tier, 1.0) >= 1.0

    def took(self, tier: str) -> None:
        """One was sent twice."""
        self._left[tier] = self._left.get(tier, 1.0) - 1.0
