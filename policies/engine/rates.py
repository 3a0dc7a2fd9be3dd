"""How long things take in the engine, from a profile's surfaces.

Rules: no state. A start has a warm part (front end, scheduling and the last block's prefill: what a prompt
costs whose prefix is cached; its mean and worst for m requests that start together are measured) and a cold
part (the tokens that are not cached, served one request after the other).
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.engine.draft import Draft, draft
from policies.profile import Profile


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds of one start: `warm` before its turn is over, then `cold` in `chunks` steps."""

    warm: float
    cold: float
    chunks: int


@dataclass(frozen=True, slots=True)
class Rates:
    """`acceptance`: instead of the profile's, for faults."""

    profile: Profile
    block_tokens: int
    batched_tokens: int
    acceptance: float | None = None

    def draft(self, context: float) -> Draft:
        """What speculation gives now."""
        a = self.profile.acceptance(context) if self.acceptance is None else self.acceptance
        return draft(self.profile.measured.speculation.draft_tokens, round(a, 4))

    def nominal(self, context: float) -> Draft:
        """What speculation gave when the surface was measured."""
        return draft(
            self.profile.measured.speculation.draft_tokens, round(self.profile.acceptance(context), 4)
        )

    def step_seconds(self, streams: int, mean_context: float, nominal_tokens: float) -> float:
        """One decode step of `streams`, which nominally get `nominal_tokens` in it, all together."""
        return nominal_tokens / (streams * self.profile.stream_rate(streams, mean_context))

    def alone(self, prompt: int, cached: int) -> float:
        """Warm seconds of a start that nobody shares."""
        if cached == 0:
            return self.profile.prefill[0][1]
        return self.profile.warm_ttft(1, self._warm_context(prompt, cached))

    def start(self, together: int, place: int, prompt: int, cached: int) -> Start:
        """The start at `place` (0 …) of `together`: first tokens are spread evenly from the earliest to the
        worst so that their mean is the measured one; the earliest is no sooner than a start alone."""
        p = self.profile
        assert p.warm_p99 is not None
        context = self._warm_context(prompt, cached)
        mean, worst = p.warm_ttft(together, context), p.warm_p99.at(together, context)
        single = p.warm_ttft(1, context)
        worst = min(worst, 2 * mean - min(mean, single)) if together > 1 else mean
        earliest = 2 * mean - worst
        warm = earliest if place == 0 else (worst - earliest) / (together - 1)
        scale = self.alone(prompt, cached) / single
        cold = self.cold_seconds(prompt, cached) * self._share(together)
        return Start(warm * scale, cold, max(1, -(-(prompt - cached) // self.batched_tokens)))

    def cold_seconds(self, prompt: int, cached: int) -> float:
        """Prefill of what is not cached. The last block of a warm prompt is part of the warm time, and so is
        a prompt of one block, since short ones are packed into one step; from two blocks on all counts."""
        p, block = self.profile, self.block_tokens
        if cached:
            return max(0.0, p.cold_ttft(prompt) - p.cold_ttft(min(prompt, cached + block)))
        counted = min(1.0, max(0.0, prompt / block - 1.0))
        return counted * (p.cold_ttft(prompt) - p.cold_ttft(0))

    def _warm_context(self, prompt: int, cached: int) -> int:
        return prompt if cached and prompt - cached <= self.block_tokens else cached

    def _share(self, together: int) -> float:
        """Measured ÷ one-after-the-other cold start of so many; 1 where nobody measured."""
        share = 1.0
        for count, value in self.profile.cold_share:
            if count <= together:
                share = value
        return share
