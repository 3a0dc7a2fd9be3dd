"""Whether a backend gets anywhere, whatever its `/health` says: an engine can die, or wait for a card that never answers,
behind a server that is well.

Rules: no clock, no state: signs in, the first that says "stuck" out. A sign is a reason to ask (a trial), never to eject.
What is legitimately slow is allowed for: prefill that is predicted to be ahead counts on top of every limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from policies.frozen import frozen


class Stuck(StrEnum):
    """What shows that nothing comes. Closed; in the log."""

    SILENT = "no token on any of its streams"
    FLAT = "it says that it runs requests, and its token counters stand still"
    OVERDUE = "its next first token is far beyond its prediction"


@dataclass(frozen=True, slots=True)
class ProgressParams:
    """stuck_seconds: without any progress, besides prefill that is predicted to be ahead; 0: nobody looks. overdue_factor:
    so many times the prediction, and at least stuck_seconds, is far beyond it."""

    stuck_seconds: float = 20.0
    overdue_factor: float = 4.0

    def __post_init__(self) -> None:
        if not self.stuck_seconds >= 0:
            raise ValueError("stuck_seconds must be 0 or more")
        if not self.overdue_factor >= 1:
            raise ValueError("overdue_factor must be 1 or more")


@frozen
class Signs:
    """Seconds. silent: since the last token on any stream of ours that has begun and whose client reads; None: there is
    none. flat: for how long the engine has claimed to run requests with its token counters unmoved; None: it does not, or
    has no such counters. late: that the request whose turn it is has waited for its first token; expected: what was
    predicted for it, None: nothing measured. ahead: predicted prefill of all without a first token."""

    silent: float | None = None
    flat: float | None = None
    late: float = 0.0
    expected: float | None = None
    ahead: float = 0.0


def stuck(signs: Signs, params: ProgressParams) -> Stuck | None:
    """The first sign that nothing comes, or None. A stream that gets tokens refutes counters that stand still."""
    limit = params.stuck_seconds
    if not limit:
        return None
    most = limit + signs.ahead
    if signs.silent is not None and signs.silent > most:
        return Stuck.SILENT
    if signs.silent is None and signs.flat is not None and signs.flat > most:
        return Stuck.FLAT
    if signs.expected is not None and signs.late - signs.expected > max(
        limit, (params.overdue_factor - 1) * signs.expected
    ):
        return Stuck.OVERDUE
    return None
