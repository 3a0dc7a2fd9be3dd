"""A measured cost over concurrency × context, at any point.

Rules: a measured cell is met exactly. Between cells a value stays between the cells around it: a power law in
concurrency (so cost and cost ÷ concurrency are both monotone), linear in context. Beyond the last
concurrency of a row and beyond the last row a cost never falls: its power law bends toward "no more in total"
(`BEND` of what is left of the growth in throughput survives each doubling), and a longer context follows
the last two rows' slope. Holes of a ragged grid are filled once, by the same rules.

A cost is seconds per token of one stream, or seconds to the first token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from math import log2

BEND = 0.7
FAR = 4096
"""Concurrency up to which rows are continued; beyond it throughput is constant."""

Cell = tuple[int, int, float]


class Surface:
    """`cells`: (concurrency, context, cost > 0). `by_rate`: blend rows linearly in 1/cost instead of cost."""

    __slots__ = (
        "_by_rate",
        "_exponents",
        "_logs",
        "_memo",
        "_rows",
        "concurrencies",
        "contexts",
        "last_measured",
    )

    def __init__(self, cells: Iterable[Cell], *, by_rate: bool = False) -> None:
        known = {(c, x): cost for c, x, cost in cells}
        self._by_rate = by_rate
        self.contexts = sorted({x for _, x in known})
        self.concurrencies = sorted({c for c, _ in known})
        self.last_measured = {x: max(c for c, y in known if y == x) for x in self.contexts}
        while self.concurrencies[-1] < FAR:
            self.concurrencies.append(self.concurrencies[-1] * 2)
        self._logs = [log2(c) for c in self.concurrencies]
        self._rows: list[list[float]] = []
        for x in self.contexts:
            row = [self._blend_column(known, c, x) for c in self.concurrencies]
            self._rows.append(self._complete(row, self._rows[-1] if self._rows else None))
        self._memo: list[dict[float, float]] = [{} for _ in self._rows]
        self._exponents = [
            [
                log2(row[i + 1] / row[i]) / (self._logs[i + 1] - self._logs[i])
                for i in range(len(self._logs) - 1)
            ]
            for row in self._rows
        ]

    def at(self, concurrency: float, context: float) -> float:
        """The cost with `concurrency` streams of `context` tokens each."""
        xs = self.contexts
        i = bisect_right(xs, context) - 1
        if i < 0:
            return self._along(0, concurrency)
        here = self._along(i, concurrency)
        if xs[i] == context:
            return here
        if i + 1 < len(xs):
            share = (context - xs[i]) / (xs[i + 1] - xs[i])
            return self._mix(here, self._along(i + 1, concurrency), share)
        if i == 0:
            return here
        slope = (here - self._along(i - 1, concurrency)) / (xs[i] - xs[i - 1])
        return here + max(0.0, slope) * (context - xs[i])

    def _mix(self, low: float, high: float, share: float) -> float:
        if self._by_rate:
            return 1.0 / ((1.0 - share) / low + share / high)
        return (1.0 - share) * low + share * high

    def _along(self, row: int, concurrency: float) -> float:
        """A row's cost: flat below its first concurrency, power laws between, proportional beyond FAR."""
        memo = self._memo[row]
        cost = memo.get(concurrency)
        if cost is None:
            cost = self._curve(row, concurrency)
            if len(memo) < FAR:
                memo[concurrency] = cost
        return cost

    def _curve(self, row: int, concurrency: float) -> float:
        cs, costs = self.concurrencies, self._rows[row]
        if concurrency <= cs[0]:
            return costs[0]
        i = bisect_right(cs, concurrency) - 1
        if cs[i] == concurrency:
            return costs[i]
        if i + 1 == len(cs):
            return costs[i] * concurrency / cs[i]
        return float(costs[i] * (concurrency / cs[i]) ** self._exponents[row][i])

    def _blend_column(self, known: dict[tuple[int, int], float], c: int, x: int) -> float | None:
        """A measured cell, or one blended from the cells below and above it at the same concurrency."""
        if (c, x) in known:
            return known[c, x]
        below = [y for d, y in known if d == c and y < x]
        above = [y for d, y in known if d == c and y > x]
        if not below or not above:
            return None
        low, high = max(below), min(above)
        return self._mix(known[c, low], known[c, high], (x - low) / (high - low))

    def _complete(self, row: list[float | None], lower: list[float] | None) -> list[float]:
        """Fill a row's holes: as the lower row goes before its first value, power laws inside, bent after."""
        filled = [i for i, cost in enumerate(row) if cost is not None]
        first, last = filled[0], filled[-1]
        out = [0.0 if cost is None else cost for cost in row]
        for i in range(first):
            # The lower row knows how cost falls toward fewer streams; without it the cost is flat.
            out[i] = out[first] * (lower[i] / lower[first] if lower else 1.0)
        for a, b in pairwise(filled):
            for i in range(a + 1, b):
                share = (self._logs[i] - self._logs[a]) / (self._logs[b] - self._logs[a])
                out[i] = out[a] ** (1 - share) * out[b] ** share
        exponent = self._exponent(out, last - 1, last) if last else None
        for i in range(last + 1, len(row)):
            width = self._logs[i] - self._logs[i - 1]
            growth = 1.0
            if exponent is not None:
                exponent = 1.0 - (1.0 - exponent) * BEND**width
                growth = 2.0 ** (exponent * width)
            if lower:
                growth = max(growth, min(lower[i] / lower[i - 1], 2.0**width))
            out[i] = max(out[i - 1] * growth, lower[i] if lower else 0.0)
        return out

    def _exponent(self, row: list[float], i: int, j: int) -> float:
        return min(1.0, max(0.0, log2(row[j] / row[i]) / (self._logs[j] - self._logs[i])))
