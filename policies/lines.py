"""Who waits, in order: one line per tier and priority, fair among the shares in it.

Rules: weighted fair queueing by start tags: a share that has waited little lately goes first, by `cost ÷ weight`. Within
a share the turns of running conversations go before new ones, each in the order of arrival. Bounded; taking anybody out
is cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from policies.types import RequestFacts, ShedReason


class Waiting:
    """One in line. due: its first token must be there by then (seconds on the clock); until: it waits no longer.
    running: its conversation runs already. tag: its place in the fair order."""

    __slots__ = (
        "cost",
        "due",
        "facts",
        "id",
        "names",
        "pinned",
        "reason",
        "running",
        "since",
        "tag",
        "until",
    )

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
        self.due = self.until = 0.0
        self.cost = 1.0
        self.tag = 0.0
        self.reason = ShedReason.TOO_LATE


class Line:
    """`running` and `new`: id → who waits, in order of arrival, per share."""

    __slots__ = ("_clock", "_size", "_tags", "_weights", "new", "running")

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tags: dict[str, float] = {}
        self._clock = 0.0
        self._size = 0
        self.running: dict[str, dict[int, Waiting]] = {}
        self.new: dict[str, dict[int, Waiting]] = {}

    def __len__(self) -> int:
        return self._size

    def add(self, one: Waiting) -> None:
        share = one.facts.share or ""
        one.tag = max(self._clock, self._tags.get(share, 0.0))
        self._tags[share] = one.tag + one.cost / self._weights.get(share, 1.0)
        (self.running if one.running else self.new).setdefault(share, {})[one.id] = one
        self._size += 1

    def remove(self, one: Waiting, *, served: bool) -> None:
        share = one.facts.share or ""
        side = self.running if one.running else self.new
        del side[share][one.id]
        if not side[share]:
            del side[share]
        self._size -= 1
        if served:
            self._clock = max(self._clock, one.tag)
        if not self._size:
            self._tags.clear()

    def heads(self, side: dict[str, dict[int, Waiting]], most: int) -> Iterator[Waiting]:
        """The first of each share, in the fair order; of the first share the next ones, up to `most` in all."""
        firsts = sorted([next(iter(ones.values())) for ones in side.values()], key=lambda one: one.tag)
        yield from firsts[:most]
        left = most - len(firsts)
        if left > 0 and firsts:
            ones = iter(list(side[firsts[0].facts.share or ""].values())[1 : left + 1])
            yield from ones

    def __iter__(self) -> Iterator[Waiting]:
        for side in (self.running, self.new):
            for ones in side.values():
                yield from ones.values()
