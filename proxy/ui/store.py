"""Questions to the database of records: read only, off the event loop, within a time.

Rules
1. One thread, one question at a time. Whoever finds `MOST_WAITING` before it is turned away, and a question that takes
   longer than `SECONDS` is broken off: the page may be slow, an answer of a model never is because of it.
2. Equal questions share an answer for as long as they say: ten open pages cost what one does.
3. No store, or none yet, is an answer too: `NoStore` says how to switch it on.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from proxy.clock import Clock
from proxy.recordschema import Foreign, version

SECONDS = 10.0
MOST_WAITING = 8
MOST_KEPT = 64
_STEPS = 20_000
"""Of SQLite's machine between two looks at the clock: some milliseconds."""

Question = Callable[[sqlite3.Connection], Any]


class NoStore(Exception):
    """There is no database to ask; why, and what to do."""


class Busy(Exception):
    """Not now; the message says why."""


class Reader:
    """path: of the database, None: it is off. Asked anew every time: a reload may change it."""

    def __init__(self, path: Callable[[], Path | None], clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._thread: ThreadPoolExecutor | None = None
        self._waiting = 0
        self._kept: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}

    @property
    def on(self) -> bool:
        return self._path() is not None

    async def ask(self, question: Question, name: Hashable = None, seconds: float = 0.0) -> Any:
        """The answer; of an equal `name`, one that is at most so many seconds old. Raises NoStore, Busy."""
        now = self._clock.now()
        if name is not None and (kept := self._kept.get(name)) is not None and kept[0] > now:
            return await asyncio.shield(kept[1])
        path = self._path()
        if path is None:
            raise NoStore('records are not kept: set telemetry.store to a path, or to "auto"')
        if self._waiting >= MOST_WAITING:
            raise Busy("the database of records is asked a lot at the moment")
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "ui")
        self._waiting += 1
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._thread, self._answer, path, question)
        answer.add_done_callback(self._done)
        if name is not None:
            while len(self._kept) >= MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[name] = now + seconds, answer
        return await asyncio.shield(answer)

    def _done(self, answer: asyncio.Future[Any]) -> None:
        self._waiting -= 1
        if not answer.cancelled():
            answer.exception()  # whoever asked has gone, perhaps

    def _answer(self, path: Path, question: Question) -> Any:
        if not path.exists():
            raise NoStore("nothing is recorded yet")
        over = self._clock.now() + SECONDS
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)) as db:
                db.set_progress_handler(lambda: self._clock.now() > over, _STEPS)
                if version(db) == 0:
                    raise NoStore("nothing is recorded yet")
                return question(db)
        except sqlite3.OperationalError as error:
            if "interrupted" in str(error):
                raise Busy(f"the question took longer than {SECONDS:g} s: ask for less") from None
            raise Busy(f"the database of records cannot be read: {error}") from None
        except (sqlite3.DatabaseError, Foreign) as error:
            raise Busy(f"the database of records cannot be read: {error}") from None

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
