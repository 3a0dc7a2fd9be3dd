"""Concurrency × context: what streams did, beside what the backend's profile says of such streams.

Rules: a cell's profile is taken at the mean of the requests in it, so that wide cells compare fairly. Concurrency is what
the backend had of ours when the request was chosen for it, itself included; it may change while it runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from policies.predict import Measured
from policies.profile import Profile
from proxy.ui.queries import Row, quantile

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT = (1024, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
"""Upper bounds; beyond the last one counts as the last."""


def heat(rows: Sequence[Row], profile: Profile | None) -> list[dict[str, Any]]:
    """The cells that have something. rate: tokens a second of one stream, the median; ttft: seconds from being let in, the
    mean, since warm and cold ones are mixed."""
    found: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        found.setdefault((_place(CONCURRENCY, row[0]), _place(CONTEXT, row[1])), []).append(row)
    speed = None if profile is None or profile.quality_only else Measured(profile)
    return [_cell(x, y, mine, speed) for (x, y), mine in sorted(found.items())]


def _place(bounds: Sequence[int], value: float) -> int:
    return min(len(bounds) - 1, bisect_left(bounds, value))


def _cell(x: int, y: int, rows: Sequence[Row], speed: Measured | None) -> dict[str, Any]:
    tpot = quantile(sorted([row[2] for row in rows if row[2]]), 0.5)
    streams, context, ttft, cached = (sum([row[i] for row in rows]) / len(rows) for i in (0, 1, 3, 4))
    cell: dict[str, Any] = {
        "concurrency": x,
        "context": y,
        "requests": len(rows),
        "rate": 1 / tpot if tpot else None,
        "ttft": ttft,
        "mean_streams": streams,
        "mean_context": context,
        "profile_rate": None,
        "profile_ttft": None,
    }
    if speed is not None:
        cell["profile_rate"] = 1 / speed.tpot(streams, context)
        cell["profile_ttft"] = speed.warm(context, cached) + speed.cold(context, cached)
    return cell
