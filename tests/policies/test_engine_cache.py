"""Blocks are never lost and never lent twice, whatever the order of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.engine.cache import BlockCache, Holding

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "grow", "publish", "release", "flush"]), st.integers(0, 7)),
    max_size=60,
)


def chain(prompt: int, blocks: int) -> list[int]:
    """Hashes of a prompt; prompts 2n and 2n + 1 share their first two blocks."""
    return [(prompt // 2 if i < 2 else prompt) * 100 + i + (0 if i < 2 else 5000) for i in range(blocks)]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(4, 24), ACTIONS, st.booleans())
def test_every_block_is_free_held_or_remembered(total: int, actions: list[tuple[str, int]], on: bool) -> None:
    cache = BlockCache(total, remember=on)
    held: dict[int, tuple[Holding, list[int]]] = {}
    for action, n in actions:
        if action == "take" and n not in held:
            hashes = chain(n, 3 + n)
            hits = hashes[: cache.match(hashes)]
            before = cache.available
            holding = cache.take(hits, len(hashes) - len(hits))
            if holding is None:
                assert cache.available == before
            else:
                held[n] = holding, hashes
        elif action == "grow" and n in held:
            room = cache.available > 0
            assert cache.grow(held[n][0]) == room
        elif action == "publish" and n in held:
            holding, hashes = held[n]
            cache.publish(holding, hashes[len(holding.shared) :])
            assert cache.match(hashes) == (len(hashes) if on else 0)
        elif action == "release" and n in held:
            cache.release(held.pop(n)[0])
        elif action == "flush":
            cache.flush()
        in_use = {h for holding, _ in held.values() for h in holding.shared}
        own = sum(holding.own for holding, _ in held.values())
        assert cache.available == total - own - len(in_use)
        assert 0.0 <= cache.usage <= 1.0
    for holding, _ in held.values():
        cache.release(holding)
    assert (cache.available, cache.usage) == (total, 0.0)


def remember(cache: BlockCache, hashes: list[int]) -> None:
    holding = cache.take([], len(hashes))
    assert holding is not None
    cache.publish(holding, hashes)
    cache.release(holding)


def test_the_longest_unused_prompt_goes_first_and_its_tail_before_its_head() -> None:
    cache = BlockCache(6)
    remember(cache, [1, 2, 3])
    remember(cache, [11, 12, 13])
    assert cache.take([], 2) is not None
    assert (cache.match([1, 2, 3]), cache.match([11, 12, 13])) == (1, 3)


def test_using_a_prompt_again_makes_it_young() -> None:
    cache = BlockCache(6)
    remember(cache, [1, 2, 3])
    remember(cache, [11, 12, 13])
    again = cache.take([1, 2, 3], 0)
    assert again is not None
    cache.release(again)
    assert cache.take([], 2) is not None
    assert (cache.match([1, 2, 3]), cache.match([11, 12, 13])) == (3, 1)


def test_blocks_that_are_hit_do_not_count_as_room_for_new_ones() -> None:
    cache = BlockCache(4)
    remember(cache, [1, 2, 3])
    assert cache.take([1, 2, 3], 2) is None
    assert cache.match([1, 2, 3]) == 3
    assert cache.take([1, 2, 3], 1) is not None


def test_two_that_computed_the_same_prompt_share_it_afterwards() -> None:
    cache = BlockCache(6)
    first, second = cache.take([], 3), cache.take([], 3)
    assert first is not None
    assert second is not None
    cache.publish(first, [1, 2, 3])
    cache.publish(second, [1, 2, 3])
    assert cache.available == 3
    cache.release(first)
    assert cache.usage == 0.5


def test_a_flush_keeps_what_is_held() -> None:
    cache = BlockCache(6)
    remember(cache, [1, 2, 3])
    holding = cache.take([1], 0)
    cache.flush()
    assert holding is not None
    assert cache.match([1, 2, 3]) == 1
