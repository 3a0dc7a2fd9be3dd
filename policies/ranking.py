"""What a policy is: a number for every backend that may serve, the lowest wins.

Rules: a ranking sees only what the filters left. `rank` is asked for every request, so it makes floats and nothing
else; `explain` is asked when somebody wants to know, and its terms add up to what `rank` said. Both are pure: a draw
comes from `rng` and is part of the totals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from random import Random
from typing import Protocol

from policies.params import RouterParams
from policies.scorers import SCORERS, home
from policies.types import BackendView, ChooseReason, RequestFacts, Score

Views = Sequence[BackendView]


class Ranking(Protocol):
    """name: in configuration, metrics and records. unit: of every total."""

    name: str
    unit: str

    def rank(self, facts: RequestFacts, views: Views, params: RouterParams, rng: Random) -> list[float]:
        """One total per view; lower is better."""
        ...

    def explain(
        self, facts: RequestFacts, views: Views, params: RouterParams, totals: Sequence[float]
    ) -> tuple[Score, ...]:
        """The same totals with their named terms."""
        ...

    def reason(
        self, facts: RequestFacts, views: Views, params: RouterParams, chosen: BackendView
    ) -> ChooseReason:
        """Why the first of several was first."""
        ...


class LeastLoad:
    """Shares of capacity: see `scorers`. Sessions stay at their rendezvous home unless that is busier."""

    name = "least_load"
    unit = "share of capacity"

    def rank(self, facts: RequestFacts, views: Views, params: RouterParams, rng: Random) -> list[float]:
        own = self._own(facts, views, params)
        return [sum([scorer(facts, view, params, own) for _, scorer in SCORERS]) for view in views]

    def explain(
        self, facts: RequestFacts, views: Views, params: RouterParams, totals: Sequence[float]
    ) -> tuple[Score, ...]:
        own = self._own(facts, views, params)
        return tuple(
            Score(
                view.name, total, tuple((name, scorer(facts, view, params, own)) for name, scorer in SCORERS)
            )
            for view, total in zip(views, totals, strict=True)
        )

    def reason(
        self, facts: RequestFacts, views: Views, params: RouterParams, chosen: BackendView
    ) -> ChooseReason:
        at_home = chosen.name == self._own(facts, views, params)
        return ChooseReason.SESSION if at_home else ChooseReason.LEAST_LOAD

    def _own(self, facts: RequestFacts, views: Views, params: RouterParams) -> str | None:
        if facts.session is None or not params.affinity_weight:
            return None
        return home(facts.session, [view.name for view in views])


LEAST_LOAD = LeastLoad()


class Predicted:
    """queue + prefill + decode + harm + demotion, all in seconds, as the fleet forecasts them: see `Forecast`.

    What a backend has cached is in `prefill`, so a conversation stays where it is warm until the wait there exceeds
    what the cache saves. A view without forecast: all are ranked by `least_load`.
    """

    name = "predicted"
    unit = "s"

    def rank(self, facts: RequestFacts, views: Views, params: RouterParams, rng: Random) -> list[float]:
        totals = []
        for view in views:
            f = view.forecast
            if f is None:
                return LEAST_LOAD.rank(facts, views, params, rng)
            totals.append(f.queue + f.prefill + f.decode + f.harm + f.demotion)
        return totals

    def explain(
        self, facts: RequestFacts, views: Views, params: RouterParams, totals: Sequence[float]
    ) -> tuple[Score, ...]:
        scores = []
        for view, total in zip(views, totals, strict=True):
            f = view.forecast
            if f is None:
                return LEAST_LOAD.explain(facts, views, params, totals)
            terms = (
                ("queue", f.queue),
                ("prefill", f.prefill),
                ("decode", f.decode),
                ("harm", f.harm),
                ("demotion", f.demotion),
            )
            scores.append(Score(view.name, total, terms))
        return tuple(scores)

    def reason(
        self, facts: RequestFacts, views: Views, params: RouterParams, chosen: BackendView
    ) -> ChooseReason:
        if any(view.forecast is None for view in views):
            return LEAST_LOAD.reason(facts, views, params, chosen)
        warm = chosen.cached_tokens > 0 and 2 * chosen.cached_tokens >= facts.prompt.tokens
        return ChooseReason.PREFIX if warm else ChooseReason.SOONEST


PREDICTED = Predicted()

ScoreFunction = Callable[[RequestFacts, BackendView], Mapping[str, float]]


class Own:
    """A user's policy: `score(facts, backend)` gives named terms in one unit; the lowest sum wins.

    A term that is no finite number is the user's fault and must not take the request down: it counts as `WORST`.
    """

    WORST = 1e9

    def __init__(self, name: str, score: ScoreFunction, unit: str = "score") -> None:
        self.name, self.unit, self._score = name, unit, score

    def rank(self, facts: RequestFacts, views: Views, params: RouterParams, rng: Random) -> list[float]:
        return [sum(self._terms(facts, view).values()) for view in views]

    def explain(
        self, facts: RequestFacts, views: Views, params: RouterParams, totals: Sequence[float]
    ) -> tuple[Score, ...]:
        return tuple(
            Score(view.name, total, tuple(self._terms(facts, view).items()))
            for view, total in zip(views, totals, strict=True)
        )

    def reason(
        self, facts: RequestFacts, views: Views, params: RouterParams, chosen: BackendView
    ) -> ChooseReason:
        return ChooseReason.POLICY

    def _terms(self, facts: RequestFacts, view: BackendView) -> dict[str, float]:
        try:
            terms = {str(name): float(value) for name, value in self._score(facts, view).items()}
        except Exception:
            return {"failed": self.WORST}
        return {name: value if isfinite(value) else self.WORST for name, value in terms.items()}
