"""What `tierline gate` found of a server, in a file: a backend's `gate = "FILE.json"` reads it, and a tier may demand it.

Rules: text in, values out; no file is opened here and no clock is read. A file that is not understood is an error,
never a passed gate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FORMAT = 1


class BadGate(ValueError):
    """The text is no gate's result; it says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One test. detail: what was seen."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GateResult:
    """at: seconds since the epoch. A gate is passed when each of its tests is."""

    url: str
    model: str
    at: float
    tests: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        return bool(self.tests) and all(test.passed for test in self.tests)


def table(result: GateResult, more: dict[str, object]) -> dict[str, object]:
    """As plain data; more: what people may want to know and nobody reads back."""
    return {
        "format": FORMAT,
        "url": result.url,
        "model": result.model,
        "at": result.at,
        "passed": result.passed,
        "tests": [{"name": t.name, "passed": t.passed, "detail": t.detail} for t in result.tests],
        **more,
    }


def read(text: str) -> GateResult:
    """Raises `BadGate`. What stands in `passed` counts only together with its tests."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise BadGate("it is no JSON") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise BadGate(f"it is not what tierline gate writes (format {FORMAT})")
    at, tests = data.get("at"), data.get("tests")
    if not isinstance(at, (int, float)) or isinstance(at, bool) or not 0 < at < 1e11:
        raise BadGate("at: expected seconds since the epoch")
    outcomes = _outcomes(tests) if isinstance(tests, list) and tests else None
    if outcomes is None:
        raise BadGate("tests: expected a list of name and passed")
    result = GateResult(str(data.get("url")), str(data.get("model")), float(at), outcomes)
    if data.get("passed") is not result.passed:
        raise BadGate("passed: does not agree with its tests")
    return result


def _outcomes(tests: Sequence[Any]) -> tuple[Outcome, ...] | None:
    found = []
    for test in tests:
        if not isinstance(test, dict) or not isinstance(test.get("passed"), bool) or not test.get("name"):
            return None
        found.append(Outcome(str(test["name"]), test["passed"], str(test.get("detail", ""))))
    return tuple(found)
