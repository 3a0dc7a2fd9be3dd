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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from policies.retry import Failure
from policies.types import Decision, ShedReason
from proxy import __version__
from proxy.config import Config
from proxy.errors import Outcome
from proxy.histogram import Buckets
from proxy.record import Measures, Record, tool_counts
from proxy.recorder import Recorder
from proxy.series import (
    BACKEND_GAUGES,
    BACKEND_STATES,
    DIALECTS,
    HISTOGRAMS,
    ROUTE_LABELS,
    CancelPhase,
)
from proxy.wire.timing import BUCKET_OF_BIN

UNKNOWN = "unknown"
NONE = "none"


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
        "tpot_ratio",
        "ttft",
        "ttft_ratio",
        "upstream_ttft",
    )

    def __init__(self, labels: Mapping[str, str]) -> None:
        for histogram in HISTOGRAMS:
            setattr(self, histogram.slot, Buckets(histogram.name, histogram.edges, labels))
        self.outcomes: dict[Outcome, int] = {}
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self.retries = 0

    ttft: Buckets
    upstream_ttft: Buckets
    gap: Buckets
    tpot: Buckets
    e2e: Buckets
    queue_wait: Buckets
    overhead: Buckets
    ttft_ratio: Buckets
    tpot_ratio: Buckets


Snapshot = Callable[[], Sequence[Mapping[str, object]]]
"""One mapping a backend: `name`, `state`, and the keys of BACKEND_GAUGES, None where unknown."""


Counter = tuple[str, str, tuple[str, ...], Iterable[tuple[Sequence[str], float]]]
"""Of somebody else: name, help, labels, values."""


class Metrics(Collector):
    """Counts requests and decisions; renders them with what `snapshot` and `recorder` say at that moment."""

    def __init__(self, config: Config, snapshot: Snapshot, recorder: Recorder) -> None:
        self._backends: frozenset[str] = frozenset()
        self.configure(config)
        self._snapshot = snapshot
        self._recorder = recorder
        # By what the record says, so that the common case is one look-up; unknown names share their series.
        self._by_route: dict[tuple[str | None, str | None, str | None], _Series] = {}
        self._series: dict[tuple[str, str, str], _Series] = {}
        self._tools: dict[str, dict[str, int]] = {}
        self._decisions: dict[tuple[str, str], int] = {}
        self._drops: dict[tuple[str, str], int] = {}
        self._shed: dict[tuple[str, str], int] = {}
        self._failures: dict[tuple[str, str], int] = {}
        self._continuations: dict[tuple[str, str], int] = {}
        self._hedges: dict[tuple[str, str], int] = {}
        self._cancelled = dict.fromkeys(CancelPhase, 0)
        self.retries_denied = 0
        """Retries that were due and not made: the budget was spent."""
        self.estimate_errors: Callable[[], Iterable[tuple[str, str, float]]] = tuple
        """(model, kind of content, stated relative error) of what was learned."""
        self.waiting: Callable[[], Mapping[tuple[str, int], int]] = dict
        """(tier, priority) → how many are in line."""
        self.counters: Callable[[], Iterable[Counter]] = tuple
        self.gauges: Callable[[], Iterable[Counter]] = tuple
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def configure(self, config: Config) -> None:
        """What may be a label, and which policy is in force; counts go on."""
        self._models = frozenset(config.routes)
        self._tiers = frozenset(config.tiers)
        self._backends |= {backend.name for backend in config.backends}  # what has left still ends there
        self._policy = (config.policy_params.name, config.policy_digest)

    def decided(self, decision: Decision) -> None:
        """One choice of the router, whether or not it found a backend."""
        if decision.backend is not None and decision.reason is not None:
            where = (decision.backend, decision.reason)
            self._decisions[where] = self._decisions.get(where, 0) + 1
        for drop in decision.drops:
            why = (drop.backend, drop.reason)
            self._drops[why] = self._drops.get(why, 0) + 1

    def shed(self, tier: str, reason: ShedReason) -> None:
        """One request was turned away by admission."""
        why = (tier, reason.value)
        self._shed[why] = self._shed.get(why, 0) + 1

    def failed(self, backend: str, failure: Failure) -> None:
        """One attempt failed."""
        what = (backend, failure.value)
        self._failures[what] = self._failures.get(what, 0) + 1

    def observe(self, record: Record, derived: Measures) -> None:
        """One closed record. The only place where requests are counted."""
        series = self._by_route.get((record.model, record.tier, record.backend)) or self._find(record)
        outcome = record.outcome
        trace = None if record.trace is None else record.trace.shown
        series.outcomes[outcome] = series.outcomes.get(outcome, 0) + 1
        if derived.ttft is not None:
            where = series.ttft.add(derived.ttft)
            series.ttft.examples[where] = (record.request_id, trace, derived.ttft, record.time)
            if derived.upstream_ttft is not None:
                series.upstream_ttft.add(derived.upstream_ttft)
            if derived.tpot is not None:
                series.tpot.add(derived.tpot)
            gap, counts = series.gap, series.gap.counts
            gap.total += record.gaps.total
            for place, count in record.gaps.bins():
                counts[BUCKET_OF_BIN[place]] += count
            if record.predicted_ttft and derived.queue_wait is not None:
                series.ttft_ratio.add((derived.ttft - derived.queue_wait) / record.predicted_ttft)
            if record.predicted_tpot and derived.tpot is not None:
                series.tpot_ratio.add(derived.tpot / record.predicted_tpot)
        if outcome is Outcome.OK:
            where = series.e2e.add(derived.e2e)
            series.e2e.examples[where] = (record.request_id, trace, derived.e2e, record.time)
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
        if record.continuation is not None:
            self._count(self._continuations, record.tier, record.continuation)
        if record.hedge is not None:
            self._count(self._hedges, record.tier, record.hedge)

    def _count(self, counts: dict[tuple[str, str], int], tier: str | None, what: StrEnum) -> None:
        key = (_known(tier, self._tiers), what.value)
        counts[key] = counts.get(key, 0) + 1

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

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type: OpenMetrics, with exemplars, for who asks for it, else Prometheus' text."""
        exemplars = "application/openmetrics-text" in accept
        lines: list[str] = []
        for histogram in HISTOGRAMS:
            lines += (f"# HELP {histogram.name} {histogram.help}", f"# TYPE {histogram.name} histogram")
            for series in self._series.values():
                lines += getattr(series, histogram.slot).lines(exemplars=exemplars)
        lines.append("")
        written = "\n".join(lines).encode()
        if exemplars:
            rest: bytes = openmetrics.generate_latest(self._registry)  # type: ignore[no-untyped-call]
            return written + rest, openmetrics.CONTENT_TYPE_LATEST
        return written + generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    # -- exposition -------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client writes: all but the histograms."""
        yield self._requests()
        yield self._tokens()
        yield self._retries()
        yield _counter(
            "tierline_failed_attempts",
            "Attempts that failed, by how, whatever became of the request.",
            ("backend", "failure"),
            self._failures.items(),
        )
        yield _counter(
            "tierline_retries_denied",
            "Retries that were due and not made: their budget was spent.",
            (),
            [((), self.retries_denied)],
        )
        yield _counter(
            "tierline_continuations",
            "Streams that broke in the middle and might go on elsewhere, by how that went.",
            ("tier", "ending"),
            self._continuations.items(),
        )
        yield _counter(
            "tierline_hedges",
            "Second attempts that were due beside the first, by what came of them.",
            ("tier", "outcome"),
            self._hedges.items(),
        )
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
        why = ("backend", "reason")
        yield _counter("tierline_drops", "Backends left out of a choice, by why.", why, self._drops.items())
        why = ("tier", "reason")
        yield _counter("tierline_shed", "Requests turned away, by why.", why, self._shed.items())
        yield _gauge(
            "tierline_queued_requests",
            "Requests that wait to be let in.",
            ("tier", "priority"),
            [((tier, str(priority)), count) for (tier, priority), count in self.waiting().items()],
        )
        yield _gauge(
            "tierline_prompt_estimate_error_ratio",
            "Median relative error of the token estimate, of late.",
            ("model", "content"),
            [((model, content), error) for model, content, error in self.estimate_errors()],
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
        yield from (_counter(*counter) for counter in self.counters())
        yield from (_gauge(*gauge) for gauge in self.gauges())
        yield from self._backend_gauges()
        name = "tierline_policy_info"
        yield _gauge(name, "1 for the policy in force.", ("name", "digest"), [(self._policy, 1)])
        build = __version__, platform.python_version()
        yield _gauge("tierline_build_info", "Always 1.", ("version", "python"), [(build, 1)])

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
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _gauge(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


F = TypeVar("F", CounterMetricFamily, GaugeMetricFamily)


def _filled(family: F, values: Iterable[tuple[Sequence[str], float]]) -> F:
    for key, value in values:
        family.add_metric(key, value)
    return family


def _known(name: str | None, names: frozenset[str]) -> str:
    if name is None:
        return NONE
    return name if name in names else UNKNOWN


def _phase(record: Record) -> CancelPhase:
    if record.dispatched_at is None:
        return CancelPhase.BEFORE_DISPATCH
    return CancelPhase.BEFORE_FIRST_DELTA if record.first_delta_at is None else CancelPhase.STREAMING
