"""Conversations: which live, on which backend, what they are expected to hold of its KV cache.

Rules: agents are processes and the KV cache is their memory; one conversation too many evicts all of them in turn. A
conversation lives while a turn of it runs and, after that, for as long as its return is likely: how long is learned
from the returns of its kind, with tools or without: an agent waits for a build longer than a chat for its reader, and
grows larger. Its identity is what the request says of it, else the hash chain of its prompt (it continues the one
whose whole last prompt it begins with). Everything is bounded; who is forgotten is a new conversation when it returns.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
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

    __slots__ = (
        "backend", "context", "ended", "habits", "key", "last_link", "links", "running", "turns", "weight",
    )  # fmt: skip

    def __init__(self, key: str, habits: Habits) -> None:
        self.key = key
        self.habits = habits
        self.backend: str | None = None
        self.context = 0.0
        self.turns = 0
        self.running = 0
        self.ended = 0.0
        self.links = 0
        self.last_link: int | None = None
        self.weight = 0.0


class Habits:
    """What conversations of a kind do, learned. patience: seconds after which one that has not returned is idle. usual:
    tokens that one holds, as a mean over turns. returns: chance of a return after the first, second, any further turn.
    waiting: live, no turn running, by the time it ended."""

    __slots__ = ("patience", "returns", "usual", "waiting")

    def __init__(self, params: WorkingSetParams) -> None:
        self.patience = min(params.most_idle_seconds, max(params.least_idle_seconds, 30.0))
        self.returns = [0.5, 0.7, 0.9]
        self.usual = 0.0
        self.waiting: OrderedDict[str, Talk] = OrderedDict()

    def returned(self, gap: float, turns: int, params: WorkingSetParams) -> None:
        """The quantile moves up by its share when the gap (seconds) was longer, else down."""
        late, q = gap > self.patience, params.return_quantile
        moved = log(self.patience) + 0.1 * (q if late else q - 1.0)
        self.patience = min(params.most_idle_seconds, max(params.least_idle_seconds, exp(moved)))
        self._note(turns, 1.0)

    def stayed_away(self, turns: int) -> None:
        self._note(turns, 0.0)

    def chance(self, turns: int) -> float:
        """That one returns after so many turns."""
        return self.returns[min(turns, YOUNG) - 1]

    def _note(self, turns: int, came: float) -> None:
        place = min(turns, YOUNG) - 1
        self.returns[place] += LEARN * (came - self.returns[place])

    def ended(self, context: float) -> None:
        """A turn ended, with so many tokens."""
        self.usual = context if not self.usual else self.usual + LEARN * (context - self.usual)


class WorkingSet:
    """live, tokens: conversations that live on a backend, and what they are expected to hold there."""

    __slots__ = ("_answer", "_asked", "_ends", "_habits", "_talks", "live", "params", "tokens")

    def __init__(self, params: WorkingSetParams) -> None:
        self.params = params
        self._habits = {tools: Habits(params) for tools in (False, True)}
        self.live: dict[str, int] = {}
        self.tokens: dict[str, float] = {}
        self._asked: RequestFacts | None = None  # the last one, asked several times in a row
        self._answer: str | None = None
        self._talks: OrderedDict[str, Talk] = OrderedDict()
        self._ends: dict[int, str] = {}

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

    def latest(self, count: int) -> list[Talk]:
        """Those whose turn began last, the latest first."""
        return list(islice(reversed(self._talks.values()), count))

    def habits(self, facts: RequestFacts) -> Habits:
        """Of the request's kind."""
        return self._habits[facts.tools]

    def expected(self, facts: RequestFacts) -> float:
        """Tokens that a new conversation with this first prompt is expected to hold."""
        return max(float(facts.prompt.tokens), self._habits[facts.tools].usual)

    def begin(self, now: float, key: str, backend: str, facts: RequestFacts) -> Talk:
        """A turn starts there; the conversation lives there from now on."""
        talk = self._talks.get(key)
        if talk is None:
            talk = self._talks[key] = Talk(key, self.habits(facts))
            if len(self._talks) > self.params.conversations:
                self._forget(next(iter(self._talks)))
        elif not talk.running:
            talk.habits.returned(now - talk.ended, talk.turns, self.params)
        self._talks.move_to_end(key)
        talk.habits.waiting.pop(key, None)
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
        habits = talk.habits
        habits.ended(context)
        if talk.running or talk.key not in self._talks:
            return
        talk.ended = now
        habits.waiting[talk.key] = talk
        habits.waiting.move_to_end(talk.key)
        self._weigh(talk, talk.backend, habits.chance(talk.turns))

    def sweep(self, now: float) -> None:
        """Those that did not return in time are idle: they count no more, and are still remembered."""
        for habits in self._habits.values():
            while habits.waiting:
                key, talk = next(iter(habits.waiting.items()))
                if talk.ended + habits.patience >= now:
                    break
                del habits.waiting[key]
                habits.stayed_away(talk.turns)
                self._weigh(talk, talk.backend, 0.0)

    def lost(self, backend: str) -> None:
        """That backend's cache is empty: nobody's context is there any more."""
        for talk in self._talks.values():
            if talk.backend == backend and not talk.running:
                talk.habits.waiting.pop(talk.key, None)
                self._weigh(talk, None, 0.0)

    def _weigh(self, talk: Talk, backend: str | None, chance: float) -> None:
        if talk.weight and talk.backend is not None:
            self.live[talk.backend] -= 1
            self.tokens[talk.backend] -= talk.weight
        talk.backend = backend
        expected = max(talk.context, talk.habits.usual) if talk.turns <= YOUNG else talk.context
        talk.weight = chance * expected if backend is not None else 0.0
        if talk.weight and backend is not None:
            self.live[backend] = self.live.get(backend, 0) + 1
            self.tokens[backend] = self.tokens.get(backend, 0.0) + talk.weight

    def _forget(self, key: str) -> None:
        talk = self._talks.pop(key)
        talk.habits.waiting.pop(key, None)
        if talk.last_link is not None and self._ends.get(talk.last_link) == key:
            del self._ends[talk.last_link]
        self._weigh(talk, talk.backend, 0.0)
