"""Which backend made a stored response: `/v1/responses/{id}` and `previous_response_id` must go back to it.

Bounded: the oldest ids are forgotten first. After a restart nothing is known; then a model with one backend still
works, and another gets an honest 404.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_IDS = 100_000


class Owners:
    __slots__ = ("_backends", "_limit")

    def __init__(self, limit: int = MAX_IDS) -> None:
        self._backends: OrderedDict[str, str] = OrderedDict()
        self._limit = limit

    def learn(self, ident: str, backend: str) -> None:
        if len(ident) > 256:
            return
        self._backends[ident] = backend
        self._backends.move_to_end(ident)
        if len(self._backends) > self._limit:
            self._backends.popitem(last=False)

    def find(self, ident: str) -> str | None:
        return self._backends.get(ident)

    async def catch_up(self) -> bool:
        """Whether something may be known now that was not: learned in another process (`remote`)."""
        return False
