"""The admin API and its OpenAPI document, set against each other by schemathesis: what the document allows is taken, what it
does not is refused, every answer is one that it names, and no input makes a fault of ours."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from random import Random

import pytest

from proxy.app import App
from proxy.config import load
from proxy.keystore import digest
from tests.client import ask
from tests.proxy.conftest import Gateway, config_text
from tests.scripted import ScriptedBackend

pytest.importorskip("schemathesis")

MORE = f"""
[server]
port = 0
store = "keys.db"
state = "state.json"
[admin]
port = 0
[[admin.keys]]
name = "tester"
sha256 = "{digest("sk-test")}"
"""
KEY = {"authorization": "Bearer sk-test"}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("--phases fuzzing,stateful --max-examples 4", id="some"),
        pytest.param(
            "--phases coverage,fuzzing,stateful --max-examples 40", id="all", marks=pytest.mark.slow
        ),
    ],
)
async def test_schemathesis_finds_nothing(
    tmp_path: Path, backend: ScriptedBackend, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(config_text([backend.url], MORE, {}), "utf-8")
    gateway = Gateway(App(load(path, {}), None, Random(7)))
    await gateway.app.start()
    try:
        url = f"http://127.0.0.1:{gateway.app.admin_port}/openapi.json"
        command = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            url,
            "--seed",
            "1",
            "--no-color",
            *how.split(),
        ]
        command += ["-H", "Authorization: Bearer sk-test", "--suppress-health-check", "all"]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()[-6000:]
        faults = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR and r.exc_info]
        assert [fault for fault in faults if fault.startswith("admin request")] == []
        assert (await gateway.chat(headers={"authorization": "Bearer no"})).status == 401, "it still serves"
        assert (await ask(gateway.app.admin_port, "/admin/backends", headers=KEY)).status == 200
    finally:
        await gateway.app.close()


async def test_the_document_says_what_the_sections_of_the_file_say(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(config_text([backend.url], MORE, {}), "utf-8")
    gateway = Gateway(App(load(path, {}), None, Random(7)))
    await gateway.app.start()
    try:
        document = (await ask(gateway.app.admin_port, "/openapi.json", headers=KEY)).json
        assert document["openapi"] == "3.1.0"
        parts = document["components"]["schemas"]
        assert parts["Limits"]["properties"]["max_in_flight"]["anyOf"][0]["minimum"] == 1
        assert parts["BackendBody"]["required"] == ["name", "url"]
        add = document["paths"]["/admin/backends"]["post"]
        assert add["requestBody"]["content"]["application/json"]["schema"] == {
            "$ref": "#/components/schemas/BackendBody"
        }
        assert (await ask(gateway.app.admin_port, "/openapi.json")).status == 401
    finally:
        await gateway.app.close()
