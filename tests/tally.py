"""How the tool-call cases went, by kind: counted where they run, summed over test processes, printed at the end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

RESULTS: Counter[tuple[str, str]] = Counter()  # (kind, "right" | "wrong" | "debatable, right" | …)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test process tells the one that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["cases"] = [(*key, count) for key, count in RESULTS.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for kind, state, count in getattr(node, "workeroutput", {}).get("cases", ()):
        RESULTS[kind, state] += count


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
