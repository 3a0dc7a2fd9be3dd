"""One pass over the records of a window: everything that a report counts.

Rules
1. A record is fetched once: what it is grouped by, and its packed figures. What is done for each of them beyond that is done
   by C (join, slices of arrays, Counter, sum), a group at a time.
2. Times are counted in ticks (`recordrow.tick`): percentiles are exact to 0.125 %, and few numbers tell of many records.
3. Many records are split over the processors; what each found adds up (`Found.add`).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sqlite3
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from proxy.recordrow import COLUMNS, FIGURES, KIND, NO_NUMBER, NO_TICK, NUMBERS, SOUND, TIMES, UNSOUND, plain
from proxy.report.promise import Columns, Promises
from proxy.report.source import Window, opened

FETCH = 10_000
TOGETHER = 500_000
"""Records that are unpacked at once."""
ALONE = 150_000
"""Fewer records than that for each are not worth another process."""

CONTEXT_EDGES = (1024, 4096, 16_384, 65_536, 262_144)
CONTEXTS = ("<1k", "1k–4k", "4k–16k", "16k–64k", "64k–256k", "≥256k")
"""Tokens of the prompt; k is 1024."""
_BIN = " ".join(f"WHEN context < {edge} THEN {place}" for place, edge in enumerate(CONTEXT_EDGES))

_CONTEXT = f"CASE WHEN context IS NULL THEN NULL {_BIN} ELSE {len(CONTEXT_EDGES)} END"

DIMENSIONS = ("backend", "tier", "tenant", "model", "key", "context")
"""What a report may be by; contexts by their place in CONTEXTS."""

Group = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """by: names of DIMENSIONS. step: seconds between points of the curves, from `start` on; None: neither curves nor
    cells are wanted. slowest: so many are. ids: the first and the last of the rows that may be in the window."""

    path: Path
    window: Window
    by: tuple[str, ...]
    promises: Promises
    start: float = 0.0
    step: float | None = None
    slowest: int = 10
    ids: tuple[int, int] = (0, 0)


class _Adds:
    """Numbers, Counters and dictionaries of either add up, field by field."""

    def add(self, other: Any) -> None:
        for name in self.__dataclass_fields__:  # type: ignore[attr-defined]
            mine, more = getattr(self, name), getattr(other, name)
            if isinstance(mine, Counter):
                mine.update(more)
            elif isinstance(mine, dict):
                for key, one in more.items():
                    mine[key].update(one) if isinstance(one, Counter) else mine[key].add(one)
            else:
                setattr(self, name, mine + more)


@dataclass
class Sums(_Adds):
    """Of one group of records. ticks: of each measure, how often each value. cacheable: prompt tokens of those that say how
    many were cached."""

    requests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    ticks: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cacheable_tokens: int = 0
    offered: int = 0
    met: int = 0
    retries: int = 0
    continuations: Counter[str] = field(default_factory=Counter)
    hedges: Counter[str] = field(default_factory=Counter)
    tool_answers: int = 0
    tool_sound: int = 0


@dataclass
class Cell(_Adds):
    """Streams of one backend at about one concurrency and context: sums of both, and time per token in ticks."""

    streams: int = 0
    concurrency: int = 0
    context: int = 0
    tpot: Counter[int] = field(default_factory=Counter)


@dataclass
class Found(_Adds):
    """steps: of the curves, by their number. cells: by backend, bits of the requests beside, context bin. tiers: asked and
    served. failures: of attempts, by backend and kind. slowest: seconds, and what the line says."""

    groups: defaultdict[Group, Sums] = field(default_factory=lambda: defaultdict(Sums))
    steps: defaultdict[int, Sums] = field(default_factory=lambda: defaultdict(Sums))
    cells: defaultdict[tuple[str, int, int], Cell] = field(default_factory=lambda: defaultdict(Cell))
    tiers: Counter[tuple[str | None, str | None]] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest: list[tuple[float, dict[str, Any]]] = field(default_factory=list)


def scan(question: Question) -> Found:
    """Raises `BadStore`."""
    low, high = question.ids
    workers = max(1, min(os.cpu_count() or 1, (high - low) // ALONE))
    step = (high - low) // workers + 1
    parts = [(question, start, start + step) for start in range(low, high + 1, step)]
    if len(parts) == 1:
        found = _part(*parts[0])
    else:
        found = Found()
        with multiprocessing.get_context("fork").Pool(len(parts)) as pool:
            for part in pool.starmap(_part, parts):
                found.add(part)
    found.slowest = sorted(found.slowest, key=lambda one: -one[0])[: question.slowest]
    return found


def _part(question: Question, low: int, high: int) -> Found:
    """Of the rows from `low` on, before `high`."""
    found = Found()
    where = f"{question.window.where()} AND id >= {low} AND id < {high}"
    collects = gc.isenabled()
    gc.disable()  # or it would look through each batch of tuples, again and again
    try:
        with opened(question.path) as db:
            _count(db, where, question, found)
            _trouble(db, where, question, found)
            if question.slowest:
                found.slowest = _slowest(db, where, question.slowest)
    finally:
        if collects:
            gc.enable()
    return found


def _key(question: Question) -> str:
    """SQL: the kind, and what else is asked for."""
    step = (
        f", CAST((time - {question.start!r}) / {question.step!r} AS INT)" if question.step is not None else ""
    )
    return "kind, id" + step + (f", {_CONTEXT}" if "context" in question.by else "")


class _Reader:
    """Rows by kind, step and context, as `_key` selects them, by what they are called."""

    def __init__(self, db: sqlite3.Connection, question: Question) -> None:
        self._db = db
        self._question = question
        self._kinds: dict[int, tuple[str | None, ...]] = {}

    def read(self, kind: int, row: int, more: Sequence[Any]) -> tuple[dict[str, Any], int | None, Group]:
        """The kind's values, the step, the group. row: one of that kind."""
        if kind not in self._kinds:
            sql = f"SELECT {', '.join(KIND)} FROM requests WHERE id = ?"
            self._kinds[kind] = self._db.execute(sql, (row,)).fetchone()
        named: dict[str, Any] = dict(zip(KIND, self._kinds[kind], strict=True))
        question = self._question
        if "context" in question.by:
            named["context"] = more[-1]
        step: int | None = more[0] if question.step is not None else None
        return named, step, tuple([named[name] for name in question.by])


def _count(db: sqlite3.Connection, where: str, question: Question, found: Found) -> None:
    reader = _Reader(db, question)
    waiting: dict[Any, list[bytes]] = {}
    of_kind: dict[int, int] = {}
    fetched = 0
    cursor = db.execute(f"SELECT figures, {_key(question)} FROM requests WHERE {where}")
    while batch := cursor.fetchmany(FETCH):
        if len(batch[0]) == 3:  # the kind alone
            for figures, kind, row in batch:
                if kind in waiting:
                    waiting[kind].append(figures)
                else:
                    waiting[kind] = [figures]
                    of_kind[kind] = row
        else:
            for figures, kind, row, *more in batch:
                of_kind[kind] = row
                waiting.setdefault((kind, *more), []).append(figures)
        fetched += len(batch)
        if fetched >= TOGETHER:
            _unpack(waiting, of_kind, reader, question, found)
            waiting, fetched = {}, 0
    _unpack(waiting, of_kind, reader, question, found)


def _unpack(
    waiting: dict[Any, list[bytes]],
    of_kind: dict[int, int],
    reader: _Reader,
    question: Question,
    found: Found,
) -> None:
    alike: dict[tuple[Any, ...], list[bytes]] = {}
    for key, packed in waiting.items():
        kind, *more = (key,) if isinstance(key, int) else key
        named, step, group = reader.read(kind, of_kind[kind], more)
        backend = None if step is None else named["backend"]
        which = named["outcome"], named["tier_asked"], named["tier"], step, backend, group
        alike.setdefault(which, []).append(b"".join(packed))
    for (outcome, asked, tier, step, backend, group), packed in alike.items():
        columns = _columns(b"".join(packed))
        sums = _sums(outcome, tier, columns, question.promises)
        found.tiers[asked, tier] += sums.requests
        found.groups[group].add(sums)
        if step is not None:
            found.steps[step].add(sums)
        if backend is not None:
            _cells(found, backend, columns)


def _columns(packed: bytes) -> Columns:
    short, long = array("H", packed), array("I", packed)
    if sys.byteorder == "big":
        short.byteswap()
        long.byteswap()
    columns = {name: short[place :: FIGURES.size // 2] for place, name in enumerate(TIMES)}
    for place, name in enumerate(NUMBERS, len(TIMES) // 2):
        columns[name] = long[place :: FIGURES.size // 4]
    return columns


def _sums(outcome: str, tier: str | None, columns: Columns, promises: Promises) -> Sums:
    sums = Sums(len(columns["attempts"]), Counter({outcome: len(columns["attempts"])}))
    for name in TIMES:
        counted = sums.ticks[name] = Counter(columns[name])
        counted.pop(NO_TICK, None)
    prompt, completion, cached = (_total(columns[f"{name}_tokens"]) for name in _TOKENS)
    sums.prompt_tokens, sums.completion_tokens, sums.cached_tokens = prompt, completion, cached
    told = zip(columns["prompt_tokens"], columns["cached_tokens"], strict=True)
    sums.cacheable_tokens = sum([p for p, c in told if c != NO_NUMBER != p])
    sums.retries = sum(columns["attempts"]) - sum(map(bool, columns["attempts"]))
    sums.tool_sound = columns["tools"].count(SOUND)
    sums.tool_answers = sums.tool_sound + columns["tools"].count(UNSOUND)
    sums.offered, sums.met = promises.judge(tier, outcome, columns)
    return sums


_TOKENS = ("prompt", "completion", "cached")


def _total(numbers: array[int]) -> int:
    return sum(numbers) - NO_NUMBER * numbers.count(NO_NUMBER)


def _cells(found: Found, backend: str, columns: Columns) -> None:
    cells: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for one in zip(columns["in_flight"], columns["context"], columns["tpot_seconds"], strict=True):
        if one[2] != NO_TICK and NO_NUMBER not in one:
            cells[one[0].bit_length(), one[1].bit_length()].append(one)
    for (beside, bits), streams in cells.items():
        here, contexts, ticks = zip(*streams, strict=True)
        cell = Cell(len(streams), sum(here) + len(streams), sum(contexts), Counter(ticks))
        found.cells[backend, beside, context_bin(2**bits - 1)].add(cell)


def context_bin(tokens: int) -> int:
    """Its place in CONTEXTS. Edges are powers of two: numbers of as many bits are in one bin."""
    return sum(tokens >= edge for edge in CONTEXT_EDGES)


def _trouble(db: sqlite3.Connection, where: str, question: Question, found: Found) -> None:
    """What went wrong on the way, of the few requests where something did."""
    counted: Counter[tuple[Any, ...]] = Counter()
    of_kind: dict[int, int] = {}
    sql = f"SELECT trouble, {_key(question)} FROM requests WHERE {where} AND trouble IS NOT NULL"
    for text, kind, row, *more in db.execute(sql):
        counted[text, kind, *more] += 1
        of_kind[kind] = row
    reader = _Reader(db, question)
    for (text, kind, *more), times in counted.items():
        sums = found.groups[reader.read(kind, of_kind[kind], more)[2]]
        trouble: dict[str, Any] = orjson.loads(text)
        if trouble.get("continuation"):
            sums.continuations[trouble["continuation"]["ending"]] += times
        if trouble.get("hedge"):
            sums.hedges[trouble["hedge"]["outcome"]] += times
        for failed in trouble.get("failures") or ():
            found.failures[failed["backend"], failed["failure"]] += times


def _slowest(db: sqlite3.Connection, where: str, count: int) -> list[tuple[float, dict[str, Any]]]:
    seconds = "coalesce(ttft_seconds, e2e_seconds)"
    sql = f"SELECT {seconds}, {', '.join(COLUMNS)} FROM requests WHERE {where} ORDER BY 1 DESC LIMIT ?"
    return [(first, plain(values)) for first, *values in db.execute(sql, (count,))]
