"""Conversations: which live, on which backend, what they are expected to hold of its KV cache.

Rules: agents are processes and the KV cache is their memory; one conversation too many evicts all of them in turn. A
conversation lives while a turn of it runs and, after that, for as long as its return is likely: how long is learned
from all returns. Its identity is what the request says of it, else the hash chain of its prompt (it continues the one
whose whole last prompt it begins with). Everything is bounded; who is forgotten is a new conversation when it returns.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp, log

from policies.params import WorkingSetParams
from policies.types import RequestFacts

LEARN = 0.02
"""Weight of one observation in the learned figures."""
YOUNG = 3
"""Up to this turn a conversation is expected to grow to the usual context."""


class Talk:
    """One conversation. context: tokens of the last turn's prompt and answer. links: of its last prompt's chain.
    weight: tokens that count in the working set of `backend` now, 0 when idle."""

    __slots__ = ("backend", "context", "ended", "key", "last_link", "links", "running", "turns", "weight")

    def __init__(self, key: str) -> None:
        self.key = key
        self.backend: str | None = None
        self.context = 0.0
        self.turns = 0
        self.running = 0
        self.ended = 0.0
        self.links = 0
        self.last_link: int | None = None
        self.weight = 0.0


class WorkingSet:
    """patience: seconds after which one that has not returned is idle. usual: tokens that a conversation holds, as a mean
    over turns. Both learned."""

    __slots__ = (
        "_answer",
        "_asked",
        "_ends",
        "_returns",
        "_talks",
        "_waiting",
        "live",
        "params",
        "patience",
        "tokens",
        "usual",
    )

    def __init__(self, params: WorkingSetParams) -> None:
        self.params = params
        self.patience = min(params.most_idle_seconds, max(params.least_idle_seconds, 30.0))
        self.usual = 0.0
        self.live: dict[str, int] = {}
        self.tokens: dict[str, float] = {}
        self._asked: RequestFacts | None = None  # the last one, asked several times in a row
        self._answer: str | None = None
        self._talks: OrderedDict[str, Talk] = OrderedDict()
        self._ends: dict[int, str] = {}
        self._waiting: OrderedDict[str, Talk] = OrderedDict()  # live, no turn running, by the time it ended
        self._returns = [0.5, 0.7, 0.9]  # chance of a return after the first, second, any further turn

    def __len__(self) -> int:
        return len(self._talks)

    def key(self, facts: RequestFacts) -> str | None:
        """Whose turn this is; None: nothing tells, it is a request of its own."""
        if facts.conversation is not None:
            return facts.conversation
        if facts is not self._asked:
            self._asked, self._answer = facts, self._find(facts)
        return self._answer

    def _find(self, facts: RequestFacts) -> str | None:
        for link in reversed(facts.prefix):
            known = self._ends.get(link)
            if known is not None:
                return known
        if facts.prefix:
            return f"#{facts.prefix[-1]:x}"
        return facts.session

    def get(self, key: str | None) -> Talk | None:
        return self._talks.get(key) if key is not None else None

    def expected(self, prompt: float) -> float:
        """Tokens that a new conversation with this first prompt is expected to hold."""
        return max(prompt, self.usual)

    def begin(self, now: float, key: str, backend: str, facts: RequestFacts) -> Talk:
        """A turn starts there; the conversation lives there from now on."""
        talk = self._talks.get(key)
        if talk is None:
            talk = self._talks[key] = Talk(key)
            if len(self._talks) > self.params.conversations:
                self._forget(next(iter(self._talks)))
        elif not talk.running:
            self._returned(now, talk)
        self._talks.move_to_end(key)
        self._waiting.pop(key, None)
        talk.running += 1
        talk.turns += 1
        if facts.prefix:
            if talk.last_link is not None and self._ends.get(talk.last_link) == key:
                del self._ends[talk.last_link]
            talk.links, talk.last_link = len(facts.prefix), facts.prefix[-1]
            self._ends[talk.last_link] = key
        talk.context = max(talk.context, float(facts.prompt.tokens))
        self._weigh(talk, backend, 1.0)
        return talk

    def finish(self, now: float, talk: Talk, context: float) -> None:
        """A turn ended, its prompt and answer being `context` tokens."""
        talk.running -= 1
        talk.context = context
        self.usual = context if not self.usual else self.usual + LEARN * (context - self.usual)
        if talk.running or talk.key not in self._talks:
            return
        talk.ended = now
        self._waiting[talk.key] = talk
        self._waiting.move_to_end(talk.key)
        self._weigh(talk, talk.backend, self._returns[min(talk.turns, YOUNG) - 1])

    def sweep(self, now: float) -> None:
        """Those that did not return in time are idle: they count no more, and are still remembered."""
        while self._waiting:
            key, talk = next(iter(self._waiting.items()))
            if talk.ended + self.patience >= now:
                return
            del self._waiting[key]
            place = min(talk.turns, YOUNG) - 1
            self._returns[place] += LEARN * (0.0 - self._returns[place])
            self._weigh(talk, talk.backend, 0.0)

    def lost(self, backend: str) -> None:
        """That backend's cache is empty: nobody's context is there any more."""
        for talk in self._talks.values():
            if talk.backend == backend and not talk.running:
                self._waiting.pop(talk.key, None)
                self._weigh(talk, None, 0.0)

    def _returned(self, now: float, talk: Talk) -> None:
        """Learn from a return: the quantile moves up by its share when the gap was longer, else down."""
        gap = now - talk.ended
        late, q = gap > self.patience, self.params.return_quantile
        moved = log(self.patience) + 0.1 * (q if late else q - 1.0)
        self.patience = min(self.params.most_idle_seconds, max(self.params.least_idle_seconds, exp(moved)))
        place = min(talk.turns, YOUNG) - 1
        self._returns[place] += LEARN * (1.0 - self._returns[place])

    def _weigh(self, talk: Talk, backend: str | None, chance: float) -> None:
        if talk.weight and talk.backend is not None:
            self.live[talk.backend] -= 1
            self.tokens[talk.backend] -= talk.weight
        talk.backend = backend
        expected = self.expected(talk.context) if talk.turns <= YOUNG else talk.context
        talk.weight = chance * expected if backend is not None else 0.0
        if talk.weight and backend is not None:
            self.live[backend] = self.live.get(backend, 0) + 1
            self.tokens[backend] = self.tokens.get(backend, 0.0) + talk.weight

    def _forget(self, key: str) -> None:
        talk = self._talks.pop(key)
        self._waiting.pop(key, None)
        if talk.last_link is not None and self._ends.get(talk.last_link) == key:
            del self._ends[talk.last_link]
        self._weigh(talk, talk.backend, 0.0)
