"""What real servers have in common: a child process on a port of 127.0.0.1, started, awaited, asked, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from tests.real.child import POLL, Child, Deadline


class Unavailable(Exception):
    """A real server cannot run here; the message says why and what would help."""


class RealServer(ABC):
    """One server, as a context manager (also async). key: what clients must send, if anything."""

    start_seconds = 30.0  # that it has to load its model
    death = signal.SIGKILL  # what it gets when the tests are killed
    listening: re.Pattern[str] | None = None  # in the log of one that chooses its port itself

    def __init__(self, name: str, port: int, key: str | None) -> None:
        self.name = name
        self.port = port
        self.key = key
        self.child: Child | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # what each kind of server says for itself

    @abstractmethod
    def prepare(self) -> None:
        """Slow things before the start, such as making the model; may run in another thread."""

    @abstractmethod
    def command(self) -> list[str | Path]: ...

    @abstractmethod
    def environment(self) -> Mapping[str, str]: ...

    @abstractmethod
    def running(self) -> int:
        """Requests that it works on or queues at this moment."""

    def why_ended(self, status: int) -> str:
        """What an end before serving means; the log's last lines if nothing better is known."""
        assert self.child is not None
        return f"{type(self).__name__} ended with status {status}:\n{self.child.tail()}"

    def find_port(self) -> bool:
        """Whether `port` is known by now."""
        if self.listening is None:
            return True
        assert self.child is not None
        found = self.listening.search(self.child.output())
        if found is not None:
            self.port = int(found[1])
        return found is not None

    # start and end

    def start(self) -> None:
        """Start it and return at once; `ready` tells when it serves. Call it from a thread that stays."""
        self._folder = tempfile.TemporaryDirectory(prefix="tierline-")
        self.child = Child(self.command(), Path(self._folder.name) / "log", self.environment(), self.death)

    def ready(self) -> bool:
        """Whether it serves by now; Unavailable when it ended instead."""
        assert self.child is not None
        if not self.child.running:
            raise Unavailable(self.why_ended(self.child.process.returncode))
        if not self.find_port():
            return False
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def stop(self) -> None:
        if self.child is not None:
            self.child.stop()
            self.child = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Self:
        self.prepare()
        self.start()
        try:
            deadline = Deadline(self.start_seconds)
            while not self.ready():
                self._check(deadline)
                time.sleep(POLL)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.prepare)
        self.start()
        try:
            deadline = Deadline(self.start_seconds)
            while not self.ready():
                self._check(deadline)
                await asyncio.sleep(POLL)
        except BaseException:
            self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def _check(self, deadline: Deadline) -> None:
        assert self.child is not None
        if deadline.over:
            raise Unavailable(f"not serving after {deadline.seconds:g} s:\n{self.child.tail()}")

    # questions, directly: what the answers through the gateway are compared with

    def get(self, path: str) -> bytes:
        """A GET; an error status raises HTTPError, which is an OSError."""
        request = urllib.request.Request(self.url + path, headers=self._headers())
        with urllib.request.urlopen(request, timeout=10) as answer:
            body: bytes = answer.read()
            return body

    def post(self, path: str, body: object) -> tuple[int, Any]:
        """A POST of JSON: status and the JSON that came back."""
        headers = {"content-type": "application/json", **self._headers()}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    async def until_running(self, count: int, within: float = 5.0) -> float:
        """Wait until it works on exactly so many requests, or fail; how many seconds that took."""
        return await until(count, self.running, within)

    async def until_ended(self, within: float = 15.0) -> int:
        """Wait for the process to end by itself, or fail; its exit status."""
        assert self.child is not None
        deadline = Deadline(within)
        while self.child.running:
            if deadline.over:
                raise AssertionError(f"still there after {within:g} s:\n{self.child.tail()}")
            await asyncio.sleep(POLL)
        status: int = self.child.process.returncode
        return status


async def until(count: int, running: Callable[[], int], within: float) -> float:
    """Wait until so many requests run, or fail; how many seconds that took."""
    started = time.monotonic()
    deadline = Deadline(within)
    while (now := await asyncio.to_thread(running)) != count:
        if deadline.over:
            raise AssertionError(f"still {now} running after {within:g} s, not {count}")
        await asyncio.sleep(POLL)
    return time.monotonic() - started


def cache_folder() -> Path:
    """.cache/ of the work tree, or one for temporary files where that cannot be written."""
    folder = Path(__file__).parents[2] / ".cache"
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    fallback = Path(tempfile.gettempdir()) / f"tierline-cache-{os.getuid()}"
    fallback.mkdir(mode=0o700, exist_ok=True)
    return fallback
