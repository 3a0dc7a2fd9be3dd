"""The engine model: one state machine that the simulated server and the simulator drive alike."""

from policies.engine.scheduler import Engine
from policies.engine.values import (
    BLOCK_TOKENS,
    EngineConfig,
    EngineStats,
    Event,
    Finished,
    FirstToken,
    Preempted,
    Request,
    Started,
    Tokens,
)

__all__ = [
    "BLOCK_TOKENS",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Event",
    "Finished",
    "FirstToken",
    "Preempted",
    "Request",
    "Started",
    "Tokens",
]
