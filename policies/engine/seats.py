"""A sequence's place in the KV cache: taking it, growing it, making its blocks known, giving it back.

Rules: a seat is blocks for the whole prompt and the next token. All but the prompt's last token may come from the
cache. What is computed and full is known to others from the moment it is published.
"""

from __future__ import annotations

from policies.engine.batch import Sequence
from policies.engine.cache import BlockCache
from policies.engine.values import EngineConfig, Request


class Seats:
    """`queried` and `hit` count prompt tokens looked up and found."""

    __slots__ = ("_cache", "_size", "hit", "queried")

    def __init__(self, config: EngineConfig) -> None:
        self._size = config.block_tokens
        self._cache = BlockCache(config.blocks, remember=config.prefix_caching)
        self.queried = 0
        self.hit = 0

    @property
    def usage(self) -> float:
        return self._cache.usage

    def could_fit(self, request: Request) -> bool:
        return self._blocks(request.prompt_tokens + request.output_tokens) <= self._cache.total

    def take(self, sequence: Sequence) -> bool:
        """False, and nothing changed, if there is no room now."""
        tokens = sequence.prompt
        hits = self._hits(sequence)
        sequence.holding = self._cache.take(hits, self._blocks(tokens + 1) - len(hits))
        if sequence.holding is None:
            return False
        sequence.cached = len(hits) * self._size
        self.queried += tokens
        self.hit += sequence.cached
        return True

    def known(self, sequence: Sequence) -> int:
        """Tokens of its prompt that are in the cache."""
        return len(self._hits(sequence)) * self._size

    def grow(self, sequence: Sequence) -> bool:
        """One more block."""
        assert sequence.holding is not None
        return self._cache.grow(sequence.holding)

    def publish(self, sequence: Sequence) -> None:
        """Make its full, computed blocks known."""
        assert sequence.holding is not None
        full = self._hashes(sequence)[: sequence.prompt // self._size]
        self._cache.publish(sequence.holding, full[len(sequence.holding.shared) :])

    def give_back(self, sequence: Sequence) -> None:
        assert sequence.holding is not None
        self._cache.release(sequence.holding)
        sequence.holding = None

    def flush(self) -> None:
        self._cache.flush()

    def _hits(self, sequence: Sequence) -> tuple[int, ...]:
        known = self._hashes(sequence)[: (sequence.prompt - 1) // self._size]
        return known[: self._cache.match(known)]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _hashes(self, sequence: Sequence) -> tuple[int, ...]:
        """Of the prompt's full blocks and, if those are all hashed, of the ones that output fills."""
        request = sequence.request
        whole = len(request.blocks) >= request.prompt_tokens // self._size
        return request.blocks + request.output_blocks if whole else request.blocks
