"""Records in an SQLite file: written in batches, kept for a while, opened clean after a kill.

Rules
1. One thread at a time, never the event loop's: each call may take as long as the disk does. What cannot be written raises
   OSError, and `proxy.recorder` drops and counts it; the next batch tries anew, from the opening if need be.
2. WAL, and a commit for each batch: who reads waits for nobody, a killed process loses no batch that was written. Several
   processes may write one file: transactions are short, and a lock is waited for.
3. A file that is damaged is set aside under another name and a new one begun. One of a later version, or that is not ours,
   is left alone.
4. The oldest records go when they are older than `keep_days`, or when the file holds more than `keep_mb`; what that frees is
   given back to the disk bit by bit.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain

from proxy.recordrow import COLUMNS, Row
from proxy.recordschema import Foreign, migrate, version

log = logging.getLogger("tierline.records")

BUSY_SECONDS = 5.0
SWEEP_SECONDS = 60.0
SWEEP_ROWS = 2000
"""Deleted in one transaction; others write between two of them."""
SWEEP_STEPS = 25
"""At most in one turn: the records of half a second wait meanwhile."""
VACUUM_PAGES = 500
DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

SIZES = (8, 32, 128, 512)
"""Rows of one statement; what is missing to one of these is NULL. One statement for a batch: beside a busy event loop each
call of SQLite's costs a fight for the interpreter, a hundred times what a row's insertion does."""
_ROW = f"({', '.join('?' * len(COLUMNS))})"
_INSERT = {
    size: f"INSERT INTO requests ({', '.join(COLUMNS)}) SELECT * FROM (VALUES {', '.join([_ROW] * size)}) "
    "WHERE column1 IS NOT NULL"
    for size in SIZES
}


class RecordStore:
    """path: made when it is first written. wall: seconds since the epoch. keep_days, keep_mb: 0 is without end."""

    def __init__(
        self, path: str, wall: Callable[[], float], *, keep_days: float = 0.0, keep_mb: float = 0.0
    ) -> None:
        self._path = path
        self._wall = wall
        self._keep_days = keep_days
        self._keep_mb = keep_mb
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._sweep_at = 0.0

    def __call__(self, rows: Sequence[Row]) -> None:
        """Write them, all or none. Raises OSError."""
        with self._errors():
            db = self._open()
            try:
                self._write(db, rows)
            except (OverflowError, UnicodeError):  # what a backend or a client made up, and no column takes
                self._write(db, [tuple([_storable(value) for value in row]) for row in rows])
        self._tidy()

    def _write(self, db: sqlite3.Connection, rows: Sequence[Row]) -> None:
        if len(rows) <= SIZES[-1]:
            _insert(db, rows)
            return
        db.execute("BEGIN IMMEDIATE")
        try:
            for start in range(0, len(rows), SIZES[-1]):
                _insert(db, rows[start : start + SIZES[-1]])
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise

    # -- the file -----------------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        """The connection; a new one if somebody took the file away."""
        if self._db is not None and self._there() != self._file:
            self.close()
        if self._db is None:
            if self._there() is None:
                os.close(os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            self._file = self._there()
            self._db = connect(self._path)
        return self._db

    def _there(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, Foreign) as error:
            damaged = getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGED
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not busy:
                self.close()
            if damaged:
                self._set_aside(error)
            raise OSError(f"{self._path}: {error}") from error

    def _set_aside(self, why: Exception) -> None:
        """Unless another process did so already."""
        if self._there() != self._file:
            return
        aside = f"{self._path}.damaged-{int(self._wall())}"
        try:
            os.rename(self._path, aside)
            for more in ("-wal", "-shm"):
                with suppress(FileNotFoundError):
                    os.rename(self._path + more, aside + more)
        except OSError as error:
            log.error("records: %s is damaged (%s) and cannot be set aside: %s", self._path, why, error)
        else:
            log.error(
                "records: %s is damaged (%s): set aside as %s, a new one is begun", self._path, why, aside
            )

    def close(self) -> None:
        """Later calls open it again."""
        db, self._db = self._db, None
        if db is not None:
            with suppress(sqlite3.Error):
                db.close()

    # -- what goes ----------------------------------------------------------------------------------------------

    def _tidy(self) -> None:
        """The records are written: what fails here is said and tried again later."""
        if self._wall() < self._sweep_at:
            return
        try:
            with self._errors():
                more = self._sweep(self._open())
            self._sweep_at = 0.0 if more else self._wall() + SWEEP_SECONDS
        except OSError as error:
            self._sweep_at = self._wall() + SWEEP_SECONDS
            log.warning("records: old ones cannot be removed: %s", error)

    def _sweep(self, db: sqlite3.Connection) -> bool:
        """Whether there is more to do than one turn may."""
        for _ in range(SWEEP_STEPS):
            gone = self._delete(db)
            freed = _number(db, "PRAGMA freelist_count")
            if freed:
                # A script: `execute` ends it after the first page.
                db.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
            if not gone and freed <= VACUUM_PAGES:
                return False
        return True

    def _delete(self, db: sqlite3.Connection) -> int:
        """Some of the oldest, if they are too old or too many; how many went."""
        oldest = _number(db, "SELECT coalesce(min(id), 0) FROM requests")
        upto = oldest + SWEEP_ROWS
        if not self._too_much(db):
            if not self._keep_days:
                return 0
            before = self._wall() - 86_400 * self._keep_days
            # In the order in which they ended: the first that is young enough ends it.
            first = db.execute(
                "SELECT id FROM (SELECT id, time FROM requests ORDER BY id LIMIT ?) WHERE time >= ? LIMIT 1",
                (SWEEP_ROWS, before),
            ).fetchone()
            upto = first[0] if first is not None else upto
        return db.execute("DELETE FROM requests WHERE id < ?", (upto,)).rowcount

    def _too_much(self, db: sqlite3.Connection) -> bool:
        pages = _number(db, "PRAGMA page_count") - _number(db, "PRAGMA freelist_count")
        return 0 < self._keep_mb * 1e6 < pages * _number(db, "PRAGMA page_size")


def _insert(db: sqlite3.Connection, rows: Sequence[Row]) -> None:
    """At most as many as the largest of SIZES."""
    size = next(size for size in SIZES if size >= len(rows))
    values: list[object] = list(chain.from_iterable(rows))
    values += [None] * (size * len(COLUMNS) - len(values))
    db.execute(_INSERT[size], values)


def _storable(value: object) -> object:
    if isinstance(value, int):
        return max(-(2**63), min(value, 2**63 - 1))
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _number(db: sqlite3.Connection, sql: str) -> int:
    found: int = db.execute(sql).fetchone()[0]
    return found


def connect(path: str) -> sqlite3.Connection:
    """To write, at this version's schema. Raises sqlite3.Error, `Foreign`."""
    db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        version(db)  # before anything is changed
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # takes only in a file that is still empty
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA journal_size_limit = 16000000")
        migrate(db)
    except BaseException:
        db.close()
        raise
    return db
