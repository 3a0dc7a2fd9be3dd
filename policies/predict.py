"""How fast a backend is: from what was measured of it, or from conservative defaults.

Rules: no state. Seconds, tokens, seconds per token. A start is `warm + cold`: the warm part is what a prompt costs whose
prefix is cached, and decoding goes on beside it; during the cold part decoding gets one step per prefill chunk of
`batched_tokens`. Corrections (observed ÷ predicted) are factors on top, applied by the fleet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from policies.engine.rates import Rates
from policies.engine.values import BLOCK_TOKENS
from policies.profile import Profile


class Speed(Protocol):
    """How fast one configuration is on an idle engine, and how fast its streams are."""

    @property
    def batched_tokens(self) -> int: ...

    def warm(self, prompt: float, cached: float) -> float:
        """Seconds before its turn is over, prefill apart."""
        ...

    def cold(self, prompt: float, cached: float) -> float:
        """Seconds of prefill of the tokens that are not cached."""
        ...

    def tpot(self, streams: float, context: float) -> float:
        """Seconds per token of each of `streams` that hold `context` tokens on average."""
        ...


class Measured:
    """The surfaces of a profile: the same formulas as the engine model's."""

    __slots__ = ("_profile", "_rates")

    def __init__(self, profile: Profile, block_tokens: int = BLOCK_TOKENS) -> None:
        self._profile = profile
        self._rates = Rates(profile, block_tokens, profile.measured.batched_tokens)

    @property
    def batched_tokens(self) -> int:
        return self._rates.batched_tokens

    def warm(self, prompt: float, cached: float) -> float:
        return self._rates.alone(int(prompt), int(cached))

    def cold(self, prompt: float, cached: float) -> float:
        return self._rates.cold_seconds(int(prompt), int(cached))

    def tpot(self, streams: float, context: float) -> float:
        return 1.0 / self._profile.stream_rate(streams, context)


@dataclass(frozen=True, slots=True)
class Guessed:
    """A backend of which nothing was measured: conservative figures of a slow card, corrected as it answers.

    prefill_tokens_per_second, start_seconds: of a prompt. decode_seconds: per token of a lone stream;
    decode_growth: added per further stream, a share of it. Contexts are not told apart.
    """

    prefill_tokens_per_second: float = 4000.0
    start_seconds: float = 0.1
    decode_seconds: float = 0.02
    decode_growth: float = 0.04
    batched_tokens: int = 8192

    def warm(self, prompt: float, cached: float) -> float:
        return self.start_seconds

    def cold(self, prompt: float, cached: float) -> float:
        return max(0.0, prompt - cached) / self.prefill_tokens_per_second

    def tpot(self, streams: float, context: float) -> float:
        return self.decode_seconds * (1.0 + self.decode_growth * max(0.0, streams - 1.0))
