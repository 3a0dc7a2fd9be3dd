"""The gateway on real sockets, with simulated servers behind it, does what the simulation says: turn by turn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "rate", "warm_up"), [("chat", 7.5, 10), ("agents", 0.3, 200)])
def test_times_to_the_first_token_are_those_of_the_simulation(shape: str, rate: float, warm_up: int) -> None:
    """A process of its own: its loop has another selector. It exits with 1 when p50 or p95 are 15 % apart."""
    command = [sys.executable, "-m", "tests.agreement", shape, "--rate", str(rate)]
    command += ["--requests", "120", "--warm-up", str(warm_up)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
