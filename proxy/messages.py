"""What goes through the channel about a request, as plain values: `x_out` at one end, `x_in` at the other.

Rules: short, for it is done for every request: names as they are, reasons as their words. A trace is large and seldom
wanted: it travels packed, its scores made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies import Go, RequestFacts, Shed
from policies.limits import Standing
from policies.trace import Trace
from policies.types import (
    BackendView,
    ChooseReason,
    ContextEstimate,
    Decision,
    Drop,
    DropReason,
    Forecast,
    ShedReason,
    Tier,
)
from proxy.channel import pack, unpack
from proxy.ledger import Entry

Plain = tuple[Any, ...]

_DROPS = {str(reason): reason for reason in DropReason}
_REASONS = {str(reason): reason for reason in ChooseReason}
_DROP_WORDS = {reason: str(reason.value) for reason in DropReason}
_REASON_WORDS = {reason: str(reason.value) for reason in ChooseReason}


def facts_out(facts: RequestFacts) -> Plain:
    prompt = facts.prompt
    return (
        facts.model, facts.tier.name, prompt.tokens, prompt.low, prompt.high, facts.output_tokens, facts.session,
        facts.tools, facts.stream, facts.prefix, facts.link_tokens, facts.conversation, facts.priority, facts.share,
        facts.deadline, facts.expected_output,
    )  # fmt: skip


def facts_in(plain: Plain, tiers: Mapping[str, Tier]) -> RequestFacts | None:
    """None: its tier is configured no more."""
    model, name, tokens, low, high, *rest = plain
    tier = tiers.get(name)
    return None if tier is None else RequestFacts(model, tier, ContextEstimate(tokens, low, high), *rest)


def drops_out(decision: Decision) -> Plain:
    return tuple([(drop.backend, _DROP_WORDS[drop.reason]) for drop in decision.drops])


def go_out(go: Go) -> Plain:
    view, f, decision = go.view, go.view.forecast, go.decision
    forecast = None if f is None else (f.queue, f.prefill, f.tpot, f.decode, f.harm, f.demotion)
    reason = _REASON_WORDS[decision.reason] if decision.reason is not None else ""
    drops = drops_out(decision) if decision.drops else ()
    return view.name, reason, view.cached_tokens, view.in_flight, forecast, drops


def go_in(name: str, reason: str, cached: float, in_flight: int, forecast: Plain | None, drops: Plain) -> Go:
    """Of the view, what is asked of one that was chosen."""
    expected = None if forecast is None else Forecast(*forecast)
    view = BackendView(name, cached_tokens=cached, in_flight=in_flight, forecast=expected)
    return Go(Decision(name, _REASONS[reason], _drops_in(drops) if drops else ()), view)


def shed_out(shed: Shed) -> Plain:
    return str(shed.reason.value), shed.retry_after, drops_out(shed.decision)


def shed_in(reason: str, retry_after: int, drops: Plain) -> Shed:
    return Shed(ShedReason(reason), retry_after, Decision(None, None, _drops_in(drops)))


def _drops_in(drops: Plain) -> tuple[Drop, ...]:
    return tuple([Drop(name, _DROPS[reason]) for name, reason in drops])


def trace_out(trace: Trace | None) -> bytes | None:
    if trace is None:
        return None
    decision = trace.decision
    _ = decision.scores  # a function until it is asked for
    return pack(trace)


def trace_in(packed: bytes | None) -> Trace | None:
    found: Trace | None = None if packed is None else unpack(packed)
    return found


def entry_out(entry: Entry) -> Plain:
    refusal, requests, tokens = entry
    return None if refusal is None else pack(refusal), requests, tokens


def entry_in(refusal: bytes | None, requests: Standing | None, tokens: Standing | None) -> Entry:
    return None if refusal is None else unpack(refusal), requests, tokens
