"""What a simulation is made of and what it tells: values only.

Rules: seconds on the virtual clock, which starts at 0; sizes in tokens. Traffic is drawn before it runs and is
the same for every policy: conversations whose turns follow one another, each with the true length of its answer
and the true hashes of its blocks. What a policy may know of a turn is made from it elsewhere (`facts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from policies.engine import BLOCK_TOKENS
from policies.profile import Profile
from policies.types import Slo, Tier

BALANCED = Tier("balanced", max_kl_bits=0.05, slo=Slo())
EXACT = Tier("exact", reference=True, slo=Slo())
FAST = Tier("fast", slo=Slo())
TIERS = {tier.name: tier for tier in (EXACT, BALANCED, FAST)}


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation.

    prompt, output: true tokens. new: prompt tokens that the conversation did not hold before; of its first turn
    all. gap: seconds that the client
    needs between the last token before and this request. at: it comes no sooner than that, whatever the gap
    (recorded times). chain: hashes of the blocks of prompt and answer from the conversation's beginning, at least
    as long as the prompt. allowed: the client's limit of output tokens.
    """

    prompt: int
    output: int
    new: int
    gap: float
    chain: tuple[int, ...]
    allowed: int
    tools: bool = False
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """`start`: when its first turn comes. `identity`: what its requests say of themselves (a session header, an agent's
    own), None if nothing; then `opening` tells its beginning from others. `bias`: true prompt tokens × this is what the
    gateway believes."""

    start: float
    turns: tuple[Turn, ...]
    tier: Tier = BALANCED
    identity: str | None = None
    tenant: str | None = None
    priority: int = 0
    bias: float = 1.0
    opening: str | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Conversations by start. `seconds`: how long new ones come. `warm_up`: seconds that no figure counts."""

    name: str
    conversations: tuple[Conversation, ...]
    seconds: float
    warm_up: float = 0.0
    block_tokens: int = BLOCK_TOKENS

    @property
    def requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)


@dataclass(frozen=True, slots=True)
class Machine:
    """A backend to simulate. `profile`: which configuration it is, by name or as measured. `known`: whether the policy has
    that profile, too, or must learn. `kv_tokens`: instead of the profile's."""

    name: str
    profile: str | Profile
    known: bool = True
    kv_tokens: int | None = None


class FaultKind(StrEnum):
    """Closed; an option of `tierline simulate`."""

    DOWN = "down"  # refuses connections, what it had is cut; comes back with an empty cache
    SLOW = "slow"  # everything takes several times as long
    COLLAPSE = "collapse"  # speculation's drafts are accepted no more; comes back as it was


@dataclass(frozen=True, slots=True)
class Fault:
    """`factor`: of SLOW, speed; of COLLAPSE, the acceptance left (0..1)."""

    kind: FaultKind
    machine: str
    at: float
    seconds: float
    factor: float = 0.0


@dataclass(frozen=True, slots=True)
class Client:
    """How clients behave when they are not answered.

    retries: a turn that was shed or cut comes again so often, after Retry-After or `backoff` seconds, whichever is
    longer (what the usual SDKs do); then its conversation ends. patience: seconds without a first token after which
    a client goes away and its conversation ends.
    """

    retries: int = 2
    backoff: float = 0.5
    patience: float = 600.0


class End(StrEnum):
    """How a turn ended. Closed; columns of the table."""

    ANSWERED = "answered"
    SHED = "shed"
    FAILED = "failed"  # cut or refused by a backend that was down
    GAVE_UP = "gave_up"  # the client's patience ended
    OPEN = "open"  # still there when the simulation was stopped


class Served:
    """What became of one turn. Times are seconds, None until they come; `asked`, `cached` and the marks are of the last
    attempt, `arrived` of the first. `order`: its conversation's place in the traffic."""

    __slots__ = (
        "arrived",
        "asked",
        "attempts",
        "cached",
        "conversation",
        "end",
        "ended",
        "engine_id",
        "first",
        "id",
        "machine",
        "missed_turns",
        "order",
        "place",
        "preempted",
        "reason",
        "sent",
        "shed",
        "started",
        "turn",
    )

    def __init__(self, conversation: Conversation, order: int, place: int, arrived: float) -> None:
        self.conversation = conversation
        self.order = order
        self.place = place
        self.turn = conversation.turns[place]
        self.arrived = self.asked = arrived
        self.id = -1
        self.engine_id = -1
        self.attempts = 0
        self.shed = 0
        self.preempted = 0
        self.missed_turns = 0
        """Turns of its conversation that never came because this one ended without an answer."""
        self.machine: str | None = None
        self.reason: str | None = None
        self.sent: float | None = None
        self.started: float | None = None
        self.cached: int | None = None
        self.first: float | None = None
        self.ended: float | None = None
        self.end = End.OPEN

    @property
    def ttft(self) -> float | None:
        """Seconds from the last attempt's arrival to the first token."""
        return None if self.first is None else self.first - self.asked

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None without two tokens and a whole answer."""
        if self.first is None or self.ended is None or self.end is not End.ANSWERED or self.turn.output < 2:
            return None
        return (self.ended - self.first) / (self.turn.output - 1)
