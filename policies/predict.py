"""What a backend would make of a request: from what was measured of it, or learned.

Rules: no state. A `Speed` answers for one configuration; a `Crowd` is who is there now; `forecast` puts the two
together. Seconds, tokens, seconds per token. Corrections (observed ÷ predicted) are factors on top, handed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from policies.engine.rates import Rates
from policies.engine.values import BLOCK_TOKENS
from policies.profile import Profile


class Speed(Protocol):
    """How fast one configuration is."""

    def start(self, prompt: float, cached: float) -> float:
        """Seconds to the first token on an idle engine, `cached` of the prompt's tokens being in its cache."""
        ...

    def cold(self, prompt: float, cached: float) -> float:
        """The part of `start` during which nobody else decodes."""
        ...

    def tpot(self, streams: float, context: float) -> float:
        """Seconds per token of each of `streams` that hold `context` tokens on average."""
        ...


class Measured:
    """The surfaces of a profile."""

    __slots__ = ("_profile", "_rates", "block_tokens")

    def __init__(self, profile: Profile, block_tokens: int = BLOCK_TOKENS) -> None:
        self._profile = profile
        self._rates = Rates(profile, block_tokens, profile.measured.batched_tokens)
        self.block_tokens = block_tokens

    def start(self, prompt: float, cached: float) -> float:
        whole = int(cached)
        return self._rates.alone(int(prompt), whole) + self._rates.cold_seconds(int(prompt), whole)

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
    decode_growth: float = 0.05

    def start(self, prompt: float, cached: float) -> float:
        return self.start_seconds + self.cold(prompt, cached)

    def cold(self, prompt: float, cached: float) -> float:
        return max(0.0, prompt - cached) / self.prefill_tokens_per_second

    def tpot(self, streams: float, context: float) -> float:
        return self.decode_seconds * (1.0 + self.decode_growth * max(0.0, streams - 1.0))
