"""A decision in words and numbers: every backend, why it was left out or what its score was made of.

Rules: plain data out, made when somebody asks. The last `KEPT` requests are remembered by their id; of others a record
with its decisions tells the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import orjson

from policies.frozen import frozen
from policies.trace import Trace
from policies.types import BackendView

KEPT = 256
MAX_HEADER = 7000
"""Bytes; clients take headers of 8 KiB."""


@frozen
class Story:
    """What became of one request, attempt by attempt. policy: its digest. waited: seconds in the queue."""

    policy: str
    waited: float
    traces: tuple[Trace, ...]


LONG = 32
"""Links of a prompt's chain; a longer one is not remembered, since nothing is told of it."""


def _short(trace: Trace) -> Trace:
    return replace(trace, facts=replace(trace.facts, prefix=()))


class Memory:
    """The stories of the last requests."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._stories: OrderedDict[str, Story] = OrderedDict()

    def keep(self, request_id: str, story: Story) -> None:
        for trace in story.traces:
            if len(trace.facts.prefix) > LONG:
                story = replace(story, traces=tuple([_short(trace) for trace in story.traces]))
                break
        self._stories[request_id] = story
        if len(self._stories) > self._most:
            self._stories.popitem(last=False)

    def add(self, request_id: str, trace: Trace) -> None:
        """One more attempt of a request that is remembered."""
        story = self._stories.get(request_id)
        if story is not None:
            self._stories[request_id] = replace(story, traces=(*story.traces, _short(trace)))

    def find(self, request_id: str) -> dict[str, object] | None:
        story = self._stories.get(request_id)
        return None if story is None else explained(request_id, story)


def header(request_id: str, traces: Sequence[Trace]) -> bytes:
    """What was decided, as JSON for a header."""
    text = orjson.dumps([attempt(trace) for trace in traces])
    if len(text) > MAX_HEADER:
        text = b'"too long for a header: GET /admin/explain/%b"' % request_id.encode()
    return text


def explained(request_id: str, story: Story) -> dict[str, object]:
    """The whole story as plain data."""
    return {
        "request_id": request_id,
        "policy": story.policy,
        "queue_wait_seconds": round(story.waited, 4),
        "attempts": [attempt(trace) for trace in story.traces],
    }


def attempt(trace: Trace) -> dict[str, object]:
    facts, decision = trace.facts, trace.decision
    dropped = {drop.backend: drop.reason.value for drop in decision.drops}
    scores = {score.backend: score for score in decision.scores}
    backends: list[dict[str, object]] = []
    for view in trace.views:
        row: dict[str, object] = {"backend": view.name}
        if view.name in dropped:
            row["dropped"] = dropped[view.name]
        elif (score := scores.get(view.name)) is not None:
            row["total"] = _round(score.total)
            row["terms"] = {name: _round(value) for name, value in score.terms}
        backends.append({**row, **_seen(view)})
    return {
        "backend": decision.backend,
        "reason": decision.reason.value if decision.reason is not None else None,
        "tier": facts.tier.name,
        "unit": trace.unit,
        "prompt_tokens": facts.prompt.tokens,
        "prompt_tokens_low": facts.prompt.low,
        "output_tokens": facts.output_tokens,
        "conversation": facts.conversation,
        "backends": backends,
    }


def _seen(view: BackendView) -> dict[str, object]:
    seen: dict[str, object] = {"cached_tokens": int(view.cached_tokens), "in_flight": view.in_flight}
    if view.forecast is not None:
        seen["predicted_ttft_seconds"] = _round(view.forecast.ttft)
        seen["predicted_tpot_seconds"] = _round(view.forecast.tpot)
    return seen


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def lines(story: dict[str, object]) -> Sequence[str]:
    """For a terminal."""
    out = [f"request {story['request_id']}, policy {story['policy']}, waited {story['queue_wait_seconds']} s"]
    attempts = story["attempts"]
    assert isinstance(attempts, list)
    for number, one in enumerate(attempts, 1):
        chosen = one["backend"] or "none"
        out.append(
            f"attempt {number}: {chosen} ({one['reason'] or 'nowhere to go'}); tier {one['tier']}, about "
            f"{one['prompt_tokens']} prompt tokens, at least {one['prompt_tokens_low']}"
        )
        for row in one["backends"]:
            if "dropped" in row:
                out.append(f"  {row['backend']}: left out, {row['dropped']}")
                continue
            terms = ", ".join(f"{name} {value:g}" for name, value in row.get("terms", {}).items())
            mark = "→" if row["backend"] == one["backend"] else " "
            total = row.get("total")
            out.append(
                f"{mark} {row['backend']}: {total if total is not None else '?'} {one['unit']} = {terms or '?'}; "
                f"{row['cached_tokens']} tokens cached, {row['in_flight']} in flight"
            )
    return out
