"""All backends as pure state: what is on them, what they said, what they would make of a request.

Rules: no clock: `now` is an argument, in seconds, and never goes back. The live gateway, the simulator and the replay
tell it the same events in the same order and get the same views. A request is known by the caller's own id from
`begin` to `finish`, each exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from policies.params import PolicyParams
from policies.predict import Guessed, Measured, Speed
from policies.profile import Profile
from policies.types import BackendView, Forecast, Polled, RequestFacts, Result, Slo


@dataclass(frozen=True, slots=True)
class Member:
    """What is configured or was found out of a backend. None: unknown. speculates: drafts tokens (None: its profile
    says). remote: somebody else's, a tier's last resort. block_tokens: its cache's block."""

    name: str
    profile: Profile | None = None
    reference: bool = False
    kl_bits: float | None = None
    window_tokens: int | None = None
    max_in_flight: int = 32
    kv_tokens: int = 131072
    speculates: bool | None = None
    remote: bool = False
    block_tokens: int | None = None


@dataclass(slots=True)
class Running:
    """A request on a backend."""

    facts: RequestFacts
    begun: float
    forecast: Forecast
    cached: float
    first: float | None = None


@dataclass(slots=True)
class State:
    """One backend, live."""

    member: Member
    speed: Speed
    healthy: bool = True
    draining: bool = False
    in_flight_tokens: int = 0
    turn: int = 0
    running: dict[int, Running] = field(default_factory=dict)
    polled: Polled = field(default_factory=Polled)
    polled_at: float | None = None


class Fleet:
    """`views` is what the router reads; the other methods are the events that change it."""

    def __init__(self, members: Iterable[Member], params: PolicyParams) -> None:
        self.params = params
        self._states: dict[str, State] = {}
        self._where: dict[int, str] = {}
        self._turn = 0
        self.configure(0.0, members, params)

    # -- what is asked of it

    def views(self, now: float, facts: RequestFacts, names: Iterable[str]) -> tuple[BackendView, ...]:
        return tuple([self._view(now, facts, self._states[name]) for name in names])

    def slo_seconds(self, facts: RequestFacts, names: Iterable[str]) -> float | None:
        """Seconds from arrival to the first token that the tier promises; None: it promises nothing."""
        slo = facts.tier.slo
        return None if slo is None else self._promise(slo, facts, names)

    def names(self) -> tuple[str, ...]:
        return tuple(self._states)

    # -- what happens

    def configure(self, now: float, members: Iterable[Member], params: PolicyParams) -> None:
        """Other members or params from now on. Who stays keeps what it has and what was learned of it."""
        self.params = params
        states = {}
        for member in members:
            state = self._states.get(member.name)
            speed: Speed = Measured(member.profile) if _measured(member) else Guessed()  # type: ignore[arg-type]
            if state is None:
                state = State(member, speed)
            else:
                state.member, state.speed = member, speed
            states[member.name] = state
        self._states = states

    def begin(self, now: float, id: int, name: str, facts: RequestFacts) -> None:
        """A request goes to a backend: in the same step in which it was chosen."""
        state = self._states[name]
        view = self._view(now, facts, state)
        assert view.forecast is not None
        state.running[id] = Running(facts, now, view.forecast, view.cached_tokens)
        state.in_flight_tokens += facts.context_tokens
        self._turn += 1
        state.turn = self._turn
        self._where[id] = name

    def first_token(self, now: float, id: int) -> None:
        self._states[self._where[id]].running[id].first = now

    def finish(self, now: float, id: int, result: Result) -> None:
        """Every kind of end, cancellation included."""
        name = self._where.pop(id)
        state = self._states.get(name)
        if state is None:
            return
        running = state.running.pop(id)
        state.in_flight_tokens -= running.facts.context_tokens

    def polled(self, now: float, name: str, numbers: Polled) -> None:
        state = self._states[name]
        state.polled, state.polled_at = numbers, now

    def set_state(
        self, now: float, name: str, *, healthy: bool | None = None, draining: bool | None = None
    ) -> None:
        state = self._states[name]
        if healthy is not None:
            state.healthy = healthy
        if draining is not None:
            state.draining = draining

    def restarted(self, now: float, name: str) -> None:
        """Its cache is empty, its speculation fresh."""

    def snapshot(self, now: float) -> Mapping[str, Mapping[str, float]]:
        """For metrics and the admin page: backend → figure → value."""
        return {name: {"in_flight": float(len(state.running))} for name, state in self._states.items()}

    # -- how

    def _view(self, now: float, facts: RequestFacts, state: State) -> BackendView:
        member, polled, speed = state.member, state.polled, state.speed
        prompt = facts.prompt.tokens
        streams = len(state.running) + 1
        tpot = speed.tpot(streams, facts.context_tokens)
        queue = sum([r.forecast.prefill for r in state.running.values() if r.first is None])
        output = facts.expected_output or facts.output_tokens
        forecast = Forecast(queue, speed.start(prompt, 0.0), tpot, output * tpot)
        return BackendView(
            member.name,
            state.healthy,
            state.draining,
            member.reference,
            member.kl_bits,
            member.window_tokens,
            member.max_in_flight,
            member.kv_tokens,
            len(state.running),
            state.in_flight_tokens,
            polled.running,
            polled.waiting,
            polled.kv_usage,
            None if state.polled_at is None else now - state.polled_at,
            turn=state.turn,
            remote=member.remote,
            forecast=forecast,
        )

    def _promise(self, slo: Slo, facts: RequestFacts, names: Iterable[str]) -> float:
        cold = min([self._states[name].speed.cold(facts.prompt.tokens, 0.0) for name in names], default=0.0)
        return slo.ttft_seconds + slo.prefill_factor * cold


def _measured(member: Member) -> bool:
    return member.profile is not None and not member.profile.quality_only
