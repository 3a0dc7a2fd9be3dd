"""Discrete events on a virtual clock: traffic, the engine model, and the live gateway's own policy between them.

`Contest` sets policies side by side; `Simulation` is one run; `SHAPES` and `trace` make traffic.
"""

from policies.simulation.compare import REFERENCE, Contest, FaultScore, Outcome
from policies.simulation.loop import Simulation
from policies.simulation.players import Live, Make, Player, live
from policies.simulation.score import Score, judge, score, timeline
from policies.simulation.shapes import SHAPES, Shape
from policies.simulation.traces import Row, Trace, trace
from policies.simulation.values import (
    Client,
    Conversation,
    End,
    Fault,
    FaultKind,
    Machine,
    Served,
    Traffic,
    Turn,
)

__all__ = [
    "REFERENCE",
    "SHAPES",
    "Client",
    "Contest",
    "Conversation",
    "End",
    "Fault",
    "FaultKind",
    "FaultScore",
    "Live",
    "Machine",
    "Make",
    "Outcome",
    "Player",
    "Row",
    "Score",
    "Served",
    "Shape",
    "Simulation",
    "Trace",
    "Traffic",
    "Turn",
    "judge",
    "live",
    "score",
    "timeline",
    "trace",
]
