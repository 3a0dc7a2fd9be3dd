"""Who waits, in order: one line per tier and priority, fair among the shares in it.

Rules: four sides, one after the other: turns of running conversations that can still be in time, those that are late,
new ones in time, new ones late. So who is late already makes nobody else late. Within a side weighted fair queueing by
start tags: a share that has had little lately goes first, by `cost ÷ weight`; within a share the order of arrival.
Bounded; taking anybody out is cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from math import inf

from policies.types import RequestFacts, ShedReason

Side = dict[str, dict[int, "Waiting"]]
"""share → id → who waits, in order of arrival."""


class Waiting:
    """One in line. Seconds on the clock: promise, when its first token should be there; due, the latest start with which
    it is; until, it waits no longer. running: its conversation runs already. late: due is over. tag: its place in the
    fair order."""

    __slots__ = (
        "cost", "due", "facts", "id", "late", "names", "pinned", "promise", "reason", "running", "since", "tag", "until",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        facts: RequestFacts,
        names: tuple[str, ...],
        pinned: str | None,
        since: float,
        running: bool,
    ) -> None:
        self.id, self.facts, self.names, self.pinned = id, facts, names, pinned
        self.since, self.running = since, running
        self.late = False
        self.due = self.until = self.promise = 0.0
        self.cost = 1.0
        self.tag = 0.0
        self.reason = ShedReason.TOO_LATE

    @property
    def place(self) -> int:
        """Which side of its line it is on."""
        return 2 * (not self.running) + self.late


class Line:
    """All of one tier and priority."""

    __slots__ = ("_clock", "_size", "_tags", "_weights", "sides")

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tags: dict[str, float] = {}
        self._clock = 0.0
        self._size = 0
        self.sides: tuple[Side, Side, Side, Side] = ({}, {}, {}, {})

    def __len__(self) -> int:
        return self._size

    def add(self, one: Waiting) -> None:
        share = one.facts.share or ""
        one.tag = self._next_tag(one)
        self._tags[share] = one.tag + one.cost / self._weights.get(share, 1.0)
        self._put(one)

    def remove(self, one: Waiting, *, served: bool) -> None:
        self._take(one)
        if served:
            self._clock = max(self._clock, one.tag)
        if not self._size:
            self._tags.clear()

    def is_late(self, one: Waiting) -> None:
        """It steps behind those of its kind that are in time."""
        self._take(one)
        one.late = True
        self._put(one)

    def count(self, share: str | None) -> int:
        """How many of this tenant wait."""
        return sum([len(side.get(share or "", ())) for side in self.sides])

    def before(self, one: Waiting) -> tuple[int, float]:
        """How many would go before this one, came it now; and their costs."""
        tag = self._next_tag(one)
        costs = [
            other.cost
            for place, side in enumerate(self.sides[: one.place + 1])
            for ones in side.values()
            for other in ones.values()
            if place < one.place or other.tag <= tag
        ]
        return len(costs), sum(costs)

    def heads(self, side: Side, most: int) -> list[Waiting]:
        """The first of each share, in the fair order; of the first share the next ones, up to `most` in all."""
        firsts = sorted([next(iter(ones.values())) for ones in side.values()], key=lambda one: one.tag)
        left = most - len(firsts)
        if left <= 0 or not firsts:
            return firsts[:most]
        return firsts + list(islice(side[firsts[0].facts.share or ""].values(), 1, left + 1))

    def oldest(self) -> float:
        """When the one came that has waited longest; inf when empty."""
        firsts = [next(iter(ones.values())) for side in self.sides for ones in side.values()]
        return min([one.since for one in firsts], default=inf)

    def __iter__(self) -> Iterator[Waiting]:
        for side in self.sides:
            for ones in side.values():
                yield from ones.values()

    def _next_tag(self, one: Waiting) -> float:
        return max(self._clock, self._tags.get(one.facts.share or "", 0.0))

    def _put(self, one: Waiting) -> None:
        self.sides[one.place].setdefault(one.facts.share or "", {})[one.id] = one
        self._size += 1

    def _take(self, one: Waiting) -> None:
        side, share = self.sides[one.place], one.facts.share or ""
        del side[share][one.id]
        if not side[share]:
            del side[share]
        self._size -= 1
