"""In virtual time the engine model gives the study's own figures."""

from __future__ import annotations

import pytest

from policies import profile
from policies.engine.check import Cell, check

SERVING = [name for name in profile.names() if not profile.get(name).quality_only]


@pytest.mark.parametrize("name", SERVING)
def test_every_measured_cell_is_met(name: str) -> None:
    own = profile.get(name).measured
    cells = list(check(profile.get(name)))
    assert len(cells) == len(own.decode) + len(own.latency) + len(own.prefill) > 0
    assert [cell for cell in cells if not cell.ok] == []


def test_the_tolerances_are_three_percent_of_rate_and_ten_of_ttft() -> None:
    kinds = {cell.kind: cell.tolerance for name in SERVING for cell in check(profile.get(name))}
    assert kinds == {"decode tok/s": 0.03, "warm TTFT s": 0.10, "cold TTFT s": 0.10}
    assert not Cell("p", "decode tok/s", 1, 0, study=100.0, model=96.0, tolerance=0.03).ok


def test_a_quality_only_profile_has_nothing_to_check() -> None:
    assert list(check(profile.get("gguf-q8"))) == []
