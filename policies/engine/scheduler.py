"""One vLLM engine as a state machine: give it requests and the time, it gives back events.

Rules: no clock: `now` is an argument and never goes back. `next_event_at` is the time of the next event if
nothing else is submitted; None when idle or standing still. First come, first served; the youngest is
preempted when blocks run out. A request costs a handful of events however long it is, unless it is streamed.
"""

from __future__ import annotations

from collections import deque

from policies.engine.batch import Batch, Sequence
from policies.engine.decoding import Decoding
from policies.engine.rates import Rates
from policies.engine.seats import Seats
from policies.engine.values import (
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
from policies.profile import Profile


class Engine:
    """`Engine(profile)` is the configuration as measured; `config` overrides sizes."""

    def __init__(self, profile: Profile, config: EngineConfig | None = None) -> None:
        own = profile.measured
        self.profile = profile
        self.config = config or EngineConfig(profile.kv_tokens, own.max_num_seqs, own.batched_tokens)
        self._rates = Rates(profile, self.config.block_tokens, self.config.batched_tokens)
        self._seats = Seats(self.config)
        self._decoding = Decoding(self.config.block_tokens)
        self._waiting: deque[Sequence] = deque()
        self._batch = Batch(self._rates)
        self._room = False  # something changed since admission last failed
        self._now = 0.0
        self._speed = 1.0
        self._paced = False  # the two rates below are those of the present state
        self._steps_per_second = self._work_per_second = 0.0
        self._out: list[Event] = []
        self._ids = 0
        self._preemptions = self._prompted = self._first = self._ended = 0

    def submit(self, now: float, request: Request) -> int:
        """Queue a request; its id. ValueError if it could never fit the cache."""
        if request.output_tokens < 1 or request.prompt_tokens < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        if not self._seats.could_fit(request):
            raise ValueError("prompt and output are larger than the KV cache")
        self._run(now)
        self._ids += 1
        self._waiting.append(Sequence(self._ids, request))
        self._room = True
        return self._ids

    def cancel(self, id: int, now: float) -> bool:
        """Forget a request, wherever it is; False if it is not there (any more)."""
        self._run(now)
        if id in self._decoding.running:
            self._leave(self._decoding.running[id])
            return True
        for sequence in (*self._batch.members, *self._waiting):
            if sequence.id == id:
                self._unqueue(sequence)
                return True
        return False

    def next_event_at(self) -> float | None:
        if self._out or self._can_admit():
            return self._now
        due = self._due()
        return due[0] if due else None

    def advance(self, now: float) -> list[Event]:
        """Everything that happened up to and including `now`, in order."""
        self._run(now)
        out, self._out = self._out, []
        return out

    def set_speed(self, factor: float, now: float) -> None:
        """Slow the whole engine down (below 1) or stop it (0)."""
        self._run(now)
        self._speed, self._paced = factor, False

    def set_acceptance(self, acceptance: float | None, now: float) -> None:
        """Speculation's acceptance from now on, 0..1; None: as measured. Steps take as long as before."""
        self._run(now)
        self._rates = Rates(self.profile, self.config.block_tokens, self.config.batched_tokens, acceptance)
        for sequence in list(self._decoding.running.values()):
            self._decoding.remove(sequence)
            self._decoding.add(sequence, self._rates)

    def flush_cache(self, now: float) -> None:
        """Forget every prefix that no running request holds."""
        self._run(now)
        self._seats.flush()

    def known_tokens(self, request: Request) -> int:
        """How many of its prompt's tokens are in the prefix cache; nothing is counted or held."""
        return self._seats.known(Sequence(0, request))

    def stats(self, now: float) -> EngineStats:
        self._run(now)
        tokens, drafts, accepted = self._decoding.totals()
        return EngineStats(
            running=len(self._decoding.running) + len(self._batch.members),
            waiting=len(self._waiting),
            kv_usage=self._seats.usage,
            queried_tokens=self._seats.queried,
            hit_tokens=self._seats.hit,
            preemptions=self._preemptions,
            prompt_tokens=self._prompted,
            generation_tokens=self._first + tokens,
            finished=self._ended,
            steps=self._decoding.whole_steps,
            drafts=drafts,
            drafted_tokens=drafts * self.profile.measured.speculation.draft_tokens,
            accepted_tokens=accepted,
        )

    # -- time

    def _run(self, now: float) -> None:
        while True:
            if self._can_admit():
                self._admit()
            due = self._due()
            if due is None or due[0] > now:
                break
            self._move(due[0])
            if due[1] is None:
                self._end_phase()
            else:
                self._decoding.step = float(due[1])
                self._end_step()
        self._move(now)

    def _due(self) -> tuple[float, int | None] | None:
        """The next time of interest, and the decode step it ends; None: a phase of the batch ends."""
        self._pace()
        best: tuple[float, int | None] | None = None
        if self._batch.phases and self._work_per_second > 0:
            best = self._now + self._batch.phases[0].seconds / self._work_per_second, None
        step = self._decoding.next_step()
        if step is not None and self._steps_per_second > 0:
            at = self._now + max(0.0, step - self._decoding.step) / self._steps_per_second
            if best is None or at <= best[0]:
                best = at, step
        return best

    def _move(self, to: float) -> None:
        passed = to - self._now
        if passed <= 0:
            return
        self._pace()
        self._now = to
        if self._decoding.running:
            self._decoding.step += passed * self._steps_per_second
        if self._batch.phases:
            self._batch.work(passed * self._work_per_second)

    def _pace(self) -> None:
        """Rates until the next state change. A prefill chunk and a decode step share one engine step."""
        if self._paced:
            return
        self._paced = True
        chunk = self._batch.phases[0].chunk if self._batch.phases else 0.0
        step = self._decoding.step_seconds(self._rates) if self._decoding.running else 0.0
        self._steps_per_second = self._speed / (step + chunk) if step else 0.0
        self._work_per_second = self._speed * (chunk / (chunk + step) if chunk else 1.0)

    # -- starting

    def _can_admit(self) -> bool:
        return self._room and bool(self._waiting) and self._batch.open and self._speed > 0

    def _admit(self) -> None:
        """Take from the queue's head what fits; the first that does not holds up the rest."""
        self._room = False
        taken: list[Sequence] = []
        seats = self.config.max_num_seqs - len(self._decoding.running) - len(self._batch.members)
        while self._waiting and len(taken) < seats and self._seats.take(self._waiting[0]):
            taken.append(self._waiting.popleft())
            self._out.append(Started(taken[-1].id, self._now, taken[-1].cached))
        if taken:
            if not self._batch.members:
                self._batch = Batch(self._rates)
            self._batch.join(taken)
            self._paced = False

    def _end_phase(self) -> None:
        sequence = self._batch.end_phase()
        self._paced = False
        self._room = self._room or not self._batch.phases
        if sequence is None:
            return
        self._seats.publish(sequence)
        if sequence.done == 0:
            self._prompted += sequence.request.prompt_tokens
            self._out.append(FirstToken(sequence.id, self._now))
        elif sequence.request.stream:
            self._out.append(Tokens(sequence.id, self._now, 1))
        sequence.done += 1
        self._first += 1
        if sequence.done >= sequence.request.output_tokens:
            self._finish(sequence)
        else:
            self._decoding.add(sequence, self._rates)

    # -- decoding and leaving

    def _end_step(self) -> None:
        step = int(self._decoding.step)
        for sequence in self._decoding.streams.values():
            n = sequence.tokens_at(step) - sequence.tokens_at(step - 1)
            if n:
                self._out.append(Tokens(sequence.id, self._now, n))
        full = []
        marks = self._decoding.marked()
        # Only marks change the pace: a streamed request must not see other times than one that is not.
        self._paced = self._paced and not marks
        for mark in marks:
            sequence = self._decoding.running[mark[1]]
            if sequence.tokens_at(step) >= sequence.request.output_tokens:
                self._finish(sequence)
            else:
                full.append(mark)
        for mark in full:
            if self._decoding.valid(mark):
                self._extend(self._decoding.running[mark[1]])

    def _extend(self, sequence: Sequence) -> None:
        """Another block; the youngest lose theirs until there is one."""
        while not self._seats.grow(sequence):
            starting, running = self._batch.members, self._decoding.running
            youngest = starting[-1] if starting else next(reversed(running.values()))
            self._preempt(youngest)
            if youngest is sequence:
                return
        self._decoding.mark(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self._preemptions += 1
        if sequence.id in self._decoding.running:
            self._leave(sequence)
        else:
            self._unqueue(sequence)
        self._waiting.appendleft(sequence)
        self._out.append(Preempted(sequence.id, self._now, sequence.done))

    def _finish(self, sequence: Sequence) -> None:
        self._ended += 1
        self._out.append(Finished(sequence.id, self._now, sequence.request.output_tokens))
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Stop and give back blocks; the full ones stay known."""
        if sequence.id in self._decoding.running:
            self._decoding.remove(sequence)
        self._seats.publish(sequence)
        self._give_back(sequence)

    def _unqueue(self, sequence: Sequence) -> None:
        """Leave the batch or the queue before the first token."""
        if sequence in self._batch.members:
            self._batch.drop(sequence)
            self._give_back(sequence)
        else:
            self._waiting.remove(sequence)
            self._room = True

    def _give_back(self, sequence: Sequence) -> None:
        self._seats.give_back(sequence)
        self._room, self._paced = True, False
