"""The values that policies read and return.

Rules: frozen, slotted, standard library only. A policy never sees a live object: the pool hands it
`BackendView`s (a snapshot), the handler a `RequestFacts`; what comes back is a `Decision` that explains
itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class DropReason(StrEnum):
    """Why a filter dropped a backend: log field, metric label and what a 503 tells the client. Closed."""

    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    PROMPT_TOO_LONG = "prompt_too_long"
    KV_FULL = "kv_full"
    TIER = "tier"
    FULL = "full"
    TRIED = "tried"
    PINNED_ELSEWHERE = "pinned_elsewhere"  # another backend holds what the request refers to


class ChooseReason(StrEnum):
    """Why the chosen backend was chosen. Closed; on every response as `x-tierline-reason`."""

    ONLY = "only"  # one backend was left after the filters
    LEAST_LOAD = "least_load"  # lowest predicted load
    SESSION = "session"  # the session's own backend, load permitting
    PINNED = "pinned"  # holds what the request refers to (a stored response)
    LARGER_WINDOW = "larger_window"  # second try after a context overflow
    RETRY = "retry"  # another backend after one that could not be reached


@dataclass(frozen=True, slots=True)
class Tier:
    """A quality level. `reference`: only unquantized weights; `max_kl_bits`: mean KL in bits per position."""

    name: str
    reference: bool = False
    max_kl_bits: float | None = None


@dataclass(frozen=True, slots=True)
class ContextEstimate:
    """Tokens of a prompt, estimated from its size. `low` is a bound the prompt surely exceeds, `high` one it
    surely does not; `tokens` is the expected value. `low <= tokens <= high`."""

    tokens: int
    low: int
    high: int

    @property
    def margin(self) -> float:
        """Relative half-width of the estimate, e.g. 0.25 for ±25 %."""
        return (self.high - self.low) / (2 * self.tokens) if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What routing knows of a request.

    prompt: estimate in tokens. output_tokens: what the client allows at most, or a default reserve.
    session: opaque affinity key or None. tools: declares tools. stream: wants an event stream.
    """

    model: str
    tier: Tier
    prompt: ContextEstimate
    output_tokens: int
    session: str | None = None
    tools: bool = False
    stream: bool = False

    @property
    def context_tokens(self) -> int:
        """Estimated prompt plus reserved output: what the request will hold of a backend's KV cache."""
        return self.prompt.tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class BackendView:
    """One backend as seen at the moment of a decision.

    window_tokens: max_model_len, None if unknown. in_flight, in_flight_tokens: ours, counted. running,
    waiting, kv_usage (0..1): the engine's own, polled; `polled_age` seconds old, None if never polled.
    max_in_flight and kv_tokens: capacities (configured, reported, or conservative defaults).
    """

    name: str
    healthy: bool = True
    draining: bool = False
    reference: bool = False
    kl_bits: float | None = None
    window_tokens: int | None = None
    max_in_flight: int = 32
    kv_tokens: int = 131072
    in_flight: int = 0
    in_flight_tokens: int = 0
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    polled_age: float | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """A backend that was not considered, and why."""

    backend: str
    reason: DropReason


@dataclass(frozen=True, slots=True)
class Score:
    """A considered backend: `total` (lower is better) and its named terms, in the same unit."""

    backend: str
    total: float
    terms: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes and why. `backend` is None when every backend was dropped."""

    backend: str | None
    reason: ChooseReason | None
    drops: tuple[Drop, ...] = ()
    scores: tuple[Score, ...] = field(default=())

    def only_full(self) -> bool:
        """True when nothing but load stands in the way: waiting helps."""
        return self.backend is None and any(d.reason in LOAD_REASONS for d in self.drops)


# Reasons that pass by themselves when requests finish.
LOAD_REASONS = frozenset({DropReason.FULL, DropReason.KV_FULL})
