"""The study's launch recipes, and deploy/ read as Compose and Tierline read it. For the tests of both.

FACTS is written from the study, not from the files: images, flags, environment and container options of each recipe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from proxy.config import Config, load

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
KEYS = {
    "TIERLINE_KEY": "client-key",
    "TIERLINE_ADMIN_KEY": "admin-key",
    "VLLM_API_KEY": "engine-key",
    "VLLM_API_KEY_BF16": "other-engine-key",
}
SHELL = {**KEYS, "GRAFANA_PASSWORD": "grafana-password", "HOME": "/home/someone", "BF16_ADDRESS": "192.0.2.7"}


# -- the study's facts ---------------------------------------------------------------------------------------

ENVIRONMENT = {
    "OMP_NUM_THREADS": "16",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_NET_GDR_LEVEL": "SYS",
    "NCCL_MIN_NCHANNELS": "8",
}
OPTIONS = {
    "gpus": "all",
    "ipc": "host",
    "shm_size": "32g",
    "ulimits": {"memlock": -1, "stack": 67108864},
    "network_mode": "host",
}
CACHES = [".cache/huggingface", ".cache/vllm", ".cache/flashinfer", ".triton/cache"]
COMMON = {
    "-O3": "",
    "--served-model-name": "Qwen3.6-27B",
    "--port": "11435",
    "--tensor-parallel-size": "2",
    "--gpu-memory-utilization": "0.88",
    "--max-model-len": "134144",
    "--max-num-seqs": "128",
    "--enable-auto-tool-choice": "",
    "--enable-prefix-caching": "",
    "--reasoning-parser": "qwen3",
    "--tool-call-parser": "qwen3_xml",
    "--attention-backend": "flashinfer",
}
BATCH = {"--max-num-batched-tokens": "32768", "--max-cudagraph-capture-size": "256"}
TEXT_ONLY = {"--language-model-only": ""}
V17 = {"--gpu-memory-utilization": "0.80", "--max-model-len": "262144", **BATCH}
ONE_GPU = {"--tensor-parallel-size": "1"}


def mtp(tokens: int) -> dict[str, str]:
    return {
        "--speculative-config.method": "mtp",
        "--speculative-config.num_speculative_tokens": str(tokens),
    }


def dflash(method: str) -> dict[str, str]:
    return {
        "--speculative-config.method": method,
        "--speculative-config.model": "z-lab/Qwen3.6-27B-DFlash",
        "--speculative-config.num_speculative_tokens": "8",
        "--speculative-config.draft_sample_method": "gumbel",
        "--speculative-config.use_local_argmax_reduction": "true",
    }


@dataclass(frozen=True)
class Facts:
    image: str
    model: str
    flags: dict[str, str]
    profile: str
    quality: tuple[bool, float | None]  # reference weights; KL in bits per position
    environment: dict[str, str] = field(default_factory=lambda: ENVIRONMENT)
    serve: bool = True  # the entry point wants `serve` first


FP8 = ("Qwen/Qwen3.6-27B-FP8", (False, 0.0055))
BF16 = ("Qwen/Qwen3.6-27B", (True, None))


def repne(version: str, weights: tuple[str, tuple[bool, float | None]], profile: str, **flags: str) -> Facts:
    model, quality = weights
    return Facts(f"repne/vllm:{version}", model, {**COMMON, **flags}, profile, quality)


UPSTREAM_FLAGS = {
    **{flag: value for flag, value in COMMON.items() if flag != "-O3"},
    "--tool-call-parser": "qwen3_coder",
    "--speculative-config": '{"method":"mtp","num_speculative_tokens":3}',
}
UPSTREAM_ENVIRONMENT = {
    name: ENVIRONMENT[name]
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL")
}
FACTS: dict[str, Facts] = {
    "fp8-mtp3": repne("v13", FP8, "fp8-mtp3-v13", **BATCH, **TEXT_ONLY, **mtp(3)),
    "fp8-mtp5": repne("v13", FP8, "fp8-mtp5-may5", **BATCH, **TEXT_ONLY, **mtp(5)),
    "fp8-nospec": repne("v13", FP8, "fp8-nospec-may5", **BATCH, **TEXT_ONLY),
    "bf16-dflash8": repne("v13", BF16, "bf16-dflash8-v13", **dflash("draft_model")),
    "fp8-tp2-v17": repne("v17", FP8, "fp8-mtp3-tp2-v17", **V17, **mtp(3)),
    "fp8-tp1-v17": repne("v17", FP8, "fp8-mtp3-tp1-v17", **V17, **mtp(3), **ONE_GPU),
    "bf16-tp2-v17": repne("v17", BF16, "bf16-dflash8-tp2-v17", **V17, **dflash("dflash")),
    "bf16-tp1-v17": repne(
        "v17",
        BF16,
        "bf16-dflash8-tp1-v17",
        **{**V17, "--max-model-len": "131072"},
        **dflash("dflash"),
        **ONE_GPU,
    ),
    "fp8-upstream": Facts(
        "vllm/vllm-openai:v0.20.1-cu129-ubuntu2404",
        FP8[0],
        UPSTREAM_FLAGS,
        "fp8-mtp3-upstream-v0.20.1",
        FP8[1],
        UPSTREAM_ENVIRONMENT,
        serve=False,
    ),
}
FLEET = {"fp8": FACTS["fp8-mtp3"], "bf16": FACTS["bf16-dflash8"]}
GGUF = "gguf-q8"
RECIPES = [*FACTS, GGUF, "fleet"]
# The fleet's own machine runs its FP8 half.
ENGINES = {**FACTS, "fleet": FLEET["fp8"]}


# -- reading compose files -----------------------------------------------------------------------------------


class Missing(Exception):
    """A variable that Compose would refuse to go on without."""


def interpolated(value: Any, shell: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: interpolated(item, shell) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item, shell) for item in value]
    if not isinstance(value, str):
        return value

    def put(found: re.Match[str]) -> str:
        name, how, rest = found[1], found[2], found[3]
        if shell.get(name):
            return shell[name]
        if how == ":-":
            return rest
        raise Missing(name)

    return re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", put, value)


def merged(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        both = {key: merged(base[key], over[key]) for key in base if key in over}
        return {**base, **over, **both}
    if isinstance(base, list) and isinstance(over, list):
        return base + over
    return over


def compose(recipe: str, shell: Mapping[str, str] = SHELL) -> dict[str, Any]:
    """The file as Compose sees it: what it extends merged in, variables put in."""
    whole = yaml.safe_load((DEPLOY / f"{recipe}.yaml").read_text("utf-8"))
    services: dict[str, Any] = {}
    for name, service in whole["services"].items():
        own = dict(service)
        extends = own.pop("extends", None)
        if extends is not None:
            base = yaml.safe_load((DEPLOY / extends["file"]).read_text("utf-8"))
            own = merged(base["services"][extends["service"]], own)
        services[name] = own
    whole["services"] = interpolated(services, shell)
    return dict(whole)


def command_of(argv: list[str], serve: bool) -> tuple[str, dict[str, str]]:
    """(model, flags) of an engine's command line. A flag given twice fails."""
    if serve:
        assert argv[0] == "serve"
        argv = argv[1:]
    model, flags, last = argv[0], {}, ""
    for word in argv[1:]:
        if word.startswith("-"):
            assert word not in flags, f"{word} twice"
            flags[word], last = "", word
        else:
            assert last, f"{word} belongs to no flag"
            assert not flags[last], f"{last} has {flags[last]} already, and {word}"
            flags[last] = word
    return model, flags


def seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)(?:s|sec)?", text)
    assert found, text
    return float(found[1])


def config_of(recipe: str) -> Config:
    return load(DEPLOY / f"{recipe}.toml", KEYS)
