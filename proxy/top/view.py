"""What `tierline top` shows: a line of figures, a line for the queue, a row for each backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from rich.console import Group
from rich.table import Table
from rich.text import Text

from proxy.top.figures import Look, Now

STATES = {
    "healthy": "green",
    "draining": "yellow",
    "returning": "yellow",
    "suspect": "yellow",
    "leaving": "yellow",
}


def view(look: Look, now: Now, where: str) -> Group:
    head = Text.assemble(
        (f"tierline {where}", "bold"), f"   cpu {_share(now.cpu)}   overhead p50 {_seconds(now.overhead_p50)}"
    )
    failed = Text(f"failed {_rate(now.failed)}", style="red" if now.failed else "")
    rates = Text.assemble(
        f"requests {_rate(now.requests)}   ",
        failed,
        f"   turned away {_rate(now.shed)}   tokens in {_rate(now.prompt_tokens)} out {_rate(now.completion_tokens)}"
        f"   first token p50 {_seconds(now.ttft_p50)} p95 {_seconds(now.ttft_p95)}",
    )
    waiting = ", ".join(f"{tier} {count}" for tier, count in sorted(now.queued.items())) or "nobody"
    return Group(head, rates, Text(f"waiting: {waiting}"), _backends(look, now))


def _backends(look: Look, now: Now) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("backend")
    table.add_column("state")
    for title in (
        "in flight",
        "running",
        "waiting",
        "KV",
        "tok/s",
        "prefill ahead",
        "acceptance",
        "tools",
        "live",
    ):
        table.add_column(title, justify="right")
    for one in look.backends:
        state, most = str(one.get("state")), one.get("max_in_flight")
        table.add_row(
            Text(str(one["name"])),
            Text(state, style=STATES.get(state, "red")),
            f"{_count(one.get('in_flight'))}/{_count(most)}",
            _count(one.get("running")),
            _count(one.get("waiting")),
            _share(one.get("kv_usage")),
            _rate(now.by_backend.get(str(one["name"]))),
            _seconds(one.get("queue_seconds")),
            _share(one.get("speculation_acceptance")),
            _share(one.get("tool_integrity")),
            _count(one.get("live_conversations")),
        )
    return table


def as_json(look: Look, now: Now) -> Mapping[str, object]:
    """The same for another program."""
    return {**asdict(now), "backends": [dict(one) for one in look.backends]}


def _number(value: object) -> float | None:
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        else None
    )


def _count(value: object) -> str:
    number = _number(value)
    return "–" if number is None else f"{number:.0f}"


def _share(value: object) -> str:
    number = _number(value)
    return "–" if number is None else f"{number:.0%}"


def _rate(value: object) -> str:
    number = _number(value)
    return "–" if number is None else f"{number:.0f}/s" if number >= 10 else f"{number:.1f}/s"


def _seconds(value: object) -> str:
    number = _number(value)
    if number is None:
        return "–"
    return f"{number * 1000:.1f} ms" if number < 0.1 else f"{number:.2f} s"
