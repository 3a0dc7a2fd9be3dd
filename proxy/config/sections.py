"""Every key there is, declared once, and what the file means when read as a whole.

Rules
1. A section is frozen, and takes no key that is not declared here. docs/configuration.md and config.toml name
   each key (a test compares them).
2. Times are seconds, sizes bytes, contexts tokens; the name of the key or the page says which.
3. No rule between keys lives here: those are in `rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from policies import BreakerParams, Tier
from policies import profile as profiles
from policies.params import PolicyParams
from policies.profile import Profile
from policies.progress import ProgressParams
from proxy.config import rules
from proxy.config.clients import Allowed, ApiKey, Price, Tenant, ToolFormatName
from proxy.config.measured import GateFile, ProfileFile, ProfileName
from proxy.config.overlay import Provenance
from proxy.config.policy import BUILT_IN_TIERS, Policy, Section, TierConfig, with_built_in_tiers
from proxy.config.shared import SharedSection
from proxy.config.tls import ListenerTls, Tls
from proxy.config.values import (
    AbsolutePath,
    Array,
    AtLeastOne,
    BaseUrl,
    Bits,
    Bytes,
    Count,
    CountOrNone,
    Days,
    Digest,
    HeaderName,
    HostName,
    JsonTable,
    Megabytes,
    Name,
    Network,
    Origin,
    Port,
    Records,
    RecordStore,
    Seconds,
    SecondsOrOff,
    SecretRef,
    Share,
    StoreFile,
    Tokens,
)

ReasoningName = Literal["backend", "reasoning", "reasoning_content", "both"]


SESSION_HEADERS = (
    "x-session-id",
    "session-id",
    "session_id",
    "x-claude-code-session-id",
    "x-opencode-session",
    "x-session-affinity",
    "x-conversation-id",
    "conversation_id",
)
"""Where clients and agents say which conversation a request belongs to."""


class Server(Section):
    """The listener that clients talk to."""

    host: HostName = "127.0.0.1"
    port: Port = 8080
    max_body_bytes: Bytes = 64 * 1024 * 1024
    keepalive_timeout: Seconds = 75.0
    header_timeout: Seconds = 10.0
    body_timeout: Seconds = 60.0
    max_connections: Count = 4096
    backlog: Count = 1024
    drain_timeout: Seconds = 30.0
    cors_origins: Array[Origin] = ()
    keys: Array[ApiKey] = ()
    store: StoreFile | None = None
    state: StoreFile | None = None
    allow_unauthenticated: bool = False
    public_paths: Array[AbsolutePath] = ("/health", "/ready", "/version", "/metrics")
    session_headers: Array[HeaderName] = SESSION_HEADERS
    workers: Count = 1
    watch_config: SecondsOrOff = 0.0
    tls: ListenerTls = ListenerTls()
    trusted_proxies: Array[Network] = ()
    proxy_protocol: bool = False
    uvloop: Literal["auto", "on", "off"] = "auto"


class AdminKey(Section):
    """One operator. role: `read` sees everything and changes nothing."""

    name: Name
    key: SecretRef | None = None
    sha256: Digest | None = None
    role: Literal["change", "read"] = "change"

    @property
    def digest(self) -> str:
        return self.key.digest if self.key is not None else self.sha256 or ""


class Admin(Section):
    """The operator's listener."""

    enabled: bool = True
    host: HostName = "127.0.0.1"
    port: Port = 8081
    key: SecretRef | None = None
    keys: Array[AdminKey] = ()
    tls: ListenerTls = ListenerTls()
    metrics_on: Literal["data", "admin", "both"] = "data"


class Quality(Section):
    """What a backend's weights are worth. kl_bits: mean KL from the reference, in bits per position."""

    reference: bool = False
    kl_bits: Bits | None = None


class Limits(Section):
    """Capacities. Absent: what the backend reports, or a conservative default."""

    window_tokens: Tokens | None = None
    max_in_flight: Count | None = None
    kv_tokens: Tokens | None = None


class Timeouts(Section):
    """Seconds. For the first token: `first_token`, and more for every 1000 uncached context tokens."""

    connect: Seconds = 5.0
    first_token: Seconds = 60.0
    first_token_per_1k_tokens: SecondsOrOff = 1.0
    gap: Seconds = 60.0
    total: Seconds = 3600.0
    client_idle: Seconds = 60.0
    keepalive_after: SecondsOrOff = 15.0
    keepalive_interval: Seconds = 15.0


class BackendTimeouts(Section):
    """The part of `Timeouts` that one backend may have of its own."""

    connect: Seconds | None = None
    first_token: Seconds | None = None
    first_token_per_1k_tokens: SecondsOrOff | None = None
    gap: Seconds | None = None
    total: Seconds | None = None


class Backend(Section):
    """One server: a URL. `model`: its name for the model; absent: the first that /v1/models lists."""

    name: Name
    url: BaseUrl
    model: str | None = None
    profile: ProfileName | None = None
    gate: GateFile | None = None
    key: SecretRef | None = None
    quality: Quality = Quality()
    limits: Limits = Limits()
    tls: Tls = Tls()
    timeouts: BackendTimeouts = BackendTimeouts()
    health_path: AbsolutePath = "/health"
    metrics_path: AbsolutePath = "/metrics"
    stream_usage: bool = True
    speculates: bool | None = None
    remote: bool = False
    max_idle: CountOrNone | None = None
    parser: Literal["backend", "none"] = "backend"
    reasoning_parser: Literal["backend", "none"] = "backend"
    tool_choice: Literal["native", "auto_enforced"] | None = None
    history_reasoning: Literal["reasoning", "reasoning_content"] | None = None

    @property
    def enforces_choice(self) -> bool:
        """`required` and named tool choices are seen to by the gateway: as configured, else where the profile
        knows that this server's own way loses calls, or it has no parser at all."""
        if self.tool_choice is not None:
            return self.tool_choice == "auto_enforced"
        measured = self.measured
        return self.parser == "none" or (measured is not None and not measured.tool_choice_required_works)

    @property
    def measured(self) -> Profile | None:
        """The profile, if one is named."""
        if isinstance(self.profile, ProfileFile):
            return self.profile.profile
        return profiles.get(self.profile) if self.profile in profiles.names() else None

    @property
    def gate_passed_at(self) -> float | None:
        """Seconds since the epoch; None: it passed none."""
        return None if self.gate is None or not self.gate.result.passed else self.gate.result.at

    @property
    def worth(self) -> tuple[bool, float | None]:
        """(reference, kl_bits): as configured, else the profile's, else unknown."""
        if self.quality.model_fields_set or self.measured is None:
            reference, kl_bits = self.quality.reference, self.quality.kl_bits
        else:
            reference, kl_bits = self.measured.quality.reference, self.measured.quality.kl_bits
        return reference, 0.0 if reference else kl_bits


class Model(Section):
    """A public name. With `alias_of`: another name for a model, with a tier or request fields of its own."""

    backends: Array[Name] = ()
    alias_of: str | None = None
    aliases: Array[Name] = ()
    tier: str | None = None
    response_model: Literal["backend", "public"] | None = None
    tool_format: ToolFormatName | None = None
    reasoning: ReasoningName | None = None
    limits: Allowed = Allowed()
    price: Price = Price()
    defaults: JsonTable = Field(default_factory=dict)
    overrides: JsonTable = Field(default_factory=dict)


class Pool(Section):
    """Idle connections to backends, each."""

    idle_seconds: Seconds = 4.0
    max_idle: CountOrNone = 64


class Health(Section):
    """How backends are watched: each probed and asked for its metrics once an interval."""

    interval: Seconds = 2.0
    timeout: Seconds = 2.0
    failures_to_eject: Count = 3
    successes_to_return: Count = 2
    eject_seconds: SecondsOrOff = 5.0
    most_eject_seconds: SecondsOrOff = 60.0
    ejected_share: Share = 0.5
    outlier_margin: Share = 0.3
    outlier_answers: Count = 10
    trials: bool = True
    trial_timeout: Seconds = 10.0
    stuck_seconds: SecondsOrOff = 20.0
    overdue_factor: AtLeastOne = 4.0

    @property
    def breaker(self) -> BreakerParams:
        names = (field.name for field in fields(BreakerParams))
        return BreakerParams(**{name: getattr(self, name) for name in names})

    @property
    def progress(self) -> ProgressParams:
        return ProgressParams(self.stuck_seconds, self.overdue_factor)


class Telemetry(Section):
    records: Records = "stdout"
    store: RecordStore = "auto"
    keep_days: Days = 30.0
    keep_mb: Megabytes = 1000.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"
    log_requests: bool = False
    decisions: bool = False
    client_addresses: bool = False
    otlp: BaseUrl | None = None
    otlp_sample: Share = 1.0

    @property
    def records_path(self) -> Path | None:
        """The file that records go to; None for stdout and off."""
        return Path(self.records.removeprefix("file:")) if self.records.startswith("file:") else None


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """What a public name means, resolved. backends: names. tier: for requests that ask for none.
    defaults go into a request where it has no such field, overrides always."""

    name: str
    target: str
    backends: tuple[str, ...]
    tier: str
    response_model: Literal["backend", "public"]
    tool_format: ToolFormatName
    reasoning: ReasoningName
    defaults: Mapping[str, object]
    overrides: Mapping[str, object]


class Config(Section):
    server: Server = Server()
    admin: Admin = Admin()
    backends: Array[Backend] = ()
    models: Annotated[dict[Name, Model], Field(default_factory=dict)]
    tiers: Annotated[dict[Name, TierConfig], BeforeValidator(with_built_in_tiers)] = Field(
        default_factory=lambda: dict(BUILT_IN_TIERS)
    )
    tenants: Annotated[dict[Name, Tenant], Field(default_factory=dict)]
    limits: SharedSection = SharedSection()
    policy: Policy = Policy()
    timeouts: Timeouts = Timeouts()
    pool: Pool = Pool()
    health: Health = Health()
    telemetry: Telemetry = Telemetry()

    @cached_property
    def source(self) -> Path | None:
        """The file it was read from (`load` puts it here)."""
        return None

    @cached_property
    def home(self) -> Path | None:
        """The folder for what is kept where nothing says where (`load` puts it here)."""
        return None

    @property
    def records_store(self) -> Path | None:
        """The database of records; None: there is none."""
        store = self.telemetry.store
        if store == "auto":
            return None if self.home is None else self.home / "records.db"
        return None if store == "off" else Path(store)

    @cached_property
    def origin(self) -> Provenance:
        """What it was read from (`load` puts it here)."""
        return Provenance()

    @cached_property
    def routes(self) -> Mapping[str, ModelRoute]:
        """Every public name, aliases included, in the order of the file."""
        routes: dict[str, ModelRoute] = {}
        for name, model in self.models.items():
            for public in (name, *model.aliases):
                routes[public] = self._route(public, name)
        return routes

    def _route(self, public: str, name: str) -> ModelRoute:
        """Walk from an alias to its model; what stands nearer to the public name wins."""
        tier = response_model = None
        tool_format: ToolFormatName | None = None
        reasoning: ReasoningName | None = None
        defaults: Mapping[str, object] = {}
        overrides: Mapping[str, object] = {}
        while True:
            model = self.models[name]
            tier = tier or model.tier
            response_model = response_model or model.response_model
            tool_format = tool_format or model.tool_format
            reasoning = reasoning or model.reasoning
            defaults = _merged(model.defaults, defaults)
            overrides = _merged(model.overrides, overrides)
            if model.alias_of is None:
                break
            name = rules.owner(self, model.alias_of) or model.alias_of
        return ModelRoute(
            name=public,
            target=name,
            backends=model.backends or tuple(backend.name for backend in self.backends),
            tier=tier or self.policy.default_tier,
            response_model=response_model or "backend",
            tool_format=tool_format or "openai",
            reasoning=reasoning or "backend",
            defaults=defaults,
            overrides=overrides,
        )

    def resolve(self, model: str) -> ModelRoute | None:
        """What a client's `model` means; None for a name that is not ours."""
        return self.routes.get(model)

    def tier(self, name: str) -> Tier | None:
        found = self.tiers.get(name)
        return None if found is None else found.tier(name)

    @cached_property
    def policy_params(self) -> PolicyParams:
        """Everything that decides, in one value."""
        weights = {key.of_tenant: key.weight for key in self.server.keys if key.weight != 1.0}
        weights |= {name: one.weight for name, one in self.tenants.items() if one.weight is not None}
        return self.policy.params(tuple(weights.items()))

    @cached_property
    def policy_digest(self) -> str:
        """Twelve hex digits that name the policy: equal ones decide alike. Of the parameters, the tiers, the retries."""
        tiers = sorted((name, repr(self.tier(name))) for name in self.tiers)
        text = f"{self.policy_params.canonical()} {tiers} {self.policy.retry}"
        return blake2b(text.encode(), digest_size=6).hexdigest()

    def backend(self, name: str) -> Backend:
        return next(backend for backend in self.backends if backend.name == name)

    def timeouts_for(self, backend: Backend) -> Timeouts:
        """The general timeouts, with this backend's own in their place."""
        return self.timeouts.model_copy(update=backend.timeouts.model_dump(exclude_none=True))


def _merged(under: Mapping[str, object], over: Mapping[str, object]) -> Mapping[str, object]:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
