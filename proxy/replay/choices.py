"""The recorded decisions made again, by the same policy or by another one.

Rules: each is made from what it was made from then: facts, views, seed. So the answers of the same policy are exact. Those
of another one are exact, too, for the state that the recorded policy had brought about; its own would have differed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from policies.router import Router
from policies.trace import Trace
from policies.types import BackendView, Decision, Tier
from proxy.replay.records import Recorded


@dataclass(frozen=True, slots=True)
class Moved:
    """A request that would have gone elsewhere. Seconds until its first token and its end, as predicted then for the
    two backends; None where a policy without forecasts decided."""

    request_id: str
    was: str | None
    now: str | None
    ttft_was: float | None
    ttft_now: float | None
    finish_was: float | None
    finish_now: float | None


@dataclass(frozen=True, slots=True)
class Choices:
    """decisions: how many were made again. same: with the same backend and reason. cost_was, cost_now: predicted seconds
    of all that could be compared, in all."""

    decisions: int
    same: int
    moved: tuple[Moved, ...]
    cost_was: float
    cost_now: float


def replay(records: Iterable[Recorded], router: Router, tiers: dict[str, Tier] | None = None) -> Choices:
    """`tiers`: in place of those that were recorded, by name."""
    decisions = same = 0
    moved: list[Moved] = []
    was_all = now_all = 0.0
    for record in records:
        for trace in record.traces:
            decisions += 1
            decision = _again(trace, router, tiers)
            if (decision.backend, decision.reason) == (trace.decision.backend, trace.decision.reason):
                same += 1
            views = {view.name: view for view in trace.views}
            was, now = _view(views, trace.decision), _view(views, decision)
            if was is not None and now is not None and was.forecast and now.forecast:
                was_all += was.forecast.cost
                now_all += now.forecast.cost
            if decision.backend != trace.decision.backend:
                moved.append(_moved(record.request_id, trace.decision, decision, was, now))
    return Choices(decisions, same, tuple(moved), was_all, now_all)


def _again(trace: Trace, router: Router, tiers: dict[str, Tier] | None) -> Decision:
    if tiers is not None and (tier := tiers.get(trace.facts.tier.name)) not in (None, trace.facts.tier):
        assert tier is not None
        trace = trace.with_tier(tier)
    return trace.again(router)


def _view(views: dict[str, BackendView], decision: Decision) -> BackendView | None:
    return None if decision.backend is None else views.get(decision.backend)


def _moved(
    ident: str, before: Decision, after: Decision, was: BackendView | None, now: BackendView | None
) -> Moved:
    one = was.forecast if was is not None else None
    other = now.forecast if now is not None else None
    return Moved(
        ident,
        before.backend,
        after.backend,
        one.ttft if one is not None else None,
        other.ttft if other is not None else None,
        one.finish if one is not None else None,
        other.finish if other is not None else None,
    )
