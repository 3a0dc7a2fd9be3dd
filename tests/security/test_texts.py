"""What others say, in our logs, metrics, records and answers: it stays text."""

from __future__ import annotations

import io
import json
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.logs import ConsoleFormatter, JsonFormatter, harmless
from proxy.record import line
from tests.proxy.conftest import CHAT, MakeGateway, chat
from tests.scripted import ScriptedBackend, chat_json

ODD = "a\nERROR forged\r\x1b[31m\x00\x7f\x9b2J\u202e\u2028\ud800b"


@pytest.mark.parametrize("formatter", [ConsoleFormatter(), JsonFormatter()], ids=["console", "json"])
def test_a_log_line_is_one_line_and_moves_no_cursor(formatter: logging.Formatter) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    log = logging.Logger("t")
    log.addHandler(handler)
    log.error("said: %s", ODD)
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert not set("\r\x1b\x00\x7f\x9b\u202e\u2028\ud800") & set(text)
    assert "forged" in text


def test_ordinary_text_is_left_alone() -> None:
    assert harmless("ünïcode\t日本 ✓") == "ünïcode\t日本 ✓"


async def test_no_name_that_a_client_makes_up_becomes_a_label(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    made_up = ['x"} 1\nevil_metric{a="b', "x" * 5000, *(f"model-{number}" for number in range(200))]
    headers = {"x-session-id": "evil", "x-quality-tier": "evil", "user-agent": "evil"}
    page, few = b"", 0
    for number, name in enumerate(made_up):
        await gateway.ask(CHAT, chat(model=name, user=name))
        await gateway.ask(f"/v1/{name.encode().hex()[:200]}", {})
        await gateway.ask(CHAT, chat(), headers=headers | {"x-session-id": name[:20].strip()})
        if number in (1, len(made_up) - 1):
            page = (await gateway.ask("/metrics")).body
            few = few or len(page.splitlines())
    assert b"evil" not in page
    assert b"model-1" not in page
    assert len(page.splitlines()) == few  # the two hundredth adds nothing
    list(text_string_to_metric_families(page.decode()))


async def test_a_record_is_one_line_whatever_the_client_calls_itself(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    await gateway.ask(
        CHAT, chat(user=ODD[:-2], prompt_cache_key="who\nam i"), headers={"x-session-id": "s\x1b[0m"}
    )
    await gateway.ask("/v1/%0d%0aevil\x7f", {})
    for index in range(len(gateway.records.closed)):
        text = line(*gateway.records.closed[index])
        assert text.count(b"\n") == 1
        assert b"\x1b" not in text
        assert b"who" not in text
        json.loads(text)


@pytest.mark.parametrize("name", ["tiny\r\nx-evil: 1", "tiny\x00", 'tiny"}\n'])
async def test_a_backends_name_for_its_model_is_data_wherever_it_goes(
    make_gateway: MakeGateway, name: str
) -> None:
    async with ScriptedBackend(model=name) as backend:
        gateway = await make_gateway(backend)
        await backend.until(lambda: len(backend.polls) >= 3, "discovery")
        backend.default = chat_json()
        response = await gateway.ask(CHAT, chat())
        assert "x-evil" not in response.headers
        assert (await backend.received()).json["model"] in (name, "tiny")
        assert b"x-evil" not in (await gateway.ask("/metrics")).body.replace(rb"\n", b"")


async def test_an_error_that_quotes_the_request_is_json_and_nothing_else(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    evil = '<script>alert(1)</script>"}\r\nx-evil: 1'
    for response in (
        await gateway.ask(CHAT, chat(model=evil)),
        await gateway.ask(CHAT, chat(), headers={"x-quality-tier": "<script>"}),
    ):
        assert response.headers["content-type"] == "application/json"
        assert "x-evil" not in response.headers
        assert "error" in response.json
