"""A real server for shared limits, Valkey's or Redis', on a free port: started, killed and started again as a test says.

Nothing is written to disk, so that a killed one has forgotten everything; `remembers` makes it keep each change.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.ports import free_port

DEADLINE = 10.0


def program() -> str | None:
    """Its path; None where none is installed."""
    return shutil.which("valkey-server") or shutil.which("redis-server")


NEEDS_SERVER = pytest.mark.skipif(
    program() is None and "TIERLINE_REQUIRE_REAL" not in os.environ,
    reason="no valkey-server or redis-server is installed: apt-get install valkey-server (or redis-server)",
)


class ValkeyServer:
    """`start` and `kill` as often as needed, on the same port; `stop` at the end."""

    def __init__(self, folder: Path, *options: str, remembers: bool = False) -> None:
        self.port = free_port()
        self._folder = folder
        keeps = ["--appendonly", "yes", "--appendfsync", "always"] if remembers else ["--appendonly", "no"]
        self._options = [*keeps, *options]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Until it answers."""
        found = program()
        assert found is not None, "no valkey-server or redis-server is installed"
        where = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder), "--save", ""]
        self._process = subprocess.Popen(
            [found, *where, *self._options], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        until = time.monotonic() + DEADLINE
        while not self._answers():
            assert self._process.poll() is None, "the server ended"
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                connection.sendall(b"PING\r\n")
                return bool(connection.recv(1))
        except OSError:
            return False

    def kill(self, sign: signal.Signals = signal.SIGKILL) -> None:
        process = self._process
        assert process is not None
        process.send_signal(sign)
        if sign == signal.SIGKILL:
            process.wait(DEADLINE)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
