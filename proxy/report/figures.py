"""What was counted, as figures: one plain dictionary for the terminal, the page and programs alike.

Rules: seconds, tokens, shares. A figure that does not exist is None. Percentiles: of sorted values the one that at least
that share do not exceed, to 0.125 %; those of chunk gaps are of the requests' own medians and 99th percentiles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil
from typing import Any

from policies.profile import Profile
from proxy.recordrow import TIMES, seconds_of
from proxy.report.scan import CONTEXTS, Cell, Found, Question, Sums

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
NOTHING = "–"


def percentiles(ticks: Mapping[int, int]) -> dict[str, float | None]:
    """p50, p95, p99 of counted ticks."""
    total, passed = sum(ticks.values()), 0
    due = [(name, max(1, ceil(share * total))) for name, share in SHARES.items()]
    found: dict[str, float | None] = dict.fromkeys(SHARES)
    for number in sorted(ticks):
        passed += ticks[number]
        while due and passed >= due[0][1]:
            found[due.pop(0)[0]] = seconds_of(number)
    return found


def figures(question: Question, found: Found, seconds: float) -> dict[str, Any]:
    """seconds: how long the window is."""
    whole = Sums()
    for sums in found.groups.values():
        whole.add(sums)
    groups = [
        {"by": _named(question, group), **_row(sums, seconds)}
        for group, sums in sorted(found.groups.items(), key=lambda item: -item[1].requests)
    ]
    out: dict[str, Any] = {
        "requests": whole.requests,
        "seconds": seconds,
        "all": _row(whole, seconds),
        "groups": groups,
        "tiers": [
            {"asked": asked, "served": served, "requests": n}
            for (asked, served), n in found.tiers.most_common()
        ],
        "failed_attempts": [
            {"backend": backend, "failure": kind, "attempts": n}
            for (backend, kind), n in found.failures.most_common()
        ],
        "slowest": [{"why": why(record), **record} for _, record in found.slowest],
    }
    if question.step is not None:
        step = question.step
        out["curves"] = [
            {"at": question.start + number * step, **_row(found.steps[number], step)}
            for number in sorted(found.steps)
        ]
        out["cells"] = _cells(found.cells, question.promises.profiles)
    return out


def _named(question: Question, group: tuple[Any, ...]) -> dict[str, str]:
    named = {}
    for name, value in zip(question.by, group, strict=True):
        if name == "context" and value is not None:
            value = CONTEXTS[value]
        named[name] = NOTHING if value is None else str(value)
    return named


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _row(sums: Sums, seconds: float) -> dict[str, Any]:
    measured = {name.removesuffix("_seconds"): percentiles(sums.ticks[name]) for name in TIMES}
    return {
        "requests": sums.requests,
        "ok": sums.outcomes["ok"],
        "outcomes": dict(sums.outcomes.most_common()),
        "goodput": _share(sums.met, sums.offered),
        **measured,
        "prompt_tokens": sums.prompt_tokens,
        "completion_tokens": sums.completion_tokens,
        "tokens_per_second": _share(sums.completion_tokens, seconds),
        "cached": _share(sums.cached_tokens, sums.cacheable_tokens),
        "retries": sums.retries,
        "continuations": dict(sums.continuations),
        "hedges": dict(sums.hedges),
        "tool_answers": sums.tool_answers,
        "tool_integrity": _share(sums.tool_sound, sums.tool_answers),
    }


def _cells(
    cells: Mapping[tuple[str, int, int], Cell], profiles: Mapping[str, Profile]
) -> list[dict[str, Any]]:
    out = []
    for (backend, bits, context), cell in sorted(cells.items()):
        concurrency, tokens = cell.concurrency / cell.streams, cell.context / cell.streams
        tpot = percentiles(Counter(cell.tpot))["p50"]
        rate = 1 / tpot if tpot else None
        profile = profiles.get(backend)
        expected = None if profile is None else profile.stream_rate(concurrency, tokens)
        out.append(
            {
                "backend": backend,
                "streams": f"{2 ** (bits - 1) + 1}–{2**bits}" if bits > 1 else str(bits + 1),
                "context": CONTEXTS[context],
                "requests": cell.streams,
                "mean_streams": concurrency,
                "mean_context": tokens,
                "tokens_per_second": rate,
                "profile": expected,
                "of_profile": rate / expected if rate and expected else None,
            }
        )
    return out


def why(record: Mapping[str, Any]) -> str:
    """What of a slow request's time went where, the largest first."""
    first = record["ttft_seconds"] if record["ttft_seconds"] is not None else record["e2e_seconds"]
    waited = (record["queue_wait_seconds"] or 0) - (record["body_read_seconds"] or 0)
    parts = [
        (waited, "in line"),
        (record["body_read_seconds"] or 0, "until its body was there"),
        (record["backoff_seconds"] or 0, f"in {record['attempts'] - 1} failed attempts"),
    ]
    prompt = record["prompt_tokens"] or record["prompt_tokens_estimate"] or 0
    new = max(0, prompt - (record["cached_tokens"] or 0))
    backend = record["backend"] or "no backend"
    beside = "" if record["in_flight"] is None else f", beside {record['in_flight']} others"
    rest = first - sum([seconds for seconds, _ in parts])
    parts.append((rest, f"at {backend} with {new:,} tokens to read{beside}"))
    told = [
        f"{seconds:.2f} s {what}" for seconds, what in sorted(parts, reverse=True) if seconds > 0.05 * first
    ]
    failed = [f"{one['failure']} at {one['backend']}" for one in record["failures"]]
    return "; ".join(told + failed)
