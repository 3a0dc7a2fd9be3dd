"""The rest of a broken answer: raw text that another backend generates becomes the events that the client still lacks.

Rules
1. The whole answer is told again: the raw text of its first legs, then the text that comes, through a fresh engine. What
   the client has is skipped (`continuationskip`), so a cut inside thinking or inside a call is like any other.
2. How the raw text reads (whether it begins inside thinking, whether tags mean anything) is known from what the client
   got of it: the first reading that agrees with that is the right one. Where none agrees nothing is sent: `Differs`.
3. Events carry what the first leg's carried: its id, its time, its model. Usage is the prompt's and all legs' tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.wire.chatdelta import write_delta
from proxy.wire.continuation import Said
from proxy.wire.continuationskip import Differs, Skip, reach_json, reach_text
from proxy.wire.streams import CompletionsStream, MalformedStream
from proxy.wire.toolcalls import FinishedCall, ToolEngine
from proxy.wire.toolevents import (
    CallArguments,
    CallStart,
    Content,
    Counters,
    Event,
    Finish,
    Pass,
    Reasoning,
)
from proxy.wire.toolstream import dumps

NewEngine = Callable[[bool], ToolEngine]
"""An engine for raw text; its argument: the text begins inside thinking."""


@dataclass(frozen=True, slots=True)
class Legs:
    """What earlier legs left. raw: all they generated, special tokens included. prompt, generated: tokens. thinks: the
    prompt ends inside thinking, where the client's part cannot tell. shows_usage: the client asked for usage."""

    said: Said
    raw: str
    prompt: int
    generated: int
    thinks: bool
    shows_usage: bool


class Retelling:
    """One reading of the raw text. engine None: all of it is content. Raises Differs where the client has another answer."""

    def __init__(self, said: Said, engine: ToolEngine | None) -> None:
        self.engine = engine
        self._said = said
        self._content = Skip(said.content, reach_text)
        self._reasoning = Skip(said.reasoning, reach_text)
        self._calls = {index: Skip(call.arguments, reach_json) for index, call in said.calls.items()}
        self._begun: set[int] = set()

    def feed(self, text: str) -> list[Event]:
        """What the client lacks of what `text` says."""
        found = self.engine.content(text) if self.engine is not None and text else [Content(text)]
        return self._lacking([Content(text)] if isinstance(found, Pass) else found)

    def finish(self, reason: str) -> list[Event]:
        """The end, Finish last."""
        found = self.engine.finish(reason) if self.engine is not None else [Finish(reason)]
        events = self._lacking(found)
        if self.lacks:
            raise Differs("the answer ended before what the client has of it")
        return events

    @property
    def lacks(self) -> bool:
        """The client has something that has not come again."""
        calls = (index not in self._begun or skip.lacks for index, skip in self._calls.items())
        return self._content.lacks or self._reasoning.lacks or any(calls)

    def _lacking(self, events: Sequence[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            if isinstance(event, Content | Reasoning):
                skip = self._content if isinstance(event, Content) else self._reasoning
                if text := skip.feed(event.text):
                    out.append(type(event)(text))
            elif isinstance(event, CallArguments):
                known = self._calls.get(event.call)
                if text := event.text if known is None else known.feed(event.text):
                    out.append(CallArguments(event.call, text))
            elif isinstance(event, CallStart):
                had = self._said.calls.get(event.call)
                if had is not None and had.name != event.name:
                    raise Differs(f"call {event.call} is of another tool")
                if had is None:
                    out.append(event)
                self._begun.add(event.call)
            else:
                out.append(event)
        return out


def retell(legs: Legs, new_engine: NewEngine) -> tuple[Retelling, list[Event]]:
    """The reading that agrees with what the client has, and what it says beyond that. Raises Differs if none does."""
    said = legs.said
    thinks = bool(said.reasoning) or (legs.thinks and not said.content)
    readings: tuple[bool | None, ...] = (True, False, None) if thinks else (False, None, True)
    why: Differs | None = None
    for reading in readings:
        telling = Retelling(said, None if reading is None else new_engine(reading))
        try:
            events = telling.feed(legs.raw)
            if telling.lacks and any(_speaks(event) for event in events):
                raise Differs("the answer reads otherwise")
        except Differs as differs:
            why = why or differs
        else:
            return telling, events
    assert why is not None
    raise why


def _speaks(event: Event) -> bool:
    return isinstance(event, CallStart) or (
        isinstance(event, Content | Reasoning | CallArguments) and not event.text.isspace()
    )


class ContinuedStream(CompletionsStream):
    """Reads the continuing request's answer (`/v1/completions`); what it forwards goes on with the client's stream.

    Raises Differs when it is made, before anything is asked for, if the legs so far do not agree with the client's part.
    """

    __slots__ = ("_legs", "_owed", "_telling")

    def __init__(self, legs: Legs, new_engine: NewEngine) -> None:
        super().__init__()
        self._legs = legs
        self._telling, self._owed = retell(legs, new_engine)

    @property
    def calls(self) -> list[FinishedCall]:
        """All calls of the answer, as they were told again."""
        engine = self._telling.engine
        return engine.calls if engine is not None else []

    def counters(self) -> Counters:
        engine = self._telling.engine
        return engine.counters if engine is not None else Counters()

    def _read(self, payload: dict[str, Any]) -> tuple[bool, bool]:
        keep, _ = super()._read(payload)
        usage = payload.get("usage")
        if isinstance(usage, dict):
            self.usage = self._total(usage)
        return keep, False  # nothing is learned: every event is told again

    def _total(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Usage over all legs. The details of the prompt are the first leg's, which never told them."""
        legs, own = self._legs, usage.get("completion_tokens")
        generated = legs.generated + (own if type(own) is int else 0)
        return {
            "prompt_tokens": legs.prompt,
            "total_tokens": legs.prompt + generated,
            "completion_tokens": generated,
        }

    def _forward(self, event: bytes, payload: dict[str, Any], keep: bool) -> bytes:
        if not keep:
            return b""
        choices = payload.get("choices")
        if not choices:
            shown = self._legs.shows_usage and not self._legs.said.usage and self.usage
            return self._event_of({"choices": [], "usage": self.usage}) if shown else b""
        choice = choices[0]
        events, reason = self._owed, None
        self._owed = []
        try:
            if text := choice.get("text"):
                events += self._telling.feed(text)
            if given := choice.get("finish_reason"):
                events += self._telling.finish(given)
                last = events.pop()
                assert isinstance(last, Finish)
                reason = self.finish_reason = last.reason
        except Differs as differs:
            raise MalformedStream(str(differs)) from None
        self.content = any(map(_speaks, events))
        told = self._choice(events, reason)
        return b"" if told is None else self._event_of({"choices": [told]})

    def _choice(self, events: Sequence[Event], reason: str | None) -> dict[str, Any] | None:
        delta = write_delta(events, self._legs.said.thoughts or ("reasoning",))
        if not delta and reason is None:
            return None
        return {"index": 0, "delta": delta, "finish_reason": reason}

    def _event_of(self, more: dict[str, Any]) -> bytes:
        return b"data: %b\n\n" % dumps({**self._legs.said.template, **more})


class ContinuedText(ContinuedStream):
    """The same for a client of `/v1/completions`: the text is what it is."""

    __slots__ = ()

    def _choice(self, events: Sequence[Event], reason: str | None) -> dict[str, Any] | None:
        text = "".join(event.text for event in events if isinstance(event, Content))
        if not text and reason is None:
            return None
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
