"""From two looks at a gateway to what happened between them. Pure.

Rules: rates and percentiles are of the time between the looks; what has no two looks, or nothing in between, is None,
never 0. A counter that went backwards was restarted: it counts from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from proxy.merge import read

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
FAILED = frozenset(
    [*map("upstream_".__add__, ("error", "connect", "timeout", "cut", "malformed")), "no_backend", "internal"]
)
TTFT = "tierline_time_to_first_token_seconds_bucket"
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Look:
    """time: monotonic seconds. samples: by name and labels. backends: as /admin/backends has them."""

    time: float
    samples: Mapping[str, Mapping[Labels, float]]
    backends: Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class Now:
    """Per second, but for seconds (ttft_*, queue by tier: requests)."""

    requests: float | None
    failed: float | None
    shed: float | None
    prompt_tokens: float | None
    completion_tokens: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    overhead_p50: float | None
    cpu: float | None
    queued: Mapping[str, int]
    by_backend: Mapping[str, float]
    """Completion tokens."""


def samples_of(text: str) -> dict[str, dict[Labels, float]]:
    """An exposition by name and labels."""
    found: dict[str, dict[Labels, float]] = {}
    for family in read(text).values():
        for key, value in family.values.items():
            name, _, labels = key.partition("{")
            found.setdefault(name, {})[tuple(_LABEL.findall(labels))] = value
    return found


def now(before: Look | None, look: Look) -> Now:
    def rate(name: str, **wanted: object) -> float | None:
        if before is None or look.time <= before.time:
            return None
        grown = sum(step for labels, step in _steps(before, look, name) if _fits(dict(labels), wanted))
        return grown / (look.time - before.time)

    names = sorted({str(one["name"]) for one in look.backends})
    tokens = {name: rate("tierline_tokens_total", kind="completion", backend=name) for name in names}
    queued: dict[str, int] = {}
    for labels, count in look.samples.get("tierline_queued_requests", {}).items():
        tier = dict(labels).get("tier", "")
        queued[tier] = queued.get(tier, 0) + int(count)
    return Now(
        requests=rate("tierline_requests_total"),
        failed=rate("tierline_requests_total", outcome=FAILED),
        shed=rate("tierline_shed_total"),
        prompt_tokens=rate("tierline_tokens_total", kind="prompt"),
        completion_tokens=rate("tierline_tokens_total", kind="completion"),
        ttft_p50=_quantile(before, look, TTFT, 0.5),
        ttft_p95=_quantile(before, look, TTFT, 0.95),
        overhead_p50=_quantile(before, look, "tierline_overhead_seconds_bucket", 0.5),
        cpu=rate("process_cpu_seconds_total"),
        queued={tier: count for tier, count in queued.items() if count},
        by_backend={name: count for name, count in tokens.items() if count is not None},
    )


def _fits(labels: Mapping[str, str], wanted: Mapping[str, object]) -> bool:
    return all(
        labels.get(name) in value if isinstance(value, frozenset) else labels.get(name) == value
        for name, value in wanted.items()
    )


def _steps(before: Look, look: Look, name: str) -> Iterator[tuple[Labels, float]]:
    earlier = before.samples.get(name, {})
    for labels, value in look.samples.get(name, {}).items():
        was = earlier.get(labels, 0.0)
        yield labels, value - was if value >= was else value


def _quantile(before: Look | None, look: Look, name: str, q: float) -> float | None:
    """As Prometheus' histogram_quantile: linear within a bucket; of the open last one its lower edge."""
    if before is None:
        return None
    passed: dict[float, float] = {}
    for labels, step in _steps(before, look, name):
        edge = float(dict(labels)["le"].replace("+Inf", "inf"))
        passed[edge] = passed.get(edge, 0.0) + step
    edges = sorted(passed)
    if not edges or not passed[edges[-1]]:
        return None
    rank, lower, below = q * passed[edges[-1]], 0.0, 0.0
    for edge in edges:
        if passed[edge] >= rank:
            inside = passed[edge] - below
            if edge == float("inf") or not inside:
                return lower
            return lower + (edge - lower) * (rank - below) / inside
        lower, below = edge, passed[edge]
    return lower
