"""The knobs of routing, in one frozen value. Filters, scorers and the router read them from here only.

Loads are shares: 1.0 is a backend filled to its capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
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
class PolicyParams:
    """All that decides. name: which policy ranks the backends: `predicted`, a classic one, or a user's own.
    admission: whether requests wait and conversations are let in one by one; without, all that may serve at once
    goes at once."""

    name: str = "predicted"
    admission: bool = True
    router: RouterParams = RouterParams()

    def canonical(self) -> str:
        """One text for one policy: two that decide alike by their params have the same."""
        return repr(self)

    def digest(self) -> str:
        """Twelve hex digits of the canonical text: in metrics, records and on the admin page."""
        return blake2b(self.canonical().encode(), digest_size=6).hexdigest()
