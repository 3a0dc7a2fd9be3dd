"""Shapes of traffic that nobody has to record: chat, agents, long documents, bursts, and all of it mixed.

Rules: `rng` is an argument. Conversations are drawn one after the other at a rate of one a second and only then
stretched to the wanted rate, so that two rates see the same conversations in the same order. `rate` is always
requests a second, on average, as if every conversation went on to its end. Lengths are log-normal, cut at both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from math import exp
from random import Random

from policies.engine import BLOCK_TOKENS
from policies.simulation.values import BALANCED, EXACT, FAST, Conversation, Traffic, Turn
from policies.types import Tier

ESTIMATE_ERROR = 0.05
"""Standard deviation of ln(believed ÷ true prompt tokens)."""
OUTPUT_RESERVE = 1024
"""What the gateway reserves for a request without a limit: policy.output_reserve_tokens."""
WINDOW = 131072
"""No conversation grows beyond this many tokens."""


class Ids:
    """Block hashes, each used once; heads are shared by name."""

    def __init__(self) -> None:
        self._next = count(1)
        self._heads: dict[str, tuple[int, ...]] = {}

    def fresh(self, blocks: int) -> tuple[int, ...]:
        return tuple([next(self._next) for _ in range(blocks)])

    def head(self, name: str, tokens: int) -> tuple[int, ...]:
        """The full blocks of a prompt's beginning that all of that name share."""
        if name not in self._heads:
            self._heads[name] = self.fresh(tokens // BLOCK_TOKENS)
        return self._heads[name]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal by median and spread (standard deviation of the logarithm), cut to low..high."""

    median: float
    spread: float
    low: float
    high: float

    def draw(self, rng: Random) -> float:
        return min(self.high, max(self.low, self.median * exp(self.spread * rng.gauss(0.0, 1.0))))


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of conversation.

    turns: fewest and most, all equally likely. head: tokens that `heads` groups of conversations begin with. first:
    further tokens of the first prompt. added: tokens of a later turn's message or tool result. output: of an answer.
    gap: seconds between turns; with `pause` (share, lengths) some are longer. limit: the client's limit of output, None
    for none.
    """

    name: str
    turns: tuple[int, int]
    head: int
    heads: int
    first: Lengths
    added: Lengths
    output: Lengths
    gap: Lengths
    pause: tuple[float, Lengths] = (0.0, Lengths(1, 0, 0, 0))
    limit: int | None = None
    tools: bool = False
    identified: bool = True
    grows_to: Lengths | None = None
    """Instead of `added` alone: what the last prompt holds; each turn adds its part of the way there."""

    @property
    def mean_turns(self) -> float:
        return sum(self.turns) / 2


CHAT = Kind(
    "chat",
    turns=(1, 7),
    head=400,
    heads=4,
    first=Lengths(180, 1.1, 8, 6000),
    added=Lengths(60, 1.0, 4, 4000),
    output=Lengths(220, 0.8, 8, 1500),
    gap=Lengths(20, 0.8, 2, 180),
)
AGENTS = Kind(
    "agents",
    turns=(10, 40),
    head=6000,
    heads=3,
    first=Lengths(2000, 0.3, 500, 6000),
    added=Lengths(1.0, 0.6, 0.2, 4.0),
    output=Lengths(180, 0.9, 24, 2000),
    gap=Lengths(3, 1.0, 0.3, 60),
    pause=(0.3, Lengths(75, 0.8, 10, 400)),
    limit=4096,
    tools=True,
    grows_to=Lengths(122_000, 0.05, 100_000, 126_000),
)
DOCUMENTS = Kind(
    "documents",
    turns=(1, 3),
    head=0,
    heads=1,
    first=Lengths(40_000, 0.6, 12_000, 120_000),
    added=Lengths(60, 0.8, 8, 1000),
    output=Lengths(450, 0.5, 50, 1500),
    gap=Lengths(30, 0.7, 4, 240),
    limit=2048,
)


def converse(kind: Kind, rng: Random, ids: Ids, start: float, tier: Tier, tenant: str | None) -> Conversation:
    """One conversation of that kind."""
    number = rng.randint(*kind.turns)
    group = rng.randrange(kind.heads)
    head = ids.head(f"{kind.name} {group}", kind.head)
    outputs = [max(1, round(kind.output.draw(rng))) for _ in range(number)]
    prompts = _prompts(kind, rng, outputs)
    total = prompts[-1] + outputs[-1]
    chain = head + ids.fresh(total // BLOCK_TOKENS - len(head))
    turns = []
    held = 0
    for place, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        gap = 0.0
        if place:
            longer = rng.random() < kind.pause[0]
            gap = (kind.pause[1] if longer else kind.gap).draw(rng)
        allowed = kind.limit or OUTPUT_RESERVE
        turns.append(Turn(prompt, output, prompt - held, gap, chain, max(allowed, output), kind.tools))
        held = prompt + output
    bias = exp(rng.gauss(0.0, ESTIMATE_ERROR))
    identity = f"{kind.name}-{rng.getrandbits(48):012x}" if kind.identified else None
    return Conversation(start, tuple(turns), tier, identity, tenant, bias=bias)


def _prompts(kind: Kind, rng: Random, outputs: list[int]) -> list[int]:
    """Each turn's prompt: all before it, and what is added."""
    prompts = [kind.head + round(kind.first.draw(rng))]
    added = [kind.added.draw(rng) for _ in outputs[1:]]
    if kind.grows_to is not None and added:
        room = kind.grows_to.draw(rng) - prompts[0] - sum(outputs[:-1])
        scale = max(0.0, room) / sum(added)
        added = [part * scale for part in added]
    for output, part in zip(outputs, added, strict=False):
        prompts.append(prompts[-1] + output + max(1, round(part)))
    return [min(prompt, WINDOW - 4096) for prompt in prompts]


Draw = Callable[[Random, Ids, float], Conversation]
"""(rng, ids, start) → a conversation."""


def _one(kind: Kind) -> Draw:
    return lambda rng, ids, start: converse(kind, rng, ids, start, BALANCED, "a")


def _mixed(rng: Random, ids: Ids, start: float) -> Conversation:
    """Mostly chat; an agent in 25, a document in 60; a fifth exact, a fifth fast, two tenants."""
    kind = rng.choices((CHAT, AGENTS, DOCUMENTS), (0.944, 0.04, 0.016))[0]
    tier = rng.choices((BALANCED, EXACT, FAST), (0.6, 0.2, 0.2))[0]
    return converse(kind, rng, ids, start, tier, rng.choice("ab"))


def _steady(_: float) -> float:
    return 1.0


def _bursty(second: float) -> float:
    """Of every 60 s, 10 bring 4 times the usual: 40 % of all in a sixth of the time."""
    return 2.4 if second % 60.0 >= 50.0 else 0.72


@dataclass(frozen=True, slots=True)
class Shape:
    """`draw` makes conversations, `turns` is how many requests one has on average. `pace`: relative rate at a second,
    1 on average, never above `peak`. `warm_up`: seconds until about as many conversations live as later."""

    name: str
    draw: Draw
    turns: float
    pace: Callable[[float], float] = _steady
    peak: float = 1.0
    warm_up: float = 180.0
    seconds: float = 900.0

    def traffic(self, rate: float, rng: Random, *, seconds: float | None = None) -> Traffic:
        """`rate` requests a second for `seconds` after the warm-up."""
        total = self.warm_up + (self.seconds if seconds is None else seconds)
        ids = Ids()
        starts = _arrivals(rate / self.turns, self.pace, self.peak, rng.getrandbits(64), total)
        bodies = Random(rng.getrandbits(64))
        conversations = tuple([self.draw(bodies, ids, start) for start in starts])
        return Traffic(self.name, conversations, total, self.warm_up)


def _arrivals(
    rate: float, pace: Callable[[float], float], peak: float, seed: int, seconds: float
) -> Iterator[float]:
    """A Poisson process whose rate follows `pace`, thinned from its peak."""
    rng, now = Random(seed), 0.0
    while rate > 0:
        now += rng.expovariate(1.0) / (rate * peak)
        if now >= seconds:
            return
        if rng.random() * peak < pace(now):
            yield now


_MIXED_TURNS = 0.944 * CHAT.mean_turns + 0.04 * AGENTS.mean_turns + 0.016 * DOCUMENTS.mean_turns

SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("chat", _one(CHAT), CHAT.mean_turns),
        Shape("agents", _one(AGENTS), AGENTS.mean_turns, warm_up=900.0, seconds=7200.0),
        Shape("documents", _one(DOCUMENTS), DOCUMENTS.mean_turns, warm_up=120.0, seconds=14400.0),
        Shape("burst", _one(CHAT), CHAT.mean_turns, pace=_bursty, peak=2.4),
        Shape("mixed", _mixed, _MIXED_TURNS, warm_up=900.0, seconds=3600.0),
    )
}
