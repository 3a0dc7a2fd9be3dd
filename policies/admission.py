"""Whether a request goes now, waits or is turned away. The gate only does what is said here.

Rules: no clock: `now` never goes back. An answer `Go` has begun in the fleet: choice and lease are one step. Whoever
waits gets exactly one further answer, from `advance`, or is withdrawn. Call `advance` after every event of the fleet
and at `next_event_at`.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from policies.fleet import Fleet
from policies.params import PolicyParams
from policies.router import Router
from policies.types import Go, RequestFacts, Shed, ShedReason, Verdict

_NONE: frozenset[str] = frozenset()


class Admission:
    """One line of decisions for one fleet."""

    def __init__(self, fleet: Fleet, router: Router, params: PolicyParams, rng: Random) -> None:
        self._fleet, self._router, self._params, self._rng = fleet, router, params, rng

    def configure(self, now: float, router: Router, params: PolicyParams) -> None:
        """Another policy from now on; who waits stays in line."""
        self._router, self._params = router, params

    def offer(
        self, now: float, id: int, facts: RequestFacts, names: Iterable[str], *, pinned: str | None = None
    ) -> Verdict:
        """A request arrives; `names`: the backends of its model."""
        return self.again(now, id, facts, names, pinned=pinned)

    def again(
        self,
        now: float,
        id: int,
        facts: RequestFacts,
        names: Iterable[str],
        *,
        tried: frozenset[str] = _NONE,
        pinned: str | None = None,
        larger_than: int | None = None,
    ) -> Go | Shed:
        """A further attempt of a request that has been let in: it does not wait again."""
        views = self._fleet.views(now, facts, names)
        decision = self._router.choose(
            facts, views, self._rng, tried=tried, pinned=pinned, larger_than=larger_than
        )
        if decision.backend is None:
            full = decision.only_full()
            return Shed(ShedReason.FULL if full else ShedReason.NO_BACKEND, int(full), decision)
        self._fleet.begin(now, id, decision.backend, facts)
        return Go(decision, next(view for view in views if view.name == decision.backend))

    def advance(self, now: float) -> list[tuple[int, Verdict]]:
        """Those whose wait ends now, in order."""
        return []

    def next_event_at(self) -> float | None:
        """When `advance` has something to say if nothing else happens; None: not before an event."""
        return None

    def withdraw(self, now: float, id: int) -> None:
        """Who waited has left."""

    def waiting(self) -> dict[tuple[str, int], int]:
        """(tier, priority) → how many are in line."""
        return {}
