"""A small fleet that has served something: two simulated servers, the gateway with its page, and the demo's traffic.

with Live() as live:
    live.traffic(4.0)
    live.get("fleet")
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from proxy.recordstore import RecordStore
from tests.demo.__main__ import answers
from tests.demo.study import study_fleet
from tests.demo.traffic import Traffic
from tests.ports import free_port
from tests.proxy.test_recordstore import made, record
from tests.real.child import POLL, Child, Deadline

KEY = "the-admin-key"
SCRIPT = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
START_SECONDS = 60.0  # where much else computes
LIMITS = "limits.requests_per_minute = 600\nlimits.tokens_per_minute = 2_000_000\nlimits.concurrent_requests = 64\n"
KEYS = """keys = [{ name = "app", tenant = "team", key = "env:UI_APP_KEY", limits.tokens_per_minute = 1_000_000 }]
"""


class Live:
    """time_scale: engine seconds per second. workers: processes that serve, the page's being the owner's where there are
    several."""

    def __init__(self, time_scale: float = 8.0, workers: int = 2) -> None:
        self._workers = workers
        self._fleet = study_fleet(time_scale)
        self._stack = ExitStack()
        self.port, self.admin_port = free_port(), free_port()
        self.folder = Path()
        self.clients: Traffic | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}/ui/"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierline-ui-")))
            for server in self._fleet.servers.values():
                stack.enter_context(server)
            text = self._fleet.config(self.port, self.admin_port, self.folder / "records.jsonl")
            text = text.replace("[server]\n", f"[server]\nworkers = {self._workers}\n{KEYS}")
            text = text.replace("[admin]\n", '[admin]\nkey = "env:UI_ADMIN_KEY"\n')
            text = text.replace('tier = "balanced"\n', f'tier = "balanced"\n{LIMITS}', 1)
            (self.folder / "config.toml").write_text(text)
            environment = {
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "UI_ADMIN_KEY": KEY,
                "UI_APP_KEY": "none",
            }
            command = [sys.executable, "-m", "proxy", "serve", "--config", self.folder / "config.toml"]
            gateway = Child(command, self.folder / "log", environment)
            stack.callback(gateway.stop)
            deadline = Deadline(START_SECONDS)
            while not answers(f"http://127.0.0.1:{self.port}/ready"):
                assert gateway.running, gateway.tail()
                assert not deadline.over, gateway.tail()
                time.sleep(POLL)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def traffic(self, seconds: float) -> int:
        """The demo's, to its end and until it is recorded; how many requests it was."""
        with ThreadPoolExecutor(1) as thread:  # playwright may hold this one's loop
            return thread.submit(asyncio.run, self._traffic(seconds)).result()

    async def _traffic(self, seconds: float) -> int:
        clients = self.clients = self._fleet.traffic(f"http://127.0.0.1:{self.port}")
        try:
            await clients.run(seconds)
        finally:
            await clients.close()
        deadline = Deadline(START_SECONDS)
        while set(clients.jobs) - {one["request_id"] for one in self.get("requests", limit=200)["requests"]}:
            assert not deadline.over, "not all requests were recorded"
            await asyncio.sleep(POLL)
        return len(clients.jobs)

    def hostile(self) -> None:
        """A record whose every name would like to be markup; as old as nothing that is asked for by time."""
        names = dict.fromkeys(
            ("model", "target", "tenant", "key", "tier", "backend", "reason", "finish_reason"), SCRIPT
        )
        store = RecordStore(str(self.folder / "records.db"), time.time)
        store([made(record(SCRIPT, time.time(), error=SCRIPT, session_hash=SCRIPT, limit=SCRIPT, **names))])
        store.close()

    def get(self, name: str, **query: object) -> Any:
        """What the page's address of that name says."""
        return self.ask(f"ui/api/{name}?{urllib.parse.urlencode(query)}")

    def ask(self, path: str) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.admin_port}/{path}", headers={"Authorization": f"Bearer {KEY}"}
        )
        with urllib.request.urlopen(request, timeout=20) as response:
            return json.load(response)
