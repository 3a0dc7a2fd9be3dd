"""The health of one backend as a state machine: values in, a new value out. What requests met (passive) and what probes
and trials found (active) go into the same one.

    healthy   --[connects and probes that failed, in a row]--> ejected
    healthy   --[answers that failed, in a row; no progress]--> suspect: gets what no other can take, until the trial
    healthy   --[an outlier: fails far more often than its peers]--> ejected
    suspect   --[trial good]--> healthy     --[trial bad]--> ejected
    healthy   --[answers that failed in a row, again, and none between that did not]--> ejected
    ejected   --[its time is over, good probes in a row]--> healthy, or returning if it had been doubted
    returning --[trial good]--> healthy     --[trial bad]--> ejected, for twice as long

A probe asks whether the server is there, a trial (a request for one token) whether it can answer. A row of failed answers
alone ejects nobody: it may be the requests, and then every backend would go in turn.

Rules: all transitions live here; the pool only keeps the value. Only probes and trials bring a backend back, since an
ejected one gets no requests. What the client caused (4xx, an overflow) and what a busy backend said (429) never
counts; COUNTED is the whole list. What is only inferred (a row, an outlier) ejects no more than a share of the pool
(`spare`), and who is out for that alone (`guessed`) still gets what would else be refused; what is certain (a refused
connection, a failed probe or trial) always does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from math import exp

from policies.frozen import frozen
from policies.retry import Failure


class HealthState(StrEnum):
    """Closed; a metric label and a field of the admin page. Of a circuit breaker: closed, closed, open, half-open."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    EJECTED = "ejected"
    RETURNING = "returning"


COUNTED: frozenset[Failure] = frozenset(
    {Failure.CONNECT, Failure.ERROR, Failure.TIMEOUT, Failure.CUT, Failure.MALFORMED}
)
"""Failures of requests that count against a backend; failed probes and trials always do."""
CERTAIN = frozenset({Failure.CONNECT})
"""Those that are the backend's whatever the request."""
FADE_SECONDS = 30.0
"""Over which answers count for the comparison with peers."""


@dataclass(frozen=True, slots=True)
class BreakerParams:
    """failures_to_eject: in a row, while healthy. successes_to_return: good probes in a row, once ejected.
    eject_seconds: how long a backend stays out at least that was ejected for its answers; doubled each time that it comes
    back and fails again, up to most_eject_seconds. ejected_share: of the pool that may be out for what is inferred.
    outlier_margin: by how much its share of failed answers exceeds its peers'; outlier_answers: seen before that counts.
    trials: whether it may be asked for one token to see whether it can answer.
    """

    failures_to_eject: int = 3
    successes_to_return: int = 2
    eject_seconds: float = 5.0
    most_eject_seconds: float = 60.0
    ejected_share: float = 0.5
    outlier_margin: float = 0.3
    outlier_answers: int = 10
    trials: bool = True

    def __post_init__(self) -> None:
        for name in ("failures_to_eject", "successes_to_return", "outlier_answers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more")
        for name in ("eject_seconds", "most_eject_seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more")
        for name in ("ejected_share", "outlier_margin"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1")


@frozen
class Health:
    """since: when the state was entered, until: when it may return at the earliest, seconds. failures: certain ones in a
    row (connects and probes), errors: answers that failed in a row, successes: good probes in a row, once ejected.
    doubts: how often it was doubted since it last answered a request. guessed: it is out for what was only inferred.

    A backend starts healthy: it gets requests before its first probe, and loses them by failing.
    """

    state: HealthState = HealthState.HEALTHY
    since: float = 0.0
    failures: int = 0
    successes: int = 0
    errors: int = 0
    doubts: int = 0
    until: float = 0.0
    guessed: bool = False

    @property
    def healthy(self) -> bool:
        """May get requests, if only those that no other can take."""
        return self.state is HealthState.HEALTHY or self.state is HealthState.SUSPECT

    @property
    def suspect(self) -> bool:
        return self.state is HealthState.SUSPECT

    @property
    def last_resort(self) -> bool:
        """Gets what no other can take: in doubt, or out on a guess. An attempt there beats a refusal."""
        return self.suspect or self.guessed

    @property
    def wants_trial(self) -> bool:
        return self.state is HealthState.SUSPECT or self.state is HealthState.RETURNING


def on_success(health: Health) -> Health:
    """A request was answered, whole. Ends a row of failures and all doubts; never ends an ejection or a suspicion: an
    answer that began before does not say what comes next."""
    if health.state is HealthState.HEALTHY:
        return Health(since=health.since) if health.failures or health.errors or health.doubts else health
    return replace(health, failures=0, errors=0) if health.suspect else health


def on_failure(
    health: Health,
    failure: Failure,
    now: float,
    params: BreakerParams,
    *,
    outlier: bool = False,
    spare: bool = True,
) -> Health:
    """A request failed. Same value unless the failure is COUNTED. outlier: it fails far more often than its peers.
    spare: one more may be out for what is only inferred."""
    if failure not in COUNTED:
        return health
    if failure in CERTAIN:
        return _failed(health, now, params)
    if not health.healthy:
        return health
    health = replace(health, errors=health.errors + 1)
    if outlier and spare:
        return _eject(health, now, params, guessed=True)
    if health.errors < params.failures_to_eject or health.suspect:
        return health
    if spare and (health.doubts or not params.trials):
        return _eject(health, now, params, guessed=True)  # a good trial did not help
    return Health(HealthState.SUSPECT, now, doubts=health.doubts + 1)


def on_suspicion(health: Health, now: float, params: BreakerParams, *, spare: bool = True) -> Health:
    """Nothing comes of what it does. A good trial refutes that, however often: it may be one stream only."""
    if health.state is not HealthState.HEALTHY:
        return health
    if spare and not params.trials:
        return _eject(health, now, params, guessed=True)
    return Health(HealthState.SUSPECT, now, errors=health.errors, doubts=max(1, health.doubts))


def on_probe(health: Health, ok: bool, now: float, params: BreakerParams) -> Health:
    """A probe came back, good or bad."""
    if not ok:
        return _failed(health, now, params)
    match health.state:
        case HealthState.HEALTHY:
            return replace(health, failures=0) if health.failures else health
        case HealthState.SUSPECT if params.trials:
            return replace(health, failures=0) if health.failures else health
        case HealthState.RETURNING:
            return health
        case HealthState.EJECTED if now < health.until:
            return health
    if health.successes + 1 < params.successes_to_return:
        return replace(health, successes=health.successes + 1)
    if health.doubts and params.trials:
        return Health(HealthState.RETURNING, now, doubts=health.doubts)
    return Health(since=now, doubts=health.doubts)


def on_trial(health: Health, ok: bool, now: float, params: BreakerParams) -> Health:
    """A trial that was wanted came back, good or bad."""
    if not health.wants_trial:
        return health
    return Health(since=now, doubts=health.doubts) if ok else _eject(health, now, params)


def _failed(health: Health, now: float, params: BreakerParams) -> Health:
    """A certain failure. What was only inferred before is not forgotten by it."""
    if health.state is HealthState.EJECTED:
        return replace(health, successes=0, guessed=False) if health.successes or health.guessed else health
    if health.failures + 1 >= params.failures_to_eject or health.state is HealthState.RETURNING:
        return Health(HealthState.EJECTED, now, doubts=health.doubts)
    return replace(health, failures=health.failures + 1)


def _eject(health: Health, now: float, params: BreakerParams, *, guessed: bool = False) -> Health:
    """For what its answers were: for a while, twice as long each time that it was in doubt before."""
    doubts = health.doubts if health.suspect else health.doubts + 1
    seconds = min(params.most_eject_seconds, params.eject_seconds * 2.0 ** min(doubts - 1, 30))
    return Health(HealthState.EJECTED, now, doubts=doubts, until=now + seconds, guessed=guessed)


class Answers:
    """How many requests of late a backend answered, and how many of them failed by its fault; fading counts."""

    __slots__ = ("_at", "failed", "total")

    def __init__(self) -> None:
        self.total = self.failed = self._at = 0.0

    def add(self, now: float, *, ok: bool) -> None:
        self.fade(now)
        self.total += 1.0
        if not ok:
            self.failed += 1.0

    def fade(self, now: float) -> None:
        if now > self._at:
            share = exp((self._at - now) / FADE_SECONDS)
            self.total *= share
            self.failed *= share
            self._at = now


def is_outlier(now: float, own: Answers, peers: Iterable[Answers], params: BreakerParams) -> bool:
    """It fails more often than its peers, by the margin. Requests that fail everywhere make nobody an outlier; without
    peers that answered enough, nobody is."""
    own.fade(now)
    if own.total < params.outlier_answers:
        return False
    total = failed = 0.0
    for answers in peers:
        answers.fade(now)
        total += answers.total
        failed += answers.failed
    if total < params.outlier_answers:
        return False
    return own.failed / own.total - failed / total >= params.outlier_margin


def may_spare(out: int, pool: int, params: BreakerParams) -> bool:
    """Whether one more of `pool` backends may be ejected for what is only inferred, with `out` of them out already."""
    return out + 1 <= params.ejected_share * pool
