"""The database of records, to be read.

Rules: read only: nothing is written, nobody is held up, and what is wrong with the file is said in one line (`BadStore`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from proxy.recordrow import COLUMNS, plain
from proxy.recordschema import VERSION, Foreign, version


class BadStore(Exception):
    """The file cannot be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Window:
    """Records accepted from `since` on, before `until`: seconds since the epoch, None: no bound."""

    since: float | None = None
    until: float | None = None

    def where(self) -> str:
        """SQL."""
        parts = [] if self.since is None else [f"time >= {self.since!r}"]
        parts += [] if self.until is None else [f"time < {self.until!r}"]
        return " AND ".join(["1", *parts])


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Raises BadStore, also for what goes wrong inside."""
    try:
        if not path.is_file():
            raise BadStore(f"{path}: there is no such file; the gateway makes it with its first record")
        db = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=5.0)
        try:
            found = version(db)
            if found < VERSION:
                raise BadStore(
                    f"{path}: of version {found}; the gateway brings it to {VERSION} when it writes"
                )
            db.execute("PRAGMA mmap_size = 8000000000")
            yield db
        finally:
            db.close()
    except Foreign as error:
        raise BadStore(f"{path}: {error}") from None
    except sqlite3.Error as error:
        raise BadStore(f"{path}: cannot be read: {error}") from None


def records(path: Path, window: Window) -> Iterator[dict[str, Any]]:
    """What the lines of these records say, in the order in which the requests ended. Raises BadStore."""
    with opened(path) as db:
        for values in db.execute(
            f"SELECT {', '.join(COLUMNS)} FROM requests WHERE {window.where()} ORDER BY id"
        ):
            yield plain(values)


@dataclass(frozen=True, slots=True)
class Extent:
    """The first and the last id there is, and when the first and the last record of a window was accepted: seconds since
    the epoch."""

    low: int
    high: int
    first: float
    last: float


def extent(path: Path, window: Window) -> Extent | None:
    """None: there are no records. Raises BadStore."""
    with opened(path) as db:
        low, high = db.execute("SELECT min(id), max(id) FROM requests").fetchone()
        if low is None:
            return None
        sql = f"SELECT min(time), max(time) FROM requests WHERE {window.where()}"
        first, last = db.execute(sql).fetchone()
    return None if first is None else Extent(low, high, first, last)
