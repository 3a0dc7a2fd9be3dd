"""`tierline sim` as users run it: in a process of its own, on a free port.

with SimServer("fp8-mtp3-tp2-v17") as server:
    ...  # requests to server.url
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from tests.real.server import RealServer


class SimServer(RealServer):
    """profile: the configuration to be. options: more of the command line."""

    listening = re.compile(r" on http://127\.0\.0\.1:(\d+)")

    def __init__(
        self, profile: str, *, name: str = "Qwen3.6-27B", port: int = 0, options: tuple[str, ...] = ()
    ) -> None:
        super().__init__(name, port, None)
        self.profile = profile
        self._options = options

    def prepare(self) -> None:
        """Nothing is slow about it."""

    def command(self) -> list[str | Path]:
        command: list[str | Path] = [sys.executable, "-m", "proxy", "sim", "--profile", self.profile]
        return [*command, "--model", self.name, "--port", str(self.port), *self._options]

    def environment(self) -> dict[str, str]:
        """Without a key that somebody set for a simulator of their own."""
        mine = {key: value for key, value in os.environ.items() if key != "TIERLINE_SIM_KEY"}
        return {**mine, "PYTHONPATH": str(Path(__file__).parents[2])}

    def running(self) -> int:
        load: int = json.loads(self.get("/load"))["server_load"]
        return load
