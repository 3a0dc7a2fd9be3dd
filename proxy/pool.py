"""The backends we know, as they are now: health, load, what they said of themselves. And the leases on them.

Rules
1. In-flight changes only through a `Lease`, taken in the same synchronous step as the choice and released exactly
   once, on every kind of end.
2. Policies never see these objects: `views()` gives them frozen `BackendView`s.
3. Health is `policies.breaker`'s value; here it is only kept, and its changes are told to the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from policies.breaker import BreakerParams, Health, HealthState, on_failure, on_probe, on_success
from policies.profile import Profile
from policies.retry import Failure
from policies.types import BackendView
from proxy.clock import Clock
from proxy.upstream import ConnectionPool
from proxy.wire.promtext import EngineMetrics
from proxy.wire.toolevents import Counters

log = logging.getLogger("tierline.pool")

DEFAULT_MAX_IN_FLIGHT = 32
DEFAULT_KV_TOKENS = 131072
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
    parser: str = "backend"
    reasoning_parser: str = "backend"
    enforces_choice: bool = False
    history_reasoning: str | None = None

    def __repr__(self) -> str:  # never the key
        return f"<backend {self.name} {self.url}>"


class Backend:
    """One backend, live."""

    __slots__ = (
        "_kv_tokens",
        "_max_in_flight",
        "connections",
        "draining",
        "health",
        "in_flight",
        "in_flight_tokens",
        "integrity",
        "metrics",
        "polled_at",
        "served_model",
        "spec",
        "window_tokens",
    )

    def __init__(self, spec: BackendSpec, connections: ConnectionPool) -> None:
        self.spec = spec
        self.connections = connections
        self.health = Health()
        self.draining = False
        self.in_flight = 0
        self.in_flight_tokens = 0
        self.metrics: EngineMetrics | None = None
        self.polled_at: float | None = None
        profile = spec.profile
        self.window_tokens = spec.window_tokens or (profile.window_tokens if profile is not None else None)
        self._kv_tokens = (profile.kv_tokens if profile is not None else 0) or DEFAULT_KV_TOKENS
        seats = profile.max_num_seqs if profile is not None else 0
        self._max_in_flight = spec.max_in_flight or seats or DEFAULT_MAX_IN_FLIGHT
        self.served_model = spec.model
        self.integrity = 1.0
        """Share of answers with tool calls, the latest weighing most, in which every call came right by itself."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def state(self) -> str:
        """For people and metrics: draining, ejected or healthy."""
        if self.health.state is HealthState.EJECTED:
            return "ejected"
        return "draining" if self.draining else "healthy"

    def __repr__(self) -> str:
        return f"<{self.name} {self.state} in_flight={self.in_flight} tokens={self.in_flight_tokens}>"

    def view(self, now: float) -> BackendView:
        spec, metrics = self.spec, self.metrics
        return BackendView(
            spec.name,
            self.health.healthy,
            self.draining,
            spec.reference,
            spec.kl_bits,
            self.window_tokens,
            self._max_in_flight,
            spec.kv_tokens or (metrics.kv_tokens if metrics is not None else None) or self._kv_tokens,
            self.in_flight,
            self.in_flight_tokens,
            metrics.running if metrics is not None else None,
            metrics.waiting if metrics is not None else None,
            metrics.kv_usage if metrics is not None else None,
            now - self.polled_at if self.polled_at is not None else None,
        )


class Lease:
    """One request on one backend. `release` may be called any number of times; the first one counts."""

    __slots__ = ("_held", "backend", "tokens")

    def __init__(self, backend: Backend, tokens: int) -> None:
        self.backend = backend
        self.tokens = tokens
        self._held = True
        backend.in_flight += 1
        backend.in_flight_tokens += tokens

    def release(self) -> None:
        if self._held:
            self._held = False
            self.backend.in_flight -= 1
            self.backend.in_flight_tokens -= self.tokens


class Pool:
    """All backends by name. Implements `health.HealthSink` and `admin.PoolAdmin`."""

    def __init__(self, backends: Iterable[Backend], clock: Clock, breaker: BreakerParams) -> None:
        self.backends = {backend.name: backend for backend in backends}
        self._clock = clock
        self._breaker = breaker

    def __repr__(self) -> str:
        return f"<pool {' '.join(map(repr, self.backends.values()))}>"

    def views(self, names: Iterable[str], now: float) -> tuple[BackendView, ...]:
        backends = self.backends
        return tuple([backends[name].view(now) for name in names])

    def largest_window(self, names: Iterable[str]) -> int | None:
        """The largest window known among these backends."""
        windows = [w for name in names if (w := self.backends[name].window_tokens)]
        return max(windows) if windows else None

    def lease(self, name: str, tokens: int) -> Lease:
        return Lease(self.backends[name], tokens)

    async def close(self) -> None:
        for backend in self.backends.values():
            await backend.connections.close()

    # -- what requests tell -------------------------------------------------------------------------------------

    def answered(self, name: str) -> None:
        backend = self.backends[name]
        backend.health = on_success(backend.health)

    def failed(self, name: str, failure: Failure) -> None:
        backend = self.backends[name]
        before = backend.health
        backend.health = on_failure(before, failure, self._clock.now(), self._breaker)
        self._tell(backend, before, failure.value)

    def judge(self, name: str | None, counts: Counters | None, violations: int) -> None:
        """An answer with tool calls was sound, or not: see `Backend.integrity`."""
        if name is None or counts is None or not counts.calls():
            return
        backend = self.backends[name]
        wrong = (
            counts.cut
            + counts.failures
            + counts.duplicates
            + counts.suspected
            + counts.undeclared
            + violations
        )
        wrong += counts.repaired_syntax + counts.repaired_arguments
        backend.integrity += INTEGRITY_WEIGHT * ((not wrong) - backend.integrity)

    # -- HealthSink ---------------------------------------------------------------------------------------------

    def polled(self, name: str, metrics: EngineMetrics, now: float) -> None:
        backend = self.backends[name]
        backend.metrics, backend.polled_at = metrics, now

    def probe(self, name: str, ok: bool, detail: str, now: float) -> None:
        backend = self.backends[name]
        before = backend.health
        backend.health = on_probe(before, ok, now, self._breaker)
        self._tell(backend, before, detail)

    def discovered(self, name: str, window_tokens: int | None, served_model: str | None) -> None:
        backend = self.backends[name]
        if backend.spec.window_tokens is None and window_tokens:
            backend.window_tokens = window_tokens
        if backend.spec.model is None and served_model:
            backend.served_model = served_model

    def _tell(self, backend: Backend, before: Health, why: str) -> None:
        if before.state is not backend.health.state:
            level = logging.WARNING if before.healthy else logging.INFO
            log.log(level, "backend %s is %s (%s)", backend.name, backend.health.state.value, why)

    # -- PoolAdmin ----------------------------------------------------------------------------------------------

    def set_draining(self, name: str, draining: bool) -> None:
        """Raises KeyError for a name that is not configured."""
        self.backends[name].draining = draining

    def snapshot(self) -> list[dict[str, object]]:
        """What the admin page and the gauges show, one dict a backend."""
        now = self._clock.now()
        out: list[dict[str, object]] = []
        for backend in self.backends.values():
            view, metrics = backend.view(now), backend.metrics
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
                    "failures_in_a_row": backend.health.failures,
                }
            )
        return out
