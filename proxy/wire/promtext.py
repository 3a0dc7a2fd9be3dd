"""An engine's /metrics text, read for a handful of names.

Rules: the text is searched for the names, not split into lines: most of it is histograms of no interest here.
Linear in its length. Every number is optional: engines differ and change. What cannot be read is absent, not
an exception, whatever the text. Numbers of several engines behind one URL (data parallel ranks) are summed,
except the share of the cache in use, which is averaged: the engine spreads requests over equal ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from proxy.wire import patterns

MAX_TEXT_BYTES = 8 << 20  # vLLM sends 65 kB; what lies beyond is not looked at


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """What an engine says of itself; None where it does not.

    running, waiting: requests. kv_usage: share of the KV cache in use, 0..1. block_size: tokens.
    num_gpu_blocks and kv_tokens: capacity of the KV cache. The others count since the engine's start:
    prefix_queries and prefix_hits, prompt_tokens and generation_tokens in tokens; preemptions; spec_drafts,
    spec_draft_tokens, spec_accepted_tokens of speculative decoding.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    block_size: int | None = None
    num_gpu_blocks: int | None = None
    kv_tokens: int | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    preemptions: float | None = None
    spec_drafts: float | None = None
    spec_draft_tokens: float | None = None
    spec_accepted_tokens: float | None = None


# Field → names, the current one first: a later name counts only where no earlier one is present, so that an
# engine which sends both for a while is not counted twice. Counters are exposed with and without `_total`.
_NAMES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "llamacpp:requests_processing"),
    "waiting": ("vllm:num_requests_waiting", "llamacpp:requests_deferred"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "llamacpp:kv_cache_usage_ratio"),
    "prefix_queries": (
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_queries",
        "vllm:gpu_prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries",
    ),
    "prefix_hits": (
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_hits",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits",
        "llamacpp:prompt_tokens_cached_total",
    ),
    "prompt_tokens": ("vllm:prompt_tokens_total", "vllm:prompt_tokens", "llamacpp:prompt_tokens_total"),
    "generation_tokens": (
        "vllm:generation_tokens_total",
        "vllm:generation_tokens",
        "llamacpp:tokens_predicted_total",
    ),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "spec_drafts": (
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_drafts",
        "llamacpp:spec_decode_num_drafts_total",
    ),
    "spec_draft_tokens": (
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_draft_tokens",
        "llamacpp:spec_decode_num_draft_tokens_total",
    ),
    "spec_accepted_tokens": (
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens",
        "llamacpp:spec_decode_num_accepted_tokens_total",
    ),
}
_COUNTERS = tuple(field for field in _NAMES if field not in ("running", "waiting", "kv_usage"))
_CACHE_CONFIG = "vllm:cache_config_info"

# What follows a name on its line: labels or none, value. Possessive and within the line, so that hostile
# labels cannot make it backtrack or run on.
_REST = patterns.compile(rb"(?:\{((?:[^\"}\n]|\"(?:[^\"\\\n]|\\.)*+\")*+)\})?[ \t]++(\S++)")
_LABEL = patterns.compile(rb"([A-Za-z_][A-Za-z0-9_]*+)[ \t]*+=[ \t]*+\"((?:[^\"\\]|\\.)*+)\"")


def read_metrics(text: bytes) -> EngineMetrics:
    """Read one scrape. An empty result when there is nothing of a known engine in it."""
    text = b"\n" + text[:MAX_TEXT_BYTES]
    values = {field: _first_present(text, names) for field, names in _NAMES.items()}
    sums = {field: sum(numbers) for field, numbers in values.items() if numbers}
    usage = values["kv_usage"]
    configs = [_cache_config(labels) for labels, _ in _samples(text, _CACHE_CONFIG)]
    return EngineMetrics(
        running=_whole(sums.get("running")),
        waiting=_whole(sums.get("waiting")),
        kv_usage=min(1.0, sum(usage) / len(usage)) if usage else None,
        block_size=next((block_size for block_size, _, _ in configs if block_size), None),
        num_gpu_blocks=_sum([blocks for _, blocks, _ in configs]),
        kv_tokens=_sum([tokens for _, _, tokens in configs]),
        **{field: sums.get(field) for field in _COUNTERS},
    )


def _first_present(text: bytes, names: tuple[str, ...]) -> list[float]:
    """The values, one per engine, under the first of the names that has any."""
    for name in names:
        numbers = [_number(value) for _, value in _samples(text, name)]
        if known := [number for number in numbers if number is not None]:
            return known
    return []


def _samples(text: bytes, name: str) -> Iterator[tuple[bytes, bytes]]:
    """(labels, value) of every line of that very name. `text` begins with a line end."""
    needle = b"\n" + name.encode()
    start = text.find(needle)
    while start >= 0:
        end = start + len(needle)
        if match := _REST.match(text, end):
            yield match[1] or b"", match[2]
        start = text.find(needle, end)


def _cache_config(labels: bytes) -> tuple[int | None, int | None, int | None]:
    """(block size, blocks, tokens) of one engine. Newer vLLM says the tokens: with a hybrid model, block size
    times blocks is not the capacity. "None" and zero stand for unknown."""
    wanted = {name: value for name, value in _LABEL.findall(labels) if name in _CONFIG_LABELS}
    block_size, blocks, tokens = (_positive(wanted.get(name)) for name in _CONFIG_LABELS)
    if tokens is None and block_size is not None and blocks is not None:
        tokens = block_size * blocks
    return block_size, blocks, tokens


_CONFIG_LABELS = (b"block_size", b"num_gpu_blocks", b"kv_cache_size_tokens")


def _number(text: bytes) -> float | None:
    """A finite count or share; all that we read are never negative."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value < 1e18 else None


def _positive(text: bytes | None) -> int | None:
    value = None if text is None else _number(text)
    return int(value) if value is not None and value >= 1 else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _sum(numbers: list[int | None]) -> int | None:
    """Of all engines; None if any of them is unknown."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known and len(known) == len(numbers) else None
