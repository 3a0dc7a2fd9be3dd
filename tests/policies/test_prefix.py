"""What a backend is believed to have cached."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.engine.cache import BlockCache
from policies.prefix import PrefixCache

LINK = 100.0


def holding(*chains: list[int], capacity: float = 10_000) -> PrefixCache:
    cache = PrefixCache(capacity)
    for chain in chains:
        cache.hold(chain, LINK, None, 0.0)
    return cache


def test_a_prompt_is_known_as_far_as_it_agrees_with_an_earlier_one() -> None:
    cache = holding([1, 2, 3, 4])
    assert cache.links([1, 2, 3, 4, 5]) == 4
    assert cache.links([1, 2, 9, 10]) == 2
    assert cache.links([9, 2, 3]) == 0
    assert cache.links([]) == 0


def test_the_least_recently_held_goes_first_and_of_a_prompt_the_tail_before_the_head() -> None:
    cache = holding([1, 2, 3], [11, 12, 13], capacity=500)
    assert cache.links([11, 12, 13]) == 3
    assert cache.links([1, 2, 3]) == 2, "room for five: the older one's tail is gone, its head is not"
    cache.hold([1, 2], LINK, None, 0.0)
    cache.hold([21, 22, 23], LINK, None, 0.0)
    assert cache.links([1, 2]) == 2, "it was held again meanwhile"
    assert cache.links([11, 12, 13]) == 0


def test_it_never_believes_more_than_fits_beside_what_runs() -> None:
    cache = PrefixCache(1000)
    cache.hold(list(range(8)), LINK, None, 0.0, reserved=600)
    assert cache.tokens == 400


def test_an_answer_is_remembered_as_its_conversations_tail_until_it_is_evicted() -> None:
    cache = PrefixCache(1000)
    cache.hold([1, 2], LINK, "c", 150.0)
    assert cache.tail("c") == 150.0
    cache.hold([1, 2, 3], LINK, "c", 20.0)
    assert (cache.tail("c"), cache.tokens) == (20.0, 320.0)
    cache.hold(list(range(10, 20)), LINK, None, 0.0)
    assert cache.tail("c") == 0.0


def test_a_report_far_below_shrinks_what_is_believed_and_good_ones_restore_it() -> None:
    cache = holding([1, 2, 3, 4], capacity=1000)
    cache.reported([1, 2, 3, 4], None, expected=0.8, share=0.3, block=0.05)
    shrunk = cache.share
    assert shrunk < 1
    for _ in range(20):
        cache.reported([1, 2, 3, 4], None, expected=0.8, share=0.8, block=0.05)
    assert shrunk < cache.share <= 1


def test_nothing_found_twice_in_a_row_means_that_the_backend_restarted() -> None:
    cache = holding([1, 2, 3, 4])
    cache.reported([1, 2, 3, 4], None, expected=0.8, share=0.0, block=0.05)
    assert cache.tokens
    cache.reported([1, 2, 3, 4], None, expected=0.8, share=0.0, block=0.05)
    assert cache.tokens == 0
    assert cache.links([1, 2, 3, 4]) == 0


def test_a_report_that_cannot_be_told_from_rounding_teaches_nothing() -> None:
    cache = holding([1, 2])
    for _ in range(5):
        cache.reported([1, 2], None, expected=0.1, share=0.0, block=0.05)
    assert (cache.share, cache.tokens) == (1.0, 200.0)


def test_it_believes_what_the_engine_model_holds() -> None:
    """300 requests of 40 growing conversations in a cache too small for all: blocks are believed to be there that are,
    up to 3 %."""
    rng = Random(3)
    size, room = 784, 120
    engine, believed = BlockCache(room), PrefixCache(room * size)
    chains = [[c * 1000 + i for i in range(30)] for c in range(40)]
    grown = [3] * 40
    wrong = asked = 0
    for _ in range(300):
        c = rng.randrange(8) if rng.random() < 0.7 else rng.randrange(40)
        chain = chains[c][: grown[c]]
        true, guess = engine.match(chain), believed.links(chain)
        wrong, asked = wrong + abs(true - guess), asked + len(chain)
        held = engine.take(chain[:true], len(chain) - true)
        assert held is not None
        believed.hold(chain, size, None, 0.0)
        engine.publish(held, chain[true:])
        engine.release(held)
        grown[c] = min(30, grown[c] + 1)
    assert wrong / asked < 0.03


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 12), st.floats(0, 900), st.booleans()),
        max_size=30,
    )
)
def test_its_size_is_the_sum_of_its_parts_and_within_bounds(
    steps: list[tuple[int, int, float, bool]],
) -> None:
    cache = PrefixCache(2000)
    for talk, length, tail, report in steps:
        chain = [talk * 100 + i for i in range(length)]
        cache.hold(chain, LINK, f"t{talk}", tail)
        assert -1e-6 <= cache.tokens <= 2000 + 1e-6
        assert cache.links(chain) <= length
        if report:
            cache.reported(chain, f"t{talk}", 0.9, 0.0, 0.01)
    cache.hold([], LINK, None, 0.0, reserved=2000)
    assert abs(cache.tokens) < 1e-6
