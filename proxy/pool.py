"""The backends we know, as they are now: connections, health, what they said of themselves; and the fleet that decides.

Rules
1. What runs where and what routing makes of it is the `Fleet`'s, which is pure: here are the objects that are not.
   Every change of health, drain, capacity or load is told to it in the same step, and then to whoever waits (`changed`).
2. Policies never see these objects: `views()` gives them frozen `BackendView`s.
3. Health is `policies.breaker`'s value; here it is only kept, and its changes are told to the log.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from policies import Fleet, Member, PolicyParams, Polled, RequestFacts
from policies.breaker import (
    COUNTED,
    Answers,
    BreakerParams,
    Health,
    HealthState,
    is_outlier,
    may_spare,
    on_failure,
    on_probe,
    on_success,
    on_suspicion,
    on_trial,
)
from policies.profile import Profile
from policies.progress import ProgressParams, Signs, stuck
from policies.retry import Failure
from policies.state import State
from policies.types import BackendView, ContextEstimate, Tier
from proxy.clock import Clock
from proxy.upstream import ConnectionPool
from proxy.wire.promtext import EngineMetrics

log = logging.getLogger("tierline.pool")

DEFAULT_MAX_IN_FLIGHT = 256
"""What vLLM takes at once unless it is told otherwise; it queues what is more."""

DEFAULT_KV_TOKENS = 131072
FIGURES = (
    "queue_seconds",
    "busy",
    "warm_factor",
    "cold_factor",
    "decode_factor",
    "warm_error",
    "cold_error",
    "decode_error",
    "live_conversations",
    "live_tokens",
    "working_set_share",
    "cached_tokens",
    "cache_share",
    "speculation_acceptance",
    "speculation_collapsed",
)
"""What the fleet says of each backend: on the admin page and as gauges."""
_NO_REQUEST = RequestFacts("", Tier(""), ContextEstimate(0, 0, 0), 0)
INTEGRITY_WEIGHT = 0.02
"""Of one answer in a backend's integrity: about the last fifty count."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What the operator configured of a backend. None: what the backend says, else its profile, else a conservative
    default.

    host, port, tls_host, path_prefix: where to connect and what to put before every path. key: bearer for it, secret.
    """

    name: str
    url: str
    host_header: bytes
    path_prefix: bytes
    model: str | None = None
    key: str | None = None
    reference: bool = False
    kl_bits: float | None = None
    window_tokens: int | None = None
    max_in_flight: int | None = None
    kv_tokens: int | None = None
    stream_usage: bool = True
    profile: Profile | None = None
    speculates: bool | None = None
    remote: bool = False
    parser: str = "backend"
    reasoning_parser: str = "backend"
    enforces_choice: bool = False
    history_reasoning: str | None = None

    def __repr__(self) -> str:  # never the key
        return f"<backend {self.name} {self.url}>"


class Backend:
    """One backend, live."""

    __slots__ = (
        "answers",
        "connections",
        "draining",
        "health",
        "integrity",
        "metrics",
        "moved_at",
        "polled_at",
        "served_model",
        "spec",
        "state_of",
        "stuck",
        "window_tokens",
    )

    def __init__(self, spec: BackendSpec, connections: ConnectionPool) -> None:
        self.spec = spec
        self.connections = connections
        self.health = Health()
        self.answers = Answers()
        self.draining = False
        self.metrics: EngineMetrics | None = None
        self.polled_at: float | None = None
        self.moved_at: float | None = None
        """When its token counters were last seen to move, or it to be idle; None: it has no counters that say."""
        self.stuck = False
        """It is in doubt because nothing came of what it did."""
        profile = spec.profile
        self.window_tokens = spec.window_tokens or (profile.window_tokens if profile is not None else None)
        self.served_model = spec.model
        self.state_of: Callable[[str], State | None] = lambda name: None
        self.integrity = 1.0
        """Share of answers with tool calls, the latest weighing most, in which every call came right by itself."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def state(self) -> str:
        """For people and metrics: what its health is, or draining."""
        state = self.health.state
        return "draining" if self.draining and state is HealthState.HEALTHY else state.value

    @property
    def in_flight(self) -> int:
        state = self.state_of(self.name)
        return len(state.running) if state is not None else 0

    @property
    def in_flight_tokens(self) -> int:
        state = self.state_of(self.name)
        return state.in_flight_tokens if state is not None else 0

    def __repr__(self) -> str:
        return f"<{self.name} {self.state} in_flight={self.in_flight} tokens={self.in_flight_tokens}>"

    def member(self) -> Member:
        """What is configured of it, else what it said, else its profile, else conservative."""
        spec, metrics, profile = self.spec, self.metrics, self.spec.profile
        reported = metrics.kv_tokens if metrics is not None else None
        return Member(
            spec.name,
            profile,
            spec.reference,
            spec.kl_bits,
            self.window_tokens,
            spec.max_in_flight
            or (profile.max_num_seqs if profile is not None else 0)
            or DEFAULT_MAX_IN_FLIGHT,
            spec.kv_tokens
            or reported
            or (profile.kv_tokens if profile is not None else 0)
            or DEFAULT_KV_TOKENS,
            spec.speculates,
            spec.remote,
            metrics.block_size if metrics is not None else None,
        )


class Pool:
    """All backends by name. Implements `health.HealthSink` and `admin.PoolAdmin`."""

    def __init__(
        self,
        backends: Iterable[Backend],
        clock: Clock,
        breaker: BreakerParams,
        params: PolicyParams | None = None,
        trial_seconds: float = 10.0,
        progress: ProgressParams | None = None,
    ) -> None:
        self._trial_seconds = trial_seconds
        self._progress = progress or ProgressParams()
        self.streams: Callable[[str], Iterable[float]] = lambda name: ()
        """When each of our streams there that has begun, and whose client reads, was last heard."""
        self.give_up: Callable[[str, float], None] = lambda name, since: None
        """Told of a backend that answers nobody: what was not heard since then is not waited for."""
        self.backends = {backend.name: backend for backend in backends}
        self._clock = clock
        self._breaker = breaker
        self._members = [backend.member() for backend in self.backends.values()]
        self.fleet = Fleet(self._members, params or PolicyParams())
        self.changed: Callable[[], None] = _nothing
        for backend in self.backends.values():
            backend.state_of = self._state

    def __repr__(self) -> str:
        return f"<pool {' '.join(map(repr, self.backends.values()))}>"

    def views(self, names: Iterable[str], facts: RequestFacts = _NO_REQUEST) -> tuple[BackendView, ...]:
        """As they are now."""
        return self.fleet.views(self._clock.now(), facts, names)

    def _state(self, name: str) -> State | None:
        return self.fleet.states.get(name)

    def configure(self, params: PolicyParams) -> None:
        """Another policy from now on; nothing that runs or was learned is touched."""
        self.fleet.configure(self._clock.now(), self._members, params)

    def largest_window(self, names: Iterable[str]) -> int | None:
        """The largest window known among these backends."""
        windows = [w for name in names if (w := self.backends[name].window_tokens)]
        return max(windows) if windows else None

    async def close(self) -> None:
        for backend in self.backends.values():
            await backend.connections.close()

    # -- what requests tell -------------------------------------------------------------------------------------

    def answered(self, name: str) -> None:
        """Whole, to the end."""
        backend = self.backends[name]
        backend.health = on_success(backend.health)
        backend.answers.add(self._clock.now(), ok=True)

    def failed(self, name: str, failure: Failure) -> None:
        """In whatever way; only what the breaker counts is held against it."""
        if failure not in COUNTED:
            return
        backend = self.backends[name]
        before = backend.health
        now = self._clock.now()
        backend.answers.add(now, ok=False)
        peers = [other.answers for other in self.backends.values() if other is not backend]
        outlier = is_outlier(now, backend.answers, peers, self._breaker)
        spare = self._may_spare()
        backend.health = on_failure(before, failure, now, self._breaker, outlier=outlier, spare=spare)
        self._tell(backend, before, failure.value, now)

    def _may_spare(self) -> bool:
        out = sum([not backend.health.healthy for backend in self.backends.values()])
        return may_spare(out, len(self.backends), self._breaker)

    def full(self, name: str, seconds: float) -> None:
        """It takes no more for so long, it says."""
        self.fleet.full(self._clock.now(), name, seconds)

    def judge(self, name: str, sound: bool) -> None:
        """An answer with tool calls was sound, or not: see `Backend.integrity`."""
        backend = self.backends[name]
        backend.integrity += INTEGRITY_WEIGHT * (sound - backend.integrity)

    # -- HealthSink ---------------------------------------------------------------------------------------------

    def polled(self, name: str, metrics: EngineMetrics, now: float) -> None:
        backend = self.backends[name]
        if _moved(backend.metrics, metrics):
            backend.moved_at = now
        backend.metrics, backend.polled_at = metrics, now
        self._found(now)
        self.fleet.polled(now, name, numbers(metrics))
        self.changed()

    def busy(self, name: str) -> bool:
        return self.backends[name].in_flight > 0

    def probe(self, name: str, ok: bool, detail: str, now: float) -> None:
        backend = self.backends[name]
        before = backend.health
        backend.health = on_probe(before, ok, now, self._breaker)
        self._tell(backend, before, detail, now)

    def trial_due(self, name: str) -> float | None:
        """Seconds that a trial may take: what is ahead of it there comes first. None: none is wanted."""
        self._look(name)
        if not (self._breaker.trials and self.backends[name].health.wants_trial):
            return None
        return self._trial_seconds + self.fleet.states[name].ahead

    def _look(self, name: str) -> None:
        """Whether it gets anywhere."""
        backend, now = self.backends[name], self._clock.now()
        before = backend.health
        if before.state is not HealthState.HEALTHY:
            return
        state, known = self.fleet.states[name], now - before.since  # a trial showed that it was well then
        heard, moved = max(self.streams(name), default=None), backend.moved_at
        late, expected = state.waited(now)
        signs = Signs(
            None if heard is None else min(known, now - heard),
            None if moved is None else min(known, now - moved),
            min(known, late),
            expected,
            state.ahead,
        )
        sign = stuck(signs, self._progress)
        if sign is not None:
            backend.health = on_suspicion(before, now, self._breaker, spare=self._may_spare())
            backend.stuck = True
            self._tell(backend, before, sign.value, now)

    def tried(self, name: str, ok: bool, detail: str, now: float) -> None:
        backend = self.backends[name]
        before = backend.health
        backend.health = on_trial(before, ok, now, self._breaker)
        self._tell(backend, before, f"trial: {detail}", now)
        if before.suspect and backend.stuck and not ok:
            self.give_up(name, before.since)

    def tls(self, name: str) -> ssl.SSLContext | bool:
        tls = self.backends[name].connections.tls
        return True if tls is None else tls()

    def model(self, name: str) -> str | None:
        return self.backends[name].served_model

    def discovered(self, name: str, window_tokens: int | None, served_model: str | None) -> None:
        backend = self.backends[name]
        if backend.spec.window_tokens is None and window_tokens:
            backend.window_tokens = window_tokens
        if backend.spec.model is None and served_model:
            backend.served_model = served_model
        self._found(self._clock.now())

    def _found(self, now: float) -> None:
        """A capacity that was not known, or is another one now."""
        members = [backend.member() for backend in self.backends.values()]
        if members != self._members:
            self._members = members
            self.fleet.configure(now, members, self.fleet.params)
            self.changed()

    def _tell(self, backend: Backend, before: Health, why: str, now: float) -> None:
        health = backend.health
        if before.state is not health.state:
            level = logging.INFO if health.state is HealthState.HEALTHY else logging.WARNING
            log.log(level, "backend %s is %s (%s)", backend.name, health.state.value, why)
            if health.healthy and not before.healthy:
                backend.answers = Answers()  # what it was like is not what it is now
            if health.state is HealthState.HEALTHY:
                backend.stuck = False
        if before.state is not health.state or before.guessed is not health.guessed:
            usable = health.healthy or health.last_resort
            self.fleet.set_state(now, backend.name, healthy=usable, suspect=health.last_resort)
            self.changed()

    # -- PoolAdmin ----------------------------------------------------------------------------------------------

    def set_draining(self, name: str, draining: bool) -> None:
        """Raises KeyError for a name that is not configured."""
        self.backends[name].draining = draining
        self.fleet.set_state(self._clock.now(), name, draining=draining)
        self.changed()

    def snapshot(self) -> list[dict[str, object]]:
        """What the admin page and the gauges show, one dict a backend."""
        now = self._clock.now()
        out: list[dict[str, object]] = []
        figures = self.fleet.snapshot(now)
        for view in self.views(self.backends):
            backend = self.backends[view.name]
            metrics = backend.metrics
            out.append(
                {
                    "name": backend.name,
                    "url": backend.spec.url,
                    "state": backend.state,
                    "draining": backend.draining,
                    "reference": view.reference,
                    "kl_bits": view.kl_bits,
                    "model": backend.served_model,
                    "window_tokens": view.window_tokens,
                    "in_flight": view.in_flight,
                    "in_flight_tokens": view.in_flight_tokens,
                    "max_in_flight": view.max_in_flight,
                    "kv_tokens": view.kv_tokens,
                    "running": view.running,
                    "waiting": view.waiting,
                    "kv_usage": view.kv_usage,
                    "polled_age_seconds": round(view.polled_age, 3) if view.polled_age is not None else None,
                    "prefix_hits": metrics.prefix_hits if metrics is not None else None,
                    "prefix_queries": metrics.prefix_queries if metrics is not None else None,
                    "connections": backend.connections.open_connections,
                    "tool_integrity": round(backend.integrity, 4),
                    "failures_in_a_row": backend.health.failures + backend.health.errors,
                    "remote": view.remote,
                    **{key: round(figures[view.name][key], 4) for key in FIGURES},
                }
            )
        return out


def numbers(metrics: EngineMetrics) -> Polled:
    """What the fleet reads of a poll."""
    return Polled(
        metrics.running,
        metrics.waiting,
        metrics.kv_usage,
        _whole(metrics.preemptions),
        _whole(metrics.spec_draft_tokens),
        _whole(metrics.spec_accepted_tokens),
    )


def _moved(before: EngineMetrics | None, now: EngineMetrics) -> bool:
    """Whether its token counters can be seen to move, or it is idle. Only vLLM counts while it generates (and only vLLM
    counts preemptions): others count when a request ends, so that standing still says nothing."""
    if now.preemptions is None or now.generation_tokens is None:
        return False
    if before is None or not now.running:
        return True
    return (before.generation_tokens, before.prompt_tokens) != (now.generation_tokens, now.prompt_tokens)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _nothing() -> None: ...
