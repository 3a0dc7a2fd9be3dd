"""The last hour under another policy: a process of its own replays the records (`proxy.replay.whatif`).

Rules: one at a time, at the lowest priority of the system, and killed after `SECONDS`: whatever it is asked, the gateway
serves on. A policy from a file is not taken: the page may change numbers and names, never code.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import orjson

from proxy.clock import Clock
from proxy.config import Config, effective
from proxy.tomltext import toml_lines
from proxy.ui.store import Busy, NoStore

SECONDS = 60.0
WINDOW_SECONDS = 3600.0


class WhatIf:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running: asyncio.subprocess.Process | None = None
        self._busy = False

    async def run(self, config: Config, candidate: str) -> Any:
        """What the worker says. Raises NoStore, Busy."""
        store = config.records_store
        if store is None:
            raise NoStore('records are not kept: set telemetry.store to a path, or to "auto"')
        if config.source is None:
            raise Busy("the configuration did not come from a file, so there is nothing to compare with")
        if self._busy:
            raise Busy("a replay is running: one at a time")
        job = {
            "config": str(config.source),
            "store": str(store),
            "since": self._clock.wall() - WINDOW_SECONDS,
            "active": active(config)["toml"],
            "candidate": candidate,
        }
        self._busy = True
        try:
            return await self._run(orjson.dumps(job))
        finally:
            self._busy = False

    async def _run(self, job: bytes) -> Any:
        place = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (place, os.environ.get("PYTHONPATH"))))
        self._running = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy.replay.whatif",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        try:
            async with self._clock.timeout_at(self._clock.now() + SECONDS):
                said, wrong = await process.communicate(job)
        except TimeoutError:
            raise Busy(f"the replay took longer than {SECONDS:g} s and was ended") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            self._running = None
        if process.returncode != 0:
            raise Busy(f"the replay failed: {wrong.decode('utf-8', 'replace')[-300:]}")
        return orjson.loads(said)

    async def close(self) -> None:
        if self._running is not None and self._running.returncode is None:
            self._running.kill()


def active(config: Config) -> dict[str, Any]:
    """The policy in force as TOML, to be changed; and the names of those that are built in."""
    from policies.classic import RANKINGS

    plain = effective(config)
    policy, tiers = plain["policy"], plain["tiers"]
    assert isinstance(policy, dict)
    own = policy.pop("file", None)
    return {
        "toml": "\n".join(toml_lines({"policy": policy, "tiers": tiers})),
        "name": policy["name"],
        "own": own is not None,
        "built_in": list(RANKINGS),
    }
