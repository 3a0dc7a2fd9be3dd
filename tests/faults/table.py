"""The fault table: what may go wrong when, and what must come of it. It makes the tests and docs/faults.md.

Rules
1. A cell is a phase of the request × a fault × streamed or not × alone or with another backend that is well × continuation
   off or on. Its outcome is written here by hand, from what docs/behavior.md promises; nothing of the gateway is imported.
2. `-` is a cell that cannot be; WHY_NOT says why, once a fault.
3. `python -m tests.faults.page` writes docs/faults.md from this file; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Where a request is when the fault comes. In their order."""

    QUEUE = "queue"
    CONNECT = "connect"
    SEND = "send"
    PREFILL = "prefill"
    FIRST_EVENT = "first event"
    ROLE = "role only"
    MID_THINKING = "mid thinking"
    MID_TEXT = "mid text"
    MID_TOOL_CALL = "mid tool call"
    LAST_EVENT = "last event"
    REUSE = "keep-alive reuse"


PHASES = {
    Phase.QUEUE: "It waits in the gateway, the one place of the backend is taken; the fault befalls whoever has it.",
    Phase.CONNECT: "The connection is being made, or has been accepted this moment.",
    Phase.SEND: "The backend has accepted and reads nothing; the request has 1 MiB.",
    Phase.PREFILL: "The backend has the request, and has sent no byte.",
    Phase.FIRST_EVENT: "The head of the answer is there, and half of its first event, or the first byte of its body.",
    Phase.ROLE: "An event has come that has nothing in it but the role, and half of a further delta (streamed only).",
    Phase.MID_THINKING: "Thinking has come, and half of a further delta. The client has read it, if it is streamed.",
    Phase.MID_TEXT: "The same, in the text.",
    Phase.MID_TOOL_CALL: "The same, in a tool call's arguments.",
    Phase.LAST_EVENT: "Everything has come but `[DONE]` (streamed) or the last byte of the body.",
    Phase.REUSE: "The request goes out on a connection that served another; as prefill from there.",
}


class Fault(StrEnum):
    """What happens. In the table's order."""

    REFUSE = "refuse"
    RESET = "reset"
    FIN = "FIN"
    STALL = "stall"
    SLOW = "slow"
    TOO_MANY = "429"
    BROKEN = "5xx"
    MALFORMED = "malformed"
    TRUNCATED = "truncated"
    FRAMING = "bad framing"
    ABORT = "abort"
    ERROR = "error event"
    DEATH = "death"
    GONE = "client gone"
    SIGTERM = "SIGTERM"


FAULTS = {
    Fault.REFUSE: "The port is closed: connecting is refused.",
    Fault.RESET: "The connection is reset (RST).",
    Fault.FIN: "The connection is closed (FIN) in the middle of the message.",
    Fault.STALL: "Nothing more comes, ever; connecting: neither accepted nor refused.",
    Fault.SLOW: "Half of the limit passes before each further step; then everything is well.",
    Fault.TOO_MANY: "429 with `Retry-After: 7`.",
    Fault.BROKEN: "503 in vLLM's shape.",
    Fault.MALFORMED: "Bytes that are no HTTP (before the head), no JSON (behind it).",
    Fault.TRUNCATED: "The message ends properly as HTTP, and the answer is not whole.",
    Fault.FRAMING: "A length that is no number (before the head), a chunk size that is none (behind it).",
    Fault.ABORT: "finish_reason `abort`, then a clean end: vLLM told to stop.",
    Fault.ERROR: "An error event (streamed), an error object with status 200 (not streamed).",
    Fault.DEATH: "The process dies: every connection reset, the port closed.",
    Fault.GONE: "The client closes its connection.",
    Fault.SIGTERM: "The gateway is told to stop; the backend goes on answering, within `drain_timeout`.",
}

WHY_NOT = {
    Fault.REFUSE: "A connection that stands is not refused.",
    Fault.SLOW: "Accepting is the kernel's work.",
    Fault.RESET: "",
    Fault.FIN: "",
    Fault.STALL: "",
    Fault.TOO_MANY: "Behind a 200 no other status can come: that is the error event.",
    Fault.BROKEN: "As 429.",
    Fault.MALFORMED: "Who has the place is answered, whatever is in it.",
    Fault.TRUNCATED: "Only a message that has begun can end; not streamed, nothing is missing but the last byte.",
    Fault.FRAMING: "As truncated.",
    Fault.ABORT: "Only an answer that comes can be given up; not streamed, it is a word in a whole body (prefill).",
    Fault.ERROR: "As abort.",
    Fault.DEATH: "",
    Fault.GONE: "",
    Fault.SIGTERM: "",
}


class End(StrEnum):
    """What comes of it: the letter in the table."""

    SAME = "S"
    OTHER = "O"
    ERROR = "E"
    GOES_ON = "G"
    IN_BAND = "I"
    SHED = "Q"
    CANCELLED = "C"


ENDS = {
    End.SAME: "answered, whole, by the backend that was chosen first",
    End.OTHER: "answered, whole, by another backend",
    End.ERROR: "an HTTP error in OpenAI's shape; the fault's own, see below",
    End.GOES_ON: "begun by the backend that was chosen first, finished by another: one stream, one id, everything once",
    End.IN_BAND: "the stream ends with an error event and no `[DONE]`; what came before is a true beginning of the answer",
    End.SHED: "429 with a computed `Retry-After`, when the wait is over",
    End.CANCELLED: "nobody is left to be told; the backend is told to stop at once",
}

# Columns: the phases in their order.
#             queue connect send prefill first role think text call last reuse
STREAMED_ALONE = """
refuse        E     E       -    -       -     -    -     -    -    -    -
reset         S     E       E    E       E     E    I     I    I    S    S
FIN           S     E       E    E       E     E    I     I    I    S    S
stall         Q     E       E    E       E     E    I     I    I    S    E
slow          S     -       S    S       S     S    S     S    S    S    S
429           E     -       E    E       -     -    -     -    -    -    E
5xx           E     -       E    E       -     -    -     -    -    -    E
malformed     -     E       E    E       E     E    I     I    I    S    E
truncated     -     -       E    E       E     E    I     I    I    S    E
bad framing   -     -       E    E       E     E    I     I    I    S    E
abort         -     -       -    E       E     E    I     I    I    -    E
error event   -     -       -    E       E     E    I     I    I    S    E
death         E     E       E    E       E     E    I     I    I    S    E
client gone   C     C       C    C       C     C    C     C    C    C    C
SIGTERM       S     -       S    S       S     S    S     S    S    S    S
"""
STREAMED_WITH_ANOTHER = """
refuse        O     O       -    -       -     -    -     -    -    -    -
reset         S     O       O    O       O     O    I     I    I    S    S
FIN           S     O       O    O       O     O    I     I    I    S    S
stall         Q     O       O    O       O     O    I     I    I    S    O
slow          S     -       S    S       S     S    S     S    S    S    S
429           O     -       O    O       -     -    -     -    -    -    O
5xx           O     -       O    O       -     -    -     -    -    -    O
malformed     -     O       O    O       O     O    I     I    I    S    O
truncated     -     -       O    O       O     O    I     I    I    S    O
bad framing   -     -       O    O       O     O    I     I    I    S    O
abort         -     -       -    O       O     O    I     I    I    -    O
error event   -     -       -    O       O     O    I     I    I    S    O
death         O     O       O    O       O     O    I     I    I    S    O
client gone   C     C       C    C       C     C    C     C    C    C    C
SIGTERM       S     -       S    S       S     S    S     S    S    S    S
"""
STREAMED_GOES_ON = """
refuse        O     O       -    -       -     -    -     -    -    -    -
reset         S     O       O    O       O     O    G     G    G    S    S
FIN           S     O       O    O       O     O    G     G    G    S    S
stall         Q     O       O    O       O     O    G     G    G    S    O
slow          S     -       S    S       S     S    S     S    S    S    S
429           O     -       O    O       -     -    -     -    -    -    O
5xx           O     -       O    O       -     -    -     -    -    -    O
malformed     -     O       O    O       O     O    G     G    G    S    O
truncated     -     -       O    O       O     O    G     G    G    S    O
bad framing   -     -       O    O       O     O    G     G    G    S    O
abort         -     -       -    O       O     O    G     G    G    -    O
error event   -     -       -    O       O     O    G     G    G    S    O
death         O     O       O    O       O     O    G     G    G    S    O
client gone   C     C       C    C       C     C    C     C    C    C    C
SIGTERM       S     -       S    S       S     S    S     S    S    S    S
"""
WHOLE_ALONE = """
refuse        E     E       -    -       -     -    -     -    -    -    -
reset         S     E       E    E       E     -    E     E    E    E    S
FIN           S     E       E    E       E     -    E     E    E    E    S
stall         Q     E       E    E       E     -    E     E    E    E    E
slow          S     -       S    S       S     -    S     S    S    S    S
429           E     -       E    E       -     -    -     -    -    -    E
5xx           E     -       E    E       -     -    -     -    -    -    E
malformed     -     E       E    E       E     -    E     E    E    E    E
truncated     -     -       E    E       E     -    E     E    E    E    E
bad framing   -     -       E    E       E     -    E     E    E    E    E
abort         -     -       -    E       -     -    -     -    -    -    E
error event   -     -       -    E       -     -    -     -    -    -    E
death         E     E       E    E       E     -    E     E    E    E    E
client gone   C     C       C    C       C     -    C     C    C    C    C
SIGTERM       S     -       S    S       S     -    S     S    S    S    S
"""
WHOLE_WITH_ANOTHER = """
refuse        O     O       -    -       -     -    -     -    -    -    -
reset         S     O       O    O       O     -    O     O    O    O    S
FIN           S     O       O    O       O     -    O     O    O    O    S
stall         Q     O       E    E       O     -    O     O    O    O    E
slow          S     -       S    S       S     -    S     S    S    S    S
429           O     -       O    O       -     -    -     -    -    -    O
5xx           O     -       O    O       -     -    -     -    -    -    O
malformed     -     O       O    O       O     -    O     O    O    O    O
truncated     -     -       O    O       O     -    O     O    O    O    O
bad framing   -     -       O    O       O     -    O     O    O    O    O
abort         -     -       -    O       -     -    -     -    -    -    O
error event   -     -       -    O       -     -    -     -    -    -    O
death         O     O       O    O       O     -    O     O    O    O    O
client gone   C     C       C    C       C     -    C     C    C    C    C
SIGTERM       S     -       S    S       S     -    S     S    S    S    S
"""


@dataclass(frozen=True, slots=True)
class Told:
    """What an error says. status: before the first event. outcome: the record's. code: the error's."""

    status: int
    outcome: str
    code: str | None


TOLD = {
    Fault.REFUSE: Told(502, "upstream_connect", "upstream_unreachable"),
    Fault.RESET: Told(502, "upstream_cut", "upstream_cut"),
    Fault.FIN: Told(502, "upstream_cut", "upstream_cut"),
    Fault.STALL: Told(504, "upstream_timeout", "upstream_timeout"),
    Fault.TOO_MANY: Told(429, "upstream_rejected", None),
    Fault.BROKEN: Told(503, "upstream_error", None),
    Fault.MALFORMED: Told(502, "upstream_malformed", "upstream_malformed"),
    Fault.TRUNCATED: Told(502, "upstream_cut", "upstream_cut"),
    Fault.FRAMING: Told(502, "upstream_malformed", "upstream_malformed"),
    Fault.ABORT: Told(502, "upstream_error", "upstream_error"),
    Fault.ERROR: Told(500, "upstream_error", None),
    Fault.DEATH: Told(502, "upstream_cut", "upstream_cut"),
}
"""What a fault is called when the client has to be told."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the proof. spare: another backend is well. goes_on: continuation is "exact"."""

    phase: Phase
    fault: Fault
    stream: bool
    spare: bool
    goes_on: bool
    end: End

    def __str__(self) -> str:
        way = "streamed" if self.stream else "whole"
        spare = "continued" if self.goes_on else "with another" if self.spare else "alone"
        return f"{way}-{spare}-{self.phase}-{self.fault}"

    @property
    def told(self) -> Told:
        """What the client is told where the end is an error."""
        told = TOLD[self.fault]
        if self.fault is Fault.DEATH and self.phase in (Phase.QUEUE, Phase.REUSE):
            return TOLD[Fault.REFUSE]  # the connection was gone by then, and no other to be had
        if self.fault is Fault.STALL and self.phase is Phase.CONNECT:
            return Told(504, "upstream_timeout", "upstream_unreachable")
        if self.fault is Fault.TRUNCATED and not self.stream:
            return TOLD[Fault.MALFORMED]  # half a JSON object, whole as HTTP
        return told


SHEETS = {
    (True, False, False): STREAMED_ALONE,
    (True, True, False): STREAMED_WITH_ANOTHER,
    (True, True, True): STREAMED_GOES_ON,
    (False, False, False): WHOLE_ALONE,
    (False, True, False): WHOLE_WITH_ANOTHER,
}
"""By `Cell.stream`, `Cell.spare`, `Cell.goes_on`."""


def rows(sheet: str) -> Iterator[tuple[Fault, list[str]]]:
    """Of a sheet: the fault and its letters, one a phase."""
    for line in sheet.strip().splitlines():
        letters = line[14:].split()
        assert len(letters) == len(Phase), line
        yield Fault(line[:14].strip()), letters


def cells() -> Iterator[Cell]:
    """Every cell that can be, in the table's order."""
    for way, sheet in SHEETS.items():
        assert [fault for fault, _ in rows(sheet)] == list(Fault)
        for fault, letters in rows(sheet):
            for phase, letter in zip(Phase, letters, strict=True):
                if letter != "-":
                    yield Cell(phase, fault, *way, End(letter))


CELLS = tuple(cells())
