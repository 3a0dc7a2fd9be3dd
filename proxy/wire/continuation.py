"""What is kept of a streamed answer so that another backend can go on with it: its tokens, and what the client has of it.

Rules
1. Ids are asked for by the gateway alone, so they are taken out before anybody else reads the event: where the list stood
   stands `null`, as a backend writes it that was not asked.
2. What the client has is read from the very bytes that went to it, and only when it is needed: until then the bytes are
   kept, and read in batches so that a long answer does not cost its weight in JSON.
3. An answer whose ids have a hole, or that came without its prompt's, is not continued by token.
4. Deltas that are all alike pass unseen (`proxy.lane`), and leave text and ids behind: many of them are read as the one
   delta that says the same (`fold`), before anything that comes later.
5. An answer that is kept for its text alone loses nothing on the way but what comes behind an abort.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from proxy.wire.chatdelta import THOUGHTS
from proxy.wire.sse import Splitter, fields
from proxy.wire.streams import Kept, Shape, choice_index

ABORT = "abort"
"""The finish_reason of what vLLM gives up."""

DONE = b"data: [DONE]\n\n"

MAX_KEPT = 64 * 1024
"""Bytes of events that wait to be read."""

# Inside a string a quote is escaped: behind `{` or `,` it opens a key.
_LIST = rb"\[((?:\s*\d{1,18}\s*,)*\s*(?:\d{1,18}\s*)?)\]"
_IDS = re.compile(rb'([{,]\s*"(prompt_token_ids|token_ids)"\s*:\s*)' + _LIST)
_KEY = b',"token_ids":'
_NEXT = re.compile(_KEY + rb"\[(\d{1,18}(?:,\d{1,18})*)\]")
_GOES_ON = b'"finish_reason":null,'
_NO_IDS = _KEY + b"null"
_FINISH = re.compile(rb'[{,]\s*"finish_reason"\s*:\s*"(\w+)"')
_ABORTED = b'"abort"'
_NOT_REPEATED = frozenset({"choices", "usage", "prompt_token_ids", "prompt_text"})


@dataclass(slots=True)
class SaidCall:
    """A tool call as far as the client has it."""

    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


class Said:
    """What the client has. thoughts: the names its thinking came under. template: what every event repeats, its id among
    it. usage: the client was told. finished: it has a finish_reason."""

    __slots__ = ("_content", "_reasoning", "calls", "finished", "template", "thoughts", "usage")

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: dict[int, SaidCall] = {}
        self.thoughts: tuple[str, ...] = ()
        self.template: dict[str, Any] = {}
        self.usage = False
        self.finished = False

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def add(self, payload: dict[str, Any]) -> None:
        """Take in one event of chat or completions. Raises TypeError or AttributeError for what is none."""
        if not self.template:
            self.template = {key: value for key, value in payload.items() if key not in _NOT_REPEATED}
        self.usage = self.usage or bool(payload.get("usage"))
        for choice in payload.get("choices") or ():
            if text := choice.get("text"):
                self._content.append(text)
            self.finished = self.finished or bool(choice.get("finish_reason"))
            if delta := choice.get("delta"):
                self._delta(delta)

    def _delta(self, delta: dict[str, Any]) -> None:
        if text := delta.get("content"):
            self._content.append(text)
        thoughts = tuple(key for key in THOUGHTS if delta.get(key))
        if thoughts:
            self.thoughts = thoughts
            self._reasoning.append(delta[thoughts[0]])
        for entry in delta.get("tool_calls") or ():
            call = self.calls.setdefault(choice_index(entry), SaidCall())
            function = entry.get("function") or {}
            call.name = function.get("name") or call.name
            if text := function.get("arguments"):
                call.parts.append(text)


class Transcript:
    """One answer, over all its legs. `strip` each event as it comes, `sent` what went to the client."""

    __slots__ = (
        "_closed",
        "_ids",
        "_kept",
        "_parts",
        "_passing",
        "_plain",
        "_said",
        "_shows_usage",
        "_size",
        "_text",
        "begun",
        "finish",
        "intact",
        "prompt_ids",
    )

    def __init__(self, *, shows_usage: bool, text: bool = False) -> None:
        """shows_usage: the client asked for usage. text: no ids were asked for."""
        self._shows_usage = shows_usage
        self._text = text
        self.begun = False
        """The client has something."""
        self.prompt_ids = array("q")
        self._ids = array("q")  # a list takes four times as much, and prompts are long
        self.intact = not text
        """No event with text came without its ids, and none went out that cannot be read."""
        self.finish: str | None = None
        """The backend said that the answer is whole."""
        self._closed = False  # what comes behind an event that the reader refuses is not part of the answer
        self._parts: list[bytes] = []
        self._kept = Splitter()
        self._size = 0
        self._said = Said()
        self._plain: Shape | None = None
        self._passing: Shape | None = None

    @property
    def usable(self) -> bool:
        """Another backend could go on behind the last token."""
        return self.intact and len(self.prompt_ids) > 0

    @property
    def ids(self) -> array[int]:
        """Of the answer's tokens so far."""
        self.fold()
        return self._ids

    def shape(self, plain: Shape) -> Shape | None:
        """Of deltas as they come, which the client is to see as `plain` ones. None: each has to be looked at."""
        if plain is self._plain:
            return self._passing
        self.fold()
        self._plain, self._passing = plain, None
        if self._text:
            self._passing = plain._replace(kept=Kept(b"", [], []))
        elif self.prompt_ids:
            before, found, tail = plain.tail.partition(_NO_IDS)
            if found:
                kept = Kept(before + _KEY + b"[", [], [])
                seen = plain.renamed or (plain.head, plain.tail)
                self._passing = plain._replace(tail=b"]" + tail, renamed=seen, kept=kept)
        return self._passing

    def fold(self) -> None:
        """Take in what passed unseen."""
        kept = self._passing.kept if self._passing is not None else None
        if kept is None or self._plain is None or not kept.texts:
            return
        if kept.ids:
            self._ids.extend(map(int, b",".join(kept.ids).split(b",")))
        head, tail = self._plain.renamed or (self._plain.head, self._plain.tail)
        said = head + b"".join(kept.texts) + tail
        kept.ids.clear()
        kept.texts.clear()
        self.sent(said)

    def strip(self, event: bytes) -> bytes:
        """The event as it would have come had nobody asked for ids."""
        self.fold()
        if self._closed:
            return b"" if self.finish == ABORT else event  # vLLM tells usage behind an abort: of a part
        if self._text:
            if _ABORTED in event and (finish := _FINISH.search(event)) is not None:
                self.finish = finish[1].decode()
                self._closed = self.finish == ABORT
            return event
        plain = None
        if self.prompt_ids and _GOES_ON in event:
            plain = _NEXT.match(event, event.find(_KEY))  # nearly all, as vLLM spells them
        if plain is None:
            return self._strip(event)
        self._ids.extend(map(int, plain[1].split(b",")))
        return event[: plain.start(1) - 1] + b"null" + event[plain.end() :]

    def _strip(self, event: bytes) -> bytes:
        taken = False

        def take(match: re.Match[bytes]) -> bytes:
            nonlocal taken
            taken = True
            ids = [int(id) for id in match[3].split(b",") if id.strip()]
            if match[2] == b"token_ids":
                self._ids.extend(ids)
            elif not self.prompt_ids:
                self.prompt_ids.extend(ids)
            return match[1] + b"null"

        stripped = _IDS.sub(take, event)
        if (finish := _FINISH.search(stripped)) is not None:
            self.finish = finish[1].decode()
            self._closed = self.finish == ABORT
        elif not taken:
            spoken = _spoken(event)
            self._closed = spoken is None
            self.intact = self.intact and not spoken
        return stripped

    def sent(self, data: bytes) -> None:
        """`data` went to the client: any bytes of events, cut anywhere."""
        self.begun = True
        self._parts.append(data)
        self._size += len(data)
        if self._size > MAX_KEPT:
            self._read()

    @property
    def said(self) -> Said:
        """What the client has of the answer; `usable` counts afterwards."""
        self.fold()
        self._read()
        return self._said

    def next_leg(self, ids: Sequence[int]) -> None:
        """Another backend goes on behind `ids`."""
        self.fold()
        self._ids = array("q", ids)
        self.finish = None
        self._closed = False

    def next_text_leg(self) -> None:
        """Another backend goes on behind the text: from here nobody knows the ids."""
        self.next_leg(())
        self._text, self.intact = True, False

    def usage(self) -> dict[str, int]:
        """Counted, for a backend that broke off before it told."""
        prompt, generated = len(self.prompt_ids), len(self.ids)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + generated,
            "completion_tokens": generated,
        }

    def closing(self, last: bytes) -> bytes:
        """The end of a whole answer whose backend broke off behind the finish_reason, with the usage that it owes."""
        said = self.said
        if not self._shows_usage or said.usage or not self.usable:
            return last
        event = b"data: %b\n\n" % orjson.dumps({**said.template, "choices": [], "usage": self.usage()})
        return last.removesuffix(DONE) + event + DONE

    def _read(self) -> None:
        data = b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        for event in self._kept.feed(data):
            _, text = fields(event)
            if text is None or not text.startswith(b"{"):
                continue
            try:
                self._said.add(orjson.loads(text))
            except (ValueError, TypeError, AttributeError):  # more than orjson reads, or a shape nobody knows
                self.intact = False


def _spoken(event: bytes) -> bool | None:
    """Whether an event has something for the client in it. None: nobody can read it, or it ends the stream."""
    _, data = fields(event)
    said = Said()
    try:
        payload = orjson.loads(data or b"{}")
        said.add(payload)
    except (ValueError, TypeError, AttributeError):
        return None
    return None if payload.get("error") else bool(said.content or said.reasoning or said.calls)


def torn(text: str) -> bool:
    """A text that was decoded from ids ends inside a character."""
    return text.endswith("\ufffd")


MOST_TORN = 3
"""Ids that the beginning of one character may take: it has four bytes at most, and one is missing."""
