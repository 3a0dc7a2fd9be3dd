"""Which backend made a stored response, and for whom: `/v1/responses/{id}` and `previous_response_id` must go back to it,
and nobody else may.

Rules
1. A response is its tenant's. For anybody else it is not there, and neither is one of which nothing is known: where keys are
   asked for, an id alone opens nothing. Where none are, everything is everybody's.
2. The first owner stays: an id that is learned once more, for somebody else, is a forgery.
3. Bounded: the oldest ids are forgotten first. After a restart nothing is known; then, without keys, a model with one
   backend still works, and all else is an honest 404.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_IDS = 100_000


class Owners:
    """whose: `Caller.whose`, of who asks; None where no key is asked for."""

    __slots__ = ("_known", "_limit")

    def __init__(self, limit: int = MAX_IDS) -> None:
        self._known: OrderedDict[str, tuple[str, str | None]] = OrderedDict()
        self._limit = limit

    def learn(self, ident: str, backend: str, whose: str | None = None) -> None:
        known = self._known.get(ident)
        if len(ident) > 256 or (known is not None and known[1] != whose):
            return
        self._known[ident] = backend, whose
        self._known.move_to_end(ident)
        if len(self._known) > self._limit:
            self._known.popitem(last=False)

    def find(self, ident: str) -> str | None:
        """The backend; None: nothing is known."""
        known = self._known.get(ident)
        return known[0] if known is not None else None

    def opens(self, ident: str, whose: str | None) -> bool:
        """Whether it may be read, deleted or gone on from."""
        return whose is None or self._known.get(ident, (None, None))[1] == whose

    def taken(self, ident: str, whose: str | None) -> bool:
        """Whether somebody else has a response of this id."""
        return ident in self._known and not self.opens(ident, whose)

    async def catch_up(self) -> bool:
        """Whether something may be known now that was not: learned in another process (`remote`)."""
        return False
