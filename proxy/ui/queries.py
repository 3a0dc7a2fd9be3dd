"""What the page asks of the records.

Rules
1. Each is bounded: by a window of time, and by `MOST` records at its end; `cut` says that the window held more. There is no
   index by time: rows lie in the order in which requests ended, so a window begins where a search by halves finds the
   first one that ended in it.
2. Percentiles are the value that at least that share does not exceed: of all records of a window up to `MOST_SORTED`, of
   every second, third … one where there are more (`every`). Requests and failures are counted, all of them.
3. Only numbers and names come back; a record has no text of a prompt or an answer.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from proxy.errors import Outcome
from proxy.recordrow import COLUMNS, REST, plain

MOST = 200_000
"""Records that one question looks at."""
MOST_SORTED = 50_000
MOST_SHOWN = 200
MOST_GROUPS = 12
WINDOWS = {"10m": (600, 10), "1h": (3600, 60), "24h": (86_400, 1200)}
"""Name → (seconds, seconds of a step)."""
GROUPS = {"none": "''", "backend": "coalesce(backend, '–')", "tier": "coalesce(tier, '–')"}
LATENCIES = {"ttft": "ttft_seconds", "gap": "chunk_gap_p50_seconds", "tpot": "tpot_seconds"}
FILTERS = ("backend", "tier", "outcome", "model", "tenant")
NOT_OURS = (Outcome.OK, Outcome.CANCELLED, Outcome.CLIENT_TIMEOUT, Outcome.BAD_REQUEST, Outcome.UNAUTHORIZED)
"""Ends that are no failure of the gateway or a backend; being turned away is one."""
FAILED = f"outcome NOT IN ({', '.join(repr(outcome.value) for outcome in NOT_OURS)})"

Row = tuple[Any, ...]


def begin(db: sqlite3.Connection, since: float) -> tuple[int, bool]:
    """The id at which records that ended since then begin, at most MOST of them; and whether there were more."""
    low, high = db.execute("SELECT coalesce(min(id), 0), coalesce(max(id), 0) FROM requests").fetchone()
    floor = max(low, high - MOST + 1)
    above, below = floor, high + 1
    while above < below:
        middle = (above + below) // 2
        row = db.execute(
            "SELECT time + e2e_seconds FROM requests WHERE id >= ? ORDER BY id LIMIT 1", (middle,)
        ).fetchone()
        if row is not None and row[0] < since:
            above = middle + 1
        else:
            below = middle
    return above, above == floor > low


def latencies(db: sqlite3.Connection, now: float, window: str, by: str) -> dict[str, Any]:
    """By step and group: p50, p95 and p99 of each of LATENCIES, requests, failures and tokens.

    window: one of WINDOWS. by: one of GROUPS. Steps that are over or running; those with nothing are left out.
    """
    seconds, step = WINDOWS[window]
    start = (now - seconds) // step * step
    first, cut = begin(db, start)
    group = GROUPS[by]
    (last,) = db.execute("SELECT coalesce(max(id), 0) FROM requests").fetchone()
    every = max(1, -(-(last - first + 1) // MOST_SORTED))
    bounds = {"start": start, "step": step, "first": first, "every": every}
    at = "CAST((time - :start) / :step AS INTEGER)"
    where = "FROM requests WHERE id >= :first AND time >= :start"
    counts = db.execute(
        f"SELECT {at}, {group}, count(*), sum({FAILED}), sum(coalesce(completion_tokens, 0)) {where} GROUP BY 1, 2",
        bounds,
    ).fetchall()
    found = {
        name: db.execute(
            f"WITH one AS (SELECT {at} AS step, {group} AS name, {column} AS value {where} "
            f"AND id % :every = 0 AND {column} IS NOT NULL), ranked AS (SELECT step, name, value, "
            "row_number() OVER (PARTITION BY step, name ORDER BY value) AS place, "
            "count(*) OVER (PARTITION BY step, name) AS many FROM one) "
            f"SELECT step, name, {', '.join(map(_percentile, (50, 95, 99)))} FROM ranked GROUP BY step, name",
            bounds,
        ).fetchall()
        for name, column in LATENCIES.items()
    }
    total: dict[str, int] = {}
    for _, name, count, _, _ in counts:
        total[name] = total.get(name, 0) + count
    names = sorted(total, key=lambda name: -total[name])[:MOST_GROUPS]
    return {
        "start": start,
        "step": step,
        "steps": seconds // step + 1,
        "cut": cut,
        "every": every,
        "names": sorted(names),
        "requests": {
            name: {
                "step": [row[0] for row in counts if row[1] == name],
                "count": [row[2] for row in counts if row[1] == name],
                "failed": [row[3] for row in counts if row[1] == name],
                "tokens": [row[4] for row in counts if row[1] == name],
            }
            for name in names
        },
        **{metric: {name: _lines(rows, name) for name in names} for metric, rows in found.items()},
    }


def _percentile(share: int) -> str:
    return f"max(CASE WHEN place = (many * {share} + 99) / 100 THEN value END)"


def _lines(rows: Sequence[Row], name: str) -> dict[str, list[Any]]:
    mine = sorted(row for row in rows if row[1] == name)
    return {
        "step": [row[0] for row in mine],
        "p50": [row[2] for row in mine],
        "p95": [row[3] for row in mine],
        "p99": [row[4] for row in mine],
    }


def recent(db: sqlite3.Connection, limit: int, filters: Mapping[str, str], before: int | None) -> Any:
    """The last ones that fit all filters, newest first. outcome `failed`: whatever FAILED says. before: an id."""
    (high,) = db.execute("SELECT coalesce(max(id), 0) FROM requests").fetchone()
    where, values = ["id > ?"], [high - MOST]
    for name, value in filters.items():
        assert name in FILTERS
        if (name, value) == ("outcome", "failed"):
            where.append(FAILED)
        else:
            where.append(f"{name} = ?")
            values.append(value)
    if before is not None:
        where.append("id < ?")
        values.append(before)
    sql = (
        f"SELECT id, {', '.join(COLUMNS)} FROM requests WHERE {' AND '.join(where)} ORDER BY id DESC LIMIT ?"
    )
    rows = db.execute(sql, (*values, limit)).fetchall()
    return [
        {"row": row[0], **{key: value for key, value in plain(row[1:]).items() if key in SHOWN}}
        for row in rows
    ]


SHOWN = frozenset(
    (
        "time", "request_id", "model", "tier_asked", "tier", "backend", "reason", "tenant", "key", "outcome", "status",
        "error", "attempts", "in_flight", "prompt_tokens", "prompt_tokens_estimate", "completion_tokens", "cached_tokens",
        "queue_wait_seconds", "ttft_seconds", "tpot_seconds", "e2e_seconds", "limit", "conversation", "finish_reason",
    )
)  # fmt: skip
"""Of a request in the list; `record` has all of it."""


def record(db: sqlite3.Connection, request_id: str, row: int | None) -> dict[str, Any] | None:
    """The last one of that id. row: where it lies, if that is known."""
    select = f"SELECT {', '.join(COLUMNS)} FROM requests WHERE request_id = ?"
    if row is not None:
        found = db.execute(f"{select} AND id = ?", (request_id, row)).fetchone()
    else:
        (high,) = db.execute("SELECT coalesce(max(id), 0) FROM requests").fetchone()
        found = db.execute(
            f"{select} AND id > ? ORDER BY id DESC LIMIT 1", (request_id, high - MOST)
        ).fetchone()
    return None if found is None else plain(found)


MEASURED_SECONDS = 300.0


def measured(db: sqlite3.Connection, now: float) -> dict[str, dict[str, Any]]:
    """What each backend did in the last minutes: medians (p95 of the first token, too), failures, share of prompts found in
    the cache; and what had been predicted for the same requests. The first token counts from being let in, as its
    prediction does."""
    first, _ = begin(db, now - MEASURED_SECONDS)
    rows = db.execute(
        f"SELECT backend, {FAILED}, ttft_seconds - coalesce(queue_wait_seconds, 0), tpot_seconds, prompt_tokens, "
        "cached_tokens, rest FROM requests WHERE id >= ? AND time >= ? AND backend IS NOT NULL ORDER BY id DESC LIMIT 5000",
        (first, now - MEASURED_SECONDS),
    ).fetchall()
    found: dict[str, list[Row]] = {}
    for backend, *values in rows:
        found.setdefault(backend, []).append(tuple(values))
    return {backend: _measured(mine) for backend, mine in found.items()}


def _measured(rows: Sequence[Row]) -> dict[str, Any]:
    ttft_at, tpot_at = REST.index("predicted_ttft_seconds"), REST.index("predicted_tpot_seconds")
    predicted = [orjson.loads(row[5]) for row in rows]
    first = sorted([row[1] for row in rows if row[1] is not None])
    asked = sum([row[3] for row in rows if row[3] is not None and row[4] is not None])
    return {
        "requests": len(rows),
        "failed": sum([row[0] for row in rows]),
        "ttft": quantile(first, 0.5),
        "ttft95": quantile(first, 0.95),
        "tpot": quantile(sorted([row[2] for row in rows if row[2] is not None]), 0.5),
        "predicted_ttft": quantile(_those(rows, predicted, 1, ttft_at), 0.5),
        "predicted_tpot": quantile(_those(rows, predicted, 2, tpot_at), 0.5),
        "cached": sum([row[4] or 0 for row in rows]) / asked if asked else None,
    }


def _those(rows: Sequence[Row], predicted: Sequence[list[Any]], column: int, at: int) -> list[float]:
    """What was predicted where something was measured, sorted."""
    pairs = zip(rows, predicted, strict=True)
    return sorted([rest[at] for row, rest in pairs if row[column] is not None and rest[at] is not None])


def quantile(values: Sequence[float], share: float) -> float | None:
    """Of sorted values."""
    return values[max(0, -int(-share * len(values) // 1) - 1)] if values else None


def cells(db: sqlite3.Connection, now: float, seconds: float, backend: str) -> list[Row]:
    """Of each answered stream there: (streams with it, context, seconds a token, seconds to the first token from
    being let in, tokens cached)."""
    first, _ = begin(db, now - seconds)
    return db.execute(
        "SELECT in_flight + 1, context, tpot_seconds, ttft_seconds - coalesce(queue_wait_seconds, 0), "
        "coalesce(cached_tokens, 0) FROM requests WHERE id >= ? AND time >= ? AND backend = ? AND outcome = 'ok' "
        "AND in_flight IS NOT NULL AND context IS NOT NULL AND ttft_seconds IS NOT NULL "
        "ORDER BY id DESC LIMIT 20000",
        (first, now - seconds, backend),
    ).fetchall()


def choices(db: sqlite3.Connection) -> dict[str, list[str]]:
    """What there is to filter by, of the last 5,000 records."""
    (high,) = db.execute("SELECT coalesce(max(id), 0) FROM requests").fetchone()
    return {
        name: [
            value
            for (value,) in db.execute(
                f"SELECT DISTINCT {name} FROM requests WHERE id > ? AND {name} IS NOT NULL LIMIT 50",
                (high - 5000,),
            )
        ]
        for name in FILTERS
    }
