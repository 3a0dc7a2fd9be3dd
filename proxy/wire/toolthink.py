"""Thinking: sent as it comes up to what may be a call, then held, for it is a call only if nothing follows.

Rules: the text of a call found in thinking is kept; any more thinking (or the answer itself, which the caller sees)
releases it as thinking, unchanged. Only calls that were closed in the text, with nothing but blanks behind, are
promoted. In thinking that nobody closed one word may stick to the last closer: noise, for prose goes on behind a
blank, and without the call there is no answer at all. At most MAX_HELD characters are held.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from proxy.wire.coerce import Toolset
from proxy.wire.jsonstring import End
from proxy.wire.toolevents import CallEnd, CallStart, Content, Counters, Event
from proxy.wire.tooltext import TextMachine

MAX_HELD = 1 << 20
LONGEST_STRAY = 16
_STRAY = re.compile(rf"</(?:tool_call|function)>\w{{1,{LONGEST_STRAY}}}\s*\Z")
_STRAY_REACH = 64
"""More characters than closer, word and a few blanks have."""


class Promoted(NamedTuple):
    """The thinking before the calls that is still to be sent, and the events of the calls."""

    text: str
    events: list[Event]


class Thinking:
    """`feed` returns what may be sent; `held` while something waits. unclosed: it is thinking because no `</think>`
    came, not because the backend said so."""

    def __init__(self, tools: Toolset, *, unclosed: bool = False) -> None:
        self._tools = tools
        self._unclosed = unclosed
        self._restart()

    def _restart(self) -> None:
        self._machine: TextMachine | None = None  # most answers think in no field of their own, or not at all
        self._raw: list[str] = []
        self._size = 0
        self._events: list[Event] = []
        self.held = False

    def _begin(self) -> TextMachine:
        self.counters = Counters()
        self._machine = TextMachine(self._tools, self.counters, _place)
        return self._machine

    @property
    def begun(self) -> bool:
        return self._machine is not None

    @property
    def had_calls(self) -> bool:
        return bool(self._events)

    @property
    def free(self) -> bool:
        """Text without line ends and what may open a call or code passes and changes nothing."""
        machine = self._machine
        return machine is not None and not self.held and machine.idle and machine.code.settled

    def feed(self, text: str) -> str:
        if not self.held and (self._machine or self._begin()).passes(text):
            return text
        said: list[str] = []
        start = 0
        while start < len(text):
            tag = text.find("<", start + 1)
            stop = len(text) if tag < 0 else tag
            said.append(self._piece(self._machine or self._begin(), text[start:stop]))
            start = stop
        return "".join(said)

    def _piece(self, machine: TextMachine, text: str) -> str:
        """A piece with no "<" but at its start: at most one thing ends in it."""
        self._raw.append(text)
        self._size += len(text)
        machine.feed(text)
        more = machine.take()
        events: list[Event] = [event for event in more if not isinstance(event, Content)]
        spoken = [
            at for at, event in enumerate(more) if isinstance(event, Content) and not event.text.isspace()
        ]
        if self._events and not (spoken and not self._stray()) and self._size <= MAX_HELD:
            self._events += events
            return ""
        if spoken:  # what came before it was no call
            events = [event for event in more[spoken[-1] :] if not isinstance(event, Content)]
        if self._size > MAX_HELD and (self._events or events):
            return self.release()
        if events:
            # blanks and text before an opener are out already: what is held begins with the opener
            self._events = events
            self.held = True
            return ""
        self._events = []
        return self._say(machine)

    def _stray(self) -> bool:
        """What was said behind the last call is no more than a word that sticks to it."""
        return self._unclosed and _STRAY.search("".join(self._raw[-_STRAY_REACH:])) is not None

    def _say(self, machine: TextMachine) -> str:
        """All raw text but what the machine still holds."""
        raw = "".join(self._raw)
        keep = machine.unsaid
        said = raw[: len(raw) - keep] if keep else raw
        rest = raw[len(said) :]
        self._raw = [rest] if rest else []
        self._size = len(rest)
        self.held = bool(rest)
        return said

    def release(self) -> str:
        """Everything held, as thinking; starts anew."""
        raw = "".join(self._raw)
        self._restart()
        return raw

    def finish(self, alone: bool) -> Promoted | str:
        """The end: calls to promote if they are `alone`, else the text that is still held."""
        if self._machine is None:
            return ""
        self._machine.finish(End.STOP)
        more = self._machine.take()
        spoke = any(isinstance(event, Content) and not event.text.isspace() for event in more)
        calls = self._events + [event for event in more if not isinstance(event, Content)]
        ends = [event for event in calls if isinstance(event, CallEnd)]
        whole = bool(ends) and all(end.complete for end in ends) and not self._machine.forced
        if alone and whole and not (spoke and not self._stray()):
            return Promoted("", calls)
        self._events = calls
        return "".join(self._raw)


def _place(name: str) -> CallStart:
    return CallStart(0, "", name)
