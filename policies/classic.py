"""The policies that everybody knows, beside ours, same interface. And the check of a user's own.

Rules: none of them reads a forecast; all pass the same filters, so none breaks a tier. They send at once: a policy
that does not predict cannot say how long to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import isfinite
from random import Random

from policies.params import RouterParams
from policies.ranking import LEAST_LOAD, PREDICTED, Own, Ranking, ScoreFunction, Views
from policies.types import BackendView, ChooseReason, ContextEstimate, RequestFacts, Score, Tier

Rank = Callable[[RequestFacts, Views, Random], list[float]]


class Classic:
    """One number per backend from what is counted. `term`: what the number is."""

    def __init__(self, name: str, term: str, rank: Rank) -> None:
        self.name, self.unit, self._rank = name, term, rank
        self.__doc__ = rank.__doc__

    def rank(self, facts: RequestFacts, views: Views, params: RouterParams, rng: Random) -> list[float]:
        return self._rank(facts, views, rng)

    def explain(
        self, facts: RequestFacts, views: Views, params: RouterParams, totals: Sequence[float]
    ) -> tuple[Score, ...]:
        return tuple(
            Score(view.name, total, ((self.unit, total),)) for view, total in zip(views, totals, strict=True)
        )

    def reason(
        self, facts: RequestFacts, views: Views, params: RouterParams, chosen: BackendView
    ) -> ChooseReason:
        return ChooseReason.POLICY


def round_robin(facts: RequestFacts, views: Views, rng: Random) -> list[float]:
    """The backend whose last request is the longest ago, counted in requests; new ones first."""
    return [float(view.turn) for view in views]


def least_in_flight(facts: RequestFacts, views: Views, rng: Random) -> list[float]:
    """The fewest requests of ours in flight."""
    return [float(view.in_flight) for view in views]


def power_of_two(facts: RequestFacts, views: Views, rng: Random) -> list[float]:
    """Of two drawn by lot the one with fewer requests in flight; those not drawn rank behind every backend drawn."""
    drawn = rng.sample(range(len(views)), min(2, len(views)))
    return [view.in_flight + (0.0 if i in drawn else 1e6) for i, view in enumerate(views)]


def session_hash(facts: RequestFacts, views: Views, rng: Random) -> list[float]:
    """Rendezvous hashing of the conversation or session: the highest blake2b(name, key) wins, whatever its load.
    Without either, the fewest requests in flight."""
    session = facts.conversation or facts.session
    if session is None:
        return least_in_flight(facts, views, rng)
    key = b"\0" + session.encode("utf-8", "surrogatepass")
    return [
        1.0 - int.from_bytes(blake2b(view.name.encode() + key, digest_size=8).digest(), "big") / 2.0**64
        for view in views
    ]


def static_tier(facts: RequestFacts, views: Views, rng: Random) -> list[float]:
    """Each tier has its backends: the least quality that satisfies it, however busy; among those, in turn.

    The reference ranks last unless it is asked for; of the others the largest KL first, unknown before known.
    Quality steps are worth more than any count of turns."""
    turns = max([view.turn for view in views]) + 1.0
    qualities = sorted({_quality(view) for view in views})
    return [qualities.index(_quality(view)) + view.turn / turns for view in views]


def _quality(view: BackendView) -> float:
    if view.reference:
        return 1.0
    return -1e9 if view.kl_bits is None else -view.kl_bits


CLASSIC: tuple[Ranking, ...] = (
    Classic("round_robin", "turn", round_robin),
    Classic("least_in_flight", "requests in flight", least_in_flight),
    Classic("power_of_two", "requests in flight", power_of_two),
    Classic("session_hash", "hash", session_hash),
    Classic("static_tier", "rank of quality, then turn", static_tier),
)

_ALL: tuple[Ranking, ...] = (PREDICTED, LEAST_LOAD, *CLASSIC)
RANKINGS: dict[str, Ranking] = {ranking.name: ranking for ranking in _ALL}
"""Every policy by its name in the configuration."""


def own_policy(name: str, score: object, unit: object = "score") -> Own:
    """A user's policy after its check; ValueError says what is wrong with it.

    It is asked about a few ordinary situations, signals missing among them, and must answer each with the same named
    finite numbers twice.
    """
    if not callable(score):
        raise ValueError("define `score(facts, backend)`, a function that returns named numbers")
    for facts, view in _SAMPLES:
        answers = [_answer(score, facts, view) for _ in range(2)]
        if answers[0] != answers[1]:
            raise ValueError(f"score() gave {answers[0]} and then {answers[1]} for the same backend")
    return Own(name, score, str(unit))


def _answer(score: ScoreFunction, facts: RequestFacts, view: BackendView) -> dict[str, float]:
    try:
        terms = dict(score(facts, view))
    except Exception as exc:
        raise ValueError(f"score() raised {type(exc).__name__}: {exc}") from exc
    for name, value in terms.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"score() must return names and numbers, not {name!r}: {value!r}")
        if not isfinite(value):
            raise ValueError(f"score() returned {name} = {value}; terms are finite")
    return terms


_FACTS = RequestFacts("model", Tier("fast"), ContextEstimate(1000, 250, 4000), 500)
_SAMPLES = tuple(
    (facts, view)
    for facts in (_FACTS, RequestFacts("model", Tier("exact", reference=True), _FACTS.prompt, 0, "s", True))
    for view in (
        BackendView("idle"),
        BackendView(
            "busy", in_flight=32, in_flight_tokens=10**6, waiting=3, running=32, kv_usage=1.0, polled_age=9.0
        ),
    )
)
