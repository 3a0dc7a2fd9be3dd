"""One request and everything that belongs to it: the stages that `handler` calls, one after the other.

Rules
1. A stage either leaves what the next one needs or raises `ProxyError`. `refuse` is the one place that turns one into
   a response; `end` names the outcome, and the first name counts; `close` closes the record.
2. Between `choose` and taking the lease there is no await, or concurrent requests would all read the same view and
   herd onto one backend. The lease is released on every kind of end.
3. Attempts come one after the other; may_retry says whether there is another, the router where to.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import unquote

from aiohttp import web

from policies import Decision, Failure, RequestFacts, Retry, may_retry
from proxy.attempt import Fault, FaultKind, Plan, Reply, Result
from proxy.classify import Classified
from proxy.endpoints import Endpoint, api_of, find, meant
from proxy.errors import Outcome, ProxyError
from proxy.front import Answer, send_continue
from proxy.headers import error_headers, origin_form, request_head, request_id, response_headers
from proxy.pool import Backend
from proxy.record import Record
from proxy.refusals import fault_error, refusal, reply_error, unreachable
from proxy.relay import Relay
from proxy.toolcheck import violations
from proxy.upstream import Headers, UpstreamConnection
from proxy.wire.answers import read_answer
from proxy.wire.coerce import Toolset
from proxy.wire.errors import CONTEXT_LENGTH_EXCEEDED, Api, ErrorInfo, render_body, render_event
from proxy.wire.streams import swap_model
from proxy.wire.toolcalls import FinishedCall
from proxy.wire.toolevents import Counters
from proxy.wire.toolstream import ToolChatStream

if TYPE_CHECKING:
    from proxy.handler import Gateway

# What aiohttp unpacks while it reads; anything else would go on as it is, under a header that is gone.
_ENCODINGS = frozenset({"", "identity", "gzip", "deflate", "br", "zstd"})

STOPPING = "The gateway is shutting down; please send the request again."

_FAILURES = {
    FaultKind.STALE: Failure.REUSED,
    FaultKind.CUT: Failure.CUT,
    FaultKind.EMPTY: Failure.CUT,
    FaultKind.ABORTED: Failure.ERROR,
    FaultKind.MALFORMED: Failure.MALFORMED,
    FaultKind.TIMEOUT: Failure.TIMEOUT,
    FaultKind.NO_CALL: Failure.NO_CALL,
}


def _failure_of(error: ProxyError) -> Failure:
    """What an error that the backend put into words means for a retry."""
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        return Failure.OVERFLOW
    return Failure.ERROR if error.status >= 500 else Failure.REJECTED


class Exchange:
    """One request and everything that belongs to it."""

    __slots__ = (
        "_calls",
        "_ended",
        "_gateway",
        "_headers",
        "_relay",
        "_request",
        "_task",
        "_tools",
        "answer",
        "api",
        "interrupted",
        "path",
        "record",
        "target",
    )

    def __init__(self, gateway: Gateway, request: web.BaseRequest) -> None:
        now = gateway.clock.now()
        self._gateway = gateway
        self._request = request
        self._relay: Relay | None = None
        self._tools: Toolset | None = None
        self._calls: list[FinishedCall] = []
        self._task = asyncio.current_task()
        self._ended = False
        self.interrupted = False
        self.target = origin_form(request.raw_path)
        self.path = self.target.partition("?")[0]
        self.api = api_of(self.path)
        ident = request_id(request.headers.get("x-request-id"))
        self.record = Record(ident, self.api, self.path, now, gateway.clock.wall())
        self.answer = Answer(request, close=gateway.draining)
        self._headers: Headers = [(b"x-request-id", ident.encode())]
        self._headers += gateway.cors.headers(request.headers.get("origin"))

    # -- accept, parse ------------------------------------------------------------------------------------------

    def answer_here(self) -> Answer | None:
        """The gateway's own pages and browsers' preflights; no record."""
        gateway, request = self._gateway, self._request
        origin = request.headers.get("origin")
        if request.method == "OPTIONS" and gateway.cors.allows(origin):
            assert origin is not None
            asked = request.headers.get("access-control-request-headers")
            self.answer.send(204, gateway.cors.preflight(origin, asked), b"")
            return self.answer
        if not gateway.local.owns(self.path):
            return None
        try:
            self.authorize()
            status, headers, body = gateway.local.page(request.method, unquote(self.path))
        except ProxyError as error:
            self.refuse(error)
        else:
            self.answer.send(status, [*headers, *self._headers], body)
        return self.answer

    def authorize(self) -> None:
        gateway = self._gateway
        if not gateway.keys or self.path in gateway.public_paths:
            return
        tenant = gateway.keys.identify(self._request.headers)
        if tenant is None:
            message = "Incorrect or missing API key: send it as `Authorization: Bearer KEY`."
            headers = (("www-authenticate", "Bearer"),)
            raise ProxyError(Outcome.UNAUTHORIZED, 401, message, code="invalid_api_key", headers=headers)
        self.record.tenant = tenant

    def find_endpoint(self) -> Endpoint:
        method = self._request.method
        found = find(self.path)
        if found is None:
            hint = meant(self.path)
            message = f"Unknown path: {method} {self.path[:200]}" + (
                f". Did you mean {hint}?" if hint else ""
            )
            raise ProxyError(Outcome.BAD_REQUEST, 404, message, code="unknown_url")
        endpoint, methods = found
        if method not in methods:
            message = f"{self.path} takes {' or '.join(methods)}, not {method}."
            headers = (("allow", ", ".join(methods)),)
            raise ProxyError(Outcome.BAD_REQUEST, 405, message, code="method_not_allowed", headers=headers)
        return endpoint

    async def read_body(self) -> bytes:
        gateway, request = self._gateway, self._request
        encoding = ", ".join(request.headers.getall("content-encoding", ())).strip().lower()
        if encoding not in _ENCODINGS:
            message = f"The content-encoding '{encoding[:100]}' is not known; send gzip, deflate or none."
            headers = (("accept-encoding", "gzip, deflate"),)
            raise ProxyError(Outcome.BAD_REQUEST, 415, message, code="unsupported_encoding", headers=headers)
        if (request.content_length or 0) > request.client_max_size:
            raise self._too_large()
        if request.headers.get("expect", "").lower() == "100-continue":
            send_continue(request)
        try:
            async with gateway.clock.timeout_at(self.record.accepted_at + gateway.body_timeout):
                body = await request.read()
        except TimeoutError:
            message = f"The request body did not arrive within {gateway.body_timeout:g} s."
            raise ProxyError(Outcome.CLIENT_TIMEOUT, 408, message, code="request_timeout") from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except (web.PayloadAccessError, web.RequestPayloadError):
            # Nothing of it will be read again: aiohttp would try, and log a fault of its own.
            self.answer.close_behind()
            request.content.feed_eof()
            raise ProxyError(Outcome.BAD_REQUEST, 400, "The request body cannot be read.") from None
        self.record.body_read_at = gateway.clock.now()
        self.record.bytes_in = len(body)
        return body

    def _too_large(self) -> ProxyError:
        message = f"The request body is larger than {self._request.client_max_size} bytes."
        return ProxyError(Outcome.BAD_REQUEST, 413, message, code="request_too_large")

    # -- choose, relay ------------------------------------------------------------------------------------------

    async def serve(self, endpoint: Endpoint, asked: Classified) -> None:
        """Attempts until one ends for good. Part of a request is sent to at most one backend at a time."""
        gateway = self._gateway
        self._tools = asked.work.tools if asked.work is not None else None
        self.record.admitted_at = gateway.clock.now()
        failures: list[Failure] = []
        tried: frozenset[str] = frozenset()
        larger_than: int | None = None
        failed: ProxyError | None = None
        while True:
            views = gateway.pool.views(asked.route.backends, gateway.clock.now())
            decision = gateway.router.choose(
                asked.facts, views, gateway.rng, tried=tried, pinned=asked.pinned, larger_than=larger_than
            )
            gateway.metrics.decided(decision)
            self.record.drops = decision.drops
            if decision.backend is None:
                raise failed or refusal(asked.facts, decision, views)
            started = gateway.clock.now()
            lease = gateway.pool.lease(decision.backend, asked.facts.context_tokens)
            try:
                self._note(decision, asked.facts)
                failed, failure = await self._attempt(lease.backend, endpoint, asked, failures)
            finally:
                lease.release()
            if failed is None:
                return
            if failure is None:
                raise failed
            failures.append(failure)
            self.record.backoff_seconds += gateway.clock.now() - started
            gateway.pool.failed(lease.backend.name, failure)
            events_sent = self._relay is not None and self._relay.events_sent
            retry = may_retry(failures, events_sent, gateway.retry)
            if retry is Retry.NO:
                raise failed
            if retry is Retry.LARGER_WINDOW:
                larger_than = lease.backend.window_tokens or asked.facts.prompt.tokens
            elif retry is Retry.OTHER_BACKEND:
                tried = tried | {lease.backend.name}

    def _note(self, decision: Decision, facts: RequestFacts) -> None:
        record = self.record
        assert decision.backend is not None
        assert decision.reason is not None
        record.backend, record.reason, record.tier = decision.backend, decision.reason.value, facts.tier.name
        record.attempts += 1

    async def _attempt(
        self, backend: Backend, endpoint: Endpoint, asked: Classified, failures: list[Failure]
    ) -> tuple[ProxyError | None, Failure | None]:
        """One attempt. (None, None): answered for good. Else what to tell the client and what failed."""
        gateway = self._gateway
        timeouts = gateway.timeouts[backend.name]
        nudged = Failure.NO_CALL in failures
        body, plan = gateway.classifier.prepare(
            endpoint, asked, backend, timeouts, self.record, nudged=nudged
        )
        fresh = bool(failures) and failures[-1] is Failure.REUSED
        connection = None if fresh else backend.connections.take()
        if connection is None:
            try:
                async with gateway.clock.timeout_at(gateway.clock.now() + timeouts.connect):
                    connection = await backend.connections.connect()
            except (OSError, TimeoutError) as exc:
                return unreachable(backend.name, exc), Failure.CONNECT
        request = self._request
        head = request_head(
            (request.method, self.target),
            request.raw_headers,
            self.record.request_id,
            backend.spec,
            len(body),
            credentials=self._credentials(backend),
        )
        result = await self._exchange(connection, head, body, plan)
        if result.reply is not None:
            gateway.pool.answered(backend.name)
            return self._reply(backend, result.reply, endpoint, asked)
        if result.fault is not None:
            error = fault_error(backend.name, result.fault)
            if result.fault.kind is FaultKind.ERROR_EVENT:
                return error, _failure_of(error)
            return error, _FAILURES.get(result.fault.kind)
        gateway.pool.answered(backend.name)
        # A Responses stream says itself, in its last event, that it failed: told as it came, counted as it is.
        failed = endpoint.api is Api.RESPONSES and self.record.finish_reason == "failed"
        self.end(Outcome.UPSTREAM_ERROR if failed else Outcome.OK, "response.failed" if failed else None)
        return None, None

    async def _exchange(self, connection: UpstreamConnection, head: bytes, body: bytes, plan: Plan) -> Result:
        gateway = self._gateway
        relay = self._relay = Relay(
            gateway.clock, connection, self.answer, self.record, plan, self._client_headers
        )
        try:
            relay.start(head, body)
            result = await relay.done
        finally:
            relay.stop()
            if isinstance(relay.reader, ToolChatStream):
                self._count_tools(relay.reader.counters(), relay.reader.calls)
        if plan.api is Api.RESPONSES and relay.response_id is not None and self.record.backend is not None:
            gateway.owners.learn(relay.response_id, self.record.backend)
        return result

    def interrupt(self) -> None:
        """The gateway stops. A running attempt ends with a fault; whatever else is awaited is cancelled."""
        self.interrupted = True
        if self._relay is not None and not self._relay.done.done():
            self._relay.interrupt(STOPPING)
        elif self._task is not None:
            self._task.cancel()

    def _credentials(self, backend: Backend) -> bool:
        """The client's own pass only where neither side has keys."""
        return not self._gateway.keys and backend.spec.key is None

    def _reply(
        self, backend: Backend, reply: Reply, endpoint: Endpoint, asked: Classified
    ) -> tuple[ProxyError | None, Failure | None]:
        """A whole answer: sent as it came, unless it is an error."""
        record = self.record
        answer = read_answer(reply.body) if endpoint.api is not Api.OTHER or asked.facts.stream else None
        if reply.status >= 300 or (answer is not None and answer.failed):
            error = reply_error(backend.name, reply, self._credentials(backend))
            return error, _failure_of(error)
        if answer is not None:
            if answer.malformed and reply.status == 200:
                fault = Fault(FaultKind.MALFORMED, Outcome.UPSTREAM_MALFORMED, "the answer is not JSON")
                return fault_error(backend.name, fault), Failure.MALFORMED
            usage = answer.usage
            record.prompt_tokens, record.completion_tokens = usage.prompt, usage.completion
            record.cached_tokens, record.finish_reason = usage.cached, answer.finish_reason
            if answer.aborted:
                message = "the backend gave the answer up (finish_reason abort)"
                fault = Fault(FaultKind.ABORTED, Outcome.UPSTREAM_ERROR, message)
                return fault_error(backend.name, fault), Failure.ERROR
            if endpoint.api is Api.RESPONSES and answer.id is not None:
                self._gateway.owners.learn(answer.id, backend.name)
        if self.answer.started:  # keep-alive comments went out: the client reads an event stream
            message = f"backend {backend.name} answered without a stream"
            return ProxyError(Outcome.UPSTREAM_MALFORMED, 502, message, type="server_error"), None
        body = reply.body
        if asked.work is not None and reply.status == 200:
            whole = asked.work.whole(backend.spec, body)
            self._count_tools(whole.counters, whole.calls)
            if whole.lacks_call:
                message = "the model called no tool although tool_choice asked for it"
                fault = Fault(FaultKind.NO_CALL, Outcome.UPSTREAM_ERROR, message)
                return fault_error(backend.name, fault), Failure.NO_CALL
            body = whole.body
        swap = self._gateway.classifier.model_swap(asked, backend)
        body = swap_model(body, *swap) if swap is not None else body
        self.answer.send(reply.status, self._client_headers(reply.status, reply.headers), body)
        self.end(Outcome.OK, None)
        return None, None

    def _count_tools(self, counters: Counters, calls: list[FinishedCall]) -> None:
        self.record.tool_counts = counters
        self._calls = calls

    def _client_headers(self, status: int, upstream: Headers) -> Headers:
        record = self.record
        ours = [
            *self._headers,
            (b"x-tierline-backend", (record.backend or "").encode()),
            (b"x-tierline-tier", (record.tier or "").encode()),
            (b"x-tierline-reason", (record.reason or "").encode()),
        ]
        record.status = status
        return response_headers(upstream, ours)

    # -- ends ---------------------------------------------------------------------------------------------------

    def end(self, outcome: Outcome, error: str | None) -> None:
        if not self._ended:
            self._ended = True
            self.record.outcome = outcome
            self.record.error = error

    def refuse(self, error: ProxyError) -> None:
        """The one place where an error becomes a response: a body while no status is sent, else an event, else a cut."""
        self.end(error.outcome, error.code or error.outcome.value)
        record, answer = self.record, self.answer
        info = ErrorInfo(error.status, error.message, error.type, error.code, error.param)
        if answer.finished or answer.gone:
            return
        if not answer.started:
            if not self._request.content.is_eof():
                answer.close_behind()  # whether the rest of the body will follow nobody knows
            record.status = error.status
            headers = error_headers(error.upstream_headers, [*self._headers, *self._tierline_headers()])
            headers += [(name.encode(), value.encode()) for name, value in error.headers]
            headers.append((b"content-type", b"application/json"))
            answer.send(error.status, headers, render_body(self.api, info, record.request_id))
        elif self._relay is not None and self._relay.in_band and error.outcome is not Outcome.CLIENT_TIMEOUT:
            answer.finish(render_event(self.api, info, self._relay.next_sequence))
        else:
            answer.abort()

    def _tierline_headers(self) -> Headers:
        record = self.record
        pairs = (("backend", record.backend), ("tier", record.tier), ("reason", record.reason))
        return [(f"x-tierline-{name}".encode(), value.encode()) for name, value in pairs if value is not None]

    def close(self) -> None:
        """Close the record: exactly once, whatever the end."""
        record, gateway = self.record, self._gateway
        record.bytes_out = self.answer.bytes_out
        if self.answer.started and not self.answer.finished:
            self.answer.abort()
        if self._calls and self._tools is not None:
            record.schema_violations = violations(self._tools, self._calls)
        gateway.pool.judge(record.backend, record.tool_counts, record.schema_violations)
        derived = record.close(gateway.clock.now())
        gateway.metrics.observe(record, derived)
        gateway.recorder.add(record, derived)
        # The relay and the task hold this exchange, too: without the circle a long body is freed at once.
        self._relay = self._task = None
