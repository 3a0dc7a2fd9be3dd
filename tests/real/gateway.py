"""The gateway as users run it: `tierline serve` in a process of its own, in front of real servers.

Warnings are errors in it. Its records are read from the file that it writes, its counts from the admin listener.

    with GatewayProcess({"a": server}) as gateway:
        ...  # requests to gateway.url
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.real.child import POLL, Deadline
from tests.real.server import RealServer

Record = dict[str, Any]


class GatewayProcess(RealServer):
    """backends: by name. per_backend: further lines of a backend's table. config: further tables. server: further lines of
    that table.

    The public model is `tiny`, whatever the backends call theirs. environment: what `env:` references name.
    """

    start_seconds = 120.0  # where much else computes

    def __init__(
        self,
        backends: Mapping[str, RealServer],
        *,
        config: str = "",
        server: str = "",
        per_backend: Mapping[str, str] | None = None,
        key: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("tiny", 0, key)
        self._backends = backends
        self._more = config
        self._server = server
        self._per_backend = per_backend or {}
        self._environment = environment or {}
        self._files: tempfile.TemporaryDirectory[str] | None = None
        self._admin_port = 0

    # -- what a server of ours needs --------------------------------------------------------------------------

    def prepare(self) -> None:
        self._files = tempfile.TemporaryDirectory(prefix="tierline-")
        self.port, self._admin_port = free_port(), free_port()
        self._config.write_text(self._text())

    def command(self) -> list[str | Path]:
        return [sys.executable, "-W", "error", "-m", "proxy", "serve", "--config", self._config]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **self._environment}

    def ready(self) -> bool:
        """Serving, and every backend seen: what it was told at its first poll decides routing."""
        if not super().ready():
            return False
        try:
            return all(map(_known, self.backends().values()))
        except urllib.error.URLError:
            return False  # the admin side listens a moment after the other

    def running(self) -> int:
        return sum(backend["in_flight"] for backend in self.backends().values())

    def stop(self) -> None:
        super().stop()
        if self._files is not None:
            self._files.cleanup()
            self._files = None

    # -- what it says of itself -------------------------------------------------------------------------------

    def backends(self) -> dict[str, dict[str, Any]]:
        """The admin listener's view, by name."""
        return {backend["name"]: backend for backend in self._admin("/admin/backends")["backends"]}

    def drain(self, backend: str) -> None:
        self._admin(f"/admin/backends/{backend}/drain", b"")

    def undrain(self, backend: str) -> None:
        self._admin(f"/admin/backends/{backend}/undrain", b"")

    def _admin(self, path: str, body: bytes | None = None) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._admin_port}{path}", body, timeout=10) as answer:
            return json.loads(answer.read())

    async def record(self, request_id: str, within: float = 5.0) -> Record:
        """The record of the request that bore this x-request-id, once it is written."""
        deadline = Deadline(within)
        while True:
            for record in self._records():
                if record["request_id"] == request_id:
                    return record
            if deadline.over:
                raise AssertionError(f"no record of {request_id} after {within:g} s")
            await asyncio.sleep(POLL)

    @property
    def complaints(self) -> str:
        """Its log: warnings and worse."""
        assert self.child is not None
        return self.child.output()

    # -- files ------------------------------------------------------------------------------------------------

    @property
    def _config(self) -> Path:
        assert self._files is not None
        return Path(self._files.name) / "config.toml"

    @property
    def _records_file(self) -> Path:
        return self._config.with_name("records.jsonl")

    def _records(self) -> list[Record]:
        if not self._records_file.exists():
            return []
        lines = self._records_file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _text(self) -> str:
        tables = [
            f"[server]\nport = {self.port}\ndrain_timeout = 1.0\n{self._server}",
            f"[admin]\nport = {self._admin_port}",
            f'[telemetry]\nrecords = "file:{self._records_file}"\nlog_level = "warning"',
            "[health]\ninterval = 0.2",
        ]
        for name, server in self._backends.items():
            more = self._per_backend.get(name, "")
            tables.append(f'[[backends]]\nname = "{name}"\nurl = "{server.url}"\n{more}')
        if "[policy.tokens]" not in self._more:  # the scripted model has a token for each byte
            tables.append("[policy.tokens]\nbytes_per_token = 1.1")
        if "[models" not in self._more:
            tables.append(f"[models.{self.name}]")
        return "\n\n".join([*tables, self._more]) + "\n"


def _known(backend: Mapping[str, Any]) -> bool:
    return bool(backend["model"] and backend["window_tokens"])
