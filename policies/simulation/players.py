"""Who decides in a simulation: the seam between the event loop and a policy.

Rules: the loop tells a player what the live gateway would tell the policy, and does what it answers. `Live` is the
gateway's own `Fleet`, `Admission` and `Router`, unchanged. Only a reference policy looks at what is behind `served`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Protocol

from policies import profile as profiles
from policies.admission import Admission
from policies.fleet import Fleet, Member
from policies.params import PolicyParams
from policies.ranking import Ranking
from policies.router import Router
from policies.simulation.machines import Running
from policies.simulation.values import Machine, Served
from policies.types import Polled, RequestFacts, Result, Verdict

_NONE: frozenset[str] = frozenset()


class Player(Protocol):
    """As `Admission` and `Fleet`; ids are the loop's own, new for each attempt of a client."""

    def offer(
        self, now: float, id: int, served: Served, facts: RequestFacts, tried: frozenset[str] = _NONE
    ) -> Verdict:
        """A request arrives; with `tried`, a further attempt of one that has been let in."""
        ...

    def advance(self, now: float) -> Iterable[tuple[int, Verdict]]: ...

    def next_event_at(self) -> float | None: ...

    def withdraw(self, now: float, id: int) -> None: ...

    def first_token(self, now: float, id: int) -> None: ...

    def finish(self, now: float, id: int, result: Result) -> None: ...

    def polled(self, now: float, name: str, numbers: Polled) -> None: ...

    def healthy(self, now: float, name: str, healthy: bool) -> None: ...


Make = Callable[[Sequence[Running], Random], Player]
"""(the machines, for a reference policy to look into; chance) → a player."""


def member(machine: Machine) -> Member:
    """What an operator would have configured of it."""
    profile = profiles.get(machine.profile)
    return Member(
        machine.name,
        profile if machine.known else None,
        reference=profile.quality.reference,
        kl_bits=profile.quality.kl_bits,
        window_tokens=profile.window_tokens,
        max_in_flight=profile.max_num_seqs,
        kv_tokens=machine.kv_tokens or profile.kv_tokens,
        speculates=profile.measured.speculation.draft_tokens > 0,
    )


class Live:
    """The gateway's own policy with these params. `ranking`: a user's own, whose name is in them."""

    def __init__(
        self, machines: Sequence[Machine], params: PolicyParams, rng: Random, ranking: Ranking | None = None
    ) -> None:
        self.names = tuple([machine.name for machine in machines])
        self.fleet = Fleet([member(machine) for machine in machines], params)
        self.admission = Admission(self.fleet, Router(params.router, ranking or params.name), params, rng)
        self.advance = self.admission.advance
        self.next_event_at = self.admission.next_event_at
        self.withdraw = self.admission.withdraw
        self.first_token = self.fleet.first_token
        self.finish = self.fleet.finish
        self.polled = self.fleet.polled

    def offer(
        self, now: float, id: int, served: Served, facts: RequestFacts, tried: frozenset[str] = _NONE
    ) -> Verdict:
        if tried:
            return self.admission.again(now, id, facts, self.names, tried=tried)
        return self.admission.offer(now, id, facts, self.names)

    def healthy(self, now: float, name: str, healthy: bool) -> None:
        self.fleet.set_state(now, name, healthy=healthy)


def live(params: PolicyParams, ranking: Ranking | None = None) -> Make:
    """Players of the gateway's own policy."""
    return lambda machines, rng: Live([running.machine for running in machines], params, rng, ranking)
