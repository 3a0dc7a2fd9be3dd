"""What can be made to go wrong, and when.

Rules: a fault is switched on by a command (admin port) or by a script's clock, and off by its `count` of
requests, its `seconds`, or a command. State faults (ENGINE) change the engine or the listener while they are on;
request faults hit the next `count` requests. Nothing here does anything: the server asks.

A script is a JSON list of {"at": seconds after the start, …fault…}.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from proxy.sim.ask import Json


class FaultKind(StrEnum):
    """Closed."""

    REFUSE = "refuse"  # nothing listens: connections are refused
    STATUS = "status"  # answer with `status`
    RESET = "reset"  # break the connection off after `after_tokens`
    HANG = "hang"  # one stream falls silent after `after_tokens`
    STALL = "stall"  # the engine stands still; /health says well
    SLOW = "slow"  # the engine runs at `value` of its speed
    DIE = "die"  # the engine is killed: error events, then 503, then nothing listens
    ABORT = "abort"  # told to stop: streams end with "abort"; with `after_tokens` one stream only
    MALFORMED = "malformed"  # an event that is no JSON after `after_tokens`, then on
    TRUNCATED = "truncated"  # the body ends after `after_tokens`, properly framed, without an end event
    ACCEPTANCE = "acceptance"  # speculation's acceptance falls to `value`
    FLUSH = "flush"  # the prefix cache is emptied, once
    HEALTH = "health"  # /health answers `status`, whatever is true
    METRICS = "metrics"  # /metrics stands still
    DIALECT = "dialect"  # tool calls leave in `dialect`, raw or parsed
    REQUIRED = "required"  # tool_choice "required" gives XML text for `value` of the requests


ONCE = frozenset(
    {FaultKind.STATUS, FaultKind.RESET, FaultKind.HANG, FaultKind.MALFORMED, FaultKind.TRUNCATED}
)
"""Hit one request unless `count` says otherwise; the others stay until cleared."""


@dataclass(slots=True)
class Fault:
    """count: requests it hits, None for no end. seconds: how long it is on, None for no end."""

    kind: FaultKind
    count: int | None = None
    seconds: float | None = None
    after_tokens: int | None = None
    status: int = 500
    value: float = 0.0
    dialect: str = "hermes"
    at: float = 0.0

    def describe(self) -> Json:
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


class BadFault(ValueError):
    """A command that names no fault; the text says what is known."""


_DEFAULT_VALUES = {FaultKind.SLOW: 0.1, FaultKind.ACCEPTANCE: 0.02, FaultKind.REQUIRED: 0.6}
_DEFAULT_STATUS = {FaultKind.STATUS: 500, FaultKind.HEALTH: 503}
_TYPES: dict[str, tuple[type, ...]] = {
    "count": (int,),
    "seconds": (int, float),
    "after_tokens": (int,),
    "status": (int,),
    "value": (int, float),
    "dialect": (str,),
    "at": (int, float),
}


def read_fault(command: object) -> Fault:
    """{"fault": kind, …}; BadFault for anything else."""
    if not isinstance(command, dict):
        raise BadFault("a fault is an object")
    name = command.get("fault")
    if name not in list(FaultKind):
        raise BadFault(f"unknown fault {name!r}; known: {', '.join(FaultKind)}")
    kind = FaultKind(name)
    fault = Fault(kind, value=_DEFAULT_VALUES.get(kind, 0.0), status=_DEFAULT_STATUS.get(kind, 500))
    if kind in ONCE:
        fault.count = 1
    for key, value in command.items():
        if key == "fault":
            continue
        if key not in _TYPES:
            raise BadFault(f"unknown field {key!r}; known: {', '.join(_TYPES)}")
        if isinstance(value, bool) or not isinstance(value, _TYPES[key]):
            raise BadFault(f"{key} is not a {_TYPES[key][-1].__name__}")
        setattr(fault, key, value)
    return fault


class Faults:
    """The faults that are on."""

    def __init__(self) -> None:
        self.active: list[Fault] = []

    def on(self, kind: FaultKind) -> Fault | None:
        """The latest of that kind."""
        return next((fault for fault in reversed(self.active) if fault.kind is kind), None)

    def hit(self, *kinds: FaultKind) -> Fault | None:
        """The first of these kinds that is on, counted as having hit one request."""
        fault = next((fault for fault in self.active if fault.kind in kinds), None)
        if fault is not None and fault.count is not None:
            fault.count -= 1
            if fault.count <= 0:
                self.active.remove(fault)
        return fault

    def remove(self, fault: Fault) -> bool:
        """False if it was gone already."""
        if fault not in self.active:
            return False
        self.active.remove(fault)
        return True
