"""docs/deployments.md: its launch lines are the compose files', its backend blocks load, its figures are the profiles'."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from itertools import pairwise

import pytest

from policies import profile as profiles
from policies.measured import Part
from policies.profile import Profile
from proxy.config import loads
from tests.deploy_facts import FACTS, KEYS, RECIPES, ROOT, SHELL, compose, config_of

DOC = (ROOT / "docs" / "deployments.md").read_text("utf-8")


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", DOC, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def block(section: str, language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", sections()[section], re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def test_every_recipe_has_its_section() -> None:
    assert [name for name in sections() if name in RECIPES] == RECIPES


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize("recipe", FACTS)
def test_the_launch_line_is_the_compose_files(recipe: str) -> None:
    """The lines are run by a real shell, in which docker prints what it was given."""
    script = 'docker() { printf "%s\\0" "$@"; }\n' + block("The container", "bash") + block(recipe, "bash")
    done = subprocess.run(
        ["bash", "-eu", "-c", script], env=SHELL, capture_output=True, text=True, timeout=30, check=True
    )
    words = done.stdout.split("\0")[:-1]
    service = compose(recipe)["services"]["vllm"]
    at = words.index(service["image"])
    assert words[at + 1 :] == shlex.split(service["command"])
    assert words[:4] == ["run", "-d", "--name", "vllm"]
    given = words[4:at]
    pairs = list(pairwise(given))
    environment = dict(word.partition("=")[::2] for flag, word in pairs if flag == "-e")
    assert {**environment, "VLLM_API_KEY": "engine-key"} == service["environment"]
    assert environment["VLLM_API_KEY"] == ""  # by name, so that it is in no list of processes
    assert [word for flag, word in pairs if flag == "-v"] == service["volumes"]
    ulimits = [word.split("=") for flag, word in pairs if flag == "--ulimit"]
    assert {name: int(value) for name, value in ulimits} == service["ulimits"]
    rest = {"--gpus": "gpus", "--network": "network_mode"}
    assert {rest[flag]: word for flag, word in pairs if flag in rest} == {
        key: service[key] for key in rest.values()
    }
    assert f"--ipc={service['ipc']}" in given
    assert f"--shm-size={service['shm_size']}" in given


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_documented_backends_load_and_are_the_recipes(recipe: str) -> None:
    text = block(recipe, "toml")
    shown = loads(text if "[models" in text else text + "[models.any]\n", KEYS)
    config = config_of(recipe)
    assert shown.backends == config.backends
    if recipe == "fleet":
        assert (shown.models, shown.tiers) == (config.models, config.tiers)


def rate(profile: Profile, streams: int, context: int) -> str:
    cells = {(c, x): figure for c, x, figure in profile.measured.decode}
    if (streams, context) in cells:
        return f"{cells[streams, context]:.0f}"
    if streams * context > profile.kv_tokens:
        return "–"
    return f"({profile.aggregate_rate(streams, context):.0f})"


def time(seconds: float, measured: bool) -> str:
    text = f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return text if measured else f"({text})"


def expected_rows(profile: Profile) -> list[str]:
    data = profile.measured
    lent = {loan.part for loan in data.borrowed}
    warm_cells = set() if data.latency_cold else {(row[0], row[1]) for row in data.latency}
    furthest = data.prefill[-1][0] if data.prefill and Part.PREFILL not in lent else 0
    warm = [time(profile.warm_ttft(1, x), (1, x) in warm_cells) for x in (0, 32768, 131072)]
    cold = [time(profile.cold_ttft(x), x <= furthest) for x in (32000, 128000)]
    return [
        f"| tok/s together, short context | {' | '.join(rate(profile, c, 0) for c in (1, 8, 32))} |",
        f"| tok/s together, 128k context | {' | '.join(rate(profile, c, 131072) for c in (1, 8, 32))} |",
        f"| prompt in the prefix cache | {' | '.join(warm)} |",
        f"| cold | – | {' | '.join(cold)} |",
    ]


@pytest.mark.parametrize("recipe", FACTS)
def test_what_to_expect_is_what_the_profile_says(recipe: str) -> None:
    profile, text = profiles.get(FACTS[recipe].profile), sections()[recipe]
    assert f"`{FACTS[recipe].profile}`" in text
    rows = [line for line in text.splitlines() if line.startswith(("| tok/s", "| prompt", "| cold"))]
    assert rows == expected_rows(profile)
    for tokens in re.findall(r"chunk holds ([\d.]+) tokens", text):
        assert tokens == f"{profile.tokens_per_step():.1f}"
    if not profile.tool_choice_required_works:
        assert '`tool_choice: "required"` breaks' in text
