"""deploy/ against the study's launch recipes: engines, gateways, image, unit, scrape configs, dashboard.

There is no Docker and no GPU here: compose files are read as Compose would (extends, interpolation), never started.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from policies import profile as profiles
from policies.measured import Part, SpecKind
from proxy.cli import main
from proxy.config import ConfigError, load, serving
from tests.deploy_facts import (
    CACHES,
    DEPLOY,
    ENGINES,
    FACTS,
    FLEET,
    GGUF,
    KEYS,
    OPTIONS,
    RECIPES,
    ROOT,
    SHELL,
    Facts,
    Missing,
    command_of,
    compose,
    config_of,
    seconds,
)
from tests.ports import free_port
from tests.real.llama import Unavailable, find_server

# -- compose files -------------------------------------------------------------------------------------------


def test_every_recipe_has_a_compose_file_and_a_config_and_there_are_no_others() -> None:
    assert sorted(RECIPES) == sorted(path.stem for path in DEPLOY.glob("*.toml"))
    assert sorted(RECIPES) == sorted(path.stem for path in DEPLOY.glob("*.yaml") if path.stem != "common")


@pytest.mark.parametrize("recipe", ENGINES)
def test_the_engine_is_started_as_the_study_did(recipe: str) -> None:
    facts, engine = ENGINES[recipe], compose(recipe)["services"]["vllm"]
    assert engine["image"] == facts.image
    assert "entrypoint" not in engine
    assert command_of(shlex.split(engine["command"]), facts.serve) == (facts.model, facts.flags)
    # One variable is ours: with the host's network an engine without a key is open to everyone.
    assert engine["environment"] == {**facts.environment, "VLLM_API_KEY": "engine-key"}
    assert all(isinstance(value, str) for value in engine["environment"].values())
    assert {key: engine[key] for key in OPTIONS} == OPTIONS
    assert engine["volumes"] == [f"/home/someone/{path}:/root/{path}" for path in CACHES]
    known = {"image", "command", "environment", "volumes", "restart", *OPTIONS}
    assert set(engine) == known


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_engine_starts_without_a_key(recipe: str) -> None:
    for empty in ({}, {"VLLM_API_KEY": ""}):
        shell = {key: value for key, value in SHELL.items() if key != "VLLM_API_KEY"} | empty
        with pytest.raises(Missing, match=r"^VLLM_API_KEY$"):
            compose(recipe, shell)


@pytest.mark.parametrize("recipe", RECIPES)
def test_tierline_runs_beside_the_engine_on_its_config(recipe: str) -> None:
    whole = compose(recipe)
    service, config = whole["services"]["tierline"], config_of(recipe)
    assert whole["name"] == "tierline"  # one project: a recipe takes the place of another
    state, mounted = "/var/lib/tierline", f"./{recipe}.toml:{dockerfile_command()[-1]}:ro"
    assert service["volumes"] == [f"tierline:{state}", mounted]
    assert "tierline" in whole["volumes"]
    assert config.server.store == f"{state}/keys.db"
    assert config.telemetry.store == f"{state}/records.db"
    assert service["network_mode"] == "host"
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(
        DEPLOY / "Dockerfile"
    )
    # Every key that the config reads is handed over by name, and nothing else, so no value is in a file of ours.
    text = (DEPLOY / f"{recipe}.toml").read_text("utf-8")
    assert service["environment"] == dict.fromkeys(re.findall(r'"env:(\w+)"', text))
    # A drain is never cut short, with room for the end of what is left.
    assert config.server.drain_timeout + 10 <= seconds(service["stop_grace_period"])
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert config.telemetry.records_path is None  # nothing to write to: records go to the log


@pytest.mark.parametrize("recipe", RECIPES)
def test_prometheus_scrapes_the_gateway_and_every_engine(recipe: str) -> None:
    whole = compose(recipe)
    service, config = whole["services"]["prometheus"], config_of(recipe)
    mounts = dict(volume.split(":")[:2][::-1] for volume in service["volumes"])
    assert mounts["/prometheus"] in whole["volumes"]
    file = mounts["/etc/prometheus/prometheus.yml"]
    assert "--config.file=/etc/prometheus/prometheus.yml" in service["command"]
    scrapes = {
        job["job_name"]: job for job in yaml.safe_load((DEPLOY / file).read_text("utf-8"))["scrape_configs"]
    }
    targets = {
        name: [target for group in job["static_configs"] for target in group["targets"]]
        for name, job in scrapes.items()
    }
    engines = [backend.url.removeprefix("http://") for backend in config.backends]
    assert targets == {
        "tierline": [f"127.0.0.1:{config.server.port}"],
        **({"vllm": engines} if recipe != GGUF else {}),  # llama-server's own figures want its key
    }
    assert config.admin.metrics_on in ("data", "both")
    assert "/metrics" in config.server.public_paths
    assert all("metrics_path" not in job for job in scrapes.values())  # its default is the path of both
    for target in engines:  # every name is known to both that must find it
        host = target.split(":")[0]
        for name in ("tierline", "prometheus"):
            hosts = dict(line.split(":", 1) for line in whole["services"][name].get("extra_hosts", []))
            assert host == "127.0.0.1" or host in hosts


@pytest.mark.parametrize("recipe", RECIPES)
def test_grafana_finds_prometheus_and_the_dashboard_and_wants_a_password(recipe: str) -> None:
    whole = compose(recipe)
    service = whole["services"]["grafana"]
    mounts = dict(volume.split(":")[:2][::-1] for volume in service["volumes"])
    assert mounts["/var/lib/grafana"] in whole["volumes"]
    folder = DEPLOY / mounts["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text("utf-8"))["datasources"]
    assert (
        f"--web.listen-address={source['url'].removeprefix('http://')}"
        in whole["services"]["prometheus"]["command"]
    )
    assert source["isDefault"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "tierline.yml").read_text("utf-8"))["providers"]
    (board,) = [at for at in mounts if at.startswith(f"{provider['options']['path']}/")]
    json.loads((DEPLOY / mounts[board]).read_text("utf-8"))
    assert service["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert service["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == SHELL["GRAFANA_PASSWORD"]
    with pytest.raises(Missing, match=r"^GRAFANA_PASSWORD$"):
        compose(recipe, {key: value for key, value in SHELL.items() if key != "GRAFANA_PASSWORD"})


def test_the_gguf_engine_is_on_loopback_with_the_windows_of_its_slots() -> None:
    engine, (backend,) = compose(GGUF)["services"]["llama"], config_of(GGUF).backends
    words = shlex.split(engine["command"])
    value = dict(pairwise(words))
    assert value["--host"] == "127.0.0.1"
    assert f"{value['--host']}:{value['--port']}" == backend.url.removeprefix("http://")
    assert engine["environment"] == {"LLAMA_API_KEY": "engine-key"}
    slots, context = int(value["--parallel"]), int(value["--ctx-size"])
    limits = backend.limits
    assert (limits.max_in_flight, limits.kv_tokens) == (slots, context)
    assert limits.window_tokens == context // slots
    assert (backend.model, backend.profile) == (value["--alias"], GGUF)
    assert "--metrics" in words


def test_a_real_llama_server_knows_every_option_of_the_recipe() -> None:
    try:
        binary = find_server()
    except Unavailable as why:
        pytest.skip(str(why))
    done = subprocess.run([binary, "--help"], capture_output=True, text=True, timeout=60, check=True)
    known = set(re.findall(r"--[a-z][a-z-]+", done.stdout))
    used = {
        word for word in shlex.split(compose(GGUF)["services"]["llama"]["command"]) if word.startswith("--")
    }
    assert used <= known


def test_the_fleet_asks_for_the_other_machines_address() -> None:
    with pytest.raises(Missing, match=r"^BF16_ADDRESS$"):
        compose("fleet", {key: value for key, value in SHELL.items() if key != "BF16_ADDRESS"})


def test_the_fleets_other_machine_needs_no_key_but_its_own() -> None:
    compose("bf16-dflash8", {"HOME": "/home/someone", "VLLM_API_KEY": "x", "GRAFANA_PASSWORD": "x"})


def test_the_example_of_keys_names_every_variable_and_no_value_of_a_key() -> None:
    text = (DEPLOY / "env.example").read_text("utf-8")
    given = dict(re.findall(r"^#?([A-Z_0-9]+)=(.*)$", text, re.MULTILINE))
    files = "".join(path.read_text("utf-8") for path in DEPLOY.glob("*.yaml"))
    used = set(re.findall(r"\$\{(\w+)", files)) | set(KEYS)
    assert set(given) == used - {"HOME"}
    assert not any(given[key] for key in KEYS)
    assert ".env" in (DEPLOY / ".gitignore").read_text("utf-8").splitlines()


# -- configs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_tierline_check_accepts_the_config_and_shows_no_key(recipe: str) -> None:
    done = CliRunner().invoke(main, ["check", "-c", str(DEPLOY / f"{recipe}.toml")], env=KEYS)
    assert done.exit_code == 0, done.output
    assert not any(key in done.output for key in KEYS.values())
    assert "note:" not in done.output


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_key_that_is_not_set_stops_it_by_name(recipe: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(DEPLOY / f"{recipe}.toml", {})
    text = (DEPLOY / f"{recipe}.toml").read_text("utf-8")
    assert {name for name in KEYS if f"{name} is not set" in str(error.value)} == set(
        re.findall(r'"env:(\w+)"', text)
    )


def backends() -> Iterator[tuple[str, str, Facts]]:
    for recipe, facts in FACTS.items():
        yield recipe, config_of(recipe).backends[0].name, facts
    for name, facts in FLEET.items():
        yield "fleet", name, facts


@pytest.mark.parametrize(("recipe", "name", "facts"), list(backends()))
def test_a_backend_is_what_its_engine_is_started_as(recipe: str, name: str, facts: Facts) -> None:
    backend = config_of(recipe).backend(name)
    measured = profiles.get(facts.profile)
    assert backend.profile == facts.profile
    assert (backend.quality.reference, backend.quality.kl_bits) == facts.quality
    assert backend.worth == (measured.quality.reference, measured.quality.kl_bits)
    assert backend.key is not None
    assert backend.url.endswith(f":{facts.flags['--port']}")
    assert backend.model == facts.flags["--served-model-name"]
    limits = backend.limits
    assert limits.window_tokens == measured.window_tokens == int(facts.flags["--max-model-len"])
    assert limits.max_in_flight == measured.max_num_seqs == int(facts.flags["--max-num-seqs"])
    # A borrowed figure would stand in the way of the one that the engine reports.
    borrowed = any(loan.part is Part.KV for loan in measured.measured.borrowed)
    assert limits.kv_tokens == (None if borrowed else measured.kv_tokens)


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS)
def test_a_profile_is_of_the_configuration_that_is_started(facts: Facts) -> None:
    measured = profiles.get(facts.profile).measured
    assert measured.tensor_parallel == int(facts.flags["--tensor-parallel-size"])
    assert measured.image in (facts.image, "repne/vllm (May 5)")
    assert measured.weights.split()[0] == ("FP8" if facts.model.endswith("FP8") else "BF16")
    joined = json.loads(facts.flags.get("--speculative-config", "{}"))
    tokens = facts.flags.get(
        "--speculative-config.num_speculative_tokens", joined.get("num_speculative_tokens", 0)
    )
    assert measured.speculation.draft_tokens == int(tokens)
    method = facts.flags.get("--speculative-config.method", joined.get("method"))
    kinds = {
        None: SpecKind.NONE,
        "mtp": SpecKind.MTP,
        "draft_model": SpecKind.DFLASH,
        "dflash": SpecKind.DFLASH,
    }
    assert measured.speculation.kind is kinds[method]


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_the_clients_listener_is_open_and_both_want_keys(recipe: str) -> None:
    config = config_of(recipe)
    assert config.server.keys
    assert not config.server.allow_unauthenticated
    assert config.admin.host == "127.0.0.1"
    assert config.admin.key is not None
    assert config.resolve("Qwen3.6-27B") is not None


def test_the_fleet_serves_exact_from_the_reference_alone() -> None:
    config = config_of("fleet")
    route = config.resolve("qwen-exact")
    assert route is not None
    assert (route.tier, serving(config, route.backends, "exact")) == ("exact", ("bf16",))
    assert serving(config, route.backends, "balanced") == ("fp8", "bf16")


# -- the image -----------------------------------------------------------------------------------------------


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, rest) in order; continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text("utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines if line.strip()]


def final_stage() -> dict[str, str]:
    steps = dockerfile()
    start = max(i for i, (instruction, _) in enumerate(steps) if instruction == "FROM")
    return dict(steps[start:])


def dockerfile_command() -> list[str]:
    """ENTRYPOINT and CMD together; json.loads fails unless both are in exec form."""
    stage = final_stage()
    return [*json.loads(stage["ENTRYPOINT"]), *json.loads(stage["CMD"])]


def healthcheck() -> list[str]:
    found = re.fullmatch(r"(?:--\S+ +)+CMD (\[.*\])", final_stage()["HEALTHCHECK"])
    assert found
    return list(json.loads(found[1]))


def test_the_image_is_small_not_root_and_gets_its_signals() -> None:
    stage = final_stage()
    assert re.fullmatch(r"python:3\.\d+-slim", stage["FROM"])
    assert "RUN" not in stage  # nothing is installed, so nothing is left of installing
    start = max(i for i, (instruction, _) in enumerate(dockerfile()) if instruction == "FROM")
    assert [rest for instruction, rest in dockerfile()[start:] if instruction == "COPY"] == [
        "--from=build /opt/tierline /opt/tierline",
        f"--from=build --chown={stage['USER']} /var/lib/tierline /var/lib/tierline",
    ]
    user = stage["USER"].split(":")
    assert all(part.isdigit() and int(part) > 0 for part in user)
    assert stage["STOPSIGNAL"] == "SIGTERM"
    assert all(int(stage["EXPOSE"]) == config_of(recipe).server.port for recipe in RECIPES)
    versions = {rest.split()[0] for instruction, rest in dockerfile() if instruction == "FROM"}
    assert len(versions) == 1  # the environment is made by the Python that runs it
    assert any("--without-pip" in rest for instruction, rest in dockerfile() if instruction == "RUN")


def test_the_build_is_sent_what_it_copies_and_no_keys() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    sent = {rule.removeprefix("!").removesuffix("/**") for rule in rules if rule.startswith("!")}
    copied = {
        word
        for instruction, rest in dockerfile()
        if instruction == "COPY" and not rest.startswith("--from")
        for word in rest.split()[:-1]
    }
    assert sent == copied
    assert all((ROOT / name).exists() for name in copied)


def test_the_images_command_serves_its_healthcheck_tells_and_sigterm_ends_it(tmp_path: Path) -> None:
    port, admin_port = free_port(), free_port()
    text = (DEPLOY / "fp8-mtp3.toml").read_text("utf-8")
    text = text.replace('host = "0.0.0.0"', f'host = "127.0.0.1"\nport = {port}')
    config = tmp_path / "config.toml"
    text = text.replace("/var/lib/tierline", str(tmp_path))
    config.write_text(text.replace("[admin]", f"[admin]\nport = {admin_port}\n#"))
    entry, *arguments, place = dockerfile_command()
    assert entry == "/opt/tierline/bin/tierline"
    probe = [sys.executable, *(word.replace("8080", str(port)) for word in healthcheck()[1:])]
    assert probe[-1] != healthcheck()[-1]

    def healthy() -> int:
        return subprocess.run(probe, capture_output=True, timeout=30).returncode

    assert healthy() == 1
    gateway = subprocess.Popen(
        [sys.executable, "-m", "proxy", *arguments, str(config)],
        cwd=ROOT,
        env={**os.environ, **KEYS},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert gateway.stderr is not None
        assert any("admin on" in line for line in gateway.stderr), "it did not start"
        assert healthy() == 0
        gateway.send_signal(signal.SIGTERM)
        gateway.communicate(timeout=30)
        assert gateway.returncode == 0
        assert healthy() == 1
    finally:
        gateway.kill()
        gateway.communicate()
    assert place == "/etc/tierline/config.toml"


# -- systemd -------------------------------------------------------------------------------------------------


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters="=", strict=False)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(DEPLOY / "tierline.service")
    return parser


def test_the_unit_drains_is_not_root_and_takes_its_keys_from_a_file() -> None:
    service = unit()["Service"]
    assert all(
        config_of(recipe).server.drain_timeout + 10 <= seconds(service["TimeoutStopSec"])
        for recipe in RECIPES
    )
    assert service["KillSignal"] == "SIGTERM"
    assert service["DynamicUser"] == "yes"
    assert service["User"] not in ("root", "0")
    assert service["EnvironmentFile"] == "/etc/tierline/env"
    assert not any("KEY" in value for value in service.values())
    assert shlex.split(service["ExecStart"]) == dockerfile_command()
    assert service["RestartPreventExitStatus"] == "2"  # Exit.CONFIG
    for hardening in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictNamespaces"):
        assert service[hardening] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""


SYSTEMD = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")


@SYSTEMD
def test_systemd_thinks_the_unit_is_well_hardened() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=15", "--no-pager"]
    done = subprocess.run(
        [*command, DEPLOY / "tierline.service"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout[-300:]


@SYSTEMD
def test_systemd_reads_the_unit_without_complaint(tmp_path: Path) -> None:
    text = (DEPLOY / "tierline.service").read_text("utf-8")
    copy = tmp_path / "tierline.service"
    copy.write_text(text.replace("/opt/tierline/bin/tierline", sys.executable))  # it must exist
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if "tierline" in line]) == (0, [])


# -- the page -------------------------------------------------------------------------------------------------


def test_the_readme_names_every_file_and_only_files_that_are_there() -> None:
    text = (DEPLOY / "README.md").read_text("utf-8")
    there = {path.name for path in DEPLOY.iterdir() if path.name not in ("README.md", ".gitignore", ".env")}
    for name in there - {"Dockerfile.dockerignore"}:
        stem = name.rsplit(".", 1)[0] if name.endswith((".yaml", ".toml")) and "common" not in name else name
        assert f"`{stem}`" in text or f"deploy/{name}" in text, name
    for name in re.findall(r"deploy/([\w.-]+)", text):
        assert name == ".env" or name in there
    assert len(text.splitlines()) <= 90  # one page
