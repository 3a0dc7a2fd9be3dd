"""The health of one backend as a state machine: values in, a new value out.

Rules: all transitions live here; the pool only keeps the value. Two states:

    healthy --[failures_to_eject in a row: failed probes and connects]--> ejected
    ejected --[successes_to_return good probes in a row]--> healthy

Only probes bring a backend back, since an ejected one gets no requests. What the client caused (4xx, an
overflow) and what a single answer suffered (cut, late, malformed) never counts; COUNTED is the whole list.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from policies.retry import Failure


class HealthState(StrEnum):
    """Closed; a metric label and a field of the admin page."""

    HEALTHY = "healthy"
    EJECTED = "ejected"


COUNTED: frozenset[Failure] = frozenset({Failure.CONNECT})
"""Failures of requests that count towards ejection; failed probes always do."""


@dataclass(frozen=True, slots=True)
class BreakerParams:
    """failures_to_eject: in a row, while healthy. successes_to_return: good probes in a row, once ejected."""

    failures_to_eject: int = 3
    successes_to_return: int = 2

    def __post_init__(self) -> None:
        if self.failures_to_eject < 1:
            raise ValueError("failures_to_eject must be 1 or more")
        if self.successes_to_return < 1:
            raise ValueError("successes_to_return must be 1 or more")


@dataclass(frozen=True, slots=True)
class Health:
    """since: when the state was entered, seconds. failures, successes: in a row, since then.

    A backend starts healthy: it gets requests before its first probe, and loses them by failing.
    """

    state: HealthState = HealthState.HEALTHY
    since: float = 0.0
    failures: int = 0
    successes: int = 0

    @property
    def healthy(self) -> bool:
        return self.state is HealthState.HEALTHY


def on_success(health: Health) -> Health:
    """A request was answered, with whatever status. Ends a row of failures; never ends an ejection."""
    if health.healthy and health.failures:
        return Health(since=health.since)
    return health


def on_failure(health: Health, failure: Failure, now: float, params: BreakerParams) -> Health:
    """A request failed. Same value unless the failure is COUNTED."""
    return _failed(health, now, params) if failure in COUNTED else health


def on_probe(health: Health, ok: bool, now: float, params: BreakerParams) -> Health:
    """A probe came back, good or bad."""
    if not ok:
        return _failed(health, now, params)
    if health.healthy:
        return on_success(health)
    if health.successes + 1 >= params.successes_to_return:
        return Health(since=now)
    return Health(HealthState.EJECTED, health.since, successes=health.successes + 1)


def _failed(health: Health, now: float, params: BreakerParams) -> Health:
    if not health.healthy:
        return Health(HealthState.EJECTED, health.since) if health.successes else health
    if health.failures + 1 >= params.failures_to_eject:
        return Health(HealthState.EJECTED, since=now)
    return Health(since=health.since, failures=health.failures + 1)
