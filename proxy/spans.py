"""Spans of requests and attempts, for an OpenTelemetry collector. The only importer of opentelemetry, and only once spans
are wanted (extra `tierline[otel]`).

Rules
1. Made from the closed record, behind the response, by a thread of their own: a request pays for two ids and a header.
2. A full buffer drops and counts; a collector that is slow or away costs spans, never answers.
3. Names are those of OpenTelemetry's GenAI conventions where it has them, `tierline.*` where it has not. Nothing of a
   prompt, an answer, a key or a client's address is in a span.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from multidict import MultiMapping

from proxy import __version__
from proxy.clock import Clock
from proxy.config import Config
from proxy.errors import Outcome
from proxy.record import Measures, Record
from proxy.recorder import Batches
from proxy.tracecontext import Attempt, Trace, begin

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

TRACES_PATH = "/v1/traces"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
OURS = frozenset(
    {
        Outcome.NO_BACKEND,
        Outcome.UPSTREAM_ERROR,
        Outcome.UPSTREAM_CONNECT,
        Outcome.UPSTREAM_TIMEOUT,
        Outcome.UPSTREAM_CUT,
        Outcome.UPSTREAM_MALFORMED,
        Outcome.SHUTDOWN,
        Outcome.INTERNAL,
    }
)
"""Ends that are a server's error; the rest is the client's, or none."""

Counted = tuple[str, str, tuple[str, ...], list[tuple[tuple[str, ...], float]]]
"""Of the metrics: name, help, labels, values."""
Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """What becomes one of OpenTelemetry's. Nanoseconds since the epoch; events: name and time."""

    name: str
    server: bool
    trace: Trace
    span_id: int
    parent_id: int | None
    start: int
    end: int
    attributes: Mapping[str, Value]
    failed: bool
    events: Sequence[tuple[str, int]] = ()


class Spans:
    """Takes closed records; a thread makes spans of them and exports them, every `flush_seconds`."""

    def __init__(
        self,
        clock: Clock,
        exporter: SpanExporter,
        *,
        ratio: float = 1.0,
        flush_seconds: float = 1.0,
        capacity: int = 10_000,
    ) -> None:
        self._exporter, self._ratio = exporter, ratio
        self._addresses: Mapping[str, str] = {}
        self._rng = Random()
        self._resource = _resource()
        self.records = Batches(clock, self._export, "spans", flush_seconds, capacity)

    def configure(self, config: Config) -> None:
        """Where the backends are."""
        self._addresses = {backend.name: backend.url for backend in config.backends}

    def begin(self, headers: MultiMapping[str]) -> Trace:
        """The trace that a request belongs to, or begins."""
        parents, states = headers.getall("traceparent", ()), headers.getall("tracestate", ())
        return begin(parents, states, self._ratio, self._rng)

    def add(self, record: Record, derived: Measures) -> None:
        """Take a closed record. Never blocks."""
        if record.trace is None or not record.trace.sampled:
            return
        if self.records.room():
            self.records.put(record)

    def counter(self) -> Counted:
        text = "Requests whose spans were not exported: the collector is slow or away."
        return "tierline_spans_dropped", text, (), [((), self.records.dropped)]

    def _export(self, records: Sequence[Record]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            spans = [_readable(one, self._resource) for r in records for one in spans_of(r, self._addresses)]
            done = self._exporter.export(spans)
        except Exception as error:  # an exporter may raise what it likes
            raise OSError(str(error)) from error
        if done is not SpanExportResult.SUCCESS:
            raise OSError("the collector did not take them")

    async def close(self) -> None:
        """Export what is left, within five seconds. Later calls do nothing."""
        await self.records.close()
        self._exporter.shutdown()


def spans_for(config: Config, clock: Clock) -> Spans | None:
    """What exports spans, where that is wanted."""
    if config.telemetry.otlp is None:
        return None
    spans = Spans(clock, exporter_to(config.telemetry.otlp), ratio=config.telemetry.otlp_sample)
    spans.configure(config)
    return spans


def exporter_to(url: str) -> SpanExporter:
    """OTLP over HTTP. Headers, timeout and compression are the SDK's own variables (OTEL_EXPORTER_OTLP_HEADERS, …)."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `Spans` says it once, not for every batch
    return OTLPSpanExporter(endpoint=url if urlsplit(url).path.strip("/") else url.rstrip("/") + TRACES_PATH)


def _resource() -> Resource:
    """Who we are; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say more, or otherwise."""
    from opentelemetry.sdk.resources import Resource

    own = {"service.version": __version__}
    if "OTEL_SERVICE_NAME" not in os.environ and "service.name" not in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    ):
        own["service.name"] = "tierline"
    return Resource.create(own)


# -- from a record -------------------------------------------------------------------------------------------


def spans_of(record: Record, addresses: Mapping[str, str]) -> list[Span]:
    """The request's span, and one for each attempt."""
    trace = record.trace
    assert trace is not None
    assert record.finished_at is not None
    base = record.time - record.accepted_at

    def at(moment: float) -> int:
        return int((base + moment) * 1e9)

    operation = OPERATIONS.get(record.path.partition("?")[0])
    name = (
        f"{operation or record.api} {record.model}" if record.model is not None else operation or record.api
    )
    common = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "anthropic" if record.api == "messages" else "openai",
        "gen_ai.request.model": record.model,
    }
    marks = (("admitted", record.admitted_at), ("first token", record.first_delta_at))
    events = [(what, at(moment)) for what, moment in marks if moment is not None]
    whole = Span(
        name,
        True,
        trace,
        trace.span_id,
        trace.parent_id,
        at(record.accepted_at),
        at(record.finished_at),
        _present({**common, **_of_request(record)}),
        record.outcome in OURS,
        events,
    )
    return [whole, *(_attempt(record, trace, one, name, common, addresses, at) for one in trace.attempts)]


def _of_request(record: Record) -> dict[str, Value | None]:
    finish = record.finish_reason
    return {
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.response.finish_reasons": None if finish is None else (finish,),
        "gen_ai.request.stream": record.stream,
        "gen_ai.conversation.id": record.conversation,
        "http.request.method": "POST",
        "url.path": record.path.partition("?")[0],
        "http.response.status_code": record.status,
        "error.type": None if record.outcome is Outcome.OK else record.outcome.value,
        "tierline.request_id": record.request_id,
        "tierline.outcome": record.outcome.value,
        "tierline.tier": record.tier,
        "tierline.backend": record.backend,
        "tierline.reason": record.reason,
        "tierline.attempts": record.attempts,
        "tierline.tenant": record.tenant,
    }


def _attempt(
    record: Record,
    trace: Trace,
    one: Attempt,
    name: str,
    common: Mapping[str, Value | None],
    addresses: Mapping[str, str],
    at: Callable[[float], int],
) -> Span:
    assert record.finished_at is not None
    last = one is trace.attempts[-1] or one.backend == record.backend
    ended = record.finished_at if one.ended is None else one.ended
    failure = one.failure
    if failure is None and one.ended is None and record.outcome is not Outcome.OK:
        failure = record.outcome.value
    if failure is None and not last:
        failure = Outcome.CANCELLED.value  # the other one answered
    where = urlsplit(addresses.get(one.backend, ""))
    attributes = {
        **common,
        "server.address": where.hostname,
        "server.port": where.port,
        "error.type": failure,
        "tierline.backend": one.backend,
    }
    failed = failure is not None and failure != Outcome.CANCELLED.value
    return Span(
        name,
        False,
        trace,
        one.span_id,
        trace.span_id,
        at(one.started),
        at(ended),
        _present(attributes),
        failed,
    )


def _present(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: _clean(value) for name, value in attributes.items() if value is not None}


def _clean(value: Value) -> Value:
    """A name that a client sent may hold what UTF-8 has not."""
    return value.encode("utf-8", "replace").decode()[:200] if isinstance(value, str) else value


def _readable(span: Span, resource: Resource) -> ReadableSpan:
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanKind, Status, StatusCode

    return ReadableSpan(
        name=_clean(span.name),  # type: ignore[arg-type]
        context=_context(span.trace, span.span_id),
        parent=None if span.parent_id is None else _context(span.trace, span.parent_id, remote=span.server),
        resource=resource,
        attributes=span.attributes,
        events=[Event(name, timestamp=time) for name, time in span.events],
        kind=SpanKind.SERVER if span.server else SpanKind.CLIENT,
        status=Status(StatusCode.ERROR if span.failed else StatusCode.UNSET),
        start_time=span.start,
        end_time=max(span.start, span.end),
        instrumentation_scope=InstrumentationScope("tierline", __version__),
    )


def _context(trace: Trace, span_id: int, *, remote: bool = False) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    state = TraceState.from_header([trace.tracestate]) if trace.tracestate else None
    return SpanContext(trace.trace_id, span_id, remote, TraceFlags(trace.flags), state)
