"""vLLM's /metrics, from the engine model's counters.

Rules: names, types, labels and buckets are vLLM's; a family that the simulator does not model is left out rather
than invented. Not written with prometheus_client: the numbers are the engine's, and old names are a switch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from policies.engine import EngineConfig, EngineStats

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_GAP = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_LONG = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

HISTOGRAMS = {
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "time_to_first_token_seconds": _TTFT,
    "inter_token_latency_seconds": _GAP,
    "request_time_per_output_token_seconds": _GAP,
    "e2e_request_latency_seconds": _LONG,
    "request_queue_time_seconds": _LONG,
    "request_inference_time_seconds": _LONG,
    "request_prefill_time_seconds": _LONG,
    "request_decode_time_seconds": _LONG,
}


class Histogram:
    __slots__ = ("_edges", "counts", "sum")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self._edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._edges, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        total = 0
        for edge, count in zip((*map(float, self._edges), "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{engine="0",le="{edge}",{labels}}} {float(total)}'
        yield f'{name}_count{{engine="0",{labels}}} {float(total)}'
        yield f'{name}_sum{{engine="0",{labels}}} {self.sum}'


class Exposition:
    """Counts what the engine does not. `window` bounds the token buckets, as it does in vLLM."""

    def __init__(self, model: str, config: EngineConfig, window: int, gpu_memory: float = 0.8) -> None:
        self._labels = f'model_name="{model}"'
        self._config = config
        self._gpu_memory = gpu_memory
        fitting = tuple(edge for edge in _TOKENS if edge <= window)
        self.histograms = {
            name: Histogram(fitting if edges is _TOKENS else edges) for name, edges in HISTOGRAMS.items()
        }
        self.finished = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)

    def observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

    def text(self, stats: EngineStats, old_names: bool = False) -> str:
        """`old_names`: gpu_cache_usage_perc instead of kv_cache_usage_perc, as before 0.10."""
        cache = "gpu_cache_usage_perc" if old_names else "kv_cache_usage_perc"
        computed = stats.queried_tokens - stats.hit_tokens
        lines: list[str] = []

        def family(name: str, kind: str, *samples: tuple[str, float]) -> None:
            lines.append(f"# HELP vllm:{name} {name.replace('_', ' ').capitalize()}.")
            lines.append(f"# TYPE vllm:{name} {kind}")
            for extra, value in samples:
                lines.append(f'vllm:{name}{{engine="0",{self._labels}{extra}}} {float(value)}')

        family("num_requests_running", "gauge", ("", stats.running))
        family("num_requests_waiting", "gauge", ("", stats.waiting))
        reasons = (',reason="capacity"', stats.waiting), (',reason="deferred"', 0)
        family("num_requests_waiting_by_reason", "gauge", *reasons)
        states = ("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)
        family("engine_sleep_state", "gauge", *((f',sleep_state="{s}"', v) for s, v in states))
        family(cache, "gauge", ("", stats.kv_usage))
        family("prefix_cache_queries_total", "counter", ("", stats.queried_tokens))
        family("prefix_cache_hits_total", "counter", ("", stats.hit_tokens))
        family("num_preemptions_total", "counter", ("", stats.preemptions))
        family("prompt_tokens_total", "counter", ("", stats.prompt_tokens))
        sources = (
            ("local_compute", computed),
            ("local_cache_hit", stats.hit_tokens),
            ("external_kv_transfer", 0),
        )
        family("prompt_tokens_by_source_total", "counter", *((f',source="{s}"', v) for s, v in sources))
        family("prompt_tokens_cached_total", "counter", ("", stats.hit_tokens))
        family("generation_tokens_total", "counter", ("", stats.generation_tokens))
        ends = ((f',finished_reason="{reason}"', n) for reason, n in self.finished.items())
        family("request_success_total", "counter", *ends)
        if stats.drafted_tokens:
            family("spec_decode_num_drafts_total", "counter", ("", stats.drafts))
            family("spec_decode_num_draft_tokens_total", "counter", ("", stats.drafted_tokens))
            family("spec_decode_num_accepted_tokens_total", "counter", ("", stats.accepted_tokens))
        for name, histogram in self.histograms.items():
            family(name, "histogram")
            lines += histogram.lines(f"vllm:{name}", self._labels)
        lines += self._cache_config()
        return "\n".join(lines) + "\n"

    def _cache_config(self) -> Iterator[str]:
        config = self._config
        yield "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig"
        yield "# TYPE vllm:cache_config_info gauge"
        labels = {
            "block_size": config.block_tokens,
            "cache_dtype": "auto",
            "enable_prefix_caching": config.prefix_caching,
            "engine": 0,
            "gpu_memory_utilization": self._gpu_memory,
            "kv_cache_size_tokens": config.blocks * config.block_tokens,
            "num_gpu_blocks": config.blocks,
            "prefix_caching_hash_algo": "sha256",
        }
        shown = ",".join(f'{name}="{value}"' for name, value in labels.items())
        yield f"vllm:cache_config_info{{{shown}}} 1.0"
