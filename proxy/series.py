"""What is measured, under which name and in which buckets: tables only.

Rules: docs/metrics.md describes each; a golden file holds the names.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from policies.breaker import HealthState
from policies.calibrate import ContentKind
from policies.limits import SCOPES, LimitKind
from policies.retry import Failure
from policies.types import ChooseReason, DropReason, ShedReason
from proxy.errors import Hedged, Outcome
from proxy.wire.timing import GAP_BUCKETS
from proxy.wire.toolevents import Counters
from proxy.wire.toolrequest import HistoryRepairs

# Edges in seconds.
TTFT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75,
    1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0,
)  # fmt: skip
E2E_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 45.0,
    60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 3600.0,
)  # fmt: skip
QUEUE_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip
OVERHEAD_BUCKETS = (
    0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0,
)  # fmt: skip
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Observed over predicted."""


@dataclass(frozen=True, slots=True)
class HistogramSpec:
    """A histogram's exposition: name, help, where `_Series` keeps it."""

    name: str
    slot: str
    edges: tuple[float, ...]
    help: str


HISTOGRAMS = (
    HistogramSpec(
        "tierline_time_to_first_token_seconds",
        "ttft",
        TTFT_BUCKETS,
        "Accept to the first content-bearing delta sent. Streams only.",
    ),
    HistogramSpec(
        "tierline_upstream_time_to_first_token_seconds",
        "upstream_ttft",
        TTFT_BUCKETS,
        "Dispatch to the backend to the first content-bearing delta sent. Streams only.",
    ),
    HistogramSpec(
        "tierline_inter_token_latency_seconds",
        "gap",
        GAP_BUCKETS,
        "Chunk gap: time between reads that hold a content-bearing delta. A delta may hold several tokens.",
    ),
    HistogramSpec(
        "tierline_time_per_output_token_seconds",
        "tpot",
        GAP_BUCKETS,
        "First to last content delta over completion tokens less one, from reported usage. Streams only.",
    ),
    HistogramSpec(
        "tierline_e2e_request_latency_seconds",
        "e2e",
        E2E_BUCKETS,
        "Accept to the last byte written, of requests that ended ok.",
    ),
    HistogramSpec("tierline_queue_wait_seconds", "queue_wait", QUEUE_BUCKETS, "Accept to admitted."),
    HistogramSpec(
        "tierline_overhead_seconds",
        "overhead",
        OVERHEAD_BUCKETS,
        "The gateway's own time: before dispatch, less body, queue and backoff, and after the last upstream byte.",
    ),
    HistogramSpec(
        "tierline_ttft_prediction_ratio",
        "ttft_ratio",
        RATIO_BUCKETS,
        "Time from being let in to the first token, observed over predicted. Streams only.",
    ),
    HistogramSpec(
        "tierline_tpot_prediction_ratio",
        "tpot_ratio",
        RATIO_BUCKETS,
        "Time per output token, observed over predicted when the request was let in. Streams only.",
    ),
)
ROUTE_LABELS = ("model", "tier", "backend")
# Snapshot key → gauge of every backend.
BACKEND_GAUGES = (
    ("in_flight", "tierline_in_flight_requests", "Requests on the backend now, counted here."),
    ("in_flight_tokens", "tierline_in_flight_tokens", "Context tokens of those requests, estimated."),
    ("running", "tierline_backend_running_requests", "Requests that the engine runs, polled."),
    ("waiting", "tierline_backend_waiting_requests", "Requests that wait in the engine, polled."),
    ("kv_usage", "tierline_backend_kv_usage_ratio", "Share of the engine's KV cache in use, 0 to 1, polled."),
    ("polled_age_seconds", "tierline_backend_poll_age_seconds", "Age of the polled numbers."),
    (
        "tool_integrity",
        "tierline_backend_tool_integrity_ratio",
        "Share of answers with tool calls that needed no repair, the latest weighing most.",
    ),
    ("window_tokens", "tierline_backend_window_tokens", "Longest context that the backend takes."),
    (
        "queue_seconds",
        "tierline_backend_queue_seconds",
        "Until a request that came now would begin its prefill, predicted.",
    ),
    ("busy", "tierline_backend_busy_ratio", "Share of its recent time that starts of requests took."),
    (
        "warm_factor",
        "tierline_backend_warm_start_factor",
        "Correction of starts from cache: above 1 is slower.",
    ),
    (
        "cold_factor",
        "tierline_backend_prefill_factor",
        "Correction of the profile's prefill: above 1 is slower.",
    ),
    (
        "decode_factor",
        "tierline_backend_decode_factor",
        "Correction of the profile's decoding: above 1 is slower.",
    ),
    (
        "cold_error",
        "tierline_backend_prefill_error_ratio",
        "Relative error of the prefill predictions, of late.",
    ),
    (
        "decode_error",
        "tierline_backend_decode_error_ratio",
        "Relative error of the decoding predictions, of late.",
    ),
    (
        "live_conversations",
        "tierline_backend_live_conversations",
        "Conversations that are expected to come back to it.",
    ),
    ("live_tokens", "tierline_backend_live_tokens", "Context that those are expected to hold."),
    (
        "working_set_share",
        "tierline_backend_working_set_ratio",
        "Share of its cache for conversations: falls when crowded.",
    ),
    ("cached_tokens", "tierline_backend_prefix_tokens", "Tokens that its prefix cache is thought to hold."),
    (
        "speculation_acceptance",
        "tierline_backend_speculation_acceptance_ratio",
        "Drafted tokens that were accepted; -1: not said.",
    ),
    (
        "speculation_collapsed",
        "tierline_backend_speculation_collapsed",
        "1 while speculation has collapsed in a context range.",
    ),
)

BACKEND_STATES = (
    "healthy",
    "draining",
    "leaving",
    *(state.value for state in HealthState if state != "healthy"),
)

RELOAD_OUTCOMES = ("applied", "unchanged", "refused")

DIALECTS = ("xml", "json", "guided", "parsed")
TOOL_KINDS = (
    *(f.name for f in fields(Counters) if f.name not in DIALECTS),
    *(f"history_{f.name}" for f in fields(HistoryRepairs)),
    "schema_violations",
)


class CancelPhase(StrEnum):
    """How far a request was when its client went away. Closed."""

    BEFORE_DISPATCH = "before_dispatch"
    BEFORE_FIRST_DELTA = "before_first_delta"  # also all of an answer that is not streamed
    STREAMING = "streaming"


# What the label values may be, for the documentation's test.
LABEL_VALUES: dict[str, type[StrEnum] | tuple[str, ...]] = {
    "outcome": Outcome,
    "phase": CancelPhase,
    "kind": ("prompt", "completion", "cached"),
    "dialect": DIALECTS,
    "tool kind": TOOL_KINDS,
    "state": BACKEND_STATES,
    "decision reason": ChooseReason,
    "drop reason": DropReason,
    "shed reason": ShedReason,
    "failure": Failure,
    "hedge": Hedged,
    "content": ContentKind,
    "scope": SCOPES,
    "limit": LimitKind,
    "charged_by": ("usage", "estimate"),
    "reload outcome": RELOAD_OUTCOMES,
}
