"""Chunk gaps of one stream, counted while they pass.

Rules: adding a gap is one search in a fixed table and one count, whatever came before; memory is bounded by
the table. Edges are geometric, at most 8 % apart, and hold every edge of the exported histogram, so folding
into the exported buckets loses nothing. A bin holds what is above its lower edge, up to its upper edge.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

# Edges of `tierline_inter_token_latency_seconds`, seconds: fine where tokens arrive, 0.2 ms to 2 s.
GAP_BUCKETS = (
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.0,
)
LOWEST, HIGHEST, RATIO = 0.0001, 100.0, 1.08


def _edges() -> tuple[float, ...]:
    anchors = (LOWEST, *GAP_BUCKETS, HIGHEST)
    edges = [LOWEST]
    for low, high in pairwise(anchors):
        steps = math.ceil(math.log(high / low) / math.log(RATIO))
        edges += [low * (high / low) ** (step / steps) for step in range(1, steps)]
        edges.append(high)  # exactly, not the power's rounding
    return tuple(edges)


EDGES = _edges()
# For each bin, and for the one above the last edge, its exported bucket.
BUCKET_OF_BIN = tuple(bisect_left(GAP_BUCKETS, edge) for edge in (*EDGES, math.inf))


class GapHistogram:
    """Gaps in seconds. Quantiles are upper edges, so at most 8 % too high (0.1 ms below the lowest edge)."""

    __slots__ = ("_counts", "max", "total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.max = 0.0
        self.total = 0.0

    def add(self, seconds: float) -> None:
        where = bisect_left(EDGES, seconds)
        counts = self._counts
        counts[where] = counts.get(where, 0) + 1
        self.total += seconds
        if seconds > self.max:
            self.max = seconds

    def add_between(self, times: Sequence[float]) -> None:
        """The gaps between successive times, seconds."""
        for before, after in pairwise(times):
            self.add(after - before)

    @property
    def count(self) -> int:
        return sum(self._counts.values())

    def bins(self) -> Iterator[tuple[int, int]]:
        """(bin, gaps in it) for every bin that has any; `BUCKET_OF_BIN[bin]` is its exported bucket."""
        return iter(self._counts.items())

    def quantiles(self, *shares: float) -> list[float | None]:
        """For each share: the lowest edge that this share of the gaps does not exceed, at most `max`.
        None when empty."""
        if not self._counts:
            return [None] * len(shares)
        bins = sorted(self._counts)
        passed = list(accumulate(map(self._counts.__getitem__, bins)))
        found: list[float | None] = []
        for share in shares:
            where = bins[bisect_left(passed, max(1, math.ceil(share * passed[-1])))]
            found.append(min(EDGES[where], self.max) if where < len(EDGES) else self.max)
        return found

    def quantile(self, share: float) -> float | None:
        return self.quantiles(share)[0]

    def __repr__(self) -> str:
        return f"GapHistogram(count={self.count}, max={self.max:.6f})"
