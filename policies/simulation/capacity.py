"""How much traffic a fleet can take: the highest rate at which the reference meets the SLO for 95 % of turns.

Rules: `goodput` runs one simulation at a rate and is asked as seldom as possible. Goodput falls with the rate but for
chance; the answer is a rate that was run and met the goal, within `precision` of one that did not.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

GOAL = 0.95


def capacity(
    goodput: Callable[[float], float], guess: float, *, goal: float = GOAL, precision: float = 0.02
) -> float:
    """The rate. `guess`: where to begin, same unit. ValueError if no rate is low or high enough."""
    low, high = _bracket(goodput, guess, goal)
    while high / low > 1 + precision:
        middle = sqrt(low * high)
        if goodput(middle) >= goal:
            low = middle
        else:
            high = middle
    return low


def _bracket(goodput: Callable[[float], float], guess: float, goal: float) -> tuple[float, float]:
    """A rate that meets the goal and, above it, one that does not."""
    rate, step = guess, 1.4
    if goodput(rate) >= goal:
        for _ in range(24):
            if goodput(rate * step) < goal:
                return rate, rate * step
            rate *= step
        raise ValueError("every rate meets the goal")
    for _ in range(24):
        rate /= step
        if goodput(rate) >= goal:
            return rate, rate * step
    raise ValueError("no rate meets the goal")
