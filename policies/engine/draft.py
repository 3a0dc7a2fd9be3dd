"""How many tokens a stream gets in each engine step: 1 plus the drafted ones that were accepted.

Rules: no randomness; a table of LENGTH steps whose mean is `1 + draft_tokens × acceptance` to 1 part in
LENGTH is walked in circles, each stream from its own place. Within a step a draft is accepted up to the first
wrong token, each token with the same chance, which fixes the shares of 0, 1, … accepted.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from itertools import accumulate

LENGTH = 512
GOLDEN = 0.6180339887498949


class Draft:
    """`mean` tokens a step, exactly what walking the table gives."""

    __slots__ = ("_sums", "draft_tokens", "mean", "table")

    def __init__(self, draft_tokens: int, acceptance: float) -> None:
        self.draft_tokens = draft_tokens
        chances = _chances(draft_tokens, acceptance)
        draws = sorted((i * GOLDEN) % 1.0 for i in range(LENGTH))
        even = {draw: (rank + 0.5) / LENGTH for rank, draw in enumerate(draws)}
        self.table = [1 + sum(even[(i * GOLDEN) % 1.0] < chance for chance in chances) for i in range(LENGTH)]
        self._sums = [0, *accumulate(self.table)]
        self.mean = self._sums[-1] / LENGTH

    def tokens(self, offset: int, steps: int) -> int:
        """Tokens of `steps` steps from place `offset` (below LENGTH) on."""
        rounds, place = divmod(offset + steps, LENGTH)
        return rounds * self._sums[-1] + self._sums[place] - self._sums[offset]

    def steps(self, offset: int, tokens: int) -> int:
        """The fewest steps that give at least `tokens`."""
        rounds, rest = divmod(tokens + self._sums[offset], self._sums[-1])
        return rounds * LENGTH + bisect_left(self._sums, rest) - offset


@cache
def draft(draft_tokens: int, acceptance: float) -> Draft:
    return Draft(draft_tokens, acceptance)


def _chances(draft_tokens: int, acceptance: float) -> list[float]:
    """The chances that at least 1, 2, … tokens are accepted; they add up to draft_tokens × acceptance."""
    wanted = draft_tokens * min(1.0, max(0.0, acceptance))
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**j for j in range(1, draft_tokens + 1)) < wanted:
            low = middle
        else:
            high = middle
    return [high**j for j in range(1, draft_tokens + 1)]
