"""Prints, at the end of a session, how the tool-call cases went, by kind."""

from __future__ import annotations

from collections import Counter
from typing import Any

RESULTS: Counter[tuple[str, str]] = Counter()  # (kind, "right" | "wrong" | "debatable, right" | …)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not RESULTS:
        return
    terminalreporter.section("tool-call cases by kind")
    states = ("right", "wrong", "debatable, as expected", "debatable, otherwise")
    for kind in sorted({kind for kind, _ in RESULTS}):
        counts = [f"{RESULTS[kind, state]} {state}" for state in states if RESULTS[kind, state]]
        terminalreporter.write_line(f"{kind:28} {', '.join(counts)}")
    totals = [f"{sum(n for (_, s), n in RESULTS.items() if s == state)} {state}" for state in states]
    terminalreporter.write_line(f"{'all':28} {', '.join(totals)}")
