"""W3C trace context: what counts as one, and what goes on to a backend."""

from __future__ import annotations

from random import Random

import pytest

from proxy.tracecontext import begin

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("parent", "flags"),
    [
        (f"00-{TRACE}-{SPAN}-01", 1),
        (f"00-{TRACE}-{SPAN}-00", 0),
        (f"00-{TRACE}-{SPAN}-03", 3),
        (f"00-{TRACE}-{SPAN}-ff", 3),  # bits that nobody defined are not passed on
        (f"cc-{TRACE}-{SPAN}-01", 1),  # a later version is read as far as this one goes
        (f"cc-{TRACE}-{SPAN}-01-what-comes-then", 1),
    ],
)
def test_a_trace_that_came_goes_on_and_keeps_its_sampling(parent: str, flags: int) -> None:
    for ratio in (0.0, 1.0):
        trace = begin((parent,), ("a=1", "b=2"), ratio, Random(1))
        assert (f"{trace.trace_id:032x}", trace.flags, trace.tracestate) == (TRACE, flags, "a=1,b=2")
        assert trace.parent_id == int(SPAN, 16)
        assert trace.sampled == bool(flags & 1)


@pytest.mark.parametrize(
    "parents",
    [
        (),
        ("",),
        ("nonsense",),
        (f"ff-{TRACE}-{SPAN}-01",),
        (f"00-{'0' * 32}-{SPAN}-01",),
        (f"00-{TRACE}-{'0' * 16}-01",),
        (f"00-{TRACE.upper()}-{SPAN}-01",),
        (f"00-{TRACE}-{SPAN}-01-more",),
        (f"00-{TRACE}-{SPAN}-1",),
        (f"00-{TRACE}-{SPAN}-01\n",),
        (f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"),
    ],
)
def test_what_is_no_trace_context_begins_a_trace_of_its_own(parents: tuple[str, ...]) -> None:
    trace = begin(parents, ("a=1",), 1.0, Random(1))
    assert trace.trace_id != int(TRACE, 16)
    assert (trace.parent_id, trace.tracestate, trace.sampled) == (None, "", True)
    headers = trace.begins("a", 0.0).headers(
        [(b"Traceparent", b"x"), (b"TraceState", b"a=1"), (b"baggage", b"k=v")]
    )
    assert [name for name, _ in headers] == [b"baggage", b"traceparent"]


def test_of_what_comes_without_a_trace_a_share_is_sampled() -> None:
    rng = Random(3)
    sampled = sum(begin((), (), 0.25, rng).sampled for _ in range(4000))
    assert 900 < sampled < 1100
    assert not any(begin((), (), 0.0, rng).sampled for _ in range(100))
    assert all(begin((), (), 1.0, rng).sampled for _ in range(100))


def test_each_attempt_goes_out_as_a_span_of_its_own_in_the_clients_trace() -> None:
    trace = begin((f"00-{TRACE}-{SPAN}-01",), ("a=1",), 0.0, Random(1))
    came = [(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode()), (b"tracestate", b"a=1"), (b"x", b"y")]
    seen = set()
    for backend in ("one", "two"):
        headers = dict(trace.begins(backend, 0.0).headers(came))
        assert headers[b"tracestate"] == b"a=1"
        version, ident, span, flags = headers[b"traceparent"].decode().split("-")
        assert (version, ident, flags) == ("00", TRACE, "01")
        seen.add(span)
    assert len(seen | {SPAN, f"{trace.span_id:016x}"}) == 4


def test_a_failure_is_noted_at_the_attempt_that_still_runs_there() -> None:
    trace = begin((), (), 1.0, Random(1))
    first, other, again = trace.begins("a", 1.0), trace.begins("b", 2.0), trace.begins("a", 3.0)
    trace.failed("a", "cut", 4.0)
    trace.failed("a", "connect", 5.0)
    trace.failed("c", "busy", 6.0)
    assert (again.ended, again.failure) == (4.0, "cut")
    assert (first.ended, first.failure) == (5.0, "connect")
    assert other.ended is None
