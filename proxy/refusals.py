"""What goes wrong, as the `ProxyError` that tells it: no backend fits, none answers, the backend's own errors.

Rules: a backend is called by its configured name; URLs, keys and exception texts stay inside. Each message says what
to change or that waiting helps.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from policies import BackendView, DropReason, Failure, RequestFacts, Shed, ShedReason
from proxy.access import Caller
from proxy.attempt import Fault, FaultKind, Reply
from proxy.errors import Outcome, ProxyError
from proxy.headers import retry_after
from proxy.upstream import Headers
from proxy.wire.answers import Answer
from proxy.wire.errors import CONTEXT_LENGTH_EXCEEDED, ErrorInfo, openai_type, read_error, read_event_error

_WHY = {
    ShedReason.QUEUE_FULL: "The queue is full.",
    ShedReason.TOO_LATE: "It would start only after its deadline.",
    ShedReason.EXPIRED: "It waited until its deadline.",
    ShedReason.WORKING_SET: "The conversations that run take all of the cache.",
}


def wrong_with(
    name: str, reply: Reply, answer: Answer | None, *, credentials: bool
) -> tuple[ProxyError, Failure | None] | None:
    """What is wrong with a whole answer of the backend `name`, and what that is to a retry. `answer`: what was read of it.
    credentials: the client's own went along. None: nothing."""
    if reply.status >= 300 or (answer is not None and answer.failed):
        error = reply_error(name, reply, credentials)
        return error, failure_of(error)
    if answer is not None and answer.malformed and reply.status == 200:
        fault = Fault(FaultKind.MALFORMED, Outcome.UPSTREAM_MALFORMED, "the answer is not JSON")
        return fault_error(name, fault), Failure.MALFORMED
    if answer is not None and answer.aborted:
        message = "the backend gave the answer up (finish_reason abort)"
        fault = Fault(FaultKind.ABORTED, Outcome.UPSTREAM_ERROR, message)
        return fault_error(name, fault), Failure.ERROR
    return None


def turned_away(facts: RequestFacts, shed: Shed, views: Sequence[BackendView]) -> ProxyError:
    """Why the request is not served now."""
    decision = shed.decision
    reasons = {drop.backend: drop.reason for drop in decision.drops}
    counted = [reason for reason in reasons.values() if reason is not DropReason.TIER]
    if counted and all(reason is DropReason.PROMPT_TOO_LONG for reason in counted):
        windows = [
            v.window_tokens
            for v in views
            if v.window_tokens and reasons.get(v.name) is DropReason.PROMPT_TOO_LONG
        ]
        message = (
            f"This model's maximum context length is {max(windows)} tokens at tier '{facts.tier.name}'. However, your "
            f"prompt has at least {facts.prompt.low} tokens. Please reduce its length."
        )
        return ProxyError(Outcome.BAD_REQUEST, 400, message, code=CONTEXT_LENGTH_EXCEEDED, param="messages")
    named = ", ".join(f"{backend}: {reason.value}" for backend, reason in reasons.items())
    if shed.reason is not ShedReason.NO_BACKEND:
        message = f"Every backend that can serve this request is full{f' ({named})' if named else ''}."
        if why := _WHY.get(shed.reason):
            message += f" {why}"
        headers = (("retry-after", str(shed.retry_after)), ("x-tierline-reason", shed.reason.value))
        message += f" Try again in {shed.retry_after} s."
        return ProxyError(
            Outcome.SHED,
            429,
            message,
            type="rate_limit_error",
            code="rate_limit_exceeded",
            headers=headers,
            retry_after=shed.retry_after,
        )
    message = f"No backend can serve model '{facts.model}' at tier '{facts.tier.name}' now ({named})."
    return ProxyError(
        Outcome.NO_BACKEND,
        503,
        message,
        type="server_error",
        code="no_backend",
        headers=(("x-tierline-reason", "no_backend"),),
    )


def tier_forbidden(tier: str, caller: Caller) -> ProxyError:
    """The key's own tiers are named: they are no secret from who has it."""
    may = ", ".join(sorted(caller.tiers or ())) or "none"
    message = f"This key may not use the quality tier '{tier}'; it may use: {may}."
    return ProxyError(
        Outcome.UNAUTHORIZED,
        403,
        message,
        type="permission_error",
        code="tier_not_allowed",
        param="x-quality-tier",
    )


def unreachable(backend: str, exc: OSError | TimeoutError) -> ProxyError:
    if isinstance(exc, TimeoutError):
        how, outcome, status = "did not accept a connection in time", Outcome.UPSTREAM_TIMEOUT, 504
    elif isinstance(exc, ssl.SSLError):
        how, outcome, status = "failed the TLS handshake", Outcome.UPSTREAM_CONNECT, 502
    elif isinstance(exc, ConnectionRefusedError):
        how, outcome, status = "refused the connection", Outcome.UPSTREAM_CONNECT, 502
    else:
        how, outcome, status = "could not be reached", Outcome.UPSTREAM_CONNECT, 502
    message = f"Backend '{backend}' {how}."
    return ProxyError(outcome, status, message, type="server_error", code="upstream_unreachable")


_FAULT_STATUS = {FaultKind.TIMEOUT: 504, FaultKind.SHUTDOWN: 503, FaultKind.CLIENT_IDLE: 408}


def fault_error(backend: str, fault: Fault) -> ProxyError:
    """A broken attempt. An error that the backend put into words keeps them."""
    status = _FAULT_STATUS.get(fault.kind, 502)
    if fault.kind is FaultKind.ERROR_EVENT:
        info = read_event_error(fault.payload) or ErrorInfo(502, fault.message, "server_error")
        status = info.status if 400 <= info.status <= 599 else 502
        outcome = fault.outcome if status >= 500 else Outcome.UPSTREAM_REJECTED
        return ProxyError(outcome, status, info.message, type=info.type, code=info.code, param=info.param)
    if fault.kind is FaultKind.NO_CALL:
        message = "The model called no tool although tool_choice demands it; it was asked twice."
        return ProxyError(Outcome.UPSTREAM_ERROR, 502, message, type="server_error", code="tool_call_missing")
    if fault.kind is FaultKind.SHUTDOWN:
        message = fault.message
    else:
        message = f"Backend '{backend}': {fault.message}."
    return ProxyError(fault.outcome, status, message, type="server_error", code=fault.outcome.value)


def reply_error(backend: str, reply: Reply, credentials_passed: bool) -> ProxyError:
    """An error response of the backend: status and meaning kept, in OpenAI's fields.

    A 401 or 403 is the client's only if the client's own key was sent; to ours it is a fault of the set-up. A
    redirect is never followed.
    """
    content_type = next((v.decode("latin-1") for k, v in reply.headers if k.lower() == b"content-type"), None)
    info = read_error(reply.status, content_type, reply.body)
    headers: Headers = reply.headers
    if 300 <= reply.status < 400:
        message = f"Backend '{backend}' answered with a redirect ({reply.status}), which is not followed: check its URL."
        headers = []
        info = ErrorInfo(502, message, "server_error", "upstream_redirect")
    elif info.status in (401, 403) and not credentials_passed:
        message = f"Backend '{backend}' did not accept the gateway's key ({info.status})."
        headers = []
        info = ErrorInfo(502, message, "server_error", "upstream_auth")
    outcome = Outcome.UPSTREAM_ERROR if info.status >= 500 else Outcome.UPSTREAM_REJECTED
    return ProxyError(
        outcome,
        info.status,
        info.message,
        type=info.type or openai_type(info.status),
        code=info.code,
        param=info.param,
        upstream_headers=tuple(headers),
        retry_after=retry_after(headers),
    )


def failure_of(error: ProxyError) -> Failure:
    """What an error that the backend put into words means for a retry.

    408 and 425 are about the moment, 501 about the request, whatever their class says.
    """
    status = error.status
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        return Failure.OVERFLOW
    if status == 429 or (status == 503 and error.retry_after is not None):
        return Failure.BUSY
    if status in (408, 425) or (status >= 500 and status != 501):
        return Failure.ERROR
    return Failure.REJECTED


def rather(before: ProxyError | None, now: ProxyError) -> ProxyError:
    """Which of two failed attempts the client is told of: the last, unless an earlier one says when to come back."""
    told = before is not None and before.retry_after is not None and now.retry_after is None
    return before if told and before is not None and now.status >= 500 else now
