"""What part 4 promises, in figures: every traffic on 1+1 and 3+3 backends at 50 to 250 % of capacity.

    python -m tests.matrix --times 1 --trace mooncake_conversation.jsonl --trace azure_conv_2023.csv --out matrix.jsonl

Rules: a line an outcome goes to `--out` as soon as it is there; what is there already is not run again, so that a
stopped run goes on, and a table is printed from what there is. docs/routing.md holds the tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from math import isnan
from pathlib import Path

from policies import PolicyParams
from policies.simulation import REFERENCE, SHAPES, Contest, Fault, FaultKind, Machine, live
from policies.simulation.compare import Source
from proxy.simulate.files import read_trace
from proxy.simulate.table import plain, seconds

PROFILES = {"fp8": "fp8-mtp3-tp2-v17", "bf16": "bf16-dflash8-tp2-v17"}
SECONDS = {"chat": 300.0, "burst": 300.0, "agents": 7200.0, "documents": 14400.0, "mixed": 2400.0}
SECONDS["azure_conv_2023"] = 1800.0
"""Counted, of one backend of each kind; a share of it with more, at least 120. Of another trace: 1800."""
UP_TO_CAPACITY, BEYOND = (0.5, 0.8, 1.0), (1.6, 2.5)
FAULTS = (
    (FaultKind.DOWN, "fp8", 0.0),
    (FaultKind.DOWN, "bf16", 0.0),
    (FaultKind.SLOW, "fp8", 0.25),
    (FaultKind.COLLAPSE, "bf16", 0.02),
)
Key = tuple[str, int, str, float, str]
"""(traffic, backends of each kind, policy, load, fault or "")"""


class Book:
    """Outcomes on disk, by key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[Key, dict[str, object]] = {}
        if path.exists():
            for text in path.read_text().splitlines():
                line = json.loads(text)
                self.lines[tuple(line["key"])] = line  # type: ignore[index]

    def add(self, key: Key, line: dict[str, object]) -> None:
        self.lines[key] = line
        with self.path.open("a") as file:
            file.write(json.dumps({"key": key} | line) + "\n")
        print(*key, *(f"{name}={line[name]:.4g}" for name in ("goodput", "rate") if name in line), flush=True)

    def figure(self, key: Key, name: str) -> float:
        value = self.lines.get(key, {}).get(name)
        return float(value) if isinstance(value, int | float) else float("nan")


def sources(traces: list[Path]) -> Iterator[Source]:
    yield from (SHAPES[name] for name in ("agents", "chat", "mixed", "documents", "burst"))
    yield from map(read_trace, traces)


def contest(source: Source, times: int, fault: Fault | None = None) -> Contest:
    machines = [
        Machine(f"{kind}-{i}" if times > 1 else kind, profile)
        for i in range(1, times + 1)
        for kind, profile in PROFILES.items()
    ]
    length = max(120.0, SECONDS.get(source.name, 1800.0 * times) / times)
    return Contest(tuple(machines), source, 0, length, fault)


def run(source: Source, times: int, book: Book) -> None:
    quiet = contest(source, times)
    key: Key = (source.name, times, REFERENCE, 0.0, "")
    if key not in book.lines:
        book.add(key, {"rate": quiet.capacity()})
    capacity = book.figure(key, "rate")
    for load in UP_TO_CAPACITY + BEYOND:
        # What is promised beside session_hash is promised of agents.
        policies = ["predicted", "least_in_flight"] + ["session_hash"] * (source.name == "agents")
        for policy in policies + [REFERENCE] * (load in UP_TO_CAPACITY):
            one(book, quiet, times, policy, capacity, load, "")
    for kind, name, factor in FAULTS:
        machine = name if times == 1 else f"{name}-1"
        stormy = contest(source, times, Fault(kind, machine, 0.0, 60.0, factor))
        one(book, stormy, times, "predicted", capacity, 0.8, f"{kind} {name}")


def one(
    book: Book, where: Contest, times: int, policy: str, capacity: float, load: float, fault: str
) -> None:
    key: Key = (where.source.name, times, policy, load, fault)
    if key not in book.lines:
        make = None if policy == REFERENCE else live(PolicyParams(name=policy))
        book.add(key, plain(where.run(policy, make, capacity * load, load)))


def table(book: Book, times: int) -> str:
    """A row a traffic: the promises and what came of them."""
    heads = (
        "traffic", "100 % is", "goodput at 50, 80, 100 %", "of the reference", "least_in_flight",
        "TTFT p95 at 100 %", "least_in_flight", "session_hash", "met/s at 160, 250 % of that at 100 %",
        "longest wait", "violations",
    )  # fmt: skip
    out = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for name in dict.fromkeys(key[0] for key in book.lines if key[1] == times):

        def of(policy: str, figure: str, *loads: float, name: str = name) -> list[float]:
            return [book.figure((name, times, policy, load, ""), figure) for load in loads]

        def text(values: list[float]) -> str:
            return ", ".join("–" if isnan(value) else f"{value:.2f}" for value in values)

        ours, reference = (
            of("predicted", "goodput", *UP_TO_CAPACITY),
            of(REFERENCE, "goodput", *UP_TO_CAPACITY),
        )
        (full,) = of("predicted", "met_per_second", 1.0)
        cells = [
            name,
            f"{book.figure((name, times, REFERENCE, 0.0, ''), 'rate'):.3g}/s",
            text(ours),
            text([a / b for a, b in zip(ours, reference, strict=True)]),
            text(of("least_in_flight", "goodput", *UP_TO_CAPACITY)),
            *(seconds(of(p, "ttft95", 1.0)[0]) for p in ("predicted", "least_in_flight", "session_hash")),
            text([value / full for value in of("predicted", "met_per_second", *BEYOND)]),
            seconds(max(of("predicted", "longest", *UP_TO_CAPACITY, *BEYOND))),
            f"{sum(of('predicted', 'violations', *UP_TO_CAPACITY, *BEYOND)):.0f}",
        ]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def fault_table(book: Book, times: int) -> str:
    """Goodput before, during, and from 10 s after each fault's end, beside the calm run's."""
    names = [f"{kind} {name}" for kind, name, _ in FAULTS]
    out = ["| traffic | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1)]
    for name in dict.fromkeys(key[0] for key in book.lines if key[1] == times):
        cells = []
        for fault in names:
            found = book.lines.get((name, times, "predicted", 0.8, fault), {}).get("fault")
            f = found if isinstance(found, dict) else {}
            cells.append(" → ".join(f"{f[x]:.2f}" for x in ("before", "during", "after") if x in f))
            if f:
                cells[-1] += f" ({f['calm']:.2f})"
        out.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--times", type=int, action="append", help="backends of each kind; again for more fleets"
    )
    parser.add_argument("--trace", type=Path, action="append", default=[])
    parser.add_argument("--only", action="append", help="a traffic; all by default")
    parser.add_argument("--out", type=Path, default=Path("matrix.jsonl"))
    arguments = parser.parse_args()
    book = Book(arguments.out)
    for times in arguments.times or [1, 3]:
        for source in sources(arguments.trace):
            if not arguments.only or source.name in arguments.only:
                run(source, times, book)
        print(f"\n{times}+{times}\n\n{table(book, times)}\n\n{fault_table(book, times)}\n", flush=True)


if __name__ == "__main__":
    main()
