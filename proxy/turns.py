"""Of requests that arrive together one is begun between two looks at the sockets.

Rules
1. To begin a request is half a millisecond of work. Five hundred at once would keep every running stream waiting for a
   quarter of a second; so they take turns, A_ROUND in each round, and chunks pass between the rounds. (Four a round made the
   slowest hundredth of chunks a third slower, and saved nothing.)
2. First come, first served. Who is cancelled while it waits leaves the row.
3. One that takes longer to read, for it has tools, takes a second turn before it is sent on.
4. A round ends when the loop has looked at the sockets: what `call_soon` is given runs once before each look.
"""

from __future__ import annotations

import asyncio
from collections import deque

A_ROUND = 1


class Turns:
    """`take` a turn, or `wait` for one."""

    __slots__ = ("_left", "_row", "_runs")

    def __init__(self) -> None:
        self._left = A_ROUND
        self._row: deque[asyncio.Future[None]] = deque()
        self._runs = False

    def take(self) -> bool:
        """Whether there is a turn left in this round, and nobody waits for it."""
        if self._row or not self._left:
            return False
        self._left -= 1
        self._run()
        return True

    async def wait(self) -> None:
        """For one of the next rounds."""
        turn = asyncio.get_running_loop().create_future()
        self._row.append(turn)
        self._run()
        await turn

    def _run(self) -> None:
        if not self._runs:
            self._runs = True
            asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        self._left, self._runs = A_ROUND, False
        while self._left and self._row:
            turn = self._row.popleft()
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if self._left < A_ROUND:
            self._run()
