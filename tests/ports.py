"""A port for a server that is started afterwards, in another process."""

from __future__ import annotations

import random
import socket

_CHANCE = random.SystemRandom()


def free_port() -> int:
    """One that is free, and that the system gives to no connection: below those that it gives out by itself."""
    while True:
        port = _CHANCE.randrange(15_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
