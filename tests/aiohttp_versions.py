"""The HTTP side of the gateway on the oldest and on the newest aiohttp that pyproject.toml allows.

`python -m tests.aiohttp_versions`, or `make test-all`. Each has its environment in .cache/, made on first use, and runs
tests/proxy there: `Answer` leans on what aiohttp does between two requests, which only its tests can promise.
Exit status: 0 if both pass.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.real.server import cache_folder

ROOT = Path(__file__).parent.parent
PRINT_VERSION = "import aiohttp; print(aiohttp.__version__)"


def requirements() -> tuple[dict[str, str], list[str]]:
    """aiohttp's oldest and newest as requirements, and the tools that the tests need (no real servers, no linters)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (allowed,) = (line for line in project["dependencies"] if line.startswith("aiohttp"))
    oldest = re.fullmatch(r"aiohttp>=([\d.]+),<[\d.]+", allowed)
    assert oldest is not None, f"{allowed}: which is the oldest?"
    extras = project["optional-dependencies"]
    tools = [line for line in extras["test"] + extras["demo"] if not line.startswith("tierline[")]
    return {"oldest": f"aiohttp=={oldest[1]}", "newest": allowed}, tools


def run(which: str, aiohttp: str, tools: list[str]) -> bool:
    """Whether tests/proxy passes with this aiohttp."""
    folder = cache_folder() / f"aiohttp-{which}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "-e", str(ROOT), aiohttp, *tools], check=True)
    subprocess.run([*pip, "--upgrade", aiohttp], check=True)
    version = subprocess.run(
        [python, "-c", PRINT_VERSION], check=True, capture_output=True, text=True
    ).stdout.strip()
    print(f"-- tests/proxy with the {which} aiohttp allowed, {version}", flush=True)
    return subprocess.run([python, "-m", "pytest", "-q", "tests/proxy"], cwd=ROOT).returncode == 0


def main() -> int:
    versions, tools = requirements()
    passed = [run(which, aiohttp, tools) for which, aiohttp in versions.items()]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
