"""One exposition of several processes' metrics.

Rules
1. Counters and histograms are sums, also over processes that are gone: they never go backwards. What a process counted is
   what it said last: one that does not answer in time is not left out, its last word stands for it.
2. Gauges are the owner's; of those that it has not, the largest. What a process holds (memory, descriptors) is a sum over
   those that run.
"""

from __future__ import annotations

from collections.abc import Iterable

SUMMED = frozenset({"process_virtual_memory_bytes", "process_resident_memory_bytes", "process_open_fds"})
"""Gauges whose sum says something."""


class Family:
    """One metric: its kind, its lines of text, and by name and labels what was counted, and its exemplar."""

    __slots__ = ("exemplars", "head", "kind", "values")

    def __init__(self, head: list[str]) -> None:
        self.head = head
        self.kind = "untyped"
        self.values: dict[str, float] = {}
        self.exemplars: dict[str, str] = {}


Page = dict[str, Family]
"""By name, without OpenMetrics' or Prometheus' ending."""
_END = "# EOF"


def read(text: str) -> Page:
    """An exposition as `Metrics.render` writes it: each family behind its HELP and TYPE."""
    page: Page = {}
    family = Family([])
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2].removesuffix("_total")
            family = page[name] = Family([line])
        elif line.startswith("# TYPE "):
            family.head.append(line)
            family.kind = line.rpartition(" ")[2]
        elif line and line != _END:
            sample, _, exemplar = line.partition(" # ")
            key, _, value = sample.rpartition(" ")
            family.values[key] = float(value)
            if exemplar:
                family.exemplars[key] = exemplar
    return page


def merge(owner: Page, workers: Iterable[Page]) -> Page:
    """`owner` with the workers' values put in."""
    owned = {key for family in owner.values() for key in family.values}
    for page in workers:
        for name, family in page.items():
            into = owner.setdefault(name, Family(family.head))
            into.kind = family.kind
            if family.kind in ("counter", "histogram") or name in SUMMED:
                _add(into, family)
                continue
            for key, value in family.values.items():
                if key not in owned:
                    into.values[key] = max(value, into.values.get(key, value))
    return owner


def keep(gone: Page, page: Page) -> None:
    """A process has ended: what it counted stays."""
    for name, family in page.items():
        if family.kind in ("counter", "histogram"):
            into = gone.setdefault(name, Family(family.head))
            into.kind = family.kind
            _add(into, family)


def _add(into: Family, family: Family) -> None:
    values = into.values
    for key, value in family.values.items():
        values[key] = values.get(key, 0.0) + value
    for key, exemplar in family.exemplars.items():
        into.exemplars[key] = max(exemplar, into.exemplars.get(key, ""), key=_told_at)


def _told_at(exemplar: str) -> float:
    """Its time stands last."""
    return float(exemplar.rpartition(" ")[2]) if exemplar else 0.0


def write(page: Page, *, exemplars: bool = False) -> bytes:
    """exemplars: as OpenMetrics, with them."""
    lines: list[str] = []
    for family in page.values():
        lines += family.head
        for key, value in family.values.items():
            line = f"{key} {_number(value)}"
            if exemplars and key in family.exemplars:
                line += f" # {family.exemplars[key]}"
            lines.append(line)
    if exemplars:
        lines.append(_END)
    return ("\n".join(lines) + "\n").encode()


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
