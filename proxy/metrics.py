"""Everything that Prometheus scrapes, in a registry of our own. The only importer of prometheus_client.

Rules
1. Requests are observed once, from their closed record; decisions when they are made; gauges are pulled when
   somebody scrapes. Nothing is counted at two places.
2. Labels are names from the configuration or members of an enum, never what a client sent: an unknown model is
   "unknown", what was not reached is "none".
3. Counting is adding to preallocated numbers behind one dictionary look-up per request: no locks, no label
   hashing. All of it runs on the event loop's thread, so a scrape must not hold it: prometheus_client takes
   20 µs a line, which is 40 ms for the buckets of twelve routes; those lines are written here, from cached
   prefixes, in about 1 ms. It writes the rest.
4. docs/metrics.md describes each metric, a golden file holds the names: both are tests.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from policies.types import ChooseReason, Decision, DropReason
from proxy import __version__
from proxy.config import Config
from proxy.errors import Outcome
from proxy.record import Measures, Record, Recorder, tool_counts
from proxy.wire.timing import BUCKET_OF_BIN, GAP_BUCKETS
from proxy.wire.toolevents import Counters
from proxy.wire.toolrequest import HistoryRepairs

UNKNOWN = "unknown"
NONE = "none"
BACKEND_STATES = ("healthy", "draining", "ejected")

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


class _Buckets:
    """One histogram child: `add` is a search and two additions. `total`: the sum of what was added."""

    __slots__ = ("_count", "_edges", "_lines", "_sum", "counts", "total")

    def __init__(self, name: str, edges: tuple[float, ...], labels: Mapping[str, str]) -> None:
        self._edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.total = 0.0
        bounds = [*map(floatToGoString, edges), "+Inf"]
        self._lines = [f"{name}_bucket{_labels({**labels, 'le': bound})} " for bound in bounds]
        self._count = f"{name}_count{_labels(labels)} "
        self._sum = f"{name}_sum{_labels(labels)} "

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self._edges, seconds)] += 1
        self.total += seconds

    def lines(self) -> Iterator[str]:
        """The exposition, without line ends."""
        passed = [*map(str, accumulate(self.counts))]
        yield from map(str.__add__, self._lines, passed)
        yield self._count + passed[-1]
        yield self._sum + repr(self.total)


def _labels(labels: Mapping[str, str]) -> str:
    escaped = (
        (name, text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        for name, text in sorted(labels.items())
    )
    return "{" + ",".join(f'{name}="{text}"' for name, text in escaped) + "}"


class _Series:
    """Everything counted for one (model, tier, backend)."""

    __slots__ = (
        "cached_tokens",
        "completion_tokens",
        "e2e",
        "gap",
        "outcomes",
        "overhead",
        "prompt_tokens",
        "queue_wait",
        "retries",
        "tpot",
        "ttft",
        "upstream_ttft",
    )

    def __init__(self, labels: Mapping[str, str]) -> None:
        for histogram in HISTOGRAMS:
            setattr(self, histogram.slot, _Buckets(histogram.name, histogram.edges, labels))
        self.outcomes: dict[Outcome, int] = {}
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self.retries = 0

    ttft: _Buckets
    upstream_ttft: _Buckets
    gap: _Buckets
    tpot: _Buckets
    e2e: _Buckets
    queue_wait: _Buckets
    overhead: _Buckets


@dataclass(frozen=True, slots=True)
class _Histogram:
    """A histogram's exposition: name, help, where `_Series` keeps it."""

    name: str
    slot: str
    edges: tuple[float, ...]
    help: str


HISTOGRAMS = (
    _Histogram(
        "tierline_time_to_first_token_seconds",
        "ttft",
        TTFT_BUCKETS,
        "Accept to the first content-bearing delta sent. Streams only.",
    ),
    _Histogram(
        "tierline_upstream_time_to_first_token_seconds",
        "upstream_ttft",
        TTFT_BUCKETS,
        "Dispatch to the backend to the first content-bearing delta sent. Streams only.",
    ),
    _Histogram(
        "tierline_inter_token_latency_seconds",
        "gap",
        GAP_BUCKETS,
        "Chunk gap: time between reads that hold a content-bearing delta. A delta may hold several tokens.",
    ),
    _Histogram(
        "tierline_time_per_output_token_seconds",
        "tpot",
        GAP_BUCKETS,
        "First to last content delta over completion tokens less one, from reported usage. Streams only.",
    ),
    _Histogram(
        "tierline_e2e_request_latency_seconds",
        "e2e",
        E2E_BUCKETS,
        "Accept to the last byte written, of requests that ended ok.",
    ),
    _Histogram("tierline_queue_wait_seconds", "queue_wait", QUEUE_BUCKETS, "Accept to admitted."),
    _Histogram(
        "tierline_overhead_seconds",
        "overhead",
        OVERHEAD_BUCKETS,
        "The gateway's own time: before dispatch, less body, queue and backoff, and after the last upstream byte.",
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
)

Snapshot = Callable[[], Sequence[Mapping[str, object]]]
"""One mapping a backend: `name`, `state`, and the keys of BACKEND_GAUGES, None where unknown."""


class Metrics(Collector):
    """Counts requests and decisions; renders them with what `snapshot` and `recorder` say at that moment."""

    def __init__(self, config: Config, snapshot: Snapshot, recorder: Recorder) -> None:
        self._models = frozenset(config.routes)
        self._tiers = frozenset(config.tiers)
        self._backends = frozenset(backend.name for backend in config.backends)
        self._snapshot = snapshot
        self._recorder = recorder
        # By what the record says, so that the common case is one look-up; unknown names share their series.
        self._by_route: dict[tuple[str | None, str | None, str | None], _Series] = {}
        self._series: dict[tuple[str, str, str], _Series] = {}
        self._tools: dict[str, dict[str, int]] = {}
        self._decisions: dict[tuple[str, str], int] = {}
        self._drops: dict[tuple[str, str], int] = {}
        self._cancelled = dict.fromkeys(CancelPhase, 0)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def decided(self, decision: Decision) -> None:
        """One choice of the router, whether or not it found a backend."""
        if decision.backend is not None and decision.reason is not None:
            where = (decision.backend, decision.reason)
            self._decisions[where] = self._decisions.get(where, 0) + 1
        for drop in decision.drops:
            why = (drop.backend, drop.reason)
            self._drops[why] = self._drops.get(why, 0) + 1

    def observe(self, record: Record, derived: Measures) -> None:
        """One closed record. The only place where requests are counted."""
        series = self._by_route.get((record.model, record.tier, record.backend)) or self._find(record)
        outcome = record.outcome
        series.outcomes[outcome] = series.outcomes.get(outcome, 0) + 1
        if derived.ttft is not None:
            series.ttft.add(derived.ttft)
            if derived.upstream_ttft is not None:
                series.upstream_ttft.add(derived.upstream_ttft)
            if derived.tpot is not None:
                series.tpot.add(derived.tpot)
            gap, counts = series.gap, series.gap.counts
            gap.total += record.gaps.total
            for where, count in record.gaps.bins():
                counts[BUCKET_OF_BIN[where]] += count
        if outcome is Outcome.OK:
            series.e2e.add(derived.e2e)
        elif outcome is Outcome.CANCELLED:
            self._cancelled[_phase(record)] += 1
        if derived.queue_wait is not None:
            series.queue_wait.add(derived.queue_wait)
        if derived.overhead is not None:
            series.overhead.add(derived.overhead)
        series.prompt_tokens += record.prompt_tokens or 0
        series.completion_tokens += record.completion_tokens or 0
        series.cached_tokens += record.cached_tokens or 0
        if record.tool_counts is not None or record.history_repairs is not None:
            self._observe_tools(record)
        if record.attempts > 1:
            series.retries += record.attempts - 1

    def _observe_tools(self, record: Record) -> None:
        counts = self._tools.setdefault(_known(record.backend, self._backends), {})
        for kind, count in tool_counts(record).items():
            counts[kind] = counts.get(kind, 0) + count

    def _find(self, record: Record) -> _Series:
        labels = (
            _known(record.model, self._models),
            _known(record.tier, self._tiers),
            _known(record.backend, self._backends),
        )
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = _Series(dict(zip(ROUTE_LABELS, labels, strict=True)))
        if UNKNOWN not in labels:  # what a client made up is not kept as a key
            self._by_route[(record.model, record.tier, record.backend)] = series
        return series

    def render(self) -> tuple[bytes, str]:
        """The exposition and its content type."""
        lines: list[str] = []
        for histogram in HISTOGRAMS:
            lines += (f"# HELP {histogram.name} {histogram.help}", f"# TYPE {histogram.name} histogram")
            for series in self._series.values():
                lines += getattr(series, histogram.slot).lines()
        lines.append("")
        return "\n".join(lines).encode() + generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    # -- exposition -------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client writes: all but the histograms."""
        yield self._requests()
        yield self._tokens()
        yield self._retries()
        yield _counter(
            "tierline_decisions",
            "Choices of a backend, one per attempt, by why it was chosen.",
            ("backend", "reason"),
            self._decisions.items(),
        )
        yield _counter(
            "tierline_tool_calls",
            "Tool calls found in answers, by how the backend wrote them.",
            ("backend", "dialect"),
            self._tool_counts(dialects=True),
        )
        yield _counter(
            "tierline_tool_repairs",
            "What was repaired, noticed or lost about tool calls, by kind.",
            ("backend", "kind"),
            self._tool_counts(dialects=False),
        )
        yield _counter(
            "tierline_drops",
            "Backends left out of a choice, by why.",
            ("backend", "reason"),
            self._drops.items(),
        )
        yield _counter(
            "tierline_cancelled_requests",
            "Requests whose client went away, by how far they were.",
            ("phase",),
            (((phase,), count) for phase, count in self._cancelled.items()),
        )
        yield _counter(
            "tierline_records_dropped",
            "Records that were not written: the writer fell behind or failed.",
            (),
            [((), self._recorder.dropped)],
        )
        yield from self._backend_gauges()
        build = GaugeMetricFamily("tierline_build_info", "Always 1.", labels=("version", "python"))
        build.add_metric((__version__, platform.python_version()), 1)
        yield build

    def _tool_counts(self, *, dialects: bool) -> Iterator[tuple[tuple[str, str], int]]:
        for backend, counts in self._tools.items():
            for kind, count in counts.items():
                if (kind in DIALECTS) is dialects:
                    yield (backend, kind), count

    def _requests(self) -> Metric:
        return _counter(
            "tierline_requests",
            "Requests, by how they ended.",
            (*ROUTE_LABELS, "outcome"),
            (
                ((*labels, outcome), count)
                for labels, series in self._series.items()
                for outcome, count in series.outcomes.items()
            ),
        )

    def _tokens(self) -> Metric:
        return _counter(
            "tierline_tokens",
            "Tokens as reported by the backends; cached ones are part of the prompt.",
            (*ROUTE_LABELS, "kind"),
            (
                ((*labels, kind), count)
                for labels, series in self._series.items()
                for kind, count in (
                    ("prompt", series.prompt_tokens),
                    ("completion", series.completion_tokens),
                    ("cached", series.cached_tokens),
                )
            ),
        )

    def _retries(self) -> Metric:
        return _counter(
            "tierline_retries",
            "Attempts after the first, of requests that ended at that backend.",
            ROUTE_LABELS,
            ((labels, series.retries) for labels, series in self._series.items()),
        )

    def _backend_gauges(self) -> Iterator[Metric]:
        backends = [(str(backend["name"]), backend) for backend in self._snapshot()]
        state = GaugeMetricFamily(
            "tierline_backend_state", "1 for the state that the backend is in.", labels=("backend", "state")
        )
        for name, backend in backends:
            for member in BACKEND_STATES:
                state.add_metric((name, member), float(backend.get("state") == member))
        yield state
        for key, metric, text in BACKEND_GAUGES:
            gauge = GaugeMetricFamily(metric, text, labels=("backend",))
            for name, backend in backends:
                value = backend.get(key)
                if isinstance(value, int | float):
                    gauge.add_metric((name,), value)
            yield gauge


def _counter(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, count in values:
        family.add_metric(key, count)
    return family


def _known(name: str | None, names: frozenset[str]) -> str:
    if name is None:
        return NONE
    return name if name in names else UNKNOWN


def _phase(record: Record) -> CancelPhase:
    if record.dispatched_at is None:
        return CancelPhase.BEFORE_DISPATCH
    return CancelPhase.BEFORE_FIRST_DELTA if record.first_delta_at is None else CancelPhase.STREAMING


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
}
