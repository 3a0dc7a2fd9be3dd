"""One line a request in the log: what it says, what it never says, and that it is whole."""

from __future__ import annotations

import json
import logging

import pytest

from proxy.config import loads
from proxy.errors import Outcome
from proxy.record import Record, measures
from proxy.requestlog import RequestLog, console_line, fields, json_line, request_log
from tests.fake_clock import FakeClock
from tests.proxy.conftest import MakeGateway
from tests.scripted import ScriptedBackend

SECRET = "sk-secret"


def closed(**changes: object) -> Record:
    record = Record("r1", "chat", "/v1/chat/completions?key=" + SECRET, 1000.0, 1.7e9)
    record.model, record.tier, record.backend, record.reason = "qwen", "balanced", "fp8", "soonest"
    record.stream, record.attempts, record.outcome, record.status = True, 1, Outcome.OK, 200
    record.admitted_at, record.first_delta_at, record.last_delta_at = 1000.001, 1000.5, 1001.0
    record.finished_at, record.prompt_tokens, record.completion_tokens = 1002.0, 812, 214
    record.tenant, record.key, record.session_hash, record.client = "team", "tl-abc", "5e55", "192.0.2.1"
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def told(record: Record) -> dict[str, object]:
    return dict(json.loads(json_line(record, measures(record))))


def test_a_line_says_where_it_went_why_and_how_long_it_took() -> None:
    record = closed()
    assert told(record) == {
        "time": "2023-11-14T22:13:22.000+00:00",
        "level": "info",
        "logger": "tierline.requests",
        "message": "request",
        "request_id": "r1",
        "outcome": "ok",
        "status": 200,
        "api": "chat",
        "model": "qwen",
        "tier": "balanced",
        "backend": "fp8",
        "reason": "soonest",
        "queue_wait_seconds": 0.001,
        "ttft_seconds": 0.5,
        "e2e_seconds": 2.0,
        "prompt_tokens": 812,
        "completion_tokens": 214,
    }
    text = console_line(record, measures(record))
    assert text.endswith(
        " INFO    tierline.requests: request_id=r1 outcome=ok status=200 api=chat model=qwen tier=balanced backend=fp8 "
        "reason=soonest queue_wait=0.001 ttft=0.5 e2e=2.0 prompt_tokens=812 completion_tokens=214\n"
    )


def test_a_refusal_says_why_and_leaves_out_what_it_has_not() -> None:
    record = closed(
        backend=None, reason=None, status=404, error="model_not_found", outcome=Outcome.BAD_REQUEST
    )
    line = told(record)
    assert (line["error"], line["outcome"]) == ("model_not_found", "bad_request")
    assert not {"backend", "reason", "attempts"} & set(line)
    assert told(closed(attempts=2))["attempts"] == 2


@pytest.mark.parametrize("write", [json_line, console_line])
@pytest.mark.parametrize(
    "model", ["a\nb", "a b=c", "\x1b[31mred", "\ud800", "x" * 5000, "模型", "a\u2028b", "a\rb", "\x7f"]
)
def test_a_name_that_a_client_made_up_breaks_neither_line_nor_terminal(write: object, model: str) -> None:
    assert callable(write)
    record = closed(model=model)
    line = write(record, measures(record))
    assert line.endswith("\n")
    assert len(line.splitlines()) == 1
    assert line.isascii()
    assert line[:-1].isprintable()
    assert len(line) < 1500
    if write is console_line:
        assert len(line.split(" model=")[1].split(" ")) == len(
            console_line(closed(), measures(closed())).split(" model=")[1].split(" ")
        )


@pytest.mark.parametrize("write", [json_line, console_line])
def test_nothing_secret_or_personal_is_in_a_line(write: object) -> None:
    assert callable(write)
    line = write(closed(), measures(closed()))
    for word in (SECRET, "team", "tl-abc", "5e55", "192.0.2.1"):
        assert word not in line


async def test_lines_are_written_behind_the_answer_and_all_at_the_end() -> None:
    clock, written = FakeClock(), list[str]()
    log = RequestLog(clock, "json", written.append)
    for ident in ("a", "b"):
        log.add(closed(request_id=ident), measures(closed()))
    assert written == []
    clock.advance(0.5)
    log.add(closed(request_id="c"), measures(closed()))
    await log.close()
    idents = [json.loads(line)["request_id"] for text in written for line in text.splitlines()]
    assert idents == ["a", "b", "c"]


TEXT = '[[backends]]\nname = "a"\nurl = "http://127.0.0.1:1"\n[models.m]\n[telemetry]\n'


def test_it_is_off_unless_asked_for_and_where_info_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert request_log(loads(TEXT), FakeClock()) is None
    assert request_log(loads(TEXT + "log_requests = true\n"), FakeClock()) is not None
    caplog.set_level(logging.WARNING)
    assert request_log(loads(TEXT + "log_requests = true\n"), FakeClock()) is None


async def test_a_live_request_is_a_line_on_stderr(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    config = '[telemetry]\nrecords = "off"\nlog_requests = true\nlog_format = "json"\n'
    gateway = await make_gateway(backend, config=config)
    await gateway.chat(headers={"x-request-id": "live"})
    record, derived = await gateway.records.get()
    await gateway.app.close()
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("{")]
    said = json.loads(line)
    assert said["request_id"] == "live"
    assert {key: said[key] for key in fields(record, derived)} == fields(record, derived)
