"""The sequences that decode, all stepping together.

Rules: `step` is the number of decode steps so far, with a fraction for the one under way. Between changes it
is counted, not walked: each sequence knows the step of its next mark (its end, or the filling of its last
block), so time needs only the nearest of them. Streamed sequences are looked at every step.
"""

from __future__ import annotations

from heapq import heappop, heappush

from policies.engine.batch import Sequence
from policies.engine.draft import LENGTH
from policies.engine.rates import Rates

SLACK = 1e-9
"""A step closer than this to done counts as done."""


class Decoding:
    __slots__ = (
        "_block_tokens",
        "_context",
        "_marks",
        "_nominal",
        "accepted",
        "drafts",
        "generated",
        "running",
        "step",
        "streams",
    )

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.running: dict[int, Sequence] = {}  # in the order they began
        self.streams: dict[int, Sequence] = {}
        self.step = 0.0
        self._marks: list[tuple[int, int, int]] = []  # (step, id, version)
        self._nominal = 0.0  # tokens all get in a step, as measured
        self._context = 0.0  # tokens all hold, less step × _nominal
        self.generated = 0  # of sequences that left; likewise:
        self.drafts = 0
        self.accepted = 0

    @property
    def whole_steps(self) -> int:
        return int(self.step + SLACK)

    def step_seconds(self, rates: Rates) -> float:
        """One decode step of those running; needs at least one."""
        streams = len(self.running)
        mean_context = (self._context + self.step * self._nominal) / streams
        return rates.step_seconds(streams, mean_context, self._nominal)

    def add(self, sequence: Sequence, rates: Rates) -> None:
        """It decodes from the step nearest to now on."""
        context = sequence.prompt
        sequence.joined = round(self.step)
        sequence.offset = (sequence.id * 197) % LENGTH
        sequence.draft = rates.draft(context)
        sequence.nominal = rates.nominal(context).mean
        self.running[sequence.id] = sequence
        if sequence.request.stream:
            self.streams[sequence.id] = sequence
        self._nominal += sequence.nominal
        self._context += context - sequence.joined * sequence.nominal
        self.mark(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It stops; `done` becomes all it generated."""
        step = self.whole_steps
        tokens, steps = sequence.tokens_at(step) - sequence.done, max(0, step - sequence.joined)
        self.generated += tokens
        self.drafts += steps
        self.accepted += max(0, tokens - steps)
        del self.running[sequence.id]
        self.streams.pop(sequence.id, None)
        sequence.version += 1
        self._nominal -= sequence.nominal
        self._context -= sequence.prompt - sequence.joined * sequence.nominal
        sequence.done += tokens
        if not self.running:
            self.step, self._nominal, self._context = float(step), 0.0, 0.0
            self._marks.clear()

    def mark(self, sequence: Sequence) -> None:
        """Note the step in which it ends or fills its last block."""
        assert sequence.draft is not None
        assert sequence.holding is not None
        room = sequence.holding.blocks * self._block_tokens - sequence.request.prompt_tokens
        wanted = min(sequence.request.output_tokens, room + 1) - sequence.done
        step = sequence.joined + sequence.draft.steps(sequence.offset, wanted)
        heappush(self._marks, (step, sequence.id, sequence.version))

    def next_step(self) -> int | None:
        """The next step in which something is to be told or done."""
        if self.streams:
            return int(self.step) + 1
        while self._marks and not self.valid(self._marks[0]):
            heappop(self._marks)
        return self._marks[0][0] if self._marks else None

    def valid(self, mark: tuple[int, int, int]) -> bool:
        sequence = self.running.get(mark[1])
        return sequence is not None and sequence.version == mark[2]

    def marked(self) -> list[tuple[int, int, int]]:
        """Take the marks that are due."""
        due = []
        while self._marks and self._marks[0][0] <= self.step:
            mark = heappop(self._marks)
            if self.valid(mark):
                due.append(mark)
        return due

    def totals(self) -> tuple[int, int, int]:
        """(tokens, drafts, accepted tokens) so far, running sequences included."""
        step = self.whole_steps
        tokens = steps = 0
        for sequence in self.running.values():
            tokens += sequence.tokens_at(step) - sequence.done
            steps += max(0, step - sequence.joined)
        return self.generated + tokens, self.drafts + steps, self.accepted + max(0, tokens - steps)
