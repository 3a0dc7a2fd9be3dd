"""Three times the load, live: the admitted within the SLO, the others told at once, as much done as at capacity."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_three_times_the_load_is_carried_like_once() -> None:
    """A process of its own: its loop has another selector. It exits with 1 beyond the SLO."""
    command = [sys.executable, "-m", "tests.overload"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_hedging_takes_a_third_off_the_slowest_first_tokens() -> None:
    """Within its share of the requests; else it exits with 1."""
    command = [sys.executable, "-m", "tests.hedging"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
