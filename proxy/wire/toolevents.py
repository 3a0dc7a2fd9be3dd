"""What the tool-call engine says, and what it counts.

Rules: events are tuples, made per delta and cheap. A call is one `CallStart`, any number of `CallArguments` whose
texts make one JSON object, one `CallEnd`; a call that ended with `complete` false was cut or cannot be mended, and
its text does not decode on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, NamedTuple


class Content(NamedTuple):
    """Text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """Text of the model's thinking."""

    text: str


class CallStart(NamedTuple):
    """A call begins: its place in the answer (`call`, from 0), its id, the declared name."""

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """More of the call's arguments, JSON text."""

    call: int
    text: str


class CallEnd(NamedTuple):
    """No more arguments. `complete` false: cut, not to be run."""

    call: int
    complete: bool


class Finish(NamedTuple):
    """The choice is over. `reason` None: the backend never said why."""

    reason: str | None


Event = Content | Reasoning | CallStart | CallArguments | CallEnd | Finish


class Pass:
    """The answer "nothing changes: forward what came"."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "PASS"


PASS: Final = Pass()


@dataclass(slots=True)
class Counters:
    """What was seen and done in one answer, each a number of times.

    Calls by dialect: xml, json (in tags), guided (JSON by tool_choice), parsed (by the backend).
    Repairs: syntax (missing or foreign tags, loose JSON), values (converted to the schema's type), ids, arguments
    (doubly encoded, markup or nothing in them), leaks (bits of markup beside calls taken out), reasons.
    promoted: calls found at the end of reasoning. released: text held as a possible call that was none.
    cut: calls that ended unfinished. failures: values that do not convert. duplicates: keys given twice;
    suspected: signs of text corrupted by speculation. dropped: calls that tool_choice forbids or nobody can name.
    undeclared: calls the backend parsed for a name the request does not declare.
    """

    xml: int = 0
    json: int = 0
    guided: int = 0
    parsed: int = 0
    repaired_syntax: int = 0
    repaired_values: int = 0
    repaired_ids: int = 0
    repaired_arguments: int = 0
    repaired_leaks: int = 0
    repaired_reasons: int = 0
    promoted: int = 0
    released: int = 0
    cut: int = 0
    failures: int = 0
    duplicates: int = 0
    suspected: int = 0
    dropped: int = 0
    undeclared: int = 0

    def add(self, other: Counters) -> None:
        """Take another's numbers in."""
        for name in _COUNTERS:
            more = getattr(other, name)
            if more:
                setattr(self, name, getattr(self, name) + more)

    def calls(self) -> int:
        return self.xml + self.json + self.guided + self.parsed

    def repaired(self) -> int:
        """All repairs, whatever the kind."""
        return sum(getattr(self, name) for name in _COUNTERS if name.startswith("repaired_"))


_COUNTERS: Final = tuple(field.name for field in fields(Counters))
