"""Choosing a backend: filter, score, pick. The one place where the three meet.

Rules: pure; `rng` is an argument and only breaks ties, so that equal backends share the work whatever their
order in the config. `choose` sees a snapshot: the caller takes the lease with no await in between. The
`Decision` holds every reason and every term, so that it can be explained and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from policies.filters import drop_reason
from policies.params import RouterParams
from policies.scorers import SCORERS, home
from policies.types import BackendView, ChooseReason, Decision, Drop, DropReason, RequestFacts, Score

__all__ = ["Router", "RouterParams"]

_TIE = 1e-9
"""Loads closer than this are equal: the order of float additions must not decide."""

_NONE_TRIED: frozenset[str] = frozenset()


class Router:
    """Least predicted load among the backends that may serve; sessions stay where they are."""

    __slots__ = ("params",)

    def __init__(self, params: RouterParams) -> None:
        self.params = params

    def __repr__(self) -> str:
        return f"Router({self.params})"

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
            return Decision(None, None, tuple(drops))
        own = None
        if facts.session is not None and params.affinity_weight:
            own = home(facts.session, [view.name for view in left])
        scores = _scores(facts, left, params, own)
        backend = _pick(scores, rng)
        if pinned is not None:
            why = ChooseReason.PINNED
        elif larger_than is not None:
            why = ChooseReason.LARGER_WINDOW
        elif tried:
            why = ChooseReason.RETRY
        elif len(left) == 1:
            why = ChooseReason.ONLY
        else:
            why = ChooseReason.SESSION if backend == own else ChooseReason.LEAST_LOAD
        return Decision(backend, why, tuple(drops), tuple(scores))


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


def _scores(
    facts: RequestFacts, views: Sequence[BackendView], params: RouterParams, own: str | None
) -> list[Score]:
    scores = []
    for view in views:
        total = 0.0
        terms = []
        for name, scorer in SCORERS:
            value = scorer(facts, view, params, own)
            total += value
            terms.append((name, value))
        scores.append(Score(view.name, total, tuple(terms)))
    return scores


def _pick(scores: Sequence[Score], rng: Random) -> str:
    """The lowest total; among equals, one at random."""
    if len(scores) == 1:
        return scores[0].backend
    best = min([score.total for score in scores]) + _TIE
    ties = [score.backend for score in scores if score.total <= best]
    return ties[0] if len(ties) == 1 else ties[rng.randrange(len(ties))]
