"""What goes into the engine model and what comes out.

Rules: values only. Times are seconds on the caller's clock; sizes are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_TOKENS = 784
"""The real model is a hybrid: its cache blocks are this large."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """kv_tokens: cache size, rounded down to blocks. batched_tokens: the prefill chunk of one step."""

    kv_tokens: int
    max_num_seqs: int = 128
    batched_tokens: int = 8192
    block_tokens: int = BLOCK_TOKENS
    prefix_caching: bool = True

    @property
    def blocks(self) -> int:
        return self.kv_tokens // self.block_tokens


@dataclass(frozen=True, slots=True)
class Request:
    """`output_tokens`: what it will generate (the model decides, not the engine), at least 1.

    `blocks`: hashes of the prompt's full blocks, in order, each covering all before it; fewer than there are
    is fine (the rest is never shared). `output_blocks`: hashes of the blocks that fill while it decodes, so
    that a next turn finds them. `stream`: emit `Tokens` step by step instead of the ends only.
    """

    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    output_blocks: tuple[int, ...] = ()
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """Left the waiting queue; `cached` of its prompt tokens were in the prefix cache."""

    id: int
    at: float
    cached: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    id: int
    at: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """`n` more tokens of a streamed request, in one engine step."""

    id: int
    at: float
    n: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """Lost its blocks; waits, then computes its prompt and `tokens` generated so far again."""

    id: int
    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    id: int
    at: float
    tokens: int


Event = Started | FirstToken | Tokens | Preempted | Finished


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and gauges. `running` counts prefill too, as vLLM does; `kv_usage` is 0..1 of
    blocks in use (cached blocks that nobody holds are free). `steps` are decode steps, `drafts` those of each
    sequence."""

    running: int
    waiting: int
    kv_usage: float
    queried_tokens: int
    hit_tokens: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    finished: int
    steps: int
    drafts: int
    drafted_tokens: int
    accepted_tokens: int
