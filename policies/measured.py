"""What was measured of one configuration: the shape of the data modules in `profiles/`.

Rules: values only. Every figure names its source; a part that was not measured on this configuration is
either missing or listed in `borrowed`, so that nothing mixes two configurations silently. Rows hold plain
numbers in the order their type names; units are in this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DecodeRow = tuple[int, int, float]
"""(concurrency, context tokens, aggregate tok/s while all streams decode)"""
LatencyRow = tuple[int, int, float, float, float | None, float | None]
"""(concurrency, context tokens, mean TTFT ms, p99 TTFT ms, ms per token (not chunk gap), acceptance 0..1)"""
PrefillRow = tuple[int, float]
"""(prompt tokens, TTFT seconds), prefix cold, one request at a time"""


class SpecKind(StrEnum):
    """How tokens are drafted."""

    NONE = "none"
    MTP = "mtp"
    DFLASH = "dflash"
    OTHER = "other"  # it drafts; how, nobody said


class Part(StrEnum):
    """A part of a profile that may come from a sibling."""

    DECODE = "decode"
    PREFILL = "prefill"
    WARM = "warm"
    KV = "kv"
    ACCEPTANCE = "acceptance"
    BATCH = "batch"


class LimitKind(StrEnum):
    """What is known not to work."""

    BROKEN_BEYOND = "broken_beyond"  # unusable above `context_tokens`
    COLLAPSES_BEYOND = "collapses_beyond"  # works above `context_tokens`, several times slower
    TOOL_CHOICE_REQUIRED = "tool_choice_required"  # "required" makes calls that do not parse


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A part taken from elsewhere: `source` is a profile's name, or the place a figure was derived from."""

    part: Part
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    kind: LimitKind
    note: str
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Quality:
    """Distance from the reference weights: mean KL in bits per position; `kl_nats` is another method's
    figure, not comparable with bits. `reference`: these are the reference weights."""

    method: str
    reference: bool = False
    kl_bits: float | None = None
    kl_nats: float | None = None

    @property
    def comparable(self) -> bool:
        return self.kl_bits is not None


@dataclass(frozen=True, slots=True)
class Speculation:
    """`draft_tokens` drafted a step; of them the fraction `acceptance` is accepted, by context: points
    (tokens, 0..1), linear between, flat outside."""

    kind: SpecKind = SpecKind.NONE
    draft_tokens: int = 0
    acceptance: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """One configuration. `latency_cold`: the latency rows did not have their prompts in the prefix cache.

    `decode_assumed` are cells that nobody measured but a sentence of the source implies; they shape the
    surface and are never checked. `batched_tokens` is the prefill chunk (max_num_batched_tokens).
    """

    name: str
    title: str
    quality: Quality
    weights: str
    image: str = ""
    speculation: Speculation = Speculation()
    tensor_parallel: int | None = None
    window_tokens: int | None = None
    kv_tokens: int | None = None
    max_num_seqs: int = 128
    batched_tokens: int = 8192
    decode: tuple[DecodeRow, ...] = ()
    decode_source: str = ""
    decode_assumed: tuple[DecodeRow, ...] = ()
    latency: tuple[LatencyRow, ...] = ()
    latency_source: str = ""
    latency_cold: bool = False
    prefill: tuple[PrefillRow, ...] = ()
    prefill_source: str = ""
    borrowed: tuple[Borrowed, ...] = ()
    limits: tuple[Limit, ...] = ()
    disqualified: bool = False
