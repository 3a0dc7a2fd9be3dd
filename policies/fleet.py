"""All backends as pure state: what is on them, what they said, what they would make of a request.

Rules: no clock: `now` is an argument, in seconds, and never goes back. The live gateway, the simulator and the replay
tell it the same events in the same order and get the same views. A request is known by the caller's own id from
`begin` to `finish`, each exactly once; events of unknown ids (a backend that left the configuration) are nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from math import ceil

from policies.filters import tier as quality
from policies.member import Member
from policies.params import PolicyParams
from policies.scorers import home
from policies.state import Running, State
from policies.types import BackendView, Forecast, Polled, RequestFacts, Result
from policies.workingset import Talk, WorkingSet

__all__ = ["Fleet", "Hold", "Member"]

Hold = Callable[[State, Forecast, float], bool]
"""(backend, forecast, tokens it would hold) → whether admission says not now."""

STRANGER_SECONDS = 0.05
"""What a backend that is not the session's rendezvous home costs more while nothing is known of the session."""
USUAL_WEIGHT = 0.05
MOST_FULL_SECONDS = 60.0
"""A backend is believed no longer than this when it says how long it takes no more."""


class Fleet:
    """`views` is what the router reads; the other methods are the events that change it."""

    def __init__(self, members: Iterable[Member], params: PolicyParams) -> None:
        self.params = params
        self.talks = WorkingSet(params.working_set)
        self.states: dict[str, State] = {}
        self.version = 0
        """Grows with everything that may let a waiting request go."""
        self._where: dict[int, State] = {}
        self._turn = 0
        self._duration = 0.0
        self._outputs: dict[tuple[str, bool, bool], float] = {}
        self.configure(0.0, members, params)

    # -- what is asked of it

    def views(
        self, now: float, facts: RequestFacts, names: Iterable[str], hold: Hold | None = None
    ) -> tuple[BackendView, ...]:
        """A snapshot with this request's own terms: what is cached, and the forecast."""
        talk = self.talks.get(self.talks.key(facts))
        output = self.expected_output(facts)
        states = [self.states[name] for name in names]
        own = None
        if talk is None and not facts.prefix and facts.session is not None:
            own = home(facts.session, [state.member.name for state in states])
        best = max([s.integrity for s in states if s.calls], default=1.0) if facts.tools else 1.0
        return tuple([self._view(now, facts, state, talk, output, own, best, hold) for state in states])

    def promise(self, facts: RequestFacts, views: Sequence[BackendView]) -> float | None:
        """Seconds from arrival to the first token that the tier's SLO allows; None: it has none.

        Cold is the prefill of the tokens new to the conversation on the fastest backend of the tier's quality.
        """
        slo = facts.tier.slo
        if slo is None:
            return None
        talk = self.talks.get(self.talks.key(facts))
        new = facts.prompt.tokens
        if talk is not None and talk.turns:
            new = max(1, new - int(talk.context))
        cold = [
            sum(self.states[view.name].starts(new, 0.0))
            for view in views
            if quality(facts, view, self.params.router) is None
        ]
        return slo.ttft_seconds + slo.prefill_factor * min(cold, default=0.0)

    def expected_output(self, facts: RequestFacts) -> float:
        """Tokens of the answer: the mean of such requests (tier, with tools, of a conversation), at most what is allowed."""
        if facts.expected_output is not None:
            return facts.expected_output
        usual = self._outputs.get(_kind(facts), self.params.predict.usual_output)
        return max(1.0, min(usual, facts.output_tokens or usual))

    def ending(self, now: float, usual: float) -> float:
        """Requests per second that are predicted to end: those running ÷ how long such ones took lately, else `usual`."""
        running = sum([len(state.running) for state in self.states.values()])
        return running / (self._duration or max(0.1, usual))

    def names(self) -> tuple[str, ...]:
        return tuple(self.states)

    # -- what happens

    def configure(
        self, now: float, members: Iterable[Member], params: PolicyParams, fresh: Container[str] = ()
    ) -> None:
        """Other members or params from now on. Who stays keeps what it has and what was learned of it; not one of `fresh`:
        it has the name of another server."""
        self.params = params
        self.talks.params = params.working_set
        states = {}
        for member in members:
            state = self.states.get(member.name)
            if state is None or member.name in fresh:
                state = State(member, params)
            else:
                state.configure(member, params)
            states[member.name] = state
        for name, state in self.states.items():
            if states.get(name) is not state:
                self.talks.lost(name)
        self.states = states
        self.version += 1

    def begin(
        self, now: float, id: int, name: str, facts: RequestFacts, view: BackendView | None = None
    ) -> None:
        """A request goes to a backend: in the same step in which it was chosen. `view`: as it was seen then."""
        state = self.states[name]
        if view is None or view.forecast is None:
            view = self.views(now, facts, (name,))[0]
        assert view.forecast is not None
        running = Running(facts, now, view.forecast, view.cached_tokens, self.expected_output(facts))
        running.warm, running.cold = state.starts(facts.prompt.tokens, view.cached_tokens)
        self._turn += 1
        state.turn = self._turn
        key = self.talks.key(facts)
        if key is not None:
            running.talk = self.talks.begin(now, key, name, facts)
        state.cache.hold(facts.prefix, facts.link_tokens, None, 0.0, state.outputs)
        state.begin(now, id, running)
        state.speculation.begins(now, facts.prompt.tokens)
        self._where[id] = state
        self.version += 1

    def first_token(self, now: float, id: int) -> None:
        state = self._where.get(id)
        if state is not None:
            state.first_token(now, id)
            self.version += 1

    def finish(self, now: float, id: int, result: Result) -> None:
        """Every kind of end, cancellation included."""
        state = self._where.pop(id, None)
        if state is None:
            return
        running = state.finish(now, id, result)
        facts = running.facts
        answer = float(result.completion_tokens or (running.output if result.ok else 0.0))
        if result.ok and result.completion_tokens:
            kind = _kind(facts)
            usual = self._outputs.get(kind, float(result.completion_tokens))
            self._outputs[kind] = usual + USUAL_WEIGHT * (result.completion_tokens - usual)
        if result.ok:
            took = now - running.begun
            self._duration += USUAL_WEIGHT * (took - self._duration) if self._duration else took
        context = facts.prompt.tokens + answer
        if running.talk is not None:
            self.talks.finish(now, running.talk, context)
        if running.first is not None or result.ok:
            self._remember(state, running, context)
        if result.prompt_tokens and result.cached_tokens is not None:
            self._compare(state, running, result.cached_tokens / result.prompt_tokens)
        self.version += 1

    def polled(self, now: float, name: str, numbers: Polled) -> None:
        state = self.states[name]
        before = state.polled
        if _fell(before.preemptions, numbers.preemptions) or _fell(before.drafted, numbers.drafted):
            self.restarted(now, name)
        elif before.preemptions is not None and (numbers.preemptions or 0) > before.preemptions:
            self._crowded(state)
        contexts = [r.facts.prompt.tokens for r in state.running.values() if r.first is not None]
        profile = state.member.profile
        usual = 0.0
        if profile is not None and contexts:
            usual = profile.acceptance(sum(contexts) / len(contexts))
        state.speculation.polled(now, numbers.drafted, numbers.accepted, contexts, usual)
        if state.polled_at >= 0:
            for correction in (state.warm, state.cold, state.decode):
                correction.fade(now - state.polled_at)
        state.polled, state.polled_at = numbers, now
        state.excess = max(0, (numbers.running or 0) + (numbers.waiting or 0) - len(state.running))
        self.version += 1

    def set_state(
        self,
        now: float,
        name: str,
        *,
        healthy: bool | None = None,
        suspect: bool | None = None,
        draining: bool | None = None,
    ) -> None:
        state = self.states[name]
        if suspect is not None:
            state.suspect = suspect
        if healthy is not None:
            if healthy and not state.healthy:
                state.healthy_since = now
            state.healthy = healthy
        if draining is not None:
            state.draining = draining
        self.version += 1

    def full(self, now: float, name: str, seconds: float) -> None:
        """It said that it takes no more for so long (Retry-After)."""
        state = self.states[name]
        state.full_until = max(state.full_until, now + min(seconds, MOST_FULL_SECONDS))
        self.version += 1

    def restarted(self, now: float, name: str) -> None:
        """Its cache is empty and its speculation fresh."""
        self.states[name].restarted()
        self.talks.lost(name)

    def _crowded(self, state: State) -> None:
        """A sign that too many conversations live there: a preemption, a cache that held less than it should."""
        params = self.params.working_set
        state.fill = max(params.least_share, state.fill * params.decrease)

    def snapshot(self, now: float) -> Mapping[str, Mapping[str, float]]:
        """For metrics and the admin page: backend → figure → value."""
        return {
            name: {
                "in_flight": float(len(state.running)),
                "queue_seconds": state.queue(now),
                "busy": state.busy(now),
                "stalled": state.stalled(now),
                "warm_factor": state.warm.factor,
                "cold_factor": state.cold.factor,
                "decode_factor": state.decode.factor,
                "warm_error": state.warm.error,
                "cold_error": state.cold.error,
                "decode_error": state.decode.error,
                "live_conversations": float(self.talks.live.get(name, 0)),
                "live_tokens": self.talks.tokens.get(name, 0.0),
                "working_set_share": state.fill,
                "cached_tokens": state.cache.tokens,
                "cache_share": state.cache.share,
                "integrity": state.integrity,
                "speculation_acceptance": (
                    -1.0 if state.speculation.acceptance is None else state.speculation.acceptance
                ),
                "speculation_collapsed": float(state.speculation.drained()),
            }
            for name, state in self.states.items()
        }

    # -- how

    def _view(
        self,
        now: float,
        facts: RequestFacts,
        state: State,
        talk: Talk | None,
        output: float,
        own: str | None,
        best: float,
        hold: Hold | None,
    ) -> BackendView:
        member, polled, predict = state.member, state.polled, self.params.predict
        prompt = facts.prompt.tokens
        cached = self.cached(state, facts, talk)
        warm, cold = state.starts(prompt, cached)
        forecast = state.forecast(now, warm, cold, prompt, output, prompt - cached)
        demotion = 0.0
        if facts.tools and state.calls >= predict.integrity_answers:
            demotion = predict.demotion_seconds * max(0.0, best - state.integrity - 0.02)
        if own is not None and own != member.name:
            demotion += STRANGER_SECONDS
        if demotion:
            f = forecast
            forecast = Forecast(f.queue, f.prefill, f.tpot, f.decode, f.harm, demotion)
        beyond = state.collapses_beyond
        return BackendView(
            member.name,
            state.healthy,
            state.draining,
            member.reference,
            member.kl_bits,
            state.window,
            self._places(now, state),
            member.kv_tokens,
            len(state.running),
            state.in_flight_tokens,
            polled.running,
            polled.waiting,
            polled.kv_usage,
            None if state.polled_at < 0 else now - state.polled_at,
            state.speculates,
            (beyond is not None and prompt > beyond) or state.speculation.collapsed(now, prompt),
            member.remote,
            hold is not None and hold(state, forecast, prompt + output),
            state.turn,
            cached,
            forecast,
            state.suspect,
            None if member.gate_at is None else now - member.gate_at,
        )

    def cached(self, state: State, facts: RequestFacts, talk: Talk | None) -> float:
        """Tokens of this prompt in that backend's cache, estimated: whole blocks, never the last token."""
        links = state.cache.links(facts.prefix)
        known = links * facts.link_tokens
        if talk is not None and talk.turns:
            tail = state.cache.tail(talk.key)
            if tail and (not facts.prefix or links >= min(talk.links, len(facts.prefix))):
                known = max(known, talk.links * facts.link_tokens + tail)
        known = min(known, facts.prompt.tokens - 1)
        return known - known % state.block if known >= state.block else 0.0

    def _remember(self, state: State, running: Running, context: float) -> None:
        """What it held is the latest in the cache, answer and all."""
        facts, talk = running.facts, running.talk
        known = len(facts.prefix) * facts.link_tokens
        tail = talk.key if talk is not None else None
        state.cache.hold(facts.prefix, facts.link_tokens, tail, max(0.0, context - known), state.outputs)

    def _compare(self, state: State, running: Running, share: float) -> None:
        """What it found in its cache beside what was expected."""
        facts, prompt = running.facts, max(1, running.facts.prompt.tokens)
        expected = running.cached / prompt
        tail = running.talk.key if running.talk is not None else None
        before = state.cache.tokens
        state.cache.reported(facts.prefix, tail, expected, share, state.block / prompt)
        if before and not state.cache.tokens:
            self.talks.lost(state.member.name)
        params = self.params.working_set
        if expected > 2 * state.block / prompt and share < 0.5 * expected:
            self._crowded(state)
        elif state.fill < 1.0:
            state.fill = min(1.0, state.fill + params.increase)

    def _places(self, now: float, state: State) -> int:
        """None while it says that it is full. Slow start: after a recovery its places open one after the other."""
        if now < state.full_until:
            return 0
        most, seconds = state.member.max_in_flight, self.params.predict.slow_start_seconds
        if state.healthy_since is None or now - state.healthy_since >= seconds:
            return most
        return max(1, ceil(most * (now - state.healthy_since) / seconds))


def _kind(facts: RequestFacts) -> tuple[str, bool, bool]:
    return facts.tier.name, facts.tools, facts.conversation is not None


def _fell(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after < before
