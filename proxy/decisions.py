"""Decisions as plain data: into a record, and back out of one.

Rules: what is written holds everything that the decision was made from; `read` gives the same values again, to the bit.
Fields that a later version adds take their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from policies.trace import Trace
from policies.types import (
    BackendView,
    ChooseReason,
    ContextEstimate,
    Decision,
    Drop,
    DropReason,
    Forecast,
    RequestFacts,
    Slo,
    Spill,
    Tier,
)


def write(trace: Trace) -> dict[str, object]:
    """For orjson, which takes dataclasses as they are."""
    decision = trace.decision
    return {
        "backend": decision.backend,
        "reason": decision.reason,
        "drops": {drop.backend: drop.reason for drop in decision.drops},
        "seed": trace.seed,
        "unit": trace.unit,
        "tried": sorted(trace.tried),
        "pinned": trace.pinned,
        "larger_than": trace.larger_than,
        "facts": trace.facts,
        "views": trace.views,
    }


def read(data: Mapping[str, Any]) -> Trace:
    """Raises KeyError, TypeError or ValueError for what was not written by `write`."""
    reason = data["reason"]
    decision = Decision(
        data["backend"],
        None if reason is None else ChooseReason(reason),
        tuple(Drop(name, DropReason(why)) for name, why in data["drops"].items()),
    )
    return Trace(
        _facts(data["facts"]),
        tuple(_view(view) for view in data["views"]),
        decision,
        data["unit"],
        data["seed"],
        frozenset(data["tried"]),
        data["pinned"],
        data["larger_than"],
    )


def _facts(data: Mapping[str, Any]) -> RequestFacts:
    tier = data["tier"]
    slo = None if tier["slo"] is None else _known(Slo, tier["slo"])
    facts: RequestFacts = _known(
        RequestFacts,
        {
            **data,
            "tier": _known(Tier, {**tier, "slo": slo, "spill": Spill(tier["spill"])}),
            "prompt": _known(ContextEstimate, data["prompt"]),
            "prefix": tuple(data["prefix"]),
        },
    )
    return facts


def _view(data: Mapping[str, Any]) -> BackendView:
    forecast = data["forecast"]
    known = None if forecast is None else _known(Forecast, forecast)
    view: BackendView = _known(BackendView, {**data, "forecast": known})
    return view


def _known(cls: type[Any], data: Mapping[str, Any]) -> Any:
    names = {field.name for field in fields(cls)}
    return cls(**{name: value for name, value in data.items() if name in names})
