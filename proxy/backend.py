"""One backend: what is configured of it, and what it is like now; and how the one comes from the configuration.

Rules
1. What is configured is frozen (`BackendSpec`). Another configuration makes another `Backend`; what runs goes on with the
   one that it began with.
2. A backend is the same server while its URL and its model's name are: then the other one takes over what was learned, its
   health and its connections. Else it is a new one, which nobody knows yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from policies import Member
from policies.breaker import Answers, Health, HealthState
from policies.profile import Profile
from policies.state import State
from proxy.clock import Clock
from proxy.config import Backend as BackendConfig
from proxy.config import Config
from proxy.config import Tls as TlsConfig
from proxy.tls import Tls
from proxy.upstream import ConnectionPool
from proxy.wire.promtext import EngineMetrics

log = logging.getLogger("tierline.pool")

DEFAULT_MAX_IN_FLIGHT = 256
"""What vLLM takes at once unless it is told otherwise; it queues what is more."""

DEFAULT_KV_TOKENS = 131072


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What the operator configured of a backend. None: what the backend says, else its profile, else a conservative
    default.

    host_header, path_prefix: what to put into every request. key: bearer for it, secret.
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
    gate_passed_at: float | None = None
    """Seconds since the epoch; None: it passed no gate."""
    tls: TlsConfig | None = None
    """None: it is not asked by TLS."""

    @property
    def server(self) -> tuple[str, str | None]:
        """What makes it the same one, whatever else changes."""
        return self.url, self.model

    def __repr__(self) -> str:  # never the key
        return f"<backend {self.name} {self.url}>"


class Backend:
    """One backend, live."""

    __slots__ = (
        "answers",
        "connections",
        "draining",
        "gate_at",
        "health",
        "integrity",
        "leaving",
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
        self.leaving = False
        """It is configured no more, and what runs there may end."""
        self.metrics: EngineMetrics | None = None
        self.polled_at: float | None = None
        self.moved_at: float | None = None
        """When its token counters were last seen to move, or it to be idle; None: it has no counters that say."""
        self.gate_at: float | None = None
        """When it passed its gate, on the clock."""
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
        """For people and metrics: what its health is, or draining, or leaving."""
        if self.leaving:
            return "leaving"
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

    def succeed(self, other: Backend) -> None:
        """It takes the place of `other`, which is the same server."""
        for name in _KEPT:
            setattr(self, name, getattr(other, name))
        if self.spec.window_tokens is None and other.spec.window_tokens is None:
            self.window_tokens = other.window_tokens

    def doubt(self, now: float, successes: int) -> None:
        """Nobody knows yet whether it can answer. Until its first good probe (the last of `successes`) it gets what no other
        can take: an attempt there beats a refusal."""
        self.health = Health(HealthState.EJECTED, now, successes=successes - 1, guessed=True)

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
            self.gate_at,
        )


_KEPT = (
    "answers",
    "draining",
    "health",
    "integrity",
    "metrics",
    "moved_at",
    "polled_at",
    "served_model",
    "state_of",
    "stuck",
)


def make(config: Config, backend: BackendConfig, clock: Clock) -> Backend:
    """As configured; nothing is asked of it yet. Raises OSError when its certificates cannot be read."""
    return _made(_spec(backend), _connections(config, backend, clock), clock)


def _made(spec: BackendSpec, connections: ConnectionPool, clock: Clock) -> Backend:
    made = Backend(spec, connections)
    if spec.gate_passed_at is not None:
        made.gate_at = clock.now() - (clock.wall() - spec.gate_passed_at)
    return made


def remake(config: Config, before: Mapping[str, Backend], clock: Clock) -> list[Backend]:
    """All backends of another configuration: the very same ones where nothing of them changed. Nothing is touched until the
    pool takes them. Raises OSError."""
    made = []
    for backend in config.backends:
        old, spec = before.get(backend.name), _spec(backend)
        if old is None or old.spec.server != spec.server:
            made.append(_made(spec, _connections(config, backend, clock), clock))
        elif old.spec == spec:
            made.append(old)
        else:
            shared = old.connections if old.spec.tls == spec.tls else None
            new = _made(spec, shared or _connections(config, backend, clock), clock)
            new.succeed(old)
            made.append(new)
    return made


def idle(config: Config, backend: BackendConfig) -> tuple[float, int]:
    """How long, and how many, unused connections are kept."""
    return config.pool.idle_seconds, config.pool.max_idle if backend.max_idle is None else backend.max_idle


def _connections(config: Config, backend: BackendConfig, clock: Clock) -> ConnectionPool:
    parts = urlsplit(backend.url)
    secure, of = parts.scheme == "https", f"backend {backend.name}"
    seconds, most = idle(config, backend)
    if secure and backend.tls.insecure_any_certificate:
        log.warning("%s: any certificate is accepted, so whoever stands between may read and answer", of)
    return ConnectionPool(
        clock,
        parts.hostname or "",
        parts.port or (443 if secure else 80),
        Tls(of, backend.tls.files, backend.tls.context, clock) if secure else None,
        idle_seconds=seconds,
        max_idle=most,
        server_name=backend.tls.server_name,
    )


def _spec(backend: BackendConfig) -> BackendSpec:
    parts = urlsplit(backend.url)
    reference, kl_bits = backend.worth
    return BackendSpec(
        name=backend.name,
        url=backend.url,
        host_header=parts.netloc.encode(),
        path_prefix=parts.path.rstrip("/").encode(),
        model=backend.model,
        key=backend.key.reveal() if backend.key is not None else None,
        reference=reference,
        kl_bits=kl_bits,
        window_tokens=backend.limits.window_tokens,
        max_in_flight=backend.limits.max_in_flight,
        kv_tokens=backend.limits.kv_tokens,
        stream_usage=backend.stream_usage,
        profile=backend.measured,
        speculates=backend.speculates,
        remote=backend.remote,
        parser=backend.parser,
        reasoning_parser=backend.reasoning_parser,
        enforces_choice=backend.enforces_choice,
        history_reasoning=backend.history_reasoning,
        gate_passed_at=backend.gate_passed_at,
        tls=backend.tls if parts.scheme == "https" else None,
    )
