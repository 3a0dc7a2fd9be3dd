"""Spans: from live requests to the SDK's own exporter, to a collector on the wire, and what a slow one costs."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from random import Random
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from proxy.config import ConfigError, loads
from proxy.errors import Outcome
from proxy.record import Record, measures
from proxy.spans import OPERATIONS, Spans, exporter_to, spans_of
from proxy.tracecontext import begin
from tests.client import ask
from tests.fake_clock import FakeClock
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.scripted import ScriptedBackend, chat_stream, closed_port, error_json, json_answer

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1", "baggage": "user=secret"}


class Collected:
    """A gateway whose spans stay here."""

    def __init__(self, gateway: Gateway, ratio: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        app = gateway.app
        app.spans = Spans(app.clock, self.exporter, ratio=ratio, flush_seconds=0.01)
        app.spans.configure(app.config)
        app.gateway.spans, app.gateway.told = app.spans, (app.spans.add,)

    async def spans(self, app: Any) -> list[ReadableSpan]:
        """All of them, once nothing waits any more."""
        await app.spans.close()
        return list(self.exporter.get_finished_spans())


def attributes(span: ReadableSpan) -> dict[str, object]:
    assert span.attributes is not None
    return dict(span.attributes)


async def test_a_request_is_a_span_in_the_clients_trace_and_its_attempt_one_below(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    collected = Collected(gateway)
    await gateway.chat(stream=True, headers={**PARENT, "x-request-id": "mine"})
    record = await gateway.record()
    whole, attempt = await collected.spans(gateway.app)
    assert (whole.name, attempt.name) == ("chat tiny", "chat tiny")
    assert (whole.kind, attempt.kind) == (SpanKind.SERVER, SpanKind.CLIENT)
    assert whole.context is not None
    assert attempt.context is not None
    assert f"{whole.context.trace_id:032x}" == f"{attempt.context.trace_id:032x}" == TRACE
    assert whole.context.trace_state.get("vendor") == "1"
    assert whole.parent is not None
    assert attempt.parent is not None
    assert (f"{whole.parent.span_id:016x}", whole.parent.is_remote) == (SPAN, True)
    assert (attempt.parent.span_id, attempt.parent.is_remote) == (whole.context.span_id, False)
    asked = await backend.received()
    assert asked.header("traceparent") == f"00-{TRACE}-{attempt.context.span_id:016x}-01"
    assert (asked.header("tracestate"), asked.header("baggage")) == ("vendor=1", "user=secret")
    assert record.trace is not None
    assert record.trace.hex == TRACE
    said = attributes(whole)
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == "tiny"
    assert said["gen_ai.usage.input_tokens"] == record.prompt_tokens
    assert said["gen_ai.usage.output_tokens"] == record.completion_tokens
    assert said["gen_ai.response.finish_reasons"] == ("stop",)
    assert (said["http.response.status_code"], said["tierline.request_id"]) == (200, "mine")
    assert "error.type" not in said
    assert attributes(attempt)["server.port"] == int(backend.url.rpartition(":")[2])
    assert attributes(attempt)["server.address"] == "127.0.0.1"
    assert [event.name for event in whole.events] == ["admitted", "first token"]
    assert whole.start_time is not None
    assert attempt.start_time is not None
    assert attempt.end_time is not None
    assert whole.end_time is not None
    assert whole.start_time <= attempt.start_time <= attempt.end_time <= whole.end_time
    assert (whole.start_time / 1e9, whole.end_time / 1e9) == (
        pytest.approx(record.time, abs=1e-3),
        pytest.approx(record.time + (record.finished_at or 0) - record.accepted_at, abs=1e-3),
    )
    text = "".join(str(attributes(span)) for span in (whole, attempt))
    assert "secret" not in text
    assert "hi" not in {str(value) for span in (whole, attempt) for value in attributes(span).values()}


async def test_an_attempt_that_failed_and_the_one_that_answered_are_two_spans(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.default = error_json(500, "broken")
    other.default = error_json(500, "broken")
    gateway = await make_gateway(backend, other)
    collected = Collected(gateway)
    response = await gateway.chat()
    whole, *attempts = await collected.spans(gateway.app)
    assert response.status >= 500
    assert [attributes(span)["error.type"] for span in attempts] == ["error", "error"]
    assert {attributes(span)["tierline.backend"] for span in attempts} == {"a", "b"}
    assert attributes(whole)["error.type"] == "upstream_error"
    assert {span.status.status_code for span in (whole, *attempts)} == {StatusCode.ERROR}
    spans = {(await each.received()).header("traceparent") for each in (backend, other)}
    assert len(spans) == 2


async def test_a_backend_that_is_not_there_is_a_span_too(make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(f"http://127.0.0.1:{closed_port()}")
    collected = Collected(gateway)
    await gateway.chat()
    whole, attempt, *_ = await collected.spans(gateway.app)
    assert attributes(whole)["error.type"] == "upstream_connect"
    assert attributes(attempt)["error.type"] == "connect"


@pytest.mark.parametrize("sampled", ["00", "01"])
async def test_the_clients_sampling_is_honoured_whatever_the_share(
    make_gateway: MakeGateway, backend: ScriptedBackend, sampled: str
) -> None:
    gateway = await make_gateway(backend)
    collected = Collected(gateway, ratio=1.0 if sampled == "00" else 0.0)
    await gateway.chat(headers={"traceparent": f"00-{TRACE}-{SPAN}-{sampled}"})
    assert len(await collected.spans(gateway.app)) == (2 if sampled == "01" else 0)
    header = (await backend.received()).header("traceparent")
    assert header is not None
    assert header.startswith(f"00-{TRACE}-")
    assert header.endswith(f"-{sampled}")


async def test_a_mistake_of_the_clients_is_no_error_of_the_span(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    collected = Collected(gateway)
    await ask(gateway.port, CHAT, chat(model="nobody"))
    (whole,) = await collected.spans(gateway.app)
    assert whole.status.status_code is StatusCode.UNSET
    assert attributes(whole)["error.type"] == "bad_request"


async def test_without_a_collector_nothing_is_touched(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    await gateway.chat(headers=PARENT)
    assert (await gateway.record()).trace is None
    assert (await backend.received()).header("traceparent") == PARENT["traceparent"]
    assert gateway.app.gateway.told == ()


def closed(**changes: Any) -> Record:
    record = Record("r", "chat", CHAT, 1000.0, 1.7e9)
    record.outcome, record.model, record.finished_at = Outcome.OK, "tiny", 1002.0
    record.trace = begin((), (), 1.0, Random(1))
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def test_of_two_attempts_side_by_side_the_one_that_lost_was_cancelled() -> None:
    record = closed(backend="b")
    assert record.trace is not None
    record.trace.begins("a", 1000.1)
    record.trace.begins("b", 1000.5)
    _, first, second = spans_of(record, {})
    assert (first.attributes["error.type"], first.failed) == ("cancelled", False)
    assert "error.type" not in second.attributes


def test_names_that_clients_make_up_are_bounded_and_in_utf8() -> None:
    exporter = InMemorySpanExporter()
    spans = Spans(FakeClock(), exporter)
    record = closed(model="\ud800" + "x" * 5000)
    spans.add(record, measures(record))
    spans.records._start()
    assert spans.records.writing is not None
    spans.records.writing.result(5)
    (span,) = exporter.get_finished_spans()
    assert len(span.name) == 200
    span.name.encode()


def test_every_operation_is_of_the_conventions() -> None:
    assert set(OPERATIONS.values()) <= {"chat", "text_completion", "embeddings", "generate_content"}


# -- a collector on the wire ---------------------------------------------------------------------------------


class Collector(HTTPServer):
    """OTLP over HTTP: decodes what comes."""

    def __init__(self, status: int = 200) -> None:
        self.requests: list[tuple[str, dict[str, str], ExportTraceServiceRequest]] = []
        self.status = status
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.requests.append(
            (self.path, dict(self.headers), ExportTraceServiceRequest.FromString(body))
        )
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_collector_gets_them_with_headers_of_the_environment(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=abc")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    text = f'[telemetry]\nrecords = "off"\notlp = "{collector.url}"\n'
    gateway = await make_gateway(backend, config=text)
    await gateway.chat(stream=True, headers=PARENT)
    await gateway.record()
    assert gateway.app.spans is not None
    await gateway.app.spans.close()
    ((path, headers, request),) = collector.requests
    assert path == "/v1/traces"
    assert {name.lower(): value for name, value in headers.items()}["x-token"] == "abc"
    (resource,) = request.resource_spans
    about = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert about["service.name"] == "tierline"
    assert about["deployment.environment.name"] == "test"
    whole, attempt = resource.scope_spans[0].spans
    assert whole.trace_id.hex() == attempt.trace_id.hex() == TRACE
    assert (whole.parent_span_id.hex(), attempt.parent_span_id) == (SPAN, whole.span_id)
    assert (await backend.received()).header("traceparent") == f"00-{TRACE}-{attempt.span_id.hex()}-01"
    text = gateway.app.metrics.render()[0].decode()
    assert "tierline_spans_dropped_total 0.0" in text


@pytest.mark.parametrize(
    ("url", "path"), [("http://127.0.0.1:1", "/v1/traces"), ("http://127.0.0.1:1/otlp/x", "/otlp/x")]
)
def test_a_url_without_a_path_gets_the_usual_one(url: str, path: str) -> None:
    assert exporter_to(url)._endpoint == f"http://127.0.0.1:1{path}"  # type: ignore[attr-defined]


# -- a collector that is slow, away, or refuses ----------------------------------------------------------------


class Stuck(SpanExporter):
    """Hangs until it is let go, then fails."""

    def __init__(self) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        self.taken = 0

    def export(self, spans: Any) -> SpanExportResult:
        self.began.set()
        self.go.wait(10)
        self.taken += len(spans)
        return SpanExportResult.FAILURE


async def test_a_collector_that_hangs_costs_spans_and_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    clock, exporter = FakeClock(), Stuck()
    spans = Spans(clock, exporter, capacity=10)
    for _ in range(5):
        spans.add(closed(), measures(closed()))
    clock.advance(1.0)
    assert exporter.began.wait(5)
    for _ in range(50):
        spans.add(closed(), measures(closed()))
    assert (len(spans.records._waiting), spans.records.dropped) == (10, 40)
    exporter.go.set()
    await spans.close()
    assert spans.records.dropped == 55
    assert [record.message for record in caplog.records] == [
        "spans cannot be written and are dropped: the collector did not take them"
    ]
    spans.add(closed(), measures(closed()))
    assert spans.records.dropped == 56  # it is closed


class Broken(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        raise RuntimeError("no")


async def test_an_exporter_that_raises_is_one_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    spans = Spans(FakeClock(), Broken())
    spans.add(closed(), measures(closed()))
    await spans.close()
    assert spans.records.dropped == 1
    assert "dropped: no" in caplog.text


def test_what_is_not_sampled_is_not_kept() -> None:
    spans = Spans(FakeClock(), InMemorySpanExporter())
    spans.add(closed(trace=None), measures(closed()))
    spans.add(closed(trace=begin((), (), 0.0, Random(1))), measures(closed()))
    assert not spans.records._waiting


def test_a_collector_without_the_sdk_is_a_mistake_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = '[[backends]]\nname = "a"\nurl = "http://127.0.0.1:1"\n[models.m]\n[telemetry]\notlp = "http://c:4318"\n'
    assert loads(text).telemetry.otlp == "http://c:4318"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tierline\[otel\]'"):
        loads(text)


async def test_streams_and_answers_that_are_whole_have_spans(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    backend.answer(chat_stream("one two"), json_answer({"object": "list", "data": []}))
    gateway = await make_gateway(backend)
    collected = Collected(gateway)
    await gateway.chat(stream=True)
    await ask(gateway.port, "/v1/embeddings", {"model": "tiny", "input": "hi"})
    await asyncio.gather(gateway.record(0), gateway.record(1))
    names = [span.name for span in await collected.spans(gateway.app)]
    assert names == ["chat tiny", "chat tiny", "embeddings tiny", "embeddings tiny"]
