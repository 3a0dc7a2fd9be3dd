"""Recorded traffic as conversations: rows in, `Traffic` at any rate out. Reading files is the caller's.

Rules: two kinds of rows. With block hashes (Mooncake's): equal hashes mean an equal prefix, so a request continues the
latest one whose whole prompt it begins with, and comes no sooner than `PAUSE` after that one's answer, however fast the
trace is played. Without (Azure's): every request stands alone and nothing is ever shared. At a lower rate than the
recorded one a share of the conversations is drawn, each whole, so that people take as long between turns as they did
(stretched times would let every cache forget them); at a higher one all times are divided. Rows say nothing of who asks:
no conversation has an identity, only a beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, exp, gcd
from random import Random

from policies.engine import BLOCK_TOKENS
from policies.simulation.shapes import ESTIMATE_ERROR, OUTPUT_RESERVE
from policies.simulation.values import Conversation, Traffic, Turn

PAUSE = 1.0
"""Seconds between an answer and the request that continues it, at least."""
HASHED_TOKENS = 512
"""Tokens of one hash in a Mooncake trace."""


@dataclass(frozen=True, slots=True)
class Row:
    """A recorded request. at: seconds from the trace's beginning. hashes: of its prompt's blocks of HASHED_TOKENS, the
    last one maybe not full; empty if the trace does not tell."""

    at: float
    prompt: int
    output: int
    hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded traffic that can be played at any rate. `tick`: seconds to which its times were rounded down; requests
    are spread over it."""

    name: str
    threads: tuple[tuple[Row, ...], ...]
    seconds: float
    tick: float = 0.0
    warm_up: float = 60.0

    @property
    def rate(self) -> float:
        """Requests a second, as recorded."""
        return sum(map(len, self.threads)) / self.seconds

    def traffic(self, rate: float, rng: Random, *, seconds: float | None = None) -> Traffic:
        """`rate` requests a second: for `seconds` after the warm-up, or to the trace's end."""
        scale = max(1.0, rate / self.rate)
        kept = min(1.0, rate / self.rate)
        total = self.seconds / scale
        if seconds is not None:
            total = min(total, self.warm_up + seconds)
        bodies = Random(rng.getrandbits(64))
        alone = _Alone()
        conversations = []
        for number, thread in enumerate(self.threads):
            lot, bias = bodies.random(), exp(bodies.gauss(0.0, ESTIMATE_ERROR))
            times = [(row.at + bodies.random() * self.tick) / scale for row in thread]
            rows = [(at, row) for at, row in zip(times, thread, strict=True) if at < total]
            if rows and lot < kept:
                conversations.append(_conversation(rows, f"{self.name}-{number}", bias, alone))
        conversations.sort(key=lambda conversation: conversation.start)
        return Traffic(self.name, tuple(conversations), total, self.warm_up)


def trace(name: str, rows: Iterable[Row]) -> Trace:
    """Link rows into conversations."""
    ordered = sorted(rows, key=lambda row: row.at)
    if not ordered:
        raise ValueError("the trace is empty")
    threads: list[list[Row]] = []
    latest: dict[int, int] = {}  # the hash that ends a whole prompt → its thread
    for row in ordered:
        mine = _continued(row, threads, latest)
        if mine is None:
            mine = len(threads)
            threads.append([])
        threads[mine].append(row)
        full = row.prompt // HASHED_TOKENS
        if row.hashes and full:
            latest[row.hashes[full - 1]] = mine
    # Times that coincide were rounded; those that only have a common divisor were not.
    coincide = len({row.at for row in ordered}) < len(ordered)
    tick = gcd(*[round(row.at * 1000) for row in ordered]) / 1000.0 if coincide else 0.0
    return Trace(
        name, tuple(map(tuple, threads)), ordered[-1].at + max(tick, 1.0), tick if tick >= 1.0 else 0.0
    )


def _continued(row: Row, threads: Sequence[Sequence[Row]], latest: dict[int, int]) -> int | None:
    """The thread whose last prompt this one begins with: the longest such. A shared system prompt is no thread."""
    for hash in reversed(row.hashes):
        mine = latest.get(hash)
        if mine is None:
            continue
        last = threads[mine][-1]
        full = last.prompt // HASHED_TOKENS
        if last.hashes[full - 1] == hash and full > 1 and row.prompt > last.prompt:
            return mine
    return None


class _Alone:
    """Hashes nobody shares, below zero: recorded ones are not."""

    def __init__(self) -> None:
        self._next = 0

    def blocks(self, count: int) -> tuple[int, ...]:
        self._next -= count
        return tuple(range(self._next, self._next + count))


def _conversation(
    rows: Sequence[tuple[float, Row]], opening: str, bias: float, alone: _Alone
) -> Conversation:
    turns: list[Turn] = []
    chains = [engine_blocks(row) or alone.blocks(row.prompt // BLOCK_TOKENS) for _, row in rows]
    for place, (at, row) in enumerate(rows):
        new = row.prompt
        chain = chains[place]
        if place:
            new -= HASHED_TOKENS * (rows[place - 1][1].prompt // HASHED_TOKENS)
        if place + 1 < len(rows) and chains[place + 1][: len(chain)] == chain:
            chain = chains[place + 1]
        gap = PAUSE if place else 0.0
        allowed = max(OUTPUT_RESERVE, row.output)
        turns.append(Turn(row.prompt, row.output, new, gap, chain, allowed, at=at))
    return Conversation(rows[0][0], tuple(turns), opening=opening, bias=bias)


def engine_blocks(row: Row) -> tuple[int, ...]:
    """The engine's full blocks of a prompt: each is known by the recorded hash that covers its end, and by its place
    among those of that hash."""
    if not row.hashes:
        return ()
    several = ceil(HASHED_TOKENS / BLOCK_TOKENS)
    blocks = []
    for k in range(row.prompt // BLOCK_TOKENS):
        hash = row.hashes[ceil(BLOCK_TOKENS * (k + 1) / HASHED_TOKENS) - 1]
        blocks.append(hash * several + k % several)
    return tuple(blocks)
