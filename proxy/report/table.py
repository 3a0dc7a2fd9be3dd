"""A report for a terminal.

Rules: the figures are those of `proxy.report.figures`, seconds shown to three digits. rich is imported here only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

WIDE = 170
"""Columns where no terminal says how many it has."""

SLOW_COLUMNS = ("time", "request", "model", "tier", "backend", "chosen", "first token", "of", "why")


def shown(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 0.1:
        return f"{seconds * 1e3:#.3g}".rstrip(".") + " ms"
    return f"{seconds:#.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def print_report(report: Mapping[str, Any], title: str) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    console.print(_latencies(report, title))
    console.print(_counts(report))
    for table in (_outcomes(report), _tiers(report), _attempts(report)):
        if table.row_count:
            console.print(table)
    if report["slowest"]:
        console.print(_slowest(report["slowest"]))


def _groups(report: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for group in report["groups"]:
        yield " · ".join(group["by"].values()) or "all", group
    if len(report["groups"]) > 1:
        yield "all", report["all"]


def _by(report: Mapping[str, Any]) -> str:
    return " · ".join(report["groups"][0]["by"]) if report["groups"] else ""


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < left else "right", no_wrap=column != "why")
    return table


def _latencies(report: Mapping[str, Any], title: str) -> Table:
    heads = (
        "TTFT p50",
        "p95",
        "p99",
        "gap p50",
        "gap p99",
        "TPOT p50",
        "p95",
        "p99",
        "in line p95",
        "whole p50",
        "p95",
    )
    table = _table(title, _by(report), *heads)
    for name, one in _groups(report):
        ttft, tpot, e2e = one["ttft"], one["tpot"], one["e2e"]
        times = (
            ttft["p50"], ttft["p95"], ttft["p99"], one["chunk_gap_p50"]["p50"], one["chunk_gap_p99"]["p50"],
            tpot["p50"], tpot["p95"], tpot["p99"], one["queue_wait"]["p95"], e2e["p50"], e2e["p95"],
        )  # fmt: skip
        table.add_row(name, *map(shown, times))
    return table


def _counts(report: Mapping[str, Any]) -> Table:
    heads = (
        "requests",
        "ok",
        "goodput",
        "tokens",
        "tokens/s",
        "cached",
        "retries",
        "continued",
        "hedged",
        "tools sound",
    )
    table = _table("", _by(report), *heads)
    for name, one in _groups(report):
        rate = one["tokens_per_second"]
        table.add_row(
            name, f"{one['requests']:,}", share(one["ok"] / one["requests"] if one["requests"] else None),
            share(one["goodput"]), f"{one['completion_tokens']:,}", "–" if rate is None else f"{rate:,.1f}",
            share(one["cached"]), str(one["retries"]), _words(one["continuations"]), _words(one["hedges"]),
            share(one["tool_integrity"]),
        )  # fmt: skip
    return table


def _words(counts: Mapping[str, int]) -> str:
    return " ".join(f"{n} {what}" for what, n in counts.items()) or "–"


def _outcomes(report: Mapping[str, Any]) -> Table:
    table = _table("", "ended", "requests", "share")
    for outcome, n in report["all"]["outcomes"].items():
        table.add_row(outcome, f"{n:,}", share(n / report["requests"]))
    return table


def _tiers(report: Mapping[str, Any]) -> Table:
    table = _table("", "tier asked", "served", "requests", left=2)
    for one in report["tiers"]:
        table.add_row(one["asked"] or "–", one["served"] or "–", f"{one['requests']:,}")
    return table


def _attempts(report: Mapping[str, Any]) -> Table:
    table = _table("", "failed attempts at", "how", "attempts", left=2)
    for one in report["failed_attempts"]:
        table.add_row(one["backend"], one["failure"], f"{one['attempts']:,}")
    return table


def _slowest(records: Iterable[Mapping[str, Any]]) -> Table:
    table = _table(
        "slowest to the first token, or to their end where nothing was streamed", *SLOW_COLUMNS, left=9
    )
    for one in records:
        at = datetime.fromisoformat(one["time"]).astimezone(UTC)
        first = one["ttft_seconds"] if one["ttft_seconds"] is not None else one["e2e_seconds"]
        table.add_row(
            f"{at:%m-%d %H:%M:%S}", one["request_id"][:36], one["model"] or "–", one["tier"] or "–",
            one["backend"] or "–", one["reason"] or "–", shown(first), shown(one["e2e_seconds"]), one["why"],
        )  # fmt: skip
    return table
