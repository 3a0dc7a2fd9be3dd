"""Whether requests met what their tier promises, as far as their records tell.

Rules: offered is what was the gateway's to answer: not what the client gave up or asked wrongly. Met: answered in whole, the
first token within `ttft_seconds` + `prefill_factor` × the cold prefill of what was in no cache, on the fastest backend that
has a profile; the others within `tpot_seconds` each. What was not streamed has to be whole by when a stream would.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from policies.types import Slo
from proxy.errors import Outcome
from proxy.recordrow import NO_NUMBER, NO_TICK, seconds_of, tick

if TYPE_CHECKING:
    from policies.profile import Profile
    from proxy.config import Config

CLIENTS_OWN = frozenset(
    {
        Outcome.BAD_REQUEST,
        Outcome.UNAUTHORIZED,
        Outcome.LIMITED,
        Outcome.CANCELLED,
        Outcome.CLIENT_TIMEOUT,
        Outcome.UPSTREAM_REJECTED,
    }
)

Columns = Mapping[str, "array[int]"]
"""By name: TIMES in ticks, NUMBERS as they are."""


@dataclass
class Promises:
    """slos: of tiers that promise something. profiles: of the backends, by name."""

    slos: Mapping[str, Slo] = field(default_factory=dict)
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    _cold: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config) -> Promises:
        tiers = {name: tier.slo for name in config.tiers if (tier := config.tier(name)) is not None}
        profiles = {backend.name: backend.measured for backend in config.backends}
        return cls(
            {name: slo for name, slo in tiers.items() if slo is not None},
            {name: p for name, p in profiles.items() if p is not None and not p.quality_only},
        )

    def judge(self, tier: str | None, outcome: str, columns: Columns) -> tuple[int, int]:
        """(offered, met) of requests of one tier that ended alike."""
        slo = None if tier is None else self.slos.get(tier)
        if slo is None or outcome in CLIENTS_OWN:
            return 0, 0
        offered = len(columns["e2e_seconds"])
        if outcome != Outcome.OK:
            return offered, 0
        tpot, ttft = tick(slo.tpot_seconds), tick(slo.ttft_seconds)
        slow = [
            number
            for number, (first, each) in enumerate(
                zip(columns["ttft_seconds"], columns["tpot_seconds"], strict=True)
            )
            if first > ttft or tpot < each < NO_TICK
        ]
        met = offered - len(slow) + sum([self._still(slo, columns, number, tpot) for number in slow])
        return offered, met

    def _still(self, slo: Slo, columns: Columns, number: int, tpot: int) -> bool:
        """Of one that is late, or was not streamed: whether its prefill, or its length, allows it."""
        if tpot < columns["tpot_seconds"][number] < NO_TICK:
            return False
        first = columns["ttft_seconds"][number]
        seconds = seconds_of(first)
        if first == NO_TICK:
            tokens = columns["completion_tokens"][number]
            more = tokens - 1 if 0 < tokens < NO_NUMBER else 0
            seconds = seconds_of(columns["e2e_seconds"][number]) - slo.tpot_seconds * more
        prompt, cached = columns["context"][number], columns["cached_tokens"][number]
        uncached = 0 if prompt == NO_NUMBER else prompt - (0 if cached == NO_NUMBER else min(cached, prompt))
        return seconds <= slo.ttft_seconds + slo.prefill_factor * self._prefill(uncached)

    def _prefill(self, tokens: int) -> float:
        found = self._cold.get(tokens)
        if found is None:
            cold = [profile.cold_ttft(tokens) for profile in self.profiles.values()]
            found = self._cold[tokens] = min(cold, default=0.0)
        return found
