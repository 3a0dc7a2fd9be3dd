"""How long clients are waited for, and how much may wait for them."""

from __future__ import annotations

from policies.frozen import frozen
from proxy.clock import Clock, Timer

SLOWEST = 1024
"""Bytes a second that a client must take of an answer that waits for it."""

LINGER = 16 * 1024
"""Bytes that may wait for a client whose connection stays open: its next request shows that it has taken them."""


@frozen
class Patience:
    """With clients. header: seconds from a head's first byte until it is whole. idle: seconds in which something must be
    taken of what waits for it. connections: at once."""

    clock: Clock
    header: float = 10.0
    idle: float = 60.0
    connections: int = 4096


def stopped(timer: Timer | None) -> Timer | None:
    """The timer, cancelled: for the place that it was kept in."""
    if timer is not None:
        timer.cancel()
    return None
