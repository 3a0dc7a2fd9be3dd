"""Requests that arrive together are begun one at a time, in order, and the sockets are looked at in between."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from proxy.turns import A_ROUND, Turns


async def begin(turns: Turns, name: int, begun: list[int]) -> None:
    if not turns.take():
        await turns.wait()
    begun.append(name)


async def rounds(turns: Turns, begun: list[int], last: int) -> list[int]:
    """How many had begun each time that the loop came round."""
    seen = [0]
    while len(begun) < last:
        await asyncio.sleep(0)
        if len(begun) != seen[-1]:
            seen.append(len(begun))
    return seen


async def test_a_crowd_begins_round_by_round_and_in_order() -> None:
    turns, begun, crowd = Turns(), list[int](), 5 * A_ROUND
    tasks = [asyncio.ensure_future(begin(turns, name, begun)) for name in range(crowd)]
    seen = await rounds(turns, begun, crowd)
    await asyncio.gather(*tasks)
    assert begun == list(range(crowd))
    assert max(after - before for before, after in pairwise(seen)) <= A_ROUND


async def test_who_comes_alone_does_not_wait() -> None:
    turns = Turns()
    for _ in range(3 * A_ROUND):
        assert turns.take()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_nobody_overtakes_those_who_wait() -> None:
    turns, begun = Turns(), list[int]()
    tasks = [asyncio.ensure_future(begin(turns, name, begun)) for name in range(3 * A_ROUND)]
    await asyncio.sleep(0)
    assert begun == list(range(A_ROUND))
    late = asyncio.ensure_future(begin(turns, 99, begun))
    await asyncio.gather(*tasks, late)
    assert begun == [*range(3 * A_ROUND), 99]


async def test_who_is_cancelled_leaves_the_row_and_takes_no_turn() -> None:
    turns, begun = Turns(), list[int]()
    tasks = [asyncio.ensure_future(begin(turns, name, begun)) for name in range(3 * A_ROUND)]
    await asyncio.sleep(0)
    for task in tasks[A_ROUND : 2 * A_ROUND]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun == [*range(A_ROUND), *range(2 * A_ROUND, 3 * A_ROUND)]
    await asyncio.sleep(0)
    assert turns.take()
