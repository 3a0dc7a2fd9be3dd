"""A database of records as a busy day leaves it, to measure with: `python -m tests.bench.records records.db 1000000`.

Rules: seeded, so that two of the same size are equal. A fleet of three, two tiers, six tenants; agents' long contexts beside
chats; streams slow down with those beside them; a bad quarter of an hour; some failures, retries, tool calls.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from random import Random

from proxy.recordrow import FIGURES, NO_CALLS, NO_TICK, REST, SOUND, UNSOUND, Row, kind_of, tick
from proxy.recordstore import RecordStore

END = 1_790_000_000.0
BACKENDS = {"fp8-a": 9.0, "fp8-b": 9.0, "bf16": 21.0}
"""Milliseconds a token of a stream alone."""


def made(count: int, seconds: float = 86_400.0, seed: int = 7) -> Iterator[Row]:
    """Rows of requests that were accepted in the `seconds` before END, in the order in which they came."""
    rng = Random(seed)
    rest = [None] * len(REST)
    fixed = {
        "api": "chat",
        "path": "/v1/chat/completions",
        "target": "Qwen3.6-27B",
        "stream": True,
        "status": 200,
    }
    for name, value in fixed.items():
        rest[REST.index(name)] = value  # type: ignore[call-overload]
    rest[REST.index("finish_reason")] = "stop"  # type: ignore[call-overload]
    rest[REST.index("policy")] = rest[REST.index("conversation")] = "a1b2c3d4e5f6"  # type: ignore[call-overload]
    for name in (
        "prompt_tokens_estimate",
        "prompt_tokens_low",
        "prompt_tokens_high",
        "bytes_in",
        "bytes_out",
    ):
        rest[REST.index(name)] = 12_345  # type: ignore[call-overload]
    for name in ("dispatch_seconds", "predicted_ttft_seconds", "predicted_tpot_seconds", "overhead_seconds"):
        rest[REST.index(name)] = 0.012345678  # type: ignore[call-overload]
    packed = json.dumps(rest, separators=(",", ":"))
    tools = '{"parsed":1}', '{"parsed":2}', '{"xml":1,"repaired_syntax":1}'
    cut = json.dumps({"failures": [{"backend": "fp8-b", "failure": "cut"}]})
    for number in range(count):
        at = number / count
        bad = 0.5 < at < 0.51
        exact = rng.random() < 0.2
        backend = "bf16" if exact else ("fp8-a", "fp8-b", "bf16")[min(2, int(rng.random() * 2.2))]
        beside = int(rng.expovariate(1 / (12 if bad else 4)))
        prompt = int(10 ** rng.uniform(1.5, 4.9))
        cached = int(prompt * rng.random()) if rng.random() < 0.6 else 0
        tokens = int(rng.expovariate(1 / 250)) + 2
        tpot = BACKENDS[backend] * (1 + 0.06 * beside) * math.exp(rng.gauss(0, 0.1)) / 1e3
        wait = rng.expovariate(1.0) if bad else 0.0004
        ttft = wait + 0.05 + (prompt - cached) / 9000 * math.exp(rng.gauss(0, 0.2)) + beside * 0.01
        failed = rng.random() < (0.05 if bad else 0.004)
        retried = rng.random() < 0.01
        called = tools[min(2, int(rng.random() * 2.1))] if rng.random() < 0.3 else None
        tier = "exact" if exact else "balanced"
        e2e = ttft + tpot * tokens
        times = (ttft, tpot * 3, tpot * 7, tpot, e2e, wait)
        ticks = [tick(value) for value in times]
        if failed:
            ticks[3] = NO_TICK
        judged = NO_CALLS if called is None else UNSOUND if "xml" in called else SOUND
        figures = FIGURES.pack(*ticks, prompt, tokens, cached, prompt, beside, 2 if retried else 1, judged)
        outcome, key = "upstream_cut" if failed else "ok", number % 40
        named = (outcome, tier, tier, backend, "Qwen3.6-27B", f"team-{key % 6}", f"tl-{key:06d}")
        yield (
            END - seconds * (1 - at), kind_of(named), figures, f"{number:032x}", named[4], tier, tier, backend, *named[5:],
            outcome, "predicted", 2 if retried else 1, beside, prompt, prompt, tokens, cached, wait, ttft, tpot * 3,
            tpot * 7, None if failed else tpot, e2e, cut if retried else None, called, packed,
        )  # fmt: skip


def main(path: str, count: int) -> None:
    store = RecordStore(path, lambda: END)
    batch: list[Row] = []
    for one in made(count):
        batch.append(one)
        if len(batch) == 10_000:
            store(batch)
            batch = []
    store(batch)
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
