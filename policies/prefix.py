"""What a backend's prefix cache holds, as far as one can tell from outside.

Rules: it forgets as the engine does: least recently held first, a prompt's tail before its head, and never more than
fits beside what runs. A link of a chain stands for everything up to its end, so that a known link means that all before
it are known too, up to evictions; a conversation's answers are no links (nobody has hashed them yet) but one `tail`.
Reported cached tokens correct it, downwards too: an engine that restarted has nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Key = int | str
SHRINK, GROW, LEAST = 0.9, 1.01, 0.2
"""The believed capacity after a report below, or in line with, the estimate; and its least share."""


class PrefixCache:
    """`capacity`: tokens of KV cache. `share`: of it that the reports so far leave believable."""

    __slots__ = ("_keys", "_misses", "_total", "capacity", "share")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.share = 1.0
        self._keys: OrderedDict[Key, float] = OrderedDict()
        self._total = 0.0
        self._misses = 0

    @property
    def tokens(self) -> float:
        return self._total

    def links(self, chain: Sequence[int]) -> int:
        """How many leading links are known. Logarithmic: see the rules."""
        keys = self._keys
        if not chain or chain[0] not in keys:
            return 0
        low, high = 1, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in keys:
                low = middle
            else:
                high = middle - 1
        return low

    def tail(self, key: str) -> float:
        """Tokens of that conversation behind its links."""
        return self._keys.get(key, 0.0)

    def hold(
        self, chain: Sequence[int], link_tokens: float, tail: str | None, tokens: float, reserved: float = 0.0
    ) -> None:
        """A request holds these blocks now: they become the latest. `tokens` of the conversation's tail.
        `reserved`: tokens that running requests keep from being remembered."""
        keys = self._keys
        if tail is not None:
            self._total -= keys.pop(tail, 0.0)
            if tokens > 0:
                keys[tail] = tokens
                self._total += tokens
        for link in reversed(chain):
            if link in keys:
                keys.move_to_end(link)
            else:
                keys[link] = link_tokens
                self._total += link_tokens
        room = max(0.0, self.capacity * self.share - reserved)
        while self._total > room and keys:
            self._total -= keys.popitem(last=False)[1]

    def reported(
        self, chain: Sequence[int], tail: str | None, expected: float, share: float, block: float
    ) -> None:
        """The backend found `share` (0..1) of the prompt in its cache where `expected` (0..1) was.

        Far below: what is not there is forgotten, and less is believed to fit. Nothing twice in a row where
        something was sure: it restarted. `block`: what a block is of the prompt, the least that can be told.
        """
        if expected <= 2 * block:
            return
        if share >= 0.5 * expected:
            self._misses = 0
            self.share = min(1.0, self.share * GROW)
            return
        if share <= 0.0:
            self._misses += 1
            if self._misses >= 2:
                self.clear()
                return
        self.share = max(LEAST, self.share * SHRINK)
        if tail is not None:
            self._total -= self._keys.pop(tail, 0.0)

    def clear(self) -> None:
        self._keys.clear()
        self._total = 0.0
        self._misses = 0
