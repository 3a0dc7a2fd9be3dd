"""One request and everything that belongs to it: the stages that `handler` calls, one after the other.

Rules
1. A stage either leaves what the next one needs or raises `ProxyError`. `refuse` is the one place that turns one into
   a response; `end` names the outcome, and the first name counts; `close` closes the record.
2. Choice and lease are one step of the gate's, or concurrent requests would all read the same view and herd onto one
   backend. What was let in is finished, on every kind of end.
3. Attempts come one after the other; `Failover` says whether there is another, and where. Two at once: `hedging`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from aiohttp import web

from policies import Failure, Result, Wait
from policies.trace import Trace
from proxy.access import ANYBODY
from proxy.attempt import FAILURES, Fault, FaultKind, Reply, Step, Stuck
from proxy.attempt import Result as Attempt
from proxy.classify import Classified
from proxy.continuing import Continuation
from proxy.decisions import write
from proxy.endpoints import Endpoint, api_of
from proxy.errors import Outcome, ProxyError
from proxy.explain import Story, header
from proxy.failover import Failover
from proxy.front import Answer
from proxy.gate import Pass, Refused
from proxy.headers import error_headers, origin_form, own_headers, request_head, request_id, response_headers
from proxy.hedging import Ended, Leg, Race, may_repeat
from proxy.intake import known_caller, read_body
from proxy.limiter import Grant
from proxy.pool import Backend
from proxy.record import Measures, Record, is_sound
from proxy.refusals import failure_of, fault_error, turned_away, unreachable, wrong_with
from proxy.relay import Relay
from proxy.toolcheck import violations
from proxy.upstream import Headers, UpstreamConnection
from proxy.wire.answers import read_answer
from proxy.wire.coerce import Toolset
from proxy.wire.continuationstream import ContinuedStream
from proxy.wire.errors import Api, ErrorInfo, render_body, render_event
from proxy.wire.streams import swap_model
from proxy.wire.toolcalls import FinishedCall
from proxy.wire.toolevents import Counters
from proxy.wire.toolstream import ToolChatStream

if TYPE_CHECKING:
    from proxy.handler import Gateway

STOPPING = "The gateway is shutting down; please send the request again."


class Exchange:
    """One request and everything that belongs to it."""

    __slots__ = (
        "_calls",
        "_classifier",
        "_continuation",
        "_ended",
        "_explains",
        "_failover",
        "_gateway",
        "_grant",
        "_relay",
        "_request",
        "_spoke",
        "_task",
        "_tools",
        "_traces",
        "answer",
        "api",
        "caller",
        "headers",
        "interrupted",
        "path",
        "record",
        "target",
    )

    def __init__(self, gateway: Gateway, request: web.BaseRequest) -> None:
        now = gateway.clock.now()
        self._gateway = gateway
        self._request = request
        self.caller = ANYBODY
        self._grant: Grant | None = None
        self._relay: Relay | None = None
        self._spoke: Relay | None = None  # the last one of which the client has an event
        self._failover: Failover | None = None
        self._continuation: Continuation | None = None
        self._tools: Toolset | None = None
        self._calls: list[FinishedCall] = []
        self._traces: list[Trace] = []
        self._task = asyncio.current_task()
        self._ended = False
        self._explains = "x-tierline-explain" in request.headers and gateway.may_explain(request.headers)
        self.interrupted = False
        self.target = origin_form(request.raw_path)
        self.path = self.target.partition("?")[0]
        self.api = api_of(self.path)
        ident = request_id(request.headers.get("x-request-id"))
        self.record = Record(ident, self.api, self.path, now, gateway.clock.wall())
        self.answer = Answer(request, close=gateway.draining)
        self.headers: Headers = [(b"x-request-id", ident.encode())]
        self.headers += gateway.cors.headers(request.headers.get("origin"))

    # -- accept, parse ------------------------------------------------------------------------------------------

    def authorize(self) -> None:
        gateway = self._gateway
        if gateway.callers.required and self.path not in gateway.public_paths:
            found = gateway.callers.find(self._request.headers, self.record.time)
            self.caller = caller = known_caller(found, admin=self._explains)
            self.record.tenant, self.record.key = caller.tenant, caller.ident

    async def read_body(self) -> bytes:
        clock, most = self._gateway.clock, self._gateway.body_timeout
        return await read_body(self._request, self.record, self.answer, clock, most)

    async def classify(self, endpoint: Endpoint, body: bytes) -> Classified:
        """What routing knows of the request. The tokenizer is asked only where a limit hangs on it."""
        gateway = self._gateway
        self._classifier = gateway.classifier  # what is reloaded later is for the next one
        asked = self._classifier.classify(endpoint, self._request, body, self.record, self.caller)
        if asked.near is None:
            return asked
        tokens = await gateway.tokenizer.count(gateway.pool.backends[asked.near], endpoint.api, asked)
        return asked if tokens is None else self._classifier.counted(asked, tokens, self.record)

    async def limit(self, endpoint: Endpoint, asked: Classified) -> None:
        """The limits of the key, its tenant and the model let it in, and hold what it may use until it is closed."""
        enter, target, most = self._gateway.limiter.enter, asked.route.target, asked.output_limit()
        self._grant = await enter(self.caller, target, endpoint, asked.facts.prompt.tokens, most, self.record)
        if self._grant is not None:
            self.headers += self._grant.headers

    # -- choose, relay ------------------------------------------------------------------------------------------

    async def serve(self, endpoint: Endpoint, asked: Classified) -> None:
        """Attempts until one ends for good."""
        gateway, pool, record = self._gateway, self._gateway.pool, self.record
        self._tools = asked.work.tools if asked.work is not None else None
        if (way := self._classifier.continues(endpoint, asked)) != "off":
            self._continuation = Continuation(gateway.clock, gateway.abilities, asked, text=way == "text")
        let_in: Pass | Refused | None
        traced, names = self._explains or gateway.keeps_decisions, pool.names(asked.route)
        let_in = await gateway.gate.enter(
            asked.facts, names, asked.pinned, self._queued, record.request_id, traced=traced
        )
        record.admitted_at = gateway.clock.now()
        while True:
            self._decided(let_in, asked)
            if isinstance(let_in, Refused):
                failed = self._failover.error if self._failover is not None else None
                raise failed or turned_away(asked.facts, let_in.shed, pool.views(pool.names(asked.route)))
            backend = gateway.pool.backends[let_in.go.view.name]
            started = gateway.clock.now()
            race = self._race(endpoint, asked, let_in) if self._failover is None else None
            try:
                tried = race.run() if race is not None else self._attempt(backend, endpoint, asked, let_in)
                error, failure = await tried
            finally:
                if race is not None:
                    backend, let_in = race.last.backend, race.last.let_in
                let_in.finish(self._result(asked))
            if error is None:
                gateway.pool.answered(backend)
                return
            if failure is None:
                raise error
            if self._failover is None:
                self._failover = Failover(gateway, record, asked)
            goes_on = self._continuation
            sent = self._spoke is not None and not (goes_on and goes_on.after_break(self._failover))
            shared = not self._credentials(backend)
            let_in = await self._failover.after(backend, error, failure, events_sent=sent, shared=shared)
            if let_in is None:
                raise self._failover.error or error
            record.backoff_seconds += gateway.clock.now() - started

    def _race(self, endpoint: Endpoint, asked: Classified, let_in: Pass) -> Race | None:
        """The first attempt, where its tier lets a second one be made beside it."""
        gateway = self._gateway
        params = gateway.hedges.get(asked.facts.tier.name)
        if params is None or not may_repeat(endpoint) or gateway.retry.max_attempts < 2:
            return None

        def attempt(leg: Leg) -> Coroutine[object, object, Ended]:
            return self._attempt(leg.backend, endpoint, asked, leg.let_in, leg)

        def lead(leg: Leg) -> None:
            self._relay = leg.relay
            if self._continuation is not None and leg.kept is not None:
                self._continuation.keep(leg.kept)

        def chosen(second: Pass) -> None:
            self._traces += [second.trace] if second.trace is not None else []
            gateway.metrics.decided(second.go.decision)
            self.record.attempts += 1

        def failed(leg: Leg, error: ProxyError, failure: Failure) -> None:
            self._failover = self._failover or Failover(gateway, self.record, asked)
            shared = not self._credentials(leg.backend)
            self._failover.failed(leg.backend, error, failure, events_sent=False, shared=shared)

        return Race(gateway, self.record, asked, params, let_in, attempt, lead, chosen, failed)

    def _queued(self, wait: Wait) -> None:
        self.record.queued_at = self._gateway.clock.now()
        self.record.predicted_wait = wait.seconds

    def _decided(self, let_in: Pass | Refused, asked: Classified) -> None:
        gateway, record = self._gateway, self.record
        decision = let_in.shed.decision if isinstance(let_in, Refused) else let_in.go.decision
        if let_in.trace is not None:
            self._traces.append(let_in.trace)
        gateway.metrics.decided(decision)
        record.drops, record.policy = decision.drops, gateway.policy
        if isinstance(let_in, Refused):
            if not record.attempts:
                gateway.metrics.shed(asked.facts.tier.name, let_in.shed.reason)
            return
        assert decision.reason is not None
        record.backend, record.reason = decision.backend, decision.reason.value
        record.tier = asked.facts.tier.name
        record.attempts += 1
        if self._spoke is None:  # else the answer has begun elsewhere
            record.expect(let_in.go.view)

    def _result(self, asked: Classified) -> Result:
        """What the fleet learns of an attempt that ended."""
        record = self.record
        if self._calls and self._tools is not None:
            record.schema_violations = violations(self._tools, self._calls)
        sound = is_sound(record.tool_counts, record.schema_violations)
        whole = self._ended and record.outcome is Outcome.OK
        if whole and record.prompt_tokens:
            self._classifier.learn(asked, record.prompt_tokens)
        if sound is not None and record.backend is not None:
            self._gateway.pool.judge(record.backend, sound)
        return Result(whole, record.prompt_tokens, record.completion_tokens, record.cached_tokens, sound)

    async def _attempt(
        self, backend: Backend, endpoint: Endpoint, asked: Classified, let_in: Pass, leg: Leg | None = None
    ) -> Ended:
        """One attempt; `leg`: another one may be made beside it."""
        gateway, request, trace = self._gateway, self._request, self.record.trace
        span = trace.begins(backend.name, gateway.clock.now()) if trace is not None else None
        timeouts = gateway.timeouts[backend.name]
        failures = self._failover.failures if self._failover is not None else []
        nudged = Failure.NO_CALL in failures
        body, plan = self._classifier.prepare(endpoint, asked, backend, timeouts, self.record, nudged=nudged)
        step = Step(self.target, body, plan)
        if self._continuation is not None:
            try:
                step = await self._continuation.step(backend, step)
            except TimeoutError as exc:
                return unreachable(backend.name, exc), Failure.CONNECT
            except Stuck:
                assert self._failover is not None  # for what broke
                return self._failover.error, None
        fresh = failures[-1:] == [Failure.REUSED]
        connection = None if fresh else backend.connections.take()
        if connection is None:
            try:
                async with gateway.clock.timeout_at(gateway.clock.now() + timeouts.connect):
                    connection = await backend.connections.connect()
            except (OSError, TimeoutError) as exc:
                return unreachable(backend.name, exc), Failure.CONNECT
        line, ident, passed = (
            (request.method, step.target),
            self.record.request_id,
            self._credentials(backend),
        )
        came = request.raw_headers if span is None else span.headers(request.raw_headers)
        head = request_head(line, came, ident, backend.spec, len(step.body), credentials=passed)
        if leg is not None and self._continuation is not None:
            leg.kept = self._continuation.kept
        result = await self._exchange(connection, head, step, let_in, leg)
        if result.reply is not None:
            return self._reply(backend, result.reply, endpoint, asked, leg)
        if result.fault is not None:
            error = fault_error(backend.name, result.fault)
            if result.fault.kind is FaultKind.ERROR_EVENT:
                return error, failure_of(error)
            return error, FAILURES.get(result.fault.kind)
        # A Responses stream says itself, in its last event, that it failed: told as it came, counted as it is.
        failed = endpoint.api is Api.RESPONSES and self.record.finish_reason == "failed"
        self.end(Outcome.UPSTREAM_ERROR if failed else Outcome.OK, "response.failed" if failed else None)
        return None, None

    async def _exchange(
        self, connection: UpstreamConnection, head: bytes, step: Step, let_in: Pass, leg: Leg | None
    ) -> Attempt:
        gateway, plan = self._gateway, step.plan
        headers, began = self._client_headers, let_in.first_token
        relay = Relay(gateway.clock, connection, self.answer, self.record, plan, headers, began)
        if leg is None:
            self._relay = relay
        else:
            leg.joins(relay)
        try:
            relay.start(head, step.body)
            result = await relay.done
        finally:
            relay.stop()
            self._spoke = relay if relay.events_sent else self._spoke
            if isinstance(relay.reader, ToolChatStream | ContinuedStream):
                self._count_tools(relay.reader.counters(), relay.reader.calls)
        if plan.api is Api.RESPONSES and relay.response_id is not None and self.record.backend is not None:
            gateway.owners.learn(relay.response_id, self.record.backend, self.caller.whose)
        return result

    def interrupt(self) -> None:
        """The gateway stops. A running attempt ends with a fault; whatever else is awaited is cancelled."""
        self.interrupted = True
        if self._relay is not None and not self._relay.done.done():
            self._relay.interrupt(STOPPING)
        elif self._task is not None:
            self._task.cancel()

    def heard(self) -> float | None:
        """When the stream that runs was last heard. None: none does, or its client does not read it."""
        relay = self._relay
        if relay is None or relay.over or not relay.events_sent or self.answer.paused:
            return None
        return relay.heard_at

    def give_up(self, since: float) -> None:
        """The attempt that runs fails, unless something came since then."""
        relay = self._relay
        if relay is not None and not relay.over and relay.heard_at <= since and not self.answer.paused:
            relay.fault(FaultKind.TIMEOUT, Outcome.UPSTREAM_TIMEOUT, "it makes no progress")

    def _credentials(self, backend: Backend) -> bool:
        """The client's own pass only where neither side has keys; the admin key never does."""
        return not self._gateway.callers.required and backend.spec.key is None and not self._explains

    def _reply(
        self, backend: Backend, reply: Reply, endpoint: Endpoint, asked: Classified, leg: Leg | None
    ) -> Ended:
        """A whole answer: sent as it came, unless it is an error."""
        record = self.record
        answer = read_answer(reply.body) if endpoint.api is not Api.OTHER or asked.facts.stream else None
        wrong = wrong_with(backend.name, reply, answer, credentials=self._credentials(backend))
        if answer is not None and (wrong is None or answer.aborted):
            usage = answer.usage
            record.prompt_tokens, record.completion_tokens = usage.prompt, usage.completion
            record.cached_tokens, record.finish_reason = usage.cached, answer.finish_reason
        if wrong is not None:
            return wrong
        if answer is not None and endpoint.api is Api.RESPONSES and answer.id is not None:
            self._gateway.owners.learn(answer.id, backend.name, self.caller.whose)
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
        if leg is not None:
            leg.claim()
        swap = self._classifier.model_swap(asked, backend)
        body = swap_model(body, *swap) if swap is not None else body
        self.answer.send(reply.status, self._client_headers(reply.status, reply.headers), body)
        self.end(Outcome.OK, None)
        return None, None

    def _count_tools(self, counters: Counters, calls: list[FinishedCall]) -> None:
        self.record.tool_counts = counters
        self._calls = calls

    def _client_headers(self, status: int, upstream: Headers) -> Headers:
        self.record.status = status
        return response_headers(upstream, self._own_headers(), limited=self._grant is not None)

    def _own_headers(self) -> Headers:
        out = own_headers(self.record, self.headers)
        if self._explains and self._traces:  # `x-tierline-explain: 1`, asked with the admin key
            out.append((b"x-tierline-explain", header(self.record.request_id, self._traces)))
        return out

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
            headers = error_headers(error.upstream_headers, self._own_headers())
            headers += [(name.encode(), value.encode()) for name, value in error.headers]
            if self._failover is not None and self._failover.final:
                headers = [pair for pair in headers if pair[0].lower() != b"x-should-retry"]
                headers.append((b"x-should-retry", b"false"))  # or SDKs multiply our attempts by theirs
            headers.append((b"content-type", b"application/json"))
            answer.send(error.status, headers, render_body(self.api, info, record.request_id))
        elif self._relay is not None and self._relay.in_band and error.outcome is not Outcome.CLIENT_TIMEOUT:
            held = self._spoke.held() if self._spoke is not None else b""
            answer.finish(held + render_event(self.api, info, self._relay.next_sequence))
        else:
            answer.abort()

    def _remember(self) -> None:
        """What was decided: for whoever asks, and in the record if that is wanted."""
        record, gateway = self.record, self._gateway
        waited, traces = record.waited(gateway.clock.now()), tuple(self._traces)
        gateway.memory.keep(record.request_id, Story(record.policy or "", waited, traces))
        if gateway.keeps_decisions:
            record.decisions = [write(trace) for trace in traces]

    def close(self) -> Measures:
        """Close the record: exactly once, whatever the end."""
        record, gateway = self.record, self._gateway
        record.bytes_out = self.answer.bytes_out
        if self._continuation is not None:
            self._continuation.note(record)
        if self.answer.started and not self.answer.finished:
            self.answer.abort()
        if self._traces:
            self._remember()
        if self._grant is not None:
            gateway.limiter.settle(self._grant, record)
        derived = record.close(gateway.clock.now())
        gateway.metrics.observe(record, derived)
        gateway.recorder.add(record, derived)
        # The relay and the task hold this exchange, too: without the circle a long body is freed at once.
        self._relay = self._spoke = self._task = None
        return derived
