"""The demo's rows: one a request, every number from the gateway's own record.

Rules
1. A row is printed once, when its record is there, and stays: it scrolls with the terminal.
2. What does not fit the terminal's width is left out from the left: what the client was up to, then the tier.
3. A number that a request does not have (no TTFT without a stream) is a dash, never a zero.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.demo.traffic import Job

Record = Mapping[str, Any]
PLAIN_WIDTH = 114  # columns, where there is no terminal to ask
LONG_PROMPT = 4096  # tokens, from which it matters whether they are cached

LEGEND = (
    "why: how the backend was chosen · prompt: tokens, and how many of them were cached (green: most of a long "
    "one) · TTFT: time to the first content · gap: median time between "
    "chunks with content · TPOT: time per output token after the first · tok/s: output tokens over the whole time"
)


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    value = seconds * 1000
    return f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms"


def why(record: Record) -> str:
    """Why that backend; or, with none, why not any: the commonest reason."""
    if record["backend"] and record["reason"]:
        return str(record["reason"])
    drops = Counter((record.get("drops") or {}).values())
    return str(drops.most_common(1)[0][0]) if drops else str(record.get("error") or "–")


def tokens_per_second(record: Record) -> str:
    tokens, seconds = record["completion_tokens"], record["e2e_seconds"]
    return f"{tokens / seconds:.0f}" if tokens and seconds else "–"


def outcome(record: Record) -> str:
    if record["outcome"] == "ok":
        return f"ok, {record['finish_reason']}" if record["finish_reason"] else "ok"
    status = f" {record['status']}" if record["status"] not in (None, 200) else ""
    return f"{record['outcome']}{status}"


def count(tokens: int | None) -> str:
    return "–" if tokens is None else str(tokens)


def warmth(record: Record) -> str:
    """The style of a prompt: whether a long one was mostly cached."""
    prompt, cached = record["prompt_tokens"], record["cached_tokens"]
    if prompt is None or cached is None or prompt < LONG_PROMPT:
        return ""
    return "bold green" if 2 * cached >= prompt else "bold yellow"


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    width: int
    value: Callable[[Record, Job | None], str]
    right: bool = False
    style: Callable[[Record], str] = lambda record: ""


COLUMNS = (
    Column("what", 18, lambda r, job: job.what if job else r["path"]),
    Column("tier", 8, lambda r, job: r["tier"] or "–"),
    Column("backend", 7, lambda r, job: r["backend"] or "–"),
    Column("why", 15, lambda r, job: why(r)),
    Column("prompt", 6, lambda r, job: count(r["prompt_tokens"]), right=True),
    Column("cached", 6, lambda r, job: count(r["cached_tokens"]), right=True, style=warmth),
    Column("TTFT", 8, lambda r, job: milliseconds(r["ttft_seconds"]), right=True, style=warmth),
    Column("gap", 8, lambda r, job: milliseconds(r["chunk_gap_p50_seconds"]), right=True),
    Column("TPOT", 8, lambda r, job: milliseconds(r["tpot_seconds"]), right=True),
    Column("tok/s", 5, lambda r, job: tokens_per_second(r), right=True),
    Column("outcome", 15, lambda r, job: outcome(r)),
)


class Rows:
    """Prints them, and keeps what the summary needs."""

    def __init__(self, console: Console, jobs: Mapping[str, Job]) -> None:
        self.console = console
        self._jobs = jobs
        self._columns = fitting(COLUMNS, console.width)
        self._colours = iter(("cyan", "magenta", "yellow", "blue", "green"))
        self._colour_of: dict[str, str] = defaultdict(lambda: next(self._colours, "white"))
        self.records: list[Record] = []
        self.surprises = 0  # requests that did not end as they should

    def header(self) -> None:
        line = Text(" ".join(_cell(column, column.title) for column in self._columns).rstrip(), "bold")
        self.console.print(line, soft_wrap=True)

    def add(self, record: Record) -> None:
        job = self._jobs.get(record["request_id"])
        self.records.append(record)
        as_expected = record["outcome"] == (job.expected if job else "ok")
        self.surprises += not as_expected
        line = Text()
        for column in self._columns:
            style = column.style(record)
            if column.title == "backend" and record["backend"]:
                style = f"bold {self._colour_of[record['backend']]}"
            if column.title == "outcome" and record["outcome"] != "ok":
                style = "yellow" if as_expected else "bold red"
            line.append(_cell(column, column.value(record, job)), style).append(" ")
        line.rstrip()
        self.console.print(line, soft_wrap=True)

    def summary(self) -> Table:
        """One line a backend: what it served, and the medians."""
        table = Table(title=None, box=None, header_style="bold", padding=(0, 2, 0, 0))
        table.add_column("backend")
        for title in ("requests", "TTFT", "TTFT p99", "gap", "TPOT", "overhead of the gateway"):
            table.add_column(title, justify="right")
        for backend in sorted({r["backend"] for r in self.records if r["backend"]}):
            mine = [r for r in self.records if r["backend"] == backend]
            table.add_row(
                backend,
                str(len(mine)),
                milliseconds(_quantile(mine, "ttft_seconds", 0.5)),
                milliseconds(_quantile(mine, "ttft_seconds", 0.99)),
                milliseconds(_quantile(mine, "chunk_gap_p50_seconds", 0.5)),
                milliseconds(_quantile(mine, "tpot_seconds", 0.5)),
                milliseconds(_quantile(mine, "overhead_seconds", 0.5)),
            )
        return table


def fitting(columns: Sequence[Column], width: int) -> Sequence[Column]:
    """The columns that the width has room for."""
    while len(columns) > 1 and sum(column.width + 1 for column in columns) - 1 > width:
        columns = columns[1:]
    return columns


def _cell(column: Column, text: str) -> str:
    text = text if len(text) <= column.width else text[: column.width - 1] + "…"
    return text.rjust(column.width) if column.right else text.ljust(column.width)


def _quantile(records: Sequence[Record], key: str, share: float) -> float | None:
    values: list[float] = sorted(r[key] for r in records if r[key] is not None)
    if not values:
        return None
    return (
        statistics.median(values) if share == 0.5 else values[min(len(values) - 1, int(share * len(values)))]
    )


class Tail:
    """Follows a file of JSON lines; a line that is not whole yet waits for the next look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[Record]:
        """The records added since the last look."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)
