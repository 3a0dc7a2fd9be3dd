"""The event loop: conversations, clients, machines and a policy on one virtual clock.

Rules: at one time the engines come first, then who waits in the policy's queue, then the heap. A conversation goes on
only after its last turn was answered; one whose turn ended otherwise is over. Machines are probed and polled as the
live gateway does it, each on its own beat; health is `policies.breaker`, second attempts are `policies.retry`. The
loop ends when every conversation has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from random import Random

from policies.breaker import BreakerParams, on_failure, on_probe, on_success
from policies.engine import Event, Finished, FirstToken, Preempted, Started
from policies.retry import Failure, Retry, RetryParams, may_retry
from policies.simulation.facts import facts_of
from policies.simulation.machines import Running
from policies.simulation.players import Make
from policies.simulation.values import Client, End, Fault, Machine, Served, Traffic
from policies.types import Go, Result, Shed, Verdict

POLL_SECONDS = 2.0
_BREAKER, _RETRY = BreakerParams(), RetryParams()
_CUT = Result(ok=False)
CLIENT = Client()

# What is on the heap, in the order of equal times.
_FAULT, _POLL, _TURN, _AGAIN, _PATIENCE = range(5)


class Simulation:
    """`run` once. `served`: every turn that came, in the order of arrival."""

    def __init__(
        self,
        machines: Iterable[Machine],
        traffic: Traffic,
        make: Make,
        rng: Random,
        *,
        faults: Sequence[Fault] = (),
        client: Client = CLIENT,
    ) -> None:
        self.machines = {machine.name: Running(machine) for machine in machines}
        self.traffic = traffic
        self.served: list[Served] = []
        self.now = 0.0
        self._running = list(self.machines.values())
        self._player = make(self._running, Random(rng.getrandbits(64)))
        self._rng = rng
        self._client = client
        self._heap: list[tuple[float, int, int, object]] = []
        self._pushed = 0
        self._open = len(traffic.conversations)
        self._ids = 0
        self._waiting: dict[int, Served] = {}
        for fault in faults:
            self._push(fault.at, _FAULT, (fault, True))
            self._push(fault.at + fault.seconds, _FAULT, (fault, False))
        for machine in self._running:
            self._push(rng.uniform(0.0, POLL_SECONDS), _POLL, machine)
        self._conversations = enumerate(traffic.conversations)
        self._bring_next()

    def run(self) -> list[Served]:
        heap, machines, player = self._heap, self._running, self._player
        while self._open:
            at, due = heap[0][0], None
            for machine in machines:
                if machine.due <= at:
                    at, due = machine.due, machine
            queue_at = player.next_event_at()
            if queue_at is not None and queue_at < at:
                self.now = max(self.now, queue_at)
                self._settle()
                continue
            self.now = at = max(self.now, at)
            if due is not None:
                for event in due.advance(at):
                    self._tell(due, event)
                self._settle()
            else:
                self._handle(heappop(heap))
        return self.served

    def _push(self, at: float, kind: int, what: object) -> None:
        self._pushed += 1
        heappush(self._heap, (at, kind, self._pushed, what))

    def _handle(self, entry: tuple[float, int, int, object]) -> None:
        _, kind, _, what = entry
        match what:
            case Running():
                self._poll(what)
            case Served() if kind == _PATIENCE:
                self._lose_patience(what)
            case Served() if kind == _TURN:
                self._arrive(what)
            case Served() if what.end is End.OPEN:
                self._offer(what)
            case (Fault() as fault, bool() as begins):
                for cut in self.machines[fault.machine].fault(self.now, fault, begins):
                    self._player.finish(self.now, cut.id, _CUT)
                    self._come_again(cut, End.FAILED, 0.0)
        self._settle()

    # -- clients

    def _bring_next(self) -> None:
        """Put the next conversation's first turn on the heap."""
        for order, conversation in self._conversations:
            self._push(conversation.start, _TURN, Served(conversation, order, 0, conversation.start))
            return

    def _arrive(self, served: Served) -> None:
        if served.place == 0:
            self._bring_next()
        self.served.append(served)
        self._push(self.now + self._client.patience, _PATIENCE, served)
        self._offer(served)

    def _offer(self, served: Served) -> None:
        self._ids += 1
        served.id = self._ids
        served.attempts += 1
        served.asked = self.now
        facts = facts_of(served.conversation, served.turn, self.traffic.block_tokens)
        self._obey(served, self._player.offer(self.now, served.id, served, facts))

    def _obey(self, served: Served, verdict: Verdict) -> None:
        match verdict:
            case Go():
                assert verdict.decision.backend is not None
                self._send(served, verdict)
            case Shed():
                served.shed += 1
                served.reason = verdict.reason.value
                self._come_again(served, End.SHED, verdict.retry_after)
            case _:
                self._waiting[served.id] = served

    def _send(self, served: Served, go: Go) -> None:
        """To the chosen machine; to another one while it cannot be reached."""
        verdict: Verdict = go
        failures: list[Failure] = []
        tried: frozenset[str] = frozenset()
        while isinstance(verdict, Go):
            name = verdict.decision.backend
            assert name is not None
            machine = self.machines[name]
            if machine.up:
                served.machine, served.sent = name, self.now
                machine.submit(self.now, served, self.traffic.block_tokens)
                return
            self._player.finish(self.now, served.id, _CUT)
            self._failed(machine)
            failures.append(Failure.CONNECT)
            tried |= {name}
            if may_retry(failures, False, _RETRY) is not Retry.OTHER_BACKEND:
                break
            facts = facts_of(served.conversation, served.turn, self.traffic.block_tokens)
            verdict = self._player.offer(self.now, served.id, served, facts, tried)
        self._come_again(served, End.FAILED, 0.0)

    def _come_again(self, served: Served, end: End, after: float) -> None:
        """An attempt ended without an answer: again later, or that was the conversation."""
        served.first = served.started = None
        if served.attempts <= self._client.retries:
            self._push(self.now + max(after, self._client.backoff), _AGAIN, served)
        else:
            self._give_up(served, end)

    def _lose_patience(self, served: Served) -> None:
        if served.end is not End.OPEN or served.first is not None:
            return
        if self._waiting.pop(served.id, None) is not None:
            self._player.withdraw(self.now, served.id)
        elif served.machine is not None and served.engine_id in self.machines[served.machine].requests:
            self.machines[served.machine].cancel(self.now, served)
            self._player.finish(self.now, served.id, _CUT)
        served.attempts = self._client.retries + 1
        self._give_up(served, End.GAVE_UP)

    def _give_up(self, served: Served, end: End) -> None:
        if served.end is not End.OPEN:
            return
        served.end, served.ended = end, self.now
        served.missed_turns = len(served.conversation.turns) - served.place - 1
        self._open -= 1

    # -- machines

    def _tell(self, machine: Running, event: Event) -> None:
        served = machine.requests.get(event.id)
        if served is None:
            return
        match event:
            case Started():
                if (
                    served.started is None
                ):  # what it is told in the end, whatever a preemption made it do again
                    served.started, served.cached = event.at, event.cached
            case FirstToken():
                served.first = event.at
                self._player.first_token(event.at, served.id)
            case Preempted():
                served.preempted += 1
            case Finished():
                del machine.requests[event.id]
                self._answered(machine, served)

    def _answered(self, machine: Running, served: Served) -> None:
        turn, conversation = served.turn, served.conversation
        served.end, served.ended = End.ANSWERED, self.now
        machine.health = on_success(machine.health)
        self._player.finish(self.now, served.id, Result(True, turn.prompt, turn.output, served.cached))
        if served.place + 1 == len(conversation.turns):
            self._open -= 1
            return
        following = conversation.turns[served.place + 1]
        at = max(self.now + following.gap, following.at)
        self._push(at, _TURN, Served(conversation, served.order, served.place + 1, at))

    def _settle(self) -> None:
        """Those whose wait is over."""
        for id, verdict in self._player.advance(self.now):
            self._obey(self._waiting.pop(id), verdict)

    def _poll(self, machine: Running) -> None:
        before = machine.health
        machine.health = on_probe(before, machine.up, self.now, _BREAKER)
        if machine.up:
            self._player.polled(self.now, machine.name, machine.polled(self.now))
        self._say_health(machine, before.healthy)
        self._push(self.now + POLL_SECONDS * self._rng.uniform(0.9, 1.1), _POLL, machine)

    def _failed(self, machine: Running) -> None:
        before = machine.health
        machine.health = on_failure(before, Failure.CONNECT, self.now, _BREAKER)
        self._say_health(machine, before.healthy)

    def _say_health(self, machine: Running, was: bool) -> None:
        if machine.health.healthy != was:
            self._player.healthy(self.now, machine.name, not was)
