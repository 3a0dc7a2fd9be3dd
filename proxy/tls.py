"""TLS contexts made of files, and made anew when one of the files changes.

Rules
1. Looked at when a context is wanted, at most once in LOOK_SECONDS: a new handshake gets what the files say now, and no
   connection that stands notices.
2. Files that make no context change nothing: the old one stays, which is logged once for each change, and counted. A
   certificate and its key are two files: between the two writes they may not fit, and the next look finds both.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence

from proxy.clock import Clock

log = logging.getLogger("tierline.tls")

LOOK_SECONDS = 1.0

Counted = tuple[str, str, tuple[str, ...], list[tuple[tuple[str, ...], int]]]


class Tls:
    """`make` reads the files. Raises OSError (ssl.SSLError included) if they cannot be used at first."""

    def __init__(
        self, of: str, files: Sequence[str], make: Callable[[], ssl.SSLContext], clock: Clock
    ) -> None:
        self.of = of
        self.loads = self.failures = 0
        self._files = tuple(files)
        self._make = make
        self._clock = clock
        self._seen = self._stamps()
        self._context = make()
        self._look_at = clock.now() + LOOK_SECONDS

    def __call__(self) -> ssl.SSLContext:
        """For a handshake that begins now."""
        if (now := self._clock.now()) >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self.look()
        return self._context

    def look(self) -> None:
        """Read the files again if they changed."""
        stamps = self._stamps()  # before reading: what changes meanwhile is another change
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self._context = self._make()
        except (OSError, ValueError) as error:
            self.failures += 1
            log.error("TLS of %s: the changed files cannot be used, the old ones stay: %s", self.of, error)
            return
        self.loads += 1
        log.warning("TLS of %s: files read again", self.of)

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in self._files)


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def loads_counter(contexts: Iterable[Tls]) -> Iterator[Counted]:
    """For the metrics; nothing where there is no TLS."""
    rows: list[tuple[tuple[str, ...], int]] = []
    for tls in contexts:
        tls.look()
        rows += [((tls.of, "loaded"), tls.loads), ((tls.of, "failed"), tls.failures)]
    if rows:
        text = "Times that changed certificate files were read again, by whose they are and how that went."
        yield "tierline_tls_loads", text, ("of", "outcome"), rows
