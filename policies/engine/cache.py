"""KV blocks: who holds them, which prompts they remember, which go first.

Rules: a block is free, held (by one or more sequences) or remembered (full, hashed, held by nobody). Taking
needs free or remembered blocks; remembered ones go in the order they were last held, a prompt's tail before
its head. A hash is known only once its block is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Holding:
    """One sequence's blocks: `shared` by hash, `own` not hashed (or not computed yet)."""

    __slots__ = ("own", "shared")

    def __init__(self, shared: list[int], own: int) -> None:
        self.shared = shared
        self.own = own

    @property
    def blocks(self) -> int:
        return len(self.shared) + self.own


class BlockCache:
    """`total` blocks. `remember=False`: no prefix caching."""

    __slots__ = ("_free", "_held", "_remember", "_unheld", "total")

    def __init__(self, total: int, *, remember: bool = True) -> None:
        self.total = total
        self._remember = remember
        self._free = total
        self._held: dict[int, int] = {}
        self._unheld: OrderedDict[int, None] = OrderedDict()

    @property
    def usage(self) -> float:
        """Share of blocks held by somebody, 0..1."""
        return (self.total - self._free - len(self._unheld)) / self.total if self.total else 0.0

    @property
    def available(self) -> int:
        return self._free + len(self._unheld)

    def match(self, hashes: Sequence[int]) -> int:
        """How many leading blocks are known."""
        count = 0
        for h in hashes:
            if h not in self._held and h not in self._unheld:
                break
            count += 1
        return count

    def take(self, hits: Sequence[int], more: int) -> Holding | None:
        """Hold known blocks `hits` and `more` new ones; None, and nothing changed, if they do not fit."""
        resting = sum(h in self._unheld for h in hits)
        if self.available - resting < more:
            return None
        for h in hits:
            self._hold(h)
        self._claim(more)
        return Holding(list(hits), more)

    def grow(self, holding: Holding) -> bool:
        """One more block for a sequence that decodes."""
        if not self.available:
            return False
        self._claim(1)
        holding.own += 1
        return True

    def publish(self, holding: Holding, hashes: Sequence[int]) -> None:
        """The next own blocks are computed and full: their hashes become known. A block that somebody else
        published meanwhile is shared, and one's own copy freed."""
        if not self._remember:
            return
        for h in hashes[: holding.own]:
            holding.own -= 1
            holding.shared.append(h)
            if h in self._held or h in self._unheld:
                self._hold(h)
                self._free += 1
            else:
                self._held[h] = 1

    def release(self, holding: Holding) -> None:
        self._free += holding.own
        for h in reversed(holding.shared):
            left = self._held[h] - 1
            if left:
                self._held[h] = left
            else:
                del self._held[h]
                self._unheld[h] = None
        holding.own = 0
        holding.shared = []

    def flush(self) -> None:
        """Forget every block that nobody holds."""
        self._free += len(self._unheld)
        self._unheld.clear()

    def _hold(self, h: int) -> None:
        if h in self._unheld:
            del self._unheld[h]
            self._held[h] = 1
        else:
            self._held[h] += 1

    def _claim(self, count: int) -> None:
        evict = count - self._free
        for _ in range(evict):
            self._unheld.popitem(last=False)
        self._free += max(0, evict) - count
