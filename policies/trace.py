"""What a decision was made from, kept so that it can be explained and made again.

Rules: pure. A `TracingRouter` decides as `Router` does; with `exact`, each decision draws from a seed of its own, which its
trace holds: the same facts, views and seed give the same decision in any process. Nothing is encoded here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from policies.frozen import frozen
from policies.params import RouterParams
from policies.ranking import Ranking
from policies.router import Router
from policies.types import BackendView, Decision, RequestFacts, Tier

_NONE: frozenset[str] = frozenset()


@frozen
class Trace:
    """seed: None where the decision drew from a shared source. unit: of the scores."""

    facts: RequestFacts
    views: tuple[BackendView, ...]
    decision: Decision
    unit: str
    seed: int | None = None
    tried: frozenset[str] = _NONE
    pinned: str | None = None
    larger_than: int | None = None

    def scored(self, router: Router) -> Trace:
        """With the decision made again: the same, and with its scores."""
        return replace(self, decision=self.again(router))

    def with_tier(self, tier: Tier) -> Trace:
        """The same request, had its tier meant something else."""
        return replace(self, facts=replace(self.facts, tier=tier))

    def again(self, router: Router) -> Decision:
        """What this router decides from the same facts, views and seed."""
        return router.choose(
            self.facts,
            self.views,
            Random(self.seed),
            tried=self.tried,
            pinned=self.pinned,
            larger_than=self.larger_than,
        )


class TracingRouter(Router):
    """`take` what a decision was made from; `forget` those that nobody will take."""

    __slots__ = ("_traces", "exact")

    def __init__(
        self, params: RouterParams, policy: str | Ranking = "predicted", *, exact: bool = False
    ) -> None:
        super().__init__(params, policy)
        self.exact = exact
        self._traces: dict[int, Trace] = {}

    def choose(
        self,
        facts: RequestFacts,
        views: Sequence[BackendView],
        rng: Random,
        *,
        tried: frozenset[str] = _NONE,
        pinned: str | None = None,
        larger_than: int | None = None,
    ) -> Decision:
        seed = rng.getrandbits(53) if self.exact else None
        source = rng if seed is None else Random(seed)
        decision = super().choose(facts, views, source, tried=tried, pinned=pinned, larger_than=larger_than)
        # By identity: the trace keeps the decision alive, so the number is its own.
        self._traces[id(decision)] = Trace(
            facts, tuple(views), decision, self.ranking.unit, seed, tried, pinned, larger_than
        )
        return decision

    def take(self, decision: Decision) -> Trace | None:
        trace = self._traces.get(id(decision))
        return trace if trace is not None and trace.decision is decision else None

    def forget(self) -> None:
        self._traces.clear()
