"""How loaded a backend would be with this request added. Lower is better.

Rules: every term has the same unit, so terms add: a share of the backend's capacity, 1.0 being full. Our
own counts come first, since they are never stale. What was polled adds only the load that is not ours,
fading with its age to nothing at `fresh_seconds`: many requests between two polls see each other through
our counts, and a stale poll can draw no crowd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b

from policies.params import RouterParams
from policies.types import BackendView, RequestFacts

Scorer = Callable[[RequestFacts, BackendView, RouterParams, str | None], float]
"""(facts, backend, params, own): `own` names the session's own backend, None without a session."""


def freshness(backend: BackendView, params: RouterParams) -> float:
    """Weight of polled numbers: 1 just polled, linearly down to 0 at fresh_seconds; 0 if never polled."""
    age = backend.polled_age
    if age is None or age >= params.fresh_seconds:
        return 0.0
    return 1.0 - age / params.fresh_seconds


def in_flight_share(
    facts: RequestFacts, backend: BackendView, params: RouterParams, own: str | None
) -> float:
    """(in_flight + 1 + freshness × max(0, running + waiting - in_flight)) ÷ max_in_flight.

    Requests ÷ requests: a share. The excess of what the engine reports over our own count is other people's
    work (a second gateway, a script). `running` or the poll missing: own count only; `waiting` missing: 0.
    """
    requests: float = backend.in_flight
    if backend.running is not None:
        excess = backend.running + (backend.waiting or 0) - backend.in_flight
        if excess > 0:
            requests += excess * freshness(backend, params)
    return (requests + 1) / (backend.max_in_flight or 1)


def kv_share(facts: RequestFacts, backend: BackendView, params: RouterParams, own: str | None) -> float:
    """held + context_tokens ÷ kv_tokens + freshness × max(0, kv_usage - held).

    With held = in_flight_tokens ÷ kv_tokens. Tokens ÷ tokens: a share, above 1 when the request cannot be
    held at once. Own tokens are estimates with the output reserved in full. `kv_usage` or the poll missing:
    own estimate only.
    """
    capacity = backend.kv_tokens or 1
    share = backend.in_flight_tokens / capacity
    if backend.kv_usage is not None and backend.kv_usage > share:
        share += (backend.kv_usage - share) * freshness(backend, params)
    return share + facts.context_tokens / capacity


def window_risk(facts: RequestFacts, backend: BackendView, params: RouterParams, own: str | None) -> float:
    """window_penalty × (2 - window ÷ context_tokens) when context_tokens > window, else 0.

    For the request whose low bound fits (or a filter had dropped the backend) and whose expected prompt and
    output do not: prefers larger windows, also among several too small. A share, weighed against load. Window
    unknown: 0, as good as any.
    """
    window = backend.window_tokens
    if window is None or facts.context_tokens <= window:
        return 0.0
    return params.window_penalty * (2.0 - window / facts.context_tokens)


def home(session: str, names: Iterable[str]) -> str:
    """The session's own backend among `names`: rendezvous hashing, the highest blake2b(name, session) wins.

    The same in every process and on every machine. When a backend leaves, only its own sessions move,
    spread evenly over the rest; when it returns, they return. The bonus is `affinity`.
    """
    # A session may come from JSON or a header and hold lone surrogates; they must hash, not raise.
    key = b"\0" + session.encode("utf-8", "surrogatepass")
    best, most = "", b""
    for name in names:
        weight = blake2b(name.encode() + key, digest_size=8).digest()
        if weight > most:
            best, most = name, weight
    return best


def affinity(facts: RequestFacts, backend: BackendView, params: RouterParams, own: str | None) -> float:
    """-affinity_weight for the session's own backend, else 0: a bonus, in the unit of load.

    So a session stays while its backend carries at most affinity_weight more load than the best other one,
    and moves when the difference is larger. `own` is None without a session: no bonus.
    """
    return -params.affinity_weight if backend.name == own else 0.0


SCORERS: tuple[tuple[str, Scorer], ...] = (
    ("in_flight", in_flight_share),
    ("kv", kv_share),
    ("window", window_risk),
    ("affinity", affinity),
)
