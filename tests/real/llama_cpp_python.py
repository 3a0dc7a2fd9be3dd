"""The server of llama-cpp-python with the scripted model: it parses no tool calls and no thinking.

TIERLINE_LLAMA_CPP_PYTHON names an interpreter that has it (`pip install "llama-cpp-python[server]"` compiles for some
minutes); the tests themselves need none.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.ports import free_port
from tests.real.llama import make_model
from tests.real.server import RealServer, Unavailable

VARIABLE = "TIERLINE_LLAMA_CPP_PYTHON"


def interpreter() -> Path:
    """The Python that has it. Raises Unavailable where there is none."""
    named = os.environ.get(VARIABLE)
    if not named:
        raise Unavailable(f"{VARIABLE} names no interpreter that has llama-cpp-python")
    python = Path(named)
    try:
        done = subprocess.run(
            [python, "-c", "import llama_cpp.server.app"], capture_output=True, timeout=60, check=False
        )
    except OSError as error:
        raise Unavailable(f"{python} does not run: {error}") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise Unavailable(f"{python} has no llama-cpp-python: {last[0] if last else done.returncode}")
    return python


class LlamaCppPython(RealServer):
    """One on a free port. It serves one request at a time and tells neither its window nor its load."""

    def __init__(self, *, name: str = "tiny", window_tokens: int = 4096) -> None:
        super().__init__(name, 0, None)
        self.window_tokens = window_tokens
        self._model: Path | None = None

    def prepare(self) -> None:
        interpreter()
        self._model = make_model() / "model.gguf"
        self.port = free_port()

    def command(self) -> list[str | Path]:
        assert self._model is not None
        command: list[str | Path] = [interpreter(), "-m", "llama_cpp.server", "--model", self._model]
        command += ["--model_alias", self.name, "--host", "127.0.0.1", "--port", str(self.port)]
        return [*command, "--n_ctx", str(self.window_tokens), "--n_threads", "1"]

    def environment(self) -> Mapping[str, str]:
        return os.environ

    def ready(self) -> bool:
        assert self.child is not None
        if not self.child.running:
            raise Unavailable(self.why_ended(self.child.process.returncode))
        try:
            self.get("/v1/models")  # it has no /health
        except OSError:
            return False
        return True

    def running(self) -> int:
        raise NotImplementedError("llama-cpp-python does not tell")
