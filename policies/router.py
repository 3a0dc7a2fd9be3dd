"""Choosing a backend: filter, rank, pick. The one place where the three meet.

Rules: pure; `rng` is an argument and only breaks ties (and draws where a policy draws), so that equal backends share
the work whatever their order in the config. `choose` sees a snapshot: the caller takes the lease with no await in
between. The `Decision` holds every reason and every term, so that it can be explained and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from policies.classic import RANKINGS
from policies.filters import drop_reason
from policies.params import RouterParams
from policies.ranking import Ranking
from policies.types import (
    LOAD_REASONS,
    BackendView,
    ChooseReason,
    Decision,
    Drop,
    DropReason,
    RequestFacts,
    Score,
    Spill,
)

__all__ = ["Router", "RouterParams"]

_TIE = 1e-9
"""Totals closer than this are equal: the order of float additions must not decide."""

_NONE_TRIED: frozenset[str] = frozenset()
_DOUBTS = frozenset({DropReason.COLLAPSED, DropReason.SUSPECT})


class Router:
    """The first of a policy's ranking among the backends that may serve. `policy`: a name of RANKINGS, or a ranking."""

    __slots__ = ("params", "ranking")

    def __init__(self, params: RouterParams, policy: str | Ranking = "predicted") -> None:
        self.params = params
        self.ranking = RANKINGS[policy] if isinstance(policy, str) else policy

    def __repr__(self) -> str:
        return f"Router({self.params}, {self.ranking.name!r})"

    def choose(
        self,
        facts: RequestFacts,
        views: Sequence[BackendView],
        rng: Random,
        *,
        tried: frozenset[str] = _NONE_TRIED,
        pinned: str | None = None,
        larger_than: int | None = None,
    ) -> Decision:
        """Where `facts` goes, given `views` of the model's backends.

        tried: backends that failed this request already, dropped. pinned: the one backend that holds what
        the request refers to; the others are dropped, and the filters still judge it. larger_than: only
        windows known to be larger than this many tokens (the retry after a context overflow).
        """
        params = self.params
        drops: list[Drop] = []
        left: list[BackendView] = []
        again = bool(tried) or pinned is not None or larger_than is not None
        for view in views:
            reason = _attempt_drop(view, tried, pinned, larger_than) if again else None
            if reason is None:
                reason = drop_reason(facts, view, params)
            if reason is None:
                left.append(view)
            else:
                drops.append(Drop(view.name, reason))
        if not left:
            left = _doubtful_but_there(facts, views, drops, params)
        left = _reserve(facts, left, drops)
        if not left:
            return Decision(None, None, tuple(drops))
        if len(left) == 1:
            chosen, totals = left[0], self.ranking.rank(facts, left, params, rng)
        else:
            totals = self.ranking.rank(facts, left, params, rng)
            best = min(totals) + _TIE
            ties = [view for view, total in zip(left, totals, strict=True) if total <= best]
            chosen = ties[0] if len(ties) == 1 else ties[rng.randrange(len(ties))]
        if pinned is not None:
            why = ChooseReason.PINNED
        elif larger_than is not None:
            why = ChooseReason.LARGER_WINDOW
        elif tried:
            why = ChooseReason.RETRY
        elif chosen.remote:
            why = ChooseReason.LAST_RESORT
        elif len(left) == 1:
            why = ChooseReason.ONLY
        else:
            why = self.ranking.reason(facts, left, params, chosen)

        def scores() -> tuple[Score, ...]:
            return self.ranking.explain(facts, left, params, totals)

        return Decision(chosen.name, why, tuple(drops), scores)


def _attempt_drop(
    view: BackendView, tried: frozenset[str], pinned: str | None, larger_than: int | None
) -> DropReason | None:
    """What this attempt, rather than the request, holds against a backend."""
    if pinned is not None and view.name != pinned:
        return DropReason.PINNED_ELSEWHERE
    if view.name in tried:
        return DropReason.TRIED
    if larger_than is not None and (view.window_tokens is None or view.window_tokens <= larger_than):
        return DropReason.PROMPT_TOO_LONG
    return None


def _doubtful_but_there(
    facts: RequestFacts, views: Sequence[BackendView], drops: list[Drop], params: RouterParams
) -> list[BackendView]:
    """Those dropped for nothing but a doubt, when no other can take the request now.

    A collapse: slow beats an error, or a wait. A suspicion is over in a moment: who waits for a place elsewhere waits on.
    """
    doubted = {drop.backend for drop in drops if drop.reason in _DOUBTS}
    if not doubted:
        return []
    left, others = [], {}
    for view in views:
        if view.name in doubted:
            reason = drop_reason(facts, replace(view, collapsed=False, suspect=False), params)
            if reason is None:
                left.append(view)
            else:
                others[view.name] = reason  # what stands in the way besides
    trusted = [view for view in left if not view.suspect]
    if not trusted and any(drop.reason in LOAD_REASONS for drop in drops):
        return []
    left = trusted or left
    names = {view.name for view in left}
    drops[:] = [
        Drop(drop.backend, others.get(drop.backend, drop.reason) if not left else drop.reason)
        for drop in drops
        if drop.backend not in names
    ]
    return left


def _reserve(facts: RequestFacts, left: list[BackendView], drops: list[Drop]) -> list[BackendView]:
    """Keeps remotes, and with `spill = "full"` the reference, for when no other can take the request.

    A backend of one's own that is merely held will have room: a remote is no reason not to wait for it.
    """
    if not left:
        return left
    if any(view.remote for view in left):
        own = [view for view in left if not view.remote]
        if own or any(drop.reason is DropReason.HELD for drop in drops):
            drops += [Drop(view.name, DropReason.REMOTE) for view in left if view.remote]
            left = own
    tier = facts.tier
    if tier.spill is Spill.FULL and not tier.reference:
        others = [view for view in left if not view.reference]
        if others:
            drops += [Drop(view.name, DropReason.SPILL) for view in left if view.reference]
            left = others
    return left
