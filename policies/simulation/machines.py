"""A simulated backend: an engine that can be down, slow, or lose its speculation, and what it says when polled.

Rules: `now` never goes back. A machine that went down has lost everything when it returns: requests, cache, counters.
"""

from __future__ import annotations

from math import inf

from policies import profile as profiles
from policies.breaker import Health
from policies.engine import Engine, EngineConfig, Event, Request
from policies.profile import Profile
from policies.simulation.values import Fault, FaultKind, Machine, Served, Turn
from policies.types import Polled


class Running:
    """One machine, live. `due`: when its engine has something to say. `health`: what the gateway believes."""

    __slots__ = ("due", "engine", "health", "machine", "profile", "requests", "up")

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.profile: Profile = profiles.get(machine.profile)
        self.engine = self._new()
        self.up = True
        self.due = inf
        self.health = Health()
        self.requests: dict[int, Served] = {}
        """Engine id → whose request it is."""

    @property
    def name(self) -> str:
        return self.machine.name

    def submit(self, now: float, served: Served, block_tokens: int) -> None:
        turn = served.turn
        served.engine_id = self.engine.submit(now, engine_request(turn, block_tokens))
        self.requests[served.engine_id] = served
        self._arm()

    def advance(self, now: float) -> list[Event]:
        events = self.engine.advance(now)
        self._arm()
        return events

    def cancel(self, now: float, served: Served) -> None:
        if self.requests.pop(served.engine_id, None) is not None:
            self.engine.cancel(served.engine_id, now)
            self._arm()

    def polled(self, now: float) -> Polled:
        stats = self.engine.stats(now)
        self._arm()
        return Polled(
            stats.running,
            stats.waiting,
            stats.kv_usage,
            stats.preemptions,
            stats.drafted_tokens,
            stats.accepted_tokens,
        )

    def fault(self, now: float, fault: Fault, begins: bool) -> list[Served]:
        """Begin or end a fault; returns the requests that it cut."""
        match fault.kind:
            case FaultKind.DOWN:
                self.up = not begins
                cut, self.requests = list(self.requests.values()), {}
                if begins:
                    self.due = inf
                    return cut
                self.engine = self._new()
            case FaultKind.SLOW:
                self.engine.set_speed(fault.factor if begins else 1.0, now)
            case FaultKind.COLLAPSE:
                self.engine.set_acceptance(fault.factor if begins else None, now)
        self._arm()
        return []

    def _new(self) -> Engine:
        own = self.profile.measured
        kv = self.machine.kv_tokens or self.profile.kv_tokens
        return Engine(self.profile, EngineConfig(kv, own.max_num_seqs, own.batched_tokens))

    def _arm(self) -> None:
        at = self.engine.next_event_at()
        self.due = inf if at is None else at


def engine_request(turn: Turn, block_tokens: int) -> Request:
    """A turn as the engine gets it: the true blocks of its prompt, and those that its answer fills."""
    full = turn.prompt // block_tokens
    return Request(
        turn.prompt,
        turn.output,
        turn.chain[:full],
        turn.chain[full : (turn.prompt + turn.output) // block_tokens],
    )
