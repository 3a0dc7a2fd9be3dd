"""Results for a terminal and for programs.

Rules: one table a source; figures are those of `policies.simulation.score.Score`. rich is imported here only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import isfinite

from rich.console import Console
from rich.table import Table

from policies.simulation import REFERENCE, Outcome

COLUMNS = (
    "load",
    "policy",
    "req/s",
    "goodput",
    "of ref",
    "met/s",
    "TTFT p50",
    "p95",
    "TPOT p95",
    "cached",
    "shed",
    "lost",
    "longest",
    "where",
)


WIDE = 170
"""Columns where no terminal says how many it has."""


def row(outcome: Outcome, reference: Outcome | None) -> tuple[str, ...]:
    """The cells of one outcome, in the order of COLUMNS."""
    s = outcome.score
    best = reference.score.goodput if reference is not None else 0.0
    of = f"{s.goodput / best:.2f}" if best else ""
    return (
        "" if outcome.load is None else f"{outcome.load:.0%}",
        outcome.policy,
        f"{outcome.rate:.3g}",
        f"{s.goodput:.3f}",
        of,
        f"{s.met_per_second:.3g}",
        seconds(s.ttft50),
        seconds(s.ttft95),
        f"{s.tpot95 * 1e3:.0f} ms",
        f"{s.cached:.0%}",
        str(s.shed_once),
        str(s.lost + s.failed + s.gave_up),
        seconds(s.longest),
        " ".join(f"{name} {share:.0%}" for name, share in s.shares),
    )


def seconds(value: float) -> str:
    if not isfinite(value):
        return "–"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def reference_of(outcome: Outcome, outcomes: Iterable[Outcome]) -> Outcome | None:
    """The reference's outcome on the same traffic."""
    for other in outcomes:
        if other.policy == REFERENCE and (other.source, other.rate) == (outcome.source, outcome.rate):
            return other
    return None


def print_table(outcomes: Sequence[Outcome], title: str) -> None:
    """One source's outcomes."""
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(
            column,
            justify="left" if column in ("policy", "where") else "right",
            no_wrap=column != "where",
        )
    load: float | None = None
    for outcome in outcomes:
        if load is not None and outcome.load != load:
            table.add_section()
        load = outcome.load
        table.add_row(*row(outcome, reference_of(outcome, outcomes)))
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    console.print(table)
    for outcome in outcomes:
        if outcome.fault is not None:
            f = outcome.fault
            console.print(
                f"{outcome.policy}: goodput before the fault {f.before:.3f}, during it {f.during:.3f}, "
                f"from 10 s after its end {f.after:.3f} (without a fault {f.calm:.3f})"
            )
        if outcome.score.violations:
            console.print(f"{outcome.policy}: {outcome.score.violations} TIER VIOLATIONS")


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The same as a table for a page."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(row(o, reference_of(o, outcomes))) + " |" for o in outcomes]
    return "\n".join(lines)


def plain(outcome: Outcome) -> dict[str, object]:
    """For programs: seconds, shares; a figure that does not exist is null."""
    out: dict[str, object] = {
        "source": outcome.source,
        "policy": outcome.policy,
        "rate": outcome.rate,
        "load": outcome.load,
        "requests": outcome.requests,
        "goodput": outcome.score.goodput,
        "met_per_second": outcome.score.met_per_second,
    }
    out |= asdict(outcome.score) | {"shares": dict(outcome.score.shares)}
    if outcome.fault is not None:
        out["fault"] = asdict(outcome.fault)
    return out
