"""A record as a row of the database, and the row as what its line would say.

Rules
1. Columns of their own have what is asked of many records at once (`COLUMNS`); the rest, `REST`, lies in one JSON array,
   by place. `kind` and `figures` say once more what a report counts, packed, so that a million records are read in a second
   or two. All only grow at the end, with a migration (`proxy.recordschema`): old rows stay readable.
2. Making a row is paid for on the event loop: no dictionary, no copy. `plain` gives back every key of `record.line`, in
   its order, with equal values; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from math import exp, log
from struct import Struct
from struct import error as StructError
from typing import Any

import orjson

from proxy.record import (
    MAX_TEXT,
    Measures,
    Record,
    continuation,
    failures,
    hedge,
    is_sound,
    text,
    tool_counts,
)

COLUMNS = (
    "time", "kind", "figures", "request_id", "model", "tier_asked", "tier", "backend", "tenant", "key", "outcome",
    "reason", "attempts", "in_flight", "context", "prompt_tokens", "completion_tokens", "cached_tokens",
    "queue_wait_seconds", "ttft_seconds", "chunk_gap_p50_seconds", "chunk_gap_p99_seconds", "tpot_seconds",
    "e2e_seconds", "trouble", "tool_counts", "rest",
)  # fmt: skip
"""kind: a number, equal for equal values of KIND. figures: see FIGURES. context: tokens of the prompt, as reported, else as
estimated. trouble: a JSON object with what of TROUBLE there is, or NULL. tool_counts: JSON, or NULL. rest: see REST.
Everything else is what records.md says of that key."""

KIND = ("outcome", "tier_asked", "tier", "backend", "model", "tenant", "key")
"""What many records are counted by."""

TIMES = (
    "ttft_seconds", "chunk_gap_p50_seconds", "chunk_gap_p99_seconds", "tpot_seconds", "e2e_seconds", "queue_wait_seconds",
)  # fmt: skip
NUMBERS = ("prompt_tokens", "completion_tokens", "cached_tokens", "context", "in_flight", "attempts", "tools")
FIGURES = Struct(f"<{len(TIMES)}H{len(NUMBERS)}I")
"""What is packed: times as their `tick`, then numbers. tools: one of NO_CALLS, UNSOUND, SOUND (`record.is_sound`)."""

NO_CALLS, UNSOUND, SOUND = 0, 1, 2

NO_TICK, NO_NUMBER = 2**16 - 1, 2**32 - 1
"""In the place of what there is not."""

_FINE, _LEAST = 400, 1e-6
_SHIFT = -log(_LEAST) * _FINE


def tick(seconds: float) -> int:
    """A time to 0.125 %: few different ones, which are counted faster than they are sorted."""
    return int(log(seconds) * _FINE + _SHIFT) if seconds > _LEAST else 0


def seconds_of(number: int) -> float:
    """The middle of a tick."""
    return _LEAST * exp((number + 0.5) / _FINE) if number else 0.0


TROUBLE = ("failures", "continuation", "hedge")

REST = (
    "api", "path", "target", "drops", "limit", "reserved_tokens", "charged_tokens", "charged_by", "session",
    "conversation", "policy", "stream", "tools", "status", "error", "finish_reason", "prompt_tokens_estimate",
    "prompt_tokens_low", "prompt_tokens_high", "prompt_tokens_error", "cached_tokens_estimate",
    "predicted_wait_seconds", "predicted_ttft_seconds", "predicted_tpot_seconds", "body_read_seconds",
    "dispatch_seconds", "backoff_seconds", "upstream_ttft_seconds", "chunk_gap_max_seconds", "overhead_seconds",
    "bytes_in", "bytes_out", "client", "decisions", "trace_id",
)  # fmt: skip

KEYS = (
    "time", "request_id", "trace_id", "api", "path", "model", "target", "tier_asked", "tier", "backend", "reason", "drops",
    "attempts", "in_flight", "failures", "continuation", "hedge", "client", "tenant", "key", "limit",
    "reserved_tokens", "charged_tokens", "charged_by", "session", "conversation", "policy", "stream", "tools", "outcome",
    "status",
    "error", "finish_reason", "tool_counts", "prompt_tokens_estimate", "prompt_tokens_low", "prompt_tokens_high",
    "prompt_tokens_error", "prompt_tokens", "completion_tokens", "cached_tokens", "cached_tokens_estimate",
    "predicted_wait_seconds", "predicted_ttft_seconds", "predicted_tpot_seconds", "body_read_seconds",
    "queue_wait_seconds", "dispatch_seconds", "backoff_seconds", "ttft_seconds", "upstream_ttft_seconds",
    "chunk_gap_p50_seconds", "chunk_gap_p99_seconds", "chunk_gap_max_seconds", "tpot_seconds", "e2e_seconds",
    "overhead_seconds", "bytes_in", "bytes_out", "decisions",
)  # fmt: skip
"""Of a line, in its order."""

Row = tuple[Any, ...]
KINDS = 4096
"""Whose numbers are kept: most requests are of few."""
LONG = 1500
"""Bytes of the rest; more than that has names in it that are too long to be one."""


def row(record: Record, derived: Measures) -> Row:
    """The values of COLUMNS. Never raises for what is in the record."""
    r, start = record, record.accepted_at
    body_read, dispatched = r.body_read_at, r.dispatched_at
    path, model, ident = r.path, r.model, r.request_id
    ttft, upstream_ttft, gap_p50, gap_p99, gap_max, tpot, e2e, queue_wait, overhead = derived
    if "?" in path:
        path = path.partition("?")[0]
    rest = (
        r.api, path, r.target, {d.backend: d.reason for d in r.drops} if r.drops else None,
        r.limit, r.reserved_tokens, r.charged_tokens, r.charged_by, r.session_hash, r.conversation, r.policy,
        r.stream, r.tools, r.status, r.error, r.finish_reason, r.prompt_tokens_estimate, r.prompt_tokens_low,
        r.prompt_tokens_high, r.prompt_tokens_error, r.cached_tokens_estimate, r.predicted_wait, r.predicted_ttft,
        r.predicted_tpot, None if body_read is None else body_read - start,
        None if dispatched is None else dispatched - start, r.backoff_seconds, upstream_ttft, gap_max, overhead,
        r.bytes_in, r.bytes_out, r.client, r.decisions, None if r.trace is None else r.trace.hex,
    )  # fmt: skip
    try:
        packed = orjson.dumps(rest)
        if (len(packed) > LONG and r.decisions is None) or len(ident) > MAX_TEXT or not ident.isascii():
            raise TypeError
        if model is not None and (len(model) > MAX_TEXT or not model.isascii()):
            model = str(text(model))
    except TypeError:  # names that are too long, or that UTF-8 has no bytes for
        packed = orjson.dumps([text(value) for value in rest])
        ident, model = str(text(ident)), None if model is None else str(text(model))
    trouble = counts = None
    tools = NO_CALLS
    if r.failures or r.continuation is not None or r.hedge is not None:
        parts = (failures(r) or None, continuation(r), hedge(r))
        trouble = orjson.dumps(
            {name: part for name, part in zip(TROUBLE, parts, strict=True) if part}
        ).decode()
    if r.tool_counts is not None or r.history_repairs is not None or r.schema_violations:
        counts = orjson.dumps(found).decode() if (found := tool_counts(r)) else None
        sound = is_sound(r.tool_counts, r.schema_violations)
        tools = NO_CALLS if sound is None else SOUND if sound else UNSOUND
    prompt, completion, cached = r.prompt_tokens, r.completion_tokens, r.cached_tokens
    context = r.prompt_tokens_estimate if prompt is None else prompt
    ticks = (
        NO_TICK if ttft is None else tick(ttft), NO_TICK if gap_p50 is None else tick(gap_p50),
        NO_TICK if gap_p99 is None else tick(gap_p99), NO_TICK if tpot is None else tick(tpot), tick(e2e),
        NO_TICK if queue_wait is None else tick(queue_wait),
    )  # fmt: skip
    numbers = (
        NO_NUMBER if prompt is None else prompt, NO_NUMBER if completion is None else completion,
        NO_NUMBER if cached is None else cached, NO_NUMBER if context is None else context,
        NO_NUMBER if r.in_flight is None else r.in_flight, r.attempts, tools,
    )  # fmt: skip
    try:
        figures = FIGURES.pack(*ticks, *numbers)
    except StructError:  # what a backend made up
        figures = FIGURES.pack(*ticks, *[max(0, min(number, NO_NUMBER)) for number in numbers])
    kind = (r.outcome._value_, r.tier_asked, r.tier, r.backend, model, r.tenant, r.key)
    return (
        r.time, _kinds.get(kind) or _kind(kind), figures, ident, model, r.tier_asked, r.tier, r.backend,
        r.tenant, r.key, r.outcome._value_, r.reason, r.attempts, r.in_flight, context, prompt, completion,
        cached, queue_wait, ttft, gap_p50, gap_p99, tpot, e2e, trouble, counts, packed.decode(),
    )  # fmt: skip


_kinds: dict[tuple[str | None, ...], int] = {}


def _kind(values: tuple[str | None, ...]) -> int:
    if len(_kinds) >= KINDS:
        _kinds.clear()
    found = _kinds[values] = kind_of(values)
    return found


def kind_of(values: Sequence[str | None]) -> int:
    """Of the values of KIND: 63 bits, so that no two of them are the same."""
    return int.from_bytes(blake2b(orjson.dumps(values), digest_size=8).digest(), "big") >> 1


def plain(values: Sequence[Any]) -> dict[str, Any]:
    """What the line of this record says, from the values of COLUMNS. Raises ValueError for what is no row."""
    found: dict[str, Any] = dict(zip(COLUMNS, values, strict=True))
    found |= zip(REST, orjson.loads(found["rest"]), strict=False)
    trouble: Mapping[str, Any] = orjson.loads(found["trouble"]) if found["trouble"] else {}
    found |= {name: trouble.get(name) for name in TROUBLE}
    found["failures"] = found["failures"] or []
    found["drops"] = found["drops"] or {}
    found["tool_counts"] = orjson.loads(found["tool_counts"]) if found["tool_counts"] else {}
    at = datetime.fromtimestamp(found["time"], UTC)
    found["time"] = at.isoformat().replace("+00:00", "Z")
    return {key: found.get(key) for key in KEYS}
