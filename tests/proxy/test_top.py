"""`tierline top`: figures between two looks, what is shown, and against a gateway that runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import trustme
from click.testing import CliRunner, Result
from rich.console import Console

from proxy.cli import main
from proxy.top.figures import Look, now, samples_of
from proxy.top.view import as_json, view
from tests.proxy.conftest import Gateway, MakeGateway
from tests.scripted import ScriptedBackend, chat_stream, closed_port

BACKEND = {"name": "fp8", "state": "healthy", "in_flight": 3, "max_in_flight": 128, "running": 3, "waiting": None,
           "kv_usage": 0.25, "queue_seconds": 0.04, "speculation_acceptance": -1.0, "tool_integrity": 1.0,
           "live_conversations": 2}  # fmt: skip


def page(ok: int, cut: int, tokens: int, fast: int, slow: int) -> str:
    return f"""# HELP tierline_requests_total x
# TYPE tierline_requests_total counter
tierline_requests_total{{backend="fp8",model="m",outcome="ok",tier="balanced"}} {ok}.0
tierline_requests_total{{backend="fp8",model="m",outcome="upstream_cut",tier="balanced"}} {cut}.0
# HELP tierline_tokens_total x
# TYPE tierline_tokens_total counter
tierline_tokens_total{{backend="fp8",kind="completion",model="m",tier="balanced"}} {tokens}.0
# HELP tierline_queued_requests x
# TYPE tierline_queued_requests gauge
tierline_queued_requests{{priority="0",tier="balanced"}} 2.0
tierline_queued_requests{{priority="1",tier="balanced"}} 1.0
tierline_queued_requests{{priority="0",tier="exact"}} 0.0
# HELP tierline_time_to_first_token_seconds x
# TYPE tierline_time_to_first_token_seconds histogram
tierline_time_to_first_token_seconds_bucket{{le="0.5",tier="a"}} {fast}.0
tierline_time_to_first_token_seconds_bucket{{le="1.0",tier="a"}} {fast + slow}.0
tierline_time_to_first_token_seconds_bucket{{le="+Inf",tier="a"}} {fast + slow}.0
"""


def looked(at: float, *figures: int) -> Look:
    return Look(at, samples_of(page(*figures)), [BACKEND])


def test_figures_are_of_the_time_between_two_looks() -> None:
    got = now(looked(10.0, 100, 5, 1000, 10, 0), looked(12.0, 140, 6, 1500, 20, 10))
    assert (got.requests, got.failed, got.completion_tokens) == (20.5, 0.5, 250.0)
    assert got.by_backend == {"fp8": 250.0}
    assert got.ttft_p50 == pytest.approx(0.5)
    assert got.ttft_p95 == pytest.approx(0.95)
    assert got.queued == {"balanced": 3}


def test_one_look_has_no_rates() -> None:
    got = now(None, looked(10.0, 100, 5, 1000, 10, 0))
    assert (got.requests, got.ttft_p50, got.cpu, got.by_backend) == (None, None, None, {})
    assert got.queued == {"balanced": 3}


def test_nothing_in_between_is_no_percentile_and_a_restart_counts_from_there() -> None:
    still = now(looked(10.0, 100, 5, 1000, 10, 0), looked(12.0, 100, 5, 1000, 10, 0))
    assert (still.requests, still.ttft_p50) == (0.0, None)
    restarted = now(looked(10.0, 100, 5, 1000, 10, 0), looked(12.0, 4, 0, 10, 1, 0))
    assert restarted.requests == 2.0


def shown(look: Look, before: Look | None = None) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(view(look, now(before, look), "127.0.0.1:8081"))
    return captured.get()


def test_a_page_shows_each_backend_and_a_dash_for_what_is_not_known() -> None:
    text = shown(looked(12.0, 140, 6, 1500, 20, 10), looked(10.0, 100, 5, 1000, 10, 0))
    assert "waiting: balanced 3" in text
    assert "first token p50 0.50 s p95 0.95 s" in text
    row = next(line for line in text.splitlines() if line.startswith("fp8"))
    assert row.split() == [
        "fp8",
        "healthy",
        "3/128",
        "3",
        "–",
        "25%",
        "250/s",
        "40.0",
        "ms",
        "–",
        "100%",
        "2",
    ]


def test_names_of_backends_are_no_markup() -> None:
    look = Look(1.0, {}, [{**BACKEND, "name": "[red]x[/red]"}])
    assert "[red]x[/red]" in shown(look)


def test_json_has_the_same_and_the_backends_as_they_came() -> None:
    look = looked(12.0, 140, 6, 1500, 20, 10)
    said = json.loads(json.dumps(as_json(look, now(looked(10.0, 100, 5, 1000, 10, 0), look))))
    assert said["requests"] == 20.5
    assert said["backends"] == [BACKEND]


# -- against a gateway ---------------------------------------------------------------------------------------


def config_file(gateway: Gateway, folder: Path, metrics_on: str) -> Path:
    path = folder / "top.toml"
    path.write_text(
        f"""[server]
port = {gateway.port}
[admin]
port = {gateway.app.admin_port}
key = "env:ADMIN_KEY"
metrics_on = "{metrics_on}"
[[backends]]
name = "a"
url = "http://127.0.0.1:1"
[models.tiny]
"""
    )
    return path


async def ran(*arguments: str, key: str = "admin-key") -> Result:
    return await asyncio.to_thread(
        CliRunner().invoke, main, ["top", "--every", "0.05", *arguments], env={"ADMIN_KEY": key}
    )


@pytest.mark.parametrize("metrics_on", ["data", "admin", "both"])
async def test_it_asks_the_running_gateway(
    make_gateway: MakeGateway, backend: ScriptedBackend, tmp_path: Path, metrics_on: str
) -> None:
    backend.default = chat_stream("one two")
    admin = f'[admin]\nport = 0\nkey = "env:ADMIN_KEY"\nmetrics_on = "{metrics_on}"\n'
    gateway = await make_gateway(backend, config=admin, env={"ADMIN_KEY": "admin-key"})
    await gateway.chat(stream=True)
    path = str(config_file(gateway, tmp_path, metrics_on))
    done = await ran("-c", path, "--once")
    assert done.exit_code == 0, done.output
    assert f"tierline 127.0.0.1:{gateway.app.admin_port}" in done.output
    assert "waiting: nobody" in done.output
    assert next(line for line in done.output.splitlines() if line.startswith("a ")).split()[1] == "healthy"
    done = await ran("-c", path, "--json")
    assert json.loads(done.output)["backends"][0]["name"] == "a"
    assert json.loads(done.output)["requests"] == 0.0


async def test_an_admin_listener_with_tls_is_known_by_its_certificate(
    make_gateway: MakeGateway, backend: ScriptedBackend, tmp_path: Path
) -> None:
    for name in ("own", "other"):
        certificate = trustme.CA().issue_cert("gateway.example")
        (tmp_path / f"{name}.pem").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}.key")
    admin = '[admin]\nport = 0\nkey = "env:ADMIN_KEY"\ntls.cert = "own.pem"\ntls.key = "own.key"\n'
    gateway = await make_gateway(backend, config=admin, env={"ADMIN_KEY": "admin-key"})
    path = config_file(gateway, tmp_path, "data")
    tls = '[admin]\ntls.cert = "{0}.pem"\ntls.key = "{0}.key"'
    plain = path.read_text()
    path.write_text(plain.replace("[admin]", tls.format("own")))
    done = await ran("-c", str(path), "--once")
    assert done.exit_code == 0, done.output
    path.write_text(plain.replace("[admin]", tls.format("other")))
    done = await ran("-c", str(path), "--once")
    assert (done.exit_code, "does not answer" in done.output) == (1, True)


async def test_a_wrong_key_and_a_gateway_that_is_not_there_are_said_with_code_1(
    make_gateway: MakeGateway, backend: ScriptedBackend, tmp_path: Path
) -> None:
    admin = '[admin]\nport = 0\nkey = "env:ADMIN_KEY"\n'
    gateway = await make_gateway(backend, config=admin, env={"ADMIN_KEY": "admin-key"})
    path = config_file(gateway, tmp_path, "data")
    done = await ran("-c", str(path), "--once", key="other-key")
    assert (done.exit_code, "answers 401" in done.output) == (1, True)
    assert "other-key" not in done.output
    path.write_text(path.read_text().replace(str(gateway.app.admin_port), str(closed_port())))
    done = await ran("-c", str(path), "--once")
    assert (done.exit_code, "does not answer" in done.output) == (1, True)


async def test_what_it_cannot_do_is_said_with_code_2(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(
        '[admin]\nenabled = false\n[[backends]]\nname = "a"\nurl = "http://127.0.0.1:1"\n[models.m]\n'
    )
    assert (await ran("-c", str(path))).exit_code == 2
    path.write_text("nonsense")
    assert (await ran("-c", str(path))).exit_code == 2
