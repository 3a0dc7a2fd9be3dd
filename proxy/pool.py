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
from collections.abc import Callable, Iterable, Mapping, Sequence

from policies import Fleet, PolicyParams, Polled, RequestFacts
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
from policies.progress import ProgressParams, Signs, stuck
from policies.retry import Failure
from policies.state import State
from policies.types import BackendView, ContextEstimate, Tier
from proxy.backend import Backend as Backend
from proxy.backend import BackendSpec as BackendSpec
from proxy.clock import Clock
from proxy.config import ModelRoute
from proxy.upstream import ConnectionPool
from proxy.wire.promtext import EngineMetrics

log = logging.getLogger("tierline.pool")

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
        self.opened: Callable[[str], int] = lambda name: self.backends[name].connections.open_connections
        """Connections to a backend."""
        self.backends = {backend.name: backend for backend in backends}
        self._retired: list[ConnectionPool] = []
        """Of servers that are configured no more, and are still in use."""
        self.places: Mapping[str, tuple[str, ...]] = {}
        """Public name of a model → its backends."""
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

    def configure(
        self,
        backends: Sequence[Backend],
        places: Mapping[str, tuple[str, ...]],
        params: PolicyParams,
        breaker: BreakerParams,
        trial_seconds: float,
        progress: ProgressParams,
    ) -> None:
        """Other backends (`backend.remake`), places (see there) and parameters from now on; what runs is not touched. Who is
        not among them is leaving: it gets nothing new, and is to be dropped once nothing runs there."""
        self._breaker, self._trial_seconds, self._progress = breaker, trial_seconds, progress
        now, before, self.places = self._clock.now(), self.backends, places
        self.backends = {backend.name: backend for backend in backends}
        fresh = []
        for name, backend in self.backends.items():
            old = before.get(name)
            backend.leaving = False
            if old is None or old.spec.server != backend.spec.server:
                fresh.append(name)
                backend.draining = old is not None and old.draining
                backend.state_of = self._state
                backend.doubt(now, breaker.successes_to_return)
            if old is not None and old.connections is not backend.connections:
                self._retired.append(old.connections)
                old.connections.retire()
        for name in before.keys() - self.backends.keys():
            self.backends[name] = before[name]
            before[name].leaving = True
        self._retired = [one for one in self._retired if one.open_connections]
        self._members = [backend.member() for backend in self.backends.values()]
        self.fleet.configure(now, self._members, params, fresh)
        for backend in self.backends.values():
            health = backend.health
            self.fleet.set_state(
                now,
                backend.name,
                healthy=health.healthy or health.last_resort,
                suspect=health.last_resort,
                draining=backend.draining or backend.leaving,
            )

    @property
    def leaving(self) -> list[str]:
        return [name for name, backend in self.backends.items() if backend.leaving]

    def names(self, route: ModelRoute) -> tuple[str, ...]:
        """Who may serve it now, whatever it was when the request came."""
        names = self.places.get(route.name)
        return names if names is not None else self._left(route.backends)

    def renamed(self, model: str, before: tuple[str, ...]) -> tuple[str, ...]:
        """The same, for one that waits: by the public name of its model, and who might serve it until now."""
        names = self.places.get(model)
        return names if names is not None else self._left(before)

    def _left(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Of a model that is no more: what is left of its backends."""
        known = self.backends
        return tuple([name for name in names if name in known and not known[name].leaving])

    async def drop(self, name: str) -> None:
        """Nothing runs any more on one that was leaving."""
        backend = self.backends.pop(name)
        self._members = [other.member() for other in self.backends.values()]
        self.fleet.configure(self._clock.now(), self._members, self.fleet.params)
        await backend.connections.close()

    def largest_window(self, names: Iterable[str]) -> int | None:
        """The largest window known among these backends."""
        windows = [w for name in names if (w := self.backends[name].window_tokens)]
        return max(windows) if windows else None

    async def close(self) -> None:
        for connections in [*self._retired, *(backend.connections for backend in self.backends.values())]:
            await connections.close()

    # -- what requests tell -------------------------------------------------------------------------------------

    def _now(self, before: Backend) -> Backend | None:
        """The one that stands now for the server which a request went to."""
        backend = self.backends.get(before.name)
        return backend if backend is not None and backend.spec.server == before.spec.server else None

    def answered(self, by: Backend) -> None:
        """Whole, to the end."""
        backend = self._now(by)
        if backend is None:
            return
        backend.health = on_success(backend.health)
        backend.answers.add(self._clock.now(), ok=True)

    def failed(self, by: Backend, failure: Failure) -> None:
        """In whatever way; only what the breaker counts is held against it."""
        backend = self._now(by)
        if backend is None or failure not in COUNTED:
            return
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

    def full(self, by: Backend, seconds: float) -> None:
        """It takes no more for so long, it says."""
        if self._now(by) is not None:
            self.fleet.full(self._clock.now(), by.name, seconds)

    def judge(self, name: str, sound: bool) -> None:
        """An answer with tool calls was sound, or not: see `Backend.integrity`."""
        backend = self.backends.get(name)
        if backend is not None:
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
        backend = self.backends[name]
        backend.draining = draining
        self.fleet.set_state(self._clock.now(), name, draining=draining or backend.leaving)
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
                    "connections": self.opened(backend.name),
                    "tool_integrity": round(backend.integrity, 4),
                    "failures_in_a_row": backend.health.failures + backend.health.errors,
                    "predicted_ttft_seconds": view.forecast.ttft if view.forecast is not None else None,
                    "predicted_tpot_seconds": view.forecast.tpot if view.forecast is not None else None,
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
