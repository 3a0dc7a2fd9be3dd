"""A report as one HTML file that needs nothing else: tables, curves over time, a heat map for each backend.

Rules: no script, no font, no address; curves are those of `tierline simulate` (`proxy.simulate.picture`). Whatever a client
chose is escaped. A cell's colour is its rate beside the profile's, and says the same in figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from proxy.report.scan import CONTEXTS
from proxy.report.table import share, shown
from proxy.simulate.picture import STYLE as CURVES
from proxy.simulate.picture import Chart, svg

STYLE = (
    CURVES
    + "body{max-width:1080px}table{border-collapse:collapse;margin:.5em 0 1.5em}th,td{padding:.2em .7em;"
    "text-align:right;border-bottom:1px solid #ddd}th:first-child,td:first-child,.why{text-align:left}"
    "th{font-weight:600}.heat td,.heat th{text-align:center;border:2px solid #fff}.heat small{display:block;color:#444}"
    "@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}th,td{border-color:#444}.grid{stroke:#444}"
    "svg text:not([fill]){fill:#aaa}.heat td{color:#111}.heat th{color:#ddd}"
    ".heat td,.heat th{border-color:#181818}}"
)
OUTCOMES = 6
"""Curves of failures; the rarer ones are left out."""

Rows = Sequence[Sequence[str]]


def page(report: Mapping[str, Any], title: str) -> str:
    """The whole file."""
    by = " · ".join(report["groups"][0]["by"]) if report["groups"] else ""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>",
        "<h2>Latency</h2>",
        _table((by, *_HEADS), [_latency(name, one) for name, one in _groups(report)]),
        "<h2>What was served</h2>",
        _table((by, *_COUNTS), [_count(name, one) for name, one in _groups(report)]),
    ]
    curves = [svg(chart) for chart in charts(report["curves"])] if report.get("curves") else []
    parts += ["<h2>Over time</h2><div>", *curves, "</div>"] if any(curves) else []
    parts += heat_maps(report.get("cells", ()))
    parts += _lists(report)
    parts.append("</body></html>")
    return "\n".join(parts)


# -- tables --------------------------------------------------------------------------------------------------

_HEADS = (
    "TTFT p50",
    "p95",
    "p99",
    "gap p50",
    "gap p99",
    "TPOT p50",
    "p95",
    "p99",
    "in line p95",
    "whole p95",
)
_COUNTS = ("requests", "ok", "goodput", "tokens/s", "cached", "retries", "tools sound")


def _groups(report: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    groups = [(" · ".join(group["by"].values()), group) for group in report["groups"]]
    return [*groups, ("all", report["all"])]


def _latency(name: str, one: Mapping[str, Any]) -> list[str]:
    ttft, tpot = one["ttft"], one["tpot"]
    gaps = one["chunk_gap_p50"]["p50"], one["chunk_gap_p99"]["p50"]
    times = (*ttft.values(), *gaps, *tpot.values(), one["queue_wait"]["p95"], one["e2e"]["p95"])
    return [name, *map(shown, times)]


def _count(name: str, one: Mapping[str, Any]) -> list[str]:
    rate = one["tokens_per_second"]
    ok = share(one["ok"] / one["requests"] if one["requests"] else None)
    return [
        name, f"{one['requests']:,}", ok, share(one["goodput"]), "–" if rate is None else f"{rate:,.1f}",
        share(one["cached"]), f"{one['retries']:,}", share(one["tool_integrity"]),
    ]  # fmt: skip


def _table(head: Sequence[str], rows: Rows, css: str = "") -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table class='{css}'><tr>{cells}</tr>{body}</table>"


def _lists(report: Mapping[str, Any]) -> list[str]:
    outcomes = [(o, f"{n:,}", share(n / report["requests"])) for o, n in report["all"]["outcomes"].items()]
    parts = ["<h2>How requests ended</h2>", _table(("outcome", "requests", "share"), outcomes)]
    if report["failed_attempts"]:
        rows = [(f"{f['backend']}: {f['failure']}", f"{f['attempts']:,}") for f in report["failed_attempts"]]
        parts += ["<h2>Attempts that failed</h2>", _table(("where, how", "attempts"), rows)]
    tiers = [(t["asked"] or "–", t["served"] or "–", f"{t['requests']:,}") for t in report["tiers"]]
    parts += ["<h2>Tiers</h2>", _table(("asked", "served", "requests"), tiers)]
    if report["slowest"]:
        slow = [
            (one["request_id"][:36], one["backend"] or "–", one["reason"] or "–",
             shown(one["ttft_seconds"]), shown(one["e2e_seconds"]), one["why"])
            for one in report["slowest"]
        ]  # fmt: skip
        heads = ("request", "backend", "chosen", "first token", "whole", "why")
        parts += ["<h2>Slowest</h2>", _table(heads, slow, "slow")]
    return parts


# -- curves --------------------------------------------------------------------------------------------------


def charts(curves: Sequence[Mapping[str, Any]]) -> list[Chart]:
    start = curves[0]["at"]
    x = f"minutes from {datetime.fromtimestamp(start, UTC):%Y-%m-%d %H:%M} UTC"

    def over(figure: Callable[[Mapping[str, Any]], float | None]) -> tuple[tuple[float, float], ...]:
        points = [((one["at"] - start) / 60, figure(one)) for one in curves]
        return tuple((at, value) for at, value in points if value is not None)

    def percentiles(title: str, measure: str) -> Chart:
        lines = [(p, over(lambda one, p=p: one[measure][p])) for p in ("p50", "p95", "p99")]  # type: ignore[misc]
        return Chart(title, x, "s", tuple(lines), log=True)

    seconds = curves[1]["at"] - start if len(curves) > 1 else 1.0
    failed: dict[str, int] = {}
    for one in curves:
        for outcome, n in one["outcomes"].items():
            if outcome != "ok":
                failed[outcome] = failed.get(outcome, 0) + n
    worst = sorted(failed, key=lambda outcome: -failed[outcome])[:OUTCOMES]
    kinds = [(o, over(lambda one, o=o: one["outcomes"].get(o, 0))) for o in worst]  # type: ignore[misc]
    return [
        percentiles("time to the first token", "ttft"),
        percentiles("time per output token", "tpot"),
        percentiles("chunk gap (each request's 99th percentile)", "chunk_gap_p99"),
        Chart("failures", x, f"requests in {seconds / 60:g} min", tuple(kinds)),
        Chart("goodput", x, "met ÷ offered", (("goodput", over(lambda one: one["goodput"])),)),
        Chart("requests", x, "1/s", (("requests", over(lambda one: one["requests"] / seconds)),)),
    ]


# -- heat maps -----------------------------------------------------------------------------------------------


def heat_maps(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tokens a second of a stream, by how many there were and how much they held, beside what the profile says."""
    parts = []
    for backend in dict.fromkeys(cell["backend"] for cell in cells):
        mine = [cell for cell in cells if cell["backend"] == backend]
        streams = list(dict.fromkeys(c["streams"] for c in sorted(mine, key=lambda c: c["mean_streams"])))
        where = {(cell["context"], cell["streams"]): cell for cell in mine}
        head = "".join(f"<th>{escape(one)}</th>" for one in streams)
        rows = []
        for context in CONTEXTS:
            found = [where.get((context, one)) for one in streams]
            if any(found):
                rows.append(f"<tr><th>{escape(context)}</th>{''.join(map(_cell, found))}</tr>")
        parts.append(
            f"<h2>{escape(str(backend))}: tokens/s of a stream</h2><table class='heat'>"
            f"<tr><th>context \\ streams</th>{head}</tr>{''.join(rows)}</table>"
        )
    if parts:
        parts.append(
            "<p>Median of the requests that had about so many beside them when they were sent; below it what the "
            "profile says there, where the backend has one. Blue: as fast or faster. Red: slower.</p>"
        )
    return parts


def _cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None or cell["tokens_per_second"] is None:
        return "<td></td>"
    said = f"{cell['tokens_per_second']:.0f}"
    below = f"{cell['requests']:,} requests"
    if cell["of_profile"] is not None:
        below = f"{cell['profile']:.0f} · {cell['of_profile']:.0%}"
    return (
        f"<td style='background:{colour(cell['of_profile'])}' title='{cell['requests']:,} requests'>"
        f"{said}<small>{escape(below)}</small></td>"
    )


def colour(ratio: float | None) -> str:
    """Red at half of the profile, white at all of it, blue at one and a half."""
    if ratio is None:
        return "#eee"
    off = max(-1.0, min(1.0, (ratio - 1) * 2))
    low, high = round(255 - 140 * abs(off)), round(255 - 60 * abs(off))
    return f"rgb({high},{low},{low})" if off < 0 else f"rgb({low},{round((low + high) / 2)},{high})"
