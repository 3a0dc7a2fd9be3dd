"""The schema of the records' database, version by version.

Rules
1. `MIGRATIONS[n]` brings a file of version n to n + 1; an empty file goes through all of them. What is in one that was
   released never changes. New columns come at the end, NULL in old rows; new keys of `REST` at its end.
2. The version is SQLite's `user_version`. A file of a later one, or of somebody else, is not touched.
3. The view `records` shows each key of a record by its name, for whoever asks by hand.
"""

from __future__ import annotations

import sqlite3

from proxy.recordrow import REST, TROUBLE


class Foreign(Exception):
    """A file that is not ours to write."""


def _view() -> str:
    """Every key of a line; `time` in seconds since the epoch."""
    own = (
        "time", "request_id", "model", "tier_asked", "tier", "backend", "reason", "attempts", "in_flight", "tenant",
        "key", "outcome", "context", "prompt_tokens", "completion_tokens", "cached_tokens", "queue_wait_seconds",
        "ttft_seconds", "chunk_gap_p50_seconds", "chunk_gap_p99_seconds", "tpot_seconds", "e2e_seconds",
        "tool_counts",
    )  # fmt: skip
    taken = [f"json_extract(trouble, '$.{name}') AS {name}" for name in TROUBLE]
    taken += [f"json_extract(rest, '$[{place}]') AS \"{name}\"" for place, name in enumerate(REST)]
    return f"CREATE VIEW records AS SELECT id, {', '.join(own)}, {', '.join(taken)} FROM requests"


MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE requests (id INTEGER PRIMARY KEY, time REAL NOT NULL, kind INTEGER NOT NULL, "
        "figures BLOB NOT NULL, request_id TEXT NOT NULL, model TEXT, "
        "tier_asked TEXT, tier TEXT, backend TEXT, tenant TEXT, key TEXT, outcome TEXT NOT NULL, reason TEXT, "
        "attempts INTEGER NOT NULL, in_flight INTEGER, context INTEGER, prompt_tokens INTEGER, "
        "completion_tokens INTEGER, cached_tokens INTEGER, queue_wait_seconds REAL, ttft_seconds REAL, "
        "chunk_gap_p50_seconds REAL, chunk_gap_p99_seconds REAL, tpot_seconds REAL, e2e_seconds REAL NOT NULL, "
        "trouble TEXT, tool_counts TEXT, rest TEXT NOT NULL)",
        _view(),
    ),
)
VERSION = len(MIGRATIONS)


def version(db: sqlite3.Connection) -> int:
    """0: an empty file. Raises `Foreign` for one that is not ours, or that a later version made."""
    found: int = db.execute("PRAGMA user_version").fetchone()[0]
    if found > VERSION:
        raise Foreign(f"of version {found}, and this Tierline knows {VERSION}")
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    if (found or tables) and "requests" not in tables:
        raise Foreign("is no database of records")
    return found


def migrate(db: sqlite3.Connection) -> None:
    """Bring it to `VERSION`, all of it or nothing; several processes may try at once."""
    if version(db) == VERSION:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        for number in range(version(db), VERSION):
            for statement in MIGRATIONS[number]:
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {number + 1}")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
