"""The knobs of routing, in frozen values. All that decides reads them from here only.

Loads are shares: 1.0 is a backend filled to its capacity. Times are seconds, sizes tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class RouterParams:
    """kv_limit: polled KV usage (0..1) from which a backend with waiting requests takes no more.
    fresh_seconds: the age at which a polled number counts for nothing; up to there it fades linearly.
    affinity_weight: how much more load (share of capacity) a session's own backend may carry before the
    session moves; 0 switches affinity off.
    window_penalty: load (share of capacity) that a request is willing to meet elsewhere rather than go where
    its expected prompt and output exceed the window.
    """

    kv_limit: float = 0.95
    fresh_seconds: float = 5.0
    affinity_weight: float = 0.25
    window_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.kv_limit <= 1:
            raise ValueError("kv_limit must be above 0 and at most 1")
        if not self.fresh_seconds > 0:
            raise ValueError("fresh_seconds must be above 0")
        if not self.affinity_weight >= 0:
            raise ValueError("affinity_weight must be 0 or more")
        if not self.window_penalty >= 0:
            raise ValueError("window_penalty must be 0 or more")


@dataclass(frozen=True, slots=True)
class PredictParams:
    """harm_weight: what a second that others lose counts, beside one's own. decode_weight: what a second of decoding
    counts beside one of waiting for the first token. usual_output: tokens of an answer until some were seen.
    stall_seconds: over how long prefill's share of the engine is averaged. slow_start_seconds: after a recovery,
    until all of its places may be taken. demotion_seconds: what a backend costs more for requests with tools if
    every answer there went wrong that went right at its peers'; integrity_answers: seen before it counts.
    """

    harm_weight: float = 0.3
    decode_weight: float = 1.0
    usual_output: float = 300.0
    stall_seconds: float = 20.0
    slow_start_seconds: float = 2.0
    demotion_seconds: float = 60.0
    integrity_answers: int = 20

    def __post_init__(self) -> None:
        _at_least_zero(self, "harm_weight", "decode_weight", "slow_start_seconds", "demotion_seconds")
        _above_zero(self, "usual_output", "stall_seconds")
        if self.integrity_answers < 1:
            raise ValueError("integrity_answers must be 1 or more")


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """acceptance_share: below this share of the usual acceptance it has collapsed. least_drafts: drafted tokens between
    two polls that are enough to judge. slow_ratio: so many times the predicted time per token is a slow answer;
    slow_answers: in a row, in one context range, are a collapse where no acceptance is reported. look_seconds: after which
    a drained range gets a request to see whether it is well; doubled, up to a minute, each time that it is not.
    """

    acceptance_share: float = 0.3
    least_drafts: int = 300
    slow_ratio: float = 4.0
    slow_answers: int = 3
    look_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance_share < 1:
            raise ValueError("acceptance_share must be 0 or more and below 1")
        if self.least_drafts < 1 or self.slow_answers < 1:
            raise ValueError("least_drafts and slow_answers must be 1 or more")
        if not self.slow_ratio > 1:
            raise ValueError("slow_ratio must be above 1")
        _at_least_zero(self, "look_seconds")


@dataclass(frozen=True, slots=True)
class WorkingSetParams:
    """kv_share: of a backend's KV cache that live conversations may be expected to hold. busy_share: of a
    backend's time that starts may take before a new conversation waits. return_quantile: a conversation that
    has not come back after the time in which this share of the returns of its kind (with tools, without)
    happen is idle; least_idle_seconds, most_idle_seconds: bounds of that time. conversations: how many are
    remembered. decrease, increase: of the limit after a sign of crowding, and per turn without one while it
    binds; least_share: of the cache it never falls below.
    """

    kv_share: float = 0.9
    busy_share: float = 0.85
    return_quantile: float = 0.9
    least_idle_seconds: float = 5.0
    most_idle_seconds: float = 300.0
    conversations: int = 20_000
    decrease: float = 0.9
    increase: float = 0.005
    least_share: float = 0.2

    def __post_init__(self) -> None:
        _above_zero(self, "kv_share", "busy_share", "least_idle_seconds", "most_idle_seconds")
        if not 0 < self.return_quantile < 1:
            raise ValueError("return_quantile must be between 0 and 1")
        if self.conversations < 1:
            raise ValueError("conversations must be 1 or more")
        if not 0 < self.decrease < 1:
            raise ValueError("decrease must be between 0 and 1")
        _at_least_zero(self, "increase", "least_share")


@dataclass(frozen=True, slots=True)
class AdmissionParams:
    """ahead_seconds: prefill that may stand before a request on a backend; more waits in the gate, where it can be
    overtaken. tpot_margin: of the SLO's time per token that a backend may be filled to. queue: how many wait in one line
    (tier and priority). wait_seconds: the longest wait of who has no deadline, and how late a turn of a running
    conversation may be. late_seconds: how late any other request may be that was expected to be in time. weights: of
    shares (tenants) in the fair share, 1 for others.
    """

    ahead_seconds: float = 0.5
    tpot_margin: float = 0.9
    queue: int = 1024
    wait_seconds: float = 60.0
    late_seconds: float = 4.0
    weights: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        _above_zero(self, "ahead_seconds", "tpot_margin", "wait_seconds")
        _at_least_zero(self, "late_seconds")
        if self.queue < 1:
            raise ValueError("queue must be 1 or more")
        if any(not weight > 0 for _, weight in self.weights):
            raise ValueError("weights must be above 0")


@dataclass(frozen=True, slots=True)
class PolicyParams:
    """All that decides. name: which policy ranks the backends: `predicted`, a classic one, or a user's own; source: the
    text of a user's own, so that two versions of it differ. admission: whether requests wait and conversations are let
    in one by one; without, all that may serve goes at once; None: with `predicted`, since the others cannot tell how
    long."""

    name: str = "predicted"
    source: str = ""
    admission: bool | None = None
    router: RouterParams = field(default_factory=RouterParams)
    predict: PredictParams = field(default_factory=PredictParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    working_set: WorkingSetParams = field(default_factory=WorkingSetParams)
    gate: AdmissionParams = field(default_factory=AdmissionParams)

    @property
    def admits(self) -> bool:
        return self.name == "predicted" if self.admission is None else self.admission

    def canonical(self) -> str:
        """One text for one policy: equal params have the same, on every machine."""
        return repr(self)

    def digest(self) -> str:
        """Twelve hex digits of the canonical text: in metrics, records and on the admin page."""
        return blake2b(self.canonical().encode(), digest_size=6).hexdigest()


def _above_zero(params: object, *names: str) -> None:
    for name in names:
        if not getattr(params, name) > 0:
            raise ValueError(f"{name} must be above 0")


def _at_least_zero(params: object, *names: str) -> None:
    for name in names:
        if not getattr(params, name) >= 0:
            raise ValueError(f"{name} must be 0 or more")
