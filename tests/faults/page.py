"""The tables of docs/faults.md, from the fault table: `python -m tests.faults.page` writes them between its two marks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.faults.table import CELLS, ENDS, FAULTS, PHASES, SHEETS, TOLD, WHY_NOT, Fault, Phase, rows

PATH = Path(__file__).parents[2] / "docs" / "faults.md"
BEGIN = "<!-- from here: python -m tests.faults.page -->\n"
END = "<!-- to here -->\n"
TITLES = {
    (True, False, False): "Streamed, no other backend",
    (True, True, False): "Streamed, another backend is well",
    (True, True, True): 'Streamed, another backend is well, continuation = "exact"',
    (False, False, False): "Not streamed, no other backend",
    (False, True, False): "Not streamed, another backend is well",
}


def _table(head: list[str], body: Iterable[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in body:
        yield f"| {' | '.join(row)} |"
    yield ""


def _lines() -> Iterator[str]:
    yield ""
    yield from _table(["", "the request is"], ([f"**{end}**", what] for end, what in ENDS.items()))
    for way, sheet in SHEETS.items():
        count = sum((cell.stream, cell.spare, cell.goes_on) == way for cell in CELLS)
        yield f"### {TITLES[way]} ({count} cells)"
        yield ""
        yield from _table(["", *Phase], ([str(fault), *letters] for fault, letters in rows(sheet)))
    yield from ("### Phases", "")
    yield from _table(["phase", "the fault comes when"], ([str(p), what] for p, what in PHASES.items()))
    yield from ("### Faults", "")
    yield from _table(
        ["fault", "what happens", "told as", "where it is `-`"],
        ([str(fault), what, _told(fault), WHY_NOT[fault]] for fault, what in FAULTS.items()),
    )


def _told(fault: Fault) -> str:
    told = TOLD.get(fault)
    return f"{told.status}, `{told.outcome}`" if told is not None else ""


def text(page: str) -> str:
    """The page with its tables as they have to be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(_lines()) + END + after


if __name__ == "__main__":
    PATH.write_text(text(PATH.read_text("utf-8")), "utf-8")
