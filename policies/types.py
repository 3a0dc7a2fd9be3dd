"""The values that policies read and return.

Rules: frozen, slotted, standard library only. A policy never sees a live object: the pool hands it
`BackendView`s (a snapshot), the handler a `RequestFacts`; what comes back is a `Decision` that explains
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from policies.frozen import frozen


class DropReason(StrEnum):
    """Why a filter dropped a backend: log field, metric label and what a 503 tells the client. Closed."""

    UNHEALTHY = "unhealthy"
    SUSPECT = "suspect"  # in doubt until a trial; only for what no other can take
    DRAINING = "draining"
    PROMPT_TOO_LONG = "prompt_too_long"
    KV_FULL = "kv_full"
    TIER = "tier"
    GATE = "gate"  # the tier demands a passed gate (`tierline gate`), and this one has none, or an old one
    FULL = "full"
    SPECULATION = "speculation"  # drafts tokens, which the tier excludes
    COLLAPSED = "collapsed"  # speculation collapsed, or is known to, at this context
    REMOTE = "remote"  # a last resort: not this tier's, or not needed
    SPILL = "spill"  # a reference backend, kept for those who need one
    HELD = "held"  # could serve it, but not now without harm to those it has
    TRIED = "tried"
    PINNED_ELSEWHERE = "pinned_elsewhere"  # another backend holds what the request refers to


class ChooseReason(StrEnum):
    """Why the chosen backend was chosen. Closed; on every response as `x-tierline-reason`."""

    ONLY = "only"  # one backend was left after the filters
    SOONEST = "soonest"  # lowest predicted cost in seconds
    PREFIX = "prefix"  # the same, and it has most of the prompt cached
    LAST_RESORT = "last_resort"  # a remote; no backend of one's own could take it in time
    POLICY = "policy"  # what a classic or a user's own policy ranks first
    LEAST_LOAD = "least_load"  # lowest load
    SESSION = "session"  # the session's own backend, load permitting
    PINNED = "pinned"  # holds what the request refers to (a stored response)
    LARGER_WINDOW = "larger_window"  # second try after a context overflow
    RETRY = "retry"  # another backend after one that could not be reached


class Spill(StrEnum):
    """When a tier that does not ask for the reference may use a reference backend. Closed."""

    SOONER = "sooner"  # whenever that is predicted to be sooner
    FULL = "full"  # only when no other can take the request now
    NEVER = "never"


class ShedReason(StrEnum):
    """Why a request was turned away: log field, metric label, part of the 429's text. Closed."""

    QUEUE_FULL = "queue_full"  # as many wait in its line as may
    TOO_LATE = "too_late"  # would start only after its deadline; told at once, not when it expires
    EXPIRED = "expired"  # waited until its deadline; the forecast was wrong
    WORKING_SET = "working_set"  # a new conversation, and the KV cache of those running is all there is
    FULL = "full"  # no queue, and every backend that may serve it has as much as it may have
    NO_BACKEND = "no_backend"  # waiting does not help; the decision's drops say why


@frozen
class Slo:
    """What a tier promises. Time to the first token: at most `ttft_seconds + prefill_factor × cold`, where cold is
    the seconds that prefill of the tokens new to the conversation takes on an idle backend. `tpot_seconds`: seconds
    per token after the first."""

    ttft_seconds: float = 2.0
    prefill_factor: float = 1.5
    tpot_seconds: float = 0.05


@frozen
class Tier:
    """A quality level. `reference`: only unquantized weights; `max_kl_bits`: mean KL in bits per position.

    no_speculation: only backends that draft no tokens. slo: what it promises, None: nothing, so that nothing is ever
    late. spill: when reference backends help out. last_resort: a remote may serve it when no backend of one's own
    can; the remote must be of the tier's quality. requires_gate: only backends that passed `tierline gate`, at most
    gate_seconds ago (None: whenever).
    """

    name: str
    reference: bool = False
    max_kl_bits: float | None = None
    no_speculation: bool = False
    slo: Slo | None = None
    spill: Spill = Spill.SOONER
    last_resort: bool = False
    requires_gate: bool = False
    gate_seconds: float | None = None


@frozen
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


@frozen
class RequestFacts:
    """What routing knows of a request.

    prompt: estimate in tokens. output_tokens: what the client allows at most, or a default reserve.
    session: opaque affinity key or None. tools: declares tools. stream: wants an event stream.
    prefix: hash chain of the prompt: link i stands for everything up to its end, `link_tokens` tokens more than the
    link before. conversation: identity of the conversation it is a turn of, None: a request of its own. priority:
    higher goes first. share: whom it counts against in the fair share (the tenant). deadline: seconds on the caller's
    clock by which the first token must be there, None: the tier's SLO says. expected_output: tokens it will
    generate, where that is known; None: learned.
    """

    model: str
    tier: Tier
    prompt: ContextEstimate
    output_tokens: int
    session: str | None = None
    tools: bool = False
    stream: bool = False
    prefix: tuple[int, ...] = ()
    link_tokens: float = 0.0
    conversation: str | None = None
    priority: int = 0
    share: str | None = None
    deadline: float | None = None
    expected_output: float | None = None

    @property
    def context_tokens(self) -> int:
        """Estimated prompt plus reserved output: what the request will hold of a backend's KV cache."""
        return self.prompt.tokens + self.output_tokens


@frozen
class Forecast:
    """What one backend would make of one request, now. All in seconds, but for `tpot`: seconds per token.

    queue: until its prefill begins. prefill: of its uncached tokens. tpot: at the load it would create, prefill of
    others included. decode: all its expected tokens. harm: what those already there lose, all together, times the
    weight of others (`PredictParams.harm_weight`). demotion: for tool calls that go wrong there, or a slow start.
    """

    queue: float = 0.0
    prefill: float = 0.0
    tpot: float = 0.0
    decode: float = 0.0
    harm: float = 0.0
    demotion: float = 0.0

    @property
    def ttft(self) -> float:
        return self.queue + self.prefill

    @property
    def finish(self) -> float:
        return self.queue + self.prefill + self.decode

    @property
    def cost(self) -> float:
        return self.queue + self.prefill + self.decode + self.harm + self.demotion


@frozen
class BackendView:
    """One backend as seen at the moment of a decision.

    window_tokens: max_model_len, None if unknown. in_flight, in_flight_tokens: ours, counted. running,
    waiting, kv_usage (0..1): the engine's own, polled; `polled_age` seconds old, None if never polled.
    max_in_flight and kv_tokens: capacities (configured, reported, or conservative defaults).
    speculates: drafts tokens. collapsed: speculation is broken at this request's context. remote: not ours; a last
    resort. held: admission says not now. turn: number of the last request that went there, of all: the lowest has
    waited longest. cached_tokens: of this request's prompt, estimated. forecast: for this request; None: nobody knows.
    suspect: in doubt until a trial. gate_age: seconds since it passed `tierline gate`, None: it did not.
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
    speculates: bool = False
    collapsed: bool = False
    remote: bool = False
    held: bool = False
    turn: int = 0
    cached_tokens: float = 0.0
    forecast: Forecast | None = None
    suspect: bool = False
    gate_age: float | None = None


@frozen
class Drop:
    """A backend that was not considered, and why."""

    backend: str
    reason: DropReason


@frozen
class Score:
    """A considered backend: `total` (lower is better) and its named terms, in the same unit."""

    backend: str
    total: float
    terms: tuple[tuple[str, float], ...] = ()


class Decision:
    """Where a request goes and why. `backend` is None when every backend was dropped. A value: compare, never change.

    `scores` may be handed over as a function that makes them: most decisions are never explained.
    """

    __slots__ = ("_scores", "backend", "drops", "reason")

    def __init__(
        self,
        backend: str | None,
        reason: ChooseReason | None,
        drops: tuple[Drop, ...] = (),
        scores: tuple[Score, ...] | Callable[[], tuple[Score, ...]] = (),
    ) -> None:
        self.backend = backend
        self.reason = reason
        self.drops = drops
        self._scores = scores

    @property
    def scores(self) -> tuple[Score, ...]:
        """Every considered backend's terms, in the order of the snapshot."""
        if not isinstance(self._scores, tuple):
            self._scores = self._scores()
        return self._scores

    def only_full(self) -> bool:
        """True when nothing but load stands in the way: waiting helps."""
        return self.backend is None and any(d.reason in LOAD_REASONS for d in self.drops)

    def _key(self) -> tuple[object, ...]:
        return self.backend, self.reason, self.drops, self.scores

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Decision) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return "Decision({!r}, {!r}, {!r}, {!r})".format(*self._key())


@frozen
class Go:
    """Served now by `decision.backend`; it has begun in the fleet. `view`: the chosen backend as it was seen."""

    decision: Decision
    view: BackendView


@frozen
class Wait:
    """In line. `seconds`: predicted until it starts. `reason`: what it waits for."""

    seconds: float
    reason: ShedReason


@frozen
class Shed:
    """Turned away. `retry_after`: whole seconds, 1 to 60, until a place is predicted; 0 for NO_BACKEND."""

    reason: ShedReason
    retry_after: int
    decision: Decision


Verdict = Go | Wait | Shed


@frozen
class Polled:
    """What an engine says of itself. Gauges now, counters since its start (a counter that falls is a restart).
    None: not said. kv_usage: 0..1. drafted, accepted: tokens of speculation."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    preemptions: int | None = None
    drafted: int | None = None
    accepted: int | None = None


@frozen
class Result:
    """How a request ended. ok: whole and well. Tokens as the backend reported them, None: it did not.
    calls_ok: whether every tool call of the answer came right by itself; None: there was none."""

    ok: bool = True
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    calls_ok: bool | None = None


# Reasons that pass by themselves when requests finish.
LOAD_REASONS = frozenset({DropReason.FULL, DropReason.KV_FULL, DropReason.HELD})
