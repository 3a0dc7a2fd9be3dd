"""Child processes that never outlive us.

Rules
1. A child leads its own session: Ctrl-C in the terminal reaches us alone, and we end our children in order.
2. If we die without ending it, the kernel does (Linux: parent death signal, set before the program is run):
   SIGKILL, or for a child that has children of its own to end, SIGTERM.
   That signal is tied to the thread that spawned the child: spawn from one that stays.
3. What a child prints goes to a file, so that no pipe can fill up; `tail` shows its end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

POLL = 0.02  # seconds between looks at what another process does
PATIENCE = 10.0  # seconds that a child has to end by itself

# Runs the program in its place, after asking the kernel to end it with its parent.
_LAUNCH = """
import ctypes, os, sys
parent, death, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, death)
if os.getppid() != parent:
    sys.exit(1)
os.execvp(program[0], program)
"""


class Child:
    """One running program. log: the file that holds its output. death: the signal that it gets when we die."""

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        env: Mapping[str, str] | None = None,
        death: signal.Signals = signal.SIGKILL,
    ) -> None:
        self.log = log
        self.name = Path(command[0]).name
        launch = [sys.executable, "-S", "-E", "-c", _LAUNCH, str(os.getpid()), str(int(death))]
        launcher = [*launch, *map(str, command)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                launcher,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 15) -> str:
        """The last lines of its output."""
        return "\n".join(self.output().splitlines()[-lines:])

    def terminate(self) -> None:
        """SIGTERM to the child alone."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def stop(self, patience: float = PATIENCE) -> int:
        """SIGTERM, then after `patience` seconds SIGKILL for all of its session; the exit status."""
        self.terminate()
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self._kill_session()
            return self.process.wait()
        finally:
            self._kill_session()

    def _kill_session(self) -> None:
        """Also what the child left behind: its session bears its id."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Deadline:
    """Time that is left for something, and what to say when it is over."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end
