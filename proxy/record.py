"""What happened to one request: marked along its path, closed exactly once, one line of JSON in the end.

Rules: the handler makes a `Record` at accept and closes it in a `finally`; closing twice raises.
Marks are monotonic seconds. `measures` is the only place where DESIGN's words (TTFT, chunk gap, TPOT, …) are
computed; records and metrics both come from it. No prompt, answer, key or raw session is ever in a record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import NamedTuple

import orjson

from policies.retry import Failure
from policies.types import BackendView, Drop
from proxy.errors import ChargedBy, Ending, Hedged, Outcome
from proxy.tracecontext import Trace
from proxy.wire.timing import GapHistogram
from proxy.wire.toolevents import Counters
from proxy.wire.toolrequest import HistoryRepairs

MAX_LINE_BYTES = 4096  # a longer line has names in it that are too long to be one
MAX_TEXT = 200  # characters that are kept of each text in such a line
# The whole answer passed, so what lies between its last byte in and its last byte out was ours.
_WHOLE = frozenset({Outcome.OK, Outcome.UPSTREAM_REJECTED})


@dataclass(slots=True, eq=False)
class Record:
    """One request. Times: monotonic seconds, None until (or unless) that point was reached.

    time: wall clock at accept, seconds since the epoch. model: the public name asked for; target: the model it is an
    alias of. in_flight: requests of ours that the backend had when it was chosen. client: the address, where records
    have it. tenant, key: whose, by name. limit: the one that refused it. reserved_tokens, charged_tokens, charged_by:
    what its limits were asked for, and what they paid in the end. session_hash: a short hash of the session.
    conversation: what names it, a hash too. policy: the digest of the policy that decided. prompt_tokens_error: the
    estimate's typical relative error, as stated. cached_tokens_estimate, predicted_wait, predicted_ttft (from
    admission), predicted_tpot: what was expected of the backend that was chosen, in tokens and seconds. failures:
    backend and kind of attempts that failed. continuation: how it went with a stream that broke and might go on;
    continuation_why: what did not allow it. legs: backend, tokens of the answer so far, and `token` or `text`, of
    every attempt that went on with it. hedge: what came of a second attempt beside the first, to hedged_to,
    hedged_after seconds.
    queued_at: when it began to wait for admission; None if it entered at once. dispatched_at: the
    attempt that answered (the last one). backoff_seconds: what earlier attempts and the waits took.
    first_delta_at, last_delta_at: content-bearing deltas written. last_upstream_at: last byte of the answer
    read. finished_at: last byte written. prompt_tokens, completion_tokens, cached_tokens: usage as reported.
    tool_counts, history_repairs: what was done about tool calls, in the answer and in the request's history.
    status: sent to the client. error: a short word for the kind of failure, no content. decisions: what each attempt was
    decided from, where that is kept. trace: the spans it is part of, where they are made.
    """

    request_id: str
    api: str
    path: str
    accepted_at: float
    time: float
    model: str | None = None
    target: str | None = None
    tier_asked: str | None = None
    tier: str | None = None
    backend: str | None = None
    reason: str | None = None
    drops: tuple[Drop, ...] = ()
    attempts: int = 0
    in_flight: int | None = None
    failures: tuple[tuple[str, Failure], ...] = ()
    continuation: Ending | None = None
    continuation_why: str | None = None
    legs: tuple[tuple[str, int, str], ...] = ()
    hedge: Hedged | None = None
    hedged_to: str | None = None
    hedged_after: float | None = None
    client: str | None = None
    tenant: str | None = None
    key: str | None = None
    limit: str | None = None
    reserved_tokens: int | None = None
    charged_tokens: int | None = None
    charged_by: ChargedBy | None = None
    session_hash: str | None = None
    conversation: str | None = None
    policy: str | None = None
    stream: bool = False
    tools: bool = False
    body_read_at: float | None = None
    queued_at: float | None = None
    admitted_at: float | None = None
    dispatched_at: float | None = None
    first_delta_at: float | None = None
    last_delta_at: float | None = None
    last_upstream_at: float | None = None
    finished_at: float | None = None
    backoff_seconds: float = 0.0
    prompt_tokens_estimate: int | None = None
    prompt_tokens_low: int | None = None
    prompt_tokens_high: int | None = None
    prompt_tokens_error: float | None = None
    cached_tokens_estimate: int | None = None
    predicted_wait: float | None = None
    predicted_ttft: float | None = None
    predicted_tpot: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    gaps: GapHistogram = field(default_factory=GapHistogram)
    tool_counts: Counters | None = None
    schema_violations: int = 0
    history_repairs: HistoryRepairs | None = None
    finish_reason: str | None = None
    outcome: Outcome = Outcome.INTERNAL  # until someone knows better
    status: int | None = None
    error: str | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    decisions: Sequence[Mapping[str, object]] | None = None
    trace: Trace | None = None
    closed: bool = False

    def expect(self, view: BackendView) -> None:
        """What the chosen backend is expected to make of it."""
        self.in_flight = view.in_flight
        self.cached_tokens_estimate = int(view.cached_tokens)
        if view.forecast is not None:
            self.predicted_ttft, self.predicted_tpot = view.forecast.ttft, view.forecast.tpot

    def waited(self, now: float) -> float:
        """Seconds in the queue, so far."""
        return 0.0 if self.queued_at is None else (self.admitted_at or now) - self.queued_at

    def close(self, now: float) -> Measures:
        """End the record; what is derived from it is returned. Raises RuntimeError the second time."""
        if self.closed:
            raise RuntimeError(f"record {self.request_id} closed twice")
        self.closed = True
        if self.finished_at is None:
            self.finished_at = now
        return measures(self)


class Measures(NamedTuple):  # a frozen dataclass takes five times as long to make
    """Seconds, None where the request has no such thing; the words are DESIGN's."""

    ttft: float | None
    upstream_ttft: float | None
    gap_p50: float | None
    gap_p99: float | None
    gap_max: float | None
    tpot: float | None
    e2e: float
    queue_wait: float | None
    overhead: float | None


def measures(record: Record) -> Measures:
    """Every definition in one place.

    TTFT: accept → first content delta sent. Upstream TTFT: dispatch → the same. TPOT: (last − first content
    delta) ÷ (completion_tokens − 1), from reported usage. E2E: accept → last byte. Queue wait: accept →
    admitted. Overhead: see `_overhead`. Not streamed: no TTFT, gap or TPOT.
    """
    ttft = upstream_ttft = tpot = None
    gap_p50: float | None = None
    gap_p99: float | None = None
    gap_max: float | None = None
    first, last, tokens = record.first_delta_at, record.last_delta_at, record.completion_tokens
    if record.stream and first is not None:
        ttft = first - record.accepted_at
        if record.dispatched_at is not None:
            upstream_ttft = first - record.dispatched_at
        if last is not None and tokens is not None and tokens > 1:
            tpot = (last - first) / (tokens - 1)
        gap_p50, gap_p99 = record.gaps.quantiles(0.5, 0.99)
        gap_max = record.gaps.max if gap_p99 is not None else None
    finished = record.accepted_at if record.finished_at is None else record.finished_at
    admitted = record.admitted_at
    return Measures(
        ttft=ttft,
        upstream_ttft=upstream_ttft,
        gap_p50=gap_p50,
        gap_p99=gap_p99,
        gap_max=gap_max,
        tpot=tpot,
        e2e=finished - record.accepted_at,
        queue_wait=None if admitted is None else admitted - record.accepted_at,
        overhead=_overhead(record),
    )


def _overhead(record: Record) -> float | None:
    """What Tierline itself added: (accept → dispatch, less reading the body, waiting for admission and
    earlier attempts) + (last upstream byte → last byte written). None unless an answer passed whole:
    otherwise the time at the end is a timeout's or the client's.

    The queue-wait *metric* starts at accept, as the client sees it; the wait taken off here starts when the
    request began to wait, so that parsing and classifying stay counted and the body is not taken off twice.
    """
    if record.outcome not in _WHOLE or record.dispatched_at is None or record.finished_at is None:
        return None
    before = record.dispatched_at - record.accepted_at - record.backoff_seconds
    if record.body_read_at is not None:
        before -= record.body_read_at - record.accepted_at
    if record.queued_at is not None and record.admitted_at is not None:
        before -= record.admitted_at - record.queued_at
    after = record.finished_at - record.last_upstream_at if record.last_upstream_at is not None else 0.0
    return max(0.0, before) + max(0.0, after)


# --- the line --------------------------------------------------------------------------------------------


_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z


def line(record: Record, derived: Measures) -> bytes:
    """One line of JSON, newline included; keys that are times end in their unit."""
    value = _as_dict(record, derived)
    try:
        data = orjson.dumps(value, option=_OPTIONS)
    except TypeError:  # a lone surrogate in a name that a client sent
        data = b""
    if not data or (len(data) > MAX_LINE_BYTES and record.decisions is None):
        data = orjson.dumps({key: text(item) for key, item in value.items()}, option=_OPTIONS)
    return data


def _as_dict(record: Record, derived: Measures) -> dict[str, object]:
    start = record.accepted_at
    body_read, dispatched = record.body_read_at, record.dispatched_at
    return {
        "time": datetime.fromtimestamp(record.time, UTC),
        "request_id": record.request_id,
        "trace_id": None if record.trace is None else record.trace.hex,
        "api": record.api,
        "path": record.path.partition("?")[0],
        "model": record.model,
        "target": record.target,
        "tier_asked": record.tier_asked,
        "tier": record.tier,
        "backend": record.backend,
        "reason": record.reason,
        "drops": {drop.backend: drop.reason for drop in record.drops},
        "attempts": record.attempts,
        "in_flight": record.in_flight,
        "failures": failures(record),
        "continuation": continuation(record),
        "hedge": hedge(record),
        "client": record.client,
        "tenant": record.tenant,
        "key": record.key,
        "limit": record.limit,
        "reserved_tokens": record.reserved_tokens,
        "charged_tokens": record.charged_tokens,
        "charged_by": record.charged_by,
        "session": record.session_hash,
        "conversation": record.conversation,
        "policy": record.policy,
        "stream": record.stream,
        "tools": record.tools,
        "outcome": record.outcome,
        "status": record.status,
        "error": record.error,
        "finish_reason": record.finish_reason,
        "tool_counts": tool_counts(record),
        "prompt_tokens_estimate": record.prompt_tokens_estimate,
        "prompt_tokens_low": record.prompt_tokens_low,
        "prompt_tokens_high": record.prompt_tokens_high,
        "prompt_tokens_error": record.prompt_tokens_error,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "cached_tokens_estimate": record.cached_tokens_estimate,
        "predicted_wait_seconds": record.predicted_wait,
        "predicted_ttft_seconds": record.predicted_ttft,
        "predicted_tpot_seconds": record.predicted_tpot,
        "body_read_seconds": None if body_read is None else body_read - start,
        "queue_wait_seconds": derived.queue_wait,
        "dispatch_seconds": None if dispatched is None else dispatched - start,
        "backoff_seconds": record.backoff_seconds,
        "ttft_seconds": derived.ttft,
        "upstream_ttft_seconds": derived.upstream_ttft,
        "chunk_gap_p50_seconds": derived.gap_p50,
        "chunk_gap_p99_seconds": derived.gap_p99,
        "chunk_gap_max_seconds": derived.gap_max,
        "tpot_seconds": derived.tpot,
        "e2e_seconds": derived.e2e,
        "overhead_seconds": derived.overhead,
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
        "decisions": record.decisions,
    }


def failures(record: Record) -> list[dict[str, object]]:
    return [{"backend": name, "failure": failure} for name, failure in record.failures]


def continuation(record: Record) -> dict[str, object] | None:
    if record.continuation is None:
        return None
    legs = [{"backend": name, "after_tokens": tokens, "by": by} for name, tokens, by in record.legs]
    return {"ending": record.continuation, "why": record.continuation_why, "legs": legs}


def hedge(record: Record) -> dict[str, object] | None:
    if record.hedge is None:
        return None
    return {"outcome": record.hedge, "backend": record.hedged_to, "after_seconds": record.hedged_after}


def text(value: object) -> object:
    """Bounded, and in characters that UTF-8 has."""
    if type(value) is not str:
        return value
    made = value.encode("utf-8", "replace").decode()
    return made if len(made) <= MAX_TEXT else made[: MAX_TEXT - 1] + "…"


def tool_counts(record: Record) -> dict[str, int]:
    """What was seen and done about tool calls, by kind; kinds with nothing are left out."""
    counts: dict[str, int] = {}
    for prefix, counted in (("", record.tool_counts), ("history_", record.history_repairs)):
        if counted is not None:
            counts.update({prefix + f.name: n for f in fields(counted) if (n := getattr(counted, f.name))})
    if record.schema_violations:
        counts["schema_violations"] = record.schema_violations
    return counts


def is_sound(counts: Counters | None, violated: int) -> bool | None:
    """Whether every tool call of an answer came right by itself; None: there was none."""
    if counts is None or not counts.calls():
        return None
    wrong = counts.cut + counts.failures + counts.duplicates + counts.suspected + counts.undeclared
    return not wrong + violated + counts.repaired_syntax + counts.repaired_arguments
