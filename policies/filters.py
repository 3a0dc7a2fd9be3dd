"""Which backends may serve a request. One function per reason, `None` meaning "may".

Rules: a filter reads the facts, one view and the params; it never compares backends. FILTERS is ordered and
the first reason stands, so what waiting cannot mend comes before what it can: a backend that is too small
*and* full says "prompt_too_long", and a 429 promises nothing that cannot come true. A missing or stale
signal never drops a backend.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.params import RouterParams
from policies.types import BackendView, DropReason, RequestFacts, Spill

Filter = Callable[[RequestFacts, BackendView, RouterParams], DropReason | None]


def tier(facts: RequestFacts, backend: BackendView, params: RouterParams) -> DropReason | None:
    """Quality below what was asked for: never a silent downgrade.

    A reference backend satisfies every tier. Otherwise a tier that wants the reference drops, and a tier
    with a bound drops a backend whose KL (bits per position) exceeds it or is unknown.
    """
    if backend.reference:
        return None
    wanted = facts.tier
    if wanted.reference:
        return DropReason.TIER
    if wanted.max_kl_bits is None:
        return None
    if backend.kl_bits is not None and backend.kl_bits <= wanted.max_kl_bits:
        return None
    return DropReason.TIER


def gate(facts: RequestFacts, backend: BackendView, params: RouterParams) -> DropReason | None:
    """The tier demands a passed gate, and this backend passed none, or too long ago.

    Drops when the gate's age in seconds is above the tier's `gate_seconds`, where that is set. No gate: drops.
    """
    wanted = facts.tier
    if not wanted.requires_gate:
        return None
    age = backend.gate_age
    if age is None or (wanted.gate_seconds is not None and age > wanted.gate_seconds):
        return DropReason.GATE
    return None


def speculation(facts: RequestFacts, backend: BackendView, params: RouterParams) -> DropReason | None:
    """The tier wants tokens that nobody drafted, and this backend drafts. Unknown: counts as not drafting."""
    return DropReason.SPECULATION if facts.tier.no_speculation and backend.speculates else None


def remote(facts: RequestFacts, backend: BackendView, params: RouterParams) -> DropReason | None:
    """A remote serves tiers that name it their last resort, and no other. That it is needed is the router's to see."""
    return DropReason.REMOTE if backend.remote and not facts.tier.last_resort else None


def spill(facts: RequestFacts, backend: BackendView, params: RouterParams) -> DropReason | None:
    """The tier keeps off reference backends that it does not ask for. That others are full is the router's to see."""
    if backend.reference and facts.tier.spill is Spill.NEVER and not facts.tier.reference:
        return DropReason.SPILL
    return None


def prompt_too_long(facts: RequestFacts, backend: BackendView, params: RouterParams) -> DropReason | None:
    """The prompt surely exceeds the window: its low bound does. Near the edge the backend judges.

    Tokens both. Window unknown: passes.
    """
    window = backend.window_tokens
    if window is not None and facts.prompt.low > window:
        return DropReason.PROMPT_TOO_LONG
    return None


def collapsed(facts: RequestFacts, backend: BackendView, params: RouterParams) -> DropReason | None:
    """Speculation is broken at this request's context, or the configuration is known to be: see `Fleet`."""
    return DropReason.COLLAPSED if backend.collapsed else None


def suspect(facts: RequestFacts, backend: BackendView, params: RouterParams) -> DropReason | None:
    """In doubt, until a trial shows that it can answer. That no other can take the request is the router's to see."""
    return DropReason.SUSPECT if backend.suspect else None


def unhealthy(facts: RequestFacts, backend: BackendView, params: RouterParams) -> DropReason | None:
    """Ejected after failures; only a probe brings it back."""
    return None if backend.healthy else DropReason.UNHEALTHY


def draining(facts: RequestFacts, backend: BackendView, params: RouterParams) -> DropReason | None:
    """Finishes what it has, takes nothing new."""
    return DropReason.DRAINING if backend.draining else None


def kv_full(facts: RequestFacts, backend: BackendView, params: RouterParams) -> DropReason | None:
    """The engine has no KV cache left and already lets requests wait.

    Drops when kv_usage >= kv_limit and waiting > 0, polled less than fresh_seconds ago. A full cache alone
    is no reason: a busy engine that nobody waits for is doing its work. Either number missing, or stale:
    passes.
    """
    if not backend.waiting or backend.kv_usage is None or backend.polled_age is None:
        return None
    if backend.kv_usage >= params.kv_limit and backend.polled_age < params.fresh_seconds:
        return DropReason.KV_FULL
    return None


def full(facts: RequestFacts, backend: BackendView, params: RouterParams) -> DropReason | None:
    """As many requests of ours are in flight as the backend may have. Counted here, so never stale."""
    return DropReason.FULL if backend.in_flight >= backend.max_in_flight else None


def held(facts: RequestFacts, backend: BackendView, params: RouterParams) -> DropReason | None:
    """It could serve the request, but not now without harm to those it has: `Admission` says so."""
    return DropReason.HELD if backend.held else None


FILTERS: tuple[Filter, ...] = (
    tier,
    gate,
    speculation,
    remote,
    spill,
    prompt_too_long,
    collapsed,
    suspect,
    unhealthy,
    draining,
    kv_full,
    full,
    held,
)


def drop_reason(facts: RequestFacts, backend: BackendView, params: RouterParams) -> DropReason | None:
    """The first reason against this backend, None if it may serve the request.

    Nearly always None, and asked for every backend of every choice: what rules out all reasons at once is looked at
    first, FILTERS only then.
    """
    tier = facts.tier
    window = backend.window_tokens
    if (
        backend.healthy
        and not (backend.draining or backend.held or backend.collapsed or backend.suspect or backend.remote)
        and backend.in_flight < backend.max_in_flight
        and (window is None or facts.prompt.low <= window)
        and not backend.waiting
        and not tier.requires_gate
        and not (tier.no_speculation and backend.speculates)
        and (
            (tier.reference or tier.spill is not Spill.NEVER)
            if backend.reference
            else not tier.reference
            and (
                tier.max_kl_bits is None
                or (backend.kl_bits is not None and backend.kl_bits <= tier.max_kl_bits)
            )
        )
    ):
        return None
    for judge in FILTERS:
        reason = judge(facts, backend, params)
        if reason is not None:
            return reason
    return None
